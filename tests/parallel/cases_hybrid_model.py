"""HybridModel: lower layers on each worker's own data, upper ones on all of it, compute what one process computes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit.parallel import ColumnParallelDense, HybridModel, merge

ENCODE_ALL = hvd8bit.EightBit(min_elements=0)
SUB_BATCHES = 3


@pytest.fixture(autouse=True)
def fresh_names():
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)


def make_lower(dtype="float32"):
    return [
        keras.layers.Conv2D(6, 3, activation="relu", kernel_regularizer=keras.regularizers.L2(0.01), dtype=dtype),
        keras.layers.Flatten(dtype=dtype),
        keras.layers.Dense(24, activation="relu", activity_regularizer=keras.regularizers.L2(0.01), dtype=dtype),
    ]


def make_upper(dtype="float32", compression=None, dropout=0.0):
    regularised = {"kernel_regularizer": keras.regularizers.L2(0.01)}
    return [
        keras.layers.Dropout(dropout, dtype=dtype),
        ColumnParallelDense(30, activation="relu", compression=compression, name="fc1", dtype=dtype),
        keras.layers.Dense(16, activation="relu", name="whole", dtype=dtype, **regularised),
        ColumnParallelDense(10, activation="softmax", compression=compression, name="fc2", dtype=dtype),
    ]


def make(dtype="float32", compression=None, optimizer=None, loss="sparse_categorical_crossentropy", **settings):
    model = HybridModel(
        make_lower(dtype),
        make_upper(dtype, compression),
        SUB_BATCHES,
        compression=compression,
        gradient_compression=compression,
        **settings,
    )
    model.build((None, 6, 6, 1), dtype)
    model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.1), loss=loss, metrics=["accuracy"])
    return model


def whole_model(model, optimizer=None, loss="sparse_categorical_crossentropy"):
    """The same model in one process, with the weights that it has now."""
    whole = keras.Sequential([keras.models.clone_model(model.lower), merge(model.upper)])
    whole.build((None, 6, 6, 1))
    whole.layers[0].set_weights(model.lower.get_weights())
    whole.compile(optimizer() if optimizer else keras.optimizers.SGD(0.1), loss=loss, metrics=["accuracy"])
    return whole


def weights_of_all(model):
    return [*model.lower.get_weights(), *merge(model.upper).get_weights()]


def make_data(rows, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, 6, 6, 1)).astype(dtype), rng.integers(0, 10, rows)


def parts_of_all(hvd, rows_of, dtype="float32", seed=0):
    """The workers' data, by rank; `rows_of(rank)` rows each."""
    return [make_data(rows_of(rank), dtype, seed=100 * seed + rank) for rank in range(hvd.size())]


def union(hvd, rows_of, dtype="float32", seed=0):
    """This worker's data, and everyone's together."""
    parts = parts_of_all(hvd, rows_of, dtype, seed)
    return parts[hvd.rank()], tuple(np.concatenate(arrays) for arrays in zip(*parts))


def relative(a, b):
    a, b = (np.concatenate([np.ravel(part).astype("float64") for part in parts]) for parts in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def same_on_all(hvd, values):
    values = np.asarray(values, "float64").reshape(1, -1)
    return bool(np.all(hvd.allgather(tf.constant(values), name="same").numpy() == values))


ROWS = [lambda rank: 12, lambda rank: 7 + 3 * rank, lambda rank: 1 + rank]
"""Equal, unequal, and fewer rows than sub-batches."""


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_exact_training_is_that_of_one_process_on_the_union(hvd, dtype, tolerance):
    keras.config.set_floatx(dtype)
    try:
        model = make(dtype)
        whole = whole_model(model)
        losses = []
        for step in range(20):
            mine, everything = union(hvd, ROWS[step % 3], dtype, step)
            losses.append([model.train_on_batch(*mine)[0], whole.train_on_batch(*everything)[0]])
            if step == 1:
                # With plain SGD what the weights have become tells the gradients.
                for found, expected in zip(weights_of_all(model), whole.get_weights()):
                    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected) + tolerance
        losses = np.array(losses)
        np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=10 * tolerance)
        assert relative(weights_of_all(model), whole.get_weights()) <= tolerance
        assert same_on_all(hvd, losses)
    finally:
        keras.config.set_floatx("float32")


def test_eight_bit_training_follows_one_process(hvd):
    model = make(compression=ENCODE_ALL)
    whole = whole_model(model)
    losses = []
    for step in range(20):
        mine, everything = union(hvd, ROWS[0], seed=step)
        losses.append([model.train_on_batch(*mine)[0], whole.train_on_batch(*everything)[0]])
    losses = np.array(losses)
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=0.02)
    assert np.any(losses[:, 0] != losses[:, 1]), "nothing was rounded"
    assert same_on_all(hvd, losses)
    assert same_on_all(hvd, np.concatenate([np.ravel(weights) for weights in weights_of_all(model)]))


def test_error_feedback_of_the_lower_gradients(hvd):
    coarse = hvd8bit.EightBit(data_type="linear", block_size=None, min_elements=0, error_feedback=True)
    with pytest.raises(ValueError, match="error_feedback must be False for activations"):
        HybridModel(make_lower(), make_upper(), SUB_BATCHES, compression=coarse)
    model = HybridModel(make_lower(), make_upper(), SUB_BATCHES, compression=None, gradient_compression=coarse)
    model.build((None, 6, 6, 1))
    model.compile(keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy")
    for step in range(2):
        model.train_on_batch(*union(hvd, ROWS[0], seed=step)[0])
    shapes = [tuple(residual.shape) for residual in coarse.feedback.residuals.values() if residual.numpy().any()]
    expected = [tuple(variable.shape) for variable in model.lower.trainable_variables] if hvd.size() > 1 else []
    assert sorted(shapes) == sorted(expected)


def test_an_update_after_each_sub_batch_is_a_step_of_its_own(hvd):
    """With lower weights that do not learn: K steps on the sub-batches, in order."""
    model = make(update="sub_batch")
    model.lower.trainable = False
    model.compile(keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy")
    whole = whole_model(model, lambda: keras.optimizers.Adam(0.01))
    whole.layers[0].trainable = False
    whole.compile(keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy")
    rows = 12
    for step in range(3):
        (x, y), (xs, ys) = union(hvd, lambda rank: rows, seed=step)
        model.train_on_batch(x, y)
        for part in range(SUB_BATCHES):
            size = rows // SUB_BATCHES
            places = np.concatenate([np.arange(size) + rank * rows + part * size for rank in range(hvd.size())])
            whole.train_on_batch(xs[places], ys[places])
    assert model.upper_optimizer.iterations.numpy() == 3 * SUB_BATCHES
    assert relative(weights_of_all(model), whole.get_weights()) <= 1e-5


def test_updates_after_sub_batches_train(hvd):
    model = make(update="sub_batch", compression=ENCODE_ALL, optimizer=lambda: keras.optimizers.Adam(0.01))
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch < 8 else 0.002)
    x, y = make_data(36, seed=hvd.rank())
    history = model.fit(x, y, batch_size=12, epochs=10, verbose=0, callbacks=[schedule]).history
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    assert float(model.upper_optimizer.learning_rate) == pytest.approx(0.002)
    assert same_on_all(hvd, history["loss"])
    assert same_on_all(hvd, np.concatenate([np.ravel(weights) for weights in weights_of_all(model)]))


def test_fit_evaluate_and_predict(hvd, capsys):
    model = make(optimizer=lambda: keras.optimizers.Adam(0.003))
    whole = whole_model(model, lambda: keras.optimizers.Adam(0.003))
    rows = 20 + 3 * hvd.rank()  # the last batches differ in size
    x, y = make_data(rows, seed=hvd.rank())
    seen = []
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    validation = make_data(8 + hvd.rank(), seed=50 + hvd.rank())
    history = model.fit(
        x, y, batch_size=16, epochs=3, verbose=2, shuffle=False, callbacks=[watch], validation_data=validation
    )
    assert ("Epoch 1/3" in capsys.readouterr().out) == (hvd.rank() == 0)
    everyone = [make_data(20 + 3 * rank, seed=rank) for rank in range(hvd.size())]
    union_validation = tuple(
        np.concatenate(arrays) for arrays in zip(*(make_data(8 + rank, seed=50 + rank) for rank in range(hvd.size())))
    )
    for epoch in range(3):
        whole.reset_metrics()
        losses, counts = [], []
        for start in (0, 16):
            batch = [np.concatenate([data[part][start : start + 16] for data in everyone]) for part in range(2)]
            losses.append(whole.train_on_batch(*batch)[0])
            counts.append(len(batch[0]))
        assert history.history["loss"][epoch] == pytest.approx(np.average(losses, weights=counts), rel=1e-4)
        expected = whole.evaluate(*union_validation, batch_size=1000, verbose=0)
        found = [history.history[name][epoch] for name in ("val_loss", "val_accuracy")]
        np.testing.assert_allclose(found, expected, rtol=1e-3)
    assert len(seen) == 3
    assert same_on_all(hvd, [[logs[name] for name in sorted(logs)] for logs in seen])
    np.testing.assert_allclose(
        model.evaluate(*validation, verbose=0), whole.evaluate(*union_validation, batch_size=1000, verbose=0), rtol=1e-3
    )
    outputs = model.predict(x, batch_size=16, verbose=0)
    assert outputs.shape == (rows, 10)
    np.testing.assert_allclose(outputs, whole.predict(x, verbose=0), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(model(x[:5]), outputs[:5], rtol=1e-3, atol=1e-6)


def start_with(layer):
    return lambda: [layer(), *make_upper()[1:]]


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "make_layers",
    [make_upper, start_with(lambda: keras.layers.Dense(20, activation="tanh"))],
    ids=["split_entrance", "whole_entrance"],
)
def test_gradients_of_a_loop_of_ones_own_are_those_of_one_process(hvd, make_layers, in_graph):
    model = HybridModel(make_lower(), make_layers(), SUB_BATCHES, compression=None)
    model.build((None, 6, 6, 1))
    whole = whole_model(model)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def step(x, y, more, rows):
        with tf.GradientTape() as tape:
            # Two calls, as a step may make them; `more` the other way round, so that workers' error signals differ.
            loss = (cross_entropy(y, model(x, training=True)) + 0.5 * cross_entropy(y, model(more))) / rows
        lower, upper = model.lower.trainable_variables, model.upper.trainable_variables
        gradients = tape.gradient(loss, [variable.value for variable in [*lower, *upper]])
        summed = [hvd.allreduce(g, op=hvd.Sum, name=f"lower_{n}") for n, g in enumerate(gradients[: len(lower)])]
        optimizer.apply([*summed, *gradients[len(lower) :]], [*lower, *upper])
        return loss

    step = tf.function(step, reduce_retracing=True) if in_graph else step
    for number, rows_of in enumerate(ROWS):
        (x, y), (xs, ys) = union(hvd, rows_of, seed=number)
        rows = float(len(xs))
        loss = step(tf.constant(x), tf.constant(y), tf.constant(x[::-1]), tf.constant(rows))
        mirrored = np.concatenate([images[::-1] for images, _ in parts_of_all(hvd, rows_of, seed=number)])
        with tf.GradientTape() as tape:
            expected = (cross_entropy(ys, whole(xs)) + 0.5 * cross_entropy(ys, whole(mirrored))) / rows
        variables = whole.trainable_variables
        whole.optimizer.apply(tape.gradient(expected, [variable.value for variable in variables]), variables)
        assert hvd.allreduce(loss, op=hvd.Sum, name="loss").numpy() == pytest.approx(expected.numpy(), rel=1e-5)
        assert relative(weights_of_all(model), whole.get_weights()) <= 1e-5


def test_sample_weights_count(hvd):
    model = make()
    whole = whole_model(model)
    mine, everything = union(hvd, ROWS[1])
    weights = [np.linspace(0.2, 2, ROWS[1](rank)) for rank in range(hvd.size())]
    found = model.train_on_batch(*mine, sample_weight=weights[hvd.rank()])[0]
    assert found == pytest.approx(whole.train_on_batch(*everything, sample_weight=np.concatenate(weights))[0], rel=1e-5)
    assert relative(weights_of_all(model), whole.get_weights()) <= 1e-5


@pytest.mark.parametrize(
    ("rows_of", "length"), zip(ROWS, [8, 3, 3]), ids=["as_long_as_a_sub_batch", "unequal", "fewer_than_sub_batches"]
)
@pytest.mark.parametrize(
    ("compression", "reduction"),
    [(None, "sum_over_batch_size"), (None, "sum"), (ENCODE_ALL, "sum_over_batch_size")],
    ids=["exact", "sum", "eight_bit"],
)
def test_a_loss_for_each_position(hvd, rows_of, length, compression, reduction):
    """Labels, losses and sample weights of shape [rows, length]."""
    model = HybridModel(
        [keras.layers.Dense(8, activation="tanh")],
        [ColumnParallelDense(6, activation="tanh", compression=compression), keras.layers.Dense(5)],
        SUB_BATCHES,
        compression=compression,
        gradient_compression=compression,
    )
    model.build((None, length, 4))
    whole = keras.Sequential([keras.models.clone_model(model.lower), merge(model.upper)])
    whole.build((None, length, 4))
    whole.layers[0].set_weights(model.lower.get_weights())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    for each in (model, whole):
        each.compile(keras.optimizers.SGD(0.01), loss=loss, weighted_metrics=["accuracy"])
    rng = np.random.default_rng(3)
    parts = []
    for rank in range(hvd.size()):
        shape = (rows_of(rank), length)
        parts.append([rng.standard_normal((*shape, 4)).astype("float32"), rng.integers(0, 5, shape), rng.random(shape)])
    tolerance = 1e-5 if compression is None else 0.05
    for weighted in (2, 3):
        mine = parts[hvd.rank()][:weighted]
        everything = [np.concatenate(arrays) for arrays in zip(*parts)][:weighted]
        found = [*model.train_on_batch(*mine), *model.test_on_batch(*mine)]
        expected = [*whole.train_on_batch(*everything), *whole.test_on_batch(*everything)]
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
        assert relative(weights_of_all(model), whole.get_weights()) <= tolerance


def test_sums_are_summed(hvd):
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
    model = make(loss=loss, optimizer=lambda: keras.optimizers.SGD(0.001))
    whole = whole_model(model, lambda: keras.optimizers.SGD(0.001), loss)
    for step, rows in enumerate(ROWS):
        mine, everything = union(hvd, rows, seed=step)
        assert model.train_on_batch(*mine)[0] == pytest.approx(whole.train_on_batch(*everything)[0], rel=1e-5)
    assert relative(weights_of_all(model), whole.get_weights()) <= 1e-5


def test_all_workers_start_from_the_same_lower_weights(hvd):
    keras.utils.set_random_seed(hvd.rank())
    model = make()
    assert same_on_all(hvd, np.concatenate([np.ravel(weights) for weights in model.lower.get_weights()]))


# ---- what does not fit ----


def test_different_numbers_of_steps_are_an_error_before_the_first_one(hvd):
    if hvd.size() == 1:
        pytest.skip("one worker has nobody to differ from")
    model = make()
    x, y = make_data(12 if hvd.rank() == 0 else 8)
    message = r"as many steps.*1 epochs of 3 steps on rank 0.*1 epochs of 2 steps on rank 1"
    with pytest.raises(ValueError, match=message):
        model.fit(x, y, batch_size=4, verbose=0)


@pytest.mark.parametrize(
    ("first", "others", "message"),
    [
        ({"rows": 4}, {"rows": 8}, r"validation of 1 steps on rank 0.*validation of 2 steps on rank 1"),
        ({"freq": 1}, {"freq": 2}, r"validation of 1 steps on rank 0.*epoch 2 on rank 1"),
        ({"freq": 3}, {"freq": 2}, r"the end of fit on rank 0.*validation of 1 steps on rank 1"),
    ],
    ids=["more_steps", "more_often", "at_the_end"],
)
def test_different_validation_is_an_error(hvd, first, others, message):
    if hvd.size() == 1:
        pytest.skip("one worker has nobody to differ from")
    model = make()
    mine = first if hvd.rank() == 0 else others
    validation = {"validation_data": make_data(mine.get("rows", 4)), "validation_freq": mine.get("freq", 1)}
    with pytest.raises(ValueError, match=f"as many steps.*{message}"):
        model.fit(*make_data(12), batch_size=4, epochs=2, verbose=0, **validation)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sub_batches": 0}, "sub_batches must be an integer of at least 1"),
        ({"update": "often"}, "update must be one of step, sub_batch"),
        ({"compression": 8}, r"compression must be hvd8bit\.EightBit"),
        ({"gradient_compression": 8}, r"compression must be hvd8bit\.EightBit"),
        ({"lower": 8}, "lower must be a Keras model or layer"),
        ({"upper": []}, "upper must be a Keras model or layer"),
    ],
)
def test_wrong_settings(hvd, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        HybridModel(**{"lower": make_lower(), "upper": make_upper(), **arguments})


def test_a_lower_part_that_gives_no_floats(hvd):
    x = keras.Input((4,))
    two = keras.Model(x, [keras.layers.Dense(4)(x), keras.layers.Dense(4)(x)])
    model = HybridModel(two, make_upper())
    with pytest.raises(ValueError, match="lower must give one float tensor"):
        model.build((None, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": keras.optimizers.SGD(global_clipnorm=1.0)}, "global_clipnorm must be None in a HybridModel"),
        ({"optimizer": keras.optimizers.SGD(global_clipnorm=1.0)}, "use clipvalue"),
        ({"optimizer": keras.optimizers.SGD(clipnorm=1.0)}, "clipnorm must be None in a HybridModel, got 1.0"),
        ({"steps_per_execution": 2}, "steps_per_execution must be 1 for a HybridModel"),
        ({"jit_compile": True}, "jit_compile must be False for a HybridModel"),
        (
            {"optimizer": hvd8bit.keras.DistributedOptimizer(keras.optimizers.SGD())},
            "must be the plain one for a HybridModel",
        ),
    ],
)
def test_what_compile_refuses(hvd, arguments, message):
    if hvd.size() == 1 and "clip" in message:
        pytest.skip("one worker knows the norm of all gradients")
    with pytest.raises(ValueError, match=message):
        HybridModel(make_lower(), make_upper()).compile(**{"optimizer": "sgd", "loss": "mse", **arguments})
