"""A figure of the paper: the published values beside ours, panel by panel.

Published values are hatched or hollow, ours full; a series has the same colour in both. Whiskers on the published ones
are the error of reading them from the picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fourfold.report.palette import INK, PAPER, QUIET, series_colour
from fourfold.report.pictures.canvas import POINTS, place, text_width, wrapped, write_at
from fourfold.simulator.figures.figure import Figure, Panel, Series

_WIDTH = 6.0  # inches: 900 pixels
_TEXT, _SMALL = 7.5, 6.0  # points
_LINE = _TEXT / POINTS
_DIAGRAM = 1.75  # inches of a panel's axes
_LEFT, _RIGHT = 0.55, 0.12  # inches beside them
_BAR, _WIDEST = 0.13, 0.4  # inches that a bar should have; part of the distance between labels that it may fill
_GAP = 0.025  # inches between two labels
_LONG_WORD = 1.0  # inches of a word in a label, from which on it does not decide about the width of a panel
_GROUP = 0.84  # part of the distance between two labels that their bars fill
_MOST_PRINTED = 32  # bars of a panel whose values are printed
_MOST_MARKED = 40  # labels of a panel whose points have markers
_FROM_ZERO = 0.25  # smallest over largest value of lines, up to which their axis starts at 0
_MARKERS = "os^Dvp"
_PUBLISHED, _OURS = "published (whisker: error of reading it from the picture)", "Fourfold"


@dataclass(frozen=True)
class _Plan:
    """A panel and its place. Inches."""

    panel: Panel
    width: float
    title: tuple[str, ...]
    key_rows: int
    key_columns: int
    labels: tuple[str, ...]
    """As they are written, in lines."""
    turned: bool
    """Labels stand on end, as side by side they would overlap."""
    every: int
    """Of very many labels, each so-and-so-manieth is shown."""

    @property
    def diagram(self) -> float:
        return self.width - _LEFT - _RIGHT

    @property
    def head(self) -> float:
        return _LINE * (1.5 * len(self.title) + 1.45 * self.key_rows + 0.6)

    @property
    def foot(self) -> float:
        if self.turned:
            return max(text_width(label, _TEXT) for label in self.labels) + _LINE * 3.2
        return _LINE * (2.9 + 1.3 * max((len(label.splitlines()) for label in self.labels), default=1))


def draw_figure(figure: Figure) -> Canvas:
    """The whole picture, as wide as a page of the documentation."""
    title = wrapped(f"Figure {figure.number}: {figure.title}", _WIDTH - 0.3, _TEXT * 1.25, bold=True)
    half = _WIDTH / 2
    rows = [[_plan(p, half if _is_narrow(p) else _WIDTH) for p in row] for row in _rows(figure.panels)]
    top = 0.08 + _LINE * (1.9 * len(title) + 1.9)
    heights = [(max(p.head for p in row), max(p.foot for p in row)) for row in rows]
    canvas = Canvas(figsize=(_WIDTH, top + sum(head + _DIAGRAM + foot for head, foot in heights)))
    for number, text in enumerate(title):
        write_at(canvas, 0.1, 0.08 + _LINE * (1.4 + 1.9 * number), text, size=_TEXT * 1.25, bold=True)
    _draw_key(canvas, 0.08 + _LINE * 1.9 * len(title), figure)
    for row, (head, foot) in zip(rows, heights, strict=True):
        drawn = [_draw_panel(canvas, plan, plan.width * i, top, top + head) for i, plan in enumerate(row)]
        if {(p.panel.kind, p.panel.unit) for p in row} == {("lines", row[0].panel.unit)}:  # can be compared
            lows, highs = zip(*(axes.get_ylim() for axes in drawn), strict=True)
            for axes in drawn:
                axes.set_ylim(min(lows), max(highs))
        top += head + _DIAGRAM + foot
    return canvas


def _rows(panels: tuple[Panel, ...]) -> list[list[Panel]]:
    """Two panels side by side where both have room in half the width."""
    rows: list[list[Panel]] = []
    for panel in panels:
        if rows and len(rows[-1]) == 1 and _is_narrow(panel) and _is_narrow(rows[-1][0]):
            rows[-1].append(panel)
        else:
            rows.append([panel])
    return rows


def _is_narrow(panel: Panel) -> bool:
    """Whether a panel's bars, and the longest word of its labels, have room in half the width."""
    labels = _labels(panel)
    word = max((text_width(word, _TEXT) for label in labels for word in label.split()), default=0.0) + _GAP
    bars = _most_bars(panel) * _BAR / _GROUP if panel.kind == "bars" else 0.0
    return _LEFT + _RIGHT + len(labels) * max(min(word, _LONG_WORD), bars) <= _WIDTH / 2


def _plan(panel: Panel, width: float) -> _Plan:
    diagram = width - _LEFT - _RIGHT
    names = [text_width(series.name, _TEXT) + 0.3 for series in panel.series]
    columns = max(1, min(len(names), int((diagram + 0.3) / max(names, default=1.0))))
    labels = _labels(panel)
    room = diagram / max(len(labels), 1) - _GAP
    in_lines = ["\n".join(_balanced(label, room)) for label in labels]
    fits = all(text_width(label, _TEXT) <= room and label.count("\n") < 3 for label in in_lines)
    turned = not fits and len(labels) <= _MOST_MARKED
    longest = max((text_width(label, _TEXT) for label in labels), default=0.0) + 0.1
    return _Plan(
        panel,
        width,
        title=tuple(wrapped(panel.title, width - 0.2, _TEXT, bold=True)),
        key_rows=-(-len(names) // columns) if len(names) > 1 else 0,
        key_columns=columns,
        labels=tuple(in_lines if fits else labels),
        turned=turned,
        every=1 if fits or turned else math.ceil(len(labels) * longest / diagram),
    )


def _balanced(label: str, room: float) -> list[str]:
    """As few lines as fit into so many inches, and those about as long as each other."""
    lines = wrapped(label, room, _TEXT)
    while len(lines) > 1 and len(shorter := wrapped(label, room - 0.04, _TEXT)) == len(lines) and room > 0.04:
        lines, room = shorter, room - 0.04
    return lines


def _labels(panel: Panel) -> list[str]:
    """Of all series, in the order of their first appearance."""
    return list(dict.fromkeys(label for s in panel.series for values in (s.published, s.ours) for label in values))


def _draw_panel(canvas: Canvas, plan: _Plan, left: float, top: float, axes_top: float) -> Axes:
    panel = plan.panel
    for number, text in enumerate(plan.title):
        write_at(canvas, left + 0.1, top + _LINE * (1.0 + 1.5 * number), text, size=_TEXT, bold=True)
    axes = place(canvas, left + _LEFT, axes_top, plan.diagram, _DIAGRAM)
    labels = _labels(panel)
    if panel.kind == "bars":
        _draw_bars(axes, panel, labels, plan.diagram)
    else:
        _draw_lines(axes, panel, labels)
    shown = range(0, len(labels), plan.every)
    axes.set_xticks(shown, [plan.labels[i] for i in shown], rotation=90 if plan.turned else 0)
    axes.tick_params(labelsize=_TEXT, length=2)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_xlabel(panel.x, size=_TEXT)
    axes.set_ylabel(panel.unit, size=_TEXT)
    axes.grid(axis="y")
    if plan.key_rows:
        handles = [_of_series(panel, index) for index in range(len(panel.series))]
        axes.legend(
            handles, [series.name for series in panel.series], loc="lower left", bbox_to_anchor=(-0.02, 0.99),
            ncols=plan.key_columns, fontsize=_TEXT, handlelength=1.4, columnspacing=1.0, labelspacing=0.25,
            borderpad=0.2, handletextpad=0.5,
        )  # fmt: skip
    return axes


@dataclass(frozen=True)
class _Bar:
    series: int
    published: bool
    x: float
    value: float


def _bars(panel: Panel, labels: list[str]) -> tuple[float, list[_Bar]]:
    """How wide bars are, and all of them: at each label those that have a value, a published one before ours."""
    width = min(_GROUP / max(_most_bars(panel), 1), _WIDEST)
    bars = []
    for at, label in enumerate(labels):
        members = _values_at(panel, label)
        left = at - width * len(members) / 2
        bars += [_Bar(*member[:2], left + width * (i + 0.5), member[2]) for i, member in enumerate(members)]
    return width, bars


def _values_at(panel: Panel, label: str) -> list[tuple[int, bool, float]]:
    """(series, whether it is published, value)."""
    found = [
        (index, published, (series.published if published else series.ours).get(label))
        for index, series in enumerate(panel.series)
        for published in (True, False)
    ]
    return [(index, published, value) for index, published, value in found if value is not None]


def _most_bars(panel: Panel) -> int:
    return max((len(_values_at(panel, label)) for label in _labels(panel)), default=0)


def _draw_bars(axes: Axes, panel: Panel, labels: list[str], inches: float) -> None:
    width, bars = _bars(panel, labels)
    error: dict[str, Any] = {"ecolor": INK, "elinewidth": 0.7, "capsize": 1.5, "capthick": 0.7}
    for index in range(len(panel.series)):
        colour = series_colour(index)
        published = [bar for bar in bars if bar.series == index and bar.published]
        ours = [bar for bar in bars if bar.series == index and not bar.published]
        whisker = panel.reading_error or None
        x, values = [bar.x for bar in published], [bar.value for bar in published]
        axes.bar(x, values, width * 0.92, yerr=whisker, error_kw=error, **_hatched(colour))
        axes.bar([bar.x for bar in ours], [bar.value for bar in ours], width * 0.92, color=colour, linewidth=0)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.0), high)
    if len(bars) <= _MOST_PRINTED:
        near = np.diff(sorted(bar.x for bar in bars)).min(initial=1.0)
        _print_values(axes, panel, bars, near * inches / len(labels))


def _print_values(axes: Axes, panel: Panel, bars: list[_Bar], room: float) -> None:
    """Above each bar, on end if bars are nearer to each other than the texts are wide."""
    decimals = _decimals(panel, [bar.value for bar in bars])
    texts = [f"{bar.value:,.{decimals}f}" for bar in bars]
    longest = max((text_width(text, _SMALL) for text in texts), default=0.0)
    on_end = longest > room * 0.98
    low, high = axes.get_ylim()
    axes.set_ylim(low, low + (high - low) * (1 + (longest if on_end else _SMALL / POINTS) * 1.1 / _DIAGRAM))
    for bar, text in zip(bars, texts, strict=True):
        top = max(bar.value, 0.0) + (panel.reading_error if bar.published else 0.0)
        axes.annotate(
            text, (bar.x, top), (0, 1.5), textcoords="offset points", size=_SMALL, ha="center", va="bottom",
            rotation=90 if on_end else 0,
        )  # fmt: skip


def _decimals(panel: Panel, values: list[float]) -> int:
    """As exact as the published values were read; else, or for small numbers, three digits of the largest."""
    most = max(map(abs, values), default=0.0)
    if all(value == round(value) for value in values) or not most:
        return 0
    three_digits = max(0, 2 - math.floor(math.log10(most)))
    if panel.reading_error <= 0 or not any(v is not None for s in panel.series for v in s.published.values()):
        return three_digits
    return min(max(0, -math.floor(math.log10(panel.reading_error) + 1e-9)), three_digits + 2)


def _draw_lines(axes: Axes, panel: Panel, labels: list[str]) -> None:
    """Two lines per series: published dashed and hollow, ours full."""
    at = np.arange(len(labels))
    marked = len(labels) <= _MOST_MARKED
    for index, series in enumerate(panel.series):
        published, ours = _column(series, labels, "published"), _column(series, labels, "ours")
        hollow, full = _line_styles(series_colour(index), _MARKERS[index % len(_MARKERS)] if marked else "")
        hollow["markersize"] = full["markersize"] = 3.6 + 0.8 * (len(panel.series) - 1 - index)  # so that none hides
        error = panel.reading_error if marked and panel.reading_error else None
        axes.errorbar(at, published, yerr=error, ecolor=QUIET, elinewidth=0.7, capsize=1.5, zorder=3, **hollow)
        axes.plot(at, ours, zorder=4, **full)
    values = np.concatenate([_column(s, labels, kind) for s in panel.series for kind in ("published", "ours")])
    if np.nanmin(values) >= 0 and np.nanmin(values) < _FROM_ZERO * np.nanmax(values):
        axes.set_ylim(bottom=0)


def _line_styles(colour: str, marker: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the published values and of ours."""
    common: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 3.6}
    published: dict[str, Any] = {"linestyle": (0, (3, 2)), "linewidth": 0.9, "markerfacecolor": PAPER}
    return common | published, common | {"linestyle": "-", "linewidth": 1.3}


def _column(series: Series, labels: list[str], kind: str) -> np.ndarray:
    """Values in the order of the labels; NaN where there is none."""
    values = series.published if kind == "published" else series.ours
    found = [values.get(label) for label in labels]
    return np.array([math.nan if value is None else value for value in found], dtype=np.float64)


def _hatched(colour: str) -> dict[str, Any]:
    """How a published bar looks: a tint of the colour, hatched and outlined in it."""
    red, green, blue = (0.8 + 0.2 * channel for channel in to_rgb(colour))
    return {"facecolor": (red, green, blue), "edgecolor": colour, "hatch": "/////", "linewidth": 0.8}


def _of_series(panel: Panel, index: int) -> Artist:
    """What stands for a series in the key."""
    if panel.kind == "bars":
        return Patch(facecolor=series_colour(index))
    return Line2D([], [], **_line_styles(series_colour(index), _MARKERS[index % len(_MARKERS)])[1])


def _draw_key(canvas: Canvas, top: float, figure: Figure) -> None:
    """One line for all panels: what is published, and what is ours."""
    axes = place(canvas, 0.0, top, _WIDTH, _LINE * 1.9)
    axes.set_axis_off()
    kinds = {panel.kind for panel in figure.panels}
    published: list[Artist] = []
    ours: list[Artist] = []
    if "bars" in kinds:
        published.append(Patch(**_hatched(QUIET)))
        ours.append(Patch(facecolor=QUIET))
    if kinds - {"bars"}:
        hollow, full = _line_styles(QUIET, _MARKERS[0])
        published.append(Line2D([], [], **hollow))
        ours.append(Line2D([], [], **full))
    keys = [(tuple(published), _PUBLISHED), (tuple(ours), _OURS)][0 if figure.compared() else 1 :]
    axes.legend(
        [key for key, _ in keys], [text for _, text in keys], handler_map={tuple: HandlerTuple(ndivide=None)},
        loc="center left", bbox_to_anchor=(0.008, 0.5), ncols=2, fontsize=_TEXT, handlelength=2.2 * len(published),
        borderpad=0.0, columnspacing=1.5,
    )  # fmt: skip
