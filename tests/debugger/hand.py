"""Traces whose times are written down by hand, in whole milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fourfold.debugger.reading.trace import (
    UNKNOWN,
    Call,
    Calls,
    Group,
    HostRanges,
    Labels,
    RankTrace,
    Steps,
    Work,
    Works,
)
from fourfold.layout import Grid

MS = 1_000_000


class Met(NamedTuple):
    """A call of one rank. A collective names its group; a message the other rank."""

    start: int
    end: int
    kind: Call
    ranks: tuple[int, ...]
    sequence: int
    peer: int = UNKNOWN


class Did(NamedTuple):
    """A labelled computation."""

    kind: str
    stage: int
    micro_batch: int
    start: int
    end: int


def trace(
    rank: int,
    grid: Grid,
    *,
    end: int,
    works: Sequence[tuple[int, int]],
    calls: Sequence[Met] = (),
    labels: Sequence[Did] = (),
    garbage: Sequence[tuple[int, int]] = (),
    skew: int = 0,
    start: int = 0,
) -> RankTrace:
    """One step of a rank from `start` to `end`. `skew`: its clock is ahead by so much."""
    groups = [*dict.fromkeys(call.ranks for call in calls)]
    calls = sorted(calls)

    def times(values: Sequence[int]) -> np.ndarray:
        return (np.array(values, dtype=np.int64) + skew) * MS

    def column(values: Sequence[int], dtype: type = np.int32) -> np.ndarray:
        return np.array(values, dtype=dtype)

    zeros, no_calls = [0] * len(works), [0] * len(calls)
    return RankTrace(
        path=f"rank-{rank}.json",
        rank=rank,
        world_size=grid.size,
        device="gpu",
        origin=0,
        host="",
        groups=tuple(Group(str(i), "", len(ranks), ranks) for i, ranks in enumerate(groups)),
        names=("gemm",),
        steps=Steps(np.array([7]), times([start]), times([end])),
        works=Works(
            times([first for first, _ in works]),
            times([last for _, last in works]),
            column(zeros),
            column([Work.GEMM] * len(works), np.int8),
            column(zeros),
            column(zeros),
            times([first for first, _ in works]),
        ),
        calls=Calls(
            times([call.start for call in calls]),
            times([call.end for call in calls]),
            column(no_calls),
            column([call.kind for call in calls], np.int8),
            column([groups.index(call.ranks) for call in calls]),
            column([call.sequence for call in calls], np.int64),
            column([1024] * len(calls), np.int64),
            column([2] * len(calls), np.int8),
            column([call.peer for call in calls]),
            column([groups.index(call.ranks) for call in calls]),
            times([call.start for call in calls]),
            np.zeros(len(calls), dtype=bool),
        ),
        labels=Labels(
            times([label.start for label in labels]),
            times([label.end for label in labels]),
            np.ones(len(labels), dtype=bool),
            ("pp",) * len(labels),
            tuple(label.kind for label in labels),
            column([rank] * len(labels)),
            column([label.stage for label in labels]),
            column([label.micro_batch for label in labels]),
            column(range(len(labels)), np.int64),
        ),
        ranges=HostRanges(
            times([first for first, _ in garbage]),
            times([last for _, last in garbage]),
            np.zeros(len(garbage), dtype=np.int8),
        ),
        grid=grid,
    )


def pipeline(*, skew: int = 0, garbage: bool = False) -> list[RankTrace]:
    """tp 2, pp 2: rank 1 computes 40 ms or, if it collects garbage, 10 ms after 30 of that; rank 0 10 ms. Then they
    meet in TP, and send to ranks 2 and 3, which have waited from the start. All end together in a collective of 2 ms.

    ms       0        10                 40  41   42         52  54
    rank 0   compute  tp, waits          |   send
    rank 1   compute ...                 tp  send
    rank 2   waits for rank 0                     compute    end
    rank 3   waits for rank 1                     compute    end
    """
    grid = Grid(tp=2, pp=2)
    everybody = (0, 1, 2, 3)

    def last(start: int) -> Met:
        return Met(start, 54, Call.ALL_REDUCE, everybody, 1)

    slow = [(30, 40)] if garbage else [(0, 40)]
    out = []
    for rank, works, came in ((0, [(0, 10)], 10), (1, slow, 40)):
        tp = Met(came, 41, Call.ALL_REDUCE, (0, 1), 1)
        send = Met(41, 42, Call.SEND, (rank, rank + 2), 1, rank + 2)
        paused = [(0, 30)] if garbage and rank == 1 else []
        out.append(
            trace(
                rank,
                grid,
                end=54,
                works=works,
                calls=[tp, send, last(42)],
                labels=[Did("F", 0, 0, 0, 41)],
                garbage=paused,
                skew=skew * rank,
            )
        )
    for rank in (2, 3):
        receive = Met(0, 42, Call.RECV, (rank - 2, rank), 1, rank - 2)
        labels = [Did("F", 1, 0, 42, 52)]
        calls = [receive, last(52)]
        out.append(trace(rank, grid, end=54, works=[(42, 52)], calls=calls, labels=labels, skew=skew * rank))
    return out


def replicas() -> list[RankTrace]:
    """tp 2, dp 2: rank 1 loses 30 ms in the beginning, for which rank 0 waits; then all have 50 ms to compute, and rank
    2, which has lost nothing, waits for rank 0 while that computes.

    ms       0        10          40          90 91
    rank 0   compute  tp, waits   compute     dp
    rank 1   compute ...          compute     dp
    rank 2   compute  compute           dp, waits
    """
    grid = Grid(tp=2, dp=2)
    out = []
    for rank in range(4):
        first = rank == 1
        begun = 40 if rank < 2 else 10
        tp_group = (0, 1) if rank < 2 else (2, 3)
        dp_group = (rank % 2, rank % 2 + 2)
        tp = Met(40 if first else 10, begun, Call.ALL_GATHER, tp_group, 1)
        dp = Met(begun + 50, 91, Call.REDUCE_SCATTER, dp_group, 1)
        works = [(0, 40 if first else 10), (begun, begun + 50)]
        out.append(trace(rank, grid, end=91, works=works, calls=[tp, dp]))
    return out
