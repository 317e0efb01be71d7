"""Work and communication of a rank that computes on its CPU: operators, and the ranges in which the host waits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.debugger.reading.classes import Category, call_of, is_communication, itemsize, work_of
from fourfold.debugger.reading.device import streams
from fourfold.debugger.reading.events import Arguments, integer
from fourfold.debugger.reading.groups import Groups
from fourfold.debugger.reading.messages import is_message, number, peer
from fourfold.debugger.reading.ranges import Marks
from fourfold.debugger.reading.recording import Recording, Table
from fourfold.debugger.reading.spans import holder, merged, outermost, without
from fourfold.debugger.reading.trace import UNKNOWN, Call, Calls, Work, Works
from fourfold.layout import Grid, Label

_WAIT = "wait"
_SENT, _AWAITED = ("SEND_F", "SEND_B"), ("WAIT_F", "WAIT_B")
_MESSAGES = (Call.SEND, Call.RECV, Call.MESSAGE)


@dataclass
class _Found:
    """One communication."""

    start: int
    end: int
    thread: int
    kind: Call
    group: int = UNKNOWN
    sequence: int = UNKNOWN
    elements: int = UNKNOWN
    itemsize: int = 0
    peer: int = UNKNOWN
    posted: int = UNKNOWN
    blocks: bool = True


def work_and_calls(
    recording: Recording,
    marks: Marks,
    labels: tuple[Table, list[Label]],
    groups: Groups,
    *,
    grid: Grid | None,
    rank: int,
) -> tuple[Works, Calls]:
    """Of a CPU. Operators must be in order of start."""
    operators = recording.tables[Category.OPERATOR]
    talks = np.isin(operators.name, [n for n in np.unique(operators.name) if is_communication(recording.names[n])])
    computes = operators.taken(~talks)
    found = _Labelled(labels, groups, marks).calls(grid, rank)
    unlabelled = _unlabelled(recording, operators.taken(talks), groups)
    if not found:
        found = unlabelled
    elif not any(call.kind in _MESSAGES for call in found):
        found += [call for call in unlabelled if call.kind in _MESSAGES]
    found.sort(key=lambda call: (call.start, -call.end))
    quiet = [(call.start, call.end, call.thread) for call in (*found, *unlabelled) if call.blocks]
    return _works(computes, recording, marks, sorted(quiet)), _calls(found, recording, marks)


class _Labelled:
    """Communication by our labels. A collective is started in one range and, if its result is not needed at once,
    awaited in another, with the same number."""

    def __init__(self, labels: tuple[Table, list[Label]], groups: Groups, marks: Marks) -> None:
        self._table, self._labels = labels
        self._groups, self._marks = groups, marks
        self._steps = marks.step_of(self._table.start, np.full(len(self._table), UNKNOWN))

    def calls(self, grid: Grid | None, rank: int) -> list[_Found]:
        """In the order in which they were started."""
        out: list[_Found] = []
        open_: dict[tuple[str, int, int], _Found] = {}
        for row, label in enumerate(self._labels):
            key = (label.dimension, label.group, label.sequence)
            if is_message(label):
                if label.kind in _SENT or label.kind in _AWAITED:
                    out.append(self._message(row, label, grid, rank))
            elif label.kind == _WAIT:
                self._awaited(open_.pop(key, None), row, label, out)
            elif call_of(label.kind) is not Call.OTHER:
                found = self._found(row, call_of(label.kind))
                found.group = self._groups.labelled(label.dimension, label.group)
                found.sequence = label.sequence
                open_[key] = found
                out.append(found)
        return out

    def _found(self, row: int, kind: Call) -> _Found:
        table = self._table
        start = int(table.start[row])
        return _Found(start, int(table.end[row]), int(table.thread[row]), kind, posted=start)

    def _awaited(self, begun: _Found | None, row: int, label: Label, out: list[_Found]) -> None:
        """Makes a collective last as long as it is waited for: what comes between start and wait is the rank's own."""
        found = self._found(row, Call.OTHER)
        if begun is None:  # started before the profiler was
            found.group, found.sequence = self._groups.labelled(label.dimension, label.group), label.sequence
            found.posted = UNKNOWN
            out.append(found)
            return
        begun.start, begun.end = found.start, found.end

    def _message(self, row: int, label: Label, grid: Grid | None, rank: int) -> _Found:
        """A send when it is posted, or a receive while it is waited for."""
        is_sent = label.kind in _SENT
        found = self._found(row, Call.SEND if is_sent else Call.RECV)
        found.blocks = not is_sent
        found.group = self._groups.labelled(label.dimension, label.group)
        step = self._steps[row]
        if step >= 0:
            found.sequence = number(label, int(self._marks.steps.number[step]))
        found.peer = peer(label, grid, rank)
        return found


def _unlabelled(recording: Recording, operators: Table, groups: Groups) -> list[_Found]:
    """Communication by the ranges of PyTorch's back ends; where there are none, by its operators."""
    annotations, names = recording.tables[Category.ANNOTATION], recording.names
    used = [n for n in np.unique(annotations.name) if is_communication(names[n])]
    table = annotations.taken(np.isin(annotations.name, used))
    if not len(table):
        table = operators
    out = []
    for thread in np.unique(table.thread):
        mine = table.taken(table.thread == thread).ordered()
        around = _Around(operators.taken(operators.thread == thread))
        for row in outermost(mine.start, mine.end):
            start, end = int(mine.start[row]), int(mine.end[row])
            arguments = mine.arguments.get(int(row)) or around.of(start, end)
            name = names[mine.name[row]]
            found = _Found(start, end, int(thread), call_of(name), posted=start)
            _describe(found, arguments, groups)
            out.append(found)
    return out


class _Around:
    """The arguments of the operators of a thread, which begin communications, or hold them."""

    def __init__(self, operators: Table) -> None:
        rows = np.array(sorted(operators.arguments), dtype=np.intp)  # the table is in order of start
        self._start, self._end = operators.start[rows], operators.end[rows]
        self._arguments = [operators.arguments[int(row)] for row in rows]

    def of(self, start: int, end: int) -> Arguments | None:
        """Of the last operator that began before a communication was over, if it was not over when that began."""
        at = int(np.searchsorted(self._start, end)) - 1
        return self._arguments[at] if at >= 0 and self._end[at] > start else None


def _describe(found: _Found, arguments: Arguments | None, groups: Groups) -> None:
    if arguments is None:
        return
    if arguments.collective is not None and found.kind is Call.OTHER:
        found.kind = call_of(str(arguments.collective))
    found.group = groups.of(arguments)
    found.sequence = max(integer(arguments.sequence, UNKNOWN), UNKNOWN)
    found.elements = max(integer(arguments.elements_in, UNKNOWN), integer(arguments.elements_out, UNKNOWN), UNKNOWN)
    found.itemsize = itemsize(arguments.dtype)
    sizes = arguments.dimensions
    if found.elements < 0 and isinstance(sizes, list):
        shapes = [shape for shape in sizes if isinstance(shape, list) and all(isinstance(n, int) for n in shape)]
        found.elements = max((int(np.prod(shape, dtype=np.int64)) for shape in shapes if shape), default=UNKNOWN)


def _works(table: Table, recording: Recording, marks: Marks, quiet: list[tuple[int, int, int]]) -> Works:
    """The outermost operators of every thread, without the stretches in which it communicates."""
    cuts = np.array(quiet, dtype=np.int64).reshape(-1, 3)
    starts, ends, rows, kinds = [], [], [], []
    for thread in np.unique(table.thread):
        mine = np.flatnonzero(table.thread == thread)
        outer = outermost(table.start[mine], table.end[mine])
        gone = cuts[cuts[:, 2] == thread]
        start, end, of = without(table.start[mine][outer], table.end[mine][outer], merged(gone[:, 0], gone[:, 1]))
        starts.append(start)
        ends.append(end)
        rows.append(mine[outer][of])
        own = np.bincount(of, end - start, minlength=len(outer))
        kinds.append(_kinds(table.taken(mine), outer, own, recording.names)[of])
    none = np.zeros(0, dtype=np.int64)
    start, end, row, kind = (np.concatenate([none, *parts]) for parts in (starts, ends, rows, kinds))
    some = end > start
    order = np.flatnonzero(some)[np.argsort(start[some], kind="stable")]
    start, end, row, kind = (column[order] for column in (start, end, row, kind))
    unknown = np.full(len(start), UNKNOWN)
    return Works(
        start,
        end,
        marks.step_of(start, unknown),
        kind.astype(np.int8),
        table.name[row].astype(np.int32),
        streams(table, recording)[row],
        unknown,
    )


def _kinds(table: Table, outer: np.ndarray, own: np.ndarray, names: list[str]) -> np.ndarray:
    """What limits each outermost operator: its name says it, or what it spends most of its own time in."""
    used, which = np.unique(table.name, return_inverse=True)
    by_name = [work_of(names[name]) for name in used]
    named = np.array([Work.MEMORY if kind is None else kind for kind in by_name], dtype=np.int8)[which]
    of = holder(table.start, table.start[outer], table.end[outer])
    took = table.end - table.start
    out = named[outer]
    for kind in (Work.GEMM, Work.ATTENTION):
        rows = np.flatnonzero((named == kind) & (of >= 0))
        rows = rows[outermost(table.start[rows], table.end[rows])]
        share = np.bincount(of[rows], took[rows], minlength=len(outer))
        out = np.where((named[outer] == Work.MEMORY) & (2 * share > own), kind, out)
    return out


def _calls(found: list[_Found], recording: Recording, marks: Marks) -> Calls:
    start, end, group, sequence, elements, size, peer, posted, thread, kind = (
        np.array([getattr(call, name) for call in found], dtype=np.int64)
        for name in ("start", "end", "group", "sequence", "elements", "itemsize", "peer", "posted", "thread", "kind")
    )
    none = np.zeros_like(start)
    rows = Table(start, end, none, thread, none, none)
    return Calls(
        start,
        end,
        marks.step_of(start, posted),
        kind.astype(np.int8),
        group.astype(np.int32),
        sequence,
        elements,
        size.astype(np.int8),
        peer.astype(np.int32),
        streams(rows, recording),
        posted,
        np.array([call.blocks for call in found], dtype=bool),
    )
