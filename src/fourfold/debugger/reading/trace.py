"""What is known of one rank's steps, as columns, whatever file it was read from.

Times are whole nanoseconds of the rank's own clock, since an origin of its own: nothing here can be compared with
another rank's before their clocks are aligned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fourfold.layout import Grid

Times = NDArray[np.int64]
UNKNOWN = -1


class Work(IntEnum):
    """What a device computes: what its speed depends on."""

    GEMM = 0
    """Matrix products: the clock of the tensor cores."""
    ATTENTION = 1
    """Attention, the only work that depends on documents."""
    MEMORY = 2
    """All else: element-wise, norms, copies, optimizers. They wait for memory."""


class Call(IntEnum):
    """What a communication does."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_TO_ALL = 3
    BROADCAST = 4
    SEND = 5
    RECV = 6
    MESSAGE = 7
    """A send or a receive: the trace does not say which."""
    BARRIER = 8
    OTHER = 9


MESSAGES = (Call.SEND, Call.RECV, Call.MESSAGE)


class Host(IntEnum):
    """What a host is seen to do besides launching."""

    GARBAGE = 0
    LOADER = 1
    OPTIMIZER = 2


@dataclass(frozen=True)
class Group:
    """A process group, as a rank's trace describes it."""

    name: str
    """Unique in the job, if the trace says it; else made up of what is known, alike on all members."""
    description: str
    """Such as mesh_tp; empty if unknown."""
    size: int
    """Number of ranks; 0 if unknown."""
    ranks: tuple[int, ...] | None
    """Global ranks, ascending; None: not in the trace, or cut off there."""
    first: tuple[int, ...] = ()
    """The ranks before the cut."""


@dataclass(frozen=True)
class Steps:
    """The steps that were recorded, by the profiler's marks on the host; one without number (0) if there are none."""

    number: NDArray[np.int64]
    start: Times
    end: Times


@dataclass(frozen=True)
class Works:
    """What the device computed, in order of start. On a CPU the outermost operators, without communication in them."""

    start: Times
    end: Times
    step: NDArray[np.int32]
    """Index into `Steps`, by the launch where that is known; UNKNOWN outside of all."""
    kind: NDArray[np.int8]
    """`Work`."""
    name: NDArray[np.int32]
    """Index into the trace's `names`."""
    stream: NDArray[np.int32]
    launched: Times
    """When the host launched it; UNKNOWN where it does not say."""


@dataclass(frozen=True)
class Calls:
    """Communication of the rank, in order of start."""

    start: Times
    end: Times
    step: NDArray[np.int32]
    kind: NDArray[np.int8]
    """`Call`."""
    group: NDArray[np.int32]
    """Index into the trace's `groups`; UNKNOWN."""
    sequence: NDArray[np.int64]
    """As the trace counts it; UNKNOWN."""
    elements: NDArray[np.int64]
    """The larger of what goes in and what comes out; UNKNOWN."""
    itemsize: NDArray[np.int8]
    """Bytes of an element; 0 if unknown."""
    peer: NDArray[np.int32]
    """Of a message, the other rank; UNKNOWN."""
    stream: NDArray[np.int32]
    launched: Times
    blocks: NDArray[np.bool_]
    """Whether it is the host that waits in it, as with gloo on a CPU."""


@dataclass(frozen=True)
class Labels:
    """Ranges with a label of ours (`fourfold.layout.labels`), in order of start."""

    start: Times
    end: Times
    on_device: NDArray[np.bool_]
    dimension: tuple[str, ...]
    kind: tuple[str, ...]
    group: NDArray[np.int32]
    stage: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    sequence: NDArray[np.int64]


@dataclass(frozen=True)
class HostRanges:
    """What the host did besides launching."""

    start: Times
    end: Times
    kind: NDArray[np.int8]
    """`Host`."""


@dataclass(frozen=True)
class RankTrace:
    """One rank."""

    path: str
    rank: int
    world_size: int
    """0 if unknown."""
    device: Literal["gpu", "cpu"]
    origin: int
    """Nanoseconds of time 0 by the rank's own clock, which counts from 1970, or from when its machine was started."""
    host: str
    """Name or number of the machine whose clock this is, if it is known; else empty."""
    groups: tuple[Group, ...]
    names: tuple[str, ...] = field(repr=False)
    steps: Steps = field(repr=False)
    works: Works = field(repr=False)
    calls: Calls = field(repr=False)
    labels: Labels = field(repr=False)
    ranges: HostRanges = field(repr=False)
    grid: Grid | None = None
    """The layout, if the trace tells it."""
    shares: tuple[float, ...] = ()
    """Expected share of the work of each pipeline rank, if the trace tells it: sums to 1."""
    processor: tuple[int, ...] = ()
    """Of each step, nanoseconds of processor time of the main thread, if the trace tells them; UNKNOWN."""
    notes: tuple[str, ...] = ()
    """What is wrong with the file, or missing in it, a sentence each."""
