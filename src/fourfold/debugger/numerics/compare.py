"""Records of two runs beside each other: the same, another order of sums, or is one of them wrong?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

from fourfold.debugger.numerics import factors, patterns, places
from fourfold.debugger.numerics.alignment import Disagreement, Name, Pair, Rows, merge, pairs
from fourfold.debugger.numerics.comparison import (
    SCALAR,
    Comparison,
    Divergence,
    Finding,
    StepNumbers,
    Verdict,
)
from fourfold.debugger.numerics.judging import DRIFT, ROUNDING
from fourfold.debugger.numerics.records import Kind, RankStep, read_step, recorded_steps
from fourfold.debugger.numerics.situation import Situation
from fourfold.debugger.numerics.stepping import (
    LOSS,
    NORM,
    Differences,
    Limits,
    Step,
    alike,
    compute_dtype,
    name_by_name,
    rank_by_rank,
)
from fourfold.layout import Grid, join_ranks
from fourfold.layout.grid import DIMENSIONS

Source = Path | Sequence[RankStep]
_SEARCHES = (*places.SEARCHES, *patterns.SEARCHES, *factors.SEARCHES)
FIRST_AND_SECOND = ("the first run", "the second run")


def compare_records(
    a: Source,
    b: Source,
    *,
    names: tuple[str, str] = FIRST_AND_SECOND,
    compute: str | None = None,
    vocab_size: int | None = None,
    steps: tuple[int, int] | None = None,
    by_rank: bool | None = None,
) -> Comparison:
    """Two runs' records, whatever their layouts.

    The first step that differs is judged by its first tensor that does. What follows from it is allowed to grow.

    Args:
        a: a folder of records, or the records of any steps and all ranks.
        b: what it should be.
        names: what to call them.
        compute: dtype of computation, where it is coarser than that of the outputs of operations.
        vocab_size: rows of the embedding and the head from here on are padding; None: not known.
        steps: first and last to look at; default: all that both have.
        by_rank: whether ranks of one layout are compared with their likes, so that a tensor that one of them lacks is a
            difference; else whole tensors are. Default: if all ranks of both hold the same parts.

    Raises:
        ValueError: a file is damaged, ranks are missing, or no step is in both; or the layouts differ, and ranks are to
            be compared.
    """
    both = _Both(a, b, steps)
    numbers: list[StepNumbers] = []
    judge = _Judge(names, vocab_size, by_rank)
    grids: tuple[Grid, Grid] | None = None
    for number in both.common:
        ranks_a, ranks_b = both.read(number)
        grids = ranks_a[0].grid, ranks_b[0].grid
        if by_rank and grids[0] != grids[1]:
            raise ValueError(f"ranks of {layout_text(grids[0])} have no like among those of {layout_text(grids[1])}")
        coarsest = max((compute_dtype(ranks_a), compute_dtype(ranks_b), compute or "float64"), key=ROUNDING.__getitem__)
        numbers.append(judge.look(Step(ranks_a, ranks_b, coarsest)))
    assert grids is not None
    verdict, reason = judge.verdict()
    return Comparison(
        names=names,
        layouts=(layout_text(grids[0]), layout_text(grids[1])),
        verdict=verdict,
        reason=reason,
        first=judge.first,
        beyond=judge.beyond,
        findings=judge.findings,
        steps=tuple(numbers),
        notes=(*both.notes, *judge.notes),
        by_rank=judge.by_rank,
    )


class _Judge:
    """Looks at one step after the other. Remembers what differs first, and what differs first by more than order."""

    def __init__(self, names: tuple[str, str], vocab_size: int | None, by_rank: bool | None) -> None:
        self.first: Divergence | None = None
        self.beyond: Divergence | None = None
        self.findings: tuple[Finding, ...] = ()
        self.notes: list[str] = []
        self.by_rank = False
        self._wanted = by_rank
        self._names = names
        self._vocab_size = vocab_size
        self._drift: float | None = 0.0  # of the weights after the step before, |a - b| / |b|; None: not known
        self._before = 0  # number of the step before
        self._unjudged: list[int] = []
        self._replicas = False

    def look(self, step: Step) -> StepNumbers:
        """Judges a step."""
        self.by_rank = alike(step) if self._wanted is None else self._wanted
        whole = None if self.by_rank else _Whole(step)
        found = (
            rank_by_rank(step, complete=self._wanted is True)
            if whole is None
            else name_by_name(step, whole.pairs, whole.unmatched)
        )
        if step.number != self._before + 1:
            self._drift = None
        if self._drift is None and _begins_alike(step, found):
            self._drift = 0.0
        limits = step.limits(drift=DRIFT * (self._drift or 0.0))
        if found.found and not self._drift:
            limits = _limits_of_first(step, limits, found, by_rank=self.by_rank)
        found = found.judged(limits)
        if self.first is None:
            self.first = found.found[0] if found.found else None
            self._note(found)
        if self.beyond is None and not self._replicas and (found.found or (whole is not None and any(whole.replicas))):
            self._judge(step, found, limits, whole or _Whole(step))
        tallies = found.tallies()
        self._drift = next((tally.error for tally in tallies if tally.kind == Kind.WEIGHT), None)
        self._before = step.number
        losses, norms = ((step.a[0].scalars.get(name), step.b[0].scalars.get(name)) for name in (LOSS, NORM))
        return StepNumbers(step.number, losses, norms, tallies)

    def _judge(self, step: Step, found: Differences, limits: Limits, whole: _Whole) -> None:
        here = Situation(step, self._names, whole.pairs, limits, whole.replicas, self._vocab_size)
        beyond = next((each for each in found.found if not each.explained), None)
        if beyond is None and here.wrong:  # rows of the vocabulary that are zero in one of them
            name = (str(here.wrong[0].kind), here.wrong[0].name)
            beyond = next((each for each in found.found if (each.kind, each.name) == name), None)
        if beyond is None and not any(whole.replicas):
            return
        if self._drift is None and not any(whole.replicas):
            self._unjudged.append(step.number)
            return
        self.beyond, self._replicas = beyond, any(map(bool, whole.replicas))
        found_by = [finding for search in _SEARCHES for finding in search(here)]
        if not found_by:
            found_by = [finding for search in patterns.FALLBACKS for finding in search(here)]
        self.findings = tuple(found_by)

    def _note(self, found: Differences) -> None:
        if found.padding:
            self.notes.append(f"{found.padding} tensors differ in padding only, which nothing depends on.")
        for which, names in enumerate(found.unmatched):
            if names:
                more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
                note = f"Only {self._names[which]} has the {names[0][0]} of {names[0][1]}{more}."
                if note not in self.notes:
                    self.notes.append(note)

    def verdict(self) -> tuple[Verdict, str]:
        """What it is, and why."""
        if self.beyond is not None or self._replicas:
            return Verdict.BUG, ""
        if self._unjudged:
            steps = join_ranks(self._unjudged, 4)
            return (
                Verdict.UNKNOWN,
                f"in step {steps} the runs are further apart than order makes them in one step, and the weights with "
                "which it began are not known to be the same: record the step before, or step 1, and have it compared",
            )
        return (Verdict.SAME, "") if self.first is None else (Verdict.ORDER, "")


class _Whole:
    """Whole tensors of a step, brought together."""

    def __init__(self, step: Step) -> None:
        a, replicas_a = merge(step.a)
        b, replicas_b = merge(step.b)
        self.pairs: list[Pair] = pairs(a, b)
        self.replicas: tuple[list[Disagreement], list[Disagreement]] = (replicas_a, replicas_b)
        self.unmatched = (_names_only_in(a, b), _names_only_in(b, a))


def _names_only_in(a: dict[Name, Rows], b: dict[Name, Rows]) -> list[tuple[str, str]]:
    return [(str(kind), name) for kind, name in a if (kind, name) not in b]


def _begins_alike(step: Step, found: Differences) -> bool:
    """Whether the step began with the same weights: the embedding's results are its rows, and they are the same."""
    embedding = (Kind.OUTPUT, "tok_embeddings")
    recorded = all(any((s.kind, s.name) == embedding for r in side for s in r.seen) for side in (step.a, step.b))
    return recorded and not any((each.kind, each.name) == embedding for each in found.found)


def _limits_of_first(step: Step, limits: Limits, found: Differences, *, by_rank: bool) -> Limits:
    """The limits where all that goes into the first tensor that differs is known to be the same to the bit."""
    first = found.found[0]
    differing = {each.kind for each in found.found}
    all_known = by_rank and step.has(Kind.OUTPUT, Kind.ARRIVING)
    only_weights = step.has(Kind.GRADIENT) and first.kind in (SCALAR, Kind.WEIGHT) and Kind.GRADIENT not in differing
    return replace(limits, first=(first.kind, first.name)) if all_known or only_weights else limits


def layout_text(grid: Grid) -> str:
    """In short: tp2 cp1 pp2 dp1."""
    return " ".join(f"{name}{size}" for name, size in zip(DIMENSIONS, astuple(grid), strict=True))


class _Both:
    """The steps that two sources have in common."""

    def __init__(self, a: Source, b: Source, steps: tuple[int, int] | None) -> None:
        self._sources = (a, b)
        have = [self._steps(source) for source in self._sources]
        self.common = sorted(have[0] & have[1])
        if not self.common:
            texts = " and ".join(join_ranks(each, 4) or "none" for each in have)
            raise ValueError(f"no step was recorded in both runs; recorded: {texts}")
        if steps is not None:
            self.common = [step for step in self.common if steps[0] <= step <= steps[1]]
            if not self.common:
                raise ValueError(
                    f"steps {steps[0]}-{steps[1]}: none of them was recorded in both runs; recorded in both: "
                    f"{join_ranks(have[0] & have[1], 4)}"
                )
        self.notes = [
            f"Only the {which} run has records of step {join_ranks(only, 4)}."
            for which, only in (("first", have[0] - have[1]), ("second", have[1] - have[0]))
            if only and steps is None
        ]

    @staticmethod
    def _steps(source: Source) -> set[int]:
        return {*recorded_steps(source)} if isinstance(source, Path) else {record.step for record in source}

    def read(self, step: int) -> tuple[list[RankStep], list[RankStep]]:
        """All ranks of a step, of both."""
        a, b = (
            read_step(source, step) if isinstance(source, Path) else [r for r in source if r.step == step]
            for source in self._sources
        )
        return a, b
