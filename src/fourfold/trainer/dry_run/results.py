"""What a dry run finds of one rank. Plain data, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fourfold.layout import Coordinates


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
class Traffic:
    """Collectives of one group, or messages, that are alike.

    Attributes:
        group: "tp", "cp", "dp", "fsdp" or "world"; "pp" for messages.
        kind: "all_gather", "reduce_scatter", "all_reduce"; "send" or "receive".
        dtype: of what travels.
        during: the kind of action, or what else the rank does: "F", "B", "GATHER", "SUM" ...
        count: per step.
        bytes: of all of them: of an all-gather the gathered tensor, of a reduce-scatter the one that is scattered.
        ranks: of the group; of messages the rank itself and all it talks to.
        link: "node" if these are in one node, else "network"; "self" of a group of one.
    """

    group: str
    kind: str
    dtype: str
    during: str
    count: int
    bytes: int
    ranks: tuple[int, ...]
    link: str


@dataclass(frozen=True, slots=True)
class Flops:
    """What the step computes on the rank: matrix products, and attention for the pairs that its mask leaves.

    ``again``: the part of both that backward makes a second time.
    """

    products: int
    attention: int
    again: int

    @property
    def total(self) -> int:
        """Both."""
        return self.products + self.attention


@dataclass(frozen=True, slots=True)
class DryRank:
    """One rank's step.

    Attributes:
        rank: global.
        at: its coordinates.
        stages: its virtual stages by global index.
        parameters: that it computes with: gathered over dp x cp, cut over TP.
        most: bytes of each kind at that kind's own peak.
        peak: of all together.
        kept: the most that is kept for backward, and when.
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
    traffic: tuple[Traffic, ...]
    flops: Flops
    seconds: float
