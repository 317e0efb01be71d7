"""Boxes of a few pixels in a picture of pixels: each pixel has the mean colour of what is on it, as on the page.

With their edges at whole pixels, equal boxes would be alternately wider and narrower, and gaps of half a pixel there or
not: patterns that look like waiting. Painted one after the other, two boxes that share a pixel would let more of the
ground through than is free.
"""

from __future__ import annotations

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase

_THIN = 0.7  # pixels: a box is as wide at least, or a step's shortest boxes would not be seen
_PARTED, _FULL = 5.0, 18.0  # pixels of a box from which on it is parted from the next, and by a whole pixel
_LEAST = 1e-9  # of a pixel: less is rounding


class Strips(Artist):
    """Boxes along the rows of an axes, for a renderer of pixels."""

    def __init__(self, axes: Axes, corners: np.ndarray, colours: np.ndarray, ground: np.ndarray) -> None:
        """
        Args:
            axes: whose data the corners are of.
            corners: float [boxes, 4], left, right, low, high; boxes of a row have one low and one high.
            colours: float [boxes, 3], in [0, 1].
            ground: float [3]: what is between boxes.
        """
        super().__init__()
        self.set_zorder(1)
        self._axes, self._corners, self._colours, self._ground = axes, corners, colours, ground

    def draw(self, renderer: RendererBase) -> None:
        """Draws them all. Called by matplotlib."""
        first, last = np.rint(self._axes.get_window_extent().intervalx).astype(int).tolist()
        at = self._axes.transData.transform(self._corners.reshape(-1, 2, 2).swapaxes(1, 2).reshape(-1, 2))
        left, right = at[::2, 0] - first, at[1::2, 0] - first
        low, high = np.rint(at[::2, 1]).astype(int), np.rint(at[1::2, 1]).astype(int)
        context = renderer.new_gc()
        for row in np.unique(self._corners[:, 2]).tolist():
            mine = np.flatnonzero(self._corners[:, 2] == row)
            line = mixed(left[mine], right[mine], self._colours[mine], self._ground, last - first)
            pixels = np.append(line, np.ones((len(line), 1)), axis=1) * 255
            edges = sorted((int(low[mine[0]]), int(high[mine[0]])))
            image = np.broadcast_to(np.rint(pixels).astype(np.uint8), (edges[1] - edges[0], *pixels.shape))
            renderer.draw_image(context, first, edges[0], np.ascontiguousarray(image))
        context.restore()


def mixed(left: np.ndarray, right: np.ndarray, colours: np.ndarray, ground: np.ndarray, pixels: int) -> np.ndarray:
    """A line of pixels, float [pixels, 3]: of each, the mean of the colours on it by how much of it they cover.

    `left`, `right`: of the boxes, in pixels.
    """
    # So that equal boxes, one after the other, can be counted: a part of a pixel that grows with their width.
    parted = np.clip((right - left - _PARTED) / (_FULL - _PARTED), 0.0, 1.0)
    right = np.maximum(right - parted, left + _THIN)
    weights = np.append(colours, np.ones((len(colours), 1)), axis=1)
    edges, signs = np.concatenate([left, right]), np.repeat([1.0, -1.0], len(left))
    edges = np.clip(edges, 0.0, float(pixels))
    # How much is covered up to a pixel's end is a sum of ramps, one from each edge on; so each adds to two pixels.
    pixel = np.floor(edges).astype(int)
    beyond = edges - pixel
    sums = np.empty((pixels, 4))
    for channel in range(4):
        amount = signs * np.tile(weights[:, channel], 2)
        steps = np.bincount(pixel, amount * (1 - beyond), pixels + 2)
        steps += np.bincount(pixel + 1, amount * beyond, pixels + 2)
        sums[:, channel] = np.cumsum(steps)[:pixels]
    covered = np.where(sums[:, 3:] > _LEAST, sums[:, 3:], 0.0)
    mean = sums[:, :3] / np.maximum(covered, _LEAST)
    free = 1 - np.minimum(covered, 1.0)  # messages may lie on top of each other
    return np.clip(np.where(covered > 0, mean * (1 - free) + ground * free, ground), 0.0, 1.0)
