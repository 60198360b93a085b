"""How a batch is cut, where workers stand, and what stages may be."""

from __future__ import annotations

import contextlib

import keras
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from hvd8bit.parallel import keras_step, pipeline, plan

for_keras3 = pytest.mark.skipif(keras.__version__ < "3", reason="SplitModel and HybridModel are for Keras 3")


@given(rows=st.integers(1, 300), micro_batches=st.integers(1, 40))
def test_a_batch_is_cut_so_that_each_row_counts_once(rows, micro_batches):
    parts = pipeline.cut(tf.constant(rows, tf.int64), micro_batches)
    taken = [(int(part.start), int(part.stop), int(part.own), float(part.share)) for part in parts]
    counted = [row for start, stop, own, _ in taken for row in range(start, stop)[:own]]
    assert counted == list(range(rows))
    assert sum(share for *_, share in taken) == pytest.approx(1, abs=1e-12)
    for start, stop, own, share in taken:
        assert 0 <= start < stop <= rows  # never empty, never out of the batch
        assert stop - start == max(own, 1)
        assert share == own / rows
    assert max(own for _, _, own, _ in taken) - min(own for _, _, own, _ in taken) <= 1


@given(stages=st.integers(1, 5), replicas=st.integers(1, 4))
def test_every_worker_has_a_place(stages, replicas):
    places = [plan.check_place(stages, replicas, rank, stages * replicas) for rank in range(stages * replicas)]
    assert sorted((place.replica, place.stage) for place in places) == [
        (replica, stage) for replica in range(replicas) for stage in range(stages)
    ]
    for place in places:
        assert place.rank in place.pipeline_ranks(place.replica)
        assert place.rank in place.stage_ranks(place.stage)
        assert place.pipeline_ranks(place.replica)[place.stage] == place.rank
        assert place.stage_ranks(place.stage)[place.replica] == place.rank
        assert (place.first, place.last) == (place.stage == 0, place.stage == stages - 1)


@pytest.mark.parametrize(
    ("stages", "replicas", "workers", "message"),
    [
        (2, 1, 1, "need 2 workers, got 1; 1 is no multiple of the number of stages; start with horovodrun -np 2"),
        (2, 1, 4, "need 2 workers, got 4; give replicas=2, or start with horovodrun -np 2"),
        (2, 3, 4, "need 6 workers, got 4"),
        (0, 1, 1, "at least one stage"),
        (1, True, 1, "replicas must be an integer"),
    ],
)
def test_stages_and_workers_that_do_not_fit(stages, replicas, workers, message):
    with pytest.raises(ValueError, match=message):
        plan.check_place(stages, replicas, 0, workers)


def test_stages_that_share_a_layer_are_refused():
    def dense(name):
        return keras.layers.Dense(3, name=name)

    tied = dense("tied")
    plan.check_apart([[dense("a")], dense("b"), lambda: tied, lambda: tied])  # made anew on each worker
    x = keras.Input((3,))
    for stages in ([[tied, dense("a")], [dense("b"), tied]], [tied, keras.Model(x, tied(x))]):
        with pytest.raises(ValueError, match=r"got 'tied' in stages\[0\] and stages\[1\].*what shares weights in one"):
            plan.check_apart(stages)


@for_keras3
@pytest.mark.parametrize("given", ["layer", "sequential", "functional"])
@pytest.mark.parametrize("ends", [True, False], ids=["the mask ends", "the mask goes on"])
def test_stages_that_give_a_mask_are_refused(given, ends):
    layers = [keras.layers.Embedding(10, 4, mask_zero=True), *([keras.layers.LSTM(3)] if ends else [])]
    x = y = keras.Input((5,))
    for layer in layers:
        y = layer(y)
    stage = {"layer": layers[-1], "sequential": keras.Sequential(layers), "functional": keras.Model(x, y)}[given]
    came = keras.KerasTensor((None, 5, 4) if given == "layer" and ends else (None, 5), dtype="float32")
    place = plan.Place(2, 1, 0)
    if ends:
        assert plan.rows_of(stage, came, place, None).shape == (3,)
    else:
        with pytest.raises(ValueError, match=r"stages\[0\] .*without a Keras mask, got one with.*mask_zero=False"):
            plan.rows_of(stage, came, place, None)


def test_a_stage_can_be_given_in_several_ways():
    dense = keras.layers.Dense(3)
    assert plan.built_stage(dense, 0) is dense
    assert plan.built_stage([dense], 1).name == "stage_1"
    assert plan.built_stage(lambda: [dense], 1).layers == [dense]
    for wrong in (3, [], [3], lambda: 3):
        with pytest.raises(TypeError, match=r"stages\[2\] must be a Keras model or layer"):
            plan.built_stage(wrong, 2)


@for_keras3
def test_losses_that_parts_of_a_batch_add_up_to():
    sums, means = (keras.losses.MeanSquaredError(reduction=name) for name in ("sum", "sum_over_batch_size"))
    assert keras_step.check_losses("mse") is True
    assert keras_step.check_losses(None) is True
    assert keras_step.check_losses([means, "mae"]) is True
    assert keras_step.check_losses({"a": sums, "b": sums}) is False
    for wrong in ([sums, means], keras.losses.MeanSquaredError(reduction=None)):
        with pytest.raises(ValueError, match="loss must be a mean over the batch"):
            keras_step.check_losses(wrong)


def test_gradients_add_up_sparse_ones_too():
    dense = tf.constant([[1.0], [2.0]])
    sparse = tf.IndexedSlices(tf.constant([[5.0]]), tf.constant([1]), dense_shape=tf.constant([2, 1]))
    assert pipeline.add(None, None) is None
    assert pipeline.add(None, dense) is dense
    assert pipeline.add(dense, None) is dense
    assert pipeline.add(dense, sparse).numpy().tolist() == [[1.0], [7.0]]
    twice = pipeline.add(sparse, sparse)
    assert isinstance(twice, tf.IndexedSlices)
    assert tf.convert_to_tensor(twice).numpy().tolist() == [[0.0], [10.0]]


@for_keras3
@pytest.mark.parametrize(
    ("model", "cuts_weights", "clip", "message"),
    [
        ("HybridModel", True, {"clipnorm": 1.0}, "clipnorm must be None in a HybridModel, got 1.0: .* use clipvalue"),
        (
            "HybridModel",
            True,
            {"global_clipnorm": 1.0},
            "global_clipnorm must be None in a Hybrid.* use clipvalue",
        ),
        ("HybridModel", True, {"clipvalue": 1.0}, None),
        (
            "SplitModel",
            False,
            {"global_clipnorm": 1.0},
            "global_clipnorm must be None in a Split.* use clipnorm",
        ),
        ("SplitModel", False, {"clipnorm": 1.0}, None),
    ],
)
def test_clipping_that_is_advised_is_right(model, cuts_weights, clip, message):
    optimizer = keras.optimizers.SGD(**clip)
    keras_step.check_optimizer(model, optimizer, split=False, cuts_weights=cuts_weights)
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        keras_step.check_optimizer(model, optimizer, split=True, cuts_weights=cuts_weights)
