"""The events of a file as columns: what is kept of them until all are known."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.reading.classes import Category, category, is_communication
from fourfold.debugger.reading.document import Block
from fourfold.debugger.reading.events import (
    MISSING,
    Arguments,
    Event,
    exact_nanoseconds,
    integer,
    nanoseconds,
)
from fourfold.debugger.reading.trace import UNKNOWN, Times

Column = NDArray[np.signedinteger]

_RANK_NAME = re.compile(r"rank (\d+)\b", re.IGNORECASE)

KEPT = (
    Category.OPERATOR,
    Category.ANNOTATION,
    Category.LAUNCH,
    Category.DEVICE,
    Category.DEVICE_ANNOTATION,
)


@dataclass
class Table:
    """Events of one category. All columns are as long."""

    start: Times
    end: Times
    process: Column
    """Index into `Recording.processes`."""
    thread: Column
    """Index into `Recording.threads`."""
    name: Column
    """Index into `Recording.names`."""
    number: Column
    """Of a launch and of what it launched, the same; UNKNOWN."""
    arguments: dict[int, Arguments] = field(default_factory=dict)
    """Of the rows that communicate."""

    def __len__(self) -> int:
        return len(self.start)

    def taken(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> Table:
        """Some rows, in the order given."""
        rows = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        kept: dict[int, Arguments] = {}
        if self.arguments:
            where = {int(row): i for i, row in enumerate(rows)}
            kept = {where[row]: arguments for row, arguments in self.arguments.items() if row in where}
        return Table(
            self.start[rows], self.end[rows], self.process[rows], self.thread[rows], self.name[rows], self.number[rows],
            kept,
        )  # fmt: skip

    def ordered(self) -> Table:
        """By start; of those that start together the longest first, which is the outermost."""
        return self.taken(np.lexsort((-self.end, self.start)))


@dataclass
class Recording:
    """What is kept of one file, or of one rank in it."""

    tables: dict[Category, Table]
    """Of all categories in `KEPT`."""
    names: list[str]
    threads: list[tuple[object, object]]
    """(pid, tid), as they stand in the file."""
    processes: list[object]
    ranks: dict[object, int]
    """Of processes that are named after a rank."""
    dropped: int
    """Events without a time that makes sense."""


class Recorder:
    """Takes blocks of events, and keeps columns."""

    def __init__(self) -> None:
        self._names: dict[str, int] = _Numbers()
        self._threads: dict[tuple[object, object], int] = _Numbers()
        self._processes: dict[object, int] = _Numbers()
        self._ranks: dict[object, int] = {}
        self._parts: dict[Category, list[Table]] = defaultdict(list)
        self._rows: dict[Category, int] = defaultdict(int)
        self._categories = _Categories()
        self._arrows: dict[tuple[int, int], int] = {}  # (thread, start) of both ends -> number
        self._is_unlinked = False  # some kernel does not say what launched it
        self._dropped = 0

    def add(self, block: Block) -> None:
        """Keeps what there is to keep of a block."""
        lists: list[list[Event]] = [[] for _ in Category]
        categories = self._categories
        arrows: list[Event] = []
        for event in block.events:
            if event.ph == "X":
                lists[categories[event.cat]].append(event)
            elif event.ph == "s" or event.ph == "f":
                arrows.append(event)
            elif event.ph == "M":
                self._named(event)
        for kind in KEPT:
            if lists[kind]:
                self._add(kind, lists[kind], block)
        if self._is_unlinked:
            self._link(arrows, block)

    def finish(self) -> Recording:
        """All of it."""
        tables = {kind: _joined(self._parts[kind]) for kind in KEPT}
        if self._arrows:
            tables |= {kind: _linked(tables[kind], self._arrows) for kind in (Category.LAUNCH, Category.DEVICE)}
        names, threads, processes = list(self._names), list(self._threads), list(self._processes)
        return Recording(tables, names, threads, processes, self._ranks, self._dropped)

    def _named(self, event: Event) -> None:
        """A process may be named after its rank."""
        if event.name == "process_name" and event.args is not None:
            match = _RANK_NAME.match(str(event.args.name))
            if match:
                self._ranks[_plain(event.pid)] = int(match[1])

    def _add(self, kind: Category, events: list[Event], block: Block) -> None:
        start = event_times(events, "ts", block)
        took = np.maximum(event_times(events, "dur", block), 0)  # a missing one, or one below zero, is none
        names = self._names
        name = [names[e.name] if type(e.name) is str else names[str(e.name)] for e in events]
        try:
            thread = [self._threads[e.pid, e.tid] for e in events]
            process = [self._processes[e.pid] for e in events]
        except TypeError:  # a list or an object stands there
            thread = [self._threads[_plain(e.pid), _plain(e.tid)] for e in events]
            process = [self._processes[_plain(e.pid)] for e in events]
        number = _numbers(kind, events)
        if kind is Category.DEVICE and not self._is_unlinked:
            self._is_unlinked = bool(np.any(number == UNKNOWN))
        table = Table(start, start + took, *_indices(process, thread, name), number, _arguments(kind, events))
        good = start != MISSING
        if not good.all():
            self._dropped += int(np.count_nonzero(~good))
            table = table.taken(good)
        self._parts[kind].append(table)

    def _link(self, arrows: list[Event], block: Block) -> None:
        """Keeps the arrows from launches to kernels, whose numbers do what arguments fail to do."""
        arrows = [e for e in arrows if e.cat == "ac2g" and type(e.id) is int and e.id > 0]
        for event, at in zip(arrows, event_times(arrows, "ts", block).tolist(), strict=True):
            self._arrows[self._threads[_plain(event.pid), _plain(event.tid)], at] = event.id


def _linked(table: Table, arrows: dict[tuple[int, int], int]) -> Table:
    """With the numbers of the arrows that begin or end with an event, where it has none of its own."""
    keys = zip(table.thread.tolist(), table.start.tolist(), strict=True)
    found = np.array([arrows.get(key, UNKNOWN) for key in keys], dtype=np.int64)
    return replace(table, number=np.where(table.number == UNKNOWN, found, table.number))


class _Numbers(dict):
    """Numbers what it is asked for, from 0."""

    def __missing__(self, key: object) -> int:
        self[key] = number = len(self)
        return number


class _Categories(dict):
    """The category of each `cat`."""

    def __missing__(self, key: object) -> Category:
        self[key] = found = category(key)
        return found


def event_times(events: list[Event], name: Literal["ts", "dur"], block: Block) -> Times:
    """In whole nanoseconds."""
    values = [e.ts for e in events] if name == "ts" else [e.dur for e in events]
    found = None if block.is_exact else nanoseconds(values)
    if found is None:
        block.make_exact()
        found = exact_nanoseconds([getattr(e, name) for e in events])
    return found


def _plain(value: object) -> object:
    return value if isinstance(value, int | str | float) else str(value)


def _numbers(kind: Category, events: list[Event]) -> Column:
    """By which a launch and what it launched know each other."""
    if kind not in (Category.LAUNCH, Category.DEVICE):
        return np.full(len(events), UNKNOWN)
    values = [UNKNOWN if e.args is None else e.args.correlation for e in events]
    try:
        found = np.array(values, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        found = np.array([integer(value, UNKNOWN) for value in values], dtype=np.int64)
    return np.where(found > 0, found, UNKNOWN)


def _indices(process: list[int], thread: list[int], name: list[int]) -> tuple[Column, Column, Column]:
    return np.array(process, dtype=np.int32), np.array(thread, dtype=np.int32), np.array(name, dtype=np.int32)


def _arguments(kind: Category, events: list[Event]) -> dict[int, Arguments]:
    """What those that communicate say about it."""
    if kind in (Category.LAUNCH, Category.DEVICE_ANNOTATION):
        return {}
    return {
        row: e.args for row, e in enumerate(events)
        if e.args is not None
        and (e.args.collective is not None or (kind is Category.ANNOTATION and is_communication(str(e.name))))
    }  # fmt: skip


def _joined(parts: list[Table]) -> Table:
    if not parts:
        none, index = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
        return Table(none, none, index, index, index, none)
    arguments, row = {}, 0
    for part in parts:
        arguments.update({row + at: value for at, value in part.arguments.items()})
        row += len(part)
    return Table(
        np.concatenate([part.start for part in parts]),
        np.concatenate([part.end for part in parts]),
        np.concatenate([part.process for part in parts]),
        np.concatenate([part.thread for part in parts]),
        np.concatenate([part.name for part in parts]),
        np.concatenate([part.number for part in parts]),
        arguments,
    )
