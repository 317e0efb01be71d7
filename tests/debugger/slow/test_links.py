"""Slow links, in meetings whose times are made up: each takes a base time, times what its links are slowed by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import pytest

from fourfold.debugger.reading.trace import UNKNOWN, Call
from fourfold.debugger.slow.links import SlowLink, find_slow_links
from fourfold.debugger.slow.meetings import Key, Meetings
from fourfold.layout import Grid

GRID = Grid(tp=2, pp=2, dp=4)
STEPS = 2
STEP_SECONDS = 0.1
US = 1_000


class Made(NamedTuple):
    """Meetings of one group."""

    key: Key
    kind: Call
    elements: int
    itemsize: int
    took: tuple[float, ...]
    """Microseconds of each."""
    absent: int = 0
    """Members without a trace."""


def meetings(made: Iterable[Made], *, guessed: bool = False) -> Meetings:
    """All of them, every member with a row in each."""
    made = [*made]
    keys = sorted({one.key for one in made})
    rows = []
    number = 0
    for one in made:
        for took in one.took:
            for member in one.key[1][one.absent :]:
                kind = one.kind
                if kind is Call.SEND:
                    kind = Call.SEND if member == one.key[1][0] else Call.RECV
                rows.append((member, number, keys.index(one.key), kind, one.elements, one.itemsize, round(took * US)))
            number += 1
    rows.sort(key=lambda row: row[0])
    names = ("rank", "number", "key", "kind", "elements", "itemsize", "transfer")
    told = dict(zip(names, np.array(rows, dtype=np.int64).T, strict=True))
    rest = {f.name: np.zeros(len(rows), dtype=np.int64) for f in dataclasses.fields(Meetings)}
    return Meetings(**(rest | told | {"guessed": np.full(len(rows), guessed), "keys": tuple(keys), "alone": 0}))


def job(slowed: Callable[[Key], float] = lambda key: 1.0, *, jitter: float = 0.02, elements: int = 4096) -> list[Made]:
    """Every TP group has 40 collectives, every FSDP group 8, and every channel 10 messages; 50, 400 and 30 us each."""
    random = np.random.default_rng(0)

    def times(key: Key, number: int, base: float) -> tuple[float, ...]:
        return tuple((base * slowed(key) * (1 + jitter * random.standard_normal(number))).tolist())

    out = []
    for group in GRID.groups("tp"):
        key = "tp", group
        out.append(Made(key, Call.ALL_GATHER, elements, 2, times(key, 40, 50.0)))
    for group in GRID.groups("cp", "dp"):
        key = "fsdp", group
        out.append(Made(key, Call.REDUCE_SCATTER, elements, 4, times(key, 8, 400.0)))
    for low, high in GRID.groups("pp"):
        for pair in ((low, high), (high, low)):
            key = "pp", pair
            out.append(Made(key, Call.SEND, elements, 2, times(key, 10, 30.0)))
    return out


def found(made: Iterable[Made], *, step_seconds: float = STEP_SECONDS) -> list[SlowLink]:
    links = find_slow_links(meetings(made), GRID, num_steps=STEPS, step_seconds=step_seconds)
    return [*links]


def total(key: Key, made: Iterable[Made]) -> float:
    """Microseconds of all meetings of a group."""
    return sum(sum(one.took) for one in made if one.key == key)


def test_nothing_is_slow() -> None:
    assert found(job()) == []
    assert found(job(jitter=0.0)) == []


@pytest.mark.parametrize("factor", [1.3, 2.0, 5.0])
def test_the_link_of_a_tp_group(factor: float) -> None:
    made = job(lambda key: factor if key == ("tp", (4, 5)) else 1.0)
    (link,) = found(made)
    assert (link.ranks, link.dimension, link.groups) == ((4, 5), "tp", (("tp", (4, 5)),))
    assert link.factor == pytest.approx(factor, rel=0.03)
    more = total(("tp", (4, 5)), made) - total(("tp", (0, 1)), made)
    assert link.excess == pytest.approx(more / STEPS / 1e6, rel=0.03)


def test_messages_of_both_directions_are_one_link() -> None:
    slow = {("pp", (1, 3)), ("pp", (3, 1))}
    made = job(lambda key: 3.0 if key in slow else 1.0, jitter=0.0)
    (link,) = found(made)
    assert (link.ranks, link.dimension) == ((1, 3), "pp")
    assert link.factor == pytest.approx(3.0)
    assert link.excess == pytest.approx(2 * 10 * 60e-6 / STEPS)


def test_what_all_slow_groups_have_in_common_is_a_network_card() -> None:
    made = job(lambda key: 2.0 if 6 in key[1] else 1.0)
    (link,) = found(made)
    assert link.ranks == (6,)
    names = {dimension for dimension, _ in link.groups}
    assert names == {"tp", "fsdp", "pp"}
    assert link.excess == pytest.approx((40 * 50 + 8 * 400 + 2 * 10 * 30) / STEPS / 1e6, rel=0.05)


def test_two_links_that_share_nothing_are_two() -> None:
    slow = {("tp", (0, 1)): 3.0, ("tp", (14, 15)): 2.0}
    first, second = found(job(lambda key: slow.get(key, 1.0)))
    assert (first.ranks, second.ranks) == ((0, 1), (14, 15))
    assert first.excess > second.excess


def test_a_group_that_carries_more_is_not_slow() -> None:
    """Half of the TP groups also have collectives of twice the size, which take twice as long."""
    made = job(jitter=0.0)
    made += [Made(("tp", group), Call.ALL_GATHER, 8192, 2, (100.0,) * 40) for group in GRID.groups("tp")[:4]]
    made.append(Made(("tp", (0, 1)), Call.ALL_GATHER, 4096, 4, (100.0,) * 40))
    assert found(made) == []
    made.append(Made(("tp", (8, 9)), Call.ALL_GATHER, 8192, 2, (100.0,) * 40))
    made.append(Made(("tp", (10, 11)), Call.ALL_GATHER, 8192, 2, (150.0,) * 40))
    (link,) = found(made)
    assert link.ranks == (10, 11)


def test_of_one_group_alone_nothing_is_known() -> None:
    assert found([*job(), Made(("tp", (0, 1)), Call.ALL_TO_ALL, 4096, 2, (5_000.0,) * 10)]) == []


def test_of_two_groups_one_may_be_slow() -> None:
    """Where each stage has sizes of its own, only the FSDP groups of its TP ranks are alike."""
    random = np.random.default_rng(1)

    def two(factor: float, jitter: float) -> list[Made]:
        times = [400 * (factor if i else 1.0) * (1 + jitter * random.standard_normal(30)) for i in range(2)]
        return [Made(("fsdp", group), Call.REDUCE_SCATTER, 10_000, 4, tuple(took.tolist()))
                for group, took in zip(GRID.groups("dp")[:2], times, strict=True)]  # fmt: skip

    for factor in (1.3, 2.0):
        (link,) = found([*job(), *two(factor, 0.02)])
        assert link.ranks == GRID.groups("dp")[1]
        assert link.factor == pytest.approx(factor, rel=0.02)
        assert link.excess == pytest.approx(30 * 400e-6 * (factor - 1) / STEPS, rel=0.05)
    assert found([*job(), *two(1.0, 0.02)]) == []
    # If each varies by half, two differ by so much by chance.
    assert sum(bool(found([*job(), *two(1.0, 0.5)])) for _ in range(50)) == 0


def test_without_sizes_only_groups_of_one_stage_are_alike() -> None:
    """All of stage 1 takes twice as long: it may carry twice as much."""

    def longer(key: Key) -> float:
        return 2.0 if key[0] != "pp" and GRID.coordinates(key[1][0]).pp == 1 else 1.0

    assert found(job(longer, elements=UNKNOWN)) == []
    slow = found(job(lambda key: longer(key) * (1.5 if key == ("tp", (2, 3)) else 1.0), elements=UNKNOWN))
    assert [link.ranks for link in slow] == [(2, 3)]
    assert slow[0].factor == pytest.approx(1.5, rel=0.03)


def test_of_groups_that_are_guessed_nothing_is_known() -> None:
    """Who came last to a meeting that may be none?"""
    made = meetings(job(lambda key: 2.0 if key == ("tp", (4, 5)) else 1.0), guessed=True)
    assert find_slow_links(made, GRID, num_steps=STEPS, step_seconds=STEP_SECONDS) == ()


def test_where_somebody_has_no_trace_nothing_is_known() -> None:
    made = [one._replace(absent=1) if one.key == ("tp", (4, 5)) else one for one in job()]
    made = [one._replace(took=(500.0,) * 40) if one.absent else one for one in made]
    assert found(made) == []


def test_what_costs_nothing_is_not_slow() -> None:
    made = job(lambda key: 1.3 if key in (("pp", (0, 2)), ("pp", (2, 0))) else 1.0, jitter=0.0)
    # 10 messages there and back that take 9 us more in 2 steps: 90 us a step.
    assert [link.ranks for link in found(made, step_seconds=0.05)] == [(0, 2)]
    assert found(made, step_seconds=1.0) == []


def test_what_varies_as_much_is_not_slow() -> None:
    def by_chance(key: Key) -> float:
        return 1 + 0.1 * float(np.random.default_rng([*key[1], len(key[0])]).standard_normal())

    assert found(job(by_chance)) == []


def test_messages_whose_direction_is_unknown() -> None:
    made = [one._replace(kind=Call.MESSAGE) if one.kind is Call.SEND else one
            for one in job(lambda key: 2.0 if key == ("pp", (12, 14)) else 1.0)]  # fmt: skip
    assert [link.ranks for link in found(made)] == [(12, 14)]
