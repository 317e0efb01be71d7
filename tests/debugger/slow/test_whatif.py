"""Steps played again, against a player that shares no code with the simulator, and against hand-computed steps."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from fourfold.debugger.reading import find, read_all
from fourfold.debugger.reading.trace import RankTrace
from fourfold.debugger.slow import diagnose_traces
from fourfold.debugger.slow.idle import cut
from fourfold.debugger.slow.meetings import exposed, meet
from fourfold.debugger.slow.places import Places
from fourfold.debugger.slow.whatif import Computed, Replay, make_replay, replays_of_traces
from fourfold.layout import Action, Grid, Kind, Schedule, generate
from fourfold.layout.actions import COMPUTE
from tests.debugger import jobs
from tests.debugger.hand import pipeline, replicas

Row = tuple[float, float, float]
"""Seconds computing, late before, late after."""
Spent = dict[tuple[int, Action], Row]
Messages = dict[tuple[int, int], float]


def played(grid: Grid, schedule: Schedule, spent: Spent, messages: Messages) -> float:
    """Seconds from the beginning until all have ended: one computation after the other, as soon as it can be done.

    TP's and CP's ranks of a replica do each computation together, and end it together. Messages of a pair of ranks
    follow each other.
    """
    lists = [[a for a in actions if a.kind in COMPUTE] for actions in schedule.actions]
    free = dict.fromkeys(range(grid.size), 0.0)
    line: dict[tuple[int, int], float] = defaultdict(float)
    arrived: dict[tuple[int, Action], float] = {}  # at a rank
    at: dict[tuple[int, int], int] = defaultdict(int)  # of a replica's stage
    waiting = [*product(range(grid.dp), range(grid.pp))]
    while waiting:
        before = sum(at.values())
        for dp, pp in [*waiting]:
            while at[dp, pp] < len(lists[pp]):
                action = lists[pp][at[dp, pp]]
                kind, stage, micro_batch = action
                team = [grid.rank(tp=tp, cp=cp, pp=pp, dp=dp) for cp in range(grid.cp) for tp in range(grid.tp)]
                need = {Kind.FORWARD: stage - 1, Kind.WEIGHT: None}.get(kind, stage + 1)
                if need is not None and not 0 <= need < schedule.num_stages:
                    need = None
                what = "F" if kind is Kind.FORWARD else "B"
                if need is not None and any((rank, (what, need, micro_batch)) not in arrived for rank in team):
                    break
                ends = []
                for rank in team:
                    own, late, after = spent[rank, action]
                    ready = free[rank] + late
                    if need is not None:
                        ready = max(ready, arrived[rank, (what, need, micro_batch)])
                    ends.append(ready + own + after)
                for rank in team:
                    free[rank] = max(ends)
                    follower = stage + 1 if kind is Kind.FORWARD else stage - 1
                    if kind is Kind.WEIGHT or not 0 <= follower < schedule.num_stages:
                        continue
                    to = grid.rank(**(grid.coordinates(rank)._asdict() | {"pp": follower % grid.pp}))
                    if to != rank:
                        line[rank, to] = max(line[rank, to], max(ends)) + messages[rank, to]
                    arrived[to, (what, stage, micro_batch)] = line[rank, to] if to != rank else max(ends)
                at[dp, pp] += 1
            if at[dp, pp] == len(lists[pp]):
                waiting.remove((dp, pp))
        assert sum(at.values()) > before, "deadlock"
    return max(free.values())


class Job:
    """A schedule, and times of chance for all of it."""

    def __init__(self, grid: Grid, seed: int, **options: object) -> None:
        self.grid = grid
        self.schedule = generate(pp=grid.pp, messages=False, **options)
        random = np.random.default_rng(seed)
        self.spent: Spent = {}
        self.lists = [[a for a in actions if a.kind in COMPUTE] for actions in self.schedule.actions]
        for rank in range(grid.size):
            for action in self.lists[grid.coordinates(rank).pp]:
                late = float(random.choice([0, 0, 0.004])) * random.random()
                after = float(random.choice([0, 0, 0.004])) * random.random()
                self.spent[rank, action] = float(random.uniform(0.005, 0.02)), late, after
        self.messages: Messages = {}
        for group in grid.groups("pp"):
            for one, other in product(group, group):
                if one != other and (group.index(one) - group.index(other)) % grid.pp in (1, grid.pp - 1):
                    self.messages[one, other] = float(random.uniform(0.0005, 0.003))

    def seconds(self, spent: Spent | None = None, messages: Messages | None = None) -> float:
        return played(self.grid, self.schedule, spent or self.spent, messages or self.messages)

    def replay(self, without: tuple[int, ...] = ()) -> Replay:
        computed = {
            rank: [Computed(a, *self.spent[rank, a]) for a in self.lists[self.grid.coordinates(rank).pp]]
            for rank in range(self.grid.size)
            if rank not in without
        }
        made = make_replay(self.grid, 3, 1.0, computed, self.messages)
        assert made is not None
        return made

    def like(self, rank: int) -> list[int]:
        return [r for r in range(self.grid.size) if self.grid.coordinates(r).pp == self.grid.coordinates(rank).pp]


JOBS = [
    (Grid(tp=2, cp=2, pp=2, dp=2), {"num_micro_batches": 4, "kind": "1f1b"}),
    (Grid(pp=4, dp=2), {"num_micro_batches": 6, "kind": "1f1b"}),
    (Grid(tp=2, pp=2, dp=2), {"v": 2, "num_micro_batches": 4, "nc": 2}),
    (Grid(pp=3, dp=2), {"v": 2, "num_micro_batches": 7, "nc": 3}),
    (Grid(cp=2, pp=3), {"num_micro_batches": 5, "kind": "zb-h1"}),
    (Grid(dp=3, tp=2), {"num_micro_batches": 3, "kind": "afab"}),
]


@pytest.mark.parametrize(("grid", "options"), JOBS)
class TestAgainstThePlayer:
    def test_as_measured(self, grid: Grid, options: dict) -> None:
        for seed in range(3):
            job = Job(grid, seed, **options)
            assert job.replay().seconds() == pytest.approx(job.seconds())

    def test_a_slow_rank_at_speed(self, grid: Grid, options: dict) -> None:
        job = Job(grid, 0, **options)
        share = {1: 0.4, grid.size - 1: 0.7}
        spent = {(rank, a): (own * share.get(rank, 1.0), before, after)
                 for (rank, a), (own, before, after) in job.spent.items()}  # fmt: skip
        assert job.replay().at_speed(share).seconds() == pytest.approx(job.seconds(spent))
        spent = {key: tuple(share.get(key[0], 1.0) * s for s in row) for key, row in job.spent.items()}
        assert job.replay().at_speed(share, with_pauses=True).seconds() == pytest.approx(job.seconds(spent))

    def test_late_hosts_in_time(self, grid: Grid, options: dict) -> None:
        job = Job(grid, 1, **options)
        late = (0, grid.size - 1)
        spent = dict(job.spent)
        for (rank, action), (own, *pauses) in job.spent.items():
            if rank in late:
                usual = []
                for place, mine in enumerate(pauses, start=1):
                    each = sorted(job.spent[other, action][place] for other in job.like(rank))
                    usual.append(min(mine, each[(len(each) - 1) // 2]))
                spent[rank, action] = own, usual[0], usual[1]
        assert job.replay().in_time(late).seconds() == pytest.approx(job.seconds(spent))

    def test_even_documents(self, grid: Grid, options: dict) -> None:
        job = Job(grid, 2, **options)
        spent = {}
        for (rank, action), (_, before, after) in job.spent.items():
            same = grid.group_of(rank, "dp", "cp")
            spent[rank, action] = float(np.mean([job.spent[other, action][0] for other in same])), before, after
        assert job.replay().even_documents().seconds() == pytest.approx(job.seconds(spent))

    def test_a_link(self, grid: Grid, options: dict) -> None:
        job = Job(grid, 3, **options)
        replay = job.replay()
        for one, other in [*job.messages][:4]:
            both = ((one, other), (other, one))
            messages = {pair: s * (12.0 if pair in both else 1.0) for pair, s in job.messages.items()}
            changed = replay.at_link_speed((one, other), 12.0)
            assert changed.seconds() == pytest.approx(job.seconds(messages=messages))

    def test_a_rank_without_a_trace_is_as_its_peers(self, grid: Grid, options: dict) -> None:
        job = Job(grid, 4, **options)
        rank = grid.size - 1
        peers = [other for other in job.like(rank) if other != rank]
        if not peers:
            pytest.skip("nobody does what it does")
        spent = dict(job.spent)
        for action in job.lists[grid.coordinates(rank).pp]:
            rows = [sorted(job.spent[peer, action][i] for peer in peers) for i in range(3)]
            spent[rank, action] = tuple(row[(len(row) - 1) // 2] for row in rows)
        assert job.replay(without=(rank,)).seconds() == pytest.approx(job.seconds(spent))


class TestMaking:
    F, B = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)

    def rows(self, *actions: Action) -> list[Computed]:
        return [Computed(action, 1.0, 0.0, 0.0) for action in actions]

    def make(self, grid: Grid, computed: Mapping[int, list[Computed]]) -> Replay | None:
        return make_replay(grid, 1, 1.0, computed, {})

    def test_ranks_that_did_different_things(self) -> None:
        grid = Grid(dp=2)
        assert self.make(grid, {0: self.rows(self.F, self.B), 1: self.rows(self.F, self.B)}) is not None
        assert self.make(grid, {0: self.rows(self.F, self.B), 1: self.rows(self.B, self.F)}) is None
        assert self.make(grid, {0: self.rows(self.F, self.B), 1: self.rows(self.F)}) is None

    def test_a_stage_that_nobody_knows(self) -> None:
        assert self.make(Grid(pp=2), {0: self.rows(self.F, self.B)}) is None

    def test_a_stage_that_is_elsewhere(self) -> None:
        other = [Action(kind, 1, 0) for kind in (Kind.FORWARD, Kind.BACKWARD)]
        whole = {0: self.rows(self.F, self.B), 1: self.rows(*other)}
        assert self.make(Grid(pp=2), whole) is not None
        assert self.make(Grid(pp=2), {0: whole[1], 1: whole[0]}) is None

    def test_computations_that_are_missing(self) -> None:
        two = Action(Kind.FORWARD, 1, 1)
        computed = {0: self.rows(self.F, self.B), 1: self.rows(Action(Kind.FORWARD, 1, 0), two)}
        assert self.make(Grid(pp=2), computed) is None

    def test_nothing(self) -> None:
        assert self.make(Grid(), {}) is None

    def test_a_host_that_is_less_late_than_its_peers_stays_so(self) -> None:
        grid, late = Grid(dp=4), (0.1, 0.3, 0.3, 0.8)
        computed = {rank: [Computed(self.F, 1.0, late[rank], late[rank])] for rank in range(4)}
        made = self.make(grid, computed)
        assert made is not None
        in_time = made.in_time([0, 3])
        for lanes in (in_time.before[self.F], in_time.after[self.F]):
            assert lanes.ravel().tolist() == [0.1, 0.3, 0.3, 0.3]
        assert (made.seconds(), in_time.seconds()) == (pytest.approx(2.6), pytest.approx(1.6))

    def test_messages_that_nobody_measured_take_what_others_do(self) -> None:
        grid = Grid(pp=2, dp=3)
        other = [Action(kind, 1, 0) for kind in (Kind.FORWARD, Kind.BACKWARD)]
        computed = {rank: self.rows(self.F, self.B) if rank % 2 == 0 else self.rows(*other) for rank in range(6)}
        made = make_replay(grid, 1, 1.0, computed, {(0, 1): 0.1, (2, 3): 0.2, (5, 4): 0.7})
        assert made is not None
        assert made.message[0, 1].ravel().tolist() == [0.1, 0.2, 0.2]
        assert made.message[1, 0].ravel().tolist() == [0.2, 0.2, 0.7]
        assert made.seconds() == pytest.approx(1 + 0.2 + 1 + 1 + 0.7 + 1)


def replayed(traces: list[RankTrace], step: int = 7) -> Replay | None:
    ranks = [cut(one) for one in traces]
    grid = traces[0].grid
    assert grid is not None
    found = meet(ranks, Places(grid))
    return next(iter(replays_of_traces(ranks, found, exposed(found, ranks)[1], grid, [step])), None)


class TestFromTraces:
    """The step of `hand.pipeline`: 41 ms until rank 1 has reduced, 1 ms for a message, 10 ms on the second stage."""

    def test_own_times(self) -> None:
        made = replayed(pipeline())
        assert made is not None
        own = {action.stage: lanes.ravel().tolist() for action, lanes in made.own.items()}
        assert own[0] == pytest.approx([0.011, 0.041])  # rank 0 computes 10 ms and reduces 1
        assert own[1] == pytest.approx([0.010, 0.010])
        assert all(not lanes.any() for late in (made.before, made.after) for lanes in late.values())
        np.testing.assert_allclose(made.message[0, 1], 0.001)
        assert made.measured == pytest.approx(0.052)
        assert made.seconds() == pytest.approx(0.052)

    def test_at_speed(self) -> None:
        made = replayed(pipeline())
        assert made is not None
        assert made.at_speed({1: 0.25}).seconds() == pytest.approx(0.011 + 0.001 + 0.010)
        assert made.at_speed({0: 0.25}).seconds() == pytest.approx(0.052)
        assert made.at_link_speed((0, 2), 5.0).seconds() == pytest.approx(0.041 + 0.005 + 0.010)
        assert made.at_link_speed((3, 1), 5.0).seconds() == pytest.approx(0.041 + 0.005 + 0.010)

    def test_in_time(self) -> None:
        made = replayed(pipeline(garbage=True))
        assert made is not None
        (first,) = (lanes for action, lanes in made.own.items() if action.stage == 0)
        assert first.ravel().tolist() == pytest.approx([0.011, 0.011])
        assert made.seconds() == pytest.approx(0.052)
        assert made.in_time([1]).seconds() == pytest.approx(0.011 + 0.001 + 0.010)
        assert made.in_time([0]).seconds() == pytest.approx(0.052)

    def test_clocks_do_not_matter(self) -> None:
        wrong, right = replayed(pipeline(skew=60)), replayed(pipeline())
        assert wrong is not None
        assert right is not None
        assert wrong.seconds() == pytest.approx(right.seconds())

    def test_another_step(self) -> None:
        assert replayed(pipeline(), step=8) is None

    def test_without_labels_a_step_without_a_pipeline_is_one_computation(self) -> None:
        made = replayed(replicas())
        assert made is not None
        (own,) = made.own.values()
        assert own.ravel().tolist() == pytest.approx([0.061, 0.091, 0.061, 0.061])

    def test_with_a_pipeline_it_cannot_be_played(self) -> None:
        bare = [dataclasses.replace(one, labels=dataclasses.replace(one.labels, kind=("TP",) * len(one.labels.kind)))
                for one in pipeline()]  # fmt: skip
        assert replayed(bare) is None


@pytest.mark.parametrize(
    "job",
    [
        jobs.Job(dp=4, jitter=0.0, slow={2: 1.5}),
        jobs.Job(dp=4, slow={1: 1.3}),
        jobs.Job(tp=2, dp=2, jitter=0.0, slow={3: 1.6}),
        jobs.Job(dp=4, jitter=0.0, pause_us={1: 2_500.0}),
    ],
    ids=["slow", "slow by chance", "with tp", "late host"],
)
def test_gain_is_that_of_the_job_without(job: jobs.Job, tmp_path: Path) -> None:
    """Whole steps as other program played them: with what was planted, and without."""
    normal = dataclasses.replace(job, slow={}, pause_us={})
    cost = np.mean([
        (slow[1] - slow[0] - (usual[1] - usual[0])) / 1e6
        for slow, usual in zip(jobs.play(job)[1], jobs.play(normal)[1], strict=True)
    ])  # fmt: skip
    found = diagnose_traces(jobs.write(job, tmp_path), workers=1)
    (culprit,) = found.verdict.culprits
    assert culprit.gain == pytest.approx(cost, rel=0.03)
    for replay in found.replays:
        assert replay.seconds() == pytest.approx(replay.measured, rel=0.02)


def test_steps_that_are_played(tmp_path: Path) -> None:
    """Of many steps three from the middle."""
    ranks = read_all(find(jobs.write(jobs.Job(dp=2, steps=7, layers=1), tmp_path)), reduce=cut, workers=1)
    assert ranks[0].trace.steps.number.tolist() == [1, 2, 3, 4, 5, 6, 7]
    found = diagnose_traces(tmp_path, workers=1)
    assert [replay.step for replay in found.replays] == [3, 4, 5]
