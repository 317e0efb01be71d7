"""The player against an event simulator of its own kind, kept here, and against slack computed from both ends."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fourfold.layout import Action, Kind, Schedule, Timeline, compile_program, generate, play
from fourfold.layout.actions import COMPUTE, MESSAGES

SETTINGS = settings(max_examples=60, deadline=None)


@dataclass(frozen=True)
class Case:
    """A schedule with whole-numbered durations of everything, so that times are exact."""

    schedule: Schedule
    forward: NDArray[np.int64]  # [stage, micro-batch]
    backward: NDArray[np.int64]  # [stage, micro-batch]
    weight: NDArray[np.int64]  # [stage, micro-batch], the part of backward that is W
    message: NDArray[np.int64]  # [direction, sending stage, micro-batch]
    gather: NDArray[np.int64]  # [stage]
    reduce: NDArray[np.int64]  # [stage]

    def play(self) -> Timeline:
        return play(
            self.schedule,
            forward=self.forward,
            backward=self.backward,
            weight=self.weight,
            message=self.message,
            gather=self.gather,
            reduce=self.reduce,
        )

    def duration(self, action: Action) -> int:
        kind, stage, micro_batch = action
        if kind in COMPUTE:
            table = {
                Kind.FORWARD: self.forward,
                Kind.BACKWARD: self.backward,
                Kind.INPUT: self.backward - self.weight,
                Kind.WEIGHT: self.weight,
            }[kind]
            return int(table[stage, micro_batch])
        return {Kind.GATHER: int(self.gather[stage]), Kind.REDUCE: int(self.reduce[stage]), Kind.FREE: 0}[kind]

    def travel(self, kind: Kind, stage: int, micro_batch: int) -> int:
        return int(self.message[0 if kind is Kind.FORWARD else 1, stage, micro_batch]) if self.schedule.pp > 1 else 0


@st.composite
def cases(draw: st.DrawFn, *, events: bool = True) -> Case:
    pp, v, nmb = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["afab", "flexible", "flexible", "zb-h1"]))
    v = 1 if kind == "zb-h1" else v
    nc = draw(st.integers(1, nmb)) if kind == "flexible" else None
    schedule = generate(
        pp=pp,
        v=v,
        num_micro_batches=nmb,
        kind=kind,
        nc=nc,
        zero=draw(st.integers(1, 3)),
        num_frozen_stages=draw(st.integers(0, pp * v - 1)) if draw(st.booleans()) else 0,
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    slowest = draw(st.integers(0, 2)) if events else 0
    backward = random.integers(0, 10, (pp * v, nmb))
    return Case(
        schedule,
        forward=random.integers(0, 6, (pp * v, nmb)),
        backward=backward,
        weight=random.integers(0, backward + 1),
        message=random.integers(0, draw(st.integers(1, 6)), (2, pp * v, nmb)),
        gather=random.integers(0, slowest + 1, pp * v),
        reduce=random.integers(0, slowest + 1, pp * v),
    )


@dataclass
class Rank:
    """A pipeline rank in the simulator: its actions that take time, how far it is, and what it holds."""

    queue: list[Action]
    busy: bool = False
    position: int = 0
    live: int = 0
    peak: int = 0
    compute: int = 0


@dataclass
class Simulator:
    """Discrete events in a heap: an action ends, a message arrives. Reads none of the sends and receives."""

    case: Case
    spans: dict[Action, tuple[int, int]] = field(default_factory=dict)
    arrived: set[tuple[Kind, int, int]] = field(default_factory=set)  # results, at the rank that needs them
    events: list[tuple[int, int, str, int, Action]] = field(default_factory=list)
    now: int = 0

    def run(self) -> list[Rank]:
        ranks = [Rank([a for a in actions if a.kind not in MESSAGES]) for actions in self.case.schedule.actions]
        for index, rank in enumerate(ranks):
            self.start(index, rank)
        while self.events:
            self.now, _, what, index, action = heapq.heappop(self.events)
            if what == "arrival":
                self.arrived.add((action.kind, action.stage, action.micro_batch))
            else:
                self.finish(ranks[index], index, action)
            for each, rank in enumerate(ranks):
                self.start(each, rank)
        assert all(rank.position == len(rank.queue) for rank in ranks)
        return ranks

    def start(self, index: int, rank: Rank) -> None:
        if rank.busy or rank.position == len(rank.queue):
            return
        action = rank.queue[rank.position]
        kind, stage, micro_batch = action
        last = self.case.schedule.num_stages - 1
        if kind is Kind.FORWARD and stage > 0 and (kind, stage - 1, micro_batch) not in self.arrived:
            return
        back = kind in (Kind.BACKWARD, Kind.INPUT)
        if back and stage < last and (kind, stage + 1, micro_batch) not in self.arrived:
            return
        if kind is Kind.FORWARD and stage >= self.case.schedule.num_frozen_stages:
            rank.live += 1
            rank.peak = max(rank.peak, rank.live)
        rank.busy = True
        self.push(self.now + self.case.duration(action), "end", index, action)

    def finish(self, rank: Rank, index: int, action: Action) -> None:
        rank.busy = False
        rank.position += 1
        if action.kind in COMPUTE:
            duration = self.case.duration(action)
            self.spans[action] = (self.now - duration, self.now)
            rank.compute += duration
            rank.live -= action.kind in (Kind.BACKWARD, Kind.WEIGHT)
            self.push(self.now + self.case.travel(*action), "arrival", index, action)

    def push(self, time: int, what: str, index: int, action: Action) -> None:
        heapq.heappush(self.events, (time, len(self.spans), what, index, action))


class TestAgainstTheSimulator:
    """pains.md T05."""

    @SETTINGS
    @given(cases())
    def test_times_bubble_and_live_peak(self, case: Case) -> None:
        simulator = Simulator(case)
        ranks = simulator.run()
        timeline = case.play()
        assert {action: timeline.span(action) for action in simulator.spans} == simulator.spans
        assert timeline.compute.tolist() == [rank.compute for rank in ranks]
        assert timeline.idle.tolist() == [timeline.step_time - rank.compute for rank in ranks]
        assert case.schedule.in_flight_peak == tuple(rank.peak for rank in ranks)
        for pp_rank, rank in enumerate(ranks):
            times, counts = timeline.live_chunks(pp_rank)
            assert counts.max(initial=0) == rank.peak
            assert counts.min(initial=0) == 0
            assert (np.diff(times) >= 0).all()
        total = sum(rank.compute for rank in ranks)
        idle = case.schedule.pp * timeline.step_time - total
        if total:
            assert timeline.bubble_over_compute == pytest.approx(idle / total)
            assert timeline.bubble_over_total == pytest.approx(idle / (idle + total))

    def test_warmup_grid(self) -> None:
        # Peaks that the simulator sees are warm-up + 1, for uniform costs.
        for pp in range(1, 7):
            for v in (1, 2, 4):
                for nmb, nc in ((pp, pp), (2 * pp + 1, pp), (11, 7), (16, 16)):
                    if not pp <= nc <= nmb:
                        continue
                    schedule = generate(pp=pp, v=v, num_micro_batches=nmb, nc=nc)
                    ones = np.ones((pp * v, nmb), dtype=np.int64)
                    nothing = np.zeros(pp * v, dtype=np.int64)
                    case = Case(schedule, ones, 2 * ones, ones, np.zeros((2, pp * v, nmb), np.int64), nothing, nothing)
                    assert [rank.peak for rank in Simulator(case).run()] == [
                        min(warmup + 1, nmb * v) for warmup in schedule.warmup
                    ]


def latest_starts(case: Case, timeline: Timeline) -> list[float]:
    """The latest start of each action of the program that leaves the step time as it is, from the end backwards.

    Written from the schedule's meaning, not from the program's tables: an action must end before the next one on its
    rank starts, and its message must arrive in time.
    """
    actions, ranks = timeline.program.actions, timeline.program.pp_rank
    latest = [0.0] * len(actions)
    next_on_rank: dict[int, float] = {}
    consumer: dict[Action, float] = {}  # latest start of a computation
    for i in reversed(range(len(actions))):
        kind, stage, micro_batch = action = actions[i]
        end = next_on_rank.get(int(ranks[i]), timeline.step_time)
        if kind in COMPUTE and kind is not Kind.WEIGHT:
            user = Action(kind, stage + (1 if kind is Kind.FORWARD else -1), micro_batch)
            if user in consumer:
                end = min(end, consumer[user] - case.travel(kind, stage, micro_batch))
        latest[i] = end - case.duration(action)
        next_on_rank[int(ranks[i])] = latest[i]
        if kind in COMPUTE:
            consumer[action] = latest[i]
    return latest


def slower(case: Case, action: Action, by: int) -> Timeline:
    more = np.zeros_like(case.forward)
    more[action.stage, action.micro_batch] = by
    if action.kind is Kind.FORWARD:
        return replace(case, forward=case.forward + more).play()
    weight = case.weight + more if action.kind is Kind.WEIGHT else case.weight
    return replace(case, backward=case.backward + more, weight=weight).play()


class TestCriticalPath:
    @SETTINGS
    @given(cases())
    def test_its_parts_add_up_to_the_step(self, case: Case) -> None:
        timeline = case.play()
        path, actions, ranks = timeline.critical_path(), timeline.program.actions, timeline.program.pp_rank
        assert timeline.start[path[0]] == 0
        assert timeline.end[path[-1]] == timeline.step_time
        total = sum(case.duration(actions[i]) for i in path)
        for i, j in pairwise(path):
            if ranks[i] != ranks[j]:
                assert actions[i].kind is actions[j].kind
                assert abs(actions[i].stage - actions[j].stage) == 1
                assert actions[i].micro_batch == actions[j].micro_batch
                total += case.travel(*actions[i])
        assert total == timeline.step_time

    @SETTINGS
    @given(cases(), st.randoms(use_true_random=False))
    def test_only_what_is_on_it_costs(self, case: Case, random: Random) -> None:
        timeline = case.play()
        latest = latest_starts(case, timeline)
        path = set(timeline.critical_path())
        assert all(latest[i] == timeline.start[i] for i in path)
        computations = [i for i, action in enumerate(timeline.program.actions) if action.kind in COMPUTE]
        for i in random.sample(computations, min(6, len(computations))):
            slack = int(latest[i] - timeline.start[i])
            assert slack >= 0
            action = timeline.program.actions[i]
            assert slower(case, action, slack).step_time == timeline.step_time
            assert slower(case, action, slack + 3).step_time == timeline.step_time + 3

    def test_ideal_pipeline(self) -> None:
        # Figure 2: with free messages the path is the step without any gap, 6 x 2 x (1 + 2) and 2 x (1 + 2).
        timeline = play(generate(pp=3, v=2, num_micro_batches=6))
        path = [timeline.program.actions[i] for i in timeline.critical_path()]
        assert timeline.step_time == 42
        assert path[0].stage == 0
        assert sum(1 if action.kind is Kind.FORWARD else 2 for action in path if action.kind in COMPUTE) == 42


class TestDurations:
    def test_live_chunks_of_the_first_rank(self) -> None:
        timeline = play(generate(pp=2, num_micro_batches=3, kind="1f1b"), forward=1, backward=2)
        times, counts = timeline.live_chunks(0)
        # Rank 0 is drawn F0 F1 . B0 B0 F2 B1 B1 . B2 B2; rank 1 is one later and never waits.
        assert times.tolist() == [0, 1, 6, 6, 9, 12]
        assert counts.tolist() == [1, 2, 1, 2, 1, 0]

    def test_one_value_per_stage(self) -> None:
        schedule = generate(pp=2, v=2, num_micro_batches=4)  # as many stages as micro-batches
        table = np.repeat(np.arange(4.0)[:, None], 4, axis=1)
        by_stage = play(schedule, forward=np.arange(4.0), backward=2 * np.arange(4.0), message=[0, 1, 0, 1])
        by_table = play(
            schedule, forward=table, backward=2 * table, message=np.stack([table % 2, table % 2], dtype=float)
        )
        assert (by_stage.end == by_table.end).all()

    def test_events_hold_up_their_rank(self) -> None:
        # One rank, ZeRO-1, two chunks: a gather before each first use, a reduce-scatter after each last backward.
        timeline = play(generate(pp=1, v=2, num_micro_batches=3), gather=5, reduce=[7, 11])
        assert timeline.step_time == 2 * 3 * 3 + 2 * 5 + 7 + 11
        assert timeline.compute.tolist() == [18]

    def test_a_program_plays_again(self) -> None:
        program = compile_program(generate(pp=4, v=2, num_micro_batches=9))
        first = program.play()
        assert program.play(forward=3, backward=6).step_time == 3 * first.step_time
        assert program.play().step_time == first.step_time

    def test_halves_of_a_backward(self) -> None:
        # ZB-H1, two ranks, three micro-batches, F 2, I 3, W 1; by hand:
        # rank 0  F0 F0 F1 F1 .  .  .  I0 I0 I0 W0 F2 F2 I1 I1 I1 W1 .  I2 I2 I2 W2
        # rank 1  .  .  F0 F0 I0 I0 I0 F1 F1 I1 I1 I1 W0 F2 F2 I2 I2 I2 W1 W2 .  .
        schedule = generate(pp=2, num_micro_batches=3, kind="zb-h1")
        timeline = play(schedule, forward=2, backward=4, weight=1)
        assert timeline.span(Action(Kind.INPUT, 1, 1)) == (9, 12)
        assert timeline.span(Action(Kind.INPUT, 0, 0)) == (7, 10)
        assert timeline.span(Action(Kind.WEIGHT, 1, 0)) == (12, 13)
        assert timeline.step_time == 22
        assert timeline.compute.tolist() == [18, 18]
        assert timeline.idle.tolist() == [4, 4]  # (pp - 1) (F + I - W)
        with pytest.raises(ValueError, match="weight: durations must be at most those of the whole backward"):
            play(schedule, backward=2, weight=3)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("forward", -1, "forward: durations must be numbers >= 0"),
            ("backward", float("nan"), "backward: durations must be numbers >= 0"),
            ("message", [1, 2, 3], "message: an array of shape"),
            ("weight", -1, "weight: durations must be numbers >= 0"),
            ("forward", [1, 2, 3], "forward: an array of shape"),
            ("forward", np.ones(5), "forward: an array of shape"),  # one per micro-batch is not one per stage
            ("gather", np.ones((4, 5)), "gather: an array of shape"),
        ],
    )
    def test_wrong_durations(self, name: str, value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}"):
            play(generate(pp=2, v=2, num_micro_batches=5), **{name: value})
