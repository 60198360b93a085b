"""Two pipelines of two stages on four workers, as replicas of one model."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases_split_model import in_stages, make_data, make_layers, relative

import hvd8bit
from hvd8bit.parallel import SplitModel, send_recv

REPLICAS = 2


@pytest.fixture(autouse=True)
def fresh_names():
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)


def make(hvd, **settings):
    keras.utils.set_random_seed(hvd.rank())  # replicas start alike all the same
    return SplitModel(in_stages(make_layers(), hvd.size() // REPLICAS), 3, replicas=REPLICAS, **settings)


def bits_of_stages(hvd, split):
    """By stage, the replicas' weights as bytes."""
    mine = b"".join(weight.tobytes() for weight in split.stage.get_weights())
    everyone = hvd.allgather_object((split.stage_number, mine))
    return [[bits for stage, bits in everyone if stage == number] for number in range(hvd.size() // REPLICAS)]


def test_replicas_hold_the_same_bits_after_200_steps(hvd):
    split = make(hvd)
    split.compile(keras.optimizers.Adam(0.003), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = make_data(400, seed=split.replica_number)
    before = hvd8bit.collectives.sent_bytes()
    history = split.fit(x, y, batch_size=16, epochs=8, verbose=0)
    assert hvd8bit.collectives.sent_bytes() > before
    assert split.optimizer.iterations.numpy() == 200
    assert history.history["accuracy"][-1] > history.history["accuracy"][0] + 0.2
    for replicas in bits_of_stages(hvd, split):
        assert len(replicas) == REPLICAS
        assert len(set(replicas)) == 1


def test_exact_replicas_train_as_one_process_on_all_their_data(hvd):
    split = make(hvd, compression=None, gradient_compression=None)
    split.build((None, 8, 8, 1))
    whole = keras.models.clone_model(split.merge())
    whole.build((None, 8, 8, 1))
    whole.set_weights(split.merge().get_weights())
    for model in (split, whole):
        model.compile(keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy")
    for step in range(20):
        data = [make_data(15, seed=10 * step + replica) for replica in range(REPLICAS)]
        split.train_on_batch(*data[split.replica_number])
        whole.train_on_batch(*(np.concatenate(arrays) for arrays in zip(*data)))
    assert relative(split.merge().get_weights(), whole.get_weights()) <= 1e-5


def test_each_replica_sees_the_metrics_of_its_own_data(hvd):
    split = make(hvd)
    split.compile("sgd", loss="sparse_categorical_crossentropy")
    x, y = make_data(24, seed=split.replica_number)
    losses = hvd.allgather_object((split.replica_number, split.evaluate(x, y, verbose=0)))
    assert len(set(losses)) == REPLICAS
    outputs = split.predict(x, verbose=0)
    assert outputs.shape == (24, 10)


def test_send_recv_within_a_process_set(hvd):
    pair = hvd8bit.collectives.process_set_of([1, 3])
    assert hvd8bit.collectives.process_set_of([3, 1]).process_set_id == pair.process_set_id
    if hvd.rank() in (1, 3):
        x = tf.fill([2, 3], float(hvd.rank()))
        arrived = send_recv(x, 3, 1, process_set=pair, name="pair")
        assert arrived.shape[0] == (2 if hvd.rank() == 1 else 0)
        assert np.all(arrived.numpy() == 3)
    else:
        with pytest.raises(ValueError, match="process_set of 'pair' must include this worker"):
            send_recv(tf.ones([2, 3]), 3, 1, process_set=pair, name="pair")


def test_a_multiple_of_the_stages_is_needed(hvd):
    with pytest.raises(ValueError, match=r"3 stages in 1 replica\(s\) need 3 workers, got 4; 4 is no multiple"):
        SplitModel([[keras.layers.Dense(2)]] * 3)
