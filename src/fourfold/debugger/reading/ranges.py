"""Steps, labels and other ranges that the host marks in a trace."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fourfold.debugger.reading.recording import Table
from fourfold.debugger.reading.spans import holder, outermost
from fourfold.debugger.reading.trace import UNKNOWN, Host, HostRanges, Labels, Steps, Times
from fourfold.layout import Label, parse_label
from fourfold.layout.doings import Doing
from fourfold.layout.labels import PREFIX

_STEP = re.compile(r"ProfilerStep#(\d+)")
_HOST = (
    (re.compile(rf"{Doing.GC.range}\b|(?:python\s*)?(?:gc|garbage)\b.*|gc_collect", re.IGNORECASE), Host.GARBAGE),
    (re.compile(rf"{Doing.LOAD.range}\b|enumerate\(DataLoader\)|.*DataLoader.*__next__", re.IGNORECASE), Host.LOADER),
    (re.compile(rf"{Doing.STEP.range}\b|Optimizer\.step#", re.IGNORECASE), Host.OPTIMIZER),
)  # fmt: skip


@dataclass(frozen=True)
class Marks:
    """When each step was, on the host and on the device."""

    steps: Steps
    device_start: Times
    device_end: Times
    device_step: np.ndarray
    """Index into `steps` of each of the device's."""

    def step_of(self, start: Times, launched: Times) -> np.ndarray:
        """Index of the step of what was launched then, or began then; UNKNOWN outside of all."""
        known = launched >= 0
        found = holder(np.where(known, launched, start), self.steps.start, self.steps.end)
        if len(self.device_start) and not known.all():
            row = holder(start, self.device_start, self.device_end)
            found = np.where(known | (row < 0), found, self.device_step[row])
        return found.astype(np.int32)


def marks(host: Table, device: Table, names: list[str], whole: tuple[int, int]) -> Marks:
    """The profiler's marks of steps; without any, one step that is `whole`."""
    on_host, on_device = _numbered(host, names), _numbered(device, names)
    chosen = on_host if len(on_host[0]) else on_device
    if not len(chosen[0]):
        one = Steps(*(np.array([value], dtype=np.int64) for value in (0, *whole)))
        none = np.zeros(0, dtype=np.int64)
        return Marks(one, none, none, none)
    index = {int(number): i for i, number in enumerate(chosen[0])}
    same = np.array([int(number) in index for number in on_device[0]], dtype=bool)
    number, start, end = (column[same] for column in on_device)
    return Marks(Steps(*chosen), start, end, np.array([index[int(n)] for n in number], dtype=np.int64))


def _numbered(table: Table, names: list[str]) -> tuple[Times, Times, Times]:
    """Number, start and end of each step, in order of start, none before the one before is over."""
    steps: dict[int, tuple[int, int]] = {}
    for name in np.unique(table.name):
        match = _STEP.match(names[name])
        if match:
            rows = table.name == name
            # A profiler may mark a step on several threads or streams.
            steps[int(match[1])] = (int(table.start[rows].min()), int(table.end[rows].max()))
    ordered = sorted((start, end, number) for number, (start, end) in steps.items())
    start, end, number = (np.array([row[i] for row in ordered], dtype=np.int64) for i in range(3))
    if len(end):
        end[:-1] = np.minimum(end[:-1], start[1:])
    return number, start, end


def parsed(table: Table, names: list[str]) -> tuple[Table, list[Label]]:
    """Those ranges that carry a label, in order of start, with it."""
    labels = {int(name): parse_label(names[name]) for name in np.unique(table.name) if names[name].startswith(PREFIX)}
    chosen = np.array([labels.get(int(name)) is not None for name in table.name], dtype=bool)
    table = table.taken(chosen).ordered()
    return table, [label for name in table.name if (label := labels[int(name)]) is not None]


def label_columns(host: tuple[Table, list[Label]], device: tuple[Table, list[Label]]) -> Labels:
    """All labels of a rank, in order of start."""
    found = [*host[1], *device[1]]
    start, end = (np.concatenate([getattr(table, name) for table, _ in (host, device)]) for name in ("start", "end"))
    order = np.lexsort((-end, start))
    found = [found[i] for i in order]
    on_device = np.concatenate((np.zeros(len(host[1]), dtype=bool), np.ones(len(device[1]), dtype=bool)))
    return Labels(
        start[order],
        end[order],
        on_device[order],
        tuple(label.dimension for label in found),
        tuple(label.kind for label in found),
        np.array([label.group for label in found], dtype=np.int32),
        np.array([label.stage for label in found], dtype=np.int32),
        np.array([label.micro_batch for label in found], dtype=np.int32),
        np.array([label.sequence for label in found], dtype=np.int64),
    )


def host_ranges(tables: tuple[Table, ...], names: list[str]) -> HostRanges:
    """Garbage collections, loading and optimizers. Of those inside another of their kind only the outer one."""
    starts, ends, kinds = [], [], []
    for kind in Host:
        pieces = []
        for table in tables:
            wanted = np.array([_host_of(names[name]) == kind for name in np.unique(table.name)], dtype=bool)
            pieces.append(table.taken(np.isin(table.name, np.unique(table.name)[wanted])))
        start, end = (np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("start", "end"))
        order = np.lexsort((-end, start))
        start, end = start[order], end[order]
        rows = outermost(start, end)
        starts.append(start[rows])
        ends.append(end[rows])
        kinds.append(np.full(len(rows), kind, dtype=np.int8))
    start, end, found = np.concatenate(starts), np.concatenate(ends), np.concatenate(kinds)
    order = np.argsort(start, kind="stable")
    return HostRanges(start[order], end[order], found[order])


def _host_of(name: str) -> int:
    return next((kind for pattern, kind in _HOST if pattern.match(name)), UNKNOWN)
