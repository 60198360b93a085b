"""What crossed each boundary of a split model: bytes, and the rounding's relative error. Off unless asked for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

from hvd8bit import activations, counting, graphs

_lock = threading.Lock()
_measuring: list[BoundaryReport] = []


class BoundaryReport:
    """What `measure_boundaries` counts, on this worker.

    `rows()` gives a list of records, one for each boundary and direction ("forward": activations; "backward": error
    signals): {boundary, direction, exchanges, elements, sent_bytes, relative_error}. `elements` are those that this
    worker put in, `relative_error` is the RMS of what encoding changed in them over their own RMS; 0 for what
    travelled exactly. As text, a table.
    """

    def __init__(self):
        self._counts: dict[tuple[str, str], _Counts] = {}

    def counts_of(self, boundary: str, direction: str) -> _Counts:
        """The counters of a boundary and direction."""
        with _lock:
            key = (boundary, direction)
            if key not in self._counts:
                self._counts[key] = _Counts()
            return self._counts[key]

    def rows(self) -> list[dict]:
        """The records, in the order in which the boundaries were first met."""
        return [
            {"boundary": boundary, "direction": direction, **counts.values()}
            for (boundary, direction), counts in self._counts.items()
        ]

    def __str__(self):
        rows = self.rows()
        width = max([len("boundary"), *(len(row["boundary"]) for row in rows)])
        lines = [f"{'boundary':{width}}  direction  exchanges  elements      sent bytes    relative error"]
        for row in rows:
            lines.append(
                f"{row['boundary']:{width}}  {row['direction']:9}  {row['exchanges']:9}  {row['elements']:12,}  "
                f"{row['sent_bytes']:12,}  {100 * row['relative_error']:.3f} %"
            )
        return "\n".join(lines)


class _Counts:
    def __init__(self):
        with tf.init_scope(), tf.device("CPU:0"):
            self.sent = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.exchanges = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.elements = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.squares = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self.errors = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def values(self) -> dict:
        squares = float(self.squares.numpy())
        return {
            "exchanges": int(self.exchanges.numpy()),
            "elements": int(self.elements.numpy()),
            "sent_bytes": int(self.sent.numpy()),
            "relative_error": (float(self.errors.numpy()) / squares) ** 0.5 if squares else 0.0,
        }


@contextlib.contextmanager
def measure_boundaries() -> Iterator[BoundaryReport]:
    """What each boundary sends, and what encoding changes, counted inside a `with`:

        with hvd8bit.parallel.measure_boundaries() as report:
            model.fit(...)
        print(report)

    Graphs that are traced inside count each time they run; those traced before do not, and hold nothing of it. It
    costs an encoding and a decoding more for each exchange.

    It is a `BoundaryReport`; other threads' exchanges count, too.
    """
    report = BoundaryReport()
    _measuring.append(report)
    try:
        yield report
    finally:
        _measuring.remove(report)


def active() -> bool:
    """Whether something is measured."""
    return bool(_measuring)


@contextlib.contextmanager
def of(boundary, direction: str, tensor, *, encoded) -> Iterator:
    """Around an exchange: counts it where something is measured. Yields `encoded`, whether the tensor is encoded."""
    if not _measuring:
        yield encoded
        return
    with contextlib.ExitStack() as stack:
        for report in _measuring:
            counts = report.counts_of(boundary.name, direction)
            stack.enter_context(counting.counting(counts.sent))
            _count(counts, boundary, tensor, encoded)
        yield encoded


def _count(counts: _Counts, boundary, tensor, encoded) -> None:
    numbers = tf.cast(tensor, tf.float64)
    if encoded is False:
        error = tf.zeros((), tf.float64)
    else:
        rounded = tf.cast(activations.round_trip(tensor, boundary.encoding), tf.float64)
        error = tf.reduce_sum(tf.square(rounded - numbers)) * tf.cast(encoded, tf.float64)
    with tf.device("CPU:0"), graphs.unordered():
        counts.exchanges.assign_add(1)
        counts.elements.assign_add(tf.size(tensor, out_type=tf.int64))
        counts.squares.assign_add(tf.reduce_sum(tf.square(numbers)))
        counts.errors.assign_add(error)
