"""Pauses of one rank cut into pieces: against what was worked out by hand, and against every millisecond by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fourfold.debugger.reading.trace import UNKNOWN, Call, Host, HostRanges, Labels, RankTrace, Steps, Work
from fourfold.debugger.slow.idle import LAUNCH, RankSteps, cut
from fourfold.layout import Grid
from tests.debugger.hand import MS, Did, Met, trace

GRID = Grid(tp=2, pp=2)
GROUP = (0, 1)
Piece = tuple[int, int, int]
"""Start and end in milliseconds, and what."""


def met(start: int, end: int, kind: Call = Call.ALL_REDUCE) -> Met:
    peer = 1 if kind in (Call.SEND, Call.RECV) else UNKNOWN
    return Met(start, end, kind, GROUP, start, peer)


def made(works: Sequence[tuple[int, int]], calls: Sequence[Met] = (), *, end: int, **more: Any) -> RankTrace:
    return trace(0, GRID, end=end, works=works, calls=calls, **more)


def by_host(found: RankSteps) -> list[Piece]:
    pieces = found.by_host
    return sorted(zip((pieces.start // MS).tolist(), (pieces.end // MS).tolist(), pieces.what.tolist(), strict=True))


def in_calls(found: RankSteps) -> list[Piece]:
    """What: the start of the call."""
    pieces, calls = found.in_calls, found.trace.calls
    begun = (calls.start[pieces.what] // MS).tolist()
    return sorted(zip((pieces.start // MS).tolist(), (pieces.end // MS).tolist(), begun, strict=True))


class TestPieces:
    def test_before_within_and_after_a_call(self) -> None:
        found = cut(made([(0, 10), (33, 40)], [met(12, 30)], end=40))
        assert in_calls(found) == [(12, 30, 12)]
        assert by_host(found) == [(10, 12, LAUNCH), (30, 33, LAUNCH)]
        assert found.busy.tolist() == [[17 * MS, 0, 0]]

    def test_what_is_hidden_costs_nothing(self) -> None:
        found = cut(made([(0, 30)], [met(5, 25)], end=30))
        assert in_calls(found) == []
        assert by_host(found) == []

    def test_the_part_of_a_call_that_shows(self) -> None:
        found = cut(made([(0, 10), (25, 30)], [met(4, 25)], end=30))
        assert in_calls(found) == [(10, 25, 4)]
        assert by_host(found) == []

    def test_one_call_after_the_other(self) -> None:
        found = cut(made([(0, 5), (30, 32)], [met(5, 12), met(15, 29)], end=32))
        assert in_calls(found) == [(5, 12, 5), (15, 29, 15)]
        assert by_host(found) == [(12, 15, LAUNCH), (29, 30, LAUNCH)]

    def test_of_two_at_once_the_one_that_ends_last(self) -> None:
        """When that began, the other was still going on: so it did not wait for the other, but for its host."""
        found = cut(made([(0, 5), (30, 32)], [met(7, 24), met(12, 30)], end=32))
        assert in_calls(found) == [(12, 30, 12)]
        assert by_host(found) == [(5, 12, LAUNCH)]

    def test_what_is_sent_holds_up_nobody(self) -> None:
        found = cut(made([(0, 5), (30, 32)], [met(6, 29, Call.SEND)], end=32))
        assert in_calls(found) == []
        assert by_host(found) == [(5, 30, LAUNCH)]

    def test_a_call_that_goes_on_is_not_what_was_waited_for(self) -> None:
        found = cut(made([(0, 5), (20, 40)], [met(5, 12), met(6, 35)], end=40))
        assert in_calls(found) == [(5, 12, 5)]
        assert by_host(found) == [(12, 20, LAUNCH)]

    def test_the_end_of_a_step_is_a_pause_as_well(self) -> None:
        found = cut(made([(0, 5)], [met(8, 20)], end=3))
        assert int(found.end[0]) == 20 * MS
        assert in_calls(found) == [(8, 20, 8)]
        assert by_host(found) == [(5, 8, LAUNCH)]


class TestHost:
    def test_garbage_within_a_pause(self) -> None:
        found = cut(made([(0, 10), (25, 30)], end=30, garbage=[(12, 18)]))
        assert by_host(found) == [(10, 12, LAUNCH), (12, 18, Host.GARBAGE), (18, 25, LAUNCH)]

    def test_what_lies_over_a_call_is_the_calls(self) -> None:
        found = cut(made([(0, 10), (30, 31)], [met(15, 28)], end=31, garbage=[(12, 20)]))
        assert in_calls(found) == [(15, 28, 15)]
        assert by_host(found) == [(10, 12, LAUNCH), (12, 15, Host.GARBAGE), (28, 30, LAUNCH)]

    def test_ranges_in_one_another_count_once(self) -> None:
        ranges = HostRanges(
            np.array([11, 14]) * MS, np.array([20, 16]) * MS, np.array([Host.LOADER, Host.GARBAGE], dtype=np.int8)
        )
        found = cut(dataclasses.replace(made([(0, 10), (25, 30)], end=30), ranges=ranges))
        assert by_host(found) == [(10, 11, LAUNCH), (11, 20, Host.LOADER), (20, 25, LAUNCH)]

    def test_beside_computing_it_costs_nothing(self) -> None:
        assert by_host(cut(made([(0, 30)], end=30, garbage=[(3, 20)]))) == []


class TestPostedAhead:
    """Two receives are posted before F0; F1 needs the one that ends first, F2 the other."""

    def given(self, *, labelled: bool) -> RankTrace:
        calls = [met(1, 20, Call.RECV), met(2, 28, Call.RECV)]
        one = made([(0, 10), (30, 40), (45, 50)], calls, end=50)
        ranges = [Did("RECV_F", 0, 1, 1, 1), Did("RECV_F", 0, 2, 2, 2)]
        done = [Did("F", 0, 0, 0, 10), Did("F", 0, 1, 30, 40), Did("F", 0, 2, 45, 50)]
        both = sorted([(did, False) for did in ranges] + [(did, True) for did in done], key=lambda row: row[0].start)
        labels = Labels(
            np.array([did.start for did, _ in both]) * MS,
            np.array([did.end for did, _ in both]) * MS,
            np.array([on_device for _, on_device in both]),
            ("pp",) * len(both),
            tuple(did.kind for did, _ in both),
            *(np.array(column, dtype=np.int32) for column in ([0] * len(both), [did.stage for did, _ in both])),
            np.array([did.micro_batch for did, _ in both], dtype=np.int32),
            np.arange(len(both)),
        )
        return dataclasses.replace(one, labels=labels) if labelled else one

    def test_with_labels_a_computation_waits_for_its_own(self) -> None:
        found = cut(self.given(labelled=True))
        assert in_calls(found) == [(10, 20, 1)]
        assert by_host(found) == [(20, 30, LAUNCH), (40, 45, LAUNCH)]

    def test_without_for_whatever_ended_last(self) -> None:
        found = cut(self.given(labelled=False))
        assert in_calls(found) == [(10, 28, 2)]


def stepped(one: RankTrace, marks: Sequence[tuple[int, int]], works: Sequence[int], calls: Sequence[int]) -> RankTrace:
    """The same with several steps: the host's marks, and the step of each kernel and call."""
    times = np.array(marks) * MS
    return dataclasses.replace(
        one,
        steps=Steps(np.arange(len(marks)) + 4, times[:, 0], times[:, 1]),
        works=dataclasses.replace(one.works, step=np.array(works, dtype=np.int32)),
        calls=dataclasses.replace(one.calls, step=np.array(calls, dtype=np.int32)),
    )


class TestWindows:
    def test_on_a_device_steps_follow_each_other(self) -> None:
        """The host is ahead: its marks are not where the device is."""
        one = made([(3, 10), (12, 20), (26, 33)], [met(20, 24), met(33, 38)], end=0)
        found = cut(stepped(one, [(0, 6), (6, 9)], [0, 0, 1], [0, 1]))
        assert (found.start // MS).tolist() == [0, 24]
        assert (found.end // MS).tolist() == [24, 38]
        assert by_host(found) == [(0, 3, LAUNCH), (10, 12, LAUNCH), (24, 26, LAUNCH)]
        assert found.by_host.step[np.argsort(found.by_host.start)].tolist() == [0, 0, 1]
        assert (found.busy[:, Work.GEMM] // MS).tolist() == [15, 7]

    def test_on_a_processor_they_are_the_hosts(self) -> None:
        one = dataclasses.replace(made([(3, 10), (22, 26)], end=0), device="cpu")
        found = cut(stepped(one, [(0, 14), (20, 30)], [0, 1], []))
        assert (found.start // MS).tolist() == [0, 20]
        assert (found.end // MS).tolist() == [14, 30]
        assert by_host(found) == [(0, 3, LAUNCH), (10, 14, LAUNCH), (20, 22, LAUNCH), (26, 30, LAUNCH)]

    def test_what_is_sent_late_does_not_lengthen_a_step(self) -> None:
        one = made([(0, 10)], [met(10, 50, Call.SEND)], end=10)
        assert int(cut(stepped(one, [(0, 10)], [0], [0])).end[0]) == 10 * MS

    def test_what_belongs_to_no_step_is_not_counted(self) -> None:
        one = made([(0, 10), (12, 15)], end=20)
        found = cut(stepped(one, [(0, 20)], [0, UNKNOWN], []))
        assert (found.busy[0, Work.GEMM] // MS, int(found.end[0]) // MS) == (10, 10)


def by_chance(seed: int) -> RankTrace:
    """Two steps of kernels on several streams, of all kinds, and calls beside them and between."""
    random = np.random.default_rng(seed)
    works: list[tuple[int, int]] = []
    now, first = 5, 0
    for i in range(60):
        if i == 30:
            now = max(end for _, end in works) + int(random.integers(1, 20))
            first = len(works)
        start = now + int(random.choice([0, 0, 3, 20]))
        works.append((start, start + int(random.integers(1, 12))))
        now = max(now, start + int(random.integers(0, 10)))
    calls = []
    for _ in range(40):
        start = int(random.integers(0, now))
        kind = Call(int(random.choice([Call.ALL_REDUCE, Call.RECV, Call.SEND])))
        calls.append(met(start, start + int(random.integers(1, 30)), kind))
    calls.sort()
    works.sort()
    middle = works[first][0]
    one = made(works, calls, end=0, garbage=sorted((s, s + 4) for s in random.integers(0, now, 6).tolist()))
    kinds = random.integers(0, len(Work), len(works)).astype(np.int8)
    one = dataclasses.replace(one, works=dataclasses.replace(one.works, kind=kinds))
    where = [int(call.end >= middle) for call in calls]
    return stepped(one, [(0, middle), (middle, now)], [int(i >= first) for i in range(len(works))], where)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_and_computing_are_the_step(seed: int) -> None:
    one = by_chance(seed)
    found = cut(one)
    starts, ends = found.start // MS, found.end // MS
    busy = np.zeros(int(ends[-1]), dtype=bool)
    for begun, ended in zip(one.works.start // MS, one.works.end // MS, strict=True):
        busy[begun:ended] = True
    times_paused = np.zeros(len(busy), dtype=int)
    for pieces in (found.in_calls, found.by_host):
        for begun, ended in zip(pieces.start // MS, pieces.end // MS, strict=True):
            times_paused[begun:ended] += 1
    whole = slice(int(starts[0]), int(ends[-1]))
    np.testing.assert_array_equal(times_paused[whole], ~busy[whole])
    for step in range(2):
        inside = slice(int(starts[step]), int(ends[step]))
        assert found.busy[step].sum() // MS == np.count_nonzero(busy[inside])
        pieces = sum(int((p.end - p.start)[p.step == step].sum()) for p in (found.in_calls, found.by_host))
        assert int(found.busy[step].sum()) + pieces == int(found.end[step] - found.start[step])
    pieces, calls = found.in_calls, one.calls
    assert np.all(pieces.start >= calls.start[pieces.what])
    assert np.all(pieces.end <= calls.end[pieces.what])
    assert Call.SEND not in calls.kind[pieces.what]
    assert len(found.trace.works.start) == 0


def test_overlapping_kernels_count_once_and_for_the_first() -> None:
    one = made([(0, 10), (4, 16), (6, 9)], end=20)
    kinds = np.array([Work.GEMM, Work.MEMORY, Work.ATTENTION], dtype=np.int8)
    found = cut(dataclasses.replace(one, works=dataclasses.replace(one.works, kind=kinds)))
    assert (found.busy[0] // MS).tolist() == [10, 0, 6]


def test_a_rank_that_did_nothing() -> None:
    found = cut(made([], end=10))
    assert found.busy.sum() == 0
    assert by_host(found) == [(0, 10, LAUNCH)]
