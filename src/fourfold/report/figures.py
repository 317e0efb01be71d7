"""The paper's figures beside ours: as a table of differences, as JSON, and as the page of the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from fourfold.simulator.figures.figure import Figure, Panel, Series


class Difference(NamedTuple):
    """One point of a figure."""

    label: str
    published: float
    ours: float

    @property
    def percent(self) -> float | None:
        """Ours over the published value, - 1; None where that is 0."""
        return 100 * (self.ours / self.published - 1) if self.published else None


def differences(series: Series) -> list[Difference]:
    """Points for which there are both."""
    pairs = ((label, series.published.get(label), ours) for label, ours in series.ours.items())
    return [Difference(label, a, b) for label, a, b in pairs if a is not None and b is not None]


def error_of(figure: Figure) -> float | None:
    """Median of the absolute relative differences, in percent; None without published values."""
    percents = [
        abs(one.percent)
        for panel in figure.panels
        for series in panel.series
        for one in differences(series)
        if one.percent is not None
    ]
    return median(percents) if percents else None


def figures_text(figures: Sequence[Figure]) -> str:
    """A table per diagram, what was assumed, and why ours differ."""
    lines: list[str] = []
    for figure in figures:
        lines += [*([""] if lines else []), f"Figure {figure.number}: {figure.title}", *_head(figure)]
        for panel in figure.panels:
            lines += ["", *_panel_lines(panel)]
        for name, sentences in (("assumed", figure.assumptions), ("where ours differ", figure.differences)):
            lines += ["", f"  {name}:", *(f"  - {sentence}" for sentence in sentences)] if sentences else []
    return "\n".join(lines)


def _head(figure: Figure) -> list[str]:
    error = error_of(figure)
    return [f"  median difference from the published values {error:.1f} %"] if error is not None else []


def _panel_lines(panel: Panel) -> Iterator[str]:
    yield f"  {panel.title} ({panel.unit})"
    rows = [("", panel.x, "published", "ours", "difference")]
    for series in panel.series:
        for label, ours in series.ours.items():
            published = series.published.get(label)
            rows.append((series.name, label, _number(published), _number(ours), _difference(published, ours, panel)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    before = None
    for name, label, *numbers in rows:
        name, before = ("" if name == before else name), name
        cells = [name.ljust(widths[0]), label.ljust(widths[1])]
        cells += [text.rjust(width) for text, width in zip(numbers, widths[2:], strict=True)]
        yield "    " + "  ".join(cells).rstrip()


def _difference(published: float | None, ours: float | None, panel: Panel) -> str:
    if published is None or ours is None:
        return ""
    percent = Difference("", published, ours).percent
    said = f"{percent:+.1f} %" if percent is not None else f"{ours - published:+.3g}"
    return said if abs(ours - published) > panel.reading_error else f"{said} (reading)"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == round(value) else f"{value:,.4g}"


def figures_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """What `fourfold figures --json` prints."""
    return [
        {
            "number": figure.number,
            "title": figure.title,
            "median_difference_percent": error_of(figure),
            "panels": [
                {
                    "title": panel.title,
                    "unit": panel.unit,
                    "x": panel.x,
                    "reading_error": panel.reading_error,
                    "series": [
                        {"name": one.name, "published": dict(one.published), "ours": dict(one.ours)}
                        for one in panel.series
                    ],
                }
                for panel in figure.panels
            ],
            "assumptions": list(figure.assumptions),
            "differences": list(figure.differences),
        }
        for figure in figures
    ]


PAGE_HEAD = """\
# The paper's figures, recomputed

"Scaling Llama 3 Training with Efficient Parallelism Strategies" (ISCA 2025) evaluates the system that trained Llama 3
405B. These are its figures as Fourfold's schedules, planner and simulator make them, beside the published values, which
were read from the vector graphics of the paper (its bars to about 1 %). Where the paper is silent, what we chose is
named; every difference larger than the reading error is explained.

This page and its pictures are written by `fourfold figures --out docs/figures --page docs/figures.md`; the same command
without `--page` prints every number. Nothing is fitted to these figures but what a figure's own sentences say.
"""


def figures_page(figures: Sequence[Figure], *, folder: str) -> str:
    """docs/figures.md: `folder` is where the pictures are, seen from the page."""
    lines = [PAGE_HEAD, "| figure | what | median difference |", "|---|---|---|"]
    for figure in figures:
        error = error_of(figure)
        lines.append(f"| {figure.number} | {figure.title} | {'-' if error is None else f'{error:.1f} %'} |")
    for figure in figures:
        lines += ["", f"## Figure {figure.number}: {figure.title}", ""]
        lines.append(f"![Figure {figure.number}: published values beside ours]({folder}/figure-{figure.number}.png)")
        for name, sentences in (("Assumed", figure.assumptions), ("Where ours differ, and why", figure.differences)):
            lines += ["", f"{name}:", "", *(f"- {sentence}" for sentence in sentences)] if sentences else []
    return "\n".join(lines) + "\n"
