"""Jobs that were made up, with known culprits, against a player of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fourfold.debugger.tables import Cause, TableVerdict, Worker, analyse, judge, read_table
from tests.debugger.tables.made import Job, write


def verdict_of(path: Path, job: Job, **options: tuple[str, ...]) -> TableVerdict:
    return judge(analyse(read_table(write(path / "job.parquet", job.rows(), **options))))


def slow(*workers: tuple[int, int], by: float = 1.5) -> Callable[..., float]:
    return lambda step, dp, stage, virtual, micro_batch: by if (dp, stage) in workers else 1.0


@pytest.mark.parametrize(
    ("pp", "v", "micro_batches"), [(1, 1, 4), (2, 1, 3), (4, 1, 8), (2, 2, 4), (4, 2, 8), (3, 3, 6)]
)
def test_replay_is_the_step(tmp_path: Path, pp: int, v: int, micro_batches: int) -> None:
    """No gaps were made, so replaying the measured durations must give the steps again."""
    job = Job(dp=2, pp=pp, v=v, micro_batches=micro_batches, jitter=0.2, factor=slow((1, pp - 1)))
    analysis = analyse(read_table(write(tmp_path / "job.parquet", job.rows())))
    assert analysis.notes == ()
    assert analysis.step_seconds == pytest.approx(job.step_seconds())
    assert analysis.replayed_seconds == pytest.approx(job.step_seconds())


@pytest.mark.parametrize(("pp", "v"), [(4, 1), (2, 2)])
def test_what_if_is_the_job_without(tmp_path: Path, pp: int, v: int) -> None:
    """Replays without a worker against the job in which its computations really took the mean of all."""
    job = Job(dp=2, pp=pp, v=v, micro_batches=4, jitter=0.1, factor=slow((1, 1)))
    analysis = analyse(read_table(write(tmp_path / "job.parquet", job.rows())))
    assert analysis.suspects[0] == Worker(1, 1)
    mean = {
        name: np.mean([seconds for key, seconds in job.seconds.items() if key[0] == name])
        for name in ("forward-compute", "backward-compute")
    }
    for key in job.seconds:
        name, _, dp, stage, *_ = key
        if (dp, stage) == (1, 1):
            job.seconds[key] = float(mean[name])
    assert analysis.without_suspects[0].seconds == pytest.approx(job.step_seconds().mean())
    for key in job.seconds:
        job.seconds[key] = float(mean[key[0]])
    assert analysis.ideal_seconds == pytest.approx(job.step_seconds().mean())


@pytest.mark.parametrize(("dp", "pp", "v"), [(1, 1, 1), (4, 1, 1), (4, 4, 1), (1, 4, 1), (8, 2, 2)])
def test_healthy(tmp_path: Path, dp: int, pp: int, v: int) -> None:
    verdict = verdict_of(tmp_path, Job(dp=dp, pp=pp, v=v, steps=2))
    assert verdict.cause is Cause.HEALTHY
    assert verdict.workers == ()
    assert verdict.gain_seconds == 0
    assert verdict.sentence.startswith("Healthy: steps take")


@pytest.mark.parametrize("v", [1, 2])
def test_every_worker_is_found(tmp_path: Path, v: int) -> None:
    for dp in range(3):
        for stage in range(2):
            verdict = verdict_of(
                tmp_path, Job(dp=3, pp=2, v=v, micro_batches=4, steps=2, factor=slow((dp, stage), by=1.3))
            )
            assert verdict.cause is Cause.WORKERS
            assert verdict.workers == (Worker(dp, stage),)
            ratios = verdict.analysis.ratios[Worker(dp, stage)]
            assert ratios == pytest.approx({"forward-compute": 1.3, "backward-compute": 1.3}, rel=0.02)


@pytest.mark.parametrize("workers", [((1, 0), (3, 2)), ((0, 1), (2, 1)), ((2, 0), (2, 3))])
def test_two_workers(tmp_path: Path, workers: tuple[tuple[int, int], ...]) -> None:
    verdict = verdict_of(tmp_path, Job(dp=4, pp=4, factor=slow(*workers)))
    assert verdict.cause is Cause.WORKERS
    assert {(w.dp_rank, w.stage) for w in verdict.workers} == set(workers)
    assert verdict.sentence.startswith("Workers (dp")


def test_long_stage(tmp_path: Path) -> None:
    job = Job(dp=4, pp=4, factor=lambda step, dp, stage, virtual, micro_batch: 1.6 if stage == 3 else 1.0)
    verdict = verdict_of(tmp_path, job)
    assert verdict.cause is Cause.STAGE
    assert verdict.findings[0].stage == 3
    assert verdict.workers == ()


def uneven(seed: int) -> Callable[..., float]:
    """Work of micro-batches, the same forward and backward, and for all stages of a replica."""
    lengths = np.random.default_rng(seed).lognormal(0, 0.8, size=(8, 16, 8))
    return lambda step, dp, stage, virtual, micro_batch: 0.5 + 0.5 * float(lengths[step, dp, micro_batch])


def test_sequences(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, Job(dp=16, pp=2, micro_batches=8, steps=2, factor=uneven(1)))
    assert verdict.cause is Cause.SEQUENCES
    assert verdict.analysis.correlation > 0.95
    assert verdict.workers == ()


def test_a_slow_worker_does_not_look_like_sequences(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, Job(factor=slow((2, 1), by=2)))
    assert abs(verdict.analysis.correlation) < 0.3


def test_rotating(tmp_path: Path) -> None:
    job = Job(
        steps=6, factor=lambda step, dp, stage, *_: 1.5 if (dp, stage) == ((0, 1), (1, 3), (2, 0))[step % 3] else 1.0
    )
    verdict = verdict_of(tmp_path, job)
    assert verdict.cause is Cause.ROTATING
    assert verdict.workers == ()


def test_slow_transfers(tmp_path: Path) -> None:
    """One gradient reduction in three takes 0.6 s instead of 0.05."""
    rows = Job(steps=6).rows()
    for row in rows:
        late = 0.6 if row["step"] % 3 == 0 else 0.0
        if row["optype"] == "grads-reduce-scatter":
            row["duration"] += late
        elif row["optype"].startswith("optimizer"):
            row["start_ts"] += late
    verdict = judge(analyse(read_table(write(tmp_path / "job.parquet", rows))))
    assert verdict.cause is Cause.COMMUNICATION
    assert verdict.findings[0].kind == "grads-reduce-scatter"


def test_nobody(tmp_path: Path) -> None:
    """Each operation takes what it likes."""
    verdict = verdict_of(tmp_path, Job(jitter=0.3))
    assert verdict.cause is Cause.NOBODY
    assert verdict.sentence.startswith("No single culprit")


def test_without_columns_that_only_help(tmp_path: Path) -> None:
    job = Job(factor=slow((2, 1)))
    bare = verdict_of(tmp_path, job, without=("rank", "seq_id", "mc", "mb_id", "gmc"))
    assert bare.workers == (Worker(2, 1),)
    assert len(bare.analysis.notes) == 2
    assert bare.analysis.slowdown == pytest.approx(verdict_of(tmp_path, job).analysis.slowdown)


def test_chunks_by_mc_or_gmc(tmp_path: Path) -> None:
    job = Job(dp=2, pp=2, v=2, micro_batches=4, factor=slow((1, 0)))
    for without in (("mc",), ("gmc",), ("gmc", "mb_id")):
        verdict = verdict_of(tmp_path, job, without=without)
        assert verdict.analysis.replayed_seconds == pytest.approx(job.step_seconds())
        assert verdict.workers == (Worker(1, 0),)
    with pytest.raises(ValueError, match="an interleaved pipeline needs column mc or gmc"):
        verdict_of(tmp_path, job, without=("mc", "gmc"))


def test_without_messages(tmp_path: Path) -> None:
    rows = [row for row in Job(factor=slow((2, 1))).rows() if not row["optype"].endswith(("send", "recv"))]
    verdict = judge(analyse(read_table(write(tmp_path / "job.parquet", rows))))
    assert verdict.workers == (Worker(2, 1),)
    assert "not every forward message is in the table" in verdict.analysis.notes[0]


def test_garbage_collection_in_some_steps(tmp_path: Path) -> None:
    """What a worker does only now and then counts, and no step is left out for it."""
    job = Job()
    rows = job.rows()
    last = max(
        (r for r in rows if (r["step"], r["dp_rank"], r["optype"]) == (1, 2, "optimizer")), key=lambda r: r["stage"]
    )
    rows.append(last | {"optype": "gc", "start_ts": last["start_ts"] + last["duration"], "duration": 1.0})
    analysis = analyse(read_table(write(tmp_path / "job.parquet", rows)))
    assert analysis.notes == ()
    expected = job.step_seconds() + np.array([0, 1.0, 0])
    assert analysis.replayed_seconds == pytest.approx(expected)
