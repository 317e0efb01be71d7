"""A pipeline schedule as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
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


def schedule_text(schedule: Schedule, *, asked_nc: int | None = None, width: int | None = None) -> str:
    """Head, a table per rank, and the computations of each rank drawn in the time of F = 1 and B = 2.

    Args:
        schedule: what to draw.
        asked_nc: the nc that was asked for; where rounds are of another size, a note says so.
        width: characters per line; the drawing is folded into blocks of time. None: one line per rank.
    """
    timeline = play(schedule)
    rounds = "+".join(map(str, schedule.rounds))
    lines = [
        f"{schedule.kind}: pp {schedule.pp}, v {schedule.v}, {schedule.num_micro_batches} micro-batches "
        f"in rounds of {rounds}, ZeRO-{schedule.zero}",
    ]
    if schedule.fallback:
        lines.append(f"note: {schedule.fallback}")
    elif asked_nc not in (None, schedule.nc):
        lines.append(f"note: nc = {asked_nc} would leave a short round; they are made near-equal, none below pp")
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
    lines += [
        "warm-up: forwards before the first backward; in flight: most (micro-batch, chunk) pairs held at once",
        "",
        "computations in time, F or B with micro-batch.chunk; -- goes on, a dot is idle time",
        *_drawing([_cells(schedule, timeline, rank) for rank in range(schedule.pp)], width),
    ]
    return "\n".join(lines)


def _drawing(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """A line per rank, or several blocks of as many units of time as fit into ``width`` characters."""
    num_units, margin = len(rows[0]), 6
    per_block = num_units if width is None else max(1, (width - margin) // len(rows[0][0]))
    lines = []
    for first in range(0, num_units, per_block):
        lines += [""] if first else []
        lines += [f"{rank:>4}  {''.join(row[first : first + per_block])}".rstrip() for rank, row in enumerate(rows)]
    return lines


def _cells(schedule: Schedule, timeline: Timeline, pp_rank: int) -> list[str]:
    """A text for each unit of time: all times are whole numbers when a forward takes 1 and a backward 2."""
    width = len(f"F{schedule.num_micro_batches - 1}.{schedule.v - 1} ")
    cells: list[str] = [".".ljust(width)] * round(timeline.step_time)
    for action in schedule.actions[pp_rank]:
        if action.kind in COMPUTE:
            start, end = map(round, timeline.span(action))
            label = f"{action.kind}{action.micro_batch}.{action.stage // schedule.pp}"
            cells[start:end] = [label.ljust(width), *["--".ljust(width)] * (end - start - 1)]
    return cells
