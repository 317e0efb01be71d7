"""Seconds on a device: by its own events on a GPU, by the clock on the wall on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int = 1) -> float:
    """Median seconds of some calls, after some that do not count.

    On a GPU the calls are given to it one right after the other, as a layer's are: what the host needs to launch them
    counts only where the GPU has nothing left to do.
    """
    for _ in range(warm_up):
        work()
    synchronize(device)
    if device.type != "cuda":
        return median(_wall(work) for _ in range(repeats))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    synchronize(device)
    return median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3  # events count milliseconds


def _wall(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
