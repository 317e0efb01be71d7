"""Predicted against measured memory: bytes of ranks, peaks of runs, and whether layouts fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fourfold.planner.measured.rows import Measured, MeasuredRow, jobs_of
from fourfold.planner.measured.tables import MEASUREMENTS, read
from fourfold.planner.memory.peak import peak_memory
from fourfold.planner.memory.walk import walk_row
from fourfold.planner.timing.stack import Stack

RAN = "aleph-alpha-layouts"
"""The source whose rows ran where those of out_of_memory.csv did not."""


@dataclass(frozen=True, slots=True)
class MemoryScore:
    """Predicted against measured peak bytes. An error below 0 is a prediction that is too low."""

    rows: int
    mape_percent: float | None
    bias_percent: float | None
    max_error_percent: float | None  # of either sign
    max_low_percent: float | None  # how far the lowest prediction is below what was measured; 0 if none is


@dataclass(frozen=True, slots=True)
class FitScore:
    """Whether layouts fit, against whether they ran."""

    rows: int
    right_percent: float | None
    ran: int
    ran_predicted_not_to_fit: int
    out_of_memory: int
    out_of_memory_predicted_to_fit: int


@dataclass(frozen=True, slots=True)
class PeakPrediction:
    """One measured peak of memory, of a rank or of the rank with most."""

    id: str
    source: str
    rank: str  # "worst" or a pipeline rank
    predicted_bytes: float
    measured_bytes: float


def predict_ranks(rows: Sequence[MeasuredRow], stacks: Callable[[str], Stack]) -> list[PeakPrediction]:
    """Allocated bytes of every pipeline rank: of each, the tensor- or data-parallel rank that has most."""
    found = []
    for row in rows:
        if row.columns["cp"] > 1:  # they exchange heads, the project gathers keys and values: not the same bytes
            continue
        pp = int(row.columns["pp"])
        predicted = walk_row(jobs_of([row]).row(0), replace(stacks(row.stack), saved_set=row.saved_set))
        for rank, measured in enumerate(np.array(row.rank_bytes).reshape(pp, -1).max(axis=1)):
            found.append(PeakPrediction(row.id, row.source, str(rank), float(predicted[rank]), float(measured)))
    return found


def predict_peaks(rows: Sequence[MeasuredRow], stacks: Callable[[str], Stack]) -> list[PeakPrediction]:
    """Peaks of the rank with most, of rows of quality A: of what was reserved or allocated, as the source measured."""
    rows = [row for row in rows if row.memory is not None and row.quality == "A"]
    memory = _memory(rows, stacks)
    return [
        PeakPrediction(row.id, row.source, "worst", float(getattr(predicted, row.memory_kind)), float(row.memory or 0))
        for row, predicted in zip(rows, memory, strict=True)
    ]


def score_memory(peaks: Sequence[PeakPrediction]) -> MemoryScore:
    """The score of a set of peaks."""
    if not peaks:
        return MemoryScore(0, None, None, None, None)
    errors = np.array([100 * (peak.predicted_bytes / peak.measured_bytes - 1) for peak in peaks])
    return MemoryScore(
        rows=len(peaks),
        mape_percent=float(np.abs(errors).mean()),
        bias_percent=float(errors.mean()),
        max_error_percent=float(np.abs(errors).max()),
        max_low_percent=float(max(0.0, -errors.min())),
    )


def with_outcome(tables: Sequence[Measured]) -> list[tuple[MeasuredRow, bool]]:
    """Rows that are known to have run (True) or not. Those that ran are the project's if the tables have none."""
    found = [(row, row.fits) for table in tables for row in table.rows if row.fits is not None]
    ran = [row for table in tables if table.kind == "published" for row in table.rows if row.source == RAN]
    if found and not ran:
        ran = [row for row in read(MEASUREMENTS / "published.csv").rows if row.source == RAN]
    return [*found, *((row, True) for row in ran)]


def score_fits(rows: Sequence[tuple[MeasuredRow, bool]], stacks: Callable[[str], Stack]) -> FitScore:
    """How often it is right whether a layout fits."""
    predicted = np.array([memory.fits for memory in _memory([row for row, _ in rows], stacks)], dtype=bool)
    ran = np.array([outcome for _, outcome in rows], dtype=bool)
    return FitScore(
        rows=len(rows),
        right_percent=float(100 * np.mean(predicted == ran)) if rows else None,
        ran=int(ran.sum()),
        ran_predicted_not_to_fit=int((ran & ~predicted).sum()),
        out_of_memory=int((~ran).sum()),
        out_of_memory_predicted_to_fit=int((~ran & predicted).sum()),
    )


class _Predicted(NamedTuple):
    """Bytes of the worst rank of one run."""

    allocated: float
    reserved: float
    fits: bool


def _memory(rows: Sequence[MeasuredRow], stacks: Callable[[str], Stack]) -> list[_Predicted]:
    """The peak of each run, in order: runs of one stack and saved set together."""
    found: dict[int, _Predicted] = {}
    sets = [(row.stack, row.saved_set) for row in rows]
    for stack, saved_set in dict.fromkeys(sets):
        indices = [index for index, pair in enumerate(sets) if pair == (stack, saved_set)]
        jobs = jobs_of([rows[index] for index in indices])
        memory = peak_memory(jobs, replace(stacks(stack), saved_set=saved_set))
        columns = np.broadcast_arrays(memory.allocated, memory.reserved, memory.fits)
        for index, allocated, reserved, fits in zip(indices, *(column.tolist() for column in columns), strict=True):
            found[index] = _Predicted(allocated, reserved, fits)
    return [found[index] for index in range(len(rows))]
