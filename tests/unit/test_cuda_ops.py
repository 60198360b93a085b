"""The ops' CUDA kernels as TensorFlow calls them, on the CPU: built over emulated CUDA and registered for it.

The tests of the ops run with that library in a process of their own, since no process can have the ops twice.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


def run(command: list[str], library: str | pathlib.Path = "") -> subprocess.CompletedProcess:
    """Runs a command in the repository; tests in it take `library` for the op library."""
    env = {**os.environ, "HVD8BIT_TEST_LIBRARY": str(library)} if library else None
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=580, check=False)


@pytest.fixture(scope="module")
def library(emulated_cuda) -> pathlib.Path:
    """An op library with the CUDA kernels alone."""
    codec = pathlib.Path(emulated_cuda._name)
    out = codec.parent / "_hvd8bit_emulated_ops.so"
    # The codec's objects lie beside its library; they are linked in, as in the real one.
    command = [
        *("g++", "-shared", "-O1", "-DHVD8BIT_CUDA", "-DHVD8BIT_CUDA_DEVICE=tensorflow::DEVICE_CPU", f"-I{ROOT}"),
        *("-isystem" + flag[2:] if flag.startswith("-I") else flag for flag in tf.sysconfig.get_compile_flags()),
        *("-fPIC", "-fvisibility=hidden", "tf_ops/ops/codec_ops.cc", "tf_ops/kernels/cuda_kernels.cc"),
        *map(str, codec.parent.glob("*.o")),
        *tf.sysconfig.get_link_flags(),
        *("-o", str(out)),
    ]
    done = run(command)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


SELECTED = (
    "cases_cuda_ops.py",
    "test_codec.py::test_edge_inputs",
    "test_codec.py::test_every_length_of_up_to_three_blocks",
    "test_codec.py::test_lists_of_mixed_tensors",
    "test_codec.py::test_nothing_to_encode",
    "test_codec.py::test_blocks_above_the_kept_sum",
    "test_codec.py::test_every_16_bit_number",
    "test_codec.py::test_results_are_rounded_to_the_dtype",
    "test_codec.py::test_the_factor_is_a_float64",
    "test_codec.py::test_a_traced_op_gives_the_same",
    "test_ops.py::test_attributes_out_of_range",
    "test_ops.py::test_every_op_checks_its_attributes",
    "test_ops.py::test_shard_out_of_range",
    "test_ops.py::test_inputs_of_the_wrong_rank",
    "test_ops.py::test_tensors_that_somebody_holds_stay",
    "test_ops.py::test_a_list_with_the_same_tensor_twice",
    "test_ops.py::test_the_payload_is_not_changed",
)


def test_the_ops_on_emulated_cuda(library):
    # One data type: test_cuda.py has the kernels do all of them.
    only = ["-k", "not static_tree and not mantissa and not linear"]
    files = [str(HERE / name) for name in SELECTED]
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *only, *files], library)
    # The end of the output: before it every error was logged.
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1500:]
    assert " passed" in done.stdout
