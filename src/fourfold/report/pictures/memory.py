"""What is alive over time: a curve per rank, and what the fullest rank's is made of."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fourfold.report.drawing import Memory
from fourfold.report.palette import ALARM, PAPER, QUIET, series_colour
from fourfold.report.pictures.canvas import (
    POINTS,
    byte_unit,
    place,
    set_times,
    text_width,
    time_label,
    wrapped,
    write_at,
)

_PANEL = 1.6  # inches of a panel, for text of 8 points; it grows less than the text
_MOST_NAMES = 8  # of curves
_FIRST, _LAST = 0.05, 0.88  # of the colour map, whose yellow end is hard to see on white


def draw_memory(memory: Memory) -> Figure:
    """The curves alone, with an axis of time of their own."""
    text, left, width = 8.0, 0.7, 7.0
    span = max((float(times.max(initial=0.0)) for times in memory.times), default=0.0) or 1.0
    right = names_width(memory, text)
    figure = Figure(figsize=(left + width + right, curves_height(memory, width + right, text) + 0.4))
    axes = draw_curves(figure, memory, span, left=left, top=0.05, width=width, text=text)
    axes.set_xlabel(time_label(memory.unit, span), size=text, loc="left")
    return figure


def names_width(memory: Memory, text: float) -> float:
    """Inches right of the curves for the longest name of a row or part."""
    names = [*memory.rows, *(memory.parts if len(memory.parts) > 1 else ()), "capacity"]
    return max(text_width(name, text) for name in names) + text * 4 / POINTS


def curves_height(memory: Memory, width: float, text: float) -> float:
    """Inches that `draw_curves` fills, heads and numbers of the axes included."""
    line = text / POINTS
    sentence = len(_peak_lines(memory, width, text))
    return _num_panels(memory) * (_panel_height(text) + line * 4) + sentence * line * 1.5


def draw_curves(
    figure: Figure, memory: Memory, span: float, *, left: float, top: float, width: float, text: float
) -> Axes:
    """Draws the rows' totals and, where there are several parts, those of the row that peaks; returns the last axes.

    Lengths in inches, text in points.
    """
    line = text / POINTS
    height = _panel_height(text)
    peak_row, peak = _peak(memory)
    in_bytes = memory.quantity == "bytes"
    limit = max(peak, memory.capacity or 0.0) or 1.0
    unit, size = byte_unit(limit) if in_bytes else ("", 1.0)
    sentence = _peak_lines(memory, figure.get_size_inches()[0] - 0.3, text)
    what = "memory in use" if in_bytes else memory.quantity
    heads = [f"{what}, by rank", f"{what} on {memory.rows[peak_row]}, by kind"]
    at, axes = top, None
    for panel in range(_num_panels(memory)):
        write_at(figure, 0.15, at + line * 1.3, heads[panel][:1].upper() + heads[panel][1:], size=text * 1.1, bold=True)
        at += line * 2.2
        for number, words in enumerate(sentence if panel == 0 else ()):
            write_at(figure, 0.15, at + line * (0.8 + number * 1.5), words, size=text)
        at += line * 1.5 * len(sentence) * (panel == 0)
        axes = place(figure, left, at, width, height)
        axes.set(xlim=(0, span), ylim=(0, limit / size * 1.08))
        axes.set_ylabel(unit, size=text)
        axes.tick_params(labelsize=text)
        set_times(axes, memory.unit, span)
        axes.grid(axis="y")
        if panel == 0:
            _draw_totals(axes, memory, peak_row, span, size)
        else:
            _draw_parts(axes, memory, peak_row, span, size)
        if memory.capacity is not None:
            axes.axhline(memory.capacity / size, color=ALARM, linewidth=0.9, linestyle=(0, (4, 2)), label="capacity")
        handles, names = axes.get_legend_handles_labels()
        if panel == 1:  # in the order of the picture, from the top down
            handles, names = handles[::-1], names[::-1]
        axes.legend(
            handles, names,
            loc="upper left", bbox_to_anchor=(1.0, 1.06), fontsize=text, handlelength=1.2, labelspacing=0.25,
        )  # fmt: skip
        at += height + line * 1.8
    assert axes is not None
    return axes


def _panel_height(text: float) -> float:
    return _PANEL * (text / 8) ** 0.5


def _num_panels(memory: Memory) -> int:
    return 1 if len(memory.parts) == 1 else 2


def _peak(memory: Memory) -> tuple[int, float]:
    """The row with the largest total, the first of several, and that total."""
    peaks = [float(values.sum(axis=0).max(initial=0.0)) for values in memory.bytes]
    row = int(np.argmax(peaks))
    return row, peaks[row]


def _peak_lines(memory: Memory, width: float, text: float) -> list[str]:
    row, _ = _peak(memory)
    return wrapped(f"{memory.rows[row]}: {memory.peaks[row]}", width, text) if memory.peaks else []


def _draw_totals(axes: Axes, memory: Memory, peak_row: int, span: float, size: float) -> None:
    """A curve per row, from dark to light; the one that peaks is thick and marked. Names of some, if there are many."""
    num_rows = len(memory.rows)
    shades = matplotlib.colormaps["viridis"](np.linspace(_FIRST, _LAST, num_rows))
    named = set(np.linspace(0, num_rows - 1, min(num_rows, _MOST_NAMES)).round().astype(int).tolist()) | {peak_row}
    for row, (name, times, values) in enumerate(zip(memory.rows, memory.times, memory.bytes, strict=True)):
        x, y = _extended(times, values.sum(axis=0) / size, span)
        label = name if row in named else "_"
        width, order = (2.4, 2.0) if row == peak_row else (0.9, 3.0)  # thick, and under the others
        axes.step(x, y, where="post", color=shades[row], linewidth=width, zorder=order, label=label)
        if row == peak_row:
            top = int(np.argmax(y))
            axes.plot(x[top], y[top], "o", color=PAPER, markeredgecolor=QUIET, markersize=4, zorder=5)


def _draw_parts(axes: Axes, memory: Memory, row: int, span: float, size: float) -> None:
    """The parts of one row on top of each other, the first at the bottom; those that are never alive are left out."""
    bottom = 0.0
    for part, (name, values) in enumerate(zip(memory.parts, memory.bytes[row], strict=True)):
        if not values.any():
            continue
        x, y = _extended(memory.times[row], values / size, span)
        axes.fill_between(x, bottom, bottom + y, step="post", color=series_colour(part), linewidth=0, label=name)
        bottom = bottom + y


def _extended(times: np.ndarray, values: np.ndarray, span: float) -> tuple[np.ndarray, np.ndarray]:
    """A curve that starts at time 0 with nothing, if it starts later, and goes on to the end."""
    x, y = np.append(times, span), np.append(values, values[-1:] if len(values) else 0.0)
    return (np.append(0.0, x), np.append(0.0, y)) if not len(times) or times[0] > 0 else (x, y)
