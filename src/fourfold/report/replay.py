"""A measured step beside what the simulator makes of its durations: as text, as JSON, and as a page."""

from __future__ import annotations

from typing import Any

import numpy as np

from fourfold.report import drawing
from fourfold.report.simulation.words import CLASS_WORDS, bubble_words
from fourfold.simulator.causes import duration
from fourfold.simulator.graph import NONE
from fourfold.simulator.replayed import Replayed

SHOWN = 3  # ranks that would help most


def replay_text(found: Replayed) -> str:
    """What `fourfold simulate RECIPE --log RUN` prints."""
    logs, played, grid = found.logs, found.played, found.grid
    waits = logs.waits()
    most = int(waits.argmax())
    lines = [
        f"Step {logs.step}, tp {grid.tp} cp {grid.cp} pp {grid.pp} dp {grid.dp}: measured, and played again",
        "",
        f"  measured   {duration(logs.step_seconds)}",
        f"  played     {duration(played.step_seconds)}, {100 * found.error:+.1f} %, all ranks beginning at once",
        f"             {_staggered(found)}",
        f"  bubble     {_bubble(found)}",
        f"  messages   the mean rank waits {duration(float(waits.mean()))}, rank {most} {duration(waits[most])}",
        "",
        "  the step, mean of all ranks",
        *(f"    {words:<36} {duration(seconds)}" for words, seconds in _in_words(found)),
    ]
    if found.normal:
        lines += ["", "  as fast as its peers, a rank would save"]
        lines += [f"    rank {rank:<7} {duration(max(seconds, 0.0))}" for rank, seconds in found.normal[:SHOWN]]
    notes = [
        "logs have the forwards, backwards and FSDP's collectives of a step; data, optimizer and checks are beside",
        *logs.notes,
        f"whole steps in the logs: {', '.join(map(str, logs.steps))}",
    ]
    return "\n".join([*lines, "", *(f"note: {note}" for note in notes)])


def _staggered(found: Replayed) -> str:
    seconds = found.staggered.step_seconds
    return f"{duration(seconds)}, {100 * (seconds / found.logs.step_seconds - 1):+.1f} %, each beginning when it began"


def _bubble(found: Replayed) -> str:
    return bubble_words(found.played)


def _spent(found: Replayed) -> list[tuple[str, float]]:
    """Seconds of the mean rank by class, those that there are."""
    means = {name: float(seconds.mean()) for name, seconds in found.played.spent.items()}
    return [(name, seconds) for name, seconds in means.items() if seconds > 0]


def _in_words(found: Replayed) -> list[tuple[str, float]]:
    words = CLASS_WORDS | {"compute": "computing, and waiting inside of it", "host": "between actions"}
    return [(words[name], seconds) for name, seconds in _spent(found)]


def replay_json(found: Replayed) -> dict[str, Any]:
    """docs/formats.md explains the keys."""
    logs, played, grid = found.logs, found.played, found.grid
    return {
        "format": 1,
        "step": logs.step,
        "steps": list(logs.steps),
        "layout": {"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "dp": grid.dp},
        "measured_seconds": logs.step_seconds,
        "played_seconds": played.step_seconds,
        "error": found.error,
        "staggered_seconds": found.staggered.step_seconds,
        "bubble_over_compute": played.bubble_over_compute,
        "bubble_over_total": played.bubble_over_total,
        "spent": dict(_spent(found)),
        "waits": logs.waits().tolist(),
        "as_fast_as_its_peers": [{"rank": rank, "seconds": seconds} for rank, seconds in found.normal],
        "notes": list(logs.notes),
    }


def replay_page(found: Replayed, *, name: str) -> drawing.Page:
    """The timeline of all ranks, what each did and waited, and who holds up the step."""
    logs, played, grid = found.logs, found.played, found.grid
    total = np.zeros((grid.dp, grid.pp, grid.cp, grid.tp))
    waits = total + played.spent["pp_wait"] + played.spent["end_wait"] + played.spent["dp_wait"]
    return drawing.Page(
        title=f"{name}: step {logs.step}, played again from its measured durations",
        summary=(
            ("measured", duration(logs.step_seconds)),
            ("played", f"{duration(played.step_seconds)} ({100 * found.error:+.1f} %)"),
            ("bubble", _bubble(found)),
        ),
        findings=tuple(
            f"Were rank {rank} as fast as its peers, the step would be {duration(seconds)} shorter."
            for rank, seconds in found.normal[:SHOWN]
            if seconds > 0
        ),
        timeline=_timeline(found),
        splits=(drawing.Split("The step, mean of all ranks", "s", tuple(_in_words(found))),),
        heat_maps=(
            drawing.HeatMap(
                "Computing time of every rank, waiting inside of it included", "s", total + played.spent["compute"]
            ),
            drawing.HeatMap("Waiting time of every rank", "s", waits),
        ),
        notes=(
            "Durations are those of the run's action logs; when things happen follows from the schedule alone.",
            *logs.notes,
        ),
    )


def _timeline(found: Replayed) -> drawing.Timeline:
    """A row per global rank."""
    played, grid = found.played, found.grid
    boxes, causes = [], {}
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        lane = (at.dp, at.cp, at.tp)
        for i in played.graph.on_rank[at.pp]:
            node = played.graph.nodes[i]
            start, end = float(played.start[i][lane]), float(played.end[i][lane])
            wait, cause = 0.0, NONE
            if node.needs != NONE and node.before != NONE:
                wait = max(float(played.end[node.needs][lane]) - float(played.end[node.before][lane]), 0.0)
            if wait > 0:
                needed = played.graph.nodes[node.needs]
                sentence = f"waits for {needed.action} of pipeline rank {needed.pp_rank}"
                cause = causes.setdefault(sentence, len(causes))
            kind = drawing.KINDS.index(node.kind.value)
            boxes.append((rank, kind, node.stage, node.micro_batch, start, end, wait, cause))
    columns = [np.array(column) for column in zip(*boxes, strict=True)]
    return drawing.Timeline(
        title=f"Step {found.logs.step}",
        unit="s",
        rows=tuple(drawing.rank_label(grid, rank) for rank in range(grid.size)),
        num_chunks=played.graph.schedule.v,
        pp=grid.pp,
        boxes=drawing.Boxes(*columns),
        causes=tuple(causes),
        span=played.step_seconds,
    )
