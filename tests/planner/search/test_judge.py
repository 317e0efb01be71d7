"""The sweep's shortcuts against the formulas they abbreviate, and how candidates are ranked."""

from __future__ import annotations

import numpy as np
import pytest

from fourfold.planner.machines.cluster import cluster
from fourfold.planner.memory.peak import peak_memory
from fourfold.planner.search.exact import play_exactly
from fourfold.planner.search.judge import (
    allocatable_bytes,
    candidate,
    candidates,
    job_of,
    jobs_of,
    ranking,
    rounded,
    sweep,
)
from fourfold.planner.search.problem import Problem
from fourfold.planner.search.space import Space, space
from fourfold.planner.timing.step import step_time

JOB = Problem.of(model="llama3-8b", cluster=cluster("h100", 32), seq_len=8192, sequences=128)
PACKED = JOB.replace(
    documents=Problem.of(
        model="llama3-8b",
        cluster=cluster("h100", 32),
        seq_len=8192,
        sequences=128,
        documents="mean=1024,dist=exponential",
    ).documents
)


@pytest.mark.parametrize("problem", [JOB, PACKED], ids=["whole", "packed"])
def test_seconds_are_those_of_the_formula(problem: Problem) -> None:
    """What layouts have in common is computed once."""
    layouts = space(problem)
    seconds = [
        step_time(jobs, problem.stack, imbalance=problem.imbalance).seconds for _, jobs in layouts.chunks(problem)
    ]
    assert np.array_equal(sweep(problem, layouts).seconds, np.concatenate(seconds))


def test_memory_of_what_fits_is_all_of_it() -> None:
    layouts = space(JOB)
    swept = sweep(JOB, layouts)
    full = np.concatenate([peak_memory(jobs, JOB.stack).allocated for _, jobs in layouts.chunks(JOB, 1 << 16)])
    assert (swept.memory <= full * (1 + 1e-12)).all()
    assert np.quantile(swept.memory / full, 0.25) > 0.99
    allocatable = allocatable_bytes(JOB)
    assert np.array_equal(swept.fits, full <= allocatable)
    assert swept.memory[swept.fits] == pytest.approx(full[swept.fits], rel=1e-12)


def test_allocatable() -> None:
    """algorithms.md 3.10: 79.1 GiB, less 1 GiB, over 1.03."""
    assert allocatable_bytes(JOB) / (1 << 30) == pytest.approx((79.1 - 1) / 1.03, abs=0.1)


class TestRanking:
    def test_rounding(self) -> None:
        assert rounded(np.array([1.000001, 123.4561, 0.0])) == pytest.approx([1.0, 123.46, 0.0])

    def test_simpler_goes_first(self) -> None:
        layouts = space(JOB)
        c = layouts.columns
        order = ranking(layouts, np.ones(len(layouts)))
        first = {name: int(column[order[0]]) for name, column in c.items()}
        assert (first["recompute"], first["pp"], first["cp"], first["tp"], first["v"]) == (0, 1, 1, 1, 1)
        assert sorted(order.tolist()) == list(range(len(layouts)))

    def test_faster_goes_before_simpler(self) -> None:
        layouts = space(JOB).take(np.arange(3))
        assert ranking(layouts, np.array([3.0, 2.0, 1.0])).tolist() == [2, 1, 0]


def test_candidates_together_or_alone() -> None:
    layouts = space(JOB)
    rows = [0, len(layouts) // 2, len(layouts) - 1]
    together = candidates(JOB, jobs_of(JOB, layouts, rows))
    for row, one in zip(rows, together, strict=True):
        alone = candidate(JOB, job_of(JOB, layouts, row))
        assert alone == one
        assert not one.played
        assert sum(one.breakdown.values()) == pytest.approx(one.step_seconds)
        assert sum(one.memory_parts.values()) == pytest.approx(one.memory_bytes, rel=1e-6)


def test_bubble_by_closed_form_is_that_of_playing() -> None:
    """Both are idle time over computing time, and over all; the closed form sees most of it."""
    problem = Problem.of(model="llama3-70b", cluster=cluster("h100", 128), seq_len=8192, sequences=512)
    layouts = space(problem)
    c = layouts.columns
    rows = np.flatnonzero((c["pp"] > 1) & (c["v"] < 4) & (c["micro_batch"] == 1))
    errors = []
    for row in np.random.default_rng(1).choice(rows, 30, replace=False):
        job = job_of(problem, layouts, int(row))
        closed, played = candidate(problem, job), candidate(problem, job, play_exactly(job, problem.stack))
        for one in (closed, played):
            ratio = one.bubble_over_compute
            assert one.bubble_over_total == pytest.approx(ratio / (1 + ratio), rel=1e-9)
        errors.append((1 + closed.bubble_over_compute) / (1 + played.bubble_over_compute) - 1)
    assert np.median(np.abs(errors)) < 0.01
    assert np.max(np.abs(errors)) < 0.1


def test_nothing() -> None:
    nothing = space(JOB).take(np.zeros(0, dtype=int))
    assert isinstance(nothing, Space)
    assert len(sweep(JOB, nothing)) == 0
