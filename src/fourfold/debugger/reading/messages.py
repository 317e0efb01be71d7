"""Messages between pipeline ranks, by the labels around them."""

from __future__ import annotations

from fourfold.debugger.reading.trace import UNKNOWN
from fourfold.layout import Grid, Label

_AWAY = {"SEND_F": 1, "SEND_B": -1, "RECV_F": -1, "RECV_B": 1, "WAIT_F": -1, "WAIT_B": 1}
"""How far the stage at the other end is."""


def is_message(label: Label) -> bool:
    """Whether a range is about a message: it is posted, or waited for."""
    return label.dimension == "pp" and label.kind in _AWAY


def peer(label: Label, grid: Grid | None, rank: int) -> int:
    """The global rank at the other end; UNKNOWN without the layout."""
    if grid is None or not 0 <= rank < grid.size or label.stage < 0:
        return UNKNOWN
    at = grid.coordinates(rank)
    return grid.rank(tp=at.tp, cp=at.cp, pp=(label.stage + _AWAY[label.kind]) % grid.pp, dp=at.dp)


def number(label: Label, step: int) -> int:
    """The same at both ends, of step, direction, sending stage and micro-batch; UNKNOWN if one of these is.

    The number in the label is none: each rank counts its own actions.
    """
    if min(label.stage, label.micro_batch, step) < 0:
        return UNKNOWN
    sender = label.stage if label.kind.startswith("SEND") else label.stage + _AWAY[label.kind]
    return (step << 40) | (label.kind.endswith("B") << 39) | (sender << 20) | label.micro_batch
