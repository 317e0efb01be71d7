"""Idle time of the real pipeline executor against the plan, with computation replaced by sleeping.

Four pipeline ranks run :class:`fourfold.parallel.pipeline.Pipeline` with real gloo messages. A stage's forward sleeps
30 ms and its backward 60 ms, or each half of one 30 ms: that needs no core, so two of them do for four ranks, and what
is measured is the order of the actions and the executor's own overhead. The idle share is the part of a step, over all
ranks, in which they do not compute: measured from the executor's action log, and planned by
:func:`fourfold.layout.play` with the same durations, in which messages take no time.

Exits with 1 if the two differ by more than the bar for any schedule.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fourfold.layout import Grid, Schedule, generate, play
from fourfold.layout.actions import COMPUTE
from fourfold.model import Batch
from fourfold.parallel import LoggedAction, connect
from fourfold.parallel.batch import LocalBatch
from fourfold.parallel.groups import Pending
from fourfold.parallel.halves import Half, WeightHalves, run_halves
from fourfold.parallel.pipeline import Pipeline
from fourfold.trainer.ranks import fork_ranks

BAR = 5.0  # points of the step
FORWARD, BACKWARD = 0.030, 0.060  # seconds
WIDTH, TOKENS = 256, 256

SCHEDULES = {
    "1f1b, pp4, 8 micro-batches": generate(pp=4, num_micro_batches=8, kind="1f1b"),
    "interleaved, pp4 v2, 8 micro-batches": generate(pp=4, v=2, num_micro_batches=8, kind="interleaved"),
    "flexible, pp4 v2, 9 micro-batches": generate(pp=4, v=2, num_micro_batches=9, kind="flexible"),
    "zb-h1, pp4, 8 micro-batches": generate(pp=4, num_micro_batches=8, kind="zb-h1"),
}


class Sleep(Function):
    """The identity, slowly, with a weight that does nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, halves: WeightHalves) -> Tensor:
        ctx.weight, ctx.halves = weight, halves
        time.sleep(FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        zero = torch.zeros_like(ctx.weight)

        def make(gathered: Tensor) -> list[Tensor]:
            time.sleep(BACKWARD / 2)
            return [gathered]

        if ctx.halves.put_off:
            ctx.halves.put(Half([ctx.weight], lambda: Pending(zero, None, None), make))
            time.sleep(BACKWARD / 2)
        else:
            time.sleep(BACKWARD)
        return grads[0], None, None


class SleepingLayers(nn.Module):
    """Takes the place of a stage's model, from tokens in the first stage to a loss in the last."""

    def __init__(self, halves: WeightHalves, *, first: bool, last: bool) -> None:
        super().__init__()
        self.halves, self.first, self.last = halves, first, last
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.first:
            x = torch.zeros(batch.tokens.shape[0], WIDTH, requires_grad=True)
        x = Sleep.apply(x, self.weight, self.halves)
        return x.sum() if self.last else x


class SleepingStage:
    """Takes the place of a ``ShardedStage``: there are no weights to share, so its FSDP events do nothing."""

    def __init__(self, schedule: Schedule, stage: int) -> None:
        self.halves = WeightHalves()
        self.module = SleepingLayers(self.halves, first=stage == 0, last=stage == schedule.num_stages - 1)

    def add_gradients(self, kept: list[Half]) -> None:
        run_halves(kept, lambda: None)

    def gather(self) -> None: ...

    def reduce(self) -> None: ...

    def free(self) -> None: ...


def run_rank(schedule: Schedule, num_steps: int) -> list[tuple[LoggedAction, ...]]:
    """One rank: the action logs of some steps, after one for warming up."""
    groups = connect(Grid(pp=schedule.pp), "cpu")
    stages = {
        stage: SleepingStage(schedule, stage) for stage in range(groups.pp.rank, schedule.num_stages, schedule.pp)
    }
    pipeline = Pipeline(stages, groups, width=WIDTH, dtype=torch.float32)  # type: ignore[arg-type]
    rows = [[TOKENS]]
    batch = Batch.from_rows(torch.zeros(TOKENS, dtype=torch.int64), rows)
    batches = [LocalBatch.of(batch, rows, cp=1, cp_rank=0, tp=1, cp_split="head_tail")] * schedule.num_micro_batches
    logs = []
    for _ in range(num_steps + 1):
        groups.barrier()
        logs.append(pipeline.step(schedule, batches, gradient_scale=1.0).log)
    return logs[1:]


def idle_share(logs: Sequence[Sequence[LoggedAction]]) -> float:
    """Of one step, from the logs of all ranks: the clock is the machine's, so their times can be compared."""
    start = min(log[0].start for log in logs)
    step = max(log[-1].end for log in logs) - start
    compute = sum(entry.end - entry.start - entry.wait for log in logs for entry in log if entry.action.kind in COMPUTE)
    return 1 - compute / (step * len(logs))


@dataclass(frozen=True)
class Comparison:
    """Idle shares of the step in percent, over all ranks; ``difference`` is measured less planned, in points."""

    schedule: str
    planned: float
    measured: float
    difference: float
    step_seconds: tuple[float, float]  # planned, measured


def compare(name: str, schedule: Schedule, num_steps: int) -> Comparison:
    """Runs a schedule and plays it; of the measured steps the median counts."""
    plan = play(schedule, forward=FORWARD, backward=BACKWARD)
    by_rank = fork_ranks(schedule.pp, lambda rank: run_rank(schedule, num_steps))
    steps = list(zip(*by_rank, strict=True))
    seconds = [(max(log[-1].end for log in logs) - min(log[0].start for log in logs)) / 1e9 for logs in steps]
    planned, measured = 100 * plan.bubble_over_total, 100 * median(map(idle_share, steps))
    return Comparison(name, planned, measured, measured - planned, (plan.step_time, median(seconds)))


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each schedule (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    rows = [compare(name, schedule, options.steps) for name, schedule in SCHEDULES.items()]
    if options.json:
        print(json.dumps({"bar": BAR, "schedules": [asdict(row) for row in rows]}))
    else:
        print(f"{'idle share of the step':38} planned  measured  difference    step (planned)")
        for row in rows:
            times = f"{row.step_seconds[1]:.3f} s ({row.step_seconds[0]:.3f} s)"
            print(
                f"{row.schedule:38} {row.planned:6.1f}%   {row.measured:6.1f}%  {row.difference:+6.1f} points  {times}"
            )
        print(f"bar: within {BAR:.0f} points")
    return 0 if all(abs(row.difference) <= BAR for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
