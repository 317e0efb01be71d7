"""What a stuck rank says of itself, whatever it was read from, and the reports that our own watchdog writes.

A rank says what it waits for, and how many collectives and messages of each group it has started. Dumps of PyTorch's
flight recorder are put into the same form (`recordings.py`), so that one search serves them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

Way = Literal["", "send", "receive"]


class Entry(msgspec.Struct, frozen=True):
    """A collective or message that a rank has started, ``seconds`` before its report."""

    kind: str
    number: int
    stage: int
    micro_batch: int
    tensor: str
    seconds: float
    ended: bool


class Wait(Entry, frozen=True):
    """What a rank waits for, since ``seconds``. ``ranks``: first and last of the group, or source and destination."""

    dimension: str
    ranks: tuple[int, int]
    way: Way


class Line(msgspec.Struct, frozen=True):
    """A rank's last entries in one group, or in one direction between two ranks. ``ranks`` are those of Wait."""

    dimension: str
    ranks: tuple[int, int]
    way: Way
    started: int
    recent: tuple[Entry, ...]


class RankReport(msgspec.Struct, frozen=True):
    """What one rank writes when a step takes too long; docs/formats.md explains the keys."""

    rank: int
    host: str
    pid: int
    doing: str
    seconds: float
    where: str
    waits: tuple[Wait, ...]
    lines: tuple[Line, ...]
    actions: tuple[dict[str, Any], ...] = ()
    stacks: dict[str, tuple[str, ...]] = {}
    flight_recorder: tuple[dict[str, Any], ...] = ()

    @property
    def stack(self) -> tuple[str, tuple[str, ...]]:
        """What stands where: its main thread, or its last call, and the frames, outermost first; empty if unknown."""
        name = "MainThread" if "MainThread" in self.stacks else next(iter(self.stacks), "")
        return name, self.stacks.get(name, ())


def report_file(folder: Path, rank: int) -> Path:
    """Where a rank's report is within the folder of a hang."""
    return folder / f"rank-{rank:05d}.json"


def read_reports(folder: Path, num_ranks: int) -> dict[int, RankReport]:
    """The reports in a folder by rank. What is not there, or is damaged, is left out."""
    reports = {}
    for rank in range(num_ranks):
        try:
            reports[rank] = msgspec.json.decode(report_file(folder, rank).read_bytes(), type=RankReport)
        except (OSError, msgspec.DecodeError):
            continue
    return reports
