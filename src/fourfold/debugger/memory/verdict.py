"""What memory says of a job: who ran out of it, leaks, holds more than its peers, or cannot use what it has."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from fourfold.debugger.memory.peaks import DeviceMemory, Moment
from fourfold.layout import Grid
from fourfold.planner.search.words import many

_UNEVEN = 1.1  # a peak over that of peers
_UNEVEN_BYTES = 1 << 20
_UNUSED = 0.2  # of what is reserved at the peak
_UNUSED_BYTES = 1 << 30


class Trouble(StrEnum):
    """The answer, the worst first."""

    OUT_OF_MEMORY = "out of memory"
    LEAK = "leak"
    UNEVEN = "uneven"
    FRAGMENTED = "fragmented"
    NONE = "none"


@dataclass(frozen=True)
class Uneven:
    """A rank that holds more than the ranks that do the same.

    Attributes:
        rank: global.
        pp: pipeline rank of it and its peers.
        peak, usual: bytes; its own, and the lower median of its peers.
        what: the place where it holds most more than they; empty if that is spread.
        more: bytes that it holds more there.
    """

    rank: int
    pp: int
    peak: int
    usual: int
    what: str
    more: int


@dataclass(frozen=True)
class Memory:
    """The answer, and what it rests on.

    Attributes:
        path: where it was read from.
        grid: layout of the job; None: unknown, and nobody is compared.
        trouble: the worst that was found.
        worst: the device that it is about, index into `devices`.
        devices: every device of every rank, in order of ranks.
        uneven: who holds more than its peers, the most first.
        notes: what is to be known of the files, a sentence each.
    """

    path: Path
    grid: Grid | None
    trouble: Trouble
    worst: int
    devices: tuple[DeviceMemory, ...]
    uneven: tuple[Uneven, ...]
    notes: tuple[str, ...]


def judge(path: Path, devices: Sequence[DeviceMemory], grid: Grid | None, notes: Sequence[str] = ()) -> Memory:
    """What is wrong, if anything is.

    Args:
        path: where the devices were read from.
        devices: one at least, in order of ranks.
        grid: the layout, if it is known.
        notes: of reading.
    """
    uneven = _uneven(devices, grid)
    ranks = [device.rank for device in devices]
    short = [i for i, one in enumerate(devices) if one.shortage is not None]
    leaks = [i for i, one in enumerate(devices) if one.growth.leaks]
    loose = [i for i, one in enumerate(devices) if is_fragmented(one.peak)]
    most = max(range(len(devices)), key=lambda i: devices[i].peak.bytes)
    if short:
        trouble, worst = Trouble.OUT_OF_MEMORY, short[0]
    elif leaks:
        trouble, worst = Trouble.LEAK, max(leaks, key=lambda i: devices[i].growth.leaks)
    elif uneven:
        trouble, worst = Trouble.UNEVEN, ranks.index(uneven[0].rank)
    elif loose:
        trouble, worst = Trouble.FRAGMENTED, max(loose, key=lambda i: unused(devices[i].peak))
    else:
        trouble, worst = Trouble.NONE, most
    said = [*notes, *_notes(devices, grid)]
    return Memory(path, grid, trouble, worst, tuple(devices), uneven, tuple(said))


def unused(moment: Moment) -> int:
    """Bytes that the allocator has, and in which no block lies; 0 if unknown."""
    return max(moment.reserved - moment.bytes, 0)


def is_fragmented(moment: Moment) -> bool:
    """Whether much is reserved that holds nothing at the moment at which most is held."""
    return unused(moment) >= max(_UNUSED_BYTES, _UNUSED * moment.reserved)


def _uneven(devices: Sequence[DeviceMemory], grid: Grid | None) -> tuple[Uneven, ...]:
    """Ranks of a pipeline rank hold the same, whatever their documents: they have as many tokens."""
    if grid is None:
        return ()
    peers: dict[tuple[int, str], list[DeviceMemory]] = defaultdict(list)
    for one in devices:
        if one.rank < grid.size:
            peers[grid.coordinates(one.rank).pp, one.device.partition(":")[0]].append(one)
    out = []
    for (pp, _), alike in peers.items():
        for one in alike:
            others = [other for other in alike if other is not one]
            if not others:
                continue
            usual = sorted(other.peak.bytes for other in others)[(len(others) - 1) // 2]
            if one.peak.bytes >= max(_UNEVEN * usual, usual + _UNEVEN_BYTES):
                out.append(Uneven(one.rank, pp, one.peak.bytes, usual, *_more(one, others)))
    return tuple(sorted(out, key=lambda found: (found.usual - found.peak, found.rank)))


def _more(one: DeviceMemory, others: Sequence[DeviceMemory]) -> tuple[str, int]:
    """Where a rank holds most more than the median of others does, if that is a good part of all it holds more."""
    held = {holder.what: holder.bytes for holder in one.peak.by_place}
    theirs = [{holder.what: holder.bytes for holder in other.peak.by_place} for other in others]
    more = {what: size - float(np.median([held.get(what, 0) for held in theirs])) for what, size in held.items()}
    what = max(more, key=lambda name: more[name], default="")
    return (what, int(more[what])) if what and more[what] > 0 else ("", 0)


def _notes(devices: Sequence[DeviceMemory], grid: Grid | None) -> list[str]:
    notes = []
    alike: dict[str, list[str]] = defaultdict(list)
    for one in devices:
        for note in one.notes:
            alike[re.sub(r"[\d,]+", "0", note)].append(f"rank {one.rank}: {note}")
    for said in alike.values():
        more = f" (and the like of {many(len(said) - 1, 'other rank')})" if len(said) > 1 else ""
        notes.append(f"{said[0]}{more}")
    if any(not one.is_whole for one in devices):
        notes.append(
            "traces of CPUs count what was made while they were recorded: weights and optimizer state are not in them"
        )
    if grid is None and len({one.rank for one in devices}) > 1:
        notes.append("the layout is not known, and ranks are not compared; give it with --layout")
    return notes
