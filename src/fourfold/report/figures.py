"""The paper's figures beside ours: as a table of differences, as JSON, and as the page of the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from fourfold.simulator.figures.figure import Difference, Figure, Panel, Point


def error_of(figure: Figure) -> float | None:
    """Median of the absolute relative differences, in percent; None without published values."""
    percents = [
        abs(percent)
        for panel in figure.panels
        for _, published, ours in panel.compared()
        if (percent := percent_off(published, ours)) is not None
    ]
    return median(percents) if percents else None


def percent_off(published: float, ours: float) -> float | None:
    """Ours over the published value, - 1; None where that is 0."""
    return 100 * (ours / published - 1) if published else None


def figures_text(figures: Sequence[Figure]) -> str:
    """A table per diagram, what was assumed, and why ours differ: a value has the numbers of its sentences."""
    lines: list[str] = []
    for figure in figures:
        lines += [*([""] if lines else []), f"Figure {figure.number}: {figure.title}", f"  {_head(figure)}"]
        for panel in figure.panels:
            lines += ["", *_panel_lines(panel, figure.differences)]
        if figure.assumptions:
            lines += ["", "  assumed:", *(f"  - {sentence}" for sentence in figure.assumptions)]
        if figure.differences:
            lines += ["", "  where ours differ:"]
            lines += [f"  [{number}] {_sentence(one)}" for number, one in enumerate(figure.differences, start=1)]
    return "\n".join(lines)


def _head(figure: Figure) -> str:
    error = error_of(figure)
    if error is None:
        return "no published values"
    compared, beyond, unexplained = counts(figure)
    return (
        f"median difference from the published values {error:.1f} %; {beyond} of {compared} are off by more than the "
        f"reading error, {unexplained} of them not explained"
    )


def counts(figure: Figure) -> tuple[int, int, int]:
    """(published values, those of which ours is off by more than the reading error, those of them not explained)"""
    return len(figure.compared()), len(figure.beyond()), len(figure.unexplained())


def _sentence(difference: Difference) -> str:
    return difference.text if difference.explained else f"Not explained: {difference.text}"


def _panel_lines(panel: Panel, sentences: Sequence[Difference]) -> Iterator[str]:
    yield f"  {panel.title} ({panel.unit})"
    rows = [("", panel.x, "published", "ours", "difference", "")]
    beyond = panel.beyond()
    for series in panel.series:
        for label, ours in series.ours.items():
            published, point = series.published.get(label), Point(panel.title, series.name, label)
            mark = _marks(point, sentences) if point in beyond else ""
            if published is not None and ours is not None and point not in beyond:
                mark = "(reading)"
            rows.append((series.name, label, _number(published), _number(ours), _difference(published, ours), mark))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    before = None
    for name, label, *numbers, mark in rows:
        name, before = ("" if name == before else name), name
        cells = [name.ljust(widths[0]), label.ljust(widths[1])]
        cells += [text.rjust(width) for text, width in zip(numbers, widths[2:-1], strict=True)]
        yield "    " + "  ".join([*cells, mark]).rstrip()


def _marks(point: Point, sentences: Sequence[Difference]) -> str:
    """The numbers of the sentences about a point."""
    return "".join(f"[{number}]" for number, one in enumerate(sentences, start=1) if point in one.points)


def _difference(published: float | None, ours: float | None) -> str:
    if published is None or ours is None:
        return ""
    percent = percent_off(published, ours)
    return f"{percent:+.1f} %" if percent is not None else f"{ours - published:+.3g}"


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
            "differences": [
                {
                    "text": one.text,
                    "explained": one.explained,
                    "points": [point._asdict() for point in sorted(one.points)],
                }
                for one in figure.differences
            ],
        }
        for figure in figures
    ]


PAGE_HEAD = """\
# The paper's figures, recomputed

"Scaling Llama 3 Training with Efficient Parallelism Strategies" (ISCA 2025) evaluates the system that trained Llama 3
405B. These are its figures as Fourfold's schedules, planner and simulator make them, beside the published values, which
were read from the vector graphics of the paper (its bars to about 1 %). Where the paper is silent, what we chose is
named. Every value that is off by more than the reading error belongs to a sentence under its figure, which says why, or
that we do not know.

This page and its pictures are written by `fourfold figures --out docs/figures --page docs/figures.md`; the same command
without `--page` prints every number, with the numbers of its sentences.

What is fitted to these figures, so that agreement in it shows nothing:

- what a (micro-batch, layer) pair holds, 62 % of the full inventory: to Figures 9 and 10;
- the latency of large messages, twice NCCL's own: to Figure 12;
- the lengths of documents in Figure 14, median and sigma;
- choices that the paper does not print, made because they fit: dp in Figure 9; v, micro-batches, dp, ZeRO and what is
  recomputed in Figure 10; that Figures 11 and 13 time the forward alone, and what their document mask is relative to.

All else is from elsewhere: the stack `meta` is fitted to the production runs, the schedules follow the paper's text.
"""


def figures_page(figures: Sequence[Figure], *, folder: str) -> str:
    """docs/figures.md: `folder` is where the pictures are, seen from the page."""
    lines = [
        PAGE_HEAD,
        "| figure | what | published values | median difference | off by more than the reading error | not explained |",
        "|---|---|---|---|---|---|",
    ]
    for figure in figures:
        error = error_of(figure)
        cells = ["-"] * 4 if error is None else _cells(error, *counts(figure))
        lines.append(f"| {figure.number} | {figure.title} | {' | '.join(cells)} |")
    for figure in figures:
        lines += ["", f"## Figure {figure.number}: {figure.title}", ""]
        shown = "our values" if error_of(figure) is None else "published values beside ours"
        lines.append(f"![Figure {figure.number}: {shown}]({folder}/figure-{figure.number}.png)")
        if figure.assumptions:
            lines += ["", "Assumed:", "", *(f"- {sentence}" for sentence in figure.assumptions)]
        if figure.differences:
            lines += ["", "Where ours differ, and why:", ""]
            lines += [f"{number}. {_sentence(one)}" for number, one in enumerate(figure.differences, start=1)]
    return "\n".join(lines) + "\n"


def _cells(error: float, compared: int, beyond: int, unexplained: int) -> list[str]:
    return [str(compared), f"{error:.1f} %", str(beyond), str(unexplained)]
