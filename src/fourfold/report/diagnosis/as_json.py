"""A diagnosis as JSON; docs/formats.md explains the keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from fourfold.debugger.reading.trace import Work
from fourfold.debugger.slow import Culprit, Diagnosis
from fourfold.debugger.slow.accounts import AWAITED, HOST
from fourfold.debugger.slow.known import mean
from fourfold.report.diagnosis.memory import memory_json
from fourfold.report.diagnosis.words import paragraph


def diagnosis_json(found: Diagnosis) -> dict[str, Any]:
    """One object: the verdict first, then what it rests on."""
    verdict, accounts, grid = found.verdict, found.accounts, found.accounts.grid
    return {
        "format": 1,
        "verdict": verdict.answer,
        "sentence": paragraph(found),
        "reason": verdict.reason or None,
        "culprits": [_culprit(found, culprit) for culprit in verdict.culprits],
        "gain_seconds": verdict.gain,
        "step_seconds": verdict.step_seconds,
        "rotating": [{"step": step, "rank": rank} for step, rank in verdict.rotating],
        "stage": None if verdict.stage is None else {
            "pp": verdict.stage.pp_rank, "ratio": verdict.stage.ratio, "gain_seconds": verdict.stage.gain
        },
        "uneven": None if verdict.uneven is None else {
            "pp": verdict.uneven.pp_rank, "ratio": verdict.uneven.ratio, "gain_seconds": verdict.uneven.gain
        },
        "documents": {"most_over_mean": verdict.documents, "gain_seconds": verdict.documents_gain},
        "what_ifs": [{"what": w.what, "sentence": w.sentence, "gain_seconds": w.gain} for w in verdict.what_ifs],
        "source": found.source,
        "layout": {"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "dp": grid.dp, "from": found.layout.source},
        "steps": list(found.steps),
        "replay": None if verdict.replay_error is None else {
            "steps": [replay.step for replay in found.replays], "error": verdict.replay_error
        },
        "clocks": None if found.clocks is None else {
            "ahead_ns": dict(zip(map(str, found.ranks), found.clocks.wrong.tolist(), strict=True)),
            "residual_ns": found.clocks.residual,
        },
        "ranks": [_rank(found, rank) for rank in np.flatnonzero(accounts.present).tolist()],
        "memory": None if found.memory is None else memory_json(found.memory),
        "notes": list(found.notes),
    }  # fmt: skip


def _culprit(found: Diagnosis, culprit: Culprit) -> dict[str, Any]:
    grid = found.accounts.grid
    return {
        "kind": culprit.kind,
        "ranks": list(culprit.ranks),
        "places": [grid.coordinates(rank)._asdict() for rank in culprit.ranks],
        "cause": culprit.cause,
        "factor": culprit.factor,
        "excess_seconds": culprit.excess,
        "gain_seconds": culprit.gain,
        "by_class": culprit.by_class,
        "levels": [
            {
                "dimension": level.dimension,
                "index": level.index,
                "excess_seconds": level.excess,
                "share": level.share,
                "gap_seconds": level.gap,
            }
            for level in culprit.levels
        ],
    }


def _rank(found: Diagnosis, rank: int) -> dict[str, Any]:
    accounts, suspects = found.accounts, found.suspects
    return {
        "rank": rank,
        **accounts.grid.coordinates(rank)._asdict(),
        "excess_seconds": float(suspects.per_rank[rank]),
        "work": _named([kind.name.lower() for kind in Work], accounts.work[:, rank]),
        "host": _named(HOST, accounts.host[:, rank]),
        "transfer": _named(AWAITED, accounts.transfer[:, rank]),
        "wait": _named(AWAITED, accounts.wait[:, rank]),
    }


def _named(names: Any, columns: np.ndarray) -> dict[str, float]:
    """Mean seconds per step of each that is there."""
    means = mean(columns, axis=0).tolist()
    return {name: seconds for name, seconds in zip(names, means, strict=True) if seconds}
