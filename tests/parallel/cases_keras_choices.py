"""Keras 3: which layers are compressed and when, sparse gradients, local layers, process sets, telemetry."""

from __future__ import annotations

import glob
import re
import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit import collectives
from hvd8bit.keras import DistributedOptimizer, PartialDistributedOptimizer, callbacks

pytestmark = pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")


@pytest.fixture(autouse=True)
def fresh_names():
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)


def assert_replicas_equal(hvd, variables):
    mine = zlib.crc32(b"".join(np.ascontiguousarray(np.asarray(variable)).tobytes() for variable in variables))
    assert set(hvd.allgather(tf.constant([mine], tf.int64)).numpy()) == {mine}


def small_model():
    return keras.Sequential(
        [keras.Input((40,)), keras.layers.Dense(50, name="first"), keras.layers.Dense(60, name="last")], name="model"
    )


def own_data(hvd, rows=32):
    random = np.random.default_rng(hvd.rank())
    return random.normal(size=(rows, 40)).astype("float32"), random.normal(size=(rows, 60)).astype("float32")


def fit(hvd, model, optimizer, callbacks=(), epochs=1, **settings):
    model.compile(optimizer, loss="mse", **settings)
    model.fit(*own_data(hvd), batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    assert_replicas_equal(hvd, [*model.weights, *model.optimizer.variables])
    return [np.array(weight) for weight in model.weights]


def weights_after_one_step(hvd, compression, **settings):
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    model = small_model()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression, **settings), loss="mse")
    model.train_on_batch(*own_data(hvd))
    return [np.array(weight) for weight in model.weights]


def test_rules_by_variable(hvd):
    """FIELD-CASES B4: what is excluded is as exact as without compression."""
    plain = weights_after_one_step(hvd, hvd.Compression.none)
    select = hvd8bit.Selection(exclude="model/first/*", min_elements=0)
    ours = weights_after_one_step(hvd, hvd8bit.EightBit(select=select))
    # With three workers the order in which Horovod adds depends on what else is in the group: last bits may differ.
    same = [np.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(plain, ours)]
    assert same == ([True] * 4 if hvd.size() == 1 else [True, True, False, False])


@pytest.mark.parametrize(("passes", "scaled"), [(1, False), (2, True)], ids=["", "accumulation-and-loss-scaling"])
def test_compression_starts_at_a_step(hvd, passes, scaled):
    def train(compression, updates):
        keras.backend.clear_session()
        keras.utils.set_random_seed(7)
        model = small_model()
        optimizer = DistributedOptimizer(
            keras.optimizers.SGD(0.1), compression=compression, backward_passes_per_step=passes
        )
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, loss="mse")
        for _ in range(passes * updates):
            model.train_on_batch(*own_data(hvd))
        assert int(model.optimizer.iterations) == updates
        assert_replicas_equal(hvd, model.weights)
        return [np.array(weight) for weight in model.weights]

    late = hvd8bit.EightBit(select=hvd8bit.Selection(start_step=2, min_elements=0))
    for updates, equal in ((2, True), (3, hvd.size() == 1)):
        ours, plain = train(late, updates), train(hvd.Compression.none, updates)
        assert all(np.array_equal(a, b) for a, b in zip(ours, plain)) == equal
        assert all(np.allclose(a, b, atol=0.05) for a, b in zip(ours, plain))


@pytest.mark.parametrize("how", ["exact", "compress", "dense"])
def test_embedding_model(hvd, how):
    """FIELD-CASES A6: some workers touch other rows than others, and other numbers of them."""
    model = keras.Sequential(
        [keras.layers.Embedding(50, 64), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(4)]
    )
    select = hvd8bit.Selection(sparse="compress" if how == "compress" else "exact", min_elements=0)
    optimizer = DistributedOptimizer(
        keras.optimizers.Adam(0.05), compression=hvd8bit.EightBit(select=select), sparse_as_dense=how == "dense"
    )
    model.compile(optimizer, loss="mse")
    random = np.random.default_rng(hvd.rank())
    tokens = random.integers(0, 50, (32, 3 + 2 * hvd.rank()))
    labels = np.stack([tokens.mean(1) / 25 - 1] * 4, 1)
    losses = model.fit(tokens, labels, batch_size=8, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    assert_replicas_equal(hvd, [*model.weights, *optimizer.variables])


# ---- local layers, process sets ----


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("registered", ["layer", "variable"])
def test_local_layers_stay_with_their_worker(hvd, registered, scale):
    a, b = keras.Variable(np.zeros(3, "float32"), name="a"), keras.Variable(np.zeros(3, "float32"), name="b")

    class Layer:
        trainable_weights = [b]  # noqa: RUF012

    settings = {"compression": hvd8bit.EightBit(min_elements=0), "scale_local_gradients": scale}
    if registered == "layer":
        optimizer = PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=Layer(), **settings)
    else:
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), **settings)
        optimizer.register_local_var(b)
    optimizer.build([a, b])
    step = tf.function(optimizer.apply)
    step([tf.fill([3], hvd.rank() + 1.0)] * 2)
    np.testing.assert_allclose(a.numpy(), -(hvd.size() + 1) / 2, rtol=1e-6)
    own = (hvd.rank() + 1.0) / (hvd.size() if scale and hvd.size() > 1 else 1)
    np.testing.assert_allclose(b.numpy(), -own, rtol=1e-6)


def test_local_layers_of_a_tape(hvd):
    model = small_model()
    x, y = own_data(hvd)
    for scale in (True, False):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        own = tape.gradient(loss, [w.value for w in model.trainable_weights])
        partial = hvd8bit.PartialDistributedGradientTape(
            tape, local_layers=model.layers[-1], scale_local_gradients=scale, compression=hvd.Compression.none
        )
        got = partial.gradient(loss, model.trainable_weights)
        factor = 1 / hvd.size() if scale else 1
        for ours, local in zip(got[2:], own[2:]):
            np.testing.assert_allclose(ours.numpy(), local.numpy() * factor, rtol=1e-6)
        everyone = hvd.allgather(tf.reshape(own[0], [1, -1]), name="everyones").numpy().mean(0)
        np.testing.assert_allclose(got[0].numpy().ravel(), everyone, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="local_layers must be Keras layers, got 3"):
        hvd8bit.PartialDistributedGradientTape(tape, local_layers=[3])


def test_a_process_set_is_passed_on(hvd):
    if hvd.size() < 3:
        return
    some = hvd.add_process_set([0, 2])
    try:
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=some)
        weight = keras.Variable(np.zeros(2000, "float32"), name="w")
        optimizer.build([weight])
        tf.function(optimizer.apply)([tf.fill([2000], hvd.rank() + 1.0)])
        np.testing.assert_allclose(weight.numpy(), -2.0, rtol=1e-6)  # on rank 1 its own gradient
        other = DistributedOptimizer(
            keras.optimizers.SGD(1.0),
            process_set=some,
            compression=hvd8bit.EightBit(process_set=hvd.global_process_set),
        )
        with pytest.raises(ValueError, match="process_set differs"):
            other.apply([tf.ones([2000])], [weight])
    finally:
        hvd.remove_process_set(some)


# ---- Horovod's own optimizer ----


def test_horovods_own_optimizer_is_refused_with_keras_3(hvd):
    import horovod.tensorflow.keras as hvd_keras

    model = small_model()
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    broadcast = callbacks.BroadcastGlobalVariablesCallback(0)
    if hvd.size() == 1:
        broadcast.set_model(model)
        return
    with pytest.raises(ValueError, match=r"reduces nothing with Keras 3.*use hvd8bit\.keras\.DistributedOptimizer"):
        model.fit(*own_data(hvd), verbose=0, callbacks=[broadcast])


# ---- telemetry ----


def logged(folder) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for path in glob.glob(f"{folder}/*"):
        for event in tf.compat.v1.train.summary_iterator(path):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
    return found


@pytest.mark.parametrize(("eager", "scaled"), [(False, True), (True, False)], ids=["traced-loss-scaling", "eager"])
def test_telemetry(hvd, tmp_path, eager, scaled):
    model = small_model()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.01))
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer
    log_dir = tmp_path / f"rank{hvd.rank()}"
    telemetry = callbacks.TelemetryCallback(str(log_dir), errors_every=3)
    fit(hvd, model, optimizer, [telemetry], epochs=2, run_eagerly=eager)  # 8 steps
    assert log_dir.exists() == (hvd.rank() == 0)
    if hvd.rank() or hvd.size() == 1:
        return
    seen = logged(log_dir)
    n = hvd.size()
    for name in ("bytes_sent", "bytes_saved", "exchange_seconds", "exchange_share"):
        assert [step for step, _ in seen[f"hvd8bit/{name}"]] == list(range(1, 9))
    kernels, biases = 40 * 50 + 50 * 60, 50 + 60
    plain = 2 * (n - 1) / n * 4 * (kernels + biases)
    for (_, sent), (_, saved) in zip(seen["hvd8bit/bytes_sent"], seen["hvd8bit/bytes_saved"]):
        assert 0.2 * plain < sent < 0.6 * plain
        assert abs(sent + saved - plain) < 0.05 * plain  # chunks of this worker, and mean over the workers
    assert all(0 < share < 1 for _, share in seen["hvd8bit/exchange_share"])
    errors = {tag: values for tag, values in seen.items() if "relative_error" in tag}
    assert sorted(errors) == [f"hvd8bit/relative_error/model/{layer}/kernel" for layer in ("first", "last")]
    for values in errors.values():
        assert [step for step, _ in values] == [1, 4, 7]
        assert all(1e-4 < error < 0.03 for _, error in values)


def test_telemetry_counts_batches(hvd, tmp_path):
    def sent(name, passes=1, **settings):
        log_dir = tmp_path / f"{name}{hvd.rank()}"
        telemetry = callbacks.TelemetryCallback(str(log_dir), errors_every=0)
        for _ in range(2):
            optimizer = DistributedOptimizer(keras.optimizers.SGD(0.01), backward_passes_per_step=passes)
            fit(hvd, small_model(), optimizer, [telemetry], **settings)  # 4 steps
        return sorted(logged(log_dir).get("hvd8bit/bytes_sent", []))

    alone, executions = sent("alone"), sent("execution", steps_per_execution=2)
    accumulated = sent("accumulation", passes=2)
    if hvd.rank() or hvd.size() == 1:
        return
    once = alone[0][1]
    assert once > 0
    assert alone == [(step, once) for step in range(1, 9)]
    assert executions == [(step, once) for step in (2, 4, 6, 8)]
    assert accumulated == [(step, once * (step % 2 == 0)) for step in range(1, 9)]


def graph_of_step(model, hvd) -> str:
    """The step's graph and its functions as text, without the numbers that TensorFlow gives to functions."""
    model.make_train_function(force=True)
    x, y = own_data(hvd, rows=8)
    optimizer = model.optimizer

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        optimizer.apply(tape.gradient(loss, [w.value for w in model.trainable_weights]), model.trainable_weights)

    definition = step.get_concrete_function().graph.as_graph_def()
    # TensorFlow sorts functions by their names, numbers included.
    parts = [*map(str, definition.node), *sorted(map(unnumbered, definition.library.function))]
    return "\n".join(map(unnumbered, parts))


def unnumbered(thing) -> str:
    return re.sub(r"[_-]\d+(?![0-9a-zA-Z])", "", str(thing))


def test_without_telemetry_the_graph_is_the_same(hvd, tmp_path):
    model = small_model()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    model.optimizer.build(model.trainable_weights)
    before = graph_of_step(model, hvd)
    telemetry = callbacks.TelemetryCallback(str(tmp_path), errors_every=2)
    telemetry.set_model(model)
    during = graph_of_step(model, hvd)
    telemetry.on_train_end()
    after = graph_of_step(model, hvd)
    assert before == after
    assert ("Timestamp" in during) == (hvd.size() > 1)
    assert "Timestamp" not in before


def test_telemetry_on_one_worker_alone_is_an_error_on_all(hvd, tmp_path):
    if hvd.size() == 1:
        return
    model = small_model()
    some = [callbacks.TelemetryCallback(str(tmp_path))] if hvd.rank() == 0 else []
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    with pytest.raises(ValueError, match=r"workers differ in the settings.*telemetry with errors_every=100"):
        model.fit(*own_data(hvd), verbose=0, callbacks=some)


def test_telemetry_needs_an_optimizer_of_ours(hvd, tmp_path):
    model = small_model()
    model.compile(keras.optimizers.SGD(0.01), loss="mse")
    with pytest.raises(ValueError, match=r"needs a model whose optimizer is hvd8bit\.keras\.DistributedOptimizer"):
        callbacks.TelemetryCallback(str(tmp_path)).set_model(model)
    with pytest.raises(ValueError, match="errors_every must be an integer of at least 0, got -1"):
        callbacks.TelemetryCallback(str(tmp_path), errors_every=-1)
    assert collectives.running_rank() == hvd.rank()
