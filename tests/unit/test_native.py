"""How the op library is found, and what is said when it does not fit."""

from __future__ import annotations

import pytest
import tensorflow as tf

from hvd8bit import native


def test_the_library_at_hand_fits():
    assert native.find() is not None
    assert native.mismatch(tf.__version__) is None
    assert native.build_info()["tensorflow_version"] == tf.__version__
    assert hasattr(native.load(), "hvd8bit_encode_list")


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
