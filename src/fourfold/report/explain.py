"""The reasons of a plan as people read them: question, answer, and the numbers with their formulas.

On a terminal with colour, in its width; elsewhere plain ASCII, a statement a line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fourfold.planner.memory.walk import RankMemory
from fourfold.planner.reasons.explanation import Comparison, Explanation, Figure, Section
from fourfold.report.memory import MEMORY_LEGEND, memory_table
from fourfold.report.plan import as_plain, seconds_text
from fourfold.report.text import format_bytes, format_count

_INDENT = (0, 0, 0, 2)


def print_explanation(explanation: Explanation, *, file: TextIO | None = None) -> None:
    """Prints an explanation; pretty where `file` (default stdout) is a terminal, plain elsewhere."""
    file = sys.stdout if file is None else file
    if file.isatty():
        Console(file=file, highlight=False).print(_render(explanation))
    else:
        print(explanation_text(explanation), file=file)


def explanation_text(explanation: Explanation) -> str:
    """The plain form: ASCII, no colour, no trailing spaces."""
    return as_plain(_render(explanation))


def figure_text(figure: Figure) -> str:
    """The number in its unit: 405.9 B, 61.3 GiB, 11.7%, 2,474 tokens."""
    value, unit = figure.value, figure.unit
    match unit:
        case "bytes":
            return format_bytes(value) if value >= 0 else f"-{format_bytes(-value)}"
        case "share":
            return f"{value:.1%}"
        case "s":
            return _duration(value)
        case "dollars":
            return f"${format_count(value)}"
        case "FLOP":
            return f"{value / 1e12:.4f} TFLOP" if value < 1e13 else f"{value:.4g} FLOP"
        case "FLOP/s":
            return f"{value / 1e12:,.1f} TFLOP/s"
        case "parameters" | "count":
            return f"{value:,.0f}"
        case "tokens" if value >= 1e9:
            return f"{format_count(value)} tokens"
        case "":
            return f"{value:,.4g}"
        case _:
            return f"{value:,.0f} {unit}" if value >= 1000 or value == int(value) else f"{value:.3g} {unit}"


def _duration(seconds: float) -> str:
    if 0 < seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds_text(seconds)} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _render(explanation: Explanation) -> RenderableType:
    plan = explanation.plan
    ranks = plan.candidates[0].ranks if plan.candidates else ()
    parts: list[RenderableType] = []
    for number, section in enumerate(explanation.sections, 1):
        parts += [*_section(number, section, ranks), Text()]
    return Group(*parts, *_comparison(explanation.comparison))


def _section(number: int, section: Section, ranks: Sequence[RankMemory]) -> Iterator[RenderableType]:
    yield Text(f"{number}. {section.title}", style="bold cyan")
    yield Padding(Text(section.sentence), _INDENT)
    if section.figures:
        yield Padding(_figures(section.figures), (0, 0, 0, 4))
    if section.key == "memory" and len(ranks) > 1:
        yield Padding(memory_table(ranks), (1, 0, 0, 4))
        yield Padding(Text(MEMORY_LEGEND, style="dim"), (0, 0, 0, 4))
    for note in section.notes:
        yield Padding(Text(f"Careful: {note}", style="dim"), _INDENT)


def _figures(figures: tuple[Figure, ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for figure in figures:
        table.add_row(Text(figure.name), figure_text(figure), Text(figure.formula))
    return table


def _comparison(comparison: Comparison) -> Iterator[RenderableType]:
    yield Text("The paper's rules, and this plan", style="bold cyan")
    for step in comparison.paper.steps:
        yield Padding(Text(step), _INDENT)
    yield Padding(Text(comparison.verdict, style="bold"), _INDENT)
    if comparison.differences:
        yield Text()
        yield Padding(Text("Every difference, and what it would cost to do as the paper does:"), _INDENT)
        table = Table.grid(padding=(0, 2))
        for _ in range(2):
            table.add_column(no_wrap=True)
        table.add_column()
        for one in comparison.differences:
            table.add_row(one.dimension, f"{one.found} (paper {one.paper})", Text(one.sentence))
        yield Padding(table, (0, 0, 0, 4))
