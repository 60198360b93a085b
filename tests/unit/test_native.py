"""How the op library is found, and what is said when it does not fit."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys

import pytest
import tensorflow as tf

from hvd8bit import counting, native, ops
from hvd8bit.encoding import Encoding


def test_the_library_at_hand_fits():
    assert native.find() is not None
    assert native.mismatch(tf.__version__) is None
    assert native.build_info()["tensorflow_version"] == tf.__version__
    assert hasattr(native.load(), "hvd8bit_encode_list")


def test_a_saved_function_in_another_process(tmp_path):
    class Module(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([100])])
        def encoded(self, x):
            counting.count(tf.size(x))
            return ops.encode_list([x], 1, Encoding())[0]

    tf.saved_model.save(Module(), str(tmp_path / "saved"))
    load = "import sys, hvd8bit, tensorflow as tf; hvd8bit.load_ops(); module = tf.saved_model.load(sys.argv[1]); "
    run = "print(len(module.encoded(tf.ones([100])).numpy()))"
    done = subprocess.run(
        [sys.executable, "-c", load + run, str(tmp_path / "saved")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == len(ops.encode_list([tf.ones([100])], 1, Encoding())[0])


def test_back_ends():
    assert native.backends()[-1] == "scalar"
    assert native.backends() == native.build_info()["backends"]


@pytest.mark.parametrize("found", ["2.18.0", "2.18.1", "2.18.1-rc0"])
def test_patch_versions_do_not_matter(found):
    assert native.mismatch(found, {"tensorflow_version": "2.18.1"}) is None


@pytest.mark.parametrize("found", ["2.17.1", "2.19.0", "3.18.1", "2.1.8"])
def test_another_minor_version(found):
    message = native.mismatch(found, {"tensorflow_version": "2.18.1"})
    assert "built for TensorFlow 2.18.1" in message
    assert f"TensorFlow {found} is installed" in message
    assert "loads only with 2.18.x" in message
    assert "make setup" in message
    assert "pip install --no-build-isolation" in message


def test_no_build_info():
    assert "built for TensorFlow an unknown version" in native.mismatch("2.18.1", {})


@pytest.fixture
def fresh_load():
    """`load` caches the library; what a test makes it do must not stay."""
    native.load.cache_clear()
    yield native.load
    native.load.cache_clear()


def test_loading_beside_another_tensorflow(monkeypatch, fresh_load):
    monkeypatch.setattr(native, "build_info", lambda: {"tensorflow_version": "2.11.0"})
    with pytest.raises(ImportError) as raised:
        fresh_load()
    assert f"built for TensorFlow 2.11.0, but TensorFlow {tf.__version__} is installed" in str(raised.value)
    assert "undefined symbol" not in str(raised.value)


def test_a_missing_library(monkeypatch, fresh_load, tmp_path):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "none.so")
    assert native.find() is None
    with pytest.raises(ImportError, match=r"op library is missing \(.*none\.so\)\. Build it .*make setup.*pip install"):
        fresh_load()


def test_a_library_that_does_not_load(monkeypatch, fresh_load, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(native, "LIBRARY", broken)
    with pytest.raises(ImportError) as raised:
        fresh_load()
    message = str(raised.value)
    assert f"built for TensorFlow {tf.__version__}, does not load with TensorFlow {tf.__version__}" in message
    assert "rebuild it" in message
    assert "the loader says" in message


# The library loads without CUDA and without a driver, whatever it was built with.


def tool(name: str, *arguments: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"no {name} here")
    done = subprocess.run([name, *arguments, str(native.LIBRARY)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_needs_no_cuda_library():
    """CUDA's runtime is inside; a symbol of it taken from elsewhere would be TensorFlow's GPU wheel's."""
    assert not re.findall(r"\blibcud\w*\.so\S*", tool("ldd"))
    undefined = tool("nm", "-D", "--undefined-only")
    assert "_ZN10tensorflow" in undefined
    assert not re.findall(r"\S*cuda\S*", undefined, re.I)


def test_it_gives_away_no_symbol_of_cudas():
    """Another library in the process may have a CUDA runtime of its own."""
    assert not re.findall(r"\scuda[A-Z]\w*", tool("nm", "-D", "--defined-only"))


@pytest.mark.parametrize("op", ["Hvd8bitEncodeList", "Hvd8bitReduceShards", "Hvd8bitDecodeList"])
def test_kernels_are_registered_for_what_was_built(op):
    from tensorflow.python.framework import kernels

    native.load()
    devices = {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(op).kernel}
    assert devices == ({"CPU", "GPU"} if native.build_info()["cuda_architectures"] else {"CPU"})


def test_cudas_version():
    runtime, driver = native.cuda_versions()
    info = native.build_info()
    if info["cuda_architectures"]:
        assert f"{runtime // 1000}.{runtime % 1000 // 10}" == info["cuda_version"]
    else:
        assert (runtime, driver) == (0, 0)
        assert info["cuda_version"] == ""


# Instructions that not every CPU has run behind the dispatch alone.

# Those registers, and whatever is encoded as AVX code is, which begins with a v.
WIDE = re.compile(r"%[yz]mm\d|%k[1-7]\b|\tv(?!err|erw)\w+ ")


def test_wide_instructions_only_in_their_back_ends():
    """A CPU without AVX runs all functions but those of the namespaces avx2 and avx512."""
    listing = tool("objdump", "-d", "--no-show-raw-insn", "-C")
    wide = set()
    function = ""
    for line in listing.splitlines():
        if line.endswith(">:"):
            function = line.partition("<")[2][:-2]
        elif WIDE.search(line):
            wide.add(function)
    if platform.machine() == "x86_64":
        assert any("avx512" in name for name in wide)
        assert any("avx2" in name for name in wide)
    assert not [name for name in wide if "hvd8bit::avx2::" not in name and "hvd8bit::avx512::" not in name]
