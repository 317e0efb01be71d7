"""What an operation table says of its job: for the terminal, as JSON, and as a page."""

from __future__ import annotations

from typing import Any

import numpy as np

from fourfold.debugger.tables import Finding, Removal, TableVerdict
from fourfold.report.diagnosis.text import aligned
from fourfold.report.drawing import HeatMap, Page
from fourfold.report.drawing import Table as Rows
from fourfold.simulator.causes import duration

_SHOWN = 6  # rows of a kind


def table_text(found: TableVerdict) -> str:
    """What `fourfold diagnose TABLE.parquet` prints."""
    lines = [found.sentence]
    for rows in _tables(found):
        lines += ["", rows.title, *aligned([rows.columns, *rows.rows])]
    return "\n".join([*lines, "", *(f"note: {note}" for note in found.analysis.notes), _seen(found)])


def _seen(found: TableVerdict) -> str:
    table = found.analysis.table
    return (
        f"note: {len(table.replicas)} replicas x {table.pp} stages, {len(table.steps)} steps; slow-downs are "
        "T / T_ideal with only these durations as measured, all others ideal"
    )


def _tables(found: TableVerdict) -> list[Rows]:
    """Slow-downs by replica, stage, kind and worker, and what would help, the worst first."""
    a = found.analysis
    slow = [
        *((f"replica dp {dp}", s) for dp, s in _worst(a.by_replica)),
        *((f"stage {stage}", s) for stage, s in _worst(a.by_stage)),
        *((kind, s) for kind, s in _worst(a.by_kind)),
        *((f"worker dp {worker.dp_rank}, stage {worker.stage}", s) for worker, s in _worst(a.by_worker)),
    ]
    removed = [
        (f"the worst workers ({len(a.worst_workers)})", a.without_worst_workers),
        ("the last stage", a.without_last_stage),
        *((f"stage {stage}", removal) for stage, removal in a.without_stage.items()),
        *((kind, removal) for kind, removal in a.without_kind.items()),
        ("uneven sequences", a.even_sequences),
    ]
    removed = sorted(removed, key=lambda row: -row[1].share)[: _SHOWN + 2]
    return [
        Rows("Slow-down by what is as measured", ("what", "slow-down"), tuple((w, f"{s:.3f}") for w, s in slow)),
        Rows(
            "The step, if these took what they should",
            ("what", "a step takes", "of the excess gone"),
            tuple((what, duration(r.seconds), f"{r.share:.0%}") for what, r in removed),
        ),
    ]


def _worst(slow: Any) -> list[tuple[Any, float]]:
    return sorted(slow.items(), key=lambda item: -item[1])[:_SHOWN]


def table_json(found: TableVerdict) -> dict[str, Any]:
    """docs/formats.md explains the keys."""
    a = found.analysis
    return {
        "format": 1,
        "verdict": found.cause.value,
        "sentence": found.sentence,
        "findings": [_finding(finding) for finding in found.findings],
        "source": "table",
        "layout": {"pp": a.table.pp, "dp": len(a.table.replicas)},
        "steps": list(a.table.steps),
        "step_seconds": float(np.mean(a.step_seconds)),
        "replayed_seconds": float(a.replayed_seconds.mean()),
        "ideal_seconds": a.ideal_seconds,
        "slowdown": a.slowdown,
        "launch_slowdown": a.launch_slowdown,
        "by_replica": _keyed(a.by_replica),
        "by_stage": _keyed(a.by_stage),
        "by_kind": _keyed(a.by_kind),
        "by_worker": [{"dp": w.dp_rank, "pp": w.stage, "slowdown": s} for w, s in a.by_worker.items()],
        "worst_workers_share": a.worst_workers_share,
        "last_stage_share": a.last_stage_share,
        "forward_backward_correlation": a.correlation if np.isfinite(a.correlation) else None,
        "notes": list(a.notes),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    removal: Removal | None = finding.removal
    return {
        "cause": finding.cause.value,
        "workers": [{"dp": worker.dp_rank, "pp": worker.stage} for worker in finding.workers],
        "stage": finding.stage,
        "kind": finding.kind or None,
        "step_seconds_without": None if removal is None else removal.seconds,
        "share": None if removal is None else removal.share,
    }


def _keyed(slow: Any) -> dict[str, float]:
    return {str(key): float(value) for key, value in slow.items()}


def table_page(found: TableVerdict) -> Page:
    """The answer, a heat map of all workers, and the tables."""
    a = found.analysis
    values = np.full((len(a.table.replicas), a.table.pp, 1, 1), np.nan)
    for worker, slow in a.by_worker.items():
        values[a.table.replicas.index(worker.dp_rank), worker.stage] = slow
    marked = tuple((a.table.replicas.index(worker.dp_rank), worker.stage, 0, 0) for worker in found.workers)
    return Page(
        title=f"{a.table.path}: what holds up the job",
        summary=(
            ("verdict", found.cause.value),
            ("step", duration(float(a.replayed_seconds.mean()))),
            ("ideal", duration(a.ideal_seconds)),
            ("slow-down", f"{a.slowdown:.3f}"),
        ),
        findings=(found.sentence,),
        heat_maps=(HeatMap("Slow-down by worker: a step with only its durations as measured", "x", values, marked),),
        tables=tuple(_tables(found)),
        notes=a.notes,
    )
