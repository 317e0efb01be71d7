"""A measured step played again: what the graph makes of its durations, and what it would take without a rank's own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fourfold.layout import Grid, Schedule
from fourfold.simulator.played import Played
from fourfold.simulator.replay import Logs, graph_of, message_seconds, replay, with_normal_rank


@dataclass(frozen=True)
class Replayed:
    """One step of a run."""

    logs: Logs
    grid: Grid
    played: Played
    """From its durations alone: all ranks begin at once."""
    staggered: Played
    """With the times at which the ranks began, too: from there on, durations alone."""
    normal: tuple[tuple[int, float], ...]
    """(global rank, seconds by which the step would be shorter, were it as fast as its peers), most first."""

    @property
    def error(self) -> float:
        """Of the played step time, relative to the measured one."""
        return self.played.step_seconds / self.logs.step_seconds - 1


def replayed(logs: Logs, schedule: Schedule, grid: Grid) -> Replayed:
    """Plays a step again, and once more for each rank with the durations of its peers instead of its own.

    ValueError: the logs are of another layout or another schedule.
    """
    graph = graph_of(logs, schedule, grid)
    known = dataclasses.replace(logs, message=message_seconds(logs, grid))
    played = replay(known, graph, grid)
    normal = []
    if grid.size > grid.pp:  # a rank without peers is neither slow nor fast
        for rank in range(grid.size):
            seconds = replay(with_normal_rank(known, rank, grid), graph, grid).step_seconds
            normal.append((rank, played.step_seconds - seconds))
    staggered = replay(known, graph, grid, staggered=True)
    return Replayed(logs, grid, played, staggered, tuple(sorted(normal, key=lambda gain: -gain[1])))
