"""A number per rank as colours: a block per DP group, in it a row per PP rank, in that the CP and TP ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fourfold.layout import Grid
from fourfold.report.drawing import HeatMap
from fourfold.report.palette import ABOVE, ALARM, BELOW, PAPER, QUIET
from fourfold.report.pictures.canvas import POINTS, head_lines, place, text_width, wrapped, write_at, write_head
from fourfold.report.scale import heat_scale

_TEXT = 8.0  # points
_WIDTH, _MAX_HEIGHT = 8.0, 9.0  # inches of all blocks together
_MAX_CELL = 0.3  # inches of one rank
_SHAPE = 1.5  # wished-for width over height of all blocks together
_RAGGED = 0.5  # how bad a last line with fewer blocks is, as the logarithm of a shape that is off
_RULED = 0.07  # inches of a cell from which on ranks of a block are parted by lines
_MIN_SCALE, _MAX_SCALE = 0.7, 3.0  # inches of the scale of colours
_MOST_MARKED = 6  # ranks that the text under the title names
_ROUNDING = 1e-5  # of the scale


@dataclass(frozen=True)
class _Blocks:
    """Where the blocks are. Cells are ranks; `gap_x`, `gap_y` are cells between two blocks, for the label above one."""

    dp: int
    pp: int
    cp: int
    tp: int
    columns: int
    gap_x: int
    gap_y: int
    cell: float  # inches

    @property
    def lines(self) -> int:
        return -(-self.dp // self.columns)

    @property
    def width(self) -> int:
        return self.columns * (self.cp * self.tp + self.gap_x) - self.gap_x

    @property
    def height(self) -> int:
        return self.lines * (self.pp + self.gap_y)

    def corner(self, dp_rank: int) -> tuple[int, int]:
        """Column and row of a block's first rank."""
        line, column = divmod(dp_rank, self.columns)
        return column * (self.cp * self.tp + self.gap_x), line * (self.pp + self.gap_y) + self.gap_y


def draw_heat_map(heat_map: HeatMap, heading: Sequence[str]) -> Figure:
    """The whole picture."""
    blocks = _arrange(*heat_map.values.shape)
    line = _TEXT / POINTS
    left = 0.25 + text_width(f"pp {blocks.pp - 1}", _TEXT)
    width, height = blocks.width * blocks.cell, blocks.height * blocks.cell
    full = max(left + width + 0.95, 5.5)
    head = head_lines(heading, heat_map.title, width=full - 0.3, text=_TEXT)
    low, high = heat_scale(heat_map.values)
    sentences = wrapped(_reading(blocks), full - 0.3, _TEXT)
    for said in (*_outside(heat_map, low, high), *_marked(heat_map)):
        sentences += wrapped(said, full - 0.3, _TEXT)
    below_head = 0.12 + sum(one.height for one in head)
    top = below_head + line * len(sentences) * 1.5 + line * 0.4
    figure = Figure(figsize=(full, top + max(height, blocks.gap_y * blocks.cell + _MIN_SCALE) + line * 3))
    write_head(figure, head)
    for number, text in enumerate(sentences):
        write_at(figure, 0.15, below_head + line * (1.0 + number * 1.5), text, size=_TEXT)
    axes = place(figure, left, top, width, height)
    shades = matplotlib.colormaps["viridis"].with_extremes(under=BELOW, over=ABOVE)
    image = axes.imshow(_raster(heat_map.values, blocks), cmap=shades, interpolation="nearest", aspect="auto")
    if high > low:
        room = _ROUNDING * (high - low)  # whose value is an end of the scale has its colour
        image.set_clim(low - room, high + room)
    axes.set_axis_off()
    _label(axes, blocks)
    _rule(axes, blocks)
    for number, rank in enumerate(heat_map.marked, start=1):
        _point_at(axes, blocks, rank, number)
    above = blocks.gap_y * blocks.cell
    room = min(max(height - above, _MIN_SCALE), _MAX_SCALE)
    scale = place(figure, left + width + 0.2, top + above, 0.14, room)
    bar = figure.colorbar(image, cax=scale)
    bar.outline.set_visible(False)
    scale.set_title(heat_map.unit, size=_TEXT, loc="left")
    return figure


def _arrange(dp: int, pp: int, cp: int, tp: int) -> _Blocks:
    """Blocks in as many columns as bring the picture near to its wished-for shape, with full lines if possible."""
    choices = [_sized(dp, pp, cp, tp, columns) for columns in range(1, dp + 1)]

    def badness(blocks: _Blocks) -> float:
        return abs(math.log(blocks.width / blocks.height / _SHAPE)) + (_RAGGED if dp % blocks.columns else 0.0)

    return min(choices, key=badness)


def _sized(dp: int, pp: int, cp: int, tp: int, columns: int) -> _Blocks:
    """The gaps are for a label, in inches, and whole cells; how large a cell is depends on them, and they on it."""
    gap_x = gap_y = 0
    cell = _MAX_CELL
    for _ in range(4):
        trial = _Blocks(dp, pp, cp, tp, columns, gap_x, gap_y, cell)
        cell = min(_MAX_CELL, _WIDTH / trial.width, _MAX_HEIGHT / trial.height)
        gap_x = max(1, math.ceil(0.06 / cell)) if columns > 1 else 0
        gap_y = max(1, math.ceil(_TEXT * 1.5 / POINTS / cell))
    return _Blocks(dp, pp, cp, tp, columns, gap_x, gap_y, cell)


def _raster(values: np.ndarray, blocks: _Blocks) -> np.ndarray:
    """All cells of the picture, NaN between the blocks."""
    out = np.full((blocks.height, blocks.width), np.nan)
    for dp_rank, block in enumerate(values.reshape(blocks.dp, blocks.pp, blocks.cp * blocks.tp)):
        x, y = blocks.corner(dp_rank)
        out[y : y + blocks.pp, x : x + blocks.cp * blocks.tp] = block
    return out


def _label(axes: Axes, blocks: _Blocks) -> None:
    """DP groups above their blocks, PP ranks left of the first ones, CP or TP ranks under the last ones."""
    width = blocks.cp * blocks.tp
    every = _every(text_width(f"dp {blocks.dp - 1} ", _TEXT), (width + blocks.gap_x) * blocks.cell)
    for dp_rank in range(blocks.dp):
        x, y = blocks.corner(dp_rank)
        if dp_rank % blocks.columns % every == 0:
            axes.annotate(
                f"dp {dp_rank}", (x - 0.5, y - 0.5), (0, 1.5),
                textcoords="offset points", size=_TEXT, va="bottom", ha="left",
            )  # fmt: skip
    every = _every(_TEXT * 1.1 / POINTS, blocks.cell)
    for line in range(blocks.lines):
        _, y = blocks.corner(line * blocks.columns)
        for pp_rank in range(0, blocks.pp if blocks.pp > 1 else 0, every):
            axes.annotate(
                f"pp {pp_rank}", (-0.5, y + pp_rank), (-3, 0),
                textcoords="offset points", size=_TEXT, va="center_baseline", ha="right", color=QUIET,
            )  # fmt: skip
    name, step = ("cp", blocks.tp) if blocks.cp > 1 else ("tp", 1)
    number = width // step
    every = _every(text_width(f"{name} {number - 1} ", _TEXT), step * blocks.cell)
    if every >= number:
        return  # a label alone would say nothing
    for dp_rank in range((blocks.lines - 1) * blocks.columns, blocks.dp):
        x, y = blocks.corner(dp_rank)
        for member in range(0, number, every):
            axes.annotate(
                f"{name} {member}", (x - 0.5 + step * member, y + blocks.pp - 0.5), (0, -2),
                textcoords="offset points", size=_TEXT, va="top", ha="left", color=QUIET,
            )  # fmt: skip


def _every(needed: float, room: float) -> int:
    """Which labels are shown, the first, and then each so-and-so-many-th: 1, 2, 4, 8 ... so that all have room."""
    return 1 << max(0, math.ceil(math.log2(needed / room)))


def _rule(axes: Axes, blocks: _Blocks) -> None:
    """Lines between the rows of a block, which are PP ranks, and between its CP ranks, where cells are large enough."""
    if blocks.cell < _RULED:
        return
    width = blocks.cp * blocks.tp
    corners = np.array([blocks.corner(dp_rank) for dp_rank in range(blocks.dp)]) - 0.5
    y = np.add.outer(corners[:, 1], np.arange(1, blocks.pp))
    x = np.broadcast_to(corners[:, :1], y.shape)
    axes.hlines(y.ravel(), x.ravel(), x.ravel() + width, color=PAPER, linewidth=0.8)
    x = np.add.outer(corners[:, 0], np.arange(1, blocks.cp) * blocks.tp)
    y = np.broadcast_to(corners[:, 1:], x.shape)
    axes.vlines(x.ravel(), y.ravel(), y.ravel() + blocks.pp, color=PAPER, linewidth=0.8)


def _point_at(axes: Axes, blocks: _Blocks, rank: tuple[int, int, int, int], number: int) -> None:
    """A frame around one rank, and its number in the text beside it."""
    dp_rank, pp_rank, cp_rank, tp_rank = rank
    x, y = blocks.corner(dp_rank)
    x, y = x + cp_rank * blocks.tp + tp_rank, y + pp_rank
    margin = max(0.0, 0.05 / blocks.cell - 0.5)  # a small rank has a frame with room around it
    side = 1 + 2 * margin
    corner = (x - 0.5 - margin, y - 0.5 - margin)
    for edge, width in ((PAPER, 3.0), (ALARM, 1.4)):  # one of which is seen on any ground
        axes.add_patch(Rectangle(corner, side, side, facecolor="none", edgecolor=edge, linewidth=width, clip_on=False))
    axes.annotate(
        str(number), (x + 0.5 + margin, y), (2, 0), textcoords="offset points",
        size=_TEXT, weight="bold", color=ALARM, va="center_baseline", annotation_clip=False,
        bbox={"boxstyle": "round,pad=0.1", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.85},
    )  # fmt: skip


def _reading(blocks: _Blocks) -> str:
    """How to read it."""
    inner = [f"{count} {name}" for name, count in (("CP", blocks.cp), ("TP", blocks.tp)) if count > 1]
    order = ", TP innermost" if len(inner) > 1 else ""
    row = f", in a row {' x '.join(inner)} ranks{order}" if inner else ""
    number = blocks.dp * blocks.pp * blocks.cp * blocks.tp
    return f"{number:,} ranks: a block per DP group, in it a row per PP rank{row}"


def _outside(heat_map: HeatMap, low: float, high: float) -> list[str]:
    """Who has a colour outside the scale, and how far that goes."""
    values = heat_map.values.astype(np.float32)  # as the scale is of
    found = []
    for out, furthest, words in (
        (values > high, np.nanargmax, "Red: far above all others"),
        (values < low, np.nanargmin, "Pink: far below all others"),
    ):
        if out.any():
            number = int(out.sum())
            where = tuple(int(i) for i in np.unravel_index(furthest(values), values.shape))
            ranks = "" if number == 1 else f" {number:,} ranks, the furthest of them"
            found.append(f"{words},{ranks} {_rank(heat_map, where)}")
    return found


def _marked(heat_map: HeatMap) -> list[str]:
    named = heat_map.marked[:_MOST_MARKED]
    found = [f"{number}: {_rank(heat_map, where)}" for number, where in enumerate(named, start=1)]
    more = len(heat_map.marked) - len(named)
    return [*found, f"and {more} more with a frame"] if more else found


def _rank(heat_map: HeatMap, where: tuple[int, ...]) -> str:
    """A rank by number and coordinates, and its value."""
    num_dp, num_pp, num_cp, num_tp = heat_map.values.shape
    dp, pp, cp, tp = where
    rank = Grid(tp=num_tp, cp=num_cp, pp=num_pp, dp=num_dp).rank(tp=tp, cp=cp, pp=pp, dp=dp)
    value = f"{heat_map.values[where]:.4g} {heat_map.unit}".rstrip()
    return f"rank {rank} (dp {dp}, pp {pp}, cp {cp}, tp {tp}), {value}"
