"""In which order a stage of a pipeline works on the micro-batches: one forward, one backward.

A pure function, the same on every worker; what crosses the wire follows from it. With three stages and four
micro-batches (digits: forward, letters: backward of the same micro-batch):

    stage 0   0 1 2 . . a 3 b . c . d
    stage 1   . 0 1 . a 2 b 3 c . d .
    stage 2   . . 0 a 1 b 2 c 3 d . .
"""

from __future__ import annotations

from typing import NamedTuple


class Action(NamedTuple):
    """What a stage does next: `backward` or forward of a micro-batch."""

    backward: bool
    micro_batch: int


def one_forward_one_backward(stages: int, stage: int, micro_batches: int, ahead: int = 0) -> list[Action]:
    """The actions of one stage in one step.

    A stage goes forward until the first error signal can be on its way back, then backward and forward in turn. So it
    holds the activations of few micro-batches, however many there are: see `most_in_flight`.

    Args:
      stages: number of stages, P.
      stage: which one, from 0.
      micro_batches: into how many parts a batch is cut.
      ahead: how many micro-batches more each stage lets lie between itself and the next one. 0 is the usual schedule,
        in which a stage waits for each exchange. With 1 an exchange has the time of about half a forward and backward
        pass to hide in, for up to twice the activations.

    Returns:
      Each micro-batch forward and backward, once each and in order; forward before backward.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage must be in [0, {stages}), got {stage}")
    for argument, value, least in (("micro_batches", micro_batches, 1), ("ahead", ahead, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{argument} must be an integer of at least {least}, got {value!r}")
    first = most_in_flight(stages, stage, micro_batches, ahead) - 1
    actions = [Action(False, number) for number in range(first)]
    for number in range(micro_batches):
        if first + number < micro_batches:
            actions.append(Action(False, first + number))
        actions.append(Action(True, number))
    return actions


def most_in_flight(stages: int, stage: int, micro_batches: int, ahead: int = 0) -> int:
    """Of how many micro-batches a stage holds the activations at most: P - stage, without `ahead`."""
    return min((stages - 1 - stage) * (1 + ahead) + 1, micro_batches)
