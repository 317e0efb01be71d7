"""A step of action logs as a timeline: its durations, played through the schedule."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fourfold.debugger.slow.diagnosis import Diagnosis
from fourfold.debugger.slow.whatif import Replay
from fourfold.report import drawing
from fourfold.report.diagnosis.around import around, centre, culprit_ranks
from fourfold.report.diagnosis.rows import Box, Gap, Rows
from fourfold.simulator.graph import NONE
from fourfold.simulator.played import Played

_ROUNDING = 1e-9  # seconds: what is less is nothing


def replay_timeline(found: Diagnosis, replay: Replay) -> drawing.Timeline | None:
    """A row per rank; None if there is no rank to show."""
    grid, played = replay.grid, replay.played()
    shown = around(grid, centre(found), np.flatnonzero(found.accounts.present).tolist())
    if not shown:
        return None
    culprits = culprit_ranks(found)
    rows, labels = Rows(), []
    for row, (rank, relation) in enumerate(shown):
        boxes, gaps = [], []
        for box, more in _computations(replay, played, rank):
            boxes.append(box)
            gaps += more
        rows.add(row, boxes, gaps, begin=0.0)
        what = "culprit" if rank in culprits else relation
        labels.append(drawing.rank_label(grid, rank) + (f", {what}" if what else ""))
    title = f"Step {replay.step}, played again from its durations: rank {centre(found)[0]} and those around it"
    return rows.timeline(title, labels, pp=grid.pp, span=played.pipeline_seconds)


def _computations(replay: Replay, played: Played, rank: int) -> Iterator[tuple[Box, list[Gap]]]:
    """A rank's computations in order, and what it waits for before and after each."""
    grid = replay.grid
    at = grid.coordinates(rank)
    lane, shape = (at.dp, at.cp, at.tp), (grid.dp, grid.cp, grid.tp)
    for i in played.graph.on_rank[at.pp]:
        node = played.graph.nodes[i]
        starts, ends = (np.broadcast_to(np.asarray(of[i]), shape) for of in (played.start, played.end))
        ready = starts + replay.own[node.action] + replay.after[node.action]
        start, done, end = float(starts[lane]), float(ready[lane]), float(ends[lane])
        late = float(replay.before[node.action][lane])
        begun = float(np.broadcast_to(np.asarray(played.end[node.before]), shape)[lane]) if node.before != NONE else 0.0
        gaps = []
        if late > _ROUNDING:
            gaps.append(Gap(begun, begun + late, "Does something else between its computations, or its host is late."))
        if node.needs != NONE and start - late - begun > _ROUNDING:
            needed = played.graph.nodes[node.needs]
            source = grid.rank(tp=at.tp, cp=at.cp, pp=needed.pp_rank, dp=at.dp)
            what = f"{needed.stage}{needed.kind.value.removeprefix('SEND_')}{needed.micro_batch}"
            gaps.append(Gap(begun + late, start, f"Waits for a message from rank {source}: the result of {what}."))
        if end - done > _ROUNDING:
            cp, tp = np.unravel_index(int(ready[at.dp].argmax()), ready[at.dp].shape)
            slowest = grid.rank(tp=int(tp), cp=int(cp), pp=at.pp, dp=at.dp)
            gaps.append(Gap(done, end, f"Waits for rank {slowest}, its TP or CP peer, which computes longer."))
        yield Box(node.kind.value, node.stage, node.micro_batch, start, done), gaps
