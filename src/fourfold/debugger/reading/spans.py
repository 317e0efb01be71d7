"""Sets of stretches of time, as sorted arrays of starts and ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.reading.trace import UNKNOWN, Times


def outermost(start: Times, end: Times) -> NDArray[np.intp]:
    """Rows of those that lie in no other. They nest; given in order of start, of those together the longest first."""
    if not len(start):
        return np.zeros(0, dtype=np.intp)
    reach = np.maximum.accumulate(end)
    first = np.ones(len(start), dtype=bool)
    first[1:] = (start[1:] >= reach[:-1]) & ~((end[1:] == reach[:-1]) & (start[1:] == start[:-1]))
    return np.flatnonzero(first)


def merged(start: Times, end: Times) -> tuple[Times, Times]:
    """Their union, as stretches that do not touch. Given in order of start."""
    if not len(start):
        return start, end
    reach = np.maximum.accumulate(end)
    begins = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    return start[begins], reach[np.append(begins[1:] - 1, len(start) - 1)]


def without(start: Times, end: Times, gone: tuple[Times, Times]) -> tuple[Times, Times, NDArray[np.intp]]:
    """What is left of stretches that do not overlap, and of which each remainder is.

    `gone` does not touch itself. Both in order of start.
    """
    rows = np.flatnonzero(end > start)  # what takes no time neither is left nor cuts
    start, end = start[rows], end[rows]
    some = gone[1] > gone[0]
    cut_start, cut_end = gone[0][some], gone[1][some]
    if not len(start) or not len(cut_start):
        return start, end, rows
    keep_start = ~_inside(start, cut_start, cut_end, closed_left=True)
    keep_end = ~_inside(end, cut_start, cut_end, closed_left=False)
    # What goes from the end of a cut to the start of the next, or of the stretch.
    begin_in, end_in = _strict_holder(cut_end, start, end), _strict_holder(cut_start, start, end)
    begins = np.concatenate((start[keep_start], cut_end[begin_in >= 0]))
    of = np.concatenate((np.flatnonzero(keep_start), begin_in[begin_in >= 0]))
    ends = np.concatenate((end[keep_end], cut_start[end_in >= 0]))
    order = np.argsort(begins, kind="stable")
    return begins[order], np.sort(ends), rows[of[order]]


def holder(at: Times, start: Times, end: Times) -> NDArray[np.intp]:
    """Which of some stretches that do not overlap each time lies in, from its start to before its end; UNKNOWN."""
    if not len(start):
        return np.full(len(at), UNKNOWN)
    row = np.searchsorted(start, at, side="right") - 1
    return np.where((row >= 0) & (at < end[np.maximum(row, 0)]), row, UNKNOWN)


def _holder_of_end(at: Times, start: Times, end: Times) -> NDArray[np.intp]:
    """The same from after the start to the end."""
    row = np.searchsorted(start, at, side="left") - 1
    return np.where((row >= 0) & (at <= end[np.maximum(row, 0)]), row, UNKNOWN)


def _strict_holder(at: Times, start: Times, end: Times) -> NDArray[np.intp]:
    """The same from after the start to before the end."""
    row = holder(at, start, end)
    return np.where((row >= 0) & (at > start[row]), row, UNKNOWN)


def _inside(at: Times, start: Times, end: Times, *, closed_left: bool) -> NDArray[np.bool_]:
    return (holder(at, start, end) if closed_left else _holder_of_end(at, start, end)) >= 0
