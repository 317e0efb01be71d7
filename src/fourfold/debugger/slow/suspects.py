"""Which ranks take longer than others that do the same, and how the search came to them, dimension by dimension.

Ranks of one pipeline rank do the same work on other data, so each is held against the others there; a stage with the
head in it is compared with nothing but itself on other replicas. Documents are the exception: they give attention more
or less to do. All ranks of a dp and cp index have the same documents, whatever their stage and TP rank, so what they
have in common is documents, and what one of them has beyond that is its own.

The search then goes as one would by hand (ISCA'25, 6.1): the slowest replica, in it the slowest stage against its
expected share, in that the slowest CP rank, and among those the TP rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fourfold.debugger.reading.trace import Work
from fourfold.debugger.slow.accounts import HOST, Accounts, Seconds
from fourfold.debugger.slow.known import mean, median, spread
from fourfold.layout import Grid

LEAST = 0.03
"""Of a rank's own time: less than this above its peers is nobody's fault. Jitter of 1 % per step stays below."""
LEAST_ON_PROCESSOR = 0.15
"""The same of ranks that compute on processors, which are interrupted."""
_ONE_STEP, _ONE_STEP_ON_PROCESSOR = 2, 4  # times as much for a single step, in which chance has more to say
_BEYOND = 3.0  # standard deviations above the largest that is expected of so many ranks
_OFTEN = 1 / 3  # of the steps must have an outlier
_MOSTLY = 0.7  # of the steps with an outlier: so often it must be the same rank, or it rotates
CLASSES = ("gemm", "attention", "memory", *HOST)


class Level(NamedTuple):
    """One step of the search."""

    dimension: str
    index: int
    """The slowest along this dimension, inside of what was chosen before."""
    excess: float
    """Seconds by which it takes longer than it should, per step."""
    share: float
    """Of what all indices exceed together."""
    gap: float
    """Seconds to the second."""


@dataclass(frozen=True)
class Suspects:
    """Excess of all ranks.

    Attributes:
        excess: [steps, ranks, `CLASSES`] seconds above what was expected; NaN where nothing is known.
        usual: [steps, ranks] seconds expected.
        documents: [steps, dp, cp] attention of these ranks, 1: as most have.
        per_rank: [ranks] seconds of excess per step.
        threshold: [ranks] seconds above which it counts.
        ranks: those above, most first.
        rotating: (step, rank) of outliers, if these are of different ranks.
        compared: whether ranks have peers at all.
    """

    grid: Grid
    excess: Seconds = field(repr=False)
    usual: Seconds = field(repr=False)
    documents: Seconds = field(repr=False)
    per_rank: Seconds = field(repr=False)
    threshold: Seconds = field(repr=False)
    ranks: tuple[int, ...]
    rotating: tuple[tuple[int, int], ...]
    compared: bool

    def by_class(self, rank: int) -> Seconds:
        """[`CLASSES`] seconds of a rank's excess per step."""
        return mean(self.excess[:, rank], axis=0)

    def levels(self, rank: int) -> tuple[Level, ...]:
        """How the search comes to a rank: dp, pp, cp, tp."""
        at, grid = self.grid.coordinates(rank), self.grid
        block = np.nan_to_num(np.maximum(self.per_rank, 0)).reshape(grid.dp, grid.pp, grid.cp, grid.tp)
        out = []
        for dimension in ("dp", "pp", "cp", "tp"):
            index = getattr(at, dimension)
            each = block.reshape(block.shape[0], -1).max(axis=1)
            others = np.delete(each, index)
            second = float(others.max()) if len(others) else 0.0
            total = float(each.sum())
            out.append(
                Level(dimension, index, float(each[index]), float(each[index]) / total if total else 0.0,
                      float(each[index]) - second)
            )  # fmt: skip
            block = block[index]
        return tuple(out)


def typical(values: Seconds, axes: tuple[int, ...]) -> Seconds:
    """The lower median along some axes, which stay as 1; NaN is passed over. Of two, the smaller: the other is slow."""
    kept = [axis for axis in range(values.ndim) if axis not in axes]
    moved = np.transpose(values, kept + list(axes)).reshape(*(values.shape[axis] for axis in kept), -1)
    ordered = np.sort(moved, axis=-1)  # NaN last
    known = np.count_nonzero(~np.isnan(ordered), axis=-1)
    place = np.maximum(known - 1, 0) // 2
    found = np.take_along_axis(ordered, place[..., None], axis=-1)[..., 0]
    return np.expand_dims(found, axes)


def _lanes(grid: Grid) -> int:
    return grid.dp * grid.cp * grid.tp


def find_suspects(accounts: Accounts, shares: tuple[float, ...] = ()) -> Suspects:
    """Compares all ranks.

    Args:
        accounts: of the steps.
        shares: expected share of the work of each pipeline rank, for ranks without peers; else they are not compared.
    """
    grid = accounts.grid
    expected, documents = _expected(accounts)
    measured = np.concatenate((accounts.work, accounts.host), axis=2)
    compared = _lanes(grid) > 1
    if not compared and len(shares) == grid.pp > 2:
        own = accounts.work.sum(axis=2) / np.array(shares)
        ratio = typical(own, (1,)) / own
        expected[:, :, : len(Work)] = accounts.work * ratio[:, :, None]
        expected[:, :, len(Work) :] = typical(accounts.host, (1,))
        compared = True
    excess = measured - expected
    usual = expected.sum(axis=2)
    total = excess.sum(axis=2)
    per_rank, ranks, threshold, rotating = _outliers(
        total,
        usual,
        accounts.steps,
        least=LEAST_ON_PROCESSOR if accounts.on_processor else LEAST,
        times=_ONE_STEP_ON_PROCESSOR if accounts.on_processor else _ONE_STEP,
    )
    return Suspects(
        grid, excess, usual, documents, per_rank, threshold, ranks if compared else (), rotating if compared else (),
        compared,
    )  # fmt: skip


def _expected(accounts: Accounts) -> tuple[Seconds, Seconds]:
    """Expected seconds [steps, ranks, `CLASSES`], and documents [steps, dp, cp]."""
    grid = accounts.grid
    peers = (1, 3, 4)  # of [steps, dp, pp, cp, tp]
    columns = [accounts.shaped(accounts.work[:, :, kind]) for kind in Work]
    columns += [accounts.shaped(accounts.host[:, :, kind]) for kind in range(len(HOST))]
    expected = [np.broadcast_to(typical(column, peers), column.shape) for column in columns]
    documented = Work.ATTENTION if accounts.attention_known else Work.GEMM
    attention = columns[documented]
    documents = np.ones((len(accounts.steps), grid.dp, 1, grid.cp, 1))
    if grid.dp * grid.cp > 1 and np.nansum(attention) > 0:
        with np.errstate(divide="ignore", invalid="ignore"):
            documents = attention / typical(attention, (1, 3))
            if grid.pp * grid.tp > 1:
                documents = typical(documents, (2, 4))
            elif accounts.attention_known:
                # Nobody else has these documents: then other work says how fast the rank is.
                speed = (columns[Work.GEMM] + columns[Work.MEMORY]) / (expected[Work.GEMM] + expected[Work.MEMORY])
                documents = documents / speed
            else:
                documents = np.ones_like(documents)
            documents = np.where(documents > 0, documents, 1.0)
            usual = typical(attention / documents, peers) * documents
        expected[documented] = np.broadcast_to(usual, attention.shape)
    flat = [column.reshape(len(accounts.steps), grid.size) for column in expected]
    return np.stack(flat, axis=2), documents[:, :, 0, :, 0]


def _outliers(
    total: Seconds, usual: Seconds, steps: tuple[int, ...], *, least: float, times: int
) -> tuple[Seconds, tuple[int, ...], Seconds, tuple[tuple[int, int], ...]]:
    """Excess of each rank, those that stand out, from where on they do, and outliers of changing ranks."""
    known = ~np.isnan(total).all(axis=0)
    per_rank = np.full(total.shape[1], np.nan)
    per_rank[known] = median(total[:, known], axis=0)
    own = median(usual, axis=0)
    threshold = np.maximum(least * own, _chance(per_rank))
    ranks = [int(r) for r in np.flatnonzero(known & (per_rank > np.nan_to_num(threshold, nan=np.inf)))]
    tops: list[tuple[int, int]] = []
    for i, number in enumerate(steps):
        row = total[i]
        limit = np.maximum(times * least * usual[i], _chance(row))
        over = np.where(np.isnan(row), -np.inf, row - limit)
        if over.size and over.max() > 0:
            tops.append((number, int(np.argmax(over))))
    if not ranks and len(tops) >= max(2, _OFTEN * len(steps)):
        counts = np.bincount([rank for _, rank in tops])
        often = int(np.argmax(counts))
        if counts[often] >= _MOSTLY * len(tops) and counts[often] >= 2:
            per_rank[often] = mean(total[:, often])
            ranks = [often]
        elif np.count_nonzero(counts) > 1:
            return per_rank, (), threshold, tuple(tops)
    return per_rank, tuple(sorted(ranks, key=lambda rank: -per_rank[rank])), threshold, ()


def _chance(values: Seconds) -> float:
    """Seconds above which a value is no chance: of n normal ones the largest is about sqrt(2 ln n) deviations up."""
    number = max(int(np.count_nonzero(~np.isnan(values))), 2)
    return (math.sqrt(2 * math.log(number)) + _BEYOND) * spread(values)
