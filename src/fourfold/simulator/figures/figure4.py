"""Figure 4: how long gradients stay unsharded, and how often they are reduced, by schedule and ZeRO mode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.layout import compile_program, generate
from fourfold.planner.jobs import Jobs, Split
from fourfold.planner.search.exact import stages_of
from fourfold.simulator.figures.figure import Figure, Panel, Series
from fourfold.simulator.figures.small_scale import small_job, small_stack
from fourfold.simulator.live import Curve, step_memory

PP, V, ROUNDS = 4, 4, 2
MODES = {
    "1F1B, ZeRO-1": ("interleaved", 1),
    "AFAB, ZeRO-1": ("afab", 1),
    "AFAB, ZeRO-2": ("afab", 2),
    "1F1B, ZeRO-2": ("interleaved", 2),
}
PUBLISHED_REDUCTIONS = (V, V, V, V * ROUNDS)
PUBLISHED_ALIVE = (V, 1, 1, 1)
"""Chunks of unsharded gradients at once: all buffers overlap, or one chunk at a time."""
RANK = 1

ASSUMPTIONS = (
    "Drawn: 4 virtual stages per rank and two rounds of micro-batches. Not drawn: pp 4, so 4 micro-batches a round.",
    f"Pipeline rank {RANK} of equal stages, a layer each; a backward takes twice as long as a forward, messages and "
    "reductions no time.",
)


@dataclass(frozen=True)
class Lives:
    """One rank's unsharded gradients through a step."""

    reductions: int
    most: float  # chunks alive at once
    mean: float  # over the step
    first: dict[str, float]  # by chunk: share of the step until its gradients appear, in percent
    alive: dict[str, float]  # by chunk: share of the step in which they are there, in percent


def figure() -> Figure:
    """The figure, from the memory walk of each schedule."""
    job = small_job(layers=PP * V, pp=PP, v=V, dp=1, micro_batches=ROUNDS * PP, nc=PP, split=Split.EVEN)
    lives = {name: lives_of(job, kind, zero) for name, (kind, zero) in MODES.items()}

    def bars(title: str, unit: str, published: tuple[int, ...] | None, ours: dict[str, float]) -> Panel:
        shown = dict.fromkeys(ours) if published is None else dict(zip(ours, published, strict=True))
        return Panel(title, unit, "schedule and ZeRO mode", (Series(title, shown, ours),), reading_error=0.0)

    def by_chunk(title: str, ours: dict[str, dict[str, float]]) -> Panel:
        series = tuple(Series(name, dict.fromkeys(values), values) for name, values in ours.items())
        return Panel(title, "% of the step", "chunk", series, reading_error=0.0)

    return Figure(
        number="4",
        title="Lives of unsharded gradients",
        panels=(
            bars(
                "Reduce-scatters per step", "count", PUBLISHED_REDUCTIONS, {n: o.reductions for n, o in lives.items()}
            ),
            bars("Most chunks alive at once", "chunks", PUBLISHED_ALIVE, {n: o.most for n, o in lives.items()}),
            bars("Mean over the step", "chunks", None, {n: o.mean for n, o in lives.items()}),
            by_chunk("When a chunk's gradients appear", {n: o.first for n, o in lives.items()}),
            by_chunk("How long they are there", {n: o.alive for n, o in lives.items()}),
        ),
        assumptions=ASSUMPTIONS,
        differences=(),
    )


def lives_of(job: Jobs, kind: str, zero: int) -> Lives:
    """Of one schedule and ZeRO mode."""
    schedule = generate(pp=PP, v=V, num_micro_batches=ROUNDS * PP, kind=kind, zero=zero, messages=False)
    timeline = compile_program(schedule).play()
    memory = step_memory(job.replace(zero=zero), timeline, stages_of(job), small_stack())
    curve = memory.gradient_curve(RANK)
    there = curve.bytes > 0
    seconds = _until_next(curve, timeline.step_time)
    alive = there @ seconds / timeline.step_time
    first = [curve.times[chunk.argmax()] / timeline.step_time for chunk in there]
    return Lives(
        reductions=schedule.reduce_scatters[RANK],
        most=float(there.sum(axis=0).max()),
        mean=float(alive.sum()),
        first={str(chunk): 100 * float(share) for chunk, share in enumerate(first)},
        alive={str(chunk): 100 * float(share) for chunk, share in enumerate(alive)},
    )


def _until_next(curve: Curve, end: float) -> np.ndarray:
    """How long each step of a curve lasts."""
    return np.diff(np.append(curve.times, end))
