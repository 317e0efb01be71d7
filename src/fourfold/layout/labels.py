"""The names under which schedule actions and collectives appear in a profiler trace, and how to read them back.

A label is ``ff:DIMENSION:KIND:key=value:...``, for example ``ff:tp:all_gather:group=12:stage=3:mb=7:seq=41``. The
trainer writes them through PyTorch's ``record_function``; simulator and debugger read them. ``docs/formats.md`` has the
grammar.
"""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "ff"
DIMENSIONS = ("tp", "cp", "pp", "dp", "fsdp", "world")


class Label(NamedTuple):
    """What a labelled range of a trace is.

    Attributes:
        dimension: tp, cp, pp, dp, fsdp (dp x cp) or world. Schedule actions are pp, and GATHER, REDUCE and FREE fsdp.
        kind: a schedule action (F, B, SEND_F, GATHER ...) or a collective (all_gather, reduce_scatter, all_reduce ...).
        group: the smallest global rank of the group, which with the dimension names it.
        stage: virtual stage, -1 outside of one.
        micro_batch: -1 outside of one.
        sequence: counts the ranges of this group on this rank, from 0; members of a group agree on it, but for pp.
    """

    dimension: str
    kind: str
    group: int
    stage: int
    micro_batch: int
    sequence: int

    def __str__(self) -> str:
        return (
            f"{PREFIX}:{self.dimension}:{self.kind}:group={self.group}:stage={self.stage}"
            f":mb={self.micro_batch}:seq={self.sequence}"
        )


def parse_label(text: str) -> Label | None:
    """The label that a range's name holds, or None if the range is not one of ours. Unknown keys are passed over."""
    prefix, _, rest = text.partition(":")
    parts = rest.split(":")
    if prefix != PREFIX or len(parts) < 2 or parts[0] not in DIMENSIONS or not parts[1]:
        return None
    values = {key: value for key, _, value in (part.partition("=") for part in parts[2:])}
    try:
        return Label(parts[0], parts[1], *(int(values[key]) for key in ("group", "stage", "mb", "seq")))
    except (KeyError, ValueError):
        return None
