"""What is planned for a list of gradients: rules applied, buckets of one encoding, and the summary of it."""

from __future__ import annotations

import logging

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit import EightBit, Selection, logs, modes, planning
from hvd8bit.encoding import Encoding


def plan_of(select=None, shapes=((2000,), (10,), (3000,)), names=("kernel", "bias", "table"), **settings):
    compression = EightBit(select=select or Selection(), **settings)
    specs = [tf.TensorSpec(shape) for shape in shapes]
    return planning.make(specs, names, None, compression, sparse_as_dense=False), compression


def test_treatments_and_reasons():
    plan, _ = plan_of(Selection(exclude="table"))
    assert [(g.treatment, g.reason) for g in plan] == [
        ("encode", ""),
        ("as it is", "fewer than min_elements=1024 elements"),
        ("as it is", "excluded by 'table'"),
    ]
    assert [g.exactly().treatment for g in plan] == ["as it is"] * 3


def test_other_compressors_encode_nothing():
    plan = planning.make([tf.TensorSpec([5000])], ["v"], None, hvd.Compression.none, sparse_as_dense=False)
    assert plan[0].treatment == "as it is"


def test_a_bucket_has_one_encoding():
    select = Selection(min_elements=0, per_variable={"bias": {"data_type": "linear"}})
    plan, compression = plan_of(select)
    buckets = list(planning.encoded_buckets(plan, compression, 2, 2))
    assert [([g.name for g in b.gradients], b.encoding) for b in buckets] == [
        (["table", "kernel"], Encoding()),
        (["bias"], Encoding("linear")),
    ]


@pytest.mark.parametrize("exchange", ["scatter_reduce", "allgather", "auto"])
def test_a_bucket_has_a_mode(exchange, monkeypatch):
    monkeypatch.setattr(modes, "MAX_ALLGATHER_ELEMENTS", 10**6)  # as if it had been measured
    plan, compression = plan_of(exchange=exchange)
    (bucket,) = planning.encoded_buckets(plan, compression, 2, 2)
    assert bucket.mode == ("scatter_reduce" if exchange == "scatter_reduce" else "allgather")
    (elastic,) = planning.encoded_buckets(plan, compression, 2, None)
    assert elastic.mode == ("allgather" if exchange == "allgather" else "scatter_reduce")


def test_a_bucket_that_does_not_pay_has_none():
    plan, compression = plan_of(shapes=((1100,), (10,), (10,)))
    (bucket,) = planning.encoded_buckets(plan, compression, 64, 64)
    assert bucket.mode is None
    plan, compression = plan_of(exchange="allgather")
    (bucket,) = planning.encoded_buckets(plan, compression, 64, 64)
    assert bucket.mode is None  # 63 times the bytes


def sparse(dtype=tf.float32):
    return tf.IndexedSlices(tf.ones([2, 4], dtype), tf.constant([1, 3]), tf.constant([8, 4]))


def treatment_of(gradient, select, **settings):
    (planned,) = planning.make([gradient], ["table"], None, EightBit(select=select), **settings)
    return planned.treatment


def test_sparse_gradients(caplog):
    logs.forget()
    with caplog.at_level(logging.WARNING, logger="hvd8bit"):
        for _ in range(3):
            assert treatment_of(sparse(), Selection(), sparse_as_dense=False) == "sparse"
    (message,) = [record.message for record in caplog.records]
    assert "sparse gradients (IndexedSlices) are not compressed" in message
    assert "Selection(sparse='compress')" in message
    compress = Selection(sparse="compress")
    assert treatment_of(sparse(), compress, sparse_as_dense=False) == "sparse, values encoded"
    assert treatment_of(sparse(tf.int32), compress, sparse_as_dense=False) == "sparse"
    assert treatment_of(sparse(), Selection(sparse="compress", exclude="t*"), sparse_as_dense=False) == "sparse"
    assert treatment_of(sparse(), Selection(min_elements=0), sparse_as_dense=True) == "encode"


def test_a_plans_line_names_an_unusual_encoding():
    plan, compression = plan_of(Selection(per_variable={"kernel": {"block_size": 64}}))
    assert "block_size=64" in plan[0].describe(compression.encoding)
    assert "block_size" not in plan[2].describe(compression.encoding)
    line = planning.make([sparse()], ["table"], None, EightBit, sparse_as_dense=False)[0].describe()
    assert line == "table: float32 rows of (4,), int32 indices, sparse"


def test_a_pattern_that_fits_nothing_is_logged_once(caplog):
    logs.forget()
    with caplog.at_level(logging.WARNING, logger="hvd8bit"):
        for _ in range(2):
            plan_of(Selection(exclude=["kernle", "bias"]))
    (message,) = [record.message for record in caplog.records]
    assert "no variable has a name like the pattern 'kernle'" in message


def test_a_bare_compressor_refuses_rules_by_name():
    for settings in (
        {"exclude": "a"},
        {"include": "a"},
        {"per_variable": {"a": None}},
        {"start_step": 3},
        {"sparse": "compress"},
    ):
        (name,) = settings
        compression = EightBit(select=Selection(**settings))
        with pytest.raises(ValueError, match=rf"{name} of Selection\(.*cannot be kept here.*hvd8bit\.keras"):
            compression.compress(tf.ones([3]))
        with pytest.raises(ValueError, match=rf"{name} of Selection"):
            hvd8bit.allreduce(sparse(), compression=compression)


# summary


def variables():
    return [
        tf.Variable(tf.zeros([100, 50]), name="kernel"),
        tf.Variable(tf.zeros([10]), name="bias"),
        tf.Variable(tf.zeros([3000], tf.float16), name="half"),
        tf.Variable(tf.zeros([3000], tf.int32), name="count", trainable=False),
    ]


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("exchange", ["auto", "scatter_reduce"])
def test_summary_counts_the_bytes_that_travel(workers, exchange, capsys):
    records = hvd8bit.summary(variables(), EightBit(exchange=exchange), workers=workers)
    rows = {record["variable"]: record for record in records}
    assert [rows[f"{n}:0"]["treatment"] for n in ("kernel", "bias", "half", "count")] == [
        "8 bit",
        "exact",
        "8 bit",
        "exact",
    ]
    assert rows["count:0"]["reason"].startswith("int32: only float32")
    assert rows["bias:0"]["bytes"] == rows["bias:0"]["float32_bytes"]
    mode = rows["kernel:0"]["exchange"]
    assert mode == modes.choose(exchange, (3000, 5000), workers, 1024)
    encoded = modes.wire_bytes((3000, 5000), workers, 1024, mode)
    exact = 2 * (workers - 1) / workers * 4 * (10 + 3000)
    np.testing.assert_allclose(rows["total"]["bytes"], encoded + exact, rtol=1e-12)
    plain = 2 * (workers - 1) / workers * (4 * (5000 + 10 + 3000) + 2 * 3000)
    np.testing.assert_allclose(rows["total"]["float32_bytes"], plain, rtol=1e-12)
    np.testing.assert_allclose(rows["total"]["saved_bytes"], plain - encoded - exact, rtol=1e-12)
    printed = capsys.readouterr().out
    assert printed.startswith(
        "EightBit(data_type='dynamic_tree', block_size=1024, scaling='absmax', rounding='nearest'"
    )
    for name in rows:
        assert name in printed
    assert "\x1b" not in printed


def test_summary_of_a_model_follows_the_rules():
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50, name="first"), keras.layers.Dense(60)])
    select = Selection(exclude="*first/*", per_variable={"*kernel": {"data_type": "linear", "block_size": 64}})
    records = hvd8bit.summary(model, EightBit(select=select), workers=4)
    # sequential/first/kernel in Keras 3, first/kernel:0 in Keras 2
    rows = {"/".join(record["variable"].partition(":")[0].split("/")[-2:]): record for record in records}
    assert rows["first/kernel"]["reason"] == "excluded by '*first/*'"
    (encoded,) = [record for record in records if record["treatment"] == "8 bit"]
    assert (encoded["data_type"], encoded["block_size"], encoded["elements"]) == ("linear", 64, 3000)


def test_summary_refuses_what_is_none():
    with pytest.raises(TypeError, match="model_or_variables must be a model or variables, got 3"):
        hvd8bit.summary([3])
    with pytest.raises(ValueError, match="workers must be an integer of at least 2, got 1"):
        hvd8bit.summary(variables(), workers=1)
    with pytest.raises(TypeError, match="compression must be"):
        hvd8bit.summary(variables(), "eightbit")


def test_summary_as_a_table_on_a_terminal(monkeypatch, capsys):
    import sys

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    hvd8bit.summary(variables(), workers=2)
    assert "━" in capsys.readouterr().out


def test_summary_refuses_a_model_without_variables_yet():
    import keras

    model = keras.Sequential([keras.layers.Dense(8)], name="mine")
    with pytest.raises(ValueError, match="must be a built model, got 'mine' of type Sequential"):
        hvd8bit.summary(model)
    model.build((None, 4))
    assert hvd8bit.summary(model)[-1]["elements"] == 40
