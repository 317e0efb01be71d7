"""Tables of a simulated step, which pages and terminals show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fourfold.report import drawing
from fourfold.report.simulation.measures import means, own_computing
from fourfold.report.simulation.words import CLASS_WORDS, PATH_WORDS, column, grouped
from fourfold.report.text import format_bytes, percent
from fourfold.simulator.causes import PHASES, idle_by_phase
from fourfold.simulator.critical import CriticalPath
from fourfold.simulator.live import StepMemory
from fourfold.simulator.played import Played
from fourfold.simulator.whatif import Gain


def time_table(played: Played, path: CriticalPath) -> drawing.Table:
    """The mean rank's step and the critical path by what they go to, side by side. Each sums to the step."""
    spent, on_path, step = means(played), path.by_class, played.step_seconds
    order = [*CLASS_WORDS, *(name for name in PATH_WORDS if name not in CLASS_WORDS)]
    names = [name for name in order if spent.get(name, 0.0) > 0 or on_path.get(name, 0.0) > 0]
    words = [(CLASS_WORDS | PATH_WORDS)[name] for name in names]
    cells = []
    for one in (spent, on_path):
        seconds = [one.get(name, 0.0) for name in names]
        cells += [column(seconds), [percent(value / step) for value in seconds]]
    return drawing.Table(
        title="Where the time goes: mean of all ranks, and the critical path",
        columns=("part", "mean", "share", "critical path", "share"),
        rows=tuple(zip(words, *cells, strict=True)),
    )


def what_if_table(gains: Sequence[Gain]) -> drawing.Table:
    """What would help, most first."""
    seconds = column([*(gain.step_seconds for gain in gains), *(gain.seconds for gain in gains)])
    steps, shorter = seconds[: len(gains)], seconds[len(gains) :]
    return drawing.Table(
        title="What would help",
        columns=("if", "the step would take", "shorter by", "share of the step"),
        rows=tuple(
            (gain.condition, after, less, percent(gain.share))
            for gain, after, less in zip(gains, steps, shorter, strict=True)
        ),
        note="Each line is the step played again with this one thing otherwise; gains do not add up.",
    )


def pipeline_table(played: Played, path: CriticalPath, *, memory: StepMemory | None = None) -> drawing.Table:
    """Every pipeline rank: the mean of its replicas. Equal neighbours share a row."""
    seconds = np.concatenate([own_computing(played).mean(axis=(0, 2, 3))[None], idle_by_phase(played)])
    cells = np.array(column(seconds.ravel().tolist()), dtype=object).reshape(seconds.shape)
    peaks = () if memory is None else ([format_bytes(peak.total) for peak in memory.peaks],)
    rows = zip(*cells.tolist(), map(percent, path.by_pipeline_rank), *peaks, strict=True)
    return drawing.Table(
        title="Pipeline ranks (means of their replicas)",
        columns=(
            *("pp rank", "computes", *(f"bubble: {PHASES[0]}", *PHASES[1:]), "of the critical path"),
            *(["peak memory"] if memory is not None else []),
        ),
        rows=tuple(grouped(rows)),
        note="Computes: without transfers. Warm-up: before a rank's first backward. Steady state: from there to its "
        "last forward. Cool-down: after both.",
    )
