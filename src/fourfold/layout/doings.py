"""What a rank does in a training step besides the actions of its schedule.

The trainer logs each beside the actions and names it in profiler traces; simulator and debugger read both.
"""

from __future__ import annotations

from enum import StrEnum

from fourfold.layout.labels import PREFIX


class Doing(StrEnum):
    """In the order in which a step comes to them. In some a rank meets others, and waits for those that are late."""

    LOAD = "LOAD"  # its micro-batches are made, or awaited from the thread that makes them
    CHECK = "CHECK"  # that replicas have the same inputs, in the first steps of a run
    COUNT = "COUNT"  # labels of all DP ranks are added up
    FLUSH = "FLUSH"  # after the last action: what was posted is sent
    SUM = "SUM"  # of the gradients that FSDP does not sum, and of the loss
    NORM = "NORM"  # of the gradients of all ranks
    STEP = "STEP"  # clipping and the optimizer
    MEET = "MEET"  # all ranks share what they measured, and whether to stop
    VALIDATE = "VALIDATE"  # the loss on a held-out set, after the step
    SAVE = "SAVE"  # training stands still for a checkpoint
    GC = "GC"  # Python's garbage is collected

    @property
    def range(self) -> str:
        """Its name in profiler traces: ff:load, ff:gc ... No label of :mod:`fourfold.layout.labels`."""
        return f"{PREFIX}:{self.value.lower()}"
