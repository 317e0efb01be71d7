"""Schedules against the paper's Figure 2, the regression tables of facts.md 2.2 and the peaks of algorithms.md 3.3.

Numbers of bubbles are for F = 1, B = 2 and free messages unless said otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from fourfold.layout import Action, Kind, Schedule, generate, play, validate
from fourfold.layout.actions import COMPUTE, MESSAGES
from fourfold.layout.schedule import lower, order_of, rounds_of, warmup_of

FIGURE_2 = (  # pp 3, v 2, nc 3, 6 micro-batches, micro-batch.chunk; copied from facts.md 2.2
    "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 F3.0 | "
    "F4.0 B0.1 F5.0 B1.1 F3.1 B2.1 F4.1 B0.0 F5.1 B1.0 | B2.0 B3.1 B4.1 B5.1 B3.0 B4.0 B5.0",
    "F0.0 F1.0 F2.0 F0.1 F1.1 | "
    "F2.1 B0.1 F3.0 B1.1 F4.0 B2.1 F5.0 B0.0 F3.1 B1.0 F4.1 B2.0 F5.1 B3.1 | B4.1 B5.1 B3.0 B4.0 B5.0",
    "F0.0 F1.0 F2.0 | "
    "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.0 B0.0 F4.0 B1.0 F5.0 B2.0 F3.1 B3.1 F4.1 B4.1 F5.1 B5.1 | B3.0 B4.0 B5.0",
)


def by_hand(
    *, pp: int, v: int, rounds: Sequence[int], warmup: Sequence[int], zero: int = 1, num_frozen_stages: int = 0
) -> Schedule:
    """A schedule with any rounds and any warm-up, right or wrong."""
    orders = [order_of(rank, pp=pp, v=v, rounds=rounds, warmup=warmup[rank]) for rank in range(pp)]
    return Schedule(
        pp=pp,
        v=v,
        num_micro_batches=sum(rounds),
        kind="flexible",
        nc=rounds[0],
        rounds=tuple(rounds),
        warmup=tuple(warmup),
        zero=zero,
        actions=lower(orders, pp=pp, v=v, rounds=rounds, zero=zero, num_frozen_stages=num_frozen_stages),
        num_frozen_stages=num_frozen_stages,
    )


def warmups(nc: int, *, pp: int, v: int, num_micro_batches: int) -> list[int]:
    """The corrected formula of facts.md 2.2, written out again."""
    return [min((v - 1) * nc + 2 * (pp - rank - 1), num_micro_batches * v) for rank in range(pp)]


def bubble(schedule: Schedule) -> float:
    return play(schedule).bubble_over_compute


def computations(schedule: Schedule, rank: int) -> list[str]:
    return [
        f"{kind}{micro_batch}.{stage // schedule.pp}"
        for kind, stage, micro_batch in schedule.actions[rank]
        if kind in COMPUTE
    ]


def sample(num_cases: int) -> Iterable[dict[str, Any]]:
    """Arguments of generate from the grid of the issue: pp <= 8, v <= 4, nmb <= 33, nc <= nmb, kinds, ZeRO modes."""
    random = Random(2)
    for _ in range(num_cases):
        pp, v, num_micro_batches = random.randint(1, 8), random.randint(1, 4), random.randint(1, 33)
        kind = random.choice(["afab", "1f1b" if v == 1 else "interleaved", "flexible", "flexible", "flexible"])
        nc = random.randint(1, num_micro_batches) if kind == "flexible" else None
        yield {
            "pp": pp,
            "v": v,
            "num_micro_batches": num_micro_batches,
            "kind": kind,
            "nc": nc,
            "zero": random.randint(1, 3),
        }


class TestOrder:
    @pytest.mark.parametrize("kind", ["interleaved", "flexible"])
    def test_figure_2(self, kind: str) -> None:
        schedule = generate(pp=3, v=2, num_micro_batches=6, kind=kind)
        assert schedule.warmup == (7, 5, 3)
        for rank, drawn in enumerate(FIGURE_2):
            assert computations(schedule, rank) == drawn.replace("|", "").split()
            assert len(drawn.partition("|")[0].split()) == schedule.warmup[rank]

    def test_classic_1f1b(self) -> None:
        # v = 1: one forward, one backward after pp - rank - 1 forwards; "flexible" means the same there.
        schedule = generate(pp=4, num_micro_batches=5, kind="1f1b")
        assert schedule.warmup == (3, 2, 1, 0)
        assert " ".join(computations(schedule, 3)) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 F3.0 B3.0 F4.0 B4.0"
        assert " ".join(computations(schedule, 1)) == "F0.0 F1.0 F2.0 B0.0 F3.0 B1.0 F4.0 B2.0 B3.0 B4.0"
        assert schedule.in_flight_peak == (4, 3, 2, 1)  # algorithms.md 3.3: min(m, p - r)
        assert generate(pp=4, num_micro_batches=5).actions == schedule.actions

    def test_afab_runs_the_last_chunk_back_first(self) -> None:
        schedule = generate(pp=2, v=2, num_micro_batches=3, kind="afab")
        for rank in range(2):
            done = " ".join(computations(schedule, rank))
            assert done == "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 B0.1 B1.1 B2.1 B0.0 B1.0 B2.0"

    def test_messages_stand_right_behind_the_computation_that_made_them(self) -> None:
        schedule = generate(pp=4, v=2, num_micro_batches=9, zero=3)
        for actions in schedule.actions:
            for before, action in pairwise(actions):
                if action.kind is Kind.SEND_FORWARD:
                    assert before == action._replace(kind=Kind.FORWARD)
                elif action.kind is Kind.SEND_BACKWARD:
                    assert before == action._replace(kind=Kind.BACKWARD)

    def test_one_rank_sends_nothing(self) -> None:
        schedule = generate(pp=1, v=3, num_micro_batches=4)
        validate(schedule)
        assert not any(action.kind in MESSAGES for action in schedule.actions[0])
        assert bubble(schedule) == 0


class TestRegressionTable:
    """The table of facts.md 2.2, from a simulation that is none of ours."""

    @pytest.mark.parametrize(
        ("pp", "v", "num_micro_batches", "kind", "nc", "ratio", "peaks"),
        [
            (3, 2, 6, "flexible", 3, 0.1667, [8, 6, 4]),
            (4, 2, 10, "flexible", 5, 0.1500, [12, 10, 8, 6]),
            (4, 7, 12, "flexible", 4, 0.0357, [31, 29, 27, 25]),
            (4, 7, 12, "flexible", 6, 0.0357, [43, 41, 39, 37]),
            (4, 7, 12, "flexible", 12, 0.0357, [79, 77, 75, 73]),
            (4, 7, 12, "afab", None, 0.0357, [84] * 4),
            (16, 8, 32, "flexible", 16, 0.0586, list(range(143, 112, -2))),
            (16, 8, 16, "flexible", 16, 0.1172, [128] * 8 + list(range(127, 112, -2))),
            (4, 2, 3, "afab", None, 0.6667, [6] * 4),
        ],
    )
    def test_row(
        self, pp: int, v: int, num_micro_batches: int, kind: str, nc: int | None, ratio: float, peaks: list[int]
    ) -> None:
        schedule = generate(pp=pp, v=v, num_micro_batches=num_micro_batches, kind=kind, nc=nc)
        validate(schedule)
        assert schedule.kind == kind
        assert schedule.fallback is None
        timeline = play(schedule)
        assert round(timeline.bubble_over_compute, 4) == ratio
        # facts.md section 1 row 3: the same idle time over all time is r / (1 + r).
        assert timeline.bubble_over_total == pytest.approx(
            timeline.bubble_over_compute / (1 + timeline.bubble_over_compute)
        )
        assert list(schedule.in_flight_peak) == peaks

    @pytest.mark.parametrize(("nc", "rounds"), [(2, (2, 2, 2, 2)), (3, (3, 3, 2))])
    def test_a_round_smaller_than_the_pipeline_deadlocks(self, nc: int, rounds: tuple[int, ...]) -> None:
        warmup = warmups(nc, pp=4, v=2, num_micro_batches=8)
        with pytest.raises(ValueError, match=r"^deadlock: "):
            validate(by_hand(pp=4, v=2, rounds=rounds, warmup=warmup))
        schedule = generate(pp=4, v=2, num_micro_batches=8, nc=nc)
        validate(schedule)
        assert schedule.kind == "afab"
        assert schedule.fallback is not None

    @pytest.mark.parametrize(
        ("hop", "nc_4", "nc_6", "afab"),
        [(0, 3.57, 3.57, 3.57), (0.05, 4.64, 3.69, 3.69), (0.10, 5.71, 3.81, 3.81), (0.20, 7.86, 4.05, 4.05)],
    )
    def test_messages_that_take_time(self, hop: float, nc_4: float, nc_6: float, afab: float) -> None:
        # The sensitivity table of facts.md 2.2, pp 4, v 7, 12 micro-batches; hop in forwards, results in per cent.
        for percent, schedule in (
            (nc_4, generate(pp=4, v=7, num_micro_batches=12, kind="interleaved")),
            (nc_6, generate(pp=4, v=7, num_micro_batches=12, nc=6)),
            (afab, generate(pp=4, v=7, num_micro_batches=12, kind="afab")),
        ):
            assert round(100 * play(schedule, message=hop).bubble_over_compute, 2) == percent


class TestRemainders:
    """The remainder table of facts.md 2.2: pp 4, v 2."""

    @pytest.mark.parametrize(
        ("rounds", "nc", "ratio"),
        [
            ((4, 4, 1), 4, 0.370),
            ((5, 4), 5, 0.167),
            ((4, 5), 4, None),
            ((4, 5), 5, 0.167),
            ((4, 4, 2), 4, 0.317),
            ((5, 5), 5, 0.150),
            ((6, 4), 6, 0.150),
            ((3, 3, 2), 3, None),
        ],
    )
    def test_rounds_by_hand(self, rounds: tuple[int, ...], nc: int, ratio: float | None) -> None:
        schedule = by_hand(
            pp=4, v=2, rounds=rounds, warmup=warmups(nc, pp=4, v=2, num_micro_batches=sum(rounds)), zero=2
        )
        if ratio is None:
            with pytest.raises(ValueError, match=r"^deadlock: "):
                validate(schedule)
        else:
            validate(schedule)
            assert round(bubble(schedule), 3) == ratio

    @pytest.mark.parametrize(
        ("num_micro_batches", "nc", "rounds"),
        [
            (9, 4, (5, 4)),  # 3 rounds would need one of 3
            (10, 4, (5, 5)),
            (10, 6, (5, 5)),
            (10, 5, (5, 5)),
            (13, 6, (5, 4, 4)),
            (7, 4, (7,)),
            (8, 4, (4, 4)),
            (33, 33, (33,)),
        ],
    )
    def test_our_rounds(self, num_micro_batches: int, nc: int, rounds: tuple[int, ...]) -> None:
        assert rounds_of(num_micro_batches, nc=nc, pp=4) == rounds
        schedule = generate(pp=4, v=2, num_micro_batches=num_micro_batches, nc=nc)
        assert schedule.rounds == rounds
        assert schedule.nc == rounds[0]
        assert list(schedule.warmup) == warmups(rounds[0], pp=4, v=2, num_micro_batches=num_micro_batches)

    @pytest.mark.parametrize(("nc", "num_micro_batches"), [(4, 5), (4, 7), (5, 7), (6, 13), (7, 7)])
    def test_counts_that_other_systems_refuse(self, nc: int, num_micro_batches: int) -> None:
        # pains.md T02
        schedule = generate(pp=4, v=2, num_micro_batches=num_micro_batches, nc=nc)
        validate(schedule)
        assert schedule.fallback is None
        assert bubble(schedule) == pytest.approx(3 / (num_micro_batches * 2))


def test_the_sampled_grid_is_sound() -> None:
    # Whole in benchmarks/schedules.py. pains.md T01, T03, T10.
    for arguments in sample(200):
        schedule = generate(**arguments)
        validate(schedule)
        pp, v, nmb = schedule.pp, schedule.v, schedule.num_micro_batches
        assert sum(schedule.rounds) == nmb
        assert list(schedule.rounds) == sorted(schedule.rounds, reverse=True)
        assert max(schedule.rounds) - min(schedule.rounds) <= 1
        assert len(schedule.rounds) == 1 or min(schedule.rounds) >= pp
        ratio = (pp - 1) / (nmb * v) if nmb >= pp else (pp * v + nmb - 1 - nmb * v) / (nmb * v)
        assert bubble(schedule) == pytest.approx(ratio, abs=1e-12), arguments
        assert schedule.in_flight_peak == tuple(min(warmup + 1, nmb * v) for warmup in schedule.warmup), arguments


def test_bubble_is_exact_in_whole_numbers() -> None:
    # Every rank computes nmb v (F + B) = 27 nmb v / 9, so the step has to end at that plus (pp - 1) (F + B).
    for nmb in range(4, 18):
        schedule = generate(pp=4, v=2, num_micro_batches=nmb)
        step_time = play(schedule, forward=4, backward=5).step_time
        assert Fraction(step_time) / (nmb * 2 * 9) - 1 == Fraction(3, nmb * 2)


class TestWarmup:
    def test_the_misprinted_formula_deadlocks(self) -> None:
        # ISCA'25 prints (v-1) nc + 2 (pp - rank v - 1); facts.md section 1 row 2. Negative counts are cut to 0.
        for pp in range(2, 7):
            for v in range(2, 5):
                for nmb, nc in {(pp, pp), (2 * pp, pp), (2 * pp + 1, pp), (3 * pp, pp + 1), (3 * pp, 3 * pp)}:
                    rounds = rounds_of(nmb, nc=nc, pp=pp)
                    printed = [
                        min(max((v - 1) * rounds[0] + 2 * (pp - rank * v - 1), 0), nmb * v) for rank in range(pp)
                    ]
                    with pytest.raises(ValueError, match=r"^deadlock: "):
                        validate(by_hand(pp=pp, v=v, rounds=rounds, warmup=printed))
                    validate(
                        by_hand(pp=pp, v=v, rounds=rounds, warmup=warmups(rounds[0], pp=pp, v=v, num_micro_batches=nmb))
                    )

    def test_the_message_says_who_waits_for_whom(self) -> None:
        # Figure 2 with the printed warm-ups 7, 3 and -1. After its first forward, 2F0, rank 2 comes to the backward of
        # its chunk 1, whose forward stands behind it. So rank 1 gets no gradient, and rank 0 no input of 3F1.
        with pytest.raises(ValueError) as caught:
            validate(by_hand(pp=3, v=2, rounds=(3, 3), warmup=(7, 3, 0)))
        assert str(caught.value) == (
            "deadlock: pipeline rank 0 waits in 3F1 for rank 2 to run 2F1; "
            "pipeline rank 1 waits in 4B0 for rank 2 to run 5B0; "
            "pipeline rank 2 waits in 5B0 for rank 2 to run 5F0"
        )

    @pytest.mark.parametrize(("pp", "warmup"), [(3, (7, 3, 0)), (1, (0,))])
    def test_playing_it_does_not_hang_or_pretend(self, pp: int, warmup: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"^deadlock: "):
            play(by_hand(pp=pp, v=2, rounds=(3, 3), warmup=warmup))

    @pytest.mark.parametrize(("pp", "v"), [(2, 2), (4, 2), (4, 7), (3, 4)])
    def test_extra_in_flight_of_larger_rounds(self, pp: int, v: int) -> None:
        # ISCA'25 3.1.1: (nc - pp)(v - 1) more than with nc = pp, as long as not everything is in flight.
        nmb = 6 * pp
        base = generate(pp=pp, v=v, num_micro_batches=nmb, nc=pp).in_flight_peak
        for nc in (2 * pp, 3 * pp):  # divisors of nmb, so that rounds are as asked
            peaks = generate(pp=pp, v=v, num_micro_batches=nmb, nc=nc).in_flight_peak
            assert [more - less for more, less in zip(peaks, base, strict=True)] == [(nc - pp) * (v - 1)] * pp

    def test_without_interleaving_it_is_not_doubled(self) -> None:
        assert [warmup_of(rank, pp=4, v=1, nc=4, num_micro_batches=8) for rank in range(4)] == [3, 2, 1, 0]
        assert [warmup_of(rank, pp=4, v=2, nc=4, num_micro_batches=8) for rank in range(4)] == [10, 8, 6, 4]
        assert warmup_of(0, pp=4, v=2, nc=4, num_micro_batches=4) == 8  # everything: 4 micro-batches x 2 chunks


class TestFallback:
    @pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
    @pytest.mark.parametrize(("kind", "v"), [("1f1b", 1), ("interleaved", 2), ("flexible", 1), ("flexible", 3)])
    def test_fewer_micro_batches_than_ranks(self, num_micro_batches: int, kind: str, v: int) -> None:
        # facts.md section 1 row 6, pains.md T03
        schedule = generate(pp=4, v=v, num_micro_batches=num_micro_batches, kind=kind)
        validate(schedule)
        assert schedule.kind == "afab"
        assert schedule.fallback == (
            f"{num_micro_batches} micro-batches are fewer than pp = 4: the pipeline never fills, "
            "so all forwards run first (afab)"
        )
        m = num_micro_batches
        assert bubble(schedule) == pytest.approx((4 * v + m - 1 - m * v) / (m * v))

    def test_small_rounds(self) -> None:
        schedule = generate(pp=4, v=2, num_micro_batches=9, nc=3)
        assert schedule.kind == "afab"
        assert schedule.rounds == (9,)
        assert schedule.fallback == (
            "nc = 3 is smaller than pp = 4: such rounds would deadlock, so all forwards run first (afab)"
        )
        assert schedule.actions == generate(pp=4, v=2, num_micro_batches=9, kind="afab").actions

    def test_afab_that_was_asked_for_is_no_fallback(self) -> None:
        assert generate(pp=4, v=2, num_micro_batches=3, kind="afab").fallback is None


class TestZero:
    @pytest.mark.parametrize(("v", "num_micro_batches", "rounds"), [(1, 8, 2), (2, 9, 2), (4, 12, 3), (3, 7, 1)])
    def test_reduce_scatters_per_step(self, v: int, num_micro_batches: int, rounds: int) -> None:
        # facts.md 2.5: v, v x rounds and v x micro-batches.
        def counts(zero: int, kind: str = "flexible") -> set[int]:
            return set(generate(pp=4, v=v, num_micro_batches=num_micro_batches, kind=kind, zero=zero).reduce_scatters)

        assert counts(1) == {v}
        assert counts(2) == {v * rounds}
        assert counts(3) == {v * num_micro_batches}
        assert counts(1, "afab") == counts(2, "afab") == {v}
        assert counts(3, "afab") == {v * num_micro_batches}

    @pytest.mark.parametrize(
        ("kind", "zero", "alive", "reduces"),
        [
            ("interleaved", 1, 4, 4),  # all buffers overlap
            ("afab", 1, 1, 4),  # one chunk at a time
            ("afab", 2, 1, 4),
            ("interleaved", 2, 1, 8),  # one chunk and round at a time
            ("interleaved", 3, 1, 32),
        ],
    )
    def test_life_of_gradients_in_figure_4(self, kind: str, zero: int, alive: int, reduces: int) -> None:
        # Figure 4 draws v = 4 and two rounds: a gradient lives from a chunk's first backward to its reduce-scatter.
        schedule = generate(pp=4, v=4, num_micro_batches=8, kind=kind, zero=zero)
        for actions in schedule.actions:
            gradients: set[int] = set()
            most, count = 0, 0
            for action in actions:
                if action.kind is Kind.BACKWARD:
                    gradients.add(action.stage)
                elif action.kind is Kind.REDUCE:
                    gradients.remove(action.stage)
                    count += 1
                most = max(most, len(gradients))
            assert (most, count) == (alive, reduces)

    def test_zero_1_reduces_after_the_last_backward_of_a_chunk(self) -> None:
        for actions in generate(pp=4, v=2, num_micro_batches=9, zero=1).actions:
            compute = [a for a in actions if a.kind in COMPUTE or a.kind is Kind.REDUCE]
            for before, action in pairwise(compute):
                if action.kind is Kind.REDUCE:
                    assert before == Action(Kind.BACKWARD, action.stage, 8)

    def test_weights_are_gathered_once_or_around_each_computation(self) -> None:
        for zero, gathers in ((1, 2), (2, 2), (3, 2 * 9 * 2)):
            for actions in generate(pp=4, v=2, num_micro_batches=9, zero=zero).actions:
                assert sum(action.kind is Kind.GATHER for action in actions) == gathers
        for actions in generate(pp=4, v=2, num_micro_batches=9, zero=3).actions:
            held: set[int] = set()
            for action in actions:
                held = held | {action.stage} if action.kind is Kind.GATHER else held
                held = held - {action.stage} if action.kind is Kind.FREE else held
                assert len(held) <= 1

    def test_the_zero_mode_changes_no_computation(self) -> None:
        one, two, three = (generate(pp=3, v=2, num_micro_batches=7, zero=zero) for zero in (1, 2, 3))
        for rank in range(3):
            assert computations(one, rank) == computations(two, rank) == computations(three, rank)


class TestFrozenStages:
    @pytest.mark.parametrize("zero", [1, 2, 3])
    @pytest.mark.parametrize("num_frozen", range(7))  # 6: forwards only
    def test_nothing_comes_back_below_the_first_trained_stage(self, num_frozen: int, zero: int) -> None:
        # pains.md T09
        schedule = generate(pp=3, v=2, num_micro_batches=7, zero=zero, num_frozen_stages=num_frozen)
        validate(schedule)
        kinds: dict[Kind, set[int]] = {kind: set() for kind in Kind}
        for actions in schedule.actions:
            for action in actions:
                kinds[action.kind].add(action.stage)
        assert kinds[Kind.FORWARD] == set(range(6))
        assert kinds[Kind.BACKWARD] == kinds[Kind.REDUCE] == set(range(num_frozen, 6))
        assert kinds[Kind.SEND_BACKWARD] == set(range(num_frozen + 1, 6))
        assert kinds[Kind.RECV_BACKWARD] == set(range(num_frozen, 5))
        assert kinds[Kind.SEND_FORWARD] == set(range(5))

    def test_a_wholly_frozen_rank_holds_nothing(self) -> None:
        schedule = generate(pp=3, num_micro_batches=7, num_frozen_stages=2)
        assert schedule.in_flight_peak == (0, 0, 1)
        assert schedule.reduce_scatters == (0, 0, 1)

    def test_they_shorten_the_step(self) -> None:
        whole, part = (generate(pp=2, v=2, num_micro_batches=8, num_frozen_stages=frozen) for frozen in (0, 2))
        assert play(part).step_time < play(whole).step_time


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"pp": 0}, "pp = 0: must be at least 1"),
            ({"v": 0}, "v = 0: must be at least 1"),
            ({"num_micro_batches": 0}, "num_micro_batches = 0: must be at least 1"),
            ({"num_micro_batches": -3}, "num_micro_batches = -3: must be at least 1"),
            ({"nc": 0}, "nc = 0: must be at least 1"),
            ({"kind": "gpipe"}, "kind = 'gpipe': must be one of afab, 1f1b, interleaved, flexible, zb-h1"),
            ({"zero": 0}, "zero = 0: must be 1, 2 or 3"),
            ({"zero": 4}, "zero = 4: must be 1, 2 or 3"),
            (
                {"kind": "1f1b", "v": 2},
                "kind = '1f1b' with v = 2: 1f1b has one virtual stage per rank; legal: v = 1, or kind = 'interleaved'",
            ),
            (
                {"kind": "interleaved"},
                "kind = 'interleaved' with v = 1: interleaving needs v > 1; legal: v = 2, or kind = '1f1b'",
            ),
            (
                {"kind": "interleaved", "v": 2, "nc": 5},
                "nc = 5 with kind = 'interleaved': interleaved fixes nc = 4; legal: leave nc out, or kind = 'flexible'",
            ),
            (
                {"kind": "1f1b", "nc": 8},
                "nc = 8 with kind = '1f1b': 1f1b fixes nc = 4; legal: leave nc out, or kind = 'flexible'",
            ),
            (
                {"kind": "afab", "nc": 4},
                "nc = 4 with kind = 'afab': afab fixes nc = 8; legal: leave nc out, or kind = 'flexible'",
            ),
            ({"nc": 9}, "nc = 9: must be at most num_micro_batches = 8; nearest legal: 8"),
            ({"num_frozen_stages": -1}, "num_frozen_stages = -1: must be 0 to 4"),
            (
                {"num_frozen_stages": 9, "v": 2},
                "num_frozen_stages = 9: must be 0 to 8",
            ),
        ],
    )
    def test_illegal_combination(self, arguments: dict[str, Any], message: str) -> None:
        # pains.md T04: argument, value, rule, legal values
        base: dict[str, Any] = {"pp": 4, "num_micro_batches": 8}
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            generate(**{**base, **arguments})

    def test_legal_where_it_says_so(self) -> None:
        generate(pp=4, num_micro_batches=8, kind="1f1b", nc=4)
        generate(pp=4, v=2, num_micro_batches=8, kind="interleaved", nc=4)
        generate(pp=4, num_micro_batches=8, kind="afab", nc=8)
        generate(pp=4, num_micro_batches=8, nc=8)
        generate(pp=4, num_micro_batches=8, num_frozen_stages=3)


class TestText:
    def test_examples(self) -> None:
        assert str(Action(Kind.FORWARD, 3, 7)) == "3F7"
        assert str(Action(Kind.RECV_BACKWARD, 12, 0)) == "12RECV_B0"
        assert str(Action(Kind.REDUCE, 3)) == "3REDUCE"
        assert Action.parse("3SEND_F7") == Action(Kind.SEND_FORWARD, 3, 7)

    def test_plan_to_text_to_plan(self) -> None:
        # pains.md T11: what is printed can be read, validated and played again.
        for arguments in sample(15):
            schedule = generate(**arguments)
            text = [[str(action) for action in actions] for actions in schedule.actions]
            assert tuple(tuple(map(Action.parse, actions)) for actions in text) == schedule.actions

    @pytest.mark.parametrize(
        "text", ["", "F7", "3", "3X7", "3F", "3REDUCE7", "3f7", " 3F7", "3F7 ", "3F-1", "-1F0", "03F7", "3F07", "٣F7"]
    )
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=f"action {re.escape(repr(text))}: must be STAGE KIND MICRO_BATCH"):
            Action.parse(text)
