"""Operation tables of jobs that never ran, played worker by worker: an oracle of its own for the analysis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from fourfold.layout import Kind, generate

LATENCY = 0.002
GATHER, REDUCE, NORM, OPTIMIZER = 0.03, 0.05, 0.01, 0.02
FORWARD = 0.1

Took = Callable[[int, int, int, int, int], float]
"""Seconds of a computation, forward for 0 and backward for 1, of (dp, stage, virtual stage, micro-batch)."""


class Job:
    """A job's sizes, and how long things took in it.

    Attributes:
        factor: of a forward and its backward, by (step, dp, stage, virtual stage, micro-batch).
    """

    def __init__(
        self,
        *,
        dp: int = 4,
        pp: int = 4,
        v: int = 1,
        micro_batches: int = 8,
        steps: int = 3,
        jitter: float = 0.01,
        factor: Callable[..., float] = lambda step, dp, stage, virtual, micro_batch: 1.0,
    ) -> None:
        self.dp, self.pp, self.v, self.micro_batches, self.steps = dp, pp, v, micro_batches, steps
        self.factor, self.jitter = factor, jitter
        self.random = np.random.default_rng(7)
        self.seconds: dict[tuple[Any, ...], float] = {}

    def took(self, name: str, step: int, dp: int, stage: int, virtual: int, micro_batch: int) -> float:
        key = name, step, dp, stage, virtual, micro_batch
        if key not in self.seconds:
            noise = 1 + self.jitter * float(np.clip(self.random.standard_normal(), -3, 3))
            base = FORWARD * (2 if name == "backward-compute" else 1) / self.v
            self.seconds[key] = base * noise * self.factor(step, dp, stage, virtual, micro_batch)
        return self.seconds[key]

    def rows(self) -> list[dict[str, Any]]:
        """The table."""
        out: list[dict[str, Any]] = []
        for step in range(self.steps):
            out += self._step(step)
        return out

    def step_seconds(self) -> np.ndarray:
        """Of each step."""
        rows = self.rows()
        return np.array([max(r["start_ts"] + r["duration"] for r in rows if r["step"] == s) for s in range(self.steps)])

    def _step(self, step: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []

        def add(name: str, dp: int, stage: int, start: float, end: float, **more: int) -> None:
            number = sum(1 for r in rows if (r["optype"], r["dp_rank"], r["stage"]) == (name, dp, stage))
            where = {"dp_rank": dp, "stage": stage, "rank": stage * self.dp + dp, "step": step, "optype": name}
            what = {"start_ts": start, "duration": end - start, "seq_id": number, "mc": -1, "mb_id": -1, "gmc": -1}
            rows.append(where | what | more)

        done: dict[tuple[int, int], float] = {}
        for dp in range(self.dp):
            for stage in range(self.pp):
                add("params-all-gather", dp, stage, 0.0, GATHER, mc=0)
            for stage, end in enumerate(self._pipeline(step, dp, add)):
                done[dp, stage] = end
        reduced = {}
        for stage in range(self.pp):
            last = max(done[dp, stage] for dp in range(self.dp))
            for dp in range(self.dp):
                reduced[dp, stage] = last + REDUCE
                add("grads-reduce-scatter", dp, stage, done[dp, stage], last + REDUCE, mc=0)
        over = max(reduced.values()) + NORM
        for (dp, stage), start in reduced.items():
            add("optimizer-clip-main-grad", dp, stage, start, over)
            add("optimizer", dp, stage, over, over + OPTIMIZER)
        return rows

    def _pipeline(self, step: int, dp: int, add: Callable[..., None]) -> list[float]:
        """One replica. When each stage has ended."""
        kind = "1f1b" if self.v == 1 else "interleaved"
        schedule = generate(pp=self.pp, v=self.v, num_micro_batches=self.micro_batches, kind=kind, messages=False)
        lists = [[a for a in actions if a.kind in (Kind.FORWARD, Kind.BACKWARD)] for actions in schedule.actions]
        end: dict[tuple[Kind, int, int], float] = {}
        clock, at = [GATHER] * self.pp, [0] * self.pp
        # Of each direction: when the receive can be posted, and when the send and the receive before have ended.
        posted: dict[tuple[Kind, int], float] = {}
        line: dict[tuple[str, int], float] = {}
        while any(at[stage] < len(lists[stage]) for stage in range(self.pp)):
            for stage in range(self.pp):
                if at[stage] == len(lists[stage]):
                    continue
                kind, virtual, micro_batch = lists[stage][at[stage]]
                forward = kind is Kind.FORWARD
                way, other = ("forward", virtual - 1) if forward else ("backward", virtual + 1)
                first = not 0 <= other < self.pp * self.v
                if not first and (kind, other, micro_batch) not in end:
                    continue
                begin = clock[stage]
                if not first:
                    sender = other % self.pp
                    sent = max(end[kind, other, micro_batch], line.get((way + "-send", sender), 0.0))
                    begun = max(posted.get((kind, stage), 0.0), line.get((way + "-recv", stage), 0.0))
                    arrived = max(sent, begun) + LATENCY
                    add(way + "-send", dp, sender, sent, arrived)
                    add(way + "-recv", dp, stage, begun, arrived)
                    line[way + "-send", sender] = line[way + "-recv", stage] = arrived
                    begin = max(begin, arrived)
                name = way + "-compute"
                clock[stage] = begin + self.took(name, step, dp, stage, virtual, micro_batch)
                end[kind, virtual, micro_batch] = clock[stage]
                more = {"mc": virtual // self.pp, "gmc": virtual, "mb_id": micro_batch}
                add(name, dp, stage, begin, clock[stage], **more)
                if not first:
                    posted[kind, stage] = clock[stage]
                at[stage] += 1
        return clock


def write(path: Path, rows: list[dict[str, Any]], *, without: tuple[str, ...] = ()) -> Path:
    """As Parquet."""
    names = [name for name in rows[0] if name not in without]
    pyarrow.parquet.write_table(pyarrow.table({name: [row[name] for row in rows] for name in names}), path)
    return path
