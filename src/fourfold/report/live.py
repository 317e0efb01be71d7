"""Memory over time, from the simulator to what pictures and pages show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fourfold.planner.memory.peak import PARTS, RESERVED
from fourfold.planner.search.misses import BYTES_WORDS
from fourfold.report import drawing
from fourfold.report.text import format_bytes
from fourfold.simulator.causes import duration
from fourfold.simulator.live import Curve, StepMemory, why


def memory_of(memory: StepMemory, *, rows: Sequence[str]) -> drawing.Memory:
    """Every pipeline rank's curve by kind of bytes.

    `rows`: labels of the ranks, as the timeline above has them.
    """
    curves = [memory.curve(pp_rank) for pp_rank in range(len(memory.ranks))]
    return drawing.Memory(
        unit="s",
        rows=tuple(rows),
        parts=tuple(BYTES_WORDS[name] for name in PARTS),
        times=tuple(curve.times for curve in curves),
        bytes=tuple(curve.bytes for curve in curves),
        peaks=tuple(why(memory, pp_rank) for pp_rank in range(len(memory.ranks))),
        capacity=None if memory.capacity is None else memory.capacity - RESERVED,
    )


def activations_of(memory: StepMemory, *, rows: Sequence[str]) -> drawing.Memory:
    """Every pipeline rank's activations by chunk, its virtual stages. `rows`: as above."""
    curves = [memory.activation_curve(pp_rank) for pp_rank in range(len(memory.ranks))]
    return drawing.Memory(
        unit="s",
        rows=tuple(rows),
        parts=tuple(f"chunk {chunk}" for chunk in range(len(curves[0].bytes))),
        times=tuple(curve.times for curve in curves),
        bytes=tuple(curve.bytes for curve in curves),
        peaks=tuple(_most_held(memory, pp_rank, curve) for pp_rank, curve in enumerate(curves)),
        by_chunk=True,
    )


def _most_held(memory: StepMemory, pp_rank: int, curve: Curve) -> str:
    """How many activations a rank holds at most, and when."""
    total = curve.bytes.sum(axis=0)
    if not total.any():
        return "holds no activations"
    at = int(np.argmax(total >= (1 - 1e-6) * total.max()))  # of a plateau the beginning, as the page marks it
    pairs = int(memory.ranks[pp_rank].in_flight.max())
    return (
        f"activations peak at {format_bytes(float(total[at]))}, {duration(float(curve.times[at]))} into the step; "
        f"{pairs} (micro-batch, chunk) pair{'' if pairs == 1 else 's'} in flight at most"
    )
