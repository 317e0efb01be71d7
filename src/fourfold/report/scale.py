"""Which values the colours of a heat map stand for: the same on pages and in pictures."""

from __future__ import annotations

import numpy as np

_FEWEST = 8  # ranks of a heat map, from which on one of them can be an outlier
_FAR = 0.5  # of the distance between the highest and the lowest of the others: an outlier is further from them
_NEAR = 0.01  # of the middle value: nobody who is as close to the others is an outlier
_ALIKE = 1e-6  # of the largest: what differs by less is alike


def heat_scale(values: np.ndarray) -> tuple[float, float]:
    """Which values have the first and the last colour of a heat map; (0, 0) if there are none.

    The few that are far from all others are left out: one slow rank would make all the others look alike.
    """
    known = np.sort(values[~np.isnan(values)].astype(np.float32))  # as the script has them
    if not known.size:
        return 0.0, 0.0
    if known[-1] - known[0] <= _ALIKE * np.abs(known).max():
        return float(known[0]), float(known[-1])
    few = max(known.size // 100, int(known.size >= _FEWEST))
    low, high = float(known[few]), float(known[known.size - 1 - few])
    room = max(_FAR * (high - low), _NEAR * abs(float(known[known.size // 2])))
    # Up to the last that is not far from them: of many ranks a hundredth is more than those that are far.
    return (
        float(known[np.searchsorted(known, low - room, "left")]),
        float(known[np.searchsorted(known, high + room, "right") - 1]),
    )
