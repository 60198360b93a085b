"""The order of a pipeline's micro-batches: complete, bounded, and free of deadlocks, whatever meets whatever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd8bit.parallel.schedule import Action, most_in_flight, one_forward_one_backward

cases = given(
    stages=st.integers(1, 7), micro_batches=st.integers(1, 12), ahead=st.integers(0, 3), capacity=st.integers(0, 2)
)


def schedules(stages, micro_batches, ahead):
    return [one_forward_one_backward(stages, stage, micro_batches, ahead) for stage in range(stages)]


@cases
def test_every_micro_batch_passes_once_in_each_direction_and_in_order(stages, micro_batches, ahead, capacity):
    for actions in schedules(stages, micro_batches, ahead):
        for backward in (False, True):
            numbers = [action.micro_batch for action in actions if action.backward == backward]
            assert numbers == list(range(micro_batches))
        for number in range(micro_batches):
            assert actions.index(Action(False, number)) < actions.index(Action(True, number))


@cases
def test_a_stage_holds_no_more_activations_than_promised(stages, micro_batches, ahead, capacity):
    for stage, actions in enumerate(schedules(stages, micro_batches, ahead)):
        held = most = 0
        for action in actions:
            held += -1 if action.backward else 1
            most = max(most, held)
        assert most == most_in_flight(stages, stage, micro_batches, ahead)
        if ahead == 0:
            assert most == min(stages - stage, micro_batches)


def run(actions_of_stages, capacity):
    """Plays all stages. A stage does its next action when what it needs has come; with `capacity` messages under way
    between two stages and direction, a sender waits until there is room: 0 is a rendezvous with the receiver's turn.

    Returns the number of rounds, in each of which every stage that can does one action; None for a deadlock."""
    stages = len(actions_of_stages)
    position = [0] * stages
    sent = [[0, 0] for _ in range(stages)]  # by stage: outputs forward, error signals backward
    used = [[0, 0] for _ in range(stages)]  # inputs and error signals that the stage has taken
    rounds = 0
    while any(position[s] < len(actions_of_stages[s]) for s in range(stages)):
        able = []
        for s in range(stages):
            if position[s] == len(actions_of_stages[s]):
                continue
            action = actions_of_stages[s][position[s]]
            source, target = (s + 1, s - 1) if action.backward else (s - 1, s + 1)
            needs = 0 <= source < stages and sent[source][action.backward] <= action.micro_batch
            waiting = sent[s][action.backward] - used[target][action.backward] if 0 <= target < stages else 0
            if not needs and waiting <= capacity:
                able.append(s)
        if not able:
            return None
        for s in able:
            action = actions_of_stages[s][position[s]]
            sent[s][action.backward] += 1
            used[s][action.backward] += 1
            position[s] += 1
        rounds += 1
    return rounds


@cases
def test_no_deadlock_however_little_may_be_under_way(stages, micro_batches, ahead, capacity):
    # The stages of a step never wait for room, but that they need not is worth knowing: it bounds what lies in buffers.
    capacity = capacity + ahead * stages
    assert run(schedules(stages, micro_batches, ahead), capacity) is not None


def test_the_simulation_sees_deadlocks():
    backward_first = [Action(True, 0), Action(False, 0)]
    assert run([backward_first, one_forward_one_backward(2, 1, 1)], 5) is None


def test_a_stage_idles_no_longer_than_a_pipeline_must():
    """Forward and backward taken as equally long: 2 micro_batches + 2 (stages - 1) rounds."""
    for stages in range(1, 6):
        for micro_batches in range(1, 9):
            assert run(schedules(stages, micro_batches, 0), 10) == 2 * micro_batches + 2 * (stages - 1)


def test_one_forward_one_backward_as_it_is_drawn():
    text = "".join("abcd"[n] if backward else str(n) for backward, n in one_forward_one_backward(3, 0, 4))
    assert text == "012a3bcd"
    text = "".join("abcd"[n] if backward else str(n) for backward, n in one_forward_one_backward(3, 2, 4))
    assert text == "0a1b2c3d"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2, 4), r"stage must be in \[0, 2\), got 2"),
        ((2, 0, 0), "micro_batches must be an integer of at least 1, got 0"),
        ((2, 0, 2.5), "micro_batches must be an integer of at least 1, got 2.5"),
        ((2, 0, "4"), "micro_batches must be an integer of at least 1, got '4'"),
        ((2, 0, True), "micro_batches must be an integer of at least 1, got True"),
        ((2, 0, 1, -1), "ahead must be an integer of at least 0, got -1"),
        ((2, 0, 1, 0.5), "ahead must be an integer of at least 0, got 0.5"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        one_forward_one_backward(*arguments)
