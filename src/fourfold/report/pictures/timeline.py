"""A pipeline's timeline as the papers draw it: a row per rank, a box per computation, empty where a rank waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from fourfold.report.drawing import KINDS, Boxes, Memory, Timeline
from fourfold.report.palette import FAINT, IDLE, INK, KIND_NAMES, PAPER, QUIET, colour, ink_on
from fourfold.report.pictures.canvas import (
    DPI,
    POINTS,
    head_lines,
    place,
    set_times,
    text_width,
    time_label,
    write_head,
)
from fourfold.report.pictures.memory import curves_height, draw_curves, names_width
from fourfold.report.pictures.numbers import Numbers, size_that_fits
from fourfold.report.pictures.strips import Strips

_COMPUTATIONS = ("F", "B", "I", "W")
_BOX, _LANE = 0.84, 0.2  # parts of a row's height: a box, and the lane of messages under it
_MIN_WIDTH = 7.0  # inches of the axis of time
_MAX_WIDTH = 20.0  # inches of the picture, if labels leave enough of that: more would not be read on a slide
_BOX_WIDTH = 0.115  # inches of a short box, if all fit: two digits in readable size
_TEXT_AT = 11.0  # inches of the axis for text of 8 points; it is larger in a wider picture, but not twice as large
_ROW, _MAX_ROWS = 0.3, 6.5  # inches of a row for text of 8 points, and of all of them together
_SMALLEST, _LEAST = 5.0, 0.45  # points of a number, and part of the text's size
_MOST = 0.5  # part of the boxes of a row and stage in which a number must fit, or none of them has one
_LARGEST_RATIO = 1.5  # of the sizes of numbers in boxes of different kinds
_PARTED, _ALIGNED = 2.0, 8.0  # points of a typical box from which on there are lines between boxes, in whole pixels
_TOUCHING = 0.05  # pixels
_BOXES_PER_PATH = 200  # so few corners that matplotlib aligns them with pixels


@dataclass(frozen=True)
class _Measures:
    """Inches, but for `text` and `small`, which are points."""

    width: float
    rows: float
    left: float
    right: float
    text: float
    small: float
    per_time: float

    @property
    def full(self) -> float:
        return self.left + self.width + self.right


def draw_timeline(timeline: Timeline, memory: Memory | None, heading: Sequence[str], *, pixels: bool) -> Figure:
    """The whole picture: heading, title, legend, rows, and the memory under them. pixels: not of lines and areas."""
    span = timeline.span or max((float(b.end.max(initial=0.0)) for b in _all_boxes(timeline)), default=0.0) or 1.0
    size = _measures(timeline, span, memory)
    line = size.text / POINTS
    head = head_lines(heading, timeline.title, width=size.full - 0.3, text=size.text)
    legend = _legend_lines(timeline, size)
    below_head = 0.12 + sum(one.height for one in head)
    top = below_head + len(legend) * line * 1.8 + 0.08
    curves = curves_height(memory, size.full - 0.3, size.text) if memory is not None else 0.0
    axis = line * 3.6
    figure = Figure(figsize=(size.full, top + size.rows + axis + curves))
    write_head(figure, head)
    _draw_legend(figure, legend, below_head, size)
    axes = place(figure, size.left, top, size.width, size.rows)
    _draw_rows(axes, timeline, span, size, pixels=pixels)
    set_times(axes, timeline.unit, span)
    axes.set_xlabel(time_label(timeline.unit, span), size=size.text, loc="left")
    if memory is not None:
        draw_curves(figure, memory, span, left=size.left, top=top + size.rows + axis, width=size.width, text=size.text)
    return figure


def _all_boxes(timeline: Timeline) -> list[Boxes]:
    return [boxes for boxes in (timeline.boxes, timeline.lanes) if boxes is not None]


def _measures(timeline: Timeline, span: float, memory: Memory | None) -> _Measures:
    """Wide enough for the numbers of short boxes, if that is not too wide; text grows with the picture."""
    durations = timeline.boxes.end - timeline.boxes.start
    durations = durations[durations > 0]
    short = float(np.quantile(durations, 0.1)) if durations.size else span
    width = float(np.clip(span / short * _BOX_WIDTH, _MIN_WIDTH, _MAX_WIDTH))
    text = 8.0 * float(np.clip(width / _TEXT_AT, 1, 2))
    left = 0.3 + max([text * 5 / POINTS, *(text_width(row, text) for row in timeline.rows)])
    right = 0.25 if memory is None else names_width(memory, text)
    width = max(min(width, _MAX_WIDTH - left - right), _MIN_WIDTH)
    rows = min(_ROW * text / 8 * len(timeline.rows) * (1.25 if timeline.lanes is not None else 1), _MAX_ROWS)
    return _Measures(width, rows, left, right, text, min(text, rows / len(timeline.rows) * POINTS * 0.7), width / span)


def _draw_rows(axes: Axes, timeline: Timeline, span: float, size: _Measures, *, pixels: bool) -> None:
    num_rows = len(timeline.rows)
    axes.set(xlim=(0, span), ylim=(num_rows - 0.5, -0.5))
    axes.spines["left"].set_visible(False)
    # As many labels as there is room for, the first always among them.
    step = max(1, -(-num_rows * size.text * 1.1 // (size.rows * POINTS)))
    shown = range(0, num_rows, int(step))
    axes.set_yticks(shown, [timeline.rows[row] for row in shown])
    axes.tick_params(labelsize=size.text)
    axes.tick_params(axis="y", length=0)
    edges = [(0.0, span, row - _BOX / 2, row + _BOX / 2) for row in range(num_rows)]
    axes.add_artist(PathPatch(_rectangles(np.array(edges)), facecolor=IDLE, linewidth=0))
    low, high = _box_edges(timeline)
    _draw_boxes(axes, timeline, timeline.boxes, low, high, size, pixels=pixels)
    if timeline.lanes is not None:
        _draw_boxes(axes, timeline, timeline.lanes, high, _BOX / 2, size, pixels=pixels)
    _draw_numbers(axes, timeline, size)


def _draw_boxes(
    axes: Axes, timeline: Timeline, boxes: Boxes, low: float, high: float, size: _Measures, *, pixels: bool
) -> None:
    """All boxes of one colour are few paths: a patch for each box would take a minute. Or pixels."""
    if not len(boxes.row):
        return
    typical = float(np.median(boxes.end - boxes.start)) * size.per_time * POINTS
    edge = min(typical * 0.06, 0.8) if typical > _PARTED else 0.0
    corners = np.stack([boxes.start, boxes.end, boxes.row + low, boxes.row + high], axis=1)
    if pixels and typical < _ALIGNED:
        shades = np.array([to_rgb(colour_) for colour_ in _colours(timeline, boxes).tolist()])
        axes.add_artist(Strips(axes, corners, shades, np.array(to_rgb(IDLE))))
        return
    if not edge:
        # Two boxes that share a pixel let what is under them shine through: not grey, as if the rank were idle.
        under = _rectangles(corners[_touched(boxes, size)])
        axes.add_artist(PathPatch(under, facecolor=_mean_colour(timeline, boxes), linewidth=0))
    for colour_, members in _by_colour(timeline, boxes).items():
        for first in range(0, len(members), _BOXES_PER_PATH):
            path = _rectangles(corners[members[first : first + _BOXES_PER_PATH]])
            # As an artist, so that no time goes into looking for the limits of the axes, which are known.
            axes.add_artist(
                PathPatch(path, facecolor=colour_, edgecolor=PAPER, linewidth=edge, snap=typical > _ALIGNED)
            )


def _by_colour(timeline: Timeline, boxes: Boxes) -> dict[str, np.ndarray]:
    """Indices of the boxes by their colour."""
    colours = _colours(timeline, boxes)
    return {colour_: np.flatnonzero(colours == colour_) for colour_ in sorted(set(colours.tolist()))}


def _colours(timeline: Timeline, boxes: Boxes) -> np.ndarray:
    chunk = np.maximum(boxes.stage, 0) // timeline.pp
    table = np.array([[colour(kind, c, timeline.num_chunks) for c in range(timeline.num_chunks)] for kind in KINDS])
    return table[boxes.kind, np.minimum(chunk, timeline.num_chunks - 1)]


def _touched(boxes: Boxes, size: _Measures) -> np.ndarray:
    """bool [boxes]: whether another of the row begins where a box ends."""
    order = np.lexsort((boxes.start, boxes.row))
    apart = boxes.start[order[1:]] - boxes.end[order[:-1]]
    near = (apart * size.per_time * DPI < _TOUCHING) & (boxes.row[order[1:]] == boxes.row[order[:-1]])
    touched = np.zeros(len(order), dtype=bool)
    touched[order] = np.append(near, False)
    return touched


def _mean_colour(timeline: Timeline, boxes: Boxes) -> tuple[float, float, float]:
    """What the boxes look like from afar."""
    shares = np.array([to_rgb(colour_) for colour_ in _colours(timeline, boxes).tolist()])
    red, green, blue = np.average(shares, axis=0, weights=np.maximum(boxes.end - boxes.start, 1e-12)).tolist()
    return red, green, blue


def _rectangles(edges: np.ndarray) -> Path:
    """One path of many boxes. edges: float [boxes, 4], left, right, low, high."""
    left, right, low, high = edges.T
    x = np.stack([left, right, right, left, left], axis=1)
    y = np.stack([low, low, high, high, low], axis=1)
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(edges)
    return Path(np.stack([x.ravel(), y.ravel()], axis=1), codes)


def _draw_numbers(axes: Axes, timeline: Timeline, size: _Measures) -> None:
    """The number of its micro-batch in each box where it fits."""
    boxes = timeline.boxes
    low, high = _box_edges(timeline)
    points = _number_sizes(timeline, size)
    colours = _colours(timeline, boxes)
    inks = {colour_: ink_on(colour_) for colour_ in set(colours.tolist())}
    for value in np.unique(points[points > 0]).tolist():
        chosen = np.flatnonzero(points == value)
        axes.add_artist(
            Numbers(
                axes,
                x=(boxes.start[chosen] + boxes.end[chosen]) / 2,
                y=boxes.row[chosen] + (low + high) / 2,
                texts=[str(number) for number in boxes.micro_batch[chosen].tolist()],
                colours=[inks[colour_] for colour_ in colours[chosen].tolist()],
                points=value,
            )
        )


def _number_sizes(timeline: Timeline, size: _Measures) -> np.ndarray:
    """Points of the number in each box, 0 where none fits. One size per kind of box, and not too different ones.

    What fits is what the widest number of the row would: 0 to 9 alone would look as if the others were not there.
    """
    boxes = timeline.boxes
    low, high = _box_edges(timeline)
    height = size.rows / len(timeline.rows) * (high - low) * POINTS
    numbered = boxes.micro_batch >= 0
    widest = np.zeros(len(timeline.rows), dtype=int)
    np.maximum.at(widest, boxes.row, boxes.micro_batch)
    fits = size_that_fits(widest[boxes.row], (boxes.end - boxes.start) * size.per_time * POINTS, height)
    kinds = np.unique(boxes.kind[numbered]).tolist()
    readable = numbered & (fits >= max(_SMALLEST, _LEAST * size.text))
    wanted = {kind: float(fits[readable & (boxes.kind == kind)].min(initial=np.inf)) for kind in kinds}
    most = _LARGEST_RATIO * min(wanted.values(), default=0.0)
    points = np.zeros(len(fits))
    for kind, wish in wanted.items():
        value = min(wish, most, size.text)
        points[numbered & (boxes.kind == kind) & (fits >= value)] = value
    # In few of those that belong together they would say nothing of the others.
    _, group = np.unique(np.stack([boxes.row, boxes.kind, boxes.stage]), axis=1, return_inverse=True)
    group = group.ravel()
    shown = np.bincount(group, points > 0) / np.maximum(np.bincount(group), 1)
    return np.where(shown[group] >= _MOST, points, 0.0)


def _box_edges(timeline: Timeline) -> tuple[float, float]:
    """Where in a row, which is 1 high and has its middle at 0, a box begins and ends; the lane comes after it."""
    return -_BOX / 2, -_BOX / 2 + _BOX * (1.0 if timeline.lanes is None else 1 - _LANE)


@dataclass(frozen=True)
class _Entry:
    """Of the legend: swatches with a text in each, then a name. Inches."""

    name: str
    swatches: tuple[tuple[str, str], ...]  # (colour, text)
    swatch: float
    width: float


def _legend_lines(timeline: Timeline, size: _Measures) -> list[list[_Entry]]:
    """Entries in lines that are no wider than the picture."""
    lines: list[list[_Entry]] = []
    left = 0.0
    for entry in _legend(timeline, size):
        if not lines or left + entry.width > size.full - 0.3:
            lines.append([])
            left = 0.0
        lines[-1].append(entry)
        left += entry.width
    return lines


def _legend(timeline: Timeline, size: _Measures) -> list[_Entry]:
    seen = {KINDS[kind] for boxes in _all_boxes(timeline) for kind in np.unique(boxes.kind)}
    chunks = range(timeline.num_chunks)
    entries: list[tuple[str, Sequence[tuple[str, str]]]] = []
    for kind in KINDS:
        if kind in seen and kind in _COMPUTATIONS:
            many = timeline.num_chunks > 1
            swatches = [(colour(kind, c, timeline.num_chunks), str(c) if many else "") for c in chunks]
            entries.append((KIND_NAMES[kind] + (", by chunk" if many else ""), swatches))
        elif kind in seen:
            entries.append((KIND_NAMES[kind], [(colour(kind), "")]))
    entries.append(("idle", [(IDLE, "")]))
    if _number_sizes(timeline, size).any():
        entries.append(("number in a box: micro-batch", []))
    line = size.text / POINTS
    made = []
    for name, swatches in entries:
        swatch = line * (1.5 if timeline.num_chunks <= 12 else 0.9)
        width = swatch * len(swatches) + text_width(name, size.text) + line * 2.6
        made.append(_Entry(name, tuple(swatches), swatch, width))
    return made


def _draw_legend(figure: Figure, lines: list[list[_Entry]], top: float, size: _Measures) -> None:
    line = size.text / POINTS
    axes = place(figure, 0, top, size.full, len(lines) * line * 1.8)
    axes.set(xlim=(0, size.full), ylim=(len(lines) * line * 1.8, 0))
    axes.set_axis_off()
    for number, entries in enumerate(lines):
        x, middle = 0.15, (number + 0.5) * line * 1.8
        for entry in entries:
            for background, text in entry.swatches:
                corner = (x, middle - line * 0.6)
                axes.add_patch(
                    Rectangle(corner, entry.swatch, line * 1.2, facecolor=background, edgecolor=PAPER, linewidth=0.6)
                )
                if background == IDLE:
                    axes.add_patch(
                        Rectangle(corner, entry.swatch, line * 1.2, facecolor="none", edgecolor=FAINT, linewidth=0.6)
                    )
                if text and entry.swatch > line:
                    axes.text(
                        x + entry.swatch / 2,
                        middle,
                        text,
                        size=size.text * 0.8,
                        color=ink_on(background),
                        ha="center",
                        va="center_baseline",
                    )
                x += entry.swatch
            gap = line * 0.5 if entry.swatches else 0.0
            axes.text(
                x + gap,
                middle,
                entry.name,
                size=size.text,
                color=INK if entry.swatches else QUIET,
                va="center_baseline",
            )
            x += entry.width - entry.swatch * len(entry.swatches)
