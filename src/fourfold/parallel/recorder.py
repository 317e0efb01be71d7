"""What a rank is doing with the others, kept so that a hang can be explained: its last collectives, messages, actions.

The watchdog of :mod:`fourfold.trainer.watchdog` reads it from a thread of its own while the main thread is stuck, so
nothing here waits or locks. It is filled thousands of times per step, so an entry is three readings of the clock. From
the same readings comes how long the main thread has waited, group by group, for the action log.

On a GPU the host only starts collectives, and runs ahead of the device. There a marker is put into the device's queue
of work before a collective and after it, and asking whether the device has passed the marker tells what the host
cannot.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from fourfold.layout import Doing
from fourfold.parallel.torch_private import profiler_runs

KEPT = 16  # entries per line, and twice as many actions

Marker = Callable[[], Callable[[], bool]]
"""Puts a mark into the device's queue of work, and returns the question whether the device has passed it."""

Way = Literal["", "send", "receive"]


def cuda_marker() -> Callable[[], bool]:
    """A mark in the current CUDA stream."""
    event = torch.cuda.Event()
    event.record()

    def passed() -> bool:
        try:
            return event.query()
        except RuntimeError:  # the device has failed: it goes nowhere any more
            return False

    return passed


class Waitable(Protocol):
    """Something started that can be waited for, as ``torch.distributed.Work``."""

    def wait(self) -> Any: ...


class Entry:
    """One collective or message of this rank, from its start on. Times are ns of the monotonic clock, 0: not yet.

    Attributes:
        kind: "all_gather", "all_reduce" ..., "send" or "receive".
        number: counts the entries of its line from 0: ranks that agree run the same collective under one number.
        tensor: shape and dtype of this rank's tensor, or None where another library makes it.
        started: when this rank started it.
        waits: since when somebody waits for its end.
        ended: when the host went on.
    """

    __slots__ = (
        "_line", "_marker", "_passed_end", "_passed_start", "ended", "in_main_thread", "kind", "micro_batch", "number",
        "stage", "started", "tensor", "waits",
    )  # fmt: skip

    def __init__(self, line: Line, kind: str, tensor: Tensor | None) -> None:
        here, marker = line.position, line.marker
        self._line = line
        self.kind = kind
        self.number = line.count
        self.stage = here.stage
        self.micro_batch = here.micro_batch
        self.tensor = None if tensor is None else (tensor.shape, tensor.dtype)
        self.waits = self.ended = 0
        self.in_main_thread = False
        self._marker = marker
        self._passed_start = None if marker is None else marker()
        self._passed_end: Callable[[], bool] | None = None
        self.started = time.monotonic_ns()

    def wait(self, work: Waitable) -> None:
        """Waits for what was started under this entry."""
        self.wait_begins()
        work.wait()
        self.wait_ends()

    def wait_begins(self) -> None:
        """From now on the calling thread waits."""
        self.in_main_thread = threading.current_thread() is threading.main_thread()
        self.waits = time.monotonic_ns()

    def wait_ends(self) -> None:
        """The calling thread goes on; on a GPU the device will, once it has come so far."""
        if self._marker is not None:
            self._passed_end = self._marker()
        self.ended = time.monotonic_ns()
        if self.in_main_thread:
            self._line.has_waited(self.ended - self.waits)

    @property
    def has_started(self) -> bool:
        """Whether the host, and the device if there is one, have come to it."""
        return self._passed_start is None or self._passed_start()

    @property
    def has_ended(self) -> bool:
        """Whether the host, and the device if there is one, have left it behind."""
        return bool(self.ended) and (self._passed_end is None or self._passed_end())

    def as_json(self, now: int) -> dict[str, Any]:
        """The entry as docs/formats.md has it, with times as seconds before ``now``."""
        shape, dtype = self.tensor or ("", "")
        return {
            "kind": self.kind,
            "number": self.number,
            "stage": self.stage,
            "micro_batch": self.micro_batch,
            "tensor": f"{list(shape)} {str(dtype).removeprefix('torch.')}" if dtype else "",
            "seconds": (now - self.started) / 1e9,
            "ended": self.has_ended,
        }


class Line:
    """The last entries of one process group, or of one direction between two pipeline ranks.

    Attributes:
        dimension: of the group; "pp" for messages.
        ranks: the global ranks; of messages the source and the destination.
        way: "send" or "receive" for messages, as this rank sees them, else "".
        count: entries so far.
        entries: the last of them.
        waited: nanoseconds that the main thread has spent waiting in them so far.
        position, marker: of the recorder.
    """

    def __init__(self, recorder: Recorder, dimension: str, ranks: Sequence[int], way: Way) -> None:
        self.dimension = dimension
        self.ranks = tuple(ranks)
        self.way = way
        self.count = self.waited = 0
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self.position = recorder.position
        self.marker = recorder.marker
        self._recorder = recorder

    def start(self, kind: str, tensor: Tensor | None = None) -> Entry:
        """Records that this rank starts a collective or a message now."""
        entry = Entry(self, kind, tensor)
        self.count += 1
        self.entries.append(entry)
        return entry

    def has_waited(self, nanoseconds: int) -> None:
        """The main thread has."""
        self.waited += nanoseconds
        self._recorder.waited += nanoseconds

    def num_started(self) -> int:
        """How many entries host and device have come to."""
        pending = 0
        for entry in reversed(tuple(self.entries)):
            if entry.has_started:
                break
            pending += 1
        return self.count - pending

    def as_json(self, now: int) -> dict[str, Any]:
        """The line as docs/formats.md has it."""
        recent = [entry.as_json(now) for entry in tuple(self.entries)]
        return {**self._name(), "started": self.num_started(), "recent": recent}

    def wait_json(self, entry: Entry, now: int) -> dict[str, Any]:
        """An entry that is waited for, with the name of its line; seconds are those of waiting."""
        since = entry.waits or entry.started
        return {**self._name(), **entry.as_json(now), "seconds": (now - since) / 1e9}

    def _name(self) -> dict[str, Any]:
        # The whole of a group would be the most part of a report of thousands of ranks; two of them name it.
        return {"dimension": self.dimension, "ranks": [self.ranks[0], self.ranks[-1]], "way": self.way}


@dataclass
class Position:
    """Where in the schedule a rank is. The pipeline keeps it, so that collectives inside a stage can be labelled."""

    stage: int = -1
    micro_batch: int = -1


class LoggedDoing(NamedTuple):
    """A line of the action log about something that is no action. Times are nanoseconds, as those of actions.

    ``wait`` is the part of start to end spent waiting for other ranks, ``cpu`` the main thread's processor time.
    """

    doing: Doing
    start: int
    end: int
    wait: int
    cpu: int


class Recorder:
    """All lines of one rank, and its last actions.

    Args:
        marker: of the device, None where the host itself waits for the end of a collective.

    Attributes:
        position: where in the schedule the rank is.
        waited: nanoseconds that the main thread has spent waiting for other ranks so far.
    """

    def __init__(self, marker: Marker | None) -> None:
        self.position = Position()
        self.marker = marker
        self.waited = 0
        self._lines: list[Line] = []
        self._actions: deque[tuple[str, int, int, int]] = deque(maxlen=2 * KEPT)
        self._flushing = False
        self._doings: deque[LoggedDoing] = deque(maxlen=4 * KEPT)
        self._busy = False

    def line(self, dimension: str, ranks: Sequence[int], way: Way = "") -> Line:
        """A new line."""
        line = Line(self, dimension, ranks, way)
        self._lines.append(line)
        return line

    def action(self, kind: str) -> None:
        """Records that this rank begins an action of the schedule at its position."""
        here = self.position
        self._actions.append((kind, here.stage, here.micro_batch, time.monotonic_ns()))

    @contextmanager
    def flushing(self) -> Generator[None]:
        """While the main thread waits until another thread has sent everything."""
        self._flushing = True
        try:
            with self.doing(Doing.FLUSH):
                start = time.monotonic_ns()
                yield
                self.waited += time.monotonic_ns() - start
        finally:
            self._flushing = False

    @contextmanager
    def doing(self, doing: Doing) -> Generator[None]:
        """Logs something that is no action, unless it is a part of something that will be; names it in traces."""
        if self._busy:
            with _range(doing):
                yield
            return
        self._busy = True
        waited, cpu, start = self.waited, time.thread_time_ns(), time.monotonic_ns()
        try:
            with _range(doing):
                yield
        finally:
            self._busy = False
        end = time.monotonic_ns()
        self._doings.append(LoggedDoing(doing, start, end, self.waited - waited, time.thread_time_ns() - cpu))

    def take_doings(self) -> list[LoggedDoing]:
        """What was logged since this was called last; the newest, if that was long ago."""
        taken = [*self._doings]
        self._doings.clear()
        return taken

    def waits(self, now: int) -> list[dict[str, Any]]:
        """What this rank waits for: nothing, one collective or message, or all messages that it must get rid of."""
        open_entries = [(line, entry) for line in self._lines for entry in tuple(line.entries) if not entry.has_ended]
        if self._flushing:
            return [line.wait_json(entry, now) for line, entry in open_entries if line.way == "send"]
        # A thread that waits for sends does not hold up the main thread.
        waited = [(x, e) for x, e in open_entries if e.waits and (x.way != "send" or e.in_main_thread)]
        if not waited:
            return []
        # On a GPU the host may have run ahead and wait, by name, for many: the device stands at the first.
        line, entry = min(waited, key=lambda pair: pair[1].waits)
        return [line.wait_json(entry, now)] if entry.has_started else []

    def as_json(self) -> dict[str, Any]:
        """``waits``, ``lines`` and ``actions`` of a report, as docs/formats.md has them."""
        now = time.monotonic_ns()
        actions = [
            {"action": f"{stage}{kind}{'' if micro_batch < 0 else micro_batch}", "seconds": (now - began) / 1e9}
            for kind, stage, micro_batch, began in tuple(self._actions)
        ]
        lines = [line.as_json(now) for line in self._lines if line.count]
        return {"waits": self.waits(now), "lines": lines, "actions": actions}


def _range(doing: Doing) -> AbstractContextManager[Any]:
    return record_function(doing.range) if profiler_runs() else nullcontext()
