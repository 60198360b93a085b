"""The ops against the reference, step by step."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from codec_inputs import assert_same_numbers

from hvd8bit import ops, reference
from hvd8bit.encoding import Encoding


def reference_exchange(workers: list[list[np.ndarray]], encoding: Encoding, slices: int = 1, factor: float = 1.0):
    """What the exchange of `workers[rank][tensor]` must give, by the reference."""
    like, shards = workers[0], len(workers)
    gathered = []
    for slice_ in range(slices):
        sent = [reference.encode_list(tensors, shards, encoding, slices, slice_) for tensors in workers]
        gathered.append(
            [
                reference.reduce_shards([chunks[shard] for chunks in sent], like, shard, encoding, slices, slice_)
                for shard in range(shards)
            ]
        )
    return reference.decode_list(gathered, like, encoding, factor)


def assert_ops_match_reference(workers, encoding: Encoding, slices: int = 1, factor: float = 1.0) -> None:
    """Runs the three ops for all workers and shards and compares what each gives with the reference.

    Args:
      workers: arrays, `workers[rank][tensor]`; shapes and dtypes are the same for all ranks.
    """
    shards = len(workers)
    like = [tf.constant(array) for array in workers[0]]
    gathered = []
    for slice_ in range(slices):
        part = {"slices": slices, "slice_": slice_}
        sent = []
        for arrays in workers:
            payload, splits = ops.encode_list([tf.constant(array) for array in arrays], shards, encoding, **part)
            sent.append(reference.encode_list(arrays, shards, encoding, slices, slice_))
            assert splits.numpy().tolist() == [len(chunk) for chunk in sent[-1]]
            assert_same_bytes(payload, b"".join(sent[-1]), f"encode_list, {encoding}")
        reduced = []
        for shard in range(shards):
            received = [chunks[shard] for chunks in sent]
            got = ops.reduce_shards(
                to_tensor(received), [len(chunk) for chunk in received], like, shards, shard, encoding, **part
            )
            reduced.append(reference.reduce_shards(received, workers[0], shard, encoding, slices, slice_))
            assert_same_bytes(got, reduced[-1], f"reduce_shards, {encoding}")
        gathered.append(reduced)
    decoded = ops.decode_list([to_tensor(chunks) for chunks in gathered], like, shards, encoding, factor=factor)
    for got, expected in zip(decoded, reference.decode_list(gathered, workers[0], encoding, factor)):
        assert_same_numbers(got.numpy(), expected, f"decode_list, {encoding}")


def to_tensor(chunks: list[bytes]) -> tf.Tensor:
    return tf.constant(np.frombuffer(b"".join(chunks), np.uint8))


def assert_same_bytes(got, expected: bytes, what: str) -> None:
    got = got.numpy().tobytes()
    if got != expected:
        first = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
        raise AssertionError(
            f"{what}: {len(got)} bytes, expected {len(expected)}; first difference at byte {first}: "
            f"got {got[first : first + 8].hex()}, expected {expected[first : first + 8].hex()}"
        )
