"""The op library's sources: the one list, what may include what, and a kernel for every declared dtype."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TF_OPS = ROOT / "tf_ops"

INCLUDES = {
    "codec": {"std", "codec", "codebooks.inc"},
    "ops": {"std", "tensorflow"},
    "kernels": {"std", "system", "tensorflow", "codec", "kernels"},
}
"""Folder -> what its files may include. Numeric code knows no framework, declarations hold no arithmetic."""

OF_THE_COMPILER = re.compile(r"(std\w+|arm_neon|[a-z]*mmintrin|immintrin|cpuid|cuda\w*)\.h(pp)?")


def source_lists() -> dict:
    values: dict = {}
    exec((TF_OPS / "sources.bzl").read_text(encoding="utf-8"), {"__builtins__": {}}, values)
    return values


def listed(suffixes: tuple[str, ...]) -> list[str]:
    lists = [value for value in source_lists().values() if isinstance(value, list)]
    return [entry for entries in lists for entry in entries if entry.endswith(suffixes)]


def present(suffixes: tuple[str, ...]) -> list[str]:
    return sorted(p.relative_to(TF_OPS).as_posix() for p in TF_OPS.rglob("*") if p.suffix in suffixes)


@pytest.mark.parametrize("suffixes", [(".cc", ".cu"), (".h", ".inc", ".cuh")], ids=["sources", "headers"])
def test_sources_bzl_lists_every_file_once(suffixes):
    assert sorted(listed(suffixes)) == present(suffixes), "tf_ops/sources.bzl must list what lies in tf_ops/"


@pytest.mark.parametrize("name", present((".cc", ".cu", ".h", ".inc", ".cuh")))
def test_a_file_includes_only_what_its_folder_may(name):
    folder = name.partition("/")[0]
    for header in re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', (TF_OPS / name).read_text(encoding="utf-8"), re.M):
        if header.startswith("tf_ops/"):
            kind = header.split("/")[1]
        elif header.startswith(("tensorflow/", "absl/", "third_party/")):
            kind = "tensorflow"
        elif "/" not in header and ("." not in header or OF_THE_COMPILER.fullmatch(header)):
            kind = "std"
        elif header.startswith("sys/"):
            kind = "system"
        else:
            kind = header
        assert kind in INCLUDES[folder], f"tf_ops/{name} includes {header}"


@pytest.mark.parametrize("name", present((".h", ".cuh")))
def test_headers_are_guarded_by_their_name(name):
    guard = "HVD8BIT_" + re.sub(r"\W", "_", name).upper() + "_"
    lines = (TF_OPS / name).read_text(encoding="utf-8").splitlines()
    assert f"#ifndef {guard}" in lines
    assert f"#define {guard}" in lines


# Declared dtypes.

OPS = ("Hvd8bitEncodeList", "Hvd8bitReduceShards", "Hvd8bitSumShards", "Hvd8bitDecodeList")
OF_ONE_DTYPE = ("Hvd8bitCountSent",)


def declared_dtypes(op: str) -> set[str]:
    import tensorflow as tf
    from tensorflow.python.framework import op_def_registry

    from hvd8bit import native

    native.load()
    (attribute,) = [attribute for attribute in op_def_registry.get(op).attr if attribute.name == "T"]
    return {tf.as_dtype(dtype).name for dtype in attribute.allowed_values.list.type}


def test_every_op_is_checked_here():
    declared = set()
    for path in (TF_OPS / "ops").glob("*.cc"):
        declared |= set(re.findall(r'REGISTER_OP\("(\w+)"\)', path.read_text(encoding="utf-8")))
    assert declared == {*OPS, *OF_ONE_DTYPE}


@pytest.mark.parametrize("op", OPS)
def test_every_declared_dtype_has_a_kernel(op):
    import tensorflow as tf
    from tensorflow.python.framework import kernels

    dtypes = declared_dtypes(op)
    registered = kernels.get_registered_kernels_for_op(op).kernel
    assert "CPU" in {kernel.device_type for kernel in registered}
    for device in {kernel.device_type for kernel in registered}:
        covered = set()
        for kernel in registered:
            if kernel.device_type == device:
                limits = [c for c in kernel.constraint if c.name == "T"]
                # Without a constraint a kernel takes all that the declaration lets pass.
                covered |= (
                    {tf.as_dtype(t).name for c in limits for t in c.allowed_values.list.type} if limits else dtypes
                )
        assert covered >= dtypes, f"{op} on {device} has no kernel for {dtypes - covered}"


def test_the_wrappers_and_the_selection_name_the_declared_dtypes():
    from hvd8bit import ops, selection, wire

    assert {dtype.name for dtype in ops.DTYPES} == set(selection.ENCODABLE) == set(wire.DTYPE_IDS)
    for op in OPS:
        assert declared_dtypes(op) == set(selection.ENCODABLE)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_every_declared_dtype_runs(dtype):
    import tensorflow as tf

    from hvd8bit import ops
    from hvd8bit.encoding import Encoding

    x = [tf.cast(np.linspace(-1, 1, 100), dtype)]
    payload, splits = ops.encode_list(x, 1, Encoding())
    reduced = ops.reduce_shards(payload, splits, x, 1, 0, Encoding())
    (decoded,) = ops.decode_list([reduced], x, 1, Encoding())
    assert decoded.dtype == x[0].dtype
    assert float(tf.cast(decoded[0], tf.float64)) == -1
