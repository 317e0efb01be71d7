"""What one device has held for one rank, as columns: every block, from when to when, and what for.

Whatever it was read from, a snapshot of PyTorch's allocator or a profiler's trace, is a list of events, numbered from
0. Bytes are counted before the first event and after each: n events make n + 1 numbers.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.reading.trace import UNKNOWN, Times

Bytes = NDArray[np.int64]
BEFORE = "before the recording began"
_NOT_YET = -2  # in a ledger


class Purpose(NamedTuple):
    """What a block was made for.

    Attributes:
        place: line of the program, collective or operator that asked for it.
        doing: what the rank was at, as "F of stage 3"; empty if unknown.
        micro_batch: UNKNOWN outside of one.
    """

    place: str
    doing: str = ""
    micro_batch: int = UNKNOWN


@dataclass(frozen=True)
class Blocks:
    """All that were there at some time. Columns of equal length."""

    address: NDArray[np.int64]
    size: Bytes
    begin: NDArray[np.int64]
    """Event that made it; UNKNOWN: it was there before."""
    end: NDArray[np.int64]
    """Event that freed it; the number of events: it was there in the end."""
    left: NDArray[np.int64]
    """Event with which the program gave it back: that of `end`, or an earlier one if another stream still used it;
    UNKNOWN: that was before."""
    purpose: NDArray[np.int64]
    """Index into `History.purposes`."""


@dataclass(frozen=True)
class Shortage:
    """A request that could not be met.

    Attributes:
        event: its number.
        requested: bytes.
        device_free: bytes that the device had left, outside of the allocator.
        largest: bytes of the largest piece that the allocator had free for it; UNKNOWN if that is not recorded.
        purpose: what asked.
        step: in which; UNKNOWN.
    """

    event: int
    requested: int
    device_free: int
    largest: int
    purpose: Purpose
    step: int = UNKNOWN


@dataclass(frozen=True)
class History:
    """One device, as one rank used it.

    Attributes:
        device: "cpu" or as "cuda:0".
        source: "snapshot" or "trace".
        is_whole: whether what was there before the first event is counted.
        time: nanoseconds of each event.
        step: number of the step that each event lies in; UNKNOWN outside of all.
        doing: what the rank was at, index into `doings`.
        reserved: bytes that the allocator had taken from the device, before the first event and after each; empty if
            unknown.
        steps: number of each step and when it began, in order.
        shortages: requests that were not met, in order.
        notes: what is wrong with the file, a sentence each.
    """

    path: Path
    rank: int
    device: str
    source: Literal["snapshot", "trace"]
    is_whole: bool
    time: Times = field(repr=False)
    step: NDArray[np.int64] = field(repr=False)
    doing: NDArray[np.int64] = field(repr=False)
    doings: tuple[str, ...] = field(repr=False)
    blocks: Blocks = field(repr=False)
    purposes: tuple[Purpose, ...] = field(repr=False)
    reserved: Bytes = field(repr=False)
    steps: tuple[tuple[int, int], ...] = ()
    shortages: tuple[Shortage, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_events(self) -> int:
        return len(self.time)

    def live(self) -> Bytes:
        """Bytes in blocks, before the first event and after each."""
        return _alive(self.blocks.size, self.blocks.begin, self.blocks.end, self.num_events)

    def waiting(self) -> Bytes:
        """The part of `live` that the program has given back, and that waits for other streams."""
        return _alive(self.blocks.size, self.blocks.left, self.blocks.end, self.num_events)

    def rows_at(self, point: int) -> NDArray[np.intp]:
        """The blocks that are alive after event `point` - 1, which is the moment that `live()[point]` counts."""
        return np.flatnonzero((self.blocks.begin < point) & (self.blocks.end >= point))


def _alive(size: Bytes, begin: NDArray[np.int64], end: NDArray[np.int64], num_events: int) -> Bytes:
    """Bytes of blocks from the event that made them to before the one that ends them [num_events + 1]."""
    change = np.zeros(num_events + 2, dtype=np.int64)
    np.add.at(change, begin + 1, size)
    np.add.at(change, np.minimum(end, num_events) + 1, -size)
    return np.cumsum(change[:-1])


class Ledger:
    """Writes down blocks as they are made, given back and freed, in the order of events."""

    def __init__(self) -> None:
        self.unseen: list[int] = []
        """Rows whose end was not recorded: another block was made where they were."""
        self._rows: list[list[int]] = []  # address, size, begin, end, left, purpose
        self._open: dict[int, int] = {}  # address -> row

    def made(self, event: int, address: int, size: int, purpose: int) -> None:
        """A block is alive from now on."""
        if address in self._open:
            self.unseen.append(self._open[address])
            self.freed(event, address, size, purpose)
        self._open[address] = len(self._rows)
        self._rows.append([address, size, event, _NOT_YET, _NOT_YET, purpose])

    def there_before(self, address: int, size: int, purpose: int, *, is_left: bool = False) -> None:
        """A block was made before the first event, and not freed. `is_left`: the program had given it back."""
        self.made(UNKNOWN, address, size, purpose)
        if is_left:
            self._rows[-1][4] = UNKNOWN

    def given_back(self, event: int, address: int, size: int, before: int) -> None:
        """The program needs a block no more. `before`: the purpose of one that nobody has seen being made."""
        row = self._open.get(address)
        if row is None:
            self.there_before(address, size, before)
            row = self._open[address]
        self._rows[row][4] = event

    def freed(self, event: int, address: int, size: int, before: int) -> None:
        """A block can be used for another."""
        if address not in self._open:
            self.there_before(address, size, before)
        row = self._open.pop(address)
        self._rows[row][3] = event
        if self._rows[row][4] == _NOT_YET:
            self._rows[row][4] = event

    @property
    def before(self) -> int:
        """Bytes of blocks that are known to have been there before the first event."""
        return sum(size for _, size, begin, *_ in self._rows if begin == UNKNOWN)

    @property
    def alive(self) -> Set[int]:
        """Addresses of what is alive now."""
        return self._open.keys()

    def blocks(self, num_events: int) -> Blocks:
        """All of them. What was not freed is alive until the end."""
        columns = np.array(self._rows, dtype=np.int64).reshape(-1, 6).T
        address, size, begin, end, left, purpose = columns
        end, left = (np.where(column == _NOT_YET, num_events, column) for column in (end, left))
        return Blocks(address, size, begin, end, left, purpose)
