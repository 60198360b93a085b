"""SplitModel: stages on 2, 3 or 4 workers, and two pipelines of two, compute what one process computes."""

from __future__ import annotations

import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit.parallel import SplitModel, measure_boundaries
from hvd8bit.parallel.schedule import one_forward_one_backward

MICRO_BATCHES = 3
ENCODE_ALL = hvd8bit.EightBit(min_elements=0)


@pytest.fixture(autouse=True)
def fresh_names():
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)


def make_layers(dtype="float32", dropout=0.0):
    """Eight layers, of all kinds that matter: two for each of up to four stages."""
    regularised = {"kernel_regularizer": keras.regularizers.L2(0.01)}
    return [
        keras.layers.Conv2D(8, 3, activation="relu", dtype=dtype, **regularised),
        keras.layers.Dropout(dropout, dtype=dtype),
        keras.layers.Flatten(dtype=dtype),
        keras.layers.Dense(40, activation="relu", dtype=dtype),
        keras.layers.Dense(40, activation="relu", dtype=dtype, activity_regularizer=keras.regularizers.L2(0.01)),
        keras.layers.Dense(30, activation="relu", dtype=dtype),
        keras.layers.Dense(20, activation="relu", dtype=dtype, **regularised),
        keras.layers.Dense(10, activation="softmax", dtype=dtype),
    ]


def in_stages(layers, stages):
    ends = [len(layers) * stage // stages for stage in range(stages + 1)]
    return [layers[start:end] for start, end in zip(ends, ends[1:])]


def make_data(rows, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, 8, 8, 1)).astype(dtype), rng.integers(0, 10, rows)


def make_pair(hvd, dtype="float32", *, loss="sparse_categorical_crossentropy", optimizer=None, dropout=0.0, **settings):
    """A split model, and the same model in one process."""
    split = SplitModel(in_stages(make_layers(dtype, dropout), hvd.size()), MICRO_BATCHES, **settings)
    split.build((None, 8, 8, 1), dtype)
    whole = keras.models.clone_model(split.merge())
    whole.build((None, 8, 8, 1))
    whole.set_weights(split.merge().get_weights())
    for model in (split, whole):
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.1), loss=loss, metrics=["accuracy"])
    return split, whole


def relative(a, b):
    a, b = (np.concatenate([np.ravel(part).astype("float64") for part in parts]) for parts in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def same_on_all(hvd, values):
    values = np.asarray(values, "float64").reshape(1, -1)
    return bool(np.all(hvd.allgather(tf.constant(values), name="same").numpy() == values))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_exact_training_is_that_of_one_process(hvd, dtype, tolerance):
    keras.config.set_floatx(dtype)
    try:
        split, whole = make_pair(hvd, dtype, compression=None)
        losses = []
        for step in range(20):
            x, y = make_data(2 if step == 3 else 16 + step % 3, dtype, seed=step)  # 2: less than micro-batches
            before = [weight.numpy() for weight in split.stage.weights]
            reference_before = [weight.numpy() for weight in whole.weights]
            losses.append([model.train_on_batch(x, y)[0] for model in (split, whole)])
            if step in (0, 3):
                # With plain SGD the change of the weights is the gradient.
                gradients = [b - a.numpy() for b, a in zip(before, split.stage.weights)]
                reference = [b - a.numpy() for b, a in zip(reference_before, whole.weights)]
                sizes = [len(s) for s in stage_weights(split)]
                start = sum(sizes[: split.stage_number])
                for gradient, expected in zip(gradients, reference[start : start + len(gradients)]):
                    assert np.linalg.norm(gradient - expected) <= 20 * tolerance * max(np.linalg.norm(expected), 1e-3)
        losses = np.array(losses)
        np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=tolerance)
        assert relative(split.merge().get_weights(), whole.get_weights()) <= tolerance
        assert losses[-1, 0] != losses[0, 0]
        assert same_on_all(hvd, losses)
    finally:
        keras.config.set_floatx("float32")


def stage_weights(split):
    return [stage.weights for stage in split.merge().layers]


def test_eight_bit_training_follows_one_process(hvd):
    split, whole = make_pair(hvd, compression=ENCODE_ALL)
    batches = [make_data(32, seed=step) for step in range(20)]
    losses = np.array([[model.train_on_batch(x, y)[0] for x, y in batches] for model in (split, whole)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)
    assert np.any(losses[0] != losses[1]), "nothing was rounded"
    assert relative(split.merge().get_weights(), whole.get_weights()) < 0.02


def test_fit_evaluate_and_predict_are_those_of_one_process(hvd, capsys):
    split, whole = make_pair(hvd, compression=None, optimizer=lambda: keras.optimizers.Adam(0.003))
    x, y = make_data(50)
    weights = np.linspace(0.5, 1.5, 50)
    mine = x if split.stage_number == 0 else np.zeros_like(x)  # nobody looks at the other stages' data
    labels = y if split.stage_number == 0 else np.zeros_like(y)
    seen = []
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(dict(logs)),
        on_train_batch_end=lambda batch, logs: seen.append(logs),
    )
    arguments = {"batch_size": 16, "epochs": 2, "shuffle": False, "sample_weight": weights}
    history = split.fit(mine, labels, validation_data=(mine, labels), callbacks=[stop], verbose=2, **arguments)
    printed = capsys.readouterr().out
    expected = whole.fit(x, y, validation_data=(x, y), verbose=0, **arguments).history
    assert ("Epoch 1/2" in printed) == (hvd.rank() == 0)
    assert history.history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-4, err_msg=name)
    assert len(seen) == 2 * (4 + 1)
    assert all({"loss", "accuracy"} <= set(logs) for logs in seen)
    assert same_on_all(hvd, [logs["loss"] for logs in seen])

    expected = whole.evaluate(x, y, batch_size=20, verbose=0)
    np.testing.assert_allclose(split.evaluate(mine, labels, batch_size=20, verbose=0), expected, rtol=1e-4)
    found = split.evaluate(mine, labels, batch_size=20, verbose=0, return_dict=True)
    assert set(found) == {"loss", "accuracy"}
    outputs = split.predict(mine, batch_size=20, verbose=0)
    assert outputs.shape == (50, 10)
    np.testing.assert_allclose(outputs, whole.predict(x, batch_size=20, verbose=0), rtol=1e-3, atol=1e-6)


def test_shuffled_data_of_the_first_stage_find_their_labels(hvd):
    """Every worker shuffles in an order of its own; labels come from where the images come from."""
    keras.utils.set_random_seed(hvd.rank())
    split, _ = make_pair(hvd, optimizer=lambda: keras.optimizers.Adam(0.01))
    x, y = make_data(60)
    history = split.fit(x, y, batch_size=20, epochs=40, verbose=0).history
    assert history["accuracy"][-1] > 0.6, history["accuracy"]  # of random labels: only if each belongs to its image


def test_a_step_runs_as_a_graph_also_with_run_eagerly(hvd):
    split, whole = make_pair(hvd, compression=None)
    split.compile(keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy", run_eagerly=True)
    x, y = make_data(10)
    found = split.fit(x, y, batch_size=4, shuffle=False, verbose=0).history["loss"]
    expected = whole.fit(x, y, batch_size=4, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert split.predict(x, verbose=0).shape == (10, 10)


def test_sums_are_summed(hvd):
    split, whole = make_pair(hvd, compression=None, loss=keras.losses.SparseCategoricalCrossentropy(reduction="sum"))
    for model in (split, whole):
        model.optimizer.learning_rate = 0.001
    for rows in (16, 2):
        x, y = make_data(rows)
        found, expected = (model.train_on_batch(x, y)[0] for model in (split, whole))
        assert found == pytest.approx(expected, rel=1e-5)
    assert relative(split.merge().get_weights(), whole.get_weights()) <= 1e-5


def test_dropout_and_batch_normalization_inside_stages(hvd):
    layers = make_layers(dropout=0.3)
    layers.insert(2, keras.layers.BatchNormalization(momentum=0.5))
    split = SplitModel(in_stages(layers, hvd.size()), MICRO_BATCHES)
    split.compile(keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = make_data(64)
    history = split.fit(x, y, batch_size=32, epochs=30, shuffle=False, verbose=0).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    moving = [weight.numpy() for weight in split.merge().weights if "moving" in weight.path]
    assert len(moving) == 2
    assert all(np.all(np.isfinite(values)) for values in moving)
    assert np.any(moving[0] != 0)


def test_every_stage_works_in_the_order_of_the_schedule(hvd):
    events: list = []

    @tf.custom_gradient
    def watched(x):
        def note(what):
            tf.py_function(lambda: events.append(what), [], [])

        tf.py_function(lambda value: events.append("forward"), [x], [])

        def grad(error):
            with tf.control_dependencies([tf.py_function(lambda value: events.append("backward"), [error], [])]):
                return tf.identity(error)

        del note
        return tf.identity(x), grad

    class Watched(keras.layers.Layer):
        def call(self, x):
            return watched(x)

    stages = [[keras.layers.Dense(16), Watched(), keras.layers.Dense(16)] for _ in range(hvd.size())]
    split = SplitModel(stages, micro_batches=6, compression=None)
    split.compile("sgd", loss="mse")
    x = np.ones((12, 16), "float32")
    split.train_on_batch(x, x)
    actions = one_forward_one_backward(hvd.size(), hvd.rank(), 6)
    assert events == ["backward" if action.backward else "forward" for action in actions]


def test_activations_and_error_signals_of_a_megabyte_take_a_quarter(hvd):
    rows, width = 1024, 256 * MICRO_BATCHES  # a micro-batch: 1 MB
    sent = {}
    for compression in (None, hvd8bit.EightBit):
        keras.utils.set_random_seed(1)
        stages = [[keras.layers.Dense(width)] for _ in range(hvd.size())]
        split = SplitModel(stages, MICRO_BATCHES, compression=compression)
        split.compile(keras.optimizers.SGD(0.001), loss="mse")
        x = np.random.default_rng(0).standard_normal((rows, width)).astype("float32")
        with measure_boundaries() as report:
            split.train_on_batch(x, x)
        sent[compression is None] = {(row["boundary"][-1], row["direction"]): row for row in report.rows()}
    expected = set()
    if hvd.rank() < hvd.size() - 1:
        expected.add((str(hvd.rank()), "forward"))
    if hvd.rank() > 0:
        expected.add((str(hvd.rank() - 1), "backward"))
    assert set(sent[True]) == set(sent[False]) == expected
    for key in expected:
        exact, eight = sent[True][key], sent[False][key]
        assert exact["sent_bytes"] >= 4 * rows * width
        assert exact["relative_error"] == 0
        assert eight["sent_bytes"] <= 0.27 * exact["sent_bytes"]
        assert 0 < eight["relative_error"] < 0.03
        assert eight["exchanges"] == MICRO_BATCHES


def test_each_boundary_has_its_own_settings(hvd):
    compressions = [None, ENCODE_ALL(data_type="linear"), ENCODE_ALL(block_size=64)][: hvd.size() - 1]
    split, whole = make_pair(hvd, compression=compressions)
    x, y = make_data(32)
    with measure_boundaries() as report:
        found, expected = (model.train_on_batch(x, y)[0] for model in (split, whole))
    assert found == pytest.approx(expected, rel=0.02)
    for row in report.rows():
        assert (row["relative_error"] == 0) == (compressions[int(row["boundary"][-1])] is None), row


def test_merge_gives_a_plain_model_that_saves_and_loads(hvd, tmp_path):
    split, _ = make_pair(hvd)
    x, y = make_data(20)
    split.fit(x, y, epochs=2, verbose=0)
    merged = split.merge()
    assert same_on_all(hvd, [zlib.crc32(b"".join(weight.tobytes() for weight in merged.get_weights()))])
    merged.save(tmp_path / "whole.keras")
    loaded = keras.models.load_model(tmp_path / "whole.keras")
    exact = SplitModel([lambda s=s: s for s in loaded.layers], compression=None)
    exact.build((None, 8, 8, 1))
    np.testing.assert_allclose(exact.predict(x, verbose=0), loaded.predict(x, verbose=0), rtol=1e-4, atol=1e-6)


def test_a_worker_makes_its_own_stage_alone(hvd):
    made = []

    def make(number):
        made.append(number)
        return [keras.layers.Dense(16, activation="relu")]

    split = SplitModel([lambda number=number: make(number) for number in range(hvd.size())])
    split.compile("sgd", loss="mse")
    split.train_on_batch(np.ones((8, 5), "float32"), np.ones((8, 16), "float32"))
    assert made == [hvd.rank()]
    assert split.count_params() == (5 if hvd.rank() == 0 else 16) * 16 + 16


# ---- what does not fit: an error on all workers, that says what and where ----


class Whole(keras.layers.Layer):
    def call(self, x):
        return keras.ops.cast(x, "int32")

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, dtype="int32")


def fitted(stages, x=None, y=None, **settings):
    split = SplitModel(stages, **settings)
    split.compile("sgd", loss="mse")
    x = np.ones((8, 4), "float32") if x is None else x
    split.fit(x, np.ones((8, 4), "float32") if y is None else y, batch_size=4, verbose=0)


def dense(n, **arguments):
    return [keras.layers.Dense(4, **arguments) for _ in range(n)]


def test_the_number_of_stages_must_be_that_of_workers(hvd):
    n = hvd.size()
    with pytest.raises(ValueError, match=rf"{n + 1} stages in 1 replica\(s\) need {n + 1} workers, got {n}"):
        SplitModel(dense(n + 1))
    with pytest.raises(ValueError, match=rf"give replicas={n}, or start"):
        SplitModel(dense(1))


def test_replicas_need_process_sets_unless_there_is_one_stage(hvd):
    """This launch is one without HOROVOD_DYNAMIC_PROCESS_SETS."""
    if hvd.size() == 4:
        with pytest.raises(ValueError, match=r'ranks \[0, 1\] is needed.*hvd.init\(process_sets="dynamic"\)'):
            SplitModel(dense(2), replicas=2)
    fitted(dense(1), replicas=hvd.size())


def test_error_feedback_of_replicas(hvd):
    coarse = hvd8bit.EightBit(data_type="linear", block_size=None, min_elements=0, error_feedback=True)
    fitted(
        dense(1),
        np.random.default_rng(hvd.rank()).random((8, 4), "float32"),
        replicas=hvd.size(),
        gradient_compression=coarse,
    )
    assert len(coarse.feedback.residuals) == (2 if hvd.size() > 1 else 0)  # kernel and bias
    assert all(residual.numpy().any() for residual in coarse.feedback.residuals.values())


@pytest.mark.parametrize("eagerly", [False, True], ids=["", "run_eagerly"])
def test_compiling_again(hvd, eagerly):
    """What trains then is the new optimizer, with the new metrics."""
    x = np.random.default_rng(0).random((8, 4), "float32")
    model = SplitModel(dense(hvd.size()), micro_batches=2)
    model.compile("sgd", "mse", metrics=["mae"], run_eagerly=eagerly)
    assert set(model.fit(x, x, batch_size=4, verbose=0).history) == {"loss", "mae"}
    before = [np.array(weight) for weight in model.stage.weights]
    still = keras.optimizers.SGD(0.0)
    model.compile(still, "mse", metrics=["mse"], run_eagerly=eagerly)
    assert set(model.fit(x, x, batch_size=4, verbose=0).history) == {"loss", "mse"}
    assert int(still.iterations) == 2
    for weight, old in zip(model.stage.weights, before):
        np.testing.assert_array_equal(np.array(weight), old)


def test_a_stage_that_gives_no_floats_is_named_on_all_workers(hvd):
    stages = [[keras.layers.Dense(4), Whole()], *dense(hvd.size() - 1)]
    with pytest.raises(ValueError, match=r"stages\[0\] .*on rank 0\) must give a float tensor .*got int32"):
        fitted(stages)


def test_stages_that_do_not_chain_are_named_on_all_workers(hvd):
    last = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)])
    message = rf"stages\[{hvd.size() - 1}\] .* does not take the output of stages\[{hvd.size() - 2}\], float32 .*\[4\]"
    with pytest.raises(ValueError, match=message):
        fitted([*dense(hvd.size() - 1), last])


def test_a_stage_with_two_outputs_is_named_on_all_workers(hvd):
    x = keras.Input((4,))
    two = keras.Model(x, [keras.layers.Dense(4)(x), keras.layers.Dense(4)(x)])
    with pytest.raises(ValueError, match=r"stages\[0\] .*must give one tensor"):
        fitted([two, *dense(hvd.size() - 1)])


def test_different_numbers_of_steps_are_an_error_before_the_first_one(hvd):
    rows = 12 if hvd.rank() == 0 else 8
    with pytest.raises(ValueError, match=r"as many steps.*1 epochs of 3 steps.*1 epochs of 2 steps"):
        fitted(dense(hvd.size()), np.ones((rows, 4), "float32"), np.ones((rows, 4), "float32"))


@pytest.mark.parametrize(
    ("first", "others", "message"),
    [
        ({"rows": 4}, {"rows": 8}, r"validation of 1 steps.*validation of 2 steps"),
        ({"freq": 1}, {"freq": 2}, r"validation of 1 steps.*epoch 2"),
        ({"freq": 3}, {"freq": 2}, r"the end of fit.*validation of 1 steps"),
    ],
    ids=["more_steps", "more_often", "at_the_end"],
)
def test_different_validation_is_an_error(hvd, first, others, message):
    split, _ = make_pair(hvd)
    mine = first if hvd.rank() == 0 else others
    validation = {"validation_data": make_data(mine.get("rows", 4)), "validation_freq": mine.get("freq", 1)}
    with pytest.raises(ValueError, match=f"as many steps.*{message}"):
        split.fit(*make_data(12), batch_size=4, epochs=2, verbose=0, **validation)


def test_different_settings_are_an_error(hvd):
    with pytest.raises(ValueError, match=r"workers differ in the settings .*rank 1 has 3 micro-batches"):
        fitted(dense(hvd.size()), micro_batches=3 if hvd.rank() == 1 else 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": keras.optimizers.SGD(global_clipnorm=1.0)}, "global_clipnorm must be None"),
        (
            {"optimizer": "sgd", "loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")},
            "must be a mean",
        ),
        ({"optimizer": "sgd", "steps_per_execution": 2}, "steps_per_execution must be 1"),
        ({"optimizer": "sgd", "jit_compile": True}, "jit_compile must be False"),
    ],
)
def test_what_compile_refuses(hvd, arguments, message):
    split = SplitModel(dense(hvd.size()))
    with pytest.raises(ValueError, match=message):
        split.compile(**{"loss": "mse", **arguments})


def test_compile_refuses_a_distributed_optimizer(hvd):
    split = SplitModel(dense(hvd.size()))
    with pytest.raises(ValueError, match="must be the plain one for a SplitModel"):
        split.compile(hvd8bit.keras.DistributedOptimizer(keras.optimizers.SGD()), loss="mse")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"compression": hvd8bit.Selection()}, TypeError, "compression must be hvd8bit.EightBit"),
        ({"compression": [None] * 7}, ValueError, "a list with one for each of"),
        ({"micro_batches": 0}, ValueError, "micro_batches must be an integer of at least 1"),
        ({"replicas": 0}, ValueError, "replicas must be an integer of at least 1"),
    ],
)
def test_wrong_settings(hvd, settings, error, message):
    with pytest.raises(error, match=message):
        SplitModel(dense(hvd.size()), **settings)


def test_a_split_model_cannot_be_called(hvd):
    with pytest.raises(NotImplementedError, match="use predict, or merge"):
        SplitModel(dense(hvd.size()))(np.ones((2, 4), "float32"))
