"""The CUDA back end, its kernels emulated on the host, against the scalar one: the cases that also run on a GPU."""

from __future__ import annotations

import os
import pathlib
import subprocess

import numpy as np
import pytest
from cases import Device, cases, random_floats
from memory import HostMemory, open_memory

from hvd8bit import native
from hvd8bit.c_api import Lists
from hvd8bit.encoding import Encoding

CASES = dict(cases(random_count=1_000_000))
GPU = pathlib.Path(__file__).resolve().parents[1] / "gpu"


@pytest.fixture
def device(emulated_cuda) -> Device:
    return Device(emulated_cuda, HostMemory())


@pytest.mark.parametrize("case", CASES)
def test_same_bytes_as_the_scalar_back_end(device, case):
    CASES[case](device)


@pytest.mark.soak
def test_a_hundred_million_random_floats(device, record_soak):
    random_floats(device, 100_000_000)
    record_soak("random_floats", {"back_end": "emulated cuda", "against": "scalar", "floats": 100_000_000, "differ": 0})


@pytest.mark.soak
def test_more_than_2_to_the_31_elements(emulated_cuda, record_soak):
    """Nine references to one float16 tensor of 2^28 elements; needs 4 GB. The last one's codes are the first one's."""
    each, many = 1 << 28, 9
    tensor = np.zeros(each, np.float16)
    tensor[-4096:] = np.linspace(-1, 1, 4096)
    like = [("float16", each)] * many
    lists = Lists("cuda", like, 1, Encoding(), library=emulated_cuda)
    (size,) = lists.chunk_bytes()
    payload = np.full(size, 0xA5, np.uint8)
    lists.encode([tensor.ctypes.data] * many, payload.ctypes.data)
    assert size > 2**31
    assert payload[24:32].view(np.uint64)[0] == each * many
    one = Lists("scalar", like[:1], 1, Encoding(), library=emulated_cuda)
    right = np.empty(one.chunk_bytes()[0], np.uint8)
    one.encode([tensor.ctypes.data], right.ctypes.data)
    codes, scales = right[64 : 64 + each], right[64 + each :]
    for number in range(many):
        assert np.array_equal(payload[64 + number * each :][:each], codes)
        assert np.array_equal(payload[64 + many * each + number * scales.size :][: scales.size], scales)
    record_soak("large", {"back_end": "emulated cuda", "elements": each * many, "bytes": size, "differ": 0})


def test_the_comparison_sees_a_difference(device):
    """Another back end's bytes, one of them changed, are not the same."""
    device.both = lambda like, shards, encoding, slices=1: (
        Lists("scalar", like, shards, encoding, library=device.library),
        Lists("scalar", like, shards, Encoding(block_size=128), library=device.library),
    )
    with pytest.raises(AssertionError, match="bytes differ, first at"):
        device.encode([np.ones(128, np.float32)], 1, Encoding(block_size=64))


def test_wrong_arguments_are_named(emulated_cuda):
    good = {"like": [("float32", 10)], "shards": 1, "encoding": Encoding()}
    for backend, changes, message in (
        ("sse9", {}, r"backend must be cuda or one of .*scalar, got 'sse9'"),
        ("cuda", {"shards": 0}, "shards must be at least 1"),
        ("cuda", {"slices": 70000}, "slices in \\[1, 65535\\]"),
        ("cuda", {"like": [("float32", -1)]}, "elements at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Lists(backend, **{**good, **changes}, library=emulated_cuda).chunk_bytes()
    with pytest.raises(ValueError, match=r"shard must be in \[0, shards\), got 1"):
        Lists("cuda", **good, library=emulated_cuda).reduce(1, 0, [0], 0)
    buffer = np.zeros(200, np.uint8)
    start = buffer.ctypes.data + (1 - buffer.ctypes.data) % 4
    whole = Lists("cuda", [("float32", 10)], 1, Encoding(block_size=None), library=emulated_cuda)
    with pytest.raises(ValueError, match="payload must start at a multiple of 4 bytes"):
        whole.encode([np.zeros(10, np.float32).ctypes.data], start)


def test_a_library_without_cuda_says_so():
    if native.build_info().get("cuda_architectures"):
        pytest.skip("this library has CUDA kernels")
    with pytest.raises(ValueError, match="built without CUDA"):
        Lists("cuda", [("float32", 10)], 1, Encoding()).chunk_bytes()


def test_check_without_a_gpu_says_so_in_one_line():
    """tests/gpu/check.sh, on a machine that has none, or whose PATH shows none."""
    try:
        open_memory()
    except RuntimeError:
        pass
    else:
        pytest.skip("there is a GPU here")
    done = subprocess.run([str(GPU / "check.sh")], capture_output=True, text=True, timeout=60, env={**os.environ})
    assert done.returncode == 3
    (line,) = done.stdout.splitlines()
    assert "no GPU here" in line
