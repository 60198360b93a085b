"""`EightBit` as a value: settings, copies, equality, errors; and what its calls leave behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import tensorflow as tf
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow.compression import Compressor

import hvd8bit
from hvd8bit import EightBit, Selection, collectives, compression
from hvd8bit.encoding import Encoding


def process_set(number: int) -> ProcessSet:
    """One as Horovod has it once it knows it under a number."""
    made = ProcessSet([0])
    made.process_set_id = number
    return made


def test_defaults():
    assert EightBit.encoding == Encoding("dynamic_tree", 1024, "absmax", "nearest")
    assert EightBit.select == Selection(min_elements=1024)
    assert EightBit.exchange == "auto"
    assert EightBit.process_set is None
    assert isinstance(EightBit, Compressor)


def test_a_configured_copy_leaves_the_original_alone():
    linear = EightBit(data_type="linear", block_size=512, min_elements=7)
    assert linear.encoding == Encoding("linear", 512)
    assert linear.select.min_elements == 7
    assert EightBit.encoding == Encoding()
    assert EightBit.select == Selection()


def test_a_copy_of_a_copy_keeps_what_it_does_not_change():
    first = EightBit(data_type="linear", scaling=100.0, min_elements=7)
    second = first(block_size=None)
    assert second.encoding == Encoding("linear", None, 100.0)
    assert second.select.min_elements == 7
    assert first(min_elements=9).select.min_elements == 9
    assert first(select=Selection(11)).select.min_elements == 11
    assert first().encoding == first.encoding
    rules = EightBit(select=Selection(exclude="*/bias", start_step=5, sparse="compress"))
    assert rules(min_elements=9).select == Selection(9, exclude="*/bias", start_step=5, sparse="compress")


VARIANTS = {
    "defaults": {},
    "linear": {"data_type": "linear"},
    "512": {"block_size": 512},
    "None": {"block_size": None},
    "scaling": {"scaling": 10.0},
    "stochastic": {"rounding": "stochastic"},
    "seed": {"rounding": "stochastic", "seed": 0},
    "exchange": {"exchange": "scatter_reduce"},
    "allgather": {"exchange": "allgather"},
    "exclude": {"select": Selection(exclude="*/bias")},
    "per_variable": {"select": Selection(per_variable={"*/bias": {"block_size": 64}})},
    "start_step": {"select": Selection(start_step=5)},
    "sparse": {"select": Selection(sparse="compress")},
    "min_elements": {"min_elements": 0},
    "process set": {"process_set": process_set(1)},
}


@pytest.mark.parametrize("one", VARIANTS)
def test_equality_and_hash_follow_the_settings(one):
    """Horovod keeps its reduce functions by the equality of their arguments."""
    for other in VARIANTS:
        a, b = EightBit(**VARIANTS[one]), EightBit(**VARIANTS[other])
        assert (a == b) == (one == other)
        if one == other:
            assert hash(a) == hash(b)
            assert repr(a) == repr(b)
        else:
            assert repr(a) != repr(b)
    assert len({EightBit(**settings) for settings in VARIANTS.values()}) == len(VARIANTS)


def test_it_equals_no_other_thing():
    assert EightBit != Encoding()
    assert EightBit != "EightBit"
    assert EightBit is not None
    assert EightBit == EightBit()
    assert EightBit(process_set=process_set(0)) == EightBit  # the global one


def test_equal_settings_given_in_other_types_are_equal():
    a, b = (
        EightBit(block_size=np.int64(256), scaling=10, min_elements=np.int32(5)),
        EightBit(block_size=256, scaling=10.0, min_elements=5),
    )
    assert a == b
    assert hash(a) == hash(b)
    # Workers compare this text.
    assert repr(a) == repr(b)


def test_repr_shows_the_settings():
    assert repr(EightBit(data_type="linear", block_size=512, min_elements=7)) == (
        "EightBit(data_type='linear', block_size=512, scaling='absmax', rounding='nearest', "
        "exchange='auto', min_elements=7)"
    )
    assert "process_set" in repr(EightBit(process_set=process_set(3)))
    assert eval(repr(EightBit(scaling=10.0))) == EightBit(scaling=10.0)
    assert "seed" not in repr(EightBit)
    assert eval(repr(EightBit(rounding="stochastic", seed=3))).encoding.seed == 3


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_copies(duplicate):
    compressor = EightBit(data_type="mantissa", block_size=None, scaling=0.1, min_elements=5)
    assert duplicate(compressor) == compressor
    assert duplicate(EightBit) == EightBit


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"data_type": "int8"},
            ValueError,
            "data_type must be one of dynamic_tree, static_tree, mantissa, linear, got 'int8'",
        ),
        (
            {"block_size": 48},
            ValueError,
            r"block_size must be a multiple of 64 in \[64, 65536\], or None, got 48",
        ),
        ({"block_size": "x"}, TypeError, "block_size must be a multiple of 64"),
        ({"scaling": 3.0}, ValueError, 'scaling must be "absmax" or a power of ten'),
        ({"rounding": "up"}, ValueError, "rounding must be one of nearest, stochastic, got 'up'"),
        ({"seed": -1}, ValueError, r"seed must be an integer in \[0, 2\^63\), or None, got -1"),
        ({"exchange": "ring"}, ValueError, "exchange must be one of auto, scatter_reduce, allgather, got 'ring'"),
        ({"select": 1024}, TypeError, "select must be an hvd8bit.Selection, got int"),
        ({"min_elements": -1}, ValueError, "min_elements must be at least 0, got -1"),
        ({"min_elements": 1.5}, TypeError, "min_elements must be an integer, got 1.5"),
        ({"select": Selection(), "min_elements": 3}, ValueError, "give select or min_elements, not both"),
        ({"blocksize": 64}, TypeError, "blocksize"),
    ],
    ids=str,
)
def test_errors_name_the_argument(settings, error, message):
    with pytest.raises(error, match=message):
        EightBit(**settings)


# Tensors between compress and decompress. The exchange itself needs Horovod: tests/parallel.


class _Handle:
    """What the pending list looks at in a handle."""

    def __init__(self, graph=None, compressor=EightBit):
        self.graph, self.compressor = graph, compressor


def test_a_group_is_what_the_same_call_compressed():
    pending = compression._Pending()
    handles = [_Handle() for _ in range(3)]
    for handle in handles:
        pending.append(handle)
    assert pending.group_of(handles[0]) == handles
    assert pending.handles == []
    # What is not pending any more travels alone.
    assert pending.group_of(handles[1]) == [handles[1]]


def test_handles_of_a_call_that_raised_are_never_sent():
    pending = compression._Pending()
    dropped = _Handle()
    pending.append(dropped)
    alive = weakref.ref(dropped)
    del dropped  # Horovod drops it with the call, and nothing else may keep it and its tensor
    gc.collect()
    assert alive() is None
    kept_by_somebody = _Handle()
    pending.append(kept_by_somebody)
    handle = _Handle()
    pending.append(handle)
    assert pending.group_of(handle) == [handle]


def test_a_group_has_one_graph_and_one_setting():
    pending = compression._Pending()
    handles = [_Handle(g, c) for g in (None, "g") for c in (EightBit, EightBit(data_type="linear"))]
    for handle in handles:
        pending.append(handle)
    assert pending.group_of(handles[0]) == [handles[0]]


def test_what_passes_through_comes_back_as_it_was():
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32):
        sent, context = EightBit._pass(tf.ones([3], dtype))
        # One dtype in a group: half precision travels beside float32 probes.
        assert sent.dtype == (tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype)
        got = EightBit.decompress(sent, context)
        assert got.dtype == dtype
        assert np.all(got.numpy() == 1)


@pytest.mark.parametrize("wrong", ["eightbit", None, 8])
def test_what_is_no_compressor_is_refused_where_it_is_given(wrong):
    import keras
    import tensorflow as tf

    import hvd8bit.keras
    from hvd8bit import reduction

    calls = [
        lambda: reduction.reduce_gradients([], [], compression=wrong),
        lambda: hvd8bit.DistributedGradientTape(tf.GradientTape(), compression=wrong),
        lambda: hvd8bit.keras.DistributedOptimizer(keras.optimizers.SGD(), compression=wrong),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"compression must be hvd8bit\.EightBit"):
            call()


@pytest.mark.parametrize("wrong", [[0], 0, "all", collectives.LoopbackComm])
def test_what_is_no_process_set_is_refused_at_once(wrong):
    for use in (
        lambda: EightBit(process_set=wrong),
        lambda: collectives.HorovodComm(wrong),
        lambda: hvd8bit.allreduce(tf.zeros([2000]), process_set=wrong),
    ):
        with pytest.raises(TypeError, match=r"process_set must be a horovod.tensorflow.ProcessSet or None, got "):
            use()
