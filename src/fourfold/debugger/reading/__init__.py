"""Traces of PyTorch's profiler, read into columns."""

from fourfold.debugger.reading.folder import find, read_all
from fourfold.debugger.reading.kineto import read
from fourfold.debugger.reading.merged import write_merged

__all__ = ["find", "read", "read_all", "write_merged"]
