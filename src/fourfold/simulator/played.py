"""What came of playing a step: when everything happened on every rank, and what each rank spent its time on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fourfold.layout import Grid
from fourfold.simulator.graph import Graph

COMPUTING = ("compute", "attention")
COMMUNICATION = {"tp": ("tp", "tp_wait"), "cp": ("cp", "cp_wait"), "pp": ("pp_wait",), "dp": ("dp", "dp_wait")}
"""By dimension: the classes of what its communication costs, transfers and waiting for others."""
CLASSES = (
    "compute",  # all but attention
    "attention",
    "tp",  # transfers that nothing hides
    "tp_wait",  # for slower ranks of the group
    "cp",
    "cp_wait",
    "pp_wait",  # for a message of a neighbour: the bubble, and what messages add to it
    "dp",  # FSDP's collectives, as far as they are not hidden, and what they slow
    "dp_wait",  # for the slowest replica's gradients
    "host",  # launched late
    "end_wait",  # for the last rank, at the end of the step
    "optimizer",
    "fixed",
)
"""What a rank's step consists of; they sum to it."""


@dataclass(frozen=True)
class Played:
    """One step. Lanes are the replicas that were simulated: of a dimension along which all are alike, one."""

    graph: Graph
    lanes: Grid
    start: tuple[np.ndarray, ...] = field(repr=False)
    """Seconds, float64 [dp, cp, tp] per node of the graph; empty if they were not kept."""
    end: tuple[np.ndarray, ...] = field(repr=False)
    pipeline_seconds: float
    """Until the last rank has done all but the optimizer's step."""
    step_seconds: float
    spent: Mapping[str, np.ndarray] = field(repr=False)
    """Seconds by class, float64 [dp, pp, cp, tp]. Of every rank they sum to `step_seconds`."""

    @cached_property
    def computing(self) -> np.ndarray:
        """float64 [dp, pp, cp, tp]: seconds in forwards and backwards, with the communication inside of them."""
        inside = ("compute", "attention", "tp", "tp_wait", "cp", "cp_wait")
        return np.sum([self.spent[name] for name in inside], axis=0)

    @cached_property
    def idle(self) -> np.ndarray:
        """float64 [dp, pp, cp, tp]: seconds of waiting for other pipeline ranks, in the step or at its end."""
        return self.spent["pp_wait"] + self.spent["end_wait"]

    @property
    def bubble_seconds(self) -> float:
        """Idle time of the mean rank."""
        return float(self.idle.mean())

    @property
    def bubble_over_step(self) -> float:
        """Idle time of the mean rank over the step."""
        return self.bubble_seconds / self.step_seconds

    @property
    def bubble_over_compute(self) -> float:
        """Idle time over time in forwards and backwards, all ranks together: the paper's r."""
        return float(self.idle.sum() / self.computing.sum())

    @property
    def bubble_over_total(self) -> float:
        """Idle time over both: r / (1 + r)."""
        return float(self.idle.sum() / (self.idle.sum() + self.computing.sum()))

    def share(self, *names: str) -> float:
        """Of the step, the mean rank's share of some classes."""
        return float(sum(self.spent[name].mean() for name in names) / self.step_seconds)
