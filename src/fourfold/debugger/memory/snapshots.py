"""Snapshots of PyTorch's CUDA allocator: the pickles that ``torch.cuda.memory._dump_snapshot`` writes (2.1 to 2.13).

A snapshot says what the allocator holds (segments that it took from the device, cut into blocks), and, if
``_record_memory_history`` was on, what it did last: the events of a ring that forgets the oldest. So they are read
forwards for who made what, and amounts are counted backwards from what there is in the end: these are right however
much was forgotten. Events say the bytes that were asked for, segments those that were taken.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from fourfold.debugger.memory.frames import NO_PYTHON, Places
from fourfold.debugger.memory.free import Segment, largest_free
from fourfold.debugger.memory.history import BEFORE, History, Ledger, Purpose, Shortage
from fourfold.debugger.memory.marks import Marks
from fourfold.debugger.pickles import unpickled
from fourfold.debugger.reading.events import integer
from fourfold.debugger.reading.trace import UNKNOWN

_GZIP = b"\x1f\x8b"
_TAKES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_ACTIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")
_ALLOCATED = "active_allocated"
_EVENTS = {"alloc", "free_requested", "free_completed", "oom", "snapshot", *_TAKES}


def read_snapshot(path: Path, rank: int) -> list[History]:
    """Reads a file, plain or gzip: a history of each device that was used.

    Raises:
        ValueError: it is damaged, or no snapshot.
    """
    content = _content(path)
    if not isinstance(content, dict) or not isinstance(content.get("segments"), list | tuple):
        raise ValueError(f"{path}: no snapshot of PyTorch's memory: it has no segments")
    traces = content.get("device_traces")
    traces = traces if isinstance(traces, list | tuple) else []
    segments = [one for one in content["segments"] if isinstance(one, dict)]
    annotations = content.get("external_annotations")
    annotations = annotations if isinstance(annotations, list | tuple) else []
    devices = {integer(one.get("device"), 0) for one in segments}
    devices |= {device for device, trace in enumerate(traces) if isinstance(trace, list | tuple) and trace}
    if not devices:
        raise ValueError(f"{path}: the snapshot is empty: the program had no memory on any GPU")
    return [
        _Device(
            [one for one in segments if integer(one.get("device"), 0) == device],
            traces[device] if device < len(traces) and isinstance(traces[device], list | tuple) else [],
            [one for one in annotations if isinstance(one, dict) and integer(one.get("device"), device) == device],
        ).history(path, rank, device)
        for device in sorted(devices)
    ]


def _content(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            head = file.read(2)
            file.seek(0)
            if not head:
                raise ValueError("it is empty")
            return unpickled(cast("BinaryIO", gzip.GzipFile(fileobj=file)) if head == _GZIP else file)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except MemoryError:
        raise ValueError(f"{path} is damaged, or larger than there is memory to read it") from None
    except Exception as error:  # what a damaged pickle raises is not limited to anything
        raise ValueError(f"{path} is damaged: {str(error) or type(error).__name__}") from None


class _Device:
    """What a snapshot says of one device."""

    def __init__(self, segments: list[dict], trace: Sequence[Any], annotations: list[dict]) -> None:
        self._segments = segments
        self._trace = [one for one in trace if isinstance(one, dict) and str(one.get("action")) in _EVENTS]
        self._damaged = len(trace) - len(self._trace)
        self._unfreed = 0
        self._time = np.array([integer(one.get("time_us"), 0) * 1000 for one in self._trace], dtype=np.int64)
        self._marks = _marks(annotations, int(self._time.max(initial=0)))
        self._places = Places()
        self._purposes: dict[Purpose, int] = {}
        self._doing = self._marks.doing_of(self._time)
        self._call = self._marks.call_of(self._time)
        self._step = self._marks.step_of(self._time)

    def history(self, path: Path, rank: int, device: int) -> History:
        """All of it."""
        blocks = self._ledger().blocks(len(self._trace))
        doings = {text: number for number, text in enumerate(dict.fromkeys(text for text, _ in self._doing))}
        history = History(
            path=path,
            rank=rank,
            device=f"cuda:{device}",
            source="snapshot",
            is_whole=True,
            time=self._time,
            step=self._step,
            doing=np.array([doings[text] for text, _ in self._doing], dtype=np.int64),
            doings=tuple(doings),
            blocks=blocks,
            purposes=tuple(self._purposes),
            reserved=self._reserved(),
            steps=self._marks.steps,
            notes=tuple(self._notes()),
        )
        return replace(history, shortages=tuple(self._shortages(history)))

    def _ledger(self) -> Ledger:
        """Every block: of the events, and what is there in the end without having been seen to come."""
        ledger, before = Ledger(), self._number(Purpose(BEFORE))
        there, frees = dict(self._final_blocks()), self._frees()
        for event, one in enumerate(self._trace):
            action, address = one["action"], integer(one.get("addr"), UNKNOWN)
            size = max(integer(one.get("size"), 0), 0)
            if action == "alloc":
                ledger.made(event, address, size, self._number(self._purpose(event)))
            elif action == frees:
                if address not in ledger.alive and frees == "free_completed":
                    ledger.there_before(address, size, before, is_left=True)
                ledger.freed(event, address, size, before)
            elif action == "free_requested":
                ledger.given_back(event, address, size, before)
        known = {*ledger.alive}
        self._unfreed = len(ledger.unseen) + len(known - there.keys())
        for address, block in there.items():
            if address in known:
                continue
            size = integer(block.get("requested_size"), integer(block.get("size"), 0))
            place = self._places.of(_frames(block)) or BEFORE
            is_left = block.get("state") != _ALLOCATED
            if not (is_left and frees == "free_requested"):  # else it is known to be gone
                ledger.there_before(address, size, self._number(Purpose(place)), is_left=is_left)
        return ledger

    def _frees(self) -> str:
        """The action that ends a block. A recording may leave out the later half of a free: then the earlier does."""
        if any(one["action"] == "free_completed" for one in self._trace):
            return "free_completed"
        waiting = {address for address, block in self._final_blocks() if block.get("state") != _ALLOCATED}
        requested = {integer(one.get("addr"), 0) for one in self._trace if one["action"] == "free_requested"}
        return "free_requested" if requested - waiting else "free_completed"

    def _final_blocks(self) -> list[tuple[int, dict]]:
        """Those in use when the snapshot was taken, with their addresses."""
        out = []
        for segment in self._segments:
            address, blocks = integer(segment.get("address"), 0), segment.get("blocks")
            for block in blocks if isinstance(blocks, list | tuple) else ():
                if not isinstance(block, dict):
                    continue
                if block.get("state") in _ACTIVE:
                    out.append((integer(block.get("address"), address), block))
                address += integer(block.get("size"), 0)
        return out

    def _purpose(self, event: int) -> Purpose:
        """What an event asked for memory for: the line of the program, else the collective."""
        one, (doing, micro_batch) = self._trace[event], self._doing[event]
        place = self._places.of(one.get("frames"))
        if place in ("", NO_PYTHON):
            place = self._call[event] or place or "a place that was not recorded"
        return Purpose(place, doing or str(one.get("user_metadata") or ""), micro_batch)

    def _number(self, purpose: Purpose) -> int:
        return self._purposes.setdefault(purpose, len(self._purposes))

    def _reserved(self) -> np.ndarray:
        """Bytes of all segments before the first event and after each, backwards from what there is."""
        change = [_TAKES.get(one["action"], 0) * integer(one.get("size"), 0) for one in self._trace]
        taken = np.cumsum([0, *change], dtype=np.int64)
        return sum(integer(one.get("total_size"), 0) for one in self._segments) - taken[-1] + taken

    def _shortages(self, history: History) -> list[Shortage]:
        out = []
        for event, one in enumerate(self._trace):
            if one["action"] == "oom":
                out.append(
                    Shortage(
                        event=event,
                        requested=integer(one.get("size"), 0),
                        device_free=integer(one.get("device_free"), 0),
                        largest=self._largest_free(history, event),
                        purpose=self._purpose(event),
                        step=int(self._step[event]),
                    )
                )
        return out

    def _largest_free(self, history: History, event: int) -> int:
        """Of the stream that an event asks for: what another stream has cached it does not get."""
        stream = integer(self._trace[event].get("stream"), 0)
        there = [_segment(one, "address", "total_size") for one in self._segments if _stream(one) == stream]
        later = [
            (_TAKES[one["action"]] > 0, _segment(one, "addr", "size"))
            for one in self._trace[event:]
            if one["action"] in _TAKES and _stream(one) == stream
        ]
        expands = any(one.get("is_expandable") is True for one in self._segments) or any(
            one["action"] == "segment_map" for one in self._trace
        )
        rows = history.rows_at(event)
        return largest_free(
            there, later, history.blocks.address[rows], history.blocks.size[rows], joins=expands
        )  # fmt: skip

    def _notes(self) -> list[str]:
        notes = []
        if not self._trace:
            notes.append("no history was recorded: what is held is known, but not when it was made, nor the peak")
        if self._damaged:
            notes.append(f"{self._damaged:,} events are damaged and were left out")
        if self._unfreed:
            notes.append(f"of {self._unfreed:,} blocks it is not recorded when they were freed")
        return notes


def _marks(annotations: list[dict], last: int) -> Marks:
    """Ranges out of their beginnings and ends. What does not end lasts until the last event."""
    start: list[int] = []
    end: list[int] = []
    names: list[str] = []
    open_: dict[str, list[int]] = {}
    for one in annotations:
        name, at = str(one.get("name")), integer(one.get("time_us"), 0) * 1000
        if one.get("stage") == "START":
            open_.setdefault(name, []).append(len(names))
            start.append(at)
            end.append(last + 1)
            names.append(name)
        elif one.get("stage") == "END" and open_.get(name):
            end[open_[name].pop()] = at
    return Marks(np.array(start, dtype=np.int64), np.array(end, dtype=np.int64), names)


def _segment(one: dict, address: str, size: str) -> Segment:
    return integer(one.get(address), 0), max(integer(one.get(size), 0), 0)


def _stream(one: dict) -> int:
    return integer(one.get("stream"), 0)


def _frames(block: dict) -> Any:
    """The stack of a block; PyTorch up to 2.0 had it in a history of its own."""
    history = block.get("history")
    if "frames" not in block and isinstance(history, list) and history and isinstance(history[0], dict):
        return history[0].get("frames")
    return block.get("frames")
