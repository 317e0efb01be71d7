"""Which calls are one meeting, and how much of each is waiting: against jobs whose every meeting is known."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.debugger.reading import find, read_all
from fourfold.debugger.reading.trace import UNKNOWN, Call, Group, RankTrace
from fourfold.debugger.slow.idle import RankSteps, cut
from fourfold.debugger.slow.meetings import Meetings, Unseen, exposed, meet, waits_for_unseen
from fourfold.debugger.slow.places import Places
from fourfold.layout import Grid
from tests.debugger import jobs
from tests.debugger.hand import MS, Met, trace

Called = tuple[int, int]
"""Rank, and the start of the call in milliseconds."""


def ranks_of(traces: Sequence[RankTrace]) -> list[RankSteps]:
    return [cut(one) for one in traces]


def changed(one: RankTrace, **columns: Any) -> RankTrace:
    """The same rank with some columns of its calls changed."""
    return dataclasses.replace(one, calls=dataclasses.replace(one.calls, **columns))


def unnumbered(one: RankTrace) -> RankTrace:
    return changed(one, sequence=np.full(len(one.calls.start), UNKNOWN, dtype=np.int64))


def met(ranks: Sequence[RankSteps], found: Meetings) -> set[frozenset[Called]]:
    """The meetings, as sets of calls."""
    out: dict[int, set[Called]] = defaultdict(set)
    for index, call, number in zip(found.rank, found.call, found.number, strict=True):
        calls = ranks[index].trace.calls
        out[int(number)].add((ranks[index].trace.rank, int(calls.start[call]) // MS))
    return {frozenset(members) for members in out.values()}


def transfers(ranks: Sequence[RankSteps], found: Meetings) -> dict[Called, int]:
    """Milliseconds of each call that are no waiting."""
    return {
        (ranks[index].trace.rank, int(ranks[index].trace.calls.start[call]) // MS): int(moved) // MS
        for index, call, moved in zip(found.rank, found.call, found.transfer, strict=True)
    }


def several(random: np.random.Generator, grid: Grid) -> tuple[list[RankTrace], set[frozenset[Called]], dict]:
    """Collectives of all TP and FSDP groups in turn, at random times. Also what meets, and what each transfer takes."""
    calls: dict[int, list[Met]] = defaultdict(list)
    together, takes = set(), {}
    now = np.zeros(grid.size, dtype=int)
    for turn in range(12):
        dims = ("tp",) if turn % 3 else ("cp", "dp")
        for group in grid.groups(*dims):
            came = {rank: int(now[rank] + random.integers(1, 30)) for rank in group}
            transfer = int(random.integers(1, 9))
            end = max(came.values()) + transfer
            for rank in group:
                calls[rank].append(Met(came[rank], end, Call.ALL_REDUCE, group, turn))
                takes[rank, came[rank]] = transfer
                now[rank] = end
            together.add(frozenset(came.items()))
    end = int(now.max())
    return [trace(rank, grid, end=end, works=[], calls=calls[rank]) for rank in range(grid.size)], together, takes


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_collectives_at_random_times(seed: int, numbered: bool) -> None:
    grid = Grid(tp=2, cp=2, dp=2)
    traces, together, takes = several(np.random.default_rng(seed), grid)
    ranks = ranks_of(traces if numbered else map(unnumbered, traces))
    found = meet(ranks, Places(grid))
    assert met(ranks, found) == together
    assert transfers(ranks, found) == takes
    assert found.alone == 0
    assert {key[0] for key in found.keys} == {"tp", "fsdp"}
    for index in range(grid.size):
        rows = found.of_rank(index)
        assert np.all(found.rank[rows] == index)
        assert found.call[rows].tolist() == [*range(12)]


def drop(one: RankTrace, place: int) -> RankTrace:
    """A rank whose trace lacks a call."""
    columns = {f.name: np.delete(getattr(one.calls, f.name), place) for f in dataclasses.fields(one.calls)}
    return changed(one, **columns)


@pytest.mark.parametrize("place", [0, 3, 11])
def test_a_call_that_a_trace_lacks(place: int) -> None:
    """By sequence number; and without, by what the calls before and after it look like."""
    grid = Grid(tp=4)
    calls = [Met(10 * i + 1, 10 * i + 9, Call.ALL_GATHER if i % 2 else Call.ALL_REDUCE, (0, 1, 2, 3), i)
             for i in range(12)]  # fmt: skip
    traces = [trace(rank, grid, end=120, works=[], calls=calls) for rank in range(4)]
    size = np.arange(12) // 2 * 100 + 100
    traces = [changed(one, elements=size) for one in traces]
    lacking = [*traces[:2], drop(traces[2], place), traces[3]]
    for given in (lacking, [unnumbered(one) for one in lacking]):
        ranks = ranks_of(given)
        found = meet(ranks, Places(grid))
        wanted = {frozenset((rank, 10 * i + 1) for rank in range(4) if (rank, i) != (2, place)) for i in range(12)}
        assert met(ranks, found) == wanted
        assert found.alone == 3


def test_steps_are_not_mixed_where_a_step_lacks_calls() -> None:
    """Rank 1 lacks the last call of the first step: without numbers the second step must still meet rightly."""
    grid = Grid(tp=2)
    calls = [Met(10 * i + 1, 10 * i + 9, Call.ALL_REDUCE, (0, 1), i) for i in range(6)]
    traces = [trace(rank, grid, end=60, works=[], calls=calls) for rank in range(2)]
    traces = [unnumbered(changed(one, step=np.array([0, 0, 0, 1, 1, 1], dtype=np.int32))) for one in traces]
    ranks = ranks_of([traces[0], drop(traces[1], 2)])
    found = met(ranks, meet(ranks, Places(grid)))
    assert {frozenset({(0, 10 * i + 1), (1, 10 * i + 1)}) for i in (0, 1, 3, 4, 5)} <= found


class TestMessages:
    GRID = Grid(pp=2)

    def traces(self) -> list[RankTrace]:
        """Two messages there and one back. The second is sent late; the others are waited for by nobody."""
        there, back = (0, 1), (0, 1)
        first = [Met(5, 12, Call.SEND, there, 1, 1), Met(30, 34, Call.SEND, there, 2, 1),
                 Met(2, 52, Call.RECV, back, 1, 1)]  # fmt: skip
        other = [Met(9, 12, Call.RECV, there, 1, 0), Met(13, 34, Call.RECV, there, 2, 0),
                 Met(50, 52, Call.SEND, back, 1, 0)]  # fmt: skip
        return [trace(0, self.GRID, end=60, works=[], calls=first), trace(1, self.GRID, end=60, works=[], calls=other)]

    TOGETHER = frozenset({
        frozenset({(0, 5), (1, 9)}), frozenset({(0, 30), (1, 13)}), frozenset({(0, 2), (1, 50)})
    })  # fmt: skip

    def test_each_direction_is_a_channel(self) -> None:
        ranks = ranks_of(self.traces())
        found = meet(ranks, Places(self.GRID))
        assert found.keys == (("pp", (0, 1)), ("pp", (1, 0)))
        assert met(ranks, found) == self.TOGETHER
        assert transfers(ranks, found) == {(0, 5): 3, (1, 9): 3, (0, 30): 4, (1, 13): 4, (0, 2): 2, (1, 50): 2}

    def test_the_peer_is_the_other_of_two(self) -> None:
        ranks = ranks_of([changed(one, peer=np.full(3, UNKNOWN, dtype=np.int32)) for one in self.traces()])
        assert met(ranks, meet(ranks, Places(self.GRID))) == self.TOGETHER

    def test_with_an_unknown_peer_nobody_is_met(self) -> None:
        def lost(one: RankTrace) -> RankTrace:
            nobody = np.full(3, UNKNOWN, dtype=np.int32)
            return changed(one, peer=nobody, group=nobody)

        ranks = ranks_of([self.traces()[0], lost(self.traces()[1])])
        found = meet(ranks, Places(self.GRID))
        assert found.alone == 6
        assert all(len(members) == 1 for members in met(ranks, found))

    def test_whose_direction_is_unknown_meet_in_order(self) -> None:
        def vague(one: RankTrace) -> RankTrace:
            return unnumbered(changed(one, kind=np.full(len(one.calls.start), Call.MESSAGE, dtype=np.int8)))

        calls = [Met(1, 9, Call.SEND, (0, 1), 1), Met(11, 19, Call.RECV, (0, 1), 2)]
        ranks = ranks_of([vague(trace(rank, self.GRID, end=20, works=[], calls=calls)) for rank in range(2)])
        found = meet(ranks, Places(self.GRID))
        assert found.keys == (("pp", (0, 1)),)
        assert met(ranks, found) == {frozenset({(0, 1), (1, 1)}), frozenset({(0, 11), (1, 11)})}


class TestIncomplete:
    """Rank 1 of three has no trace."""

    GRID = Grid(dp=3, tp=2)
    GROUP, OTHER = (0, 2, 4), (1, 3, 5)

    def test_takes_what_it_takes_others(self) -> None:
        def calls(group: tuple[int, ...], came: int) -> list[Met]:
            return [Met(came, 40, Call.ALL_REDUCE, group, 1)]

        came = {0: 10, 1: 5, 3: 34, 4: 20, 5: 8}
        traces = [trace(rank, self.GRID, end=50, works=[], calls=calls(self.GROUP if rank % 2 == 0 else self.OTHER, at))
                  for rank, at in came.items()]  # fmt: skip
        ranks = ranks_of(traces)
        found = meet(ranks, Places(self.GRID))
        # The whole group takes 6 ms; so does the one whose last member may have been the rank without a trace.
        assert transfers(ranks, found) == {(0, 10): 6, (4, 20): 6, (1, 5): 6, (3, 34): 6, (5, 8): 6}
        assert found.alone == 2

    def test_or_what_it_took_at_best_if_there_is_nobody_else(self) -> None:
        calls = {
            0: [Met(10, 40, Call.ALL_REDUCE, self.GROUP, 1), Met(50, 58, Call.ALL_REDUCE, self.GROUP, 2)],
            4: [Met(20, 40, Call.ALL_REDUCE, self.GROUP, 1), Met(45, 58, Call.ALL_REDUCE, self.GROUP, 2)],
        }
        ranks = ranks_of([trace(rank, self.GRID, end=60, works=[], calls=own) for rank, own in calls.items()])
        found = meet(ranks, Places(self.GRID))
        assert transfers(ranks, found) == {(0, 10): 8, (0, 50): 8, (4, 20): 8, (4, 45): 8}


def _unseen(ranks: Sequence[RankSteps], grid: Grid, num_steps: int = 1) -> Unseen | None:
    found = meet(ranks, Places(grid))
    return waits_for_unseen(found, ranks, exposed(found, ranks)[0], num_steps)


class TestUnseen:
    """Ranks without a trace for whom others wait."""

    GRID = Grid(dp=3)

    def unseen(self, there: Sequence[int]) -> Unseen | None:
        """Rank 1 comes 20 ms after the others to the first, and rank 0 last to the second; both take 4 ms."""
        came = {0: (10, 50), 1: (36, 41), 2: (16, 44)}
        calls = {
            rank: [Met(at, end, Call.ALL_REDUCE, (0, 1, 2), number)
                   for number, (at, end) in enumerate(zip(came[rank], (40, 54), strict=True))]
            for rank in there
        }  # fmt: skip
        ranks = ranks_of([trace(rank, self.GRID, end=60, works=[], calls=calls[rank]) for rank in there])
        return _unseen(ranks, self.GRID)

    def test_nobody_is_missing(self) -> None:
        assert self.unseen([0, 1, 2]) is None

    def test_who_is_waited_for(self) -> None:
        found = self.unseen([0, 2])
        assert found is not None
        assert found.ranks == (1,)
        # At best a collective takes the 4 ms of the second, in which rank 0 was the last: of the first, in which rank 2
        # is for 24 ms, 20 are waiting.
        assert found.seconds == pytest.approx(0.020)

    @pytest.mark.parametrize(("slow", "unseen"), [({}, None), ({7: 1.5}, (7,))])
    def test_a_pipeline_waits_for_its_other_stages_anyway(
        self, tmp_path: Path, slow: dict[int, float], unseen: tuple[int, ...] | None
    ) -> None:
        job = jobs.Job(tp=2, pp=2, dp=2, layers=2, slow=slow)
        (jobs.write(job, tmp_path) / "rank-7.json").unlink()
        ranks = read_all(find(tmp_path), reduce=cut, workers=1)
        found = _unseen(ranks, Grid(tp=2, pp=2, dp=2), job.steps)
        took = sum(end - start for start, end in jobs.play(job)[1]) / job.steps / 1e6
        if unseen is None:
            assert found is None or found.seconds < 0.05 * took
        else:
            assert found is not None
            assert found.ranks == unseen
            assert found.seconds > 0.1 * took

    def test_who_is_not_waited_for(self) -> None:
        assert self.unseen([0, 1]) is None


class TestGroups:
    @pytest.mark.parametrize("skew", [{}, {1: 900.0, 6: -35_000.0}], ids=["right clocks", "wrong clocks"])
    @pytest.mark.parametrize(
        ("job", "kind", "stream"),
        [
            (jobs.Job(tp=2, dp=4, steps=2), Call.ALL_REDUCE, jobs.TP),
            (jobs.Job(tp=2, pp=2, dp=2, steps=2), Call.ALL_REDUCE, jobs.TP),
            (jobs.Job(pp=2, dp=4, steps=2), Call.REDUCE_SCATTER, jobs.DP),
        ],
        ids=["tp", "tp beside pp", "dp"],
    )
    def test_without_arguments_are_found_by_when_calls_end(
        self, tmp_path: Path, job: jobs.Job, kind: Call, stream: int, skew: dict[int, float]
    ) -> None:
        grid = Grid(tp=job.tp, pp=job.pp, dp=job.dp)
        style = jobs.Style(arguments=False, sequence=False, skew_us=skew)
        ranks = read_all(find(jobs.write(job, tmp_path, style)), reduce=cut, workers=1)
        found = meet(ranks, Places(grid))
        events, _ = jobs.play(job)
        for index in range(grid.size):
            rows = found.of_rank(index)
            calls = ranks[index].trace.calls
            mine = (found.kind[rows] == kind) & (calls.stream[found.call[rows]] == stream)
            (key,) = {found.keys[k] for k in found.key[rows][mine].tolist()}
            played = [event for event in events[index] if event.stream == stream and event.what != "AllReduce"]
            played = played or [event for event in events[index] if event.stream == stream]
            assert key[1] == played[0].ranks
            assert np.count_nonzero(mine) == len(played)
            np.testing.assert_allclose(found.transfer[rows][mine], 1_000 * jobs.TRANSFER, atol=2)

    def test_of_one_rank_is_nobody(self) -> None:
        grid = Grid(dp=2)
        alone = [Met(1, 3, Call.ALL_REDUCE, (rank,), 1) for rank in range(2)]
        ranks = ranks_of([trace(rank, grid, end=9, works=[], calls=[alone[rank]]) for rank in range(2)])
        found = meet(ranks, Places(grid))
        assert (len(found.rank), found.alone) == (0, 0)

    def test_cut_lists_are_completed_by_the_layout(self) -> None:
        grid = Grid(tp=2, dp=4)
        calls = [Met(1, 3, Call.ALL_REDUCE, (0, 2, 4, 6), 1)]
        whole = trace(0, grid, end=9, works=[], calls=calls)
        short = dataclasses.replace(trace(2, grid, end=9, works=[], calls=calls),
                                    groups=(Group("1", "", 4, None, (0, 2)),))  # fmt: skip
        ranks = ranks_of([whole, short])
        assert met(ranks, meet(ranks, Places(grid))) == {frozenset({(0, 1), (2, 1)})}


def test_nothing_at_all() -> None:
    grid = Grid(dp=2)
    found = meet(ranks_of([trace(rank, grid, end=9, works=[(0, 9)]) for rank in range(2)]), Places(grid))
    assert (len(found.rank), found.keys, found.alone) == (0, (), 0)
