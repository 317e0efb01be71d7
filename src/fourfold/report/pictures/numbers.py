"""Thousands of short numbers in a picture, faster than with matplotlib's texts, each of which is laid out anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import IdentityTransform

# Of DejaVu Sans, in ems: all digits are as wide, and as high.
_DIGIT_WIDTH, _DIGIT_HEIGHT = 0.636, 0.729
_ROOM = 0.82  # part of a box's width and height that a number may fill
_LARGEST = 100.0  # points


def size_that_fits(numbers: np.ndarray, width: np.ndarray | float, height: float) -> np.ndarray:
    """Points of the largest text that shows each number in a box of so many points."""
    digits = np.floor(np.log10(np.maximum(numbers, 1))) + 1
    return np.minimum(np.minimum(width * _ROOM / (digits * _DIGIT_WIDTH), height * _ROOM / _DIGIT_HEIGHT), _LARGEST)


class Numbers(Artist):
    """Numbers centred at points of an axes' data."""

    def __init__(
        self,
        axes: Axes,
        *,
        x: np.ndarray,
        y: np.ndarray,
        texts: Sequence[str],
        colours: Sequence[str],
        points: float,
    ) -> None:
        super().__init__()
        self.set_zorder(3)  # above the boxes
        self._axes, self._at = axes, np.stack([x, y], axis=1)
        self._texts, self._colours, self._points = texts, colours, points

    def draw(self, renderer: RendererBase) -> None:
        """Draws them all. Called by matplotlib."""
        font = FontProperties(size=self._points)
        em = float(np.asarray(renderer.points_to_pixels(self._points)))
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for i, key in enumerate(zip(self._texts, self._colours, strict=True)):
            groups[key].append(i)
        at = self._axes.transData.transform(self._at)
        for (text, colour), members in groups.items():
            context = renderer.new_gc()
            context.set_foreground(to_rgb(colour), isRGBA=False)
            corner = at[members] - (len(text) * _DIGIT_WIDTH / 2 * em, _DIGIT_HEIGHT / 2 * em)
            if isinstance(renderer, RendererAgg):  # one outline, stamped wherever it is wanted
                context.set_linewidth(0)
                outline = TextPath((0, 0), text, size=em, prop=font)
                renderer.draw_markers(
                    context, outline, IdentityTransform(), Path(corner), IdentityTransform(), to_rgb(colour)
                )
            else:
                _, height = renderer.get_canvas_width_height()
                for x, y in corner.tolist():
                    renderer.draw_text(context, x, height - y if renderer.flipy() else y, text, font, 0.0)
            context.restore()
