"""Brings tensors of two runs together row by row, however their ranks hold them.

Fingerprints of ranks that hold different columns of a row add up to the row's. Ranks that hold the same part of it are
replicas: one of them is taken, and that they agree is checked on the way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fourfold.debugger.numerics.fingerprints import Fingerprint
from fourfold.debugger.numerics.order import execution_order
from fourfold.debugger.numerics.records import PADDING, Kind, RankStep, Seen
from fourfold.layout import Grid

LOSS = "cross_entropy"  # the operation of whose result every CP rank has a part of a sum

Name = tuple[Kind, str]


@dataclass(frozen=True)
class Rows:
    """Rows of one tensor, of one rank or of all ranks of a run together; none is padding.

    Attributes:
        kind, name, dtype: of the tensor.
        numbers: int64 [r], ascending.
        fingerprint: of the rows.
        whole: bool [r]; where not, the row is a sum over ranks, of which there is a sketch only.
        rank, micro_batch: int64 [r], where a row comes from; of several ranks the lowest.
        values: fp64 [r, width] where every part was kept, else None.
    """

    kind: Kind
    name: str
    dtype: str
    numbers: Tensor
    fingerprint: Fingerprint
    whole: Tensor
    rank: Tensor
    micro_batch: Tensor
    values: Tensor | None

    def take(self, index: Tensor) -> Rows:
        """Some of the rows, by place or by mask."""
        return replace(
            self,
            numbers=self.numbers[index],
            fingerprint=Fingerprint(*(column[index] for column in self.fingerprint)),
            whole=self.whole[index],
            rank=self.rank[index],
            micro_batch=self.micro_batch[index],
            values=None if self.values is None else self.values[index],
        )

    def square(self) -> Tensor:
        """fp64 [r], the squares of the rows; of sums estimated from the sketches."""
        return torch.where(self.whole, self.fingerprint.square.double(), self.sketch().square().mean(1))

    def sketch(self) -> Tensor:
        """fp64 [r, K]"""
        return self.fingerprint.sketch.double()


@dataclass(frozen=True)
class Disagreement:
    """Ranks that hold the same rows of a tensor, but not the same numbers in them.

    error: |x - y| / |x|, of the rows that differ.
    """

    kind: Kind
    name: str
    ranks: tuple[int, ...]
    num_rows: int
    error: float


def rows_of(seen: Seen, rank: int) -> Rows:
    """One rank's part of a tensor, sorted and without padding."""
    kept = (seen.rows != PADDING).nonzero()[:, 0]
    rows = Rows(
        kind=seen.kind,
        name=seen.name,
        dtype=seen.dtype,
        numbers=seen.rows,
        fingerprint=seen.fingerprint,
        whole=torch.ones(len(seen.rows), dtype=torch.bool),
        rank=torch.full((len(seen.rows),), rank),
        micro_batch=torch.full((len(seen.rows),), seen.micro_batch),
        values=None if seen.values is None else seen.values.double(),
    )
    return rows.take(kept[seen.rows[kept].argsort(stable=True)])


def merge(records: Sequence[RankStep]) -> tuple[dict[Name, Rows], list[Disagreement]]:
    """All tensors of one step, each whole, in the order of execution; and replicas that disagree."""
    found: dict[Name, dict[tuple[int, int], list[Rows]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for seen in record.seen:
            found[seen.kind, seen.name][seen.first, seen.features].append(rows_of(seen, record.rank))
    wholes: dict[Name, Rows] = {}
    disagreements: list[Disagreement] = []
    for name in sorted(found, key=lambda name: execution_order(*name)):
        columns = [_column(parts, records[0].grid, disagreements) for _, parts in sorted(found[name].items())]
        wholes[name] = _beside_each_other(columns)
    return wholes, disagreements


def _column(parts: Sequence[Rows], grid: Grid, disagreements: list[Disagreement]) -> Rows:
    """All rows of one stretch of columns: replicas once, parts of sums added."""
    rows = _joined(parts)
    numbers, group = rows.numbers.unique_consecutive(return_inverse=True)
    if len(numbers) == len(rows.numbers):
        return rows
    if rows.name == LOSS and rows.kind is Kind.OUTPUT:
        # TP ranks are replicas, CP ranks have parts.
        _, group_of_context = torch.stack((group, rows.rank // grid.tp)).unique(dim=1, return_inverse=True)
        rows = rows.take(_checked(rows, group_of_context, disagreements))
        return _added(rows)
    if rows.kind is Kind.ARRIVING:
        # TP ranks that share a key head have each the part that comes from their own query heads.
        return _added(rows)
    return rows.take(_checked(rows, group, disagreements))


def _joined(parts: Sequence[Rows]) -> Rows:
    """Rows of several ranks, sorted by number; of each number by rank."""
    values = [part.values for part in parts if part.values is not None]
    rows = replace(
        parts[0],
        numbers=torch.cat([part.numbers for part in parts]),
        fingerprint=Fingerprint(*map(torch.cat, zip(*(part.fingerprint for part in parts), strict=True))),
        whole=torch.cat([part.whole for part in parts]),
        rank=torch.cat([part.rank for part in parts]),
        micro_batch=torch.cat([part.micro_batch for part in parts]),
        values=torch.cat(values) if len(values) == len(parts) else None,
    )
    return rows.take(rows.numbers.argsort(stable=True))


def _firsts(group: Tensor) -> Tensor:
    """int64 [groups], where each group's first member is; ``group`` int64 [r] has numbers from 0 without gap."""
    places = torch.arange(len(group))
    return places.new_full((int(group.max()) + 1,), len(group)).scatter_reduce_(0, group, places, "amin")


def _checked(rows: Rows, group: Tensor, disagreements: list[Disagreement]) -> Tensor:
    """The first of each group of replicas. Notes those that are not the same."""
    firsts = _firsts(group)
    others = (rows.fingerprint.checksum != rows.fingerprint.checksum[firsts[group]]).nonzero()[:, 0]
    if len(others):
        leaders = firsts[group[others]]
        apart = (rows.sketch()[others] - rows.sketch()[leaders]).square().mean(1).sum()
        ranks = torch.cat((rows.rank[others], rows.rank[leaders])).unique().tolist()
        error = float((apart / rows.square()[leaders].sum()).sqrt())
        num_rows = len(rows.numbers[others].unique())
        disagreements.append(Disagreement(rows.kind, rows.name, tuple(ranks), num_rows, error))
    return firsts


def _added(rows: Rows) -> Rows:
    """Rows of one number added; those that are all the same are one number's replicas."""
    _, group = rows.numbers.unique_consecutive(return_inverse=True)
    firsts = _firsts(group)
    differ = rows.fingerprint.checksum != rows.fingerprint.checksum[firsts[group]]
    summed = torch.zeros(len(firsts), dtype=torch.bool)
    summed[group[differ]] = True
    if rows.name == LOSS:  # equal parts are parts all the same
        summed |= group.bincount() > 1
    total = rows.fingerprint.sketch.new_zeros(len(firsts), rows.fingerprint.sketch.shape[1])
    total.index_add_(0, group, rows.fingerprint.sketch)
    taken = rows.take(firsts)
    checksum, square, sketch = taken.fingerprint
    return replace(
        taken,
        fingerprint=Fingerprint(checksum, square, torch.where(summed.unsqueeze(1), total, sketch)),
        whole=~summed,
        values=None if bool(summed.any()) else taken.values,
    )


def _beside_each_other(columns: Sequence[Rows]) -> Rows:
    """Columns of one tensor to whole rows; a row that some columns lack is left out."""
    if len(columns) == 1:
        return columns[0]
    numbers = columns[0].numbers
    for column in columns[1:]:
        numbers = numbers[torch.isin(numbers, column.numbers)]
    parts = [column.take(torch.searchsorted(column.numbers, numbers)) for column in columns]
    values = [part.values for part in parts if part.values is not None]
    columns_of = zip(*(part.fingerprint for part in parts), strict=True)
    return replace(
        parts[0],
        fingerprint=Fingerprint(*(torch.stack(column).sum(0) for column in columns_of)),
        whole=torch.stack([part.whole for part in parts]).all(0),
        values=torch.cat(values, dim=1) if len(values) == len(parts) else None,
    )


@dataclass(frozen=True)
class Pair:
    """One tensor of two runs, in the rows that both have.

    Attributes:
        a, b: those rows.
        differs: bool [r], whether they are not the same to the bit.
        error: fp64 [r], |a - b|^2, 0 where they are the same; an estimate unless ``exact``.
        square: fp64 [r], |b|^2.
        only_a, only_b: int64, numbers of rows that the other run has not.
        exact: whether the error is computed from values.
    """

    a: Rows
    b: Rows
    differs: Tensor
    error: Tensor
    square: Tensor
    only_a: Tensor
    only_b: Tensor
    exact: bool

    @property
    def kind(self) -> Kind:
        """What it is."""
        return self.a.kind

    @property
    def name(self) -> str:
        """Of the weight or operation."""
        return self.a.name

    @property
    def same(self) -> bool:
        """Whether what both have is the same to the bit, and no token is missing."""
        return not bool(self.differs.any()) and not self.missing

    @property
    def missing(self) -> bool:
        """Whether one of them lacks tokens of the other. (Of weights it may be padding of the vocabulary.)"""
        return self.kind in (Kind.OUTPUT, Kind.ARRIVING) and bool(len(self.only_a) or len(self.only_b))

    def relative(self, rows: Tensor | None = None) -> float:
        """|a - b| / |b| of all rows or of a mask; inf if b is zero and a is not, or one is not finite."""
        error, square = (self.error, self.square) if rows is None else (self.error[rows], self.square[rows])
        over, under = float(error.sum()), float(square.sum())
        if over == 0.0:
            return 0.0
        return math.sqrt(over / under) if under > 0.0 and math.isfinite(over) else math.inf

    def scale(self, rows: Tensor | None = None) -> tuple[float, float]:
        """(c, |a - c b| / |c b|), estimates, of the factor c that brings b closest to a; (0, inf) if there is none."""
        x, y = self.a.sketch(), self.b.sketch()
        if rows is not None:
            x, y = x[rows], y[rows]
        product, square = float((x * y).sum()), float(y.square().sum())
        if not (math.isfinite(product) and square > 0.0 and product):
            return 0.0, math.inf
        factor = product / square
        return factor, math.sqrt(float((x - factor * y).square().sum()) / square) / abs(factor)


def pair(a: Rows, b: Rows) -> Pair:
    """Aligns the rows of two tensors."""
    only_a, only_b = a.numbers[:0], b.numbers[:0]
    if not torch.equal(a.numbers, b.numbers):
        if a.name == LOSS:  # other micro-batches: what they have in common is the sum over all of them
            a, b = _total(a), _total(b)
        else:
            in_a, in_b = torch.isin(a.numbers, b.numbers), torch.isin(b.numbers, a.numbers)
            only_a, only_b = a.numbers[~in_a], b.numbers[~in_b]
            a, b = a.take(in_a), b.take(in_b)
    differs = torch.where(
        a.whole & b.whole,
        a.fingerprint.checksum != b.fingerprint.checksum,
        (a.fingerprint.sketch != b.fingerprint.sketch).any(1),
    )
    exact = a.values is not None and b.values is not None
    if a.values is not None and b.values is not None:
        error = (a.values - b.values).square().sum(1)
    else:
        error = (a.sketch() - b.sketch()).square().mean(1)
    error = torch.where(differs, error.nan_to_num(nan=math.inf), 0.0)
    return Pair(a, b, differs, error, b.square(), only_a, only_b, exact)


def _total(rows: Rows) -> Rows:
    checksum, square, sketch = (column.sum(0, keepdim=True) for column in rows.fingerprint)
    return replace(
        rows.take(torch.tensor([0])), fingerprint=Fingerprint(checksum, square, sketch), whole=torch.tensor([False])
    )


def pairs(a: dict[Name, Rows], b: dict[Name, Rows]) -> list[Pair]:
    """All tensors that both runs have, in the order of execution."""
    return [pair(rows, b[name]) for name, rows in a.items() if name in b]
