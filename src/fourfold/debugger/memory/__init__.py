"""What GPUs and hosts held, and what for: from PyTorch's memory snapshots and from profiler traces to an answer."""

from fourfold.debugger.memory.history import BEFORE, History, Purpose, Shortage
from fourfold.debugger.memory.peaks import DeviceMemory, Growth, Holder, Moment
from fourfold.debugger.memory.sources import find_memory, has_memory, snapshot_files
from fourfold.debugger.memory.verdict import Memory, Trouble, Uneven, unused

__all__ = [
    "BEFORE",
    "DeviceMemory",
    "Growth",
    "History",
    "Holder",
    "Memory",
    "Moment",
    "Purpose",
    "Shortage",
    "Trouble",
    "Uneven",
    "find_memory",
    "has_memory",
    "snapshot_files",
    "unused",
]
