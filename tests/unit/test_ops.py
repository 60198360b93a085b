"""The ops as ops: attributes and inputs out of range, shapes, who may be overwritten, more than 32 bits."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
from codec_inputs import as_dtype, assert_same_numbers

from hvd8bit import native, ops, reference
from hvd8bit.encoding import Encoding

X = np.random.default_rng(11).standard_normal(300).astype(np.float32)
ENCODING = Encoding(block_size=64)
THP = pathlib.Path("/sys/kernel/mm/transparent_hugepage")


def payload_of(tensors, shards=1, encoding=ENCODING, **part):
    return ops.encode_list(tensors, shards, encoding, **part)[0]


def raw_encode(**changes):
    settings = {"tensors": [X], "shards": 1, "seed": 0, "data_type": "linear", "block_size": 64}
    return native.load().hvd8bit_encode_list(**{**settings, **changes})


BAD_ATTRIBUTES = [
    ({"block_size": block_size}, "block_size")
    for block_size in (-1, -64, 1, 63, 65, 100, 65537, 65600, 2**31, 2**32 + 64, 2**62)
] + [
    (
        {"data_type": "int8"},
        "data_type must be one of dynamic_tree, static_tree, mantissa, linear, got 'int8'",
    ),
    ({"data_type": ""}, "data_type must be one of"),
    ({"fixed_scale": -1.0}, "fixed_scale must be finite and not negative"),
    ({"fixed_scale": float("nan")}, "fixed_scale must be finite and not negative"),
    ({"fixed_scale": float("inf")}, "fixed_scale must be finite and not negative"),
    ({"slices": 0}, "slices"),
    ({"slices": 65536}, "slices must be at most 65535, got 65536"),
    ({"slices": 2, "slice": 2}, "slice must be below slices, got slice 2 of 2"),
    ({"slice": -1}, "slice"),
    ({"rounding": "up"}, "rounding"),
    ({"seed": [1]}, "seed must be a scalar|must be rank 0|must be a scalar"),
]


@pytest.mark.parametrize(("attributes", "message"), BAD_ATTRIBUTES, ids=str)
def test_attributes_out_of_range(attributes, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        raw_encode(**attributes)


def test_every_op_checks_its_attributes():
    module = native.load()
    chunk = payload_of([X])
    settings = {"like": [X], "shards": 1, "data_type": "linear", "block_size": 65}
    with pytest.raises(tf.errors.InvalidArgumentError, match="block_size must be a multiple of 64"):
        module.hvd8bit_reduce_shards(payload=chunk, splits=[len(chunk)], shard=0, seed=0, **settings)
    with pytest.raises(tf.errors.InvalidArgumentError, match="block_size must be a multiple of 64"):
        module.hvd8bit_decode_list(payloads=[chunk], factor=1.0, **settings)


def test_the_largest_number_of_shards():
    payload, splits = ops.encode_list([X], 2**20, ENCODING)
    assert splits.shape == (2**20,)
    assert payload.shape[0] == int(tf.reduce_sum(splits))
    (decoded,) = ops.decode_list([payload], [X], 2**20, ENCODING, factor=2.0**20)
    assert_same_numbers(
        decoded.numpy(), reference.decode_list([reference.encode_list([X], 1, ENCODING)], [X], ENCODING)[0]
    )


@pytest.mark.parametrize("shard", [-1, 2, 2**31 - 1, -(2**31)])
def test_shard_out_of_range(shard):
    payload, splits = ops.encode_list([X], 2, ENCODING)
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"shard must be in \[0, 2\), got {shard}"):
        ops.reduce_shards(payload, splits, [X], 2, shard, ENCODING)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.uint8, tf.bool, tf.complex64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises((TypeError, ValueError, tf.errors.OpError)):
        ops.encode_list([tf.cast(tf.ones([64]), dtype)], 1, ENCODING)


def test_an_empty_list_is_refused():
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        ops.encode_list([], 1, ENCODING)


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("encode", {"shards": [1]}),
        ("encode", {"shards": [[1]]}),
        ("reduce", {"shards": [1]}),
        ("reduce", {"shard": [0]}),
        ("reduce", {"payload": [[1]]}),
        ("reduce", {"payload": 1}),
        ("reduce", {"splits": 5}),
        ("reduce", {"splits": [[5]]}),
        ("decode", {"payload": 3}),
        ("decode", {"payload": [[3]]}),
        ("decode", {"shards": [1]}),
        ("decode", {"factor": [1.0]}),
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_inputs_of_the_wrong_rank(op, inputs, traced):
    chunk = payload_of([X])
    base = {"payload": chunk, "splits": [len(chunk)], "shards": 1, "shard": 0, "factor": 1.0}
    # Inputs of a graph whose shape it does not know: there the shape functions cannot help the kernels.
    types = {
        "payload": tf.uint8,
        "splits": tf.int32,
        "shards": tf.int32,
        "shard": tf.int32,
        "factor": tf.float64,
    }
    values = {name: tf.constant(value, types[name]) for name, value in {**base, **inputs}.items()}

    def run(v):
        if op == "encode":
            return ops.encode_list([X], v["shards"], ENCODING)
        if op == "reduce":
            return ops.reduce_shards(v["payload"], v["splits"], [X], v["shards"], v["shard"], ENCODING)
        return ops.decode_list([v["payload"]], [X], v["shards"], ENCODING, factor=v["factor"])

    if traced:
        signature = [{name: tf.TensorSpec(None, dtype) for name, dtype in types.items()}]
        run = tf.function(run, autograph=False, input_signature=signature)
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(values)


def test_shape_functions_refuse_wrong_ranks():
    wrong = {"shards": [1], "factor": [1.0], "payload": [[1]]}
    chunk = payload_of([X])
    with pytest.raises(ValueError, match="must be rank 0"):
        tf.function(lambda: ops.encode_list([X], wrong["shards"], ENCODING)).get_concrete_function()
    with pytest.raises(ValueError, match="must be rank 0"):
        tf.function(lambda: ops.decode_list([chunk], [X], 1, ENCODING, factor=wrong["factor"])).get_concrete_function()
    with pytest.raises(ValueError, match="must be rank 1"):
        tf.function(
            lambda: ops.decode_list([tf.constant(wrong["payload"], tf.uint8)], [X], 1, ENCODING)
        ).get_concrete_function()
    with pytest.raises(ValueError, match="must be rank 1"):
        tf.function(lambda: ops.reduce_shards(chunk, 5, [X], 1, 0, ENCODING)).get_concrete_function()


def test_static_shapes():
    @tf.function(autograph=False)
    def run(partly, fully, unknown, shards):
        tensors = [partly, fully, unknown]
        payload, splits = ops.encode_list(tensors, shards, ENCODING)
        _, known_splits = ops.encode_list(tensors, 3, ENCODING)
        reduced = ops.reduce_shards(payload, splits, tensors, shards, 0, ENCODING)
        decoded = ops.decode_list([reduced, reduced], tensors, shards, ENCODING)
        shapes.append([payload.shape, splits.shape, known_splits.shape, reduced.shape, *(t.shape for t in decoded)])
        dtypes.extend(t.dtype for t in decoded)
        return payload

    shapes, dtypes = [], []
    run.get_concrete_function(
        tf.TensorSpec([None, 16]),
        tf.TensorSpec([4, 2], tf.float16),
        tf.TensorSpec(None, tf.bfloat16),
        tf.TensorSpec([], tf.int32),
    )
    payload, splits, known_splits, reduced, partly, fully, unknown = shapes[0]
    assert payload.as_list() == splits.as_list() == reduced.as_list() == [None]
    assert known_splits.as_list() == [3]
    assert partly.as_list() == [None, 16]
    assert fully.as_list() == [4, 2]
    assert unknown.rank is None
    assert dtypes == [tf.float32, tf.float16, tf.bfloat16]


# decode_list may write over `like` if nobody else holds it.

OTHER = np.random.default_rng(12).standard_normal(300).astype(np.float32)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensors_that_somebody_holds_stay(traced, dtype):
    x = as_dtype(X, dtype)
    payload = payload_of([as_dtype(OTHER, dtype)])
    variable, constant = tf.Variable(x), tf.constant(x)

    def run(argument):
        kept = argument * 1  # held: it is returned, too
        view = tf.reshape(kept, [3, 100])
        held = [argument, constant, variable, tf.convert_to_tensor(variable), kept, tf.reshape(view, [300])]
        decoded = [ops.decode_list([payload], [like], 1, ENCODING)[0] for like in held]
        pair = ops.decode_list([payload_of([OTHER, OTHER])], [tf.cast(kept, tf.float32)] * 2, 1, ENCODING)
        return decoded, kept, view, pair

    decoded, kept, view, pair = (tf.function(run, autograph=False) if traced else run)(constant)
    (expected,) = ops.decode_list([payload], [constant], 1, ENCODING)
    for got in decoded:
        assert_same_numbers(got.numpy(), expected.numpy())
    for got in pair:
        assert_same_numbers(got.numpy(), ops.decode_list([payload_of([OTHER])], [X], 1, ENCODING)[0].numpy())
    for held in (constant, variable, kept, tf.reshape(view, [300])):
        assert held.numpy().tobytes() == x.tobytes()


def test_a_list_with_the_same_tensor_twice():
    """Neither place may be overwritten while the other is still to be written, and read."""
    x = tf.constant(X)
    payload = payload_of([x, OTHER, x])
    first, second, third = ops.decode_list([payload], [x, x, x], 1, ENCODING)
    assert_same_numbers(first.numpy(), third.numpy())
    assert_same_numbers(second.numpy(), ops.decode_list([payload_of([OTHER])], [X], 1, ENCODING)[0].numpy())


def test_the_payload_is_not_changed():
    payload, splits = ops.encode_list([X], 2, ENCODING)
    before = payload.numpy().tobytes()
    ops.decode_list([payload], [X], 2, ENCODING)
    first = payload[: splits[0]]
    ops.reduce_shards(tf.concat([first, first], 0), [splits[0]] * 2, [X], 2, 0, ENCODING)
    assert payload.numpy().tobytes() == before


# More than 2^31 elements and bytes.

MANY, EACH = 9, 2**28


@pytest.fixture(scope="module")
def big():
    """Nine references to one tensor: more than 2^31 elements in 512 MB."""
    return [tf.zeros([EACH], tf.float16)] * MANY


def test_a_chunk_beyond_31_bits_is_refused_before_any_work(big):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"a chunk of \d{10} bytes cannot be sent, at most 2\^31 - 1"
    ):
        ops.encode_list(big, 1, Encoding())


def test_headers_count_beyond_31_bits(big):
    """One slice of many: the list's size and the slice's place in it exceed 32 bits, its payload is small."""
    slices = 2**12
    payload, splits = ops.encode_list(big, 2, Encoding(), slices=slices, slice_=slices - 1)
    chunk = payload.numpy()[splits.numpy()[0] :].tobytes()
    assert int.from_bytes(chunk[24:32], "little") == MANY * EACH
    assert int.from_bytes(chunk[36:40], "little") == pytest.approx(MANY * EACH / 1024 / 2 / slices, abs=1)
    reduced = ops.reduce_shards(
        tf.concat([payload[splits[0] :]] * 2, 0),
        [splits[1]] * 2,
        big,
        2,
        1,
        Encoding(),
        slices=slices,
        slice_=slices - 1,
    )
    assert reduced.shape[0] == splits.numpy()[1]


@pytest.mark.soak
def test_the_last_of_more_than_2_to_the_31_elements():
    """Needs 8 GB."""
    ramp = np.zeros(EACH, np.float16)
    ramp[:1024] = np.linspace(-1, 1, 1024)
    ramp[-1024:] = np.linspace(-3, 3, 1024)
    like = [tf.constant(ramp)] * MANY
    payload, _ = ops.encode_list(like, 3, Encoding())
    assert payload.shape[0] > 2**31
    decoded = ops.decode_list([payload], like, 3, Encoding(), factor=3.0)
    del payload
    (expected,) = reference.decode_list(
        [reference.encode_list([ramp[:1024]], 1, Encoding())], [ramp[:1024]], Encoding()
    )
    (at_end,) = reference.decode_list(
        [reference.encode_list([ramp[-1024:]], 1, Encoding())], [ramp[-1024:]], Encoding()
    )
    for tensor in decoded:
        assert_same_numbers(tensor[:1024].numpy(), expected)
        assert_same_numbers(tensor[-1024:].numpy(), at_end)
        assert not np.any(tensor[1024:2048].numpy())


@pytest.mark.skipif(not THP.exists(), reason="this system has no large pages that programs may ask for")
def test_large_outputs_ask_for_large_pages():
    """A gradient of 100 MB has 24,000 small pages; each is a fault when it is first written."""
    elements = 8 * 2**20
    x = tf.random.stateless_normal([elements], [1, 2])
    payload, _ = ops.encode_list([x], 1, Encoding())
    (decoded,) = ops.decode_list([payload], [x], 1, Encoding())
    for output in (payload, decoded):
        assert "hg" in flags_of_memory_at(output)


def flags_of_memory_at(tensor) -> list[str]:
    """What the kernel says of the memory in a tensor's middle."""
    array = np.asarray(memoryview(tensor))  # no copy
    address = array.ctypes.data + array.nbytes // 2
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no such memory")
