"""Error feedback without Horovod: what an exchange withholds, and the residuals' life."""

from __future__ import annotations

import copy
import gc
import types

import numpy as np
import pytest
import tensorflow as tf
from horovod.common.process_sets import ProcessSet

import hvd8bit
from hvd8bit import feedback as feedback_module
from hvd8bit import logs, modes, ops
from hvd8bit.encoding import Encoding
from hvd8bit.exchange import exchange, exchange_with_errors
from hvd8bit.feedback import ErrorFeedback, keep
from hvd8bit.loopback import LoopbackComm
from hvd8bit.parallel.boundary import check_activation_compression
from hvd8bit.variables import mark_sharded

EightBit = hvd8bit.EightBit

SHAPES = [(100, 37), (5,), (3, 1000), (77,)]
ENCODINGS = [
    Encoding(),
    Encoding("linear", None),
    Encoding("mantissa", scaling=1.0),
    Encoding("static_tree", 64),
    Encoding(rounding="stochastic"),
]
SEEDS = (tf.constant(1, tf.int64), tf.constant(2, tf.int64))


def workers_of(ranks: list[int]):
    process_set = ProcessSet(ranks)
    process_set.process_set_id = 1  # as if Horovod knew it
    return types.SimpleNamespace(ranks=lambda: ranks, process_set=process_set)


def on_boundary(x, compression):
    return check_activation_compression(compression)


def gradients_of(rng, workers):
    def one(shape):
        return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 0, shape)).astype(np.float32)

    return [[one(shape) for shape in SHAPES] for _ in range(workers)]


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("mode", modes.MODES)
@pytest.mark.parametrize(("workers", "slices", "factor"), [(2, 1, 1.0), (3, 4, 3.0), (5, 1, 0.7)])
def test_nothing_is_lost(encoding, mode, workers, slices, factor, rng):
    gradients = gradients_of(rng, workers)

    def work(comm):
        mine = [tf.constant(gradient) for gradient in gradients[comm.rank()]]
        how = {"factor": factor, "mode": mode, "slices": slices, "seeds": SEEDS}
        plain = exchange(mine, encoding, comm, name="plain", **how)
        outputs, errors = exchange_with_errors(mine, encoding, comm, name="with_errors", **how)
        for expected, output in zip(plain, outputs):
            np.testing.assert_array_equal(output.numpy(), expected.numpy())
        return [output.numpy() for output in outputs], [error.numpy() for error in errors]

    of_workers = LoopbackComm.run(workers, work)
    for i, output in enumerate(of_workers[0][0]):
        exact = sum(own[i].astype(np.float64) for own in gradients) * factor / workers
        late = sum(errors[i].astype(np.float64) for _, errors in of_workers) * factor / workers
        assert np.abs(output - exact).max() > 1e-6  # something was rounded
        np.testing.assert_allclose(output + late, exact, rtol=1e-6, atol=1e-6)


def test_more_slices_and_workers_than_blocks(rng):
    """Chunks and slices without elements."""
    gradients = rng.standard_normal((8, 70)).astype(np.float32)

    def work(comm):
        mine = [tf.constant(gradients[comm.rank()])]
        outputs, errors = exchange_with_errors(mine, Encoding(block_size=64), comm, factor=1.0, name="few", slices=4)
        return outputs[0].numpy(), errors[0].numpy()

    of_workers = LoopbackComm.run(8, work)
    late = np.mean([errors for _, errors in of_workers], axis=0)
    np.testing.assert_allclose(of_workers[0][0] + late, gradients.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("encoding", ENCODINGS[:4], ids=str)
def test_sum_of_shards_is_that_of_the_decoded_tensors(encoding, rng):
    workers, like = 3, [np.zeros(shape, np.float32) for shape in SHAPES]
    encoded = [ops.encode_list(gradients, workers, encoding) for gradients in gradients_of(rng, workers)]
    splits = encoded[0][1].numpy()
    place = 0
    decoded = []
    for payload, _ in encoded:
        own = ops.decode_list([payload], like, workers, encoding, factor=float(workers))
        decoded.append(np.concatenate([tensor.numpy().reshape(-1) for tensor in own]))
    expected = (decoded[0] + decoded[1]) + decoded[2]
    for shard, size in enumerate(splits):
        start = splits[:shard].sum()
        received = tf.concat([payload[start : start + size] for payload, _ in encoded], 0)
        total, first = ops.sum_shards(received, [size] * workers, like, workers, shard, encoding)
        assert int(first) == place
        place += len(total)
        np.testing.assert_array_equal(total.numpy(), expected[int(first) : place])
    assert place == sum(np.prod(shape, dtype=int) for shape in SHAPES)


def test_sum_of_shards_checks_what_it_received():
    payload, splits = ops.encode_list([tf.ones([100])], 1, Encoding())
    broken = tf.tensor_scatter_nd_update(payload, [[0]], tf.constant([0], tf.uint8))
    with pytest.raises(tf.errors.InvalidArgumentError, match="is no hvd8bit chunk"):
        ops.sum_shards(broken, splits, [tf.ones([100])], 1, 0, Encoding())
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"shard must be in \[0, 1\), got 1"):
        ops.sum_shards(payload, splits, [tf.ones([100])], 1, 1, Encoding())


def test_residuals_belong_to_variables():
    weight, bias = tf.Variable(tf.ones([3, 4]), name="weight"), tf.Variable(tf.zeros([4], tf.bfloat16))
    feedback = ErrorFeedback({"a": weight, "b": [bias, tf.Variable(1, name="count"), weight]})
    shapes = [(tuple(residual.shape), residual.dtype) for residual in feedback.residuals.values()]
    assert shapes == [((3, 4), tf.float32), ((4,), tf.float32)]
    assert list(feedback.residuals) == ["weight", "Variable"]
    assert feedback.residual_of(weight) is feedback.residuals["weight"]
    with pytest.raises(ValueError, match=r"error_feedback has no residual for other:0; make it of all variables"):
        feedback.residual_of(tf.Variable(1.0, name="other"))
    feedback.residuals["weight"].assign_add(tf.ones([3, 4]))
    feedback.reset()
    assert not feedback.residuals["weight"].numpy().any()


def test_without_variables_it_grows():
    feedback = ErrorFeedback()
    assert not feedback.residuals
    first, second = tf.Variable(tf.ones([3]), name="layer_7/kernel"), tf.Variable(tf.ones([2]), name="layer_8/kernel")
    assert feedback.residual_of(first) is feedback.residual_of(first)
    assert feedback.residual_of(second).shape == [2]
    assert list(feedback.residuals) == ["layer_7/kernel", "layer_8/kernel"]


def test_a_model_that_is_no_more_leaves_its_residuals_to_the_next():
    feedback = ErrorFeedback()
    for _ in range(3):
        variables = [tf.Variable(tf.ones([3]), name="kernel"), tf.Variable(tf.ones([3]), name="kernel")]
        for variable in variables:
            residual = feedback.residual_of(variable)
            assert residual.numpy().tolist() == [0.0, 0.0, 0.0]
            residual.assign([1.0, 1.0, 1.0])
        assert list(feedback.residuals) == ["kernel", "kernel#2"]
        del variables, variable
        gc.collect()


def test_made_anew_in_each_step_it_says_so(caplog):
    logs.forget()
    weight = tf.Variable(tf.ones([3]), name="weight")
    ErrorFeedback().residual_of(weight)
    assert "begins anew" not in caplog.text
    for _ in range(3):
        ErrorFeedback().residual_of(weight)
    assert caplog.text.count("error feedback begins anew for weight:0") == 1


def test_a_copy_takes_no_other_variable_for_its_own():
    weight = tf.Variable(tf.ones([3]))
    feedback = ErrorFeedback([weight])
    feedback.used_among(workers_of([0]))
    copied = copy.deepcopy(feedback)
    assert copied.residual_of(weight) is not feedback.residual_of(weight)
    with pytest.raises(ValueError, match="error_feedback has no residual for"):
        copied.residual_of(tf.Variable(tf.ones([3])))


def test_parts_of_sharded_variables_have_none():
    whole, part = tf.Variable(tf.ones([3])), tf.Variable(tf.ones([2]))
    mark_sharded(part)
    assert [list(residual.shape) for residual in ErrorFeedback([whole, part]).residuals.values()] == [[3]]


def test_one_process_set():
    feedback = ErrorFeedback([tf.Variable(tf.ones([3]))])
    feedback.used_among(workers_of([0, 1]))
    feedback.used_among(workers_of([0, 1]))
    # A set made later may have the same number.
    with pytest.raises(ValueError, match=r"must be used among the same workers, got ranks \[0, 2\] after \[0, 1\]"):
        feedback.used_among(workers_of([0, 2]))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ([], "build the model first"),
        ([tf.Variable(1)], "variables must hold one of float32"),
        ([tf.ones([2])], "variables must be variables, got"),
        ([tf.Variable(tf.ones([2]), shape=[None], name="v")], r"must have fixed shapes, got \(None,\) of v:0"),
    ],
)
def test_variables_that_cannot_have_residuals(variables, message):
    with pytest.raises(ValueError, match=message):
        ErrorFeedback(variables)


@pytest.mark.parametrize("wrong", [None, 1, [tf.Variable(1.0)], ErrorFeedback])
def test_what_is_no_error_feedback_is_refused_by_name(wrong):
    with pytest.raises(TypeError, match=r"error_feedback must be True, False, or an hvd8bit\.ErrorFeedback.*, got"):
        EightBit(error_feedback=wrong)


def test_it_is_a_setting_of_the_compressor():
    assert EightBit(error_feedback=False) == EightBit
    feedback = ErrorFeedback([tf.Variable(tf.ones([3]))])
    on = EightBit(error_feedback=feedback)
    assert on.feedback is on(data_type="linear").feedback is feedback
    assert on == EightBit(error_feedback=feedback) != EightBit
    assert repr(on) == repr(EightBit(error_feedback=True)) != repr(EightBit)
    assert "error_feedback=True" in repr(on)
    assert on(error_feedback=False) == EightBit


@pytest.mark.parametrize("reduce", [hvd8bit.allreduce, on_boundary, lambda x, compression: compression.compress(x)])
def test_where_there_are_no_variables_it_is_refused(reduce):
    with pytest.raises(ValueError, match="error_feedback must be False"):
        reduce(tf.ones([2000]), compression=EightBit(error_feedback=True))


def test_a_fixed_scale_winds_nothing_up(rng):
    """What it cuts off is lost, else it would go on long after."""
    encoding = Encoding("linear", scaling=1.0)
    largest = encoding.fixed_scale

    def work(comm):
        residual, outputs = tf.zeros([100]), []
        for gradient in [2.0 * largest] * 20 + [-0.1 * largest] * 3:
            how = {"factor": 1.0, "name": "windup"}
            output, error = exchange_with_errors([residual + gradient], encoding, comm, **how)
            outputs.append(float(output[0][0]))
            residual = error[0]
        return outputs

    for outputs in LoopbackComm.run(2, work):
        np.testing.assert_allclose(outputs[:20], largest, rtol=1e-6)
        np.testing.assert_allclose(outputs[20:], -0.1 * largest, rtol=0.1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_leaves_residuals(bad):
    residual = tf.Variable([1.0, 2.0])
    error = tf.constant([3.0, 4.0])
    rows = tf.IndexedSlices(tf.constant([[bad]]), tf.constant([0]))
    keep([(residual, error)], [tf.constant([1.0, bad]), None, tf.constant([1])])
    keep([(residual, error)], [tf.constant([1.0]), rows])
    assert residual.numpy().tolist() == [1.0, 2.0]
    keep([(residual, error)], [tf.constant([1.0, 2.0]), None, tf.constant([1])])
    assert residual.numpy().tolist() == [3.0, 4.0]


def test_checkpoints_hold_residuals(tmp_path):
    other, weight = tf.Variable(tf.ones([3]), name="layer_1/kernel"), tf.Variable(tf.ones([3]), name="layer_2/kernel")
    feedback = ErrorFeedback([other, weight])
    feedback.residual_of(weight).assign([1.0, 2.0, 3.0])
    path = tf.train.Checkpoint(weight=weight, feedback=feedback).save(str(tmp_path / "checkpoint"))
    again = ErrorFeedback([weight, other])  # by name, whatever the order
    tf.train.Checkpoint(weight=weight, feedback=again).restore(path).assert_consumed()
    assert again.residual_of(weight).numpy().tolist() == [1.0, 2.0, 3.0]
    assert again.residual_of(other).numpy().tolist() == [0.0, 0.0, 0.0]
    frozen = ErrorFeedback([weight])  # the first layer is no longer trained
    tf.train.Checkpoint(feedback=frozen).restore(path)
    assert frozen.residual_of(weight).numpy().tolist() == [1.0, 2.0, 3.0]
    grows = ErrorFeedback()
    tf.train.Checkpoint(feedback=grows).restore(path)
    assert grows.residual_of(weight).numpy().tolist() == [1.0, 2.0, 3.0]


def test_it_is_public():
    assert hvd8bit.ErrorFeedback is feedback_module.ErrorFeedback
