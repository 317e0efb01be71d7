"""ZB-H1 against its formulas, every other order of small pipelines, and drawings by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import pytest

from fourfold.layout import Action, Kind, Schedule, generate, play, validate
from fourfold.layout.actions import COMPUTE

COUNTS = [(pp, nmb) for pp in range(1, 9) for nmb in range(1, 34)]
Order = Sequence[tuple[str, int]]  # kind and micro-batch, of one rank


def orders_of(schedule: Schedule) -> list[Order]:
    return [[(str(kind), m) for kind, _, m in actions if kind in COMPUTE] for actions in schedule.actions]


def ends(
    orders: Sequence[Order], *, forward: int = 1, back: int = 1, weight: int = 1
) -> dict[tuple[int, str, int], int]:
    """When each computation ends, (rank, kind, micro-batch) -> time. Empty if they wait for each other for ever.

    Written from the meaning of the letters alone: an F needs the rank before, an I the rank after, a W its own I.
    """
    seconds = {"F": forward, "I": back, "W": weight}
    end: dict[tuple[int, str, int], int] = {}
    place = [0] * len(orders)
    for _ in range(sum(map(len, orders))):
        for rank, order in enumerate(orders):
            if place[rank] == len(order):
                continue
            kind, m = order[place[rank]]
            needs = {"F": (rank - 1, "F", m), "I": (rank + 1, "I", m), "W": (rank, "I", m)}[kind]
            own = [(rank, "F", m)] if kind == "I" else []
            before = [(rank, *order[place[rank] - 1])] if place[rank] else []
            wanted = [*own, *before, *([needs] if 0 <= needs[0] < len(orders) else [])]
            if all(key in end for key in wanted):
                end[rank, kind, m] = max((end[key] for key in wanted), default=0) + seconds[kind]
                place[rank] += 1
    return end if len(end) == sum(map(len, orders)) else {}


def idle(orders: Sequence[Order], **durations: int) -> int | None:
    """Time for which every rank idles in a step, as all compute equally long; None for a deadlock."""
    found = ends(orders, **durations)
    work = sum({"F": 1, "I": 1, "W": 1, **{k[0].upper().replace("B", "I"): v for k, v in durations.items()}}[kind]
               for kind, _ in orders[0])  # fmt: skip
    return max(found.values()) - work if found else None


def held(order: Order) -> int:
    """Most micro-batches of which a rank has run F and not yet W."""
    live = [sum((kind == "F") - (kind == "W") for kind, _ in order[: i + 1]) for i in range(len(order))]
    return max(live)


@cache
def every_order(nmb: int, most: int) -> list[Order]:
    """All orders of one rank in which each kind comes by micro-batch, F before I before W, holding at most so many."""

    def extend(done: tuple[int, int, int]) -> Iterator[list[tuple[str, int]]]:
        f, i, w = done
        if w == nmb:
            yield []
        if f < nmb and f - w < most:
            yield from ([("F", f), *rest] for rest in extend((f + 1, i, w)))
        if i < f:
            yield from ([("I", i), *rest] for rest in extend((f, i + 1, w)))
        if w < i:
            yield from ([("W", w), *rest] for rest in extend((f, i, w + 1)))

    return list(extend((0, 0, 0)))


class TestOrder:
    def test_by_hand(self) -> None:
        # Qi et al. 2023, 2.2: 1F1B's warm-up, and W later by as much as warm-ups are shorter, so that all hold as much.
        orders = [" ".join(f"{kind}{m}" for kind, m in order) for order in orders_of(_zb(4, 8))]
        assert orders[0] == "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7"
        assert orders[2] == "F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7"
        assert orders[3] == "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7"
        assert _zb(4, 8).warmup == (3, 2, 1, 0)
        assert [str(action) for action in _zb(2, 1).actions[1]] == [
            "1GATHER", "1RECV_F0", "1F0", "1I0", "1SEND_B0", "1W0", "1REDUCE", "1FREE",
        ]  # fmt: skip

    def test_forwards_and_gradients_go_as_in_1f1b(self) -> None:
        for pp, nmb in ((2, 5), (4, 4), (4, 11), (5, 7)):
            usual = orders_of(generate(pp=pp, num_micro_batches=nmb, kind="1f1b"))
            split = [[("B" if k == "I" else k, m) for k, m in order if k != "W"] for order in orders_of(_zb(pp, nmb))]
            assert split == usual


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_every_count_is_sound(zero: int) -> None:
    for pp, nmb in COUNTS[zero - 1 :: 3] if zero > 1 else COUNTS:
        schedule = _zb(pp, nmb, zero=zero)
        validate(schedule)
        assert (schedule.kind, schedule.fallback, schedule.splits_backward) == ("zb-h1", None, True)
        reduces = {1: 1, 2: len(schedule.rounds), 3: nmb}[zero]
        assert schedule.reduce_scatters == (reduces,) * pp


def test_bubble_and_memory() -> None:
    # F = I = W: algorithms.md 3.3, (p-1)(F+B-2W) with B = I + W, which is p - 1, from pp micro-batches on; with fewer,
    # a rank has too few Ws to fill its wait. No rank holds more than the fullest of 1F1B, min(m, p).
    for pp, nmb in COUNTS:
        schedule = _zb(pp, nmb)
        orders, timeline = orders_of(schedule), play(schedule)
        formula = pp - 1 if nmb >= pp else 2 * (pp - 1) - (nmb - 1)
        assert idle(orders) == formula, (pp, nmb)
        assert timeline.idle.tolist() == [formula] * pp
        assert timeline.bubble_over_compute == pytest.approx(formula / (3 * nmb))
        assert [held(order) for order in orders] == [min(pp, nmb)] * pp
        assert schedule.in_flight_peak == (min(pp, nmb),) * pp
        assert max(timeline.live_chunks(0)[1]) == min(pp, nmb)


@pytest.mark.parametrize(("forward", "back", "weight"), [(2, 2, 1), (4, 5, 3), (3, 4, 3), (10, 12, 8), (1, 4, 0)])
def test_bubble_of_other_durations(forward: int, back: int, weight: int) -> None:
    for pp, nmb in COUNTS[::4]:
        late = min(nmb - 1, pp - 1) * weight
        formula = (pp - 1) * (forward + back) - late
        timeline = play(_zb(pp, nmb), forward=forward, backward=back + weight, weight=weight)
        assert timeline.idle.tolist() == [formula] * pp, (pp, nmb)
        assert max(ends(orders_of(_zb(pp, nmb)), forward=forward, back=back, weight=weight).values()) == (
            timeline.step_time
        )


def test_a_third_of_1f1b() -> None:
    # 1F1B idles for (p-1)(F+B) = 3 (p-1) units.
    for pp, nmb in COUNTS[::5]:
        if nmb >= pp > 1:
            usual = play(generate(pp=pp, num_micro_batches=nmb, kind="1f1b"))
            assert usual.idle.tolist() == [3 * (pp - 1)] * pp
            assert play(_zb(pp, nmb)).idle.tolist() == [pp - 1] * pp


@pytest.mark.parametrize(("pp", "nmb"), [(2, 2), (2, 3), (2, 4), (3, 2), (4, 1)])
def test_no_order_that_holds_as_little_idles_less(pp: int, nmb: int) -> None:
    most = min(pp, nmb)
    found = (idle(orders) for orders in product(every_order(nmb, most), repeat=pp))
    assert min(bubble for bubble in found if bubble is not None) == idle(orders_of(_zb(pp, nmb)))


@pytest.mark.parametrize(("pp", "nmb"), [(2, 2), (2, 4), (3, 3)])
def test_holding_what_the_same_rank_does_in_1f1b_would_idle_more(pp: int, nmb: int) -> None:
    # So "1F1B's memory" is that of its fullest rank, on all ranks. The bubble then is (p-1)(F+I), not (p-1)(F+I-W).
    peaks = generate(pp=pp, num_micro_batches=nmb, kind="1f1b").in_flight_peak
    found = (idle(orders) for orders in product(*(every_order(nmb, most) for most in peaks)))
    assert min(bubble for bubble in found if bubble is not None) == 2 * (pp - 1)


class TestEvents:
    def test_zero_3_gathers_nothing_for_a_weight_half(self) -> None:
        (actions,) = generate(pp=1, num_micro_batches=2, kind="zb-h1", zero=3).actions
        assert " ".join(map(str, actions)) == (
            "0GATHER 0F0 0FREE 0GATHER 0I0 0FREE 0W0 0REDUCE 0GATHER 0F1 0FREE 0GATHER 0I1 0FREE 0W1 0REDUCE"
        )

    @pytest.mark.parametrize("zero", [1, 2, 3])
    def test_a_reduction_follows_the_weight_half(self, zero: int) -> None:
        schedule = _zb(3, 7, zero=zero)
        for actions in schedule.actions:
            for before, action in pairwise(actions):
                assert action.kind is not Kind.REDUCE or before.kind is Kind.WEIGHT
                assert action.kind is not Kind.SEND_BACKWARD or before == action._replace(kind=Kind.INPUT)
        assert [action.micro_batch for action in schedule.actions[2] if action.kind is Kind.WEIGHT] == list(range(7))

    @pytest.mark.parametrize("num_frozen", range(4))  # 3: forwards only
    def test_frozen_stages_have_no_halves(self, num_frozen: int) -> None:
        schedule = generate(pp=3, num_micro_batches=5, kind="zb-h1", num_frozen_stages=num_frozen)
        validate(schedule)
        for kind in (Kind.INPUT, Kind.WEIGHT):
            assert {a.stage for own in schedule.actions for a in own if a.kind is kind} == set(range(num_frozen, 3))
        assert not any(a.kind is Kind.SEND_BACKWARD for own in schedule.actions[: num_frozen + 1] for a in own)
        assert schedule.in_flight_peak == (0,) * num_frozen + (3,) * (3 - num_frozen)


class TestReceives:
    def test_by_default_two_computations_ahead(self) -> None:
        actions = [str(action) for action in _zb(2, 6).actions[1]]
        assert actions[actions.index("1RECV_F3") + 1 : actions.index("1F3")] == ["1I2", "1SEND_B2", "1W1"]


class TestFaults:
    @pytest.mark.parametrize(
        ("swapped", "message"),
        [
            (("1W1", "1W3"), "deadlock: .*pipeline rank 1 waits in 1W3 for rank 1 to run 1I3"),
            (("2F2", "2I2"), "deadlock: .*pipeline rank 2 waits in 2I2 for rank 2 to run 2F2"),
            (("1W5", "1REDUCE"), "pipeline rank 1 ends with stages .1. not REDUCEd"),
            (("1I2", "1SEND_B2"), "pipeline rank 1 posts 1SEND_B2 before the computation that makes"),
            (("1RECV_B4", "1I4"), "pipeline rank 1 posts 1RECV_B4 after 1I4, which needs it"),
        ],
    )
    def test_wrong_order(self, swapped: tuple[str, str], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            validate(_changed(_zb(3, 6), lambda text: {swapped[0]: swapped[1], swapped[1]: swapped[0]}.get(text, text)))

    @pytest.mark.parametrize(("old", "new"), [("1I2", "1B2"), ("1W2", "1B2"), ("1W2", "1W3"), ("1I2", "1W2")])
    def test_each_half_runs_once(self, old: str, new: str) -> None:
        with pytest.raises(ValueError, match=rf"{old} runs 0 times instead of once"):
            validate(_changed(_zb(3, 6), lambda text: new if text == old else text))

    def test_a_whole_backward_has_no_halves(self) -> None:
        good = generate(pp=3, num_micro_batches=6, kind="1f1b")
        with pytest.raises(ValueError, match="1B2 runs 0 times instead of once"):
            validate(_changed(good, lambda text: "1I2" if text == "1B2" else text))

    def test_playing_a_weight_half_too_early(self) -> None:
        bad = _changed(_zb(1, 2), lambda text: {"0I0": "0W0", "0W0": "0I0"}.get(text, text))
        with pytest.raises(ValueError, match="deadlock: pipeline rank 0 waits in 0W0 for rank 0 to run 0I0"):
            play(bad)


def _zb(pp: int, nmb: int, *, zero: int = 1) -> Schedule:
    return generate(pp=pp, num_micro_batches=nmb, kind="zb-h1", zero=zero)


def _changed(schedule: Schedule, change) -> Schedule:  # type: ignore[no-untyped-def]
    lists = tuple(tuple(Action.parse(change(str(action))) for action in actions) for actions in schedule.actions)
    return replace(schedule, actions=lists)
