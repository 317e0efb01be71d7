"""Memory over time, from the simulator to what pictures and pages show."""

from __future__ import annotations

from collections.abc import Sequence

from fourfold.planner.machines.chips import GIB
from fourfold.planner.memory.peak import PARTS
from fourfold.planner.search.misses import BYTES_WORDS
from fourfold.report import drawing
from fourfold.simulator.live import StepMemory, why


def memory_of(memory: StepMemory, *, rows: Sequence[str] | None = None) -> drawing.Memory:
    """Every pipeline rank's curve by kind of bytes.

    `rows`: labels of the ranks, as the timeline above has them.
    """
    curves = [memory.curve(pp_rank) for pp_rank in range(len(memory.ranks))]
    return drawing.Memory(
        unit="s",
        rows=tuple(rows) if rows is not None else tuple(f"pp {pp_rank}" for pp_rank in range(len(memory.ranks))),
        parts=tuple(BYTES_WORDS[name] for name in PARTS),
        times=tuple(curve.times for curve in curves),
        bytes=tuple(curve.bytes for curve in curves),
        peaks=tuple(why(memory, pp_rank) for pp_rank in range(len(memory.ranks))),
        capacity=memory.capacity,
    )


def activations_of(memory: StepMemory, pp_rank: int) -> drawing.Memory:
    """One rank's activations by virtual stage."""
    curve = memory.activation_curve(pp_rank)
    total, pairs = curve.bytes.sum(axis=0), int(memory.ranks[pp_rank].in_flight.max(initial=0))
    most = float(total.max(initial=0.0))
    return drawing.Memory(
        unit="s",
        rows=(f"pp {pp_rank}",),
        parts=tuple(f"chunk {chunk} (stage {stage})" for chunk, stage in enumerate(memory.peaks[pp_rank].stages)),
        times=(curve.times,),
        bytes=(curve.bytes,),
        peaks=(f"activations peak at {most / GIB:.2f} GiB; {pairs} (micro-batch, chunk) pairs are in flight at most",),
    )
