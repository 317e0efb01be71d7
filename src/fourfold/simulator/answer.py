"""All that is known of a simulated step: what texts, pages and JSON show."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.simulator.critical import CriticalPath
from fourfold.simulator.live import StepMemory
from fourfold.simulator.loads import Loads
from fourfold.simulator.played import Played
from fourfold.simulator.scenario import Scenario
from fourfold.simulator.whatif import Gain


@dataclass(frozen=True)
class Answer:
    """One step."""

    scenario: Scenario
    played: Played
    """With the times of all nodes."""
    gains: tuple[Gain, ...]
    """What would help."""
    path: CriticalPath
    memory: StepMemory | None = None
    """Live bytes through the step, of the replica that ends last."""
    name: str = ""
    """Of the recipe."""
    tokens: int | None = None
    """Of the step."""
    splits: tuple[Loads, ...] = ()
    """With documents and context parallelism: the same documents under both splits."""
