"""The first step of two runs that order does not explain, as those see it who look for patterns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from fourfold.debugger.numerics.alignment import Disagreement, Pair
from fourfold.debugger.numerics.comparison import Finding
from fourfold.debugger.numerics.records import Kind
from fourfold.debugger.numerics.stepping import Limits, Step
from fourfold.layout import Grid, join_ranks

SAME_FACTOR = 0.02  # relative difference of two factors that are taken for one
_MOST = 4  # names that are written out


@dataclass(frozen=True)
class Situation:
    """A step of two runs, whole tensors beside each other.

    Attributes:
        step: what all ranks have recorded.
        names: of the two runs.
        pairs: tensors that both have, in the order of execution.
        limits: what order explains.
        replicas: ranks of the first and of the second run that should hold the same and do not.
        vocab_size: rows of the embedding and the head from here on are padding; None: not known.
    """

    step: Step
    names: tuple[str, str]
    pairs: Sequence[Pair]
    limits: Limits
    replicas: tuple[Sequence[Disagreement], Sequence[Disagreement]]
    vocab_size: int | None

    @cached_property
    def wrong(self) -> list[Pair]:
        """What order does not explain."""
        return [each for each in self.pairs if self.limits.exceeded(each)]

    def of(self, kind: Kind) -> list[Pair]:
        """All of one kind."""
        return [each for each in self.pairs if each.kind is kind]

    def wrong_of(self, kind: Kind) -> list[Pair]:
        """Those that order does not explain."""
        return [each for each in self.wrong if each.kind is kind]

    def named(self, kind: Kind, name: str) -> Pair | None:
        """One tensor."""
        return next((each for each in self.pairs if each.kind is kind and each.name == name), None)

    @property
    def grids(self) -> tuple[Grid, Grid]:
        """The layouts."""
        return self.step.a[0].grid, self.step.b[0].grid

    def far(self, together: Pair) -> Tensor:
        """bool [r], rows that differ by more than order explains."""
        limit = self.limits.of(together.kind, together.name, together.a.dtype)
        return together.differs & (together.error > limit**2 * together.square)

    def place(self, together: Pair, name: str) -> Tensor:
        """int64 [r]: of every row the micro-batch, or a coordinate of the rank that has it, in the first run."""
        if name == "micro-batch":
            return together.a.micro_batch
        grid = self.grids[0]
        return torch.tensor([getattr(grid.coordinates(rank), name) for rank in range(grid.size)])[together.a.rank]

    def ratio(self, scalar: str) -> float:
        """Of the first run's loss or norm to the second's; nan if one is not known."""
        x, y = self.step.a[0].scalars.get(scalar, math.nan), self.step.b[0].scalars.get(scalar, math.nan)
        return x / y if y else math.nan

    def rank_text(self, which: int, ranks: Sequence[int]) -> str:
        """Ranks of one run, with the coordinates in which they differ."""
        places = [self.grids[which].coordinates(rank) for rank in ranks]
        apart = [name for name in ("tp", "cp", "pp", "dp") if len({getattr(place, name) for place in places}) > 1]
        where = ", ".join(f"{name} {join_ranks({getattr(place, name) for place in places}, 4)}" for name in apart)
        return f"ranks {join_ranks(ranks, 4)}" + (f" ({where})" if where else "")


Search = Callable[[Situation], Iterator[Finding]]


def names_text(pairs: Sequence[Pair]) -> str:
    """Names in short."""
    names = [each.name for each in pairs]
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")


def number_text(factor: float) -> str:
    """A factor for a person: 4, 1/4, 1.00006."""
    if abs(factor - 1) < 0.01:
        return f"{factor:.7g}"
    return f"{factor:.4g}" if factor >= 1 or factor <= 0 else f"1/{1 / factor:.4g}"


def sizes_text(here: Situation, factor: float) -> str:
    """The sizes of the layouts that a factor, or its inverse, could be."""
    sizes: dict[str, int] = {}
    different = here.grids[0] != here.grids[1]
    for which, records in enumerate((here.step.a, here.step.b)[: 1 + different]):
        grid = records[0].grid
        micro_batches = {seen.micro_batch for record in records for seen in record.seen if seen.micro_batch >= 0}
        of_run = {"dp": grid.dp, "cp": grid.cp, "tp": grid.tp, "micro-batches": len(micro_batches)}
        of_run = {what: size for what, size in of_run.items() if size > 1}
        for count in range(1, 4):
            for chosen in combinations(of_run, count):
                what = " x ".join(chosen) + (f" of {here.names[which]}" if different else "")
                sizes[what] = math.prod(of_run[part] for part in chosen)
    inverse = 1 / factor if factor > 0 else math.inf
    close = [
        what for what, size in sizes.items() if any(abs(x - size) <= SAME_FACTOR * size for x in (factor, inverse))
    ]
    shortest = min((what.count(" x ") for what in close), default=0)
    return f" ({' or '.join(what for what in close if what.count(' x ') == shortest)})" if close else ""
