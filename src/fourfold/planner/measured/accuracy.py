"""Predictions against measured runs: what `fourfold accuracy` reports, for the project's own tables or any other.

Half of the configurations may be calibrated on (`rows.is_calibration`), and accuracy is reported on the other. That is
so of times. What saved sets say was chosen with a look at all rows with memory, and all are reported: those figures
are in sample. measurements/README.md has one that is not. `scores` defines the figures.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fourfold.planner.jobs import Precision
from fourfold.planner.measured.memory_accuracy import (
    FitScore,
    MemoryScore,
    PeakPrediction,
    predict_peaks,
    predict_ranks,
    score_fits,
    score_memory,
    with_outcome,
)
from fourfold.planner.measured.rows import Measured, MeasuredRow, by_stack, is_calibration
from fourfold.planner.measured.scores import Score, kendall_tau, regret_percent, score
from fourfold.planner.measured.tables import MEASUREMENTS, read
from fourfold.planner.timing.stack import Stack, load_stack
from fourfold.planner.timing.step import step_time

Half = Literal["reported", "calibrated", "both"]

SHIPPED = tuple(
    f"{name}.csv"
    for name in ("published", "a100_steps_multi_node", "a100_steps_one_node", "out_of_memory", "b200_rank_memory")
)
LEAST_LAYOUTS = 5
"""With fewer, an order of layouts says little."""

_LAYOUT = ("tp", "cp", "pp", "dp", "v", "nc", "micro_batch", "order", "split", "zero", "shards", "sequence_parallel",
           "recompute", "recomputed_layers")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """One measured run and what was predicted for it."""

    id: str
    source: str
    table: str  # kind of the table
    quality: str
    stack: str
    precision: str
    gpu: str
    gpus: int
    predicted_seconds: float
    measured_seconds: float
    low_seconds: float
    high_seconds: float
    half: str
    setting: str
    layout: tuple[float, ...]
    bits: int  # 16 or 32, 8 or 4 of the matrix products

    @property
    def error_percent(self) -> float:
        """Positive where the prediction is too slow."""
        return 100 * (self.predicted_seconds / self.measured_seconds - 1)


@dataclass(frozen=True, slots=True)
class LayoutGroup:
    """Layouts of one model, cluster, batch and software, in competition."""

    setting: str
    table: str
    rows: int
    layouts: int
    kendall_tau: float
    regret_percent: float


@dataclass(frozen=True, slots=True)
class Bar:
    """What must be shown, and what is."""

    name: str
    value: float | None
    limit: str
    ok: bool | None  # None: nothing was measured


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Everything that `fourfold accuracy` knows."""

    half: Half
    sets: dict[str, Score]  # bar_rows, fp8, all_dense_A, other_dense, a100_multi_node, a100_one_node
    sources: dict[str, Score]
    groups: tuple[LayoutGroup, ...]
    rank_memory: MemoryScore
    peak_memory: MemoryScore
    fits: FitScore
    rows: tuple[Prediction, ...]
    peaks: tuple[PeakPrediction, ...]
    unscored: dict[str, int]  # by reason
    bars: tuple[Bar, ...]
    memory_in_sample: bool = False  # the saved sets were chosen on these rows


def score_tables(
    paths: Sequence[str | Path] | None = None, *, half: Half | None = None, stacks: Callable[[str], Stack] = load_stack
) -> Accuracy:
    """Predict every run of these tables and compare.

    Args:
        paths: tables of any kind that `measured.read` knows; None: those of the project.
        half: of the rows with times; by default the reported half of the project's tables and both of others.
        stacks: where the constants of a stack come from.
    """
    half = half or ("both" if paths else "reported")
    tables = [read(path) for path in paths or [MEASUREMENTS / name for name in SHIPPED]]
    timed = [(table, row) for table in tables for row in table.rows if row.seconds is not None]
    chosen = [(table, row) for table, row in timed if table.kind != "rank_memory" and _in_half(row, half)]
    rows = predict([row for _, row in chosen], kinds=[table.kind for table, _ in chosen], stacks=stacks)
    sets = {name: _score([row for row in rows if belongs(row)]) for name, belongs in SETS.items()}
    groups = _groups(rows)
    rank_peaks = predict_ranks([row for table in tables for row in table.rows if row.rank_bytes], stacks)
    peaks = predict_peaks([row for table in tables if table.kind == "published" for row in table.rows], stacks)
    rank_memory, peak = score_memory(rank_peaks), score_memory(peaks)
    fits = score_fits(with_outcome(tables), stacks)
    # Of any file outside of this package nothing was known when the saved sets were chosen.
    in_sample = not paths or any(Path(path).resolve().parent == Path(str(MEASUREMENTS)).resolve() for path in paths)
    return Accuracy(
        half=half,
        sets=sets,
        sources={name: _score(found) for name, found in _by_source(rows).items()},
        groups=groups,
        rank_memory=rank_memory,
        peak_memory=peak,
        fits=fits,
        rows=tuple(rows),
        peaks=(*rank_peaks, *peaks),
        unscored=dict(_unscored(tables, half).most_common()),
        bars=_bars(sets, groups, rank_memory=rank_memory, peak=peak, fits=fits, in_sample=in_sample),
        memory_in_sample=in_sample,
    )


def predict(
    rows: Sequence[MeasuredRow], *, kinds: Sequence[str], stacks: Callable[[str], Stack] = load_stack
) -> list[Prediction]:
    """Seconds per step of these runs, each under its own stack, in order."""
    predicted = np.zeros(len(rows))
    bands = np.ones((len(rows), 2))
    for stack, indices, jobs in by_stack(rows, stacks):
        predicted[indices] = np.broadcast_to(step_time(jobs, stack).seconds, (len(indices),))
        bands[indices] = [
            stack.band_on(chip, Precision(number)) for chip, number in zip(jobs.chip, jobs.precision, strict=True)
        ]
    return [
        Prediction(
            id=row.id,
            source=row.source,
            table=kind,
            quality=row.quality,
            stack=row.stack,
            precision=row.precision,
            gpu=row.gpu,
            gpus=int(row.columns["tp"] * row.columns["cp"] * row.columns["pp"] * row.columns["dp"]),
            predicted_seconds=float(seconds),
            measured_seconds=float(row.seconds or 0.0),
            low_seconds=float(seconds * low),
            high_seconds=float(seconds * high),
            half="calibrated" if is_calibration(row.group) else "reported",
            setting=row.setting,
            layout=tuple(float(row.columns[name]) for name in _LAYOUT),
            bits=Precision(row.columns["precision"]).bits,
        )
        for row, kind, seconds, (low, high) in zip(rows, kinds, predicted, bands, strict=True)
    ]


def accuracy_json(accuracy: Accuracy) -> dict[str, Any]:
    """The object that `fourfold accuracy --json` prints; docs/formats.md explains its keys."""
    in_sample = {"in_sample": accuracy.memory_in_sample}
    return {
        "half": accuracy.half,
        **{name: asdict(found) for name, found in accuracy.sets.items()},
        "sources": {name: asdict(found) for name, found in accuracy.sources.items()},
        "groups": [asdict(group) for group in accuracy.groups],
        "memory": {
            "rank_memory": asdict(accuracy.rank_memory) | in_sample,
            "peak_memory": asdict(accuracy.peak_memory) | in_sample,
            "fits": asdict(accuracy.fits) | in_sample,
            "rows": [asdict(peak) for peak in accuracy.peaks],
        },
        "bars": [asdict(bar) for bar in accuracy.bars],
        "rows": [
            {key: value for key, value in asdict(row).items() if key not in ("layout", "bits")}
            | {"error_percent": row.error_percent}
            for row in accuracy.rows
        ],
        "unscored": accuracy.unscored,
    }


# --- Sets of rows ---


def _dense_a(row: Prediction) -> bool:
    return row.table == "published" and row.quality == "A"


def _bar_row(row: Prediction) -> bool:
    named = any(name in row.gpu.upper() for name in ("A100", "H100"))
    return _dense_a(row) and row.bits == 16 and named and row.gpus >= 8


SETS: dict[str, Callable[[Prediction], bool]] = {
    "bar_rows": _bar_row,
    "fp8": lambda row: _dense_a(row) and row.bits == 8,
    "all_dense_A": _dense_a,
    "other_dense": lambda row: row.table == "published" and row.quality != "A",
    "a100_multi_node": lambda row: row.table == "a100_multi_node",
    "a100_one_node": lambda row: row.table == "a100_one_node",
}
"""bar_rows: quality A, 16 bits, A100 or H100, 8 GPUs and more. Mixtures of experts are in none of the sets."""


def _in_half(row: MeasuredRow, half: Half) -> bool:
    return half == "both" or is_calibration(row.group) == (half == "calibrated")


def _by_source(rows: Iterable[Prediction]) -> dict[str, list[Prediction]]:
    """Rows of quality A, and those of tables that do not grade theirs, by source."""
    found: dict[str, list[Prediction]] = defaultdict(list)
    for row in rows:
        if row.quality in ("A", ""):
            found[row.source].append(row)
    return dict(sorted(found.items()))


def _score(rows: Sequence[Prediction]) -> Score:
    return score(
        [row.predicted_seconds for row in rows],
        [row.measured_seconds for row in rows],
        band=([row.low_seconds for row in rows], [row.high_seconds for row in rows]),
        sources=[row.source for row in rows],
    )


def _groups(rows: Iterable[Prediction]) -> tuple[LayoutGroup, ...]:
    by_setting: dict[tuple[str, str], list[Prediction]] = defaultdict(list)
    for row in rows:
        by_setting[row.table, row.setting].append(row)
    groups = []
    for (table, setting), found in by_setting.items():
        layouts = len({row.layout for row in found})
        if layouts >= LEAST_LAYOUTS:
            predicted = [row.predicted_seconds for row in found]
            measured = [row.measured_seconds for row in found]
            tau, regret = kendall_tau(predicted, measured), regret_percent(predicted, measured)
            groups.append(LayoutGroup(setting, table, len(found), layouts, tau, regret))
    return tuple(groups)


def _unscored(tables: Iterable[Measured], half: Half) -> Counter[str]:
    """Rows that are in no figure, by reason."""
    reasons = Counter(row.reason for table in tables for row in table.unscored)
    if half != "both":
        other = "calibrated" if half == "reported" else "reported"
        left_out = sum(
            not _in_half(row, half)
            for table in tables
            if table.kind != "rank_memory"
            for row in table.rows
            if row.seconds is not None
        )
        reasons[f"in the {other} half"] += left_out
    return reasons


# --- Bars ---


def _bars(
    sets: dict[str, Score],
    groups: Sequence[LayoutGroup],
    *,
    rank_memory: MemoryScore,
    peak: MemoryScore,
    fits: FitScore,
    in_sample: bool,
) -> tuple[Bar, ...]:
    """What the planner must show. Bars of memory say so where the saved sets were chosen on the same rows."""
    seen = ", in sample" if in_sample else ""
    bar_rows, everything, multi = sets["bar_rows"], sets["all_dense_A"], sets["a100_multi_node"]
    of_multi = [group for group in groups if group.table == "a100_multi_node"]
    tau = min((group.kendall_tau for group in of_multi), default=None)
    regret = max((group.regret_percent for group in of_multi), default=None)
    return (
        _at_most("bar_rows MAPE %", bar_rows.mape_percent, 8),
        _at_most("bar_rows macro MAPE %", bar_rows.macro_mape_percent, 10),
        _at_most("fp8 MAPE %", sets["fp8"].mape_percent, 12),
        _at_most("all_dense_A MAPE %", everything.mape_percent, 12),
        _between("all_dense_A in band %", everything.in_band_percent, 85, 95),
        _at_most("a100_multi_node MAPE %", multi.mape_percent, 9),
        _at_least("a100_multi_node least tau", tau, 0.7),
        _at_most("a100_multi_node largest regret %", regret, 1),
        _at_most("a100_one_node MAPE %", sets["a100_one_node"].mape_percent, 15),
        _at_most(f"rank memory MAPE %{seen}", rank_memory.mape_percent, 1),
        _at_most(f"rank memory largest error %{seen}", rank_memory.max_error_percent, 2),
        _at_most(f"rank memory too low by %{seen}", rank_memory.max_low_percent, 1),
        _at_least(f"fits or not, right %{seen}", fits.right_percent, 95),
        _at_most(f"peak memory MAPE %{seen}", peak.mape_percent, 8),
    )


def _at_most(name: str, value: float | None, limit: float) -> Bar:
    return Bar(name, value, f"<= {limit:g}", None if value is None else value <= limit)


def _at_least(name: str, value: float | None, limit: float) -> Bar:
    return Bar(name, value, f">= {limit:g}", None if value is None else value >= limit)


def _between(name: str, value: float | None, low: float, high: float) -> Bar:
    return Bar(name, value, f"{low:g}-{high:g}", None if value is None else low <= value <= high)
