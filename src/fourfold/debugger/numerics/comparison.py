"""What a comparison of two runs' numbers finds: plain numbers and words, which reports draw. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.layout import Coordinates

SEQUENCE_BITS = 32  # of a token's number, those below are its place in the sequence
SCALAR = "scalar"  # kind of a step's loss and gradient norm, beside those of `records.Kind`


def token_of(number: int) -> tuple[int, int]:
    """(sequence in the step's batch, place in it) of a token's number."""
    return number >> SEQUENCE_BITS, number & ((1 << SEQUENCE_BITS) - 1)


class Verdict(StrEnum):
    """What the difference of two runs is."""

    SAME = "same"  # to the bit
    ORDER = "order"  # of sums: as large as rounding makes it, and nowhere larger
    BUG = "bug"
    OTHER = "other run"  # the recipes are for other numbers
    UNKNOWN = "unknown"  # what was recorded does not tell


class Pattern(StrEnum):
    """A known way of being wrong."""

    REPLICAS = "replicas differ"
    FACTOR = "constant factor"
    LOCAL_COUNT = "divided by a local count"
    PADDING = "only padding"
    OPTIMIZER = "only after the optimizer"
    NORM = "only the gradient norm"
    DOCUMENTS = "only beyond a document boundary"
    POSITIONS = "positions"
    STALE = "values of another micro-batch"
    SKIPPED = "a term of the sum over micro-batches"
    KEY_GRADIENT = "gradients of keys and values"
    LOW_PRECISION = "a sum in low precision"
    START = "other weights at the start"
    DATA = "other tokens"
    SETTINGS = "other settings"
    ONE_PLACE = "only in one place"


@dataclass(frozen=True)
class Divergence:
    """A tensor of one step that is not the same in both runs; or a part of it, that of one rank.

    Attributes:
        step: of the run, from 1.
        kind: as in `records.Kind`, or SCALAR.
        name: of the weight, operation or scalar.
        dtype: in the run where it is coarser.
        rank: global, in the first run, that holds the first row that differs much; -1: unknown.
        place: its coordinates.
        micro_batch: that this row belongs to, within its data-parallel group; -1: none.
        row: number of this row: of a weight its row, of an operation the token's number; -1: none.
        num_rows, num_different: rows that both have, and those that are not the same.
        only_in: "first" or "second" if the other run lacks the tensor, or rows of it; else empty.
        error: |a - b| / |b|, 2-norms over all rows; inf if one is not finite or b is zero.
        exact: whether the error is computed from the values; else it is estimated from sketches.
        units: error in roundings of the dtype in which its sums are made.
        limit: so many units are taken for order.
    """

    step: int
    kind: str
    name: str
    dtype: str
    rank: int
    place: Coordinates | None
    micro_batch: int
    row: int
    num_rows: int
    num_different: int
    only_in: str
    error: float
    exact: bool
    units: float = 0.0
    limit: float = 0.0

    @property
    def explained(self) -> bool:
        """Whether order explains it."""
        return not self.only_in and (self.error == 0.0 or self.units <= self.limit)

    @property
    def token(self) -> tuple[int, int] | None:
        """(sequence in the step's batch, place in the sequence) of the row; None: it is of a weight, or padding."""
        if self.kind not in ("output", "arriving") or self.row < 0:
            return None
        return token_of(self.row)


@dataclass(frozen=True)
class Finding:
    """A known pattern that the differences have: a sentence, and the numbers that it rests on."""

    pattern: Pattern
    sentence: str
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class KindTally:
    """All tensors of one kind in one step: how many there are, how many are equal to the bit, and the worst."""

    kind: str
    tensors: int
    equal: int
    worst: str
    error: float
    units: float


@dataclass(frozen=True)
class StepNumbers:
    """One step of both runs. None: not known; kinds: empty where no tensors were recorded in both."""

    step: int
    losses: tuple[float | None, float | None]
    norms: tuple[float | None, float | None]
    kinds: tuple[KindTally, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The answer.

    Attributes:
        names: of the two runs, as the user gave them.
        layouts: of the two runs, as in "tp2 cp1 pp2 dp1"; None: not known.
        verdict: what the difference is.
        reason: a sentence on why it is this verdict.
        first: the first tensor that differs in the order of execution; None: none was recorded in both, or none does.
        beyond: the first that differs by more than order may; None: none does.
        findings: known patterns, the most telling first.
        steps: what both have, by step.
        weights: those at the end of both, which are compared exactly; None: one of them has none.
        notes: what else should be known, a sentence each.
        by_rank: whether the ranks of both hold the same parts, and each was compared with its like.
    """

    names: tuple[str, str]
    layouts: tuple[str | None, str | None]
    verdict: Verdict
    reason: str
    first: Divergence | None = None
    beyond: Divergence | None = None
    findings: tuple[Finding, ...] = ()
    steps: tuple[StepNumbers, ...] = ()
    weights: KindTally | None = None
    notes: tuple[str, ...] = ()
    by_rank: bool = False

    @property
    def same(self) -> bool:
        """Whether all that was compared is equal to the bit."""
        return self.verdict is Verdict.SAME
