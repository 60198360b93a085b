"""The package as a whole: what importing it loads, and its public names."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import hvd8bit


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_importing_loads_neither_tensorflow_nor_horovod():
    code = (
        "import sys, json, hvd8bit; dir(hvd8bit); hvd8bit.__version__; dir(hvd8bit.parallel); "
        "hvd8bit.codebook('linear'); hvd8bit.Selection(3); "
        "from hvd8bit import layout, encoding, reference, wire, native; native.find(), native.build_info(); "
        "print(json.dumps(sorted(m.partition('.')[0] for m in sys.modules)))"
    )
    loaded = set(json.loads(run_python(code)))
    assert not loaded & {"tensorflow", "horovod", "keras", "tf_keras"}
    assert "numpy" in loaded


@pytest.mark.parametrize("name", hvd8bit.__all__)
def test_public_names_resolve(name):
    assert getattr(hvd8bit, name) is not None
    assert name in dir(hvd8bit)


def test_the_fixed_public_names_are_there():
    fixed = {
        "EightBit",
        "Selection",
        "codebook",
        "encode",
        "decode",
        "allreduce",
        "grouped_allreduce",
        "broadcast_variables",
        "DistributedGradientTape",
        "keras",
    }
    assert fixed <= set(hvd8bit.__all__)


def test_an_unknown_name():
    with pytest.raises(AttributeError, match=r"module 'hvd8bit' has no attribute 'eightbit'; it has .*EightBit"):
        hvd8bit.eightbit  # noqa: B018


def test_floatx_does_not_matter():
    """A global float dtype that is set before the package's first use changes no code and no result."""
    code = (
        "import numpy as np, tensorflow as tf; tf.keras.backend.set_floatx('float16'); import hvd8bit; "
        "x = np.linspace(-1, 1, 5000, dtype=np.float32) ** 3; e = hvd8bit.encode(x); d = hvd8bit.decode(e); "
        "print(hvd8bit.codebook('dynamic_tree').dtype, d.dtype.name, "
        "e.codes.numpy().tobytes().hex() + d.numpy().tobytes().hex())"
    )
    import numpy as np

    x = np.linspace(-1, 1, 5000, dtype=np.float32) ** 3
    encoded = hvd8bit.encode(x)
    expected = encoded.codes.numpy().tobytes().hex() + hvd8bit.decode(encoded).numpy().tobytes().hex()
    assert run_python(code).split() == ["float32", "float32", expected]


def test_backend_forced_by_the_environment():
    """An unknown one is an error that names those that run here."""
    code = (
        "import hvd8bit\n"
        "try: hvd8bit.encode([1.0])\n"
        "except Exception as error: print(type(error).__name__, ' '.join(str(error).split()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "HVD8BIT_CPU": "sse9"},
        check=False,
    )
    said = done.stdout.strip().splitlines()[-1]
    assert said.startswith("InvalidArgumentError")
    assert "HVD8BIT_CPU must name a back end that was built and that this CPU runs (" in said
    assert "scalar" in said
    assert "got 'sse9'; unset it to take the fastest" in said
