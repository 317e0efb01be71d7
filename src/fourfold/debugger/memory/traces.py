"""Memory in traces of PyTorch's profiler: the [memory] events that ``profile_memory=True`` writes, of CPUs and GPUs.

An event has an address, bytes (negative: freed), and what the allocator held after it. On a CPU that is counted from
the beginning of the trace; what was made before is unknown, and its end is not in the trace. On a GPU the allocator
knows.

On a CPU the profiler sees only threads that it was started on. A block that another frees (one that waits for messages,
or gloo's) seems to live until another is made at its address, or for ever. So where that is seen to happen to one, all
of its kind whose end is not seen are taken to end with their step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fourfold.debugger.memory.history import BEFORE, Blocks, History, Ledger, Purpose
from fourfold.debugger.memory.marks import Marks
from fourfold.debugger.reading import ranks as which
from fourfold.debugger.reading.classes import Category
from fourfold.debugger.reading.document import Block, Document
from fourfold.debugger.reading.events import MISSING, integer
from fourfold.debugger.reading.recording import Recorder, Recording, Table, event_times
from fourfold.debugger.reading.spans import holder, outermost
from fourfold.debugger.reading.trace import UNKNOWN

_MEMORY = "[memory]"
_CPU = 0  # PyTorch's number of the kind of device
_KINDS = {0: "cpu", 1: "cuda", 20: "hip"}
_BACKWARD = "autograd::engine::evaluate_function: "
_NOWHERE = "outside of all operators"
_BEFORE_ADDRESS = -1


class _Arguments(msgspec.Struct, gc=False):
    bytes: Any = msgspec.field(default=None, name="Bytes")
    address: Any = msgspec.field(default=None, name="Addr")
    kind: Any = msgspec.field(default=None, name="Device Type")
    device: Any = msgspec.field(default=None, name="Device Id")
    total: Any = msgspec.field(default=None, name="Total Allocated")
    reserved: Any = msgspec.field(default=None, name="Total Reserved")


class _Event(msgspec.Struct, gc=False):
    args: _Arguments | None = None


class _Header(msgspec.Struct, gc=False):
    events: list[_Event] = msgspec.field(name="traceEvents")


def read_trace(path: Path) -> list[History]:
    """Reads a file: a history of each device, of which there are none if memory was not recorded.

    Raises:
        ValueError: it is no trace.
    """
    document, recorder, found = Document(path), Recorder(), _Memory()
    for block in document.blocks():
        recorder.add(block)
        found.add(block)
    recording = recorder.finish()
    said = document.header.distributed
    rank = integer(said.get("rank"), UNKNOWN) if isinstance(said, dict) else UNKNOWN
    rank = rank if rank >= 0 else which.from_name(path)
    notes = [*document.notes]
    if rank == UNKNOWN:
        rank = 0
        notes.append("neither the file nor its name says which rank it is of: taken for rank 0")
    if found.damaged:
        notes.append(f"{found.damaged:,} events of memory are damaged and were left out")
    marks, operators = _marks(recording.tables[Category.ANNOTATION], recording), _Operators(recording)
    return [
        _history(path, rank, device, np.array(rows, dtype=np.int64), recording, marks, operators, notes)
        for device, rows in sorted(found.rows(recording).items())
    ]


class _Memory:
    """The [memory] events of a file: time, thread, bytes, address, and totals, by device."""

    def __init__(self) -> None:
        self.damaged = 0
        self._rows: list[tuple[tuple[int, int], tuple[object, object], tuple[int, ...]]] = []

    def add(self, block: Block) -> None:
        """Takes those of a block."""
        chosen = [i for i, event in enumerate(block.events) if event.name == _MEMORY and event.ph == "i"]
        if not chosen:
            return
        arguments = _arguments(block)
        times = event_times([block.events[i] for i in chosen], "ts", block)
        for i, time in zip(chosen, times.tolist(), strict=True):
            event, args = block.events[i], arguments[i].args or _Arguments()
            size, address = integer(args.bytes, 0), integer(args.address, 0)
            if time == MISSING or not size or not address:
                self.damaged += 1
                continue
            device = integer(args.kind, _CPU), max(integer(args.device, 0), 0)
            totals = integer(args.total, UNKNOWN), integer(args.reserved, 0)
            self._rows.append((device, (event.pid, event.tid), (time, size, address, *totals)))

    def rows(self, recording: Recording) -> dict[tuple[int, int], list[tuple[int, ...]]]:
        """By device, in order of time: time, thread, bytes, address, total, reserved."""
        threads = {thread: number for number, thread in enumerate(recording.threads)}
        out: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
        for device, thread, (time, *rest) in self._rows:
            try:
                number = threads.get(thread, UNKNOWN)
            except TypeError:  # a list or an object stands there
                number = UNKNOWN
            out[device].append((time, number, *rest))
        return {device: sorted(rows, key=lambda row: row[0]) for device, rows in out.items()}


def _arguments(block: Block) -> list[_Event]:
    """Of all events of a block, what only those of memory have."""
    if block.text.startswith(b"["):
        return msgspec.json.decode(block.text, type=list[_Event])
    return msgspec.json.decode(block.text, type=_Header).events


def _marks(annotations: Table, recording: Recording) -> Marks:
    """Of the thread that marks the steps; without steps, of the one with the most ranges."""
    names = recording.names
    stepping = [name for name in np.unique(annotations.name) if names[name].startswith("ProfilerStep#")]
    some = annotations.thread[np.isin(annotations.name, stepping)] if stepping else annotations.thread
    if len(some):
        annotations = annotations.taken(annotations.thread == np.bincount(some).argmax())
    return Marks(annotations.start, annotations.end, [names[name] for name in annotations.name])


class _Operators:
    """Which operator a thread is in at a time: the outermost, which is the one that the program called."""

    def __init__(self, recording: Recording) -> None:
        self._names = recording.names
        self._of: dict[int, Table] = {}
        table = recording.tables[Category.OPERATOR].ordered()
        for thread in np.unique(table.thread).tolist():
            mine = table.taken(table.thread == thread)
            self._of[thread] = mine.taken(outermost(mine.start, mine.end))

    def of(self, time: np.ndarray, thread: np.ndarray) -> list[str]:
        """The name at each time; "" outside of all."""
        out = np.full(len(time), "", dtype=object)
        for number, table in self._of.items():
            mine = np.flatnonzero(thread == number)
            row = holder(time[mine], table.start, table.end)
            names = [name.removeprefix(_BACKWARD) for name in (self._names[name] for name in table.name)]
            out[mine] = [names[at] if at >= 0 else "" for at in row.tolist()]
        return out.tolist()


def _history(
    path: Path,
    rank: int,
    device: tuple[int, int],
    rows: np.ndarray,
    recording: Recording,
    marks: Marks,
    operators: _Operators,
    notes: list[str],
) -> History:
    time, thread, size, address, total, reserved = rows.T
    purposes: dict[Purpose, int] = {Purpose(BEFORE): 0}
    ledger = Ledger()
    doing, calls, called = marks.doing_of(time), marks.call_of(time), operators.of(time, thread)
    for event, (at, bytes_) in enumerate(zip(address.tolist(), size.tolist(), strict=True)):
        if bytes_ < 0:
            ledger.freed(event, at, -bytes_, 0)
            continue
        purpose = Purpose(calls[event] or called[event] or _NOWHERE, *doing[event])
        ledger.made(event, at, bytes_, purposes.setdefault(purpose, len(purposes)))
    kind, number = device
    is_whole = kind != _CPU and total[0] != UNKNOWN
    if is_whole:  # what is never freed was there all the time
        rest = int(total[0] - size[0]) - ledger.before
        if rest > 0:
            ledger.there_before(_BEFORE_ADDRESS, rest, 0)
    doings = {text: i for i, text in enumerate(dict.fromkeys(text for text, _ in doing))}
    name, step = _KINDS.get(kind, f"device {kind}"), marks.step_of(time)
    blocks = ledger.blocks(len(time))
    if ledger.unseen:
        blocks, count = _within_steps(blocks, ledger.unseen, step, [*purposes])
        notes = [*notes, f"of {count:,} blocks the end was not seen, on threads that are not recorded"]
    return History(
        path=path,
        rank=rank,
        device=name if kind == _CPU else f"{name}:{number}",
        source="trace",
        is_whole=is_whole,
        time=time,
        step=step,
        doing=np.array([doings[text] for text, _ in doing], dtype=np.int64),
        doings=tuple(doings),
        blocks=blocks,
        purposes=tuple(purposes),
        reserved=np.concatenate((reserved[:1], reserved)) if reserved.any() else np.zeros(0, dtype=np.int64),
        steps=marks.steps,
        notes=tuple(notes),
    )


def _within_steps(blocks: Blocks, unseen: list[int], step: np.ndarray, purposes: list[Purpose]) -> tuple[Blocks, int]:
    """With blocks whose end was not seen ended with the step that made them, and how many these are."""
    kinds = {purpose[:2]: number for number, purpose in enumerate(purposes)}
    kind = np.array([kinds[purpose[:2]] for purpose in purposes], dtype=np.int64)[blocks.purpose]
    rows = np.zeros(len(kind), dtype=bool)
    rows[unseen] = True
    rows |= np.isin(kind, kind[unseen]) & (blocks.end == len(step)) & (blocks.begin >= 0)
    made_in = step[np.maximum(blocks.begin, 0)]
    numbers, first_from_behind = np.unique(step[::-1], return_index=True)
    last = dict(zip(numbers.tolist(), (len(step) - 1 - first_from_behind).tolist(), strict=True))
    over = np.array([last[number] if number != UNKNOWN else len(step) for number in made_in.tolist()], dtype=np.int64)
    end = np.where(rows, np.minimum(blocks.end, np.maximum(over, blocks.begin)), blocks.end)
    return replace(blocks, end=end, left=np.minimum(blocks.left, end)), int(rows.sum())
