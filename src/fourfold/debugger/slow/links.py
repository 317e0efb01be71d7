"""Links that take longer than others with the same to carry, though everybody is there.

What a collective or message takes once the last has come depends on what it carries and on the links between its
members. So each group is held against those that move as much along the same dimension.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.reading.trace import MESSAGES, UNKNOWN, Call
from fourfold.debugger.slow.columns import numbered
from fourfold.debugger.slow.known import spread
from fourfold.debugger.slow.meetings import Meetings
from fourfold.layout import Grid

_LONGER = 1.15  # times its peers: transfers vary more than computations
_SPREAD = 6.0  # times the spread of groups
_LEAST = 5e-4  # of the step: what costs less than this cannot be called slow
_CLOCK = 2_000  # ns: durations are no more exact
_ELEMENTS = 2  # place of their number in what describes a family


@dataclass(frozen=True)
class SlowLink:
    """A link.

    Attributes:
        ranks: what all slow groups have in common: the ends of the link, or the members of a group; one rank: its NIC.
        dimension: of the group that loses most.
        factor: how many times as long its calls take.
        excess: seconds per step more than its peers.
        groups: (dimension, ranks) of all groups that are slow.
    """

    ranks: tuple[int, ...]
    dimension: str
    factor: float
    excess: float
    groups: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class _Slow:
    dimension: str
    ranks: tuple[int, ...]
    factor: float
    excess: float


def find_slow_links(meetings: Meetings, grid: Grid, *, num_steps: int, step_seconds: float) -> tuple[SlowLink, ...]:
    """Links that are slower than their peers, those that cost most first."""
    found: dict[tuple[str, tuple[int, ...]], list[_Slow]] = defaultdict(list)
    for look, family in _families(meetings, grid).items():
        if len(family) == 2 and look[_ELEMENTS] < 0:
            continue  # one of the two may simply carry more
        for slow in _slow_in(family, num_steps):
            found[slow.dimension, slow.ranks].append(slow)
    merged = [
        _Slow(dimension, members, max(s.factor for s in slows), sum(s.excess for s in slows))
        for (dimension, members), slows in found.items()
    ]
    merged = [slow for slow in merged if slow.excess > _LEAST * step_seconds]
    merged.sort(key=lambda slow: (-slow.excess, len(slow.ranks)))
    out: list[SlowLink] = []
    while merged:
        first = merged.pop(0)
        common, joined = set(first.ranks), [first]
        for other in list(merged):
            if common & set(other.ranks):
                common &= set(other.ranks)
                joined.append(other)
                merged.remove(other)
        groups = tuple((slow.dimension, slow.ranks) for slow in joined)
        out.append(
            SlowLink(tuple(sorted(common)), first.dimension, first.factor, sum(s.excess for s in joined), groups)
        )
    return tuple(out)


def _families(
    meetings: Meetings, grid: Grid
) -> dict[tuple[int, ...], dict[tuple[str, tuple[int, ...]], NDArray[np.int64]]]:
    """Meetings that should take the same: by family, group -> ns of each."""
    out: dict[tuple[int, ...], dict[tuple[str, tuple[int, ...]], NDArray[np.int64]]] = defaultdict(dict)
    if not len(meetings.number):
        return out
    size = np.array([*(len(key[1]) for key in meetings.keys), 0])
    stage = np.array([*(_stage(key[1], grid) for key in meetings.keys), 0])
    names = sorted({key[0] for key in meetings.keys})
    dimension = np.array([*(names.index(key[0]) for key in meetings.keys), UNKNOWN])
    seen = np.bincount(meetings.number)
    _, first = np.unique(meetings.number, return_index=True)
    key = meetings.key[first]
    # Only where all have come to be seen is it known who came last.
    whole = (key >= 0) & (seen[meetings.number[first]] >= size[key])
    first = first[whole & ~meetings.guessed[first]]
    if not len(first):
        return out
    key = meetings.key[first]
    kind, elements = meetings.kind[first], meetings.elements[first]
    kind = np.where(np.isin(kind, MESSAGES), Call.MESSAGE, kind)
    # Unless it is known how much they carry, only groups of one pipeline rank carry the same.
    where = np.where(elements < 0, stage[key], -1)
    columns = dimension[key], kind, elements, meetings.itemsize[first], where, size[key], key
    found, which = numbered(*columns)
    order = np.argsort(which, kind="stable")
    cuts = np.cumsum(np.bincount(which))[:-1]
    looks = zip(*(column[found].tolist() for column in columns), strict=True)
    for look, rows in zip(looks, np.split(order, cuts), strict=True):
        name, members = meetings.keys[look[-1]]
        group = name, tuple(sorted(members))
        took = meetings.transfer[first[rows]]
        family = out[look[:-1]]
        family[group] = np.concatenate((family[group], took)) if group in family else took
    return out


def _stage(members: tuple[int, ...], grid: Grid) -> int:
    return grid.coordinates(members[0]).pp if members[0] < grid.size else -1


def _slow_in(groups: Mapping[tuple[str, tuple[int, ...]], NDArray[np.int64]], num_steps: int) -> list[_Slow]:
    if len(groups) < 2:
        return []
    each = np.array([float(np.median(took)) for took in groups.values()])
    usual = float(np.sort(each)[(len(each) - 1) // 2])
    chance = _SPREAD * spread(each)
    if len(each) == 2:  # the lower has nothing to be compared with but itself
        chance = _SPREAD * max(spread(took) / len(took) ** 0.5 for took in groups.values())
    out = []
    for ((dimension, members), took), median in zip(groups.items(), each.tolist(), strict=True):
        if usual > 0 and median > _LONGER * usual and median - usual > max(chance, _CLOCK):
            excess = float(took.sum() - usual * len(took)) / num_steps / 1e9
            out.append(_Slow(dimension, members, median / usual, excess))
    return out
