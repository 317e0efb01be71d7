"""The largest piece that an allocator had free at some moment, out of what it has now and did since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Segment = tuple[int, int]
"""Address and bytes."""
_MULTIPLE = 512  # bytes: PyTorch's allocator rounds every block up to a multiple


def largest_free(
    there: Iterable[Segment],
    later: Sequence[tuple[bool, Segment]],
    address: NDArray[np.int64],
    size: NDArray[np.int64],
    *,
    joins: bool,
) -> int:
    """Bytes of the largest stretch of a segment in which no block lies.

    Args:
        there: segments in the end.
        later: what was taken from the device (True) and returned to it (False) after the moment, in order.
        address, size: blocks that are alive at the moment; they may lie in other segments.
        joins: whether segments that lie side by side are one, as expandable ones are.
    """
    stretches = [(start, start + length) for start, length in there]
    for is_taken, (start, length) in reversed(later):
        if is_taken:
            stretches = _without(stretches, start, start + length)
        else:
            stretches.append((start, start + length))
    stretches.sort()
    if joins:
        stretches = _joined(stretches)
    order = np.argsort(address, kind="stable")
    begin, end = address[order], (address + -(-size // _MULTIPLE) * _MULTIPLE)[order]
    best = 0
    for start, stop in stretches:
        first, last = np.searchsorted(begin, (start, stop))
        edges = np.concatenate(([start], end[first:last]))
        gaps = np.append(begin[first:last], stop) - np.maximum.accumulate(edges)
        best = max(best, int(gaps.max()))
    return best


def _without(stretches: list[Segment], start: int, stop: int) -> list[Segment]:
    out = []
    for one, end in stretches:
        out += [piece for piece in ((one, min(end, start)), (max(one, stop), end)) if piece[0] < piece[1]]
    return out


def _joined(stretches: list[Segment]) -> list[Segment]:
    out: list[Segment] = []
    for start, stop in stretches:
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], stop)
        else:
            out.append((start, stop))
    return out
