"""Clocks that were set wrong, found again from when calls end; and least squares against numpy's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from fourfold.debugger.reading.trace import Call
from fourfold.debugger.slow.clocks import align
from fourfold.debugger.slow.idle import RankSteps, cut
from fourfold.debugger.slow.meetings import Key, Meetings
from fourfold.layout import Grid
from tests.debugger.hand import trace

Ends = tuple[Key, Call, dict[int, float]]
"""One meeting: by rank, when it ended by that rank's clock."""


def ranks(number: int, origins: Sequence[int] = ()) -> list[RankSteps]:
    """Ranks that do nothing."""
    grid = Grid(dp=number)
    made = [trace(rank, grid, end=1, works=[]) for rank in range(number)]
    return [cut(dataclasses.replace(one, origin=origins[rank] if origins else 0)) for rank, one in enumerate(made)]


def meetings(all_ends: Iterable[Ends]) -> Meetings:
    all_ends = [*all_ends]
    keys = sorted({key for key, _, _ in all_ends})
    rows = [
        (rank, number, keys.index(key), kind, round(end))
        for number, (key, kind, ends) in enumerate(all_ends)
        for rank, end in ends.items()
    ]
    rows.sort()
    rank, number_, key_, kind_, end_ = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    told = {"rank": rank, "number": number_, "key": key_, "kind": kind_, "end": end_, "call": np.arange(len(rows))}
    rest = {f.name: np.ones(len(rows), dtype=np.int64) for f in dataclasses.fields(Meetings)}
    return Meetings(**(rest | told | {"keys": tuple(keys), "alone": 0}))


def collectives(
    groups: Iterable[tuple[str, tuple[int, ...]]],
    ahead: np.ndarray,
    random: np.random.Generator,
    *,
    noise: float = 0.0,
    number: int = 9,
) -> list[Ends]:
    """Each group meets some times, in a second. Nanoseconds."""
    return [
        (key, Call.ALL_REDUCE, {rank: now + ahead[rank] + noise * random.standard_normal() for rank in key[1]})
        for key in groups
        for now in random.uniform(0, 1e9, number)
    ]


def groups_of(grid: Grid, *names: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, group) for name in names for group in grid.groups(name)]


@pytest.mark.parametrize("seed", range(4))
def test_offsets_are_found_again(seed: int) -> None:
    random = np.random.default_rng(seed)
    grid = Grid(tp=2, cp=2, pp=2, dp=2)
    ahead = random.integers(-60_000_000, 60_000_000, grid.size)
    everybody = ("world", tuple(range(16)))
    made = meetings(collectives([*groups_of(grid, "tp", "cp", "dp"), everybody], ahead, random))
    clocks = align(ranks(16), made)
    np.testing.assert_allclose(clocks.wrong, ahead - ahead[0], atol=1)
    np.testing.assert_allclose(clocks.offset, -clocks.wrong)
    assert clocks.island.tolist() == [0] * 16
    assert clocks.residual <= 1


def test_noise_averages_out() -> None:
    random = np.random.default_rng(5)
    grid = Grid(tp=4, dp=4)
    ahead = random.integers(-60_000_000, 60_000_000, grid.size)
    made = meetings(collectives(groups_of(grid, "tp", "dp"), ahead, random, noise=2_000.0, number=200))
    clocks = align(ranks(16), made)
    np.testing.assert_allclose(clocks.wrong, ahead - ahead[0], atol=800)
    assert 0 < clocks.residual < 1_000


def test_origins_count() -> None:
    """Two machines whose clocks count from different moments, and agree but for that."""
    origins = [5_000, 5_000, 905_000, 905_000]
    now = np.array([1e6, 2e6, 3e6])
    both = [
        (("world", (0, 1, 2, 3)), Call.ALL_REDUCE, {rank: time - origins[rank] for rank in range(4)}) for time in now
    ]
    clocks = align(ranks(4, origins), meetings(both))
    np.testing.assert_array_equal(clocks.wrong, 0)
    np.testing.assert_array_equal(clocks.offset, [0, 0, 900_000, 900_000])


def test_islands_are_not_compared() -> None:
    random = np.random.default_rng(0)
    ahead = np.array([0, 100, 5_000, 7_000, 40, 60])
    made = meetings(collectives([("tp", (0, 1)), ("tp", (2, 3)), ("tp", (1, 5))], ahead, random))
    clocks = align(ranks(6), made)
    assert clocks.island.tolist() == [0, 0, 2, 2, 4, 0]
    np.testing.assert_allclose(clocks.wrong, [0, 100, 0, 2_000, 0, 60], atol=1)


def test_a_chain_of_messages() -> None:
    """A pipeline without replicas: nothing but messages connects its ranks."""
    random = np.random.default_rng(1)
    ahead = random.integers(-10_000_000, 10_000_000, 9)
    made = [
        (("pp", (rank, rank + 1)), kind, {rank: now + ahead[rank], rank + 1: now + ahead[rank + 1]})
        for rank in range(8)
        for kind in (Call.RECV, Call.MESSAGE)
        for now in random.uniform(0, 1e9, 3)
    ]
    clocks = align(ranks(9), meetings(made))
    np.testing.assert_allclose(clocks.wrong, ahead - ahead[0], atol=1)
    assert clocks.island.tolist() == [0] * 9


def test_messages_count_only_where_no_collective_connects() -> None:
    """Ends of sends and receives differ by as much as a message takes: they are worth less than collectives."""
    random = np.random.default_rng(2)
    ahead = np.array([0, 30_000, -7_000, 900])
    both = collectives([("tp", (0, 1)), ("tp", (2, 3))], ahead, random)
    late = [(("pp", (0, 1)), Call.SEND, {0: 1e6, 1: 1e6 + 500_000 + 30_000})] * 5
    cross = [(("pp", (1, 2)), Call.SEND, {1: 2e6 + ahead[1], 2: 2e6 + ahead[2] + 40})]
    clocks = align(ranks(4), meetings([*both, *late, *cross]))
    np.testing.assert_allclose(clocks.wrong, [0, 30_000, -7_000 + 40, 900 + 40], atol=1)


def test_one_that_ends_late_by_accident_does_not_matter() -> None:
    random = np.random.default_rng(3)
    made = collectives([("dp", (0, 1))], np.array([0, 4_000]), random, number=9)
    made.append((("dp", (0, 1)), Call.ALL_REDUCE, {0: 5e8, 1: 9e8}))
    assert align(ranks(2), meetings(made)).wrong[1] == pytest.approx(4_000, abs=1)


@pytest.mark.parametrize("seed", range(6))
def test_least_squares_are_numpys(seed: int) -> None:
    """Pairs that contradict each other, in a graph of chance with some islands."""
    random = np.random.default_rng(seed)
    number = 24
    made, rows, apart, pairs = [], [], [], set()
    for _ in range(40):
        a, b = sorted(random.choice(number - 2, 2, replace=False).tolist())
        if (a, b) in pairs or (a < 6) != (b < 6):
            continue
        pairs.add((a, b))
        difference = float(random.integers(-1_000_000, 1_000_000))
        made.append((("dp", (a, b)), Call.ALL_REDUCE, {a: 1e9, b: 1e9 + difference}))
        row = np.zeros(number)
        row[b], row[a] = 1.0, -1.0
        rows.append(row)
        apart.append(difference)
    clocks = align(ranks(number), meetings(made))
    best, *_ = np.linalg.lstsq(np.array(rows), np.array(apart), rcond=None)  # ahead
    for island in np.unique(clocks.island).tolist():
        members = np.flatnonzero(clocks.island == island)
        np.testing.assert_allclose(clocks.wrong[members], best[members] - best[members[0]], atol=3)
    # Islands are what depth-first search finds.
    neighbours: dict[int, set[int]] = {rank: set() for rank in range(number)}
    for a, b in pairs:
        neighbours[a].add(b)
        neighbours[b].add(a)
    for rank in range(number):
        seen, left = {rank}, [rank]
        while left:
            for other in neighbours[left.pop()] - seen:
                seen.add(other)
                left.append(other)
        assert clocks.island[rank] == min(seen)


@pytest.mark.parametrize("number", [1, 3])
def test_without_meetings_all_clocks_are_taken_for_right(number: int) -> None:
    clocks = align(ranks(number), meetings([]))
    assert clocks.wrong.tolist() == [0] * number
    assert clocks.island.tolist() == [*range(number)]
    assert clocks.residual == 0.0


def test_a_thousand_ranks() -> None:
    random = np.random.default_rng(8)
    grid = Grid(tp=8, pp=16, dp=8)
    ahead = random.integers(-60_000_000, 60_000_000, grid.size)
    made = meetings(collectives(groups_of(grid, "tp", "dp", "pp"), ahead, random, number=2))
    clocks = align(ranks(grid.size), made)
    np.testing.assert_allclose(clocks.wrong, ahead - ahead[0], atol=2)
