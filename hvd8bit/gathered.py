"""Chunks of all workers, as an allgather brings them: one after another.

The ops check the headers of what was cut for a number of workers; these chunks hold each sender's whole list, and are
all alike where the workers have the same tensors and settings. What differs is an error that names the worker.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from hvd8bit import datatypes
from hvd8bit.encoding import ROUNDINGS
from hvd8bit.graphs import unordered
from hvd8bit.layout import HEADER_BYTES


def check_headers(everyones: tf.Tensor, own: tf.Tensor, workers: tf.Tensor) -> tf.Tensor:
    """`everyones`, once the headers in it are shown to equal this worker's own.

    Args:
      everyones: uint8 [bytes], all workers' chunks in order.
      own: uint8 [bytes], this worker's chunk.
      workers: int64 scalar.

    Raises:
      tf.errors.InvalidArgumentError: when it runs, and a worker's tensors or settings differ.
    """
    with unordered():
        checked = _checking()(everyones, own, workers)
    with tf.control_dependencies([checked]):
        return tf.identity(everyones)


@functools.lru_cache(maxsize=1)
def _checking():
    """Traced once, and a function of its own in graphs: a step may check the chunks of hundreds of small gradients."""
    chunk = tf.TensorSpec([None], tf.uint8)

    @tf.function(
        autograph=False,
        input_signature=[chunk, chunk, tf.TensorSpec([], tf.int64)],
        experimental_attributes={"_noinline": True},
    )
    def check(everyones, own, workers):
        size, total = tf.size(own, out_type=tf.int64), tf.size(everyones, out_type=tf.int64)
        header = own[:HEADER_BYTES]

        def headers_equal():
            headers = tf.reshape(everyones, [workers, size])[:, :HEADER_BYTES]
            return tf.reduce_all(tf.equal(headers, header))

        alike = tf.cond(tf.equal(total, workers * size), headers_equal, lambda: tf.constant(False))
        return tf.cond(alike, lambda: tf.constant(True), lambda: _complain(everyones, header, size, total))

    return check


def _complain(everyones, header, size, total):
    """Raises InvalidArgumentError that names the first worker whose header differs."""

    def equal_at(start):
        return tf.reduce_all(tf.equal(everyones[start : start + HEADER_BYTES], header))

    def there(start):
        return start + HEADER_BYTES <= total

    # Chunks with equal headers are equally long, so that the next one starts after them.
    worker, start = tf.while_loop(
        lambda _, start: tf.cond(there(start), lambda: equal_at(start), lambda: tf.constant(False)),
        lambda worker, start: (worker + 1, start + size),
        [tf.constant(0), tf.constant(0, tf.int64)],
    )

    def differs():
        theirs = everyones[start : start + HEADER_BYTES]
        same_settings = tf.reduce_all(tf.equal(_settings_bytes(theirs), _settings_bytes(header)))
        return tf.cond(same_settings, lambda: other_tensors(theirs), lambda: other_settings(theirs))

    def other_tensors(theirs):
        return tf.strings.format(
            "the chunk from worker {} holds other tensors: {} elements in {} tensor(s), this worker has {} elements in "
            "{}; number, order, shapes and dtypes of the tensors must be the same on all workers",
            [worker, *_tensors(theirs), *_tensors(header)],
        )

    def other_settings(theirs):
        # tf.strings.format would put strings between quotation marks.
        return tf.strings.join(
            [
                tf.strings.format("the chunk from worker {} was encoded with other settings: ", worker),
                *(_settings(theirs), ", this worker uses ", _settings(header)),
                "; settings (data_type, block_size, scaling, rounding) must be the same on all workers",
            ]
        )

    def missing():
        return tf.strings.format(
            "the chunk from worker {} is missing: {} bytes came from all; a worker that has called hvd.join takes no "
            "part in exchanges: give all workers the same number of steps",
            [worker, total],
        )

    text = tf.cond(there(start), differs, missing)
    with tf.control_dependencies([tf.print("hvd8bit:", text), tf.debugging.Assert(False, ["hvd8bit:", text])]):
        return tf.constant(False)


# Places in the header: docs/wire-format.md.


def _settings_bytes(header):
    """Format version, data type, rounding, block size, and the settings' hash, which knows the scaling."""
    return tf.concat([header[4:12], header[56:64]], 0)


def _settings(header):
    names = ["?"] * 256
    for name in datatypes.DATA_TYPES:
        names[datatypes.data_type_id(name)] = name
    roundings = [*ROUNDINGS, *["?"] * (256 - len(ROUNDINGS))]
    values = [
        ("data_type=", tf.constant(names)[tf.cast(header[6], tf.int32)]),
        (", block_size=", tf.strings.as_string(_number(header[8:12], tf.int32))),
        (", rounding=", tf.constant(roundings)[tf.cast(header[7], tf.int32)]),
    ]
    return tf.strings.join([part for pair in values for part in pair])


def _tensors(header):
    return _number(header[24:32], tf.int64), _number(header[32:36], tf.int32)


def _number(raw, dtype):
    return tf.bitcast(raw, dtype)
