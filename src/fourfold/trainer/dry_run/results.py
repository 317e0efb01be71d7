"""What a dry run finds of one rank. Plain data, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fourfold.layout import Coordinates
from fourfold.planner.rank_flops import RankFlops
from fourfold.planner.traffic import Traffic


class Held(StrEnum):
    """What a rank holds memory for."""

    MASTER = "master weights"  # fp32, sharded over dp x cp
    OPTIMIZER = "optimizer"  # moments, sharded like these
    GATHERED = "gathered weights"  # as the products read them
    SUMS = "gradient sums"  # of whole stages, before they are reduced
    SHARDS = "gradient shards"  # after it
    ACTIVATIONS = "activations"  # made in one action, and still there in a later one: kept for backward
    MESSAGES = "messages"  # posted receives until they are used, and outputs until their send is posted
    INPUTS = "inputs"  # tokens, labels, positions of the step's micro-batches, and counters
    TRANSIENTS = "transients"  # made and gone within one action


@dataclass(frozen=True, slots=True)
class Peak:
    """The first moment at which most is held.

    Attributes:
        bytes: in all.
        action: during which, as in "3B7"; or what the rank does beside its schedule, as in "STEP".
        held: what it consists of.
    """

    bytes: int
    action: str
    held: Mapping[Held, int]


@dataclass(frozen=True, slots=True)
class GroupTraffic(Traffic):
    """What is sent, with whom.

    Attributes:
        ranks: of the group; of messages the rank itself and the one it talks to.
        link: "node" if these are in one node, "network" if not, and "none" of a group of one.
    """

    ranks: tuple[int, ...]
    link: str


@dataclass(frozen=True, slots=True)
class DryRank:
    """One rank's step.

    Attributes:
        rank: global.
        at: its coordinates.
        stages: its virtual stages by global index.
        parameters: that it computes with: gathered over dp x cp, cut over TP.
        most: bytes of each kind at that kind's own peak; of activations as in ``kept``.
        peak: of all together.
        kept: when most is kept for backward, at the end of an action. Within one, more may be there for a moment: of a
            backward in halves, what the first one frees and what it makes for the second.
        traffic: in the order of first occurrence.
        flops: of the step.
        seconds: that the dry run took.
    """

    rank: int
    at: Coordinates
    stages: tuple[int, ...]
    parameters: int
    most: Mapping[Held, int]
    peak: Peak
    kept: Peak
    traffic: tuple[GroupTraffic, ...]
    flops: RankFlops
    seconds: float


@dataclass(frozen=True, slots=True)
class Beside:
    """One quantity.

    Attributes:
        what: its name.
        unit: "parameters", "bytes", "calls" or "FLOPs".
        found: by the dry run.
        planned: by the planner.
        tolerance: relative difference that is known and explained.
    """

    what: str
    unit: str
    found: int
    planned: int
    tolerance: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the tolerance."""
        return abs(self.found - self.planned) <= self.tolerance * max(abs(self.planned), abs(self.found))
