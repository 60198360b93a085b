"""Error feedback among workers: nothing is lost, and what is owed survives NaNs, checkpoints and other wrappers."""

import contextlib
import gc

import numpy as np
import pytest
import tensorflow as tf
from oracle import rank_values

import hvd8bit
import hvd8bit.keras
from hvd8bit import collectives, modes, reduction

ALL = hvd8bit.EightBit(min_elements=0)
COARSE = hvd8bit.EightBit(data_type="linear", block_size=None, min_elements=0)

pytestmark = pytest.mark.usefixtures("several")


@pytest.fixture
def several(hvd):
    if hvd.size() == 1:
        pytest.skip("nothing is exchanged")


def stepper(variables, feedback=False, compression=ALL, traced=True, scope="feedback", **settings):
    """A function that reduces one list of gradients."""
    compression = compression(error_feedback=feedback)

    def step(*gradients):
        names = [f"v{i}" for i in range(len(variables))]
        return reduction.reduce_gradients(
            list(gradients), names, variables=variables, compression=compression, scope=scope, **settings
        )

    return tf.function(step) if traced else step


def everyones(hvd, tensor, name):
    return hvd.allgather(tensor[None], name=name).numpy()


# ---- nothing is lost ----


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("mode", modes.MODES)
def test_averages_and_residuals_add_up_to_the_truth(hvd, mode, traced):
    shapes, steps = [(40, 30), (7,), (900,)], 12
    variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]
    feedback = hvd8bit.ErrorFeedback(variables)
    step = stepper(variables, feedback, COARSE(exchange=mode), traced, f"add_up_{mode}_{traced}")
    got = [np.zeros(shape) for shape in shapes]
    true = [np.zeros(shape) for shape in shapes]
    for number in range(steps):

        def gradients(rank, number=number):
            return [rank_values(rank, shape, seed=10 * number + i) for i, shape in enumerate(shapes)]

        for i, output in enumerate(step(*map(tf.constant, gradients(hvd.rank())))):
            got[i] += output.numpy()
            true[i] += np.mean([gradients(rank)[i].astype(np.float64) for rank in range(hvd.size())], axis=0)
    for i, residual in enumerate(feedback.residuals.values()):
        owed = everyones(hvd, residual, f"owed_{mode}_{traced}_{i}").astype(np.float64).mean(0)
        assert np.abs(got[i] - true[i]).max() > 1e-4
        size = np.abs(true[i]).max()
        np.testing.assert_allclose(got[i] + owed, true[i], rtol=0, atol=2e-6 * steps * size)


def test_a_number_too_small_for_its_neighbour_arrives(hvd, tmp_path_factory):
    """FIELD-CASES S7: 100 steps of [1, 1e-6]; saved by one worker at 50, resumed by all."""
    # Each worker owes something else; the mean is 1e-6.
    gradient = tf.constant([1.0, 2e-6 * (1 + hvd.rank()) / (1 + hvd.size())])
    without = stepper([tf.Variable(tf.zeros(2))], scope="s7_without")
    assert sum(without(tf.constant([1.0, 1e-6]))[0].numpy()[1] for _ in range(100)) == 0.0

    variable = tf.Variable(tf.zeros(2))
    feedback = hvd8bit.ErrorFeedback([variable])
    assert len(feedback.residuals) == 1
    step = stepper([variable], feedback, scope="s7")
    first = [step(gradient)[0].numpy() for _ in range(50)]
    feedback.average_over_workers()
    folder = hvd.broadcast_object(str(tmp_path_factory.mktemp("s7")), name="s7_folder")
    if hvd.rank() == 0:
        tf.train.Checkpoint(feedback=feedback).write(f"{folder}/at_50")
    hvd.allreduce(tf.zeros([]), name="s7_saved")
    straight = [step(gradient)[0].numpy() for _ in range(50)]
    assert abs(np.sum(first + straight, axis=0, dtype=np.float64)[1] - 1e-4) < 3e-6

    variable = tf.Variable(tf.zeros(2))
    resumed = hvd8bit.ErrorFeedback([variable])
    tf.train.Checkpoint(feedback=resumed).read(f"{folder}/at_50").assert_consumed()
    step = stepper([variable], resumed, scope="s7_resumed")
    np.testing.assert_array_equal([step(gradient)[0].numpy() for _ in range(50)], straight)


def test_it_costs_no_bytes(hvd):
    variables = [tf.Variable(tf.zeros(5000))]
    sent = []
    for feedback in (False, hvd8bit.ErrorFeedback(variables)):
        step = stepper(variables, feedback, scope=f"bytes_{bool(feedback)}")
        step(tf.ones(5000))
        before = hvd8bit.collectives.sent_bytes()
        step(tf.ones(5000))
        sent.append(hvd8bit.collectives.sent_bytes() - before)
    assert sent[0] == sent[1] > 0


def test_workers_out_of_step_of_each_other(hvd):
    """One worker sends a small number now, the other later: the sum is rounded again, and that must not lose it."""
    variable = tf.Variable(tf.zeros([64]))
    feedback = hvd8bit.ErrorFeedback([variable])
    step = stepper([variable], feedback, ALL(exchange="scatter_reduce"), scope="out_of_step")
    small = 1e-6 * (1 + hvd.rank())
    gradient = tf.constant([1.0] + [small] * 63)
    total = np.sum([step(gradient)[0].numpy() for _ in range(200)], axis=0, dtype=np.float64)
    expected = 200 * 1e-6 * np.mean([1 + rank for rank in range(hvd.size())])
    np.testing.assert_allclose(total[1:], expected, atol=4e-6 * hvd.size())


def test_made_inside_a_function_it_is_refused(hvd):
    """It would begin anew each time."""
    variable = tf.Variable(tf.zeros(2000))

    @tf.function
    def step(gradient):
        compression = COARSE(error_feedback=True)
        return reduction.reduce_gradients([gradient], ["v"], variables=[variable], compression=compression, scope="in")

    with pytest.raises(ValueError, match="once, outside of the step"):
        step(tf.ones(2000))


# ---- what must not harm it ----


def test_a_nan_shows_once_and_residuals_stay(hvd):
    variables = [tf.Variable(tf.zeros(3000)), tf.Variable(tf.zeros(3000))]
    feedback = hvd8bit.ErrorFeedback(variables)
    step = stepper(variables, feedback, scope="nan")
    good = [tf.constant(rank_values(hvd.rank(), [3000], seed=i)) for i in range(2)]
    step(*good)
    before = [residual.numpy() for residual in feedback.residuals.values()]
    bad = [tf.tensor_scatter_nd_update(good[0], [[7]], [np.nan if hvd.rank() == 0 else 1.0]), good[1]]
    assert np.isnan(step(*bad)[0].numpy()[7])
    for residual, was in zip(feedback.residuals.values(), before):
        assert was.any()
        np.testing.assert_array_equal(residual.numpy(), was)
    assert np.isfinite(step(*good)[0].numpy()).all()


def test_halves_lose_nothing_either(hvd):
    """What the results lose in their dtype is owed, too."""
    steps, shape = 30, [2000]
    variables = [tf.Variable(tf.zeros(shape, dtype)) for dtype in ("float16", "bfloat16")]
    for mode in modes.MODES:
        feedback = hvd8bit.ErrorFeedback(variables)
        step = stepper(variables, feedback, ALL(exchange=mode), scope=f"halves_{mode}")
        gradients = [tf.cast(rank_values(hvd.rank(), shape, seed=1), v.dtype) for v in variables]
        results = [step(*gradients) for _ in range(steps)]
        for i, residual in enumerate(feedback.residuals.values()):
            assert results[0][i].dtype == variables[i].dtype
            everyone = everyones(hvd, tf.cast(gradients[i], tf.float32), f"halves_{mode}_{i}").astype(np.float64)
            owed = everyones(hvd, residual, f"halves_owed_{mode}_{i}").astype(np.float64).mean(0)
            got = sum(tf.cast(result[i], tf.float64).numpy() for result in results)
            true = steps * everyone.mean(0)
            np.testing.assert_allclose(got + owed, true, rtol=0, atol=1e-5 * np.abs(true).max())


def test_what_travels_as_it_is_has_no_residual_to_mind(hvd):
    """Small, sparse, and absent gradients beside one that is encoded."""
    variables = [tf.Variable(tf.zeros(shape)) for shape in ([3000], [10], [8, 4], [5000])]
    feedback = hvd8bit.ErrorFeedback()
    rows = tf.IndexedSlices(tf.fill([2, 4], hvd.rank() + 1.0), tf.constant([0, 5]), dense_shape=tf.constant([8, 4]))
    own = [tf.constant(rank_values(hvd.rank(), [size], seed=1)) for size in (3000, 10)]
    step = stepper(variables, feedback, hvd8bit.EightBit)
    results = step(own[0], own[1], rows, None)
    assert results[3] is None
    assert isinstance(results[2], tf.IndexedSlices)
    mean = np.mean([rank_values(rank, [10], seed=1) for rank in range(hvd.size())], axis=0)
    np.testing.assert_allclose(results[1].numpy(), mean, rtol=1e-6, atol=1e-7)
    assert [list(residual.shape) for residual in feedback.residuals.values()] == [[3000]]


def test_sums_and_predivided_means(hvd):
    values, n = [rank_values(rank, [3000], seed=4) for rank in range(hvd.size())], hvd.size()
    variable = tf.Variable(tf.zeros([3000]))
    for number, settings in enumerate(({"op": hvd.Sum}, {"gradient_predivide_factor": 4.0})):
        feedback = hvd8bit.ErrorFeedback([variable])
        step = stepper([variable], feedback, COARSE, scope=f"scaled_{number}", **settings)
        got = sum(step(tf.constant(values[hvd.rank()]))[0].numpy().astype(np.float64) for _ in range(10))
        owed = everyones(hvd, feedback.residual_of(variable), f"scaled_owed_{number}").astype(np.float64)
        whole = n if "op" in settings else 1
        true = 10 * np.mean(values, axis=0, dtype=np.float64) * whole
        np.testing.assert_allclose(got + owed.mean(0) * whole, true, rtol=0, atol=1e-5 * np.abs(true).max())


def test_what_is_owed_goes_along_when_a_step_is_exact(hvd):
    """Before `start_step`, say of a resumed run."""
    variable = tf.Variable(tf.zeros([2000]))
    feedback = hvd8bit.ErrorFeedback([variable])
    feedback.residual_of(variable).assign(tf.fill([2000], hvd.rank() + 1.0))
    number = tf.Variable(0, dtype=tf.int64)
    select = hvd8bit.Selection(min_elements=0, start_step=2)
    step = stepper([variable], feedback, COARSE(select=select), scope="start_step", step=number)
    gradient = tf.constant(rank_values(hvd.rank(), [2000], seed=2))
    exact = hvd.allreduce(gradient, name="start_step_exact").numpy()
    owed = (hvd.size() + 1) / 2
    np.testing.assert_allclose(step(gradient)[0].numpy(), exact + owed, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(step(gradient)[0].numpy(), exact)
    assert not feedback.residual_of(variable).numpy().any()
    number.assign(2)
    step(gradient)
    assert feedback.residual_of(variable).numpy().any()


def test_residuals_of_a_model_that_one_worker_still_holds(hvd):
    """Python collects garbage when it likes, on each worker."""
    feedback = hvd8bit.ErrorFeedback()
    variable = tf.Variable(tf.zeros([2000]), name="w")
    feedback.residual_of(variable).assign(tf.fill([2000], 7.0))
    held = [variable] if hvd.rank() else []
    del variable
    gc.collect()
    again = tf.Variable(tf.zeros([2000]), name="w")
    feedback.residual_of(again).assign(tf.fill([2000], hvd.rank() + 1.0))
    assert len(feedback.residuals) == 1 + len(held)
    feedback.average_over_workers()
    assert np.all(feedback.residual_of(again).numpy() == (hvd.size() + 1) / 2)
    assert all(np.all(feedback.residual_of(other).numpy() == 7) for other in held)


def test_process_sets(hvd, monkeypatch):
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    if hvd.size() < 3:
        pytest.skip("needs 3 workers")
    pair = hvd.add_process_set([0, hvd.size() - 1])
    variable = tf.Variable(tf.zeros([2000]))
    feedback = hvd8bit.ErrorFeedback([variable])
    step = stepper([variable], feedback, COARSE, scope="pair", process_set=pair)
    step(tf.constant(rank_values(hvd.rank(), [2000], seed=2)))
    before = everyones(hvd, feedback.residual_of(variable), "pair_before")
    feedback.average_over_workers()
    after = everyones(hvd, feedback.residual_of(variable), "pair_after")
    members = [0, hvd.size() - 1]
    for rank in range(hvd.size()):
        expected = before[members].mean(0) if rank in members else np.zeros(2000)
        np.testing.assert_allclose(after[rank], expected, rtol=1e-5, atol=1e-7)
    if hvd.rank() in members:
        with pytest.raises(ValueError, match=r"must be used among the same workers, got ranks \[0, 1, 2.* after \[0, "):
            feedback.used_among(collectives.HorovodComm())
    hvd.allreduce(tf.zeros([]), name="pair_done")
    hvd.remove_process_set(pair)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variables": "others"}, "error_feedback has no residual for other"),
        ({"variables": None}, "error_feedback needs variables, got None"),
        ({"variables": "twice"}, "error_feedback needs each variable once"),
        ({"sparse": True}, "error_feedback cannot be kept for rows of v0"),
        ({"elastic": True}, "error_feedback must be False in an elastic job"),
        ({"graph": True}, "error_feedback must be False in a graph of TensorFlow 1"),
    ],
    ids=["unknown variable", "no variables", "twice", "sparse", "elastic", "graph"],
)
def test_what_cannot_be_is_refused_on_every_worker(hvd, monkeypatch, change, message):
    variable = tf.Variable(tf.zeros([2000, 2]))
    compression = ALL(error_feedback=hvd8bit.ErrorFeedback([variable]))
    gradients, variables = [tf.ones([2000, 2])], [variable]
    if "variables" in change:
        others = {"others": [tf.Variable(tf.zeros([2000, 2]), name="other")], "twice": [variable, variable], None: None}
        variables = others[change["variables"]]
        gradients = gradients * len(variables or [0])
    if "sparse" in change:
        gradients = [tf.IndexedSlices(tf.ones([3, 2]), tf.constant([0, 1, 2]), tf.constant([2000, 2]))]
        compression = compression(select=hvd8bit.Selection(sparse="compress"))
    if "elastic" in change:
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    names = [f"v{i}" for i in range(len(gradients))]
    with contextlib.ExitStack() as stack:
        if "graph" in change:
            stack.enter_context(tf.Graph().as_default())
            gradients = [tf.compat.v1.placeholder(tf.float32, [2000, 2])]
        with pytest.raises(ValueError, match=message):
            reduction.reduce_gradients(gradients, names, variables=variables, compression=compression, scope="refused")


@pytest.mark.parametrize("what", ["without", "unknown variable"])
def test_one_worker_that_differs_is_told_to_all(hvd, what):
    variable, other = tf.Variable(tf.zeros(2000)), tf.Variable(tf.zeros(2000))
    mine = {"without": True, "unknown variable": hvd8bit.ErrorFeedback([variable])}[what]
    others = {"without": False, "unknown variable": hvd8bit.ErrorFeedback([other])}[what]
    feedback = mine if hvd.rank() == 0 else others
    with pytest.raises(ValueError, match=r"workers differ in the settings: .*error_feedback"):
        stepper([variable], feedback, traced=False, scope=f"differs_{what}")(tf.ones(2000))


# ---- the wrappers ----


def test_tape(hvd):
    weight = tf.Variable(tf.zeros([100, 30]))
    feedback = hvd8bit.ErrorFeedback([weight])
    inputs = tf.constant(rank_values(hvd.rank(), [8, 100], seed=3))

    def gradient_of(wrap):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((inputs @ weight - 1.0) ** 2)
        return wrap(tape).gradient(loss, [weight])[0]

    compression = COARSE(error_feedback=feedback)
    step = tf.function(lambda: gradient_of(lambda t: hvd8bit.DistributedGradientTape(t, compression=compression)))
    got = sum(step().numpy().astype(np.float64) for _ in range(10))
    owed = everyones(hvd, feedback.residual_of(weight), "tape_owed").astype(np.float64).mean(0)
    true = 10 * everyones(hvd, gradient_of(lambda tape: tape), "tape_true").astype(np.float64).mean(0)
    assert np.abs(got - true).max() > 1e-3
    np.testing.assert_allclose(got + owed, true, rtol=0, atol=1e-5 * np.abs(true).max())


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_gradients_of_its_results_are_refused(hvd, traced):
    weight = tf.Variable(tf.ones([2000]))
    compression = ALL(error_feedback=hvd8bit.ErrorFeedback([weight]))

    def penalty_gradient():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight**3)
            tape = hvd8bit.DistributedGradientTape(tape, compression=compression)
            penalty = tf.reduce_sum(tape.gradient(loss, [weight])[0] ** 2)  # allowed, if nobody asks for its gradient
        return outer.gradient(penalty, weight)

    with pytest.raises(ValueError, match="error_feedback must be False where gradients of reduced gradients"):
        (tf.function(penalty_gradient) if traced else penalty_gradient)()


SMALL = 1e-4 * (1.0 + np.arange(50)) / 50


def train(hvd, compression, optimizer=None, steps=400, callbacks=(), **settings):
    """Mean step of weights whose gradients are 1 and the small ones above, times the number of the worker."""
    keras = tf.keras
    gradient = tf.constant(np.concatenate([[1.0], SMALL]).astype(np.float32)) * (1.0 + hvd.rank())
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(51, use_bias=False, kernel_initializer="zeros")])
    optimizer = hvd8bit.keras.DistributedOptimizer(
        optimizer or keras.optimizers.SGD(1.0), compression=compression, average_aggregated_gradients=True, **settings
    )
    model.compile(optimizer, loss=lambda y, predicted: tf.reduce_sum(tf.cast(predicted, tf.float32) * gradient))
    ones = np.ones([steps, 1], np.float32)
    model.fit(ones, ones, batch_size=1, verbose=0, shuffle=False, callbacks=list(callbacks))
    return -model.get_weights()[0][0] / steps


@pytest.mark.parametrize("passes", [1, 2])
def test_optimizer(hvd, passes):
    """`linear` with one scale loses small parts of a gradient for good; with error feedback they arrive."""
    steps, mean = 400, np.mean([1.0 + rank for rank in range(hvd.size())])
    lost = train(hvd, COARSE, backward_passes_per_step=passes) * passes
    compression = COARSE(error_feedback=True)
    kept = train(hvd, compression, backward_passes_per_step=passes) * passes
    assert not lost[1:20].any()
    np.testing.assert_allclose(kept[1:], mean * SMALL, atol=mean * 0.02 / (steps / passes))
    assert len(np.unique(everyones(hvd, tf.constant(kept), f"weights_{passes}"), axis=0)) == 1
    [name] = compression.feedback.residuals
    assert name.endswith("kernel")


def test_telemetry_looks_on_without_touching_residuals(hvd, tmp_path):
    kept = train(hvd, COARSE(error_feedback=True), steps=100)
    callback = hvd8bit.keras.callbacks.TelemetryCallback(str(tmp_path), errors_every=5)
    observed = train(hvd, COARSE(error_feedback=True), steps=100, callbacks=[callback])
    np.testing.assert_array_equal(observed, kept)


@pytest.mark.skipif(not hasattr(tf.keras, "ops"), reason="loss scaling of Keras 3")
def test_a_step_that_loss_scaling_skips_counts_for_nothing(hvd):
    optimizer = tf.keras.optimizers.LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), initial_scale=2.0**127)
    compression = COARSE(error_feedback=True)
    kept = train(hvd, compression, optimizer)
    mean = np.mean([1.0 + rank for rank in range(hvd.size())])
    assert kept[0] < mean  # steps were skipped at first
    np.testing.assert_allclose(kept[1:] / kept[0], SMALL, atol=0.02 / 200)
    assert all(np.isfinite(residual.numpy()).all() for residual in compression.feedback.residuals.values())
