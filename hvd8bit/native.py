"""Finds the op library and loads it, checking that it was built for the TensorFlow at hand.

The only file that knows where the library is.
"""

from __future__ import annotations

import ctypes
import functools
import json
import pathlib

_PACKAGE = pathlib.Path(__file__).resolve().parent
LIBRARY = _PACKAGE / "_hvd8bit_ops.so"
BUILD_INFO = _PACKAGE / "_build_info.json"


def find() -> pathlib.Path | None:
    """Path of the op library, or None where it has not been built."""
    return LIBRARY if LIBRARY.exists() else None


def build_info() -> dict:
    """How the library was built.

    Returns:
      tensorflow_version, cxx_abi, compiler, flags, backends (of the CPU), cuda_architectures (empty: without CUDA),
      cuda_version (of the toolkit, or "").
    """
    return json.loads(BUILD_INFO.read_text()) if BUILD_INFO.exists() else {}


def mismatch(tensorflow_version: str, info: dict | None = None) -> str | None:
    """What is wrong with the library for this TensorFlow, or None.

    An op library binds to the C++ of one TensorFlow minor version.
    """
    if find() is None:
        return (
            f"hvd8bit's op library is missing ({LIBRARY}). Build it with the TensorFlow that will use it: "
            "run 'make setup' in a checkout, or 'pip install --no-build-isolation .'"
        )
    built_for = (build_info() if info is None else info).get("tensorflow_version", "an unknown version")
    if built_for.split(".")[:2] == tensorflow_version.split(".")[:2]:
        return None
    return (
        f"hvd8bit's op library was built for TensorFlow {built_for}, but TensorFlow {tensorflow_version} is "
        f"installed; it loads only with {'.'.join(built_for.split('.')[:2])}.x. Rebuild it: "
        "'make setup' in a checkout, or 'pip install --no-build-isolation --force-reinstall --no-deps .'"
    )


@functools.cache
def load():
    """The module of ops.

    Raises:
      ImportError: the library is missing, or was built for another TensorFlow; says both versions and the remedy.
    """
    import tensorflow as tf

    wrong = mismatch(tf.__version__)
    if wrong:
        raise ImportError(wrong)
    try:
        return tf.load_op_library(str(LIBRARY))
    except tf.errors.NotFoundError as error:
        built_for = build_info().get("tensorflow_version", "an unknown version")
        raise ImportError(
            f"hvd8bit's op library, built for TensorFlow {built_for}, does not load with TensorFlow "
            f"{tf.__version__}; rebuild it with 'make setup' or 'pip install --no-build-isolation .' "
            f"(the loader says: {error.message})"
        ) from error


@functools.cache
def c_library() -> ctypes.CDLL:
    """The library's C functions (tf_ops/codec/c_api.h), for `hvd8bit.c_api`."""
    load()  # brings in TensorFlow's own library, which the loader would not find
    return open_c_library(LIBRARY)


def open_c_library(path: str | pathlib.Path) -> ctypes.CDLL:
    """A library with the functions of tf_ops/codec/c_api.h, ready to be called; one built without TensorFlow, too."""
    library = ctypes.CDLL(str(path))
    for name in (
        *("built_backends", "runnable_backends", "encode", "decode", "sum_and_encode"),
        *("list_bytes", "encode_list", "reduce_shards", "decode_list", "cuda_report"),
    ):
        getattr(library, f"hvd8bit_{name}").restype = ctypes.c_char_p
    return library


def sent_bytes() -> int:
    """What the op Hvd8bitCountSent has counted."""
    counted = c_library().hvd8bit_sent_bytes
    counted.restype = ctypes.c_int64
    return counted()


def reset_sent_bytes() -> None:
    """Starts that count anew."""
    c_library().hvd8bit_reset_sent_bytes()


def backends() -> list[str]:
    """The CPU back ends in the library, fastest first."""
    return c_library().hvd8bit_built_backends().decode().split(",")


def runnable_backends() -> list[str]:
    """Those of them that this CPU runs."""
    return c_library().hvd8bit_runnable_backends().decode().split(",")


def cuda_versions(library: ctypes.CDLL | None = None) -> tuple[int, int]:
    """Versions of CUDA: of the runtime in the library, and the newest that the driver runs.

    Each is 1000 * major + 10 * minor, or 0 where there is none.
    """
    runtime, driver = ctypes.c_int(0), ctypes.c_int(0)
    (library or c_library()).hvd8bit_cuda_versions(ctypes.byref(runtime), ctypes.byref(driver))
    return runtime.value, driver.value
