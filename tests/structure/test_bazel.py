"""The Bazel build: the same library from the same list of sources, built for real and loaded."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from hvd8bit import native

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Runs in a process of its own, for none can register the ops twice. Prints the library's ops, and what it
# encodes a list of two tensors to.
_USE = """
import json, sys
import numpy as np
import tensorflow as tf
from hvd8bit import native, ops
from hvd8bit.encoding import Encoding

library = tf.load_op_library(sys.argv[1])
native.load = lambda: library
random = np.random.default_rng(8)
tensors = [tf.constant(random.normal(size=shape), tf.float32) for shape in ((3, 1000), (77,))]
payload, splits = ops.encode_list(tensors, 2, Encoding())
names = sorted(name for name in dir(library) if name.startswith("hvd8bit_"))
from tensorflow.python.framework import kernels
registered = kernels.get_registered_kernels_for_op("Hvd8bitEncodeList").kernel
names += sorted(kernel.device_type for kernel in registered)
print("answer:" + json.dumps([names, splits.numpy().tolist(), payload.numpy().tobytes().hex()]))
"""


def use(library: pathlib.Path) -> list:
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _USE, str(library)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (answer,) = [line for line in done.stdout.splitlines() if line.startswith("answer:")]
    return json.loads(answer.removeprefix("answer:"))


def bazel(output_root: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    # --batch leaves no server behind, and the output root is new: nothing of an earlier build can help.
    command = ["bazel", f"--output_user_root={output_root}", "--batch", *arguments]
    # One architecture, where there is a CUDA compiler: that takes seconds.
    env = {"HVD8BIT_CUDA_ARCHS": "90", **os.environ, "PYTHON_BIN_PATH": sys.executable}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)


@pytest.fixture(scope="module")
def built_by_bazel(tmp_path_factory):
    """The library, built by Bazel."""
    if shutil.which("bazel") is None:
        pytest.skip("no bazel on this machine (Debian and Ubuntu: apt-get install bazel-bootstrap)")
    output_root = tmp_path_factory.mktemp("bazel")
    built = bazel(output_root, "build", "//...")
    assert built.returncode == 0, built.stderr[-8000:]
    where = bazel(output_root, "info", "bazel-bin")
    yield pathlib.Path(where.stdout.strip()) / "_hvd8bit_ops.so"
    # Bazel takes the write permission off its folders, and pytest's own cleaning would stumble over them.
    subprocess.run(["chmod", "-R", "u+w", str(output_root)], check=False)
    shutil.rmtree(output_root, ignore_errors=True)


def test_bazel_builds_the_same_library(built_by_bazel):
    ours = native.find()
    if ours is None:
        pytest.skip("the op library is not built by setup.py, so there is nothing to compare with")
    assert use(built_by_bazel) == use(ours)


def test_bazel_leaves_no_links_in_the_tree(built_by_bazel):
    assert not list(ROOT.glob("bazel-*"))
