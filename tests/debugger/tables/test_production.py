"""The published analysis of two production jobs, to more digits than it was rounded to."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from fourfold.debugger.tables import Cause, TableAnalysis, Worker, analyse, judge, read_table

DATA = Path(__file__).parent / "data"
JOBS = ("AR", "ST")
EXACT = 1e-6  # the tables hold 32-bit floats


@cache
def published(job: str) -> dict[str, Any]:
    return json.loads((DATA / f"{job}.published.json").read_text())


@cache
def analysed(job: str) -> TableAnalysis:
    return analyse(read_table(DATA / f"{job}.parquet"))


@pytest.mark.parametrize("job", JOBS)
def test_slowdown(job: str) -> None:
    a, truth = analysed(job), published(job)
    assert a.slowdown == pytest.approx(truth["blocking_slowdown"], rel=EXACT)
    assert a.launch_slowdown == pytest.approx(truth["launch_slowdown"], rel=EXACT)
    assert a.ideal_seconds == pytest.approx(truth["step_t_noblk"], rel=EXACT)
    for step, seconds in truth["step_t_nodelay"].items():
        at = a.table.steps.index(int(step))
        assert a.replayed_seconds[at] == pytest.approx(seconds, rel=EXACT)
        assert a.step_seconds[at] == pytest.approx(truth["step_t_base"][step], rel=EXACT)


@pytest.mark.parametrize("job", JOBS)
def test_parts(job: str) -> None:
    a, truth = analysed(job), published(job)
    parts = {
        "dp_rank": (a.by_replica, a.by_replica_per_step),
        "stage": (a.by_stage, a.by_stage_per_step),
        "optype": (a.by_kind, a.by_kind_per_step),
    }
    for name, (mean, per_step) in parts.items():
        assert {str(k): v for k, v in mean.items()} == pytest.approx(truth[f"blocking_decompose_by_{name}"], rel=EXACT)
        for step, values in truth[f"blocking_decompose_by_{name}_per_step"].items():
            at = a.table.steps.index(int(step))
            assert {str(k): v[at] for k, v in per_step.items()} == pytest.approx(values, rel=EXACT)


@pytest.mark.parametrize("job", JOBS)
def test_shares(job: str) -> None:
    a, truth = analysed(job), published(job)
    assert a.without_worst_workers.seconds == pytest.approx(truth["mw"]["trem"], rel=EXACT)
    assert a.worst_workers_share == pytest.approx(truth["mw"]["Mw"], rel=1e-4)  # a difference
    assert a.without_last_stage.seconds == pytest.approx(truth["ms"]["trem"], rel=EXACT)
    assert a.last_stage_share == pytest.approx(truth["ms"]["Ms"], rel=1e-4)


def test_one_slow_worker() -> None:
    verdict = judge(analysed("AR"))
    assert verdict.cause is Cause.WORKERS
    assert verdict.workers == (Worker(dp_rank=0, stage=0),)
    assert len(verdict.findings) == 1
    assert verdict.gain_seconds == pytest.approx(22.89, abs=0.01)
    assert "(dp 0, stage 0; forward-compute x 2.51, backward-compute x 2.27)" in verdict.sentence


def test_long_last_stage() -> None:
    verdict = judge(analysed("ST"))
    assert verdict.cause is Cause.STAGE
    assert verdict.findings[0].stage == 3
    assert verdict.workers == ()
    assert "Stage 3 (the last)" in verdict.sentence


def test_the_other_replicas_are_healthy(tmp_path: Path) -> None:
    """AR without the replica in which a worker is slow, up to where the others wait for it."""
    away = ["grads-reduce-scatter", "embedding-grads-all-reduce", "optimizer-clip-main-grad"]
    kept = [("dp_rank", "!=", 0), ("optype", "not in", away)]
    rows = pyarrow.parquet.read_table(DATA / "AR.parquet", filters=kept)
    pyarrow.parquet.write_table(rows, tmp_path / "healthy.parquet")
    verdict = judge(analyse(read_table(tmp_path / "healthy.parquet")))
    assert verdict.cause is Cause.HEALTHY
    assert verdict.workers == ()


def test_is_fast() -> None:
    begun = time.process_time()
    judge(analyse(read_table(DATA / "AR.parquet")))
    assert time.process_time() - begun < 2


def test_some_steps() -> None:
    table = read_table(DATA / "AR.parquet")
    some = analyse(table, steps=range(400, 500))
    assert all(400 <= step < 500 for step in some.table.steps)
    assert len(some.replayed_seconds) == len(some.table.steps) > 5
    assert np.isclose(some.slowdown, analysed("AR").slowdown, rtol=0.02)
    with pytest.raises(ValueError, match="none of the steps asked for is in the table, which has 16 to 1238"):
        analyse(table, steps=[5])
