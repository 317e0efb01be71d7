"""How work is laid over ranks. Pure integers and times; no torch."""

from fourfold.layout.actions import Action, Kind
from fourfold.layout.documents import (
    PackedTokens,
    Run,
    Segment,
    Shard,
    attention_pairs,
    describe,
    label_validity,
    pack,
    shards,
)
from fourfold.layout.doings import Doing
from fourfold.layout.grid import Coordinates, Grid, join_ranks
from fourfold.layout.labels import Label, parse_label
from fourfold.layout.partition import Costs, Stage, balanced, partition
from fourfold.layout.play import Timeline, compile_program, play
from fourfold.layout.schedule import KINDS, Schedule, generate
from fourfold.layout.validate import validate

__all__ = [
    "KINDS",
    "Action",
    "Coordinates",
    "Costs",
    "Doing",
    "Grid",
    "Kind",
    "Label",
    "PackedTokens",
    "Run",
    "Schedule",
    "Segment",
    "Shard",
    "Stage",
    "Timeline",
    "attention_pairs",
    "balanced",
    "compile_program",
    "describe",
    "generate",
    "join_ranks",
    "label_validity",
    "pack",
    "parse_label",
    "partition",
    "play",
    "shards",
    "validate",
]
