"""Seeds for stochastic rounding: what one exchange rounds by, and what another.

Whether a number is rounded up or down follows from its place in the list and a 64-bit seed (docs/wire-format.md). Seeds
do not travel, and workers need not have the same ones: all decode the same bytes. They have to differ, or errors would
add up instead of averaging out:

* From step to step: a stateful op draws when the step runs. The draws follow from `Encoding.seed`, or without one from
  TensorFlow's generator.
* From worker to worker, and from one exchange to another, though they draw alike, as they do with a seed: the global
  rank and a hash of the exchange's name are added.
* Within an exchange, the codes' from the sum's: one draw gives as many seeds as are needed, one after another. The
  codec makes unrelated random numbers of seeds that are neighbours.
"""

from __future__ import annotations

import hashlib

import tensorflow as tf

from hvd8bit.encoding import Encoding

SEEDS_PER_WORKER = 2**32
"""More than one draw gives."""

_SECOND_SEED = 1
"""TensorFlow's random ops take two, and draw by the clock if both are 0."""


def seeds(encoding: Encoding, count: int = 1, *, comm=None, name: str = "") -> list[tf.Tensor]:
    """New seeds for one exchange: int64 scalars, all of them 0 where the encoding rounds to the nearest value.

    With `encoding.seed`, or after `tf.random.set_seed`, the same program gets the same ones when it is run again. A
    graph that is traced anew begins anew. In a `tf.while_loop` TensorFlow leaves open which iteration draws first.

    Args:
      encoding: how numbers are rounded, and the seed that decides the draws.
      count: how many.
      comm: the workers that exchange, a `HorovodComm` or `LoopbackComm`; None: nobody else.
      name: of the exchange; others may draw the same, and get other seeds by their names.
    """
    if encoding.rounding != "stochastic":
        return [tf.constant(0, tf.int64)] * count
    # Where the kernels want it: on a GPU, it would have to be waited for.
    with tf.device("CPU:0"):
        first = _draw(encoding.seed) + _hash(name)
        if comm is not None:
            first += tf.cast(comm.global_rank_tensor(), tf.int64) * SEEDS_PER_WORKER
        return [first + number for number in range(count)]


def _draw(seed: int | None) -> tf.Tensor:
    lowest, highest = tf.int64.min, tf.int64.max
    if seed is None:
        return tf.random.uniform([], lowest, highest, tf.int64)
    # Not tf.random.uniform, whose draws would depend on what else the program has set.
    return tf.raw_ops.RandomUniformInt(
        shape=tf.constant([], tf.int32),
        minval=tf.constant(lowest, tf.int64),
        maxval=tf.constant(highest, tf.int64),
        seed=seed,
        seed2=_SECOND_SEED,
    )


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
