"""Takes a model and a layout, and gives stages that run: one file per dimension."""

from fourfold.parallel.batch import LocalBatch
from fourfold.parallel.gradients import TrainedWeight
from fourfold.parallel.groups import Group, Groups, connect
from fourfold.parallel.model import MicroBatch, ParallelModel, StepTotals
from fourfold.parallel.pipeline import LoggedAction
from fourfold.parallel.recorder import LoggedDoing, Recorder
from fourfold.parallel.stage import TIED_EMBEDDING, TIED_HEAD, WeightSource
from fourfold.parallel.torch_private import flight_recorder, missing_compiler

__all__ = [
    "TIED_EMBEDDING",
    "TIED_HEAD",
    "Group",
    "Groups",
    "LocalBatch",
    "LoggedAction",
    "LoggedDoing",
    "MicroBatch",
    "ParallelModel",
    "Recorder",
    "StepTotals",
    "TrainedWeight",
    "WeightSource",
    "connect",
    "flight_recorder",
    "missing_compiler",
]
