"""A pipeline schedule as text and as JSON."""

from __future__ import annotations

from typing import Any

from fourfold.layout import Schedule, Timeline, play
from fourfold.layout.actions import COMPUTE


def schedule_json(schedule: Schedule) -> dict[str, Any]:
    """The object that ``fourfold schedule --json`` prints; docs/formats.md explains its keys."""
    timeline = play(schedule)
    return {
        "pp": schedule.pp,
        "v": schedule.v,
        "nmb": schedule.num_micro_batches,
        "kind": schedule.kind,
        "nc": schedule.nc,
        "rounds": list(schedule.rounds),
        "zero": schedule.zero,
        "bubble_over_compute": timeline.bubble_over_compute,
        "bubble_over_total": timeline.bubble_over_total,
        "in_flight_peak": list(schedule.in_flight_peak),
        "warmup": list(schedule.warmup),
        "reduce_scatters": list(schedule.reduce_scatters),
        "fallback": schedule.fallback,
        "actions": [[str(action) for action in actions] for actions in schedule.actions],
    }


def schedule_text(schedule: Schedule) -> str:
    """Head, one row of computations per rank in the time of F = 1 and B = 2, and a table per rank."""
    timeline = play(schedule)
    rounds = "+".join(map(str, schedule.rounds))
    lines = [
        f"{schedule.kind}: pp {schedule.pp}, v {schedule.v}, {schedule.num_micro_batches} micro-batches "
        f"in rounds of {rounds}, ZeRO-{schedule.zero}",
    ]
    if schedule.fallback:
        lines.append(f"note: {schedule.fallback}")
    lines += [
        f"bubble: idle/compute {timeline.bubble_over_compute:.2%}, idle/total {timeline.bubble_over_total:.2%} "
        "(backward = 2 forwards, messages free)",
        "",
        "rank  warm-up  in flight  reduce-scatters",
    ]
    per_rank = zip(schedule.warmup, schedule.in_flight_peak, schedule.reduce_scatters, strict=True)
    lines += [
        f"{rank:>4}  {warmup:>7}  {peak:>9}  {reduces:>15}" for rank, (warmup, peak, reduces) in enumerate(per_rank)
    ]
    lines += ["", "computations in time, F or B with micro-batch.chunk; a dot is idle time"]
    lines += [f"{rank:>4}  {_row(schedule, timeline, rank)}" for rank in range(schedule.pp)]
    return "\n".join(lines)


def _row(schedule: Schedule, timeline: Timeline, pp_rank: int) -> str:
    """One rank's computations drawn to scale: all times are whole numbers when a forward takes 1 and a backward 2."""
    width = len(f"F{schedule.num_micro_batches - 1}.{schedule.v - 1} ")
    cells: list[str] = [".".ljust(width)] * round(timeline.step_time)
    for action in schedule.actions[pp_rank]:
        if action.kind in COMPUTE:
            start, end = map(round, timeline.span(action))
            label = f"{action.kind}{action.micro_batch}.{action.stage // schedule.pp}"
            cells[start:end] = [label.ljust(width), *["".ljust(width)] * (end - start - 1)]
    return "".join(cells).rstrip()
