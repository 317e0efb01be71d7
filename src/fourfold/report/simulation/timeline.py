"""A simulated step of one replica as a timeline: computations, messages and collectives beside them, and causes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fourfold.layout.actions import COMPUTE
from fourfold.report import drawing
from fourfold.report.simulation.words import alike
from fourfold.simulator.causes import Causes
from fourfold.simulator.critical import Replica
from fourfold.simulator.played import Played
from fourfold.simulator.scenario import Scenario

_STEP = drawing.KINDS.index("STEP")
_CLOSE = 1e-12  # relative: ends that differ by less are equal


class _Box(NamedTuple):
    """A row of `drawing.Boxes`."""

    row: int
    kind: int
    stage: int
    micro_batch: int
    start: float
    end: float
    wait: float = 0.0
    cause: int = -1


def worst_replica(played: Played) -> Replica:
    """The replica (dp, cp, tp) of what was simulated whose computations end last; of several the busiest."""
    lasts = [own[-1] for own in played.graph.on_rank if own]
    shape = (played.lanes.dp, played.lanes.cp, played.lanes.tp)
    ends = np.max([np.zeros(shape), *(played.end[i] for i in lasts)], axis=0)
    busy = (played.spent["compute"] + played.spent["attention"]).max(axis=1)
    last = ends >= ends.max() * (1 - _CLOSE)
    dp, cp, tp = np.unravel_index(int(np.where(last, busy, -1.0).argmax()), shape)
    return int(dp), int(cp), int(tp)


def simulation_timeline(scenario: Scenario, played: Played, found: Causes) -> drawing.Timeline:
    """A row per pipeline rank of one replica (dp, cp, tp) of what was simulated.

    Args:
        scenario: what was simulated.
        played: what came of it, with the times of all nodes.
        found: the replica's causes, which say which it is.
    """
    at = found.replica
    sentences: dict[str, int] = {}
    boxes, lanes = [], []
    for i, node in enumerate(played.graph.nodes):
        kind = drawing.KINDS.index(node.kind.value)
        start, end = float(played.start[i][at]), float(played.end[i][at])
        box = _Box(node.pp_rank, kind, node.stage, node.micro_batch, start, end)
        if node.kind in COMPUTE:
            wait, sentence, _ = found.before[i]
            cause = sentences.setdefault(sentence, len(sentences)) if sentence else -1
            boxes.append(box._replace(wait=wait, cause=cause))
        elif end > start:
            lanes.append(box)
    if played.step_seconds > played.pipeline_seconds:
        for pp_rank, (wait, sentence, _) in enumerate(found.at_end):
            cause = sentences.setdefault(sentence, len(sentences)) if sentence else -1
            over = (played.pipeline_seconds, played.step_seconds)
            boxes.append(_Box(pp_rank, _STEP, -1, -1, *over, wait, cause))
    return drawing.Timeline(
        title=f"One step, {_where(scenario, played, at)}",
        unit="s",
        rows=row_labels(scenario, played, at),
        num_chunks=scenario.schedule.v,
        pp=scenario.grid.pp,
        boxes=_columns(boxes),
        lanes=_columns(lanes) if lanes else None,
        causes=tuple(sentences),
        span=played.step_seconds,
    )


def row_labels(scenario: Scenario, played: Played, at: Replica) -> tuple[str, ...]:
    """Of the pipeline ranks of a replica; their global ranks as well, where replicas differ."""
    dp, cp, tp = at
    if alike(played):
        return tuple(f"pp {pp}" for pp in range(scenario.grid.pp))
    ranks = (scenario.grid.rank(dp=dp, pp=pp, cp=cp, tp=tp) for pp in range(scenario.grid.pp))
    return tuple(drawing.rank_label(scenario.grid, rank) for rank in ranks)


def _where(scenario: Scenario, played: Played, at: Replica) -> str:
    grid = scenario.grid
    replicas = grid.dp * grid.cp * grid.tp
    if replicas == 1:
        return "every rank"
    if alike(played):
        return f"one of {replicas:,} replicas that are all alike"
    dp, cp, tp = at
    return (
        f"the replica that ends last, dp {dp} cp {cp} tp {tp}"
        if at == worst_replica(played)
        else (f"the replica dp {dp} cp {cp} tp {tp}")
    )


def _columns(boxes: list[_Box]) -> drawing.Boxes:
    """By row and time."""
    columns = zip(*sorted(boxes, key=lambda box: (box.row, box.start)), strict=True)
    row, kind, stage, micro_batch, start, end, wait, cause = (np.array(column) for column in columns)
    return drawing.Boxes(row, kind, stage, micro_batch, start, end, wait, cause)
