"""A simulated step as people read it: how long, where the time goes, what determines it, what would help.

On a terminal with colour; elsewhere plain ASCII. Lines have at most 120 characters: what programs are to read is in the
JSON object.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fourfold.report import drawing
from fourfold.report.documents import documents_table
from fourfold.report.memory import MEMORY_LEGEND, memory_table
from fourfold.report.plan import as_plain
from fourfold.report.simulation.findings import findings
from fourfold.report.simulation.page import summary
from fourfold.report.simulation.tables import pipeline_table, time_table, what_if_table
from fourfold.report.simulation.words import layout_of
from fourfold.report.text import format_count
from fourfold.simulator.answer import Answer
from fourfold.simulator.live import StepMemory
from fourfold.simulator.played import Played
from fourfold.simulator.scenario import Scenario

_INDENT = (0, 0, 0, 2)
_MOST_GAINS = 12  # lines of what would help
_WIDTH = 120  # characters of a line, on a terminal that is wider as well


def print_simulation(answer: Answer, *, file: TextIO | None = None) -> None:
    """Prints a step; pretty where `file` (default stdout) is a terminal, plain elsewhere."""
    file = sys.stdout if file is None else file
    if file.isatty():
        console = Console(file=file, highlight=False)
        console.print(_render(answer), width=min(console.width, _WIDTH))
    else:
        print(simulation_text(answer), file=file)


def simulation_text(answer: Answer) -> str:
    """The plain form: ASCII, no colour, no trailing spaces."""
    return as_plain(_render(answer), width=_WIDTH)


def _render(answer: Answer) -> RenderableType:
    scenario, played, gains, path = answer.scenario, answer.played, answer.gains, answer.path
    memory, name, tokens = answer.memory, answer.name, answer.tokens
    said = findings(scenario, played, gains=gains, path=path, memory=memory)
    parts: list[RenderableType] = [
        Text.assemble("Step of ", (name or "the layout", "bold"), f" on {scenario.grid.size:,} ranks"),
        Padding(_facts(_overview(scenario, played, memory=memory, tokens=tokens)), (0, 0, 1, 2)),
        *_titled("Findings", _bullets(said.first)),
        *_table(time_table(played, path)),
        *_table(pipeline_table(played, path)),
    ]
    if answer.splits:
        parts += _table(documents_table(answer.splits))
    if gains:
        table = what_if_table(gains[:_MOST_GAINS])
        parts += _table(dataclasses.replace(table, title=f"{table.title} (each alone; gains do not add up)", note=""))
    if memory is not None:
        parts += _titled("Memory of every pipeline rank at its worst moment", memory_table(memory.peaks), MEMORY_LEGEND)
    parts += _titled("More", _bullets(said.more))
    return Group(*parts)


def _titled(title: str, *what: RenderableType | str) -> list[RenderableType]:
    shown = [Padding(Text(one, style="dim") if isinstance(one, str) else one, _INDENT) for one in what]
    return [Text(title, style="bold"), *shown, Text()]


def _table(table: drawing.Table) -> list[RenderableType]:
    """The first column is words, the others are numbers."""
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for number, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if number else "left", no_wrap=number > 0)
    for row in table.rows:
        shown.add_row(*row)
    return _titled(table.title, shown, *([table.note] if table.note else []))


def _bullets(sentences: Iterable[str]) -> Table:
    return _grid((("-", one) for one in sentences), style="")


def _overview(
    scenario: Scenario, played: Played, *, memory: StepMemory | None, tokens: int | None
) -> Iterator[tuple[str, str]]:
    yield "layout", layout_of(scenario)
    (step, seconds), *rest = summary(played, memory=memory)
    rate = ""
    if tokens:
        per_second = tokens / played.step_seconds
        rate = f"; {format_count(per_second)} tokens/s, {per_second / scenario.grid.size:,.0f} per rank"
    yield step, f"{seconds}{rate}"
    yield from rest
    lanes = played.lanes.size
    if lanes < scenario.grid.size:
        yield "simulated", f"{lanes:,} of {scenario.grid.size:,} ranks, which the others are like"
    if scenario.loads is not None:
        loads = scenario.loads
        yield "documents", loads.mix
        fastest = loads.slowest_over_fastest
        yield (
            "attention",
            f"the slowest rank has {loads.slowest_over_mean:.2f} times the mean"
            + (f" and {fastest:.2f} times the fastest rank's" if np.isfinite(fastest) else "")
            + (f"; CP ranks wait {loads.waiting_share:.0%} of its time" if scenario.grid.cp > 1 else ""),
        )
    for text in scenario.faults.descriptions():
        yield "slow on purpose", text


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    return _grid(rows, style="bold cyan")


def _grid(rows: Iterable[tuple[str, str]], *, style: str) -> Table:
    """A short word and a text, whose lines stay beside it."""
    table = Table.grid(padding=(0, 2 if style else 1))
    table.add_column(style=style, no_wrap=True)
    table.add_column()
    for label, text in rows:
        table.add_row(label, Text(text))
    return table
