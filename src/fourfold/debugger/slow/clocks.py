"""How wrong the clocks of ranks are against each other, from the ends of what they did together.

Each pair of ranks that met says by how much their clocks differ: the median over their meetings. The differences that
agree best with all pairs are least squares on that graph (algorithms.md 3.8), solved by conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.reading.trace import MESSAGES
from fourfold.debugger.slow.idle import RankSteps
from fourfold.debugger.slow.meetings import Meetings


@dataclass(frozen=True)
class Clocks:
    """What to add to the times of each rank, so that those of all can be compared.

    Attributes:
        offset: ns, of each rank that was read, to the time of the first of its island.
        wrong: ns: how far each clock is ahead of that of the first of its island.
        residual: ns: so far apart the ends of one collective remain, in the median.
        island: which ranks can be compared: those that met, directly or through others, have one number.
    """

    offset: NDArray[np.int64]
    wrong: NDArray[np.int64]
    residual: float
    island: NDArray[np.int64]


def align(ranks: Sequence[RankSteps], meetings: Meetings) -> Clocks:
    """Aligns clocks by the ends of common collectives; by messages only where no collective connects ranks."""
    zero = min((steps.trace.origin for steps in ranks), default=0)
    shift = np.array([steps.trace.origin - zero for steps in ranks], dtype=np.int64)
    pairs = _pairs(ranks, meetings, shift)
    one, other, apart = (np.array(column) for column in zip(*pairs, strict=True)) if pairs else (np.empty(0, int),) * 3
    island = _islands(len(ranks), one, other)
    offset = _least_squares(len(ranks), one, other, apart.astype(np.float64))
    for number in np.unique(island):
        members = np.flatnonzero(island == number)
        offset[members] -= offset[members[0]]
    residual = float(np.median(np.abs(apart + offset[other] - offset[one]))) if len(one) else 0.0
    correction = np.rint(offset).astype(np.int64)
    return Clocks(correction + shift, -correction, residual, island)


def _pairs(ranks: Sequence[RankSteps], meetings: Meetings, shift: np.ndarray) -> list[tuple[int, int, float]]:
    """(a, b, median of the end at b - the end at a) of neighbours in each group; `shift`: added to a rank's times."""
    ends = meetings.end + shift[meetings.rank]
    order = np.lexsort((meetings.rank, meetings.number))
    a, b = order[:-1], order[1:]
    together = (meetings.number[a] == meetings.number[b]) & (meetings.key[a] >= 0)
    message = np.isin(meetings.kind[a], MESSAGES)
    out: list[tuple[int, int, float]] = []
    parent = list(range(len(ranks)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for messages in (False, True):
        rows = np.flatnonzero(together & (message == messages))
        pair = meetings.rank[a[rows]] * len(ranks) + meetings.rank[b[rows]]
        by_pair = np.argsort(pair, kind="stable")
        cuts = np.flatnonzero(np.diff(pair[by_pair])) + 1
        for chosen in np.split(rows[by_pair], cuts) if len(rows) else ():
            first, second = int(meetings.rank[a[chosen[0]]]), int(meetings.rank[b[chosen[0]]])
            if messages and root(first) == root(second):
                continue
            out.append((first, second, float(np.median(ends[b[chosen]] - ends[a[chosen]]))))
            parent[root(first)] = root(second)
    return out


def _islands(number: int, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The smallest index that each rank is connected to."""
    island = np.arange(number)
    while True:
        least = np.minimum(island[one], island[other])
        before = island.copy()
        np.minimum.at(island, one, least)
        np.minimum.at(island, other, least)
        island = island[island]
        if np.array_equal(before, island):
            return island


def _least_squares(number: int, one: np.ndarray, other: np.ndarray, apart: np.ndarray) -> np.ndarray:
    """Offsets x that minimise the sum over pairs of (apart + x[other] - x[one])^2."""
    x = np.zeros(number)

    def laplacian(v: np.ndarray) -> np.ndarray:
        out = np.zeros(number)
        d = v[one] - v[other]
        np.add.at(out, one, d)
        np.add.at(out, other, -d)
        return out

    right = np.zeros(number)
    np.add.at(right, one, apart)
    np.add.at(right, other, -apart)
    residue = right - laplacian(x)
    direction, size = residue.copy(), float(residue @ residue)
    for _ in range(4 * number):
        if size < 1.0:  # ns^2
            break
        along = laplacian(direction)
        slope = float(direction @ along)
        if slope <= 0:  # what is left is the rounding of huge numbers
            break
        step = size / slope
        x += step * direction
        residue -= step * along
        new = float(residue @ residue)
        direction, size = residue + new / size * direction, new
    return x
