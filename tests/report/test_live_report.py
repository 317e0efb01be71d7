"""Memory over time as pictures and pages get it."""

from __future__ import annotations

import numpy as np
import pytest

from fourfold.layout import compile_program, generate, partition
from fourfold.planner.memory.peak import PARTS, RESERVED
from fourfold.planner.timing.stack import load_stack
from fourfold.report.live import activations_of, memory_of
from fourfold.simulator.live import StepMemory, step_memory
from tests.planner.jobs_of_tests import job


def of_small_job() -> StepMemory:
    jobs = job("8b", pp=2, v=2, sequences=6)
    schedule = generate(pp=2, v=2, num_micro_batches=6, kind="interleaved", messages=False)
    return step_memory(jobs, compile_program(schedule).play(), partition(32, pp=2, v=2), load_stack("standard"))


def test_curves_rows_and_peaks() -> None:
    memory = of_small_job()
    drawn = memory_of(memory, rows=("pp 0", "pp 1"))
    assert drawn.rows == ("pp 0", "pp 1")
    assert len(drawn.parts) == len(PARTS)
    assert memory.capacity is not None
    assert drawn.capacity == memory.capacity - RESERVED
    for rank, peak in enumerate(memory.peaks):
        assert drawn.bytes[rank].shape == (len(PARTS), len(drawn.times[rank]))
        assert (np.diff(drawn.times[rank]) >= 0).all()
        assert drawn.bytes[rank].sum(axis=0).max() == peak.total
        assert drawn.peaks[rank].startswith("peaks at ")
    assert memory_of(memory, rows=("rank 0", "rank 1")).rows == ("rank 0", "rank 1")


def test_activations_by_chunk() -> None:
    memory = of_small_job()
    drawn, all_bytes = (of(memory, rows=("pp 0", "pp 1")) for of in (activations_of, memory_of))
    assert drawn.parts == ("chunk 0", "chunk 1")
    assert drawn.rows == all_bytes.rows
    assert drawn.by_chunk
    for rank in range(2):
        of_kind = all_bytes.bytes[rank][PARTS.index("activations")]
        assert drawn.bytes[rank].sum(axis=0).max() == pytest.approx(of_kind.max())
        pairs = int(memory.ranks[rank].in_flight.max())
        assert f"{pairs} (micro-batch, chunk) pairs" in drawn.peaks[rank]
    # The second chunk of the first rank begins while the first one's micro-batches are in flight.
    first = int(np.flatnonzero(drawn.bytes[0][1])[0])
    assert drawn.bytes[0][0, first] > 0
    assert activations_of(memory, rows=("a", "b")).rows == ("a", "b")
