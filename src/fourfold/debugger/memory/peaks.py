"""What one device's history says: its peak and what was alive then, what grows from step to step, what was refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.memory.history import BEFORE, History, Purpose, Shortage
from fourfold.debugger.reading.trace import UNKNOWN

_LEAST_STEPS = 3  # without which nothing is called a leak
_EVEN = 0.5  # the smallest growth of a step over the largest, of a leak
_EXPLAINED = 0.5  # of the growth that a leak's blocks must make up
_LEAST_GROWTH = 1 << 16  # bytes per step below which nothing is called a leak
_KEPT = 40  # holders of each kind that are kept
_POINTS = 400  # of a curve


@dataclass(frozen=True)
class Holder:
    """Blocks with something in common.

    Attributes:
        what: a place in the program, or what the rank was at.
        bytes, blocks: of all of them.
        micro_batches: of how many different ones they are.
        since: number of the oldest step that a block is from; UNKNOWN if outside of all steps.
    """

    what: str
    bytes: int
    blocks: int
    micro_batches: int
    since: int


@dataclass(frozen=True)
class Moment:
    """What a device holds at a time.

    Attributes:
        bytes: in blocks that are alive.
        waiting: the part of it that the program has given back, but another stream still used.
        reserved: what the allocator has taken from the device; UNKNOWN.
        step: number, UNKNOWN outside of all.
        seconds: since the step began; since the first event outside of one.
        doing: what the rank was at; empty if unknown.
        by_place, by_doing: what the blocks are of, the most bytes first; what is beyond some dozens is left out.
    """

    bytes: int
    waiting: int
    reserved: int
    step: int
    seconds: float
    doing: str
    by_place: tuple[Holder, ...]
    by_doing: tuple[Holder, ...]


@dataclass(frozen=True)
class Growth:
    """What is alive at the end of every step.

    Attributes:
        steps: numbers, each of which has events.
        bytes: at the end of each.
        leaks: bytes per step, if each leaves as many blocks of the same places as the one before; else 0.
        holders: of a leak, these places; bytes are those of a step.
    """

    steps: tuple[int, ...]
    bytes: tuple[int, ...]
    leaks: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True)
class DeviceMemory:
    """One device of one rank.

    Attributes:
        rank, device, source, is_whole: as in the history.
        peak: the moment at which most was alive.
        most_reserved: bytes; UNKNOWN.
        growth: from step to step.
        shortage: the last request that was not met, and what was held then.
        seconds, curve: bytes that are alive over time since the first event, thinned out; maxima are kept.
        notes: what is wrong with the file.
    """

    rank: int
    device: str
    source: str
    is_whole: bool
    peak: Moment
    most_reserved: int
    growth: Growth
    shortage: tuple[Shortage, Moment] | None
    seconds: NDArray[np.float64]
    curve: NDArray[np.int64]
    notes: tuple[str, ...]


def summarise(history: History, steps: tuple[int, int] | None = None) -> DeviceMemory:
    """All that is to be said of a history.

    Args:
        history: of one device.
        steps: first and last to look at; None: all, and what is outside of steps.

    Raises:
        ValueError: none of the steps is in it.
    """
    live = history.live()
    points = _points(history, steps)
    peak = int(points[np.argmax(live[points])])
    shortage = next((one for one in reversed(history.shortages) if one.event in points), None)
    seconds, curve = _curve(history, live, points)
    return DeviceMemory(
        rank=history.rank,
        device=history.device,
        source=history.source,
        is_whole=history.is_whole,
        peak=_moment(history, live, peak),
        most_reserved=int(history.reserved[points].max()) if len(history.reserved) else UNKNOWN,
        growth=_growth(history, live, steps),
        shortage=None if shortage is None else (shortage, _moment(history, live, shortage.event)),
        seconds=seconds,
        curve=curve,
        notes=history.notes,
    )


def _points(history: History, steps: tuple[int, int] | None) -> NDArray[np.intp]:
    """The moments to look at: point n is after event n - 1."""
    if steps is None:
        return np.arange(history.num_events + 1)
    inside = np.flatnonzero((steps[0] <= history.step) & (history.step <= steps[1]))
    if not len(inside):
        raise ValueError(f"{history.path}: nothing of steps {steps[0]} to {steps[1]} is in it")
    return np.arange(inside[0], inside[-1] + 2)


def _moment(history: History, live: NDArray[np.int64], point: int) -> Moment:
    last = max(point - 1, 0)  # the event after which it is
    step = int(history.step[last]) if history.num_events else UNKNOWN
    begins = dict(history.steps)
    since = begins.get(step, int(history.time[0]) if history.num_events else 0)
    rows = history.rows_at(point)
    return Moment(
        bytes=int(live[point]),
        waiting=int(history.waiting()[point]),
        reserved=int(history.reserved[point]) if len(history.reserved) else UNKNOWN,
        step=step,
        seconds=(int(history.time[last]) - since) / 1e9 if history.num_events else 0.0,
        doing=history.doings[history.doing[last]] if history.num_events else "",
        by_place=holders(history, rows, _place),
        by_doing=holders(history, rows, _doing),
    )


def _place(purpose: Purpose) -> str:
    return purpose.place


def _doing(purpose: Purpose) -> str:
    return BEFORE if purpose.place == BEFORE else purpose.doing or "outside of what is labelled"


def holders(
    history: History, rows: NDArray[np.intp], what: Callable[[Purpose], str], *, kept: int = _KEPT
) -> tuple[Holder, ...]:
    """Blocks grouped by what `what` makes of their purposes, the most bytes first."""
    blocks = history.blocks
    size, begin, purpose = blocks.size[rows], blocks.begin[rows], blocks.purpose[rows]
    made_in = np.where(begin >= 0, history.step[np.maximum(begin, 0)] if history.num_events else UNKNOWN, UNKNOWN)
    names: dict[str, int] = {}
    group = np.array([names.setdefault(what(one), len(names)) for one in history.purposes], dtype=np.int64)[purpose]
    total = np.zeros(len(names), dtype=np.int64)
    np.add.at(total, group, size)
    count = np.bincount(group, minlength=len(names))
    batches: dict[int, set[tuple[int, int]]] = defaultdict(set)
    oldest: dict[int, int] = {}
    for number, step, one in zip(group.tolist(), made_in.tolist(), purpose.tolist(), strict=True):
        micro_batch = history.purposes[one].micro_batch
        if micro_batch >= 0:
            batches[number].add((step, micro_batch))
        oldest[number] = min(oldest.get(number, step), step)
    some = [(text, number) for text, number in names.items() if count[number]]
    found = [Holder(t, int(total[n]), int(count[n]), len(batches[n]), oldest[n]) for t, n in some]
    return tuple(sorted(found, key=lambda one: (-one.bytes, one.what))[:kept])


def _growth(history: History, live: NDArray[np.int64], steps: tuple[int, int] | None) -> Growth:
    """Of steps that are over when the recording ends, or end with it."""
    numbers = [number for number, _ in history.steps if steps is None or steps[0] <= number <= steps[1]]
    ends = {number: np.flatnonzero(history.step == number) for number in numbers}
    last = {number: int(events[-1]) + 1 for number, events in ends.items() if len(events)}
    held = [int(live[point]) for point in last.values()]
    added = np.diff(held)
    grows = (
        len(held) >= _LEAST_STEPS
        and not history.shortages
        and bool(added.min() >= max(_LEAST_GROWTH, _EVEN * added.max()))
    )
    found = _leaking(history, last) if grows else ()
    leaks = sum(one.bytes for one in found)
    if leaks < max(_LEAST_GROWTH, _EXPLAINED * float(added.mean() if len(added) else 0.0)):
        return Growth(tuple(last), tuple(held), 0, ())
    return Growth(tuple(last), tuple(held), leaks, found[:_KEPT])


def _leaking(history: History, last: dict[int, int]) -> tuple[Holder, ...]:
    """Places from which every step leaves as many blocks, with those of one step.

    Not of the last step, which may leave what the next would free.
    """
    numbers, end = [*last], max(last.values())
    rows = history.rows_at(end)
    rows = rows[history.blocks.begin[rows] >= 0]
    made_in = history.step[history.blocks.begin[rows]]
    per_step = [
        {one.what: one for one in holders(history, rows[made_in == number], _place, kept=len(history.purposes))}
        for number in numbers[:-1]
    ]
    first, *others = per_step
    same = [one for what, one in first.items() if all(_count(found, what) == one.blocks for found in others)]
    return tuple(sorted(same, key=lambda one: (-one.bytes, one.what)))


def _count(found: dict[str, Holder], what: str) -> int:
    return found[what].blocks if what in found else 0


def _curve(
    history: History, live: NDArray[np.int64], points: NDArray[np.intp]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Bytes over time. Of neighbours that are thinned out the largest stays."""
    if not history.num_events:
        return np.zeros(1), live
    bins = np.array_split(points, min(len(points), _POINTS))
    chosen = np.array([part[np.argmax(live[part])] for part in bins])
    time = history.time[np.maximum(chosen - 1, 0)] - history.time[max(int(points[0]) - 1, 0)]
    return time / 1e9, live[chosen]
