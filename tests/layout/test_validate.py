"""Each kind of planted fault is found. Mutants of good schedules, one by one and by the hundred."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from fourfold.layout import Action, Schedule, generate, validate
from fourfold.layout.actions import SENDS

Lists = list[list[str]]


def schedule(zero: int = 2, num_frozen_stages: int = 0) -> Schedule:
    return generate(pp=3, v=2, num_micro_batches=7, zero=zero, num_frozen_stages=num_frozen_stages)


def mutant(good: Schedule, change: Callable[[Lists], None]) -> Schedule:
    lists = [[str(action) for action in actions] for actions in good.actions]
    change(lists)
    return replace(good, actions=tuple(tuple(map(Action.parse, actions)) for actions in lists))


def drop(rank: int, text: str) -> Callable[[Lists], None]:
    return lambda lists: lists[rank].remove(text)


def double(rank: int, text: str) -> Callable[[Lists], None]:
    return lambda lists: lists[rank].insert(lists[rank].index(text), text)


def move(rank: int, text: str, *, to: int | None = None, before: str | None = None) -> Callable[[Lists], None]:
    """Takes an action out of its place and puts it before another one, or at the end."""

    def change(lists: Lists) -> None:
        lists[rank].remove(text)
        target = lists[rank if to is None else to]
        target.insert(len(target) if before is None else target.index(before), text)

    return change


def swap(rank: int, one: str, other: str) -> Callable[[Lists], None]:
    def change(lists: Lists) -> None:
        actions = lists[rank]
        i, j = actions.index(one), actions.index(other)
        actions[i], actions[j] = other, one

    return change


def both(*changes: Callable[[Lists], None]) -> Callable[[Lists], None]:
    def change(lists: Lists) -> None:
        for one in changes:
            one(lists)

    return change


# pp 3, v 2: rank 0 holds stages 0 and 3, rank 1 stages 1 and 4, rank 2 stages 2 and 5.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(1, "4F3"), r"4F3 runs 0 times instead of once"),
        (drop(0, "0B6"), r"0B6 runs 0 times instead of once"),
        (drop(0, "0SEND_F2"), r"0SEND_F2 runs 0 times"),
        (drop(0, "0RECV_B2"), r"0RECV_B2 runs 0 times"),
        (both(drop(0, "0SEND_F2"), drop(1, "1RECV_F2")), r"0SEND_F2 runs 0 times"),
        (double(2, "5F1"), r"5F1 runs 2 times instead of once"),
        (both(double(0, "0SEND_F2"), double(1, "1RECV_F2")), r"0SEND_F2 runs 2 times"),
        (move(0, "0F2", to=1), r"pipeline rank 1 runs 0F2, but stage 0 is not its own"),
        (lambda lists: lists[0].append("0F7"), r"actions without a place in this schedule: 0F7"),
        (lambda lists: lists[0].append("6F0"), r"actions without a place in this schedule: 6F0"),
        (lambda lists: lists[0].append("0RECV_F0"), r"actions without a place in this schedule: 0RECV_F0"),
        (move(2, "5B0", before="5F0"), r"deadlock: .*pipeline rank 2 waits in 5B0 for rank 2 to run 5F0"),
        (drop(1, "4GATHER"), r"pipeline rank 1: 4F0 without gathered weights"),
        (double(1, "4GATHER"), r"pipeline rank 1: 4GATHER while its weights are gathered already"),
        (drop(1, "4REDUCE"), r"stage 4 has 1 REDUCEs; ZeRO-2 reduces it 2 times a step"),
        (move(1, "4REDUCE", before="4B0"), r"pipeline rank 1: 4REDUCE without a gradient"),
        (drop(1, "4FREE"), r"pipeline rank 1 ends with stages \[4\] not FREEd"),
        (move(1, "4FREE", before="4B6"), r"pipeline rank 1: 4B6 without gathered weights"),
        (swap(1, "1RECV_F1", "1RECV_F2"), r"channel of pipeline ranks 0 -> 1: sends the result of 0F1 where"),
        (swap(0, "0SEND_F1", "0RECV_B0"), r"channel of pipeline ranks 0 -> 1"),
        (move(1, "1RECV_F0", before="1SEND_F0"), r"pipeline rank 1 posts 1RECV_F0 after 1F0, which needs it"),
        (move(0, "0SEND_F0", before="0F0"), r"pipeline rank 0 posts 0SEND_F0 before the computation that makes"),
    ],
)
def test_planted_fault(change: Callable[[Lists], None], message: str) -> None:
    good = schedule()
    validate(good)
    with pytest.raises(ValueError, match=message):
        validate(mutant(good, change))


@pytest.mark.parametrize(
    ("kind", "early", "use"),
    [("zb-h1", "1FREE", "1I2"), ("1f1b", "1FREE", "1REDUCE")],  # a first half, and a reduction, need gathered weights
)
def test_weights_that_are_freed_too_early(kind: str, early: str, use: str) -> None:
    good = generate(pp=3, num_micro_batches=4, kind=kind, zero=1)
    validate(good)
    with pytest.raises(ValueError, match=f"pipeline rank 1: {use} without gathered weights"):
        validate(mutant(good, move(1, early, before=use)))


@pytest.mark.parametrize("num_frozen_stages", [0, 3])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_no_action_can_be_missing_double_or_elsewhere(zero: int, num_frozen_stages: int) -> None:
    good = schedule(zero, num_frozen_stages)
    for rank, actions in enumerate(good.actions):
        for i in range(zero - 1, len(actions), 3):  # a third of them; the three modes share most actions
            before, action, after = actions[:i], actions[i], actions[i + 1 :]
            elsewhere = (*good.actions[(rank + 1) % 3], action)
            for changed in (
                {rank: before + after},
                {rank: (*before, action, action, *after)},
                {rank: before + after, (rank + 1) % 3: elsewhere},
            ):
                lists = tuple(changed.get(r, own) for r, own in enumerate(good.actions))
                with pytest.raises(ValueError):
                    validate(replace(good, actions=lists))


def test_gradients_for_frozen_stages_are_a_fault() -> None:
    good = schedule(num_frozen_stages=3)
    extra = both(
        lambda lists: lists[0].insert(lists[0].index("3B0") + 1, "3SEND_B0"),
        lambda lists: lists[2].append("2RECV_B0"),
    )
    with pytest.raises(ValueError, match=r"without a place in this schedule: 3SEND_B0, 2RECV_B0"):
        validate(mutant(good, extra))


def test_a_channel_delivers_in_order_across_directions() -> None:
    # With two ranks and v > 1, forwards of stages 0 and 2 and gradients of stage 2 share the channel 0 -> 1. Both ends
    # agree on their order in every schedule made; a receiver that takes the gradients first is found.
    good = generate(pp=2, v=2, num_micro_batches=5)
    receives = [
        (str(action), action.message[0])
        for action in good.actions[1]
        if action.kind not in SENDS and action.micro_batch >= 0 and "RECV" in str(action)
    ]
    one, other = next((a, b) for (a, kind), (b, next_kind) in pairwise(receives) if kind != next_kind)
    with pytest.raises(ValueError, match=r"channel of pipeline ranks 0 -> 1|after"):
        validate(mutant(good, swap(1, one, other)))


def test_sends_that_wait_for_each_other_are_a_deadlock() -> None:
    # Rank 0 wants the gradient of micro-batch 0 before it forwards micro-batch 1, rank 1 the reverse.
    circle = both(
        move(0, "0F1", before="0B1"),
        move(0, "0SEND_F1", before="0B1"),
        move(1, "1B0", before="1B1"),
        move(1, "1SEND_B0", before="1B1"),
    )
    good = generate(pp=2, num_micro_batches=2)
    with pytest.raises(ValueError, match=r"^deadlock: ") as caught:
        validate(mutant(good, circle))
    assert str(caught.value) == (
        "deadlock: pipeline rank 0 waits in 0B0 for rank 1 to run 1B0; "
        "pipeline rank 1 waits in 1F1 for rank 0 to run 0F1"
    )
