"""Work and communication of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.debugger.reading import messages
from fourfold.debugger.reading.classes import call_of, is_communication, itemsize, work_of
from fourfold.debugger.reading.events import Arguments, integer
from fourfold.debugger.reading.groups import Groups
from fourfold.debugger.reading.messages import is_message
from fourfold.debugger.reading.ranges import Marks
from fourfold.debugger.reading.recording import Recording, Table
from fourfold.debugger.reading.trace import UNKNOWN, Call, Calls, Times, Works
from fourfold.layout import Label

_PARENTS = 8  # ranges around a launch that are looked at


def launches_of(device: Table, launches: Table) -> np.ndarray:
    """The row of the launch of each kernel, by their common number; UNKNOWN."""
    if not len(launches) or not len(device):
        return np.full(len(device), UNKNOWN)
    order = np.argsort(launches.number, kind="stable")
    numbers = launches.number[order]
    at = np.minimum(np.searchsorted(numbers, device.number), len(numbers) - 1)
    return np.where((device.number >= 0) & (numbers[at] == device.number), order[at], UNKNOWN)


def split(device: Table, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that compute, and rows that communicate."""
    used = np.unique(device.name)
    talks = np.isin(device.name, [name for name in used if is_communication(names[name])])
    talks[[row for row, arguments in device.arguments.items() if arguments.collective is not None]] = True
    waits = np.isin(device.name, [name for name in used if work_of(names[name]) is None])
    return np.flatnonzero(~talks & ~waits), np.flatnonzero(talks)


def works_of(table: Table, launched: Times, recording: Recording, marks: Marks) -> Works:
    """Works of the rows of a table, which are in order of start. Names are numbers in the recording."""
    used, which = np.unique(table.name, return_inverse=True)
    kinds = np.array([work_of(recording.names[name]) or 0 for name in used], dtype=np.int8)
    return Works(
        table.start,
        table.end,
        marks.step_of(table.start, launched),
        kinds[which],
        table.name.astype(np.int32),
        streams(table, recording),
        launched,
    )


def streams(table: Table, recording: Recording) -> np.ndarray:
    """The number of each row's stream, or thread."""
    if not len(table):
        return np.zeros(0, dtype=np.int32)
    used, which = np.unique(table.thread, return_inverse=True)
    numbers = [integer(recording.threads[thread][1], UNKNOWN) for thread in used]
    return np.array([n if -1 <= n < 2**31 else UNKNOWN for n in numbers], dtype=np.int32)[which]


@dataclass
class _Known:
    """What is known of one communication."""

    kind: Call
    arguments: Arguments | None
    label: Label | None = None


def calls_of(
    table: Table,
    launches: tuple[Table, np.ndarray],
    context: Context,
    recording: Recording,
    marks: Marks,
    groups: Groups,
) -> Calls:
    """Calls of the rows of a table, which are in order of start."""
    launch_table, launch = launches
    known = []
    for row in range(len(table)):
        arguments = table.arguments.get(row)
        name = recording.names[table.name[row]]
        kind = call_of(name)
        if arguments is not None and arguments.collective is not None:
            said = call_of(str(arguments.collective))
            kind = said if said is not Call.OTHER else kind
        found = _Known(kind, arguments)
        is_vague = kind in (Call.OTHER, Call.MESSAGE) or arguments is None or arguments.group is None
        if launch[row] >= 0 and (is_vague or arguments is None or arguments.sequence is None):
            context.complete(found, int(launch_table.thread[launch[row]]), int(launch_table.start[launch[row]]))
        known.append(found)
    launched = np.where(launch >= 0, launch_table.start[launch], UNKNOWN) if len(launch_table) else launch
    steps = marks.step_of(table.start, launched)
    number = np.where(steps >= 0, marks.steps.number[steps], UNKNOWN).tolist()
    columns = [_numbers(found, groups, step) for found, step in zip(known, number, strict=True)]
    group, sequence, elements, size, peer = np.array(columns, dtype=np.int64).reshape(-1, 5).T
    return Calls(
        table.start,
        table.end,
        steps,
        np.array([found.kind for found in known], dtype=np.int8),
        group.astype(np.int32),
        sequence.copy(),
        elements.copy(),
        size.astype(np.int8),
        peer.astype(np.int32),
        streams(table, recording),
        launched,
        np.zeros(len(table), dtype=bool),
    )


def _numbers(found: _Known, groups: Groups, step: int) -> tuple[int, int, int, int, int]:
    """Group, sequence, elements, bytes of an element, peer."""
    group = sequence = elements = peer = UNKNOWN
    size = 0
    arguments, label = found.arguments, found.label
    if arguments is not None:
        group = groups.of(arguments)
        sequence = max(integer(arguments.sequence, UNKNOWN), UNKNOWN)
        elements = max(integer(arguments.elements_in, UNKNOWN), integer(arguments.elements_out, UNKNOWN), UNKNOWN)
        size = itemsize(arguments.dtype)
        other = integer(arguments.destination, UNKNOWN)
        peer = other if other >= 0 else max(integer(arguments.source, UNKNOWN), UNKNOWN)
    if label is not None and group == UNKNOWN:
        group = groups.labelled(label.dimension, label.group)
    if label is not None and is_message(label):
        peer = peer if peer >= 0 else messages.peer(label, groups.grid, groups.rank)
        sequence = sequence if sequence >= 0 else messages.number(label, step)
    elif label is not None and sequence == UNKNOWN:
        sequence = label.sequence
    return group, sequence, elements, size, peer if peer < 2**31 else UNKNOWN


class Context:
    """What the host was doing when it launched something: operators and ranges that communicate, by thread."""

    def __init__(self, tables: tuple[Table, ...], labels: tuple[Table, list[Label]], names: list[str]) -> None:
        self._rows: dict[int, tuple[Times, Times, list[tuple[Call, Arguments | None, Label | None]]]] = {}
        parts: dict[int, list[tuple[int, int, tuple[Call, Arguments | None, Label | None]]]] = {}
        for table in tables:
            used = [name for name in np.unique(table.name) if is_communication(names[name])]
            rows = {*np.flatnonzero(np.isin(table.name, used)).tolist(), *table.arguments}
            for row in rows:
                arguments = table.arguments.get(row)
                kind = call_of(names[table.name[row]])
                if arguments is not None and arguments.collective is not None:
                    kind = call_of(str(arguments.collective))
                known = (kind, arguments if arguments is not None and arguments.collective else None, None)
                parts.setdefault(int(table.thread[row]), []).append((int(table.start[row]), int(table.end[row]), known))
        for row, label in enumerate(labels[1]):
            kind = call_of(label.kind)
            if kind is not Call.OTHER:
                table = labels[0]
                known = (kind, None, label)
                parts.setdefault(int(table.thread[row]), []).append((int(table.start[row]), int(table.end[row]), known))
        for thread, found in parts.items():
            found.sort(key=lambda row: (row[0], -row[1]))
            start, end = (np.array([row[i] for row in found], dtype=np.int64) for i in range(2))
            self._rows[thread] = (start, end, [row[2] for row in found])

    def complete(self, found: _Known, thread: int, at: int) -> None:
        """Adds what was going on around a launch, innermost first."""
        if thread not in self._rows:
            return
        start, end, known = self._rows[thread]
        row = int(np.searchsorted(start, at, side="right")) - 1
        for i in range(row, max(row - _PARENTS, -1), -1):
            if end[i] < at:
                continue
            kind, arguments, label = known[i]
            if found.kind is Call.OTHER or (found.kind is Call.MESSAGE and kind is not Call.OTHER):
                found.kind = kind
            if arguments is not None and (found.arguments is None or found.arguments.group is None):
                found.arguments = arguments
            if label is not None and found.label is None:
                found.label = label
