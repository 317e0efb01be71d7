"""One rank's steps cut into computing, what it was idle for, and nothing else: as far as its own trace tells.

A device that computes needs no explanation. While it computes nothing, it waits for a communication, or for its host.
Which of the two is found backwards from the computation that ended the pause: whatever communication ended last before
it held it up, before that communication began the one before it did, and so on. What remains is the host's: a host that
comes late while its device waits for a message delays nothing until the message is there. How much of a communication
was waiting for others, other ranks' traces must tell; so pieces of pauses are kept, not sums.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.reading.trace import UNKNOWN, Call, Host, RankTrace, Times, Work

LAUNCH = len(Host)
"""Kind of a pause that nothing explains but its host, which launched late."""

_TOUCH = 1_000  # ns by which a computation may seem to begin before what it waits for has ended


@dataclass(frozen=True)
class Pieces:
    """Parts of pauses, in no order."""

    start: Times
    end: Times
    step: NDArray[np.int32]
    what: NDArray[np.int32]
    """Index of the call that was waited for; of a pause of the host its kind, `Host` or `LAUNCH`."""


@dataclass(frozen=True)
class RankSteps:
    """One rank, cut up. `trace` has lost its kernels: only its calls and labels are left."""

    trace: RankTrace
    start: Times
    """[steps]: on the device, the end of the step before; of the first, when anything begins."""
    end: Times
    busy: NDArray[np.int64]
    """[steps, `Work`] ns."""
    in_calls: Pieces = field(repr=False)
    by_host: Pieces = field(repr=False)

    def turned(self, moved: Times) -> Times:
        """Of each of `in_calls`, when waiting turns into the transfer, which comes last. `moved`: ns of it, by call."""
        pieces = self.in_calls
        return np.clip(self.trace.calls.end[pieces.what] - moved[pieces.what], pieces.start, pieces.end)


def cut(trace: RankTrace) -> RankSteps:
    """Cuts up the steps of one rank."""
    works, num_steps = trace.works, len(trace.steps.number)
    covered = np.maximum.accumulate(works.end) if len(works.end) else works.end
    before = np.concatenate(([np.iinfo(np.int64).min], covered[:-1])) if len(covered) else covered
    first = np.maximum(works.start, before)
    own = np.maximum(works.end - first, 0)
    busy = np.zeros((num_steps, len(Work)), dtype=np.int64)
    known = works.step != UNKNOWN
    np.add.at(busy, (works.step[known], works.kind[known]), own[known])
    start, end = _windows(trace)
    pauses = _Pauses(trace)
    for step in range(num_steps):
        inside = np.flatnonzero((works.step == step) & (own > 0))
        free = int(start[step])
        # A pause lies before each computation that begins after all before it have ended.
        begins, ends = works.start[inside], covered[inside]
        for begin, done in zip(begins.tolist(), ends.tolist(), strict=True):
            if begin > free:
                pauses.add(step, free, begin)
            free = max(free, done)
        if end[step] > free:
            pauses.add(step, free, int(end[step]))
    in_calls, by_host = pauses.pieces()
    return RankSteps(_light(trace), start, end, busy, in_calls, by_host)


def _windows(trace: RankTrace) -> tuple[Times, Times]:
    """When each step begins and ends on the device."""
    num_steps, works, calls = len(trace.steps.number), trace.works, trace.calls
    start, end = trace.steps.start.copy(), trace.steps.end.copy()
    holds_up = calls.kind != Call.SEND
    for step in range(num_steps):
        begins = [works.start[works.step == step], calls.start[(calls.step == step) & holds_up]]
        ends = [works.end[works.step == step], calls.end[(calls.step == step) & holds_up]]
        if any(len(times) for times in ends):
            end[step] = max(times.max() for times in ends if len(times))
            first = min(times.min() for times in begins if len(times))
            start[step] = min(first, start[step])
        if trace.device == "cpu":
            end[step] = max(end[step], trace.steps.end[step])
        if step:
            start[step] = max(end[step - 1], min(start[step], end[step])) if trace.device == "cpu" else end[step - 1]
        end[step] = max(end[step], start[step])
    return start, end


class _Pauses:
    """Explains pauses of one rank, one by one."""

    def __init__(self, trace: RankTrace) -> None:
        calls = trace.calls
        # What a rank sends holds up nobody but the receiver.
        eligible = np.flatnonzero(calls.kind != Call.SEND)
        self.order = eligible[np.argsort(calls.end[eligible], kind="stable")]
        self.needed = _needed(trace)[self.order].tolist()
        self.starts, self.ends = calls.start[self.order].tolist(), calls.end[self.order].tolist()
        self.ranges = trace.ranges
        self.rows: list[tuple[int, int, int, int]] = []  # start, end, step, call
        self.host_rows: list[tuple[int, int, int, int]] = []

    def add(self, step: int, free: int, begin: int) -> None:
        """A pause from `free` to `begin`, when something starts."""
        at = begin
        i = bisect_right(self.ends, begin + _TOUCH) - 1
        while at > free and i >= 0:
            end = self.ends[i]
            if end <= free:
                break
            if end > at + _TOUCH or self.needed[i] > begin + _TOUCH:
                i -= 1
                continue
            end = min(end, at)
            begun = max(self.starts[i], free)
            if begun < end:
                if at > end:
                    self._by_host(step, end, at)
                self.rows.append((begun, end, step, int(self.order[i])))
                at = begun
            i -= 1
        if at > free:
            self._by_host(step, free, at)

    def _by_host(self, step: int, start: int, end: int) -> None:
        """What garbage collection, loader or optimizer explain of a pause of the host, and the rest."""
        ranges = self.ranges
        beside = np.flatnonzero((ranges.start < end) & (ranges.end > start)) if len(ranges.start) else ()
        at = start
        for i in beside:
            begun, ended = max(int(ranges.start[i]), at), min(int(ranges.end[i]), end)
            if ended <= begun:
                continue
            if begun > at:
                self.host_rows.append((at, begun, step, LAUNCH))
            self.host_rows.append((begun, ended, step, int(ranges.kind[i])))
            at = ended
        if end > at:
            self.host_rows.append((at, end, step, LAUNCH))

    def pieces(self) -> tuple[Pieces, Pieces]:
        """In calls, and by the host."""
        return _pieces(self.rows), _pieces(self.host_rows)


def _needed(trace: RankTrace) -> Times:
    """Of each call, when the first computation begins that needs it, as far as labels tell; else 0.

    Receives are posted ahead: one that ends in a pause need not be what the pause was for.
    """
    calls, labels = trace.calls, trace.labels
    needed = np.zeros(len(calls.start), dtype=np.int64)
    begins: dict[tuple[bool, int, int], list[int]] = defaultdict(list)  # ascending, one per step
    posted: list[int] = []
    for i, kind in enumerate(labels.kind):
        where = int(labels.stage[i]), int(labels.micro_batch[i])
        if labels.on_device[i] and kind in ("F", "B", "I"):
            begins[kind == "F", *where].append(int(labels.start[i]))
        elif not labels.on_device[i] and kind in ("RECV_F", "RECV_B"):
            posted.append(i)
    if not begins or not posted:
        return needed
    starts, ends = labels.start[posted], labels.end[posted]
    for i in np.flatnonzero((calls.kind == Call.RECV) & (calls.launched >= 0)).tolist():
        at = int(np.searchsorted(starts, calls.launched[i], side="right")) - 1
        if at >= 0 and calls.launched[i] <= ends[at]:
            label = posted[at]
            key = labels.kind[label] == "RECV_F", int(labels.stage[label]), int(labels.micro_batch[label])
            needed[i] = next((begun for begun in begins[key] if begun > calls.start[i]), 0)
    return needed


def _pieces(rows: list[tuple[int, int, int, int]]) -> Pieces:
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return Pieces(table[:, 0], table[:, 1], table[:, 2].astype(np.int32), table[:, 3].astype(np.int32))


def _light(trace: RankTrace) -> RankTrace:
    """Without kernels, of which there are most."""
    none = np.empty(0, dtype=np.int64)
    works = dataclasses.replace(
        trace.works,
        start=none,
        end=none,
        step=none.astype(np.int32),
        kind=none.astype(np.int8),
        name=none.astype(np.int32),
        stream=none.astype(np.int32),
        launched=none,
    )
    return dataclasses.replace(trace, works=works, names=())
