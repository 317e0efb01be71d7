"""One step of two runs: which tensors differ, by how much, and how much of it order explains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fourfold.debugger.numerics.alignment import Pair, pair, rows_of
from fourfold.debugger.numerics.comparison import SCALAR, Divergence, KindTally
from fourfold.debugger.numerics.judging import ROUNDING, SUMS, limit_of_layouts, limit_of_one_sum, unit_of
from fourfold.debugger.numerics.order import execution_order, layer_of
from fourfold.debugger.numerics.records import Kind, RankStep, Seen

LOSS, NORM = "loss", "grad_norm"
_BEHIND = {NORM: Kind.GRADIENT, LOSS: Kind.WEIGHT}
"""Where scalars stand in the order of execution: nothing is computed from the loss as it is told."""
_KINDS = (*Kind, SCALAR)
VOCABULARY = ("tok_embeddings.weight", "output.weight")


@dataclass(frozen=True)
class Step:
    """All ranks of one step of both runs, and the dtype of computation."""

    a: Sequence[RankStep]
    b: Sequence[RankStep]
    compute: str

    @property
    def number(self) -> int:
        """From 1."""
        return self.a[0].step

    def has(self, *kinds: Kind) -> bool:
        """Whether both runs have recorded tensors of all these kinds."""
        return all({*kinds} <= {seen.kind for record in side for seen in record.seen} for side in (self.a, self.b))

    def limits(self, *, drift: float = 0.0) -> Limits:
        """What order may make."""
        layers, widths, micro_batches = {0}, {1}, set[int]()
        for record in (*self.a, *self.b):
            for seen in record.seen:
                layers.add(layer_of(seen.name) or 0)
                widths.add(seen.width)
                micro_batches.add(seen.micro_batch)
        peers = max(grid.size // grid.pp for grid in (self.a[0].grid, self.b[0].grid))
        terms = max(*widths, peers * len(micro_batches | {-1}))
        return Limits(self.compute, max(layers) + 1, terms, drift)


@dataclass(frozen=True)
class Limits:
    """How far apart tensors of a step may be that differ in order only.

    Attributes:
        compute: dtype of computation.
        num_layers: of the model.
        terms: of the longest sum.
        drift: relative error that comes from the weights with which the step began.
        first: kind and name of the first tensor that differs, where all that it is made of is known to be the same; it
            and its like are judged as one sum.
    """

    compute: str
    num_layers: int
    terms: int
    drift: float = 0.0
    first: tuple[str, str] | None = None

    def of(self, kind: str, name: str, dtype: str) -> float:
        """The largest |a - b| / |b|."""
        if self._is_one_sum(kind, name):
            if kind == SCALAR:
                return limit_of_one_sum(kind, name, SUMS, SUMS, terms=self.terms)
            return limit_of_one_sum(kind, name, dtype, self.compute, terms=self.terms)
        limit = limit_of_layouts(kind, name, self.compute, num_layers=self.num_layers, terms=self.terms)
        return max(limit, self.drift)

    def unit(self, kind: str, name: str, dtype: str) -> float:
        """In which an error is told."""
        if self._is_one_sum(kind, name) and kind not in (Kind.OUTPUT, Kind.ARRIVING):
            return ROUNDING[SUMS]
        return unit_of(kind, dtype, self.compute)

    def _is_one_sum(self, kind: str, name: str) -> bool:
        """Gradients do not go into each other, nor do weights."""
        if self.first is None:
            return False
        if self.first == (SCALAR, NORM):
            return kind == Kind.WEIGHT or (kind, name) == self.first
        return kind == self.first[0] and (name == self.first[1] or kind in (Kind.GRADIENT, Kind.WEIGHT))

    def judged(self, found: Divergence) -> Divergence:
        """A divergence with its error in units, and its limit."""
        what = (found.kind, found.name, found.dtype)
        unit = self.unit(*what)
        return replace(found, units=found.error / unit, limit=self.of(*what) / unit)

    def exceeded(self, together: Pair) -> bool:
        """Whether order does not explain how far two tensors are apart."""
        limit = self.of(together.kind, together.name, together.a.dtype)
        return together.relative() > limit or together.missing or appears_from_nothing(together)


def compute_dtype(records: Iterable[RankStep]) -> str:
    """That of the outputs of operations, of which the loss is always fp32; float32 where there are none."""
    found = {seen.dtype for record in records for seen in record.seen if seen.kind is Kind.OUTPUT} & ROUNDING.keys()
    return max(found, key=ROUNDING.__getitem__, default=SUMS)


def appears_from_nothing(together: Pair) -> bool:
    """Whether rows of the vocabulary that are zero in one run are not in the other: no order of sums makes that."""
    if together.name not in VOCABULARY:
        return False
    return bool((together.differs & ((together.a.square() == 0) != (together.square == 0))).any())


@dataclass(frozen=True)
class Differences:
    """What one step has.

    Attributes:
        found: all that differs, in the order of execution.
        tensors: how many were compared, by kind.
        unmatched: names that only one run has, with the kind.
        padding: how many tensors differ in padding only, which nothing depends on.
    """

    found: list[Divergence]
    tensors: Counter[str]
    unmatched: tuple[list[tuple[str, str]], list[tuple[str, str]]]
    padding: int = 0

    def judged(self, limits: Limits) -> Differences:
        """The same, with limits."""
        return replace(self, found=[limits.judged(found) for found in self.found])

    def tallies(self) -> tuple[KindTally, ...]:
        """By kind."""
        tallies = []
        for kind in _KINDS:
            differing = [each for each in self.found if each.kind == kind]
            if self.tensors[kind]:
                worst = max(differing, key=lambda each: (each.error, each.units), default=None)
                name, error, units = ("", 0.0, 0.0) if worst is None else (worst.name, worst.error, worst.units)
                equal = self.tensors[kind] - len(differing)
                tallies.append(KindTally(str(kind), self.tensors[kind], equal, name, error, units))
        return tuple(tallies)


def alike(step: Step) -> bool:
    """Whether the ranks of both runs hold the same parts of the same tensors."""
    if step.a[0].grid != step.b[0].grid:
        return False
    others = {record.rank: _entries(record) for record in step.b}
    for record in step.a:
        mine, theirs = _entries(record), others[record.rank]
        if mine.keys() != theirs.keys() or not all(torch.equal(mine[key].rows, theirs[key].rows) for key in mine):
            return False
    return True


def rank_by_rank(step: Step, *, complete: bool) -> Differences:
    """Of two runs of one layout: every rank's tensors beside each other.

    complete: a tensor that only one run has recorded, on whatever rank, is a difference.
    """
    found, tensors, padding = [*_scalars(step)], Counter[str](), 0
    names_a, names_b = (
        {(str(seen.kind), seen.name) for record in side for seen in record.seen} for side in (step.a, step.b)
    )
    common = names_a | names_b if complete else names_a & names_b
    others = {record.rank: record for record in step.b}
    for record in step.a:
        mine, theirs = _entries(record), _entries(others[record.rank])
        for key in {**mine, **theirs}:
            if (str(key[0]), key[1]) not in common:
                continue
            tensors[key[0]] += 1
            seen, other = mine.get(key), theirs.get(key)
            if seen is None or other is None:
                found.append(_missing(step, record.rank, seen, other))
            elif not _equal(seen, other):
                together = pair(rows_of(seen, record.rank), rows_of(other, record.rank))
                if together.same:
                    padding += 1
                else:
                    found.append(divergence(step, together))
    unmatched = sorted(names_a - names_b), sorted(names_b - names_a)
    return Differences(sorted(found, key=_order), tensors + _num_scalars(step), unmatched, padding)


def name_by_name(
    step: Step, together: Sequence[Pair], unmatched: tuple[list[tuple[str, str]], list[tuple[str, str]]]
) -> Differences:
    """Of two runs of any layouts: whole tensors beside each other, as `alignment.pairs` has brought them together."""
    found = [*_scalars(step), *(divergence(step, each) for each in together if not each.same)]
    tensors = Counter(str(each.kind) for each in together) + _num_scalars(step)
    return Differences(sorted(found, key=_order), tensors, unmatched)


_Key = tuple[Kind, str, int, int, int, int]


def _entries(record: RankStep) -> dict[_Key, Seen]:
    """By kind, name, micro-batch, columns, and how many of these there were before."""
    entries: dict[_Key, Seen] = {}
    before = Counter[tuple[Kind, str, int, int, int]]()
    for seen in record.seen:
        key = (seen.kind, seen.name, seen.micro_batch, seen.first, seen.features)
        entries[*key, before[key]] = seen
        before[key] += 1
    return entries


def _equal(a: Seen, b: Seen) -> bool:
    return torch.equal(a.rows, b.rows) and torch.equal(a.fingerprint.checksum, b.fingerprint.checksum)


def divergence(step: Step, together: Pair) -> Divergence:
    """A tensor that differs, located at a row that stands out, else at the first that differs."""
    row = rank = micro_batch = -1
    typical = together.relative()
    stands_out = together.differs & (together.error > typical**2 * together.square)
    for marked in (stands_out, together.differs):
        if bool(marked.any()):
            at = int(marked.long().argmax())
            row, rank, micro_batch = (int(x[at]) for x in (together.a.numbers, together.a.rank, together.a.micro_batch))
            break
    else:
        only = together.only_a if len(together.only_a) else together.only_b
        row = int(only[0]) if len(only) else -1
    return Divergence(
        step=step.number,
        kind=str(together.kind),
        name=together.name,
        dtype=max(together.a.dtype, together.b.dtype, key=lambda dtype: ROUNDING.get(dtype, 0.0)),
        rank=rank,
        place=step.a[0].grid.coordinates(rank) if rank >= 0 else None,
        micro_batch=micro_batch,
        row=row,
        num_rows=len(together.differs),
        num_different=int(together.differs.sum()),
        only_in="" if not together.missing else "first" if len(together.only_a) else "second",
        error=typical,
        exact=together.exact,
    )


def _missing(step: Step, rank: int, a: Seen | None, b: Seen | None) -> Divergence:
    """A tensor that one run has and the other has not."""
    seen = a or b
    assert seen is not None
    return Divergence(
        step=step.number,
        kind=str(seen.kind),
        name=seen.name,
        dtype=seen.dtype,
        rank=rank,
        place=step.a[0].grid.coordinates(rank),
        micro_batch=seen.micro_batch,
        row=int(seen.rows[0]) if len(seen.rows) else -1,
        num_rows=0,
        num_different=0,
        only_in="second" if a is None else "first",
        error=math.inf,
        exact=True,
    )


def relative_difference(a: float, b: float) -> float:
    """|a - b| / |b|; 0 if both are the same, NaN included; inf where it has no meaning."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / abs(b) if b and math.isfinite(a) and math.isfinite(b) else math.inf


def _num_scalars(step: Step) -> Counter[str]:
    return Counter({SCALAR: sum(name in step.a[0].scalars and name in step.b[0].scalars for name in _BEHIND)})


def _scalars(step: Step) -> Iterator[Divergence]:
    """Loss and gradient norm, which all ranks know."""
    for name in _BEHIND:
        x, y = step.a[0].scalars.get(name), step.b[0].scalars.get(name)
        if x is None or y is None or (error := relative_difference(x, y)) == 0.0:
            continue
        yield Divergence(
            step=step.number,
            kind=SCALAR,
            name=name,
            dtype="float64",
            rank=-1,
            place=None,
            micro_batch=-1,
            row=-1,
            num_rows=1,
            num_different=1,
            only_in="",
            error=error,
            exact=True,
        )


def _order(found: Divergence) -> tuple[float, ...]:
    """Of execution; then by data-parallel group, micro-batch and rank."""
    dp = found.place.dp if found.place is not None else -1
    if found.kind == SCALAR:
        return (_KINDS.index(_BEHIND[found.name]) + 0.5, 0, 0, 0, dp, found.micro_batch, found.rank)
    return (*execution_order(Kind(found.kind), found.name), dp, found.micro_batch, found.rank)
