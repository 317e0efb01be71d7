"""Takes a model and a layout, and gives stages that run: one file per dimension."""

from fourfold.parallel.groups import Groups, connect
from fourfold.parallel.model import MicroBatch, ParallelModel, StepTotals
from fourfold.parallel.pipeline import LoggedAction
from fourfold.parallel.stage import WeightSource, from_state

__all__ = [
    "Groups",
    "LoggedAction",
    "MicroBatch",
    "ParallelModel",
    "StepTotals",
    "WeightSource",
    "connect",
    "from_state",
]
