"""A simulated step as people read it: how long, where the time goes, what determines it, what would help.

On a terminal with colour, in its width; elsewhere plain ASCII, a statement a line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fourfold.report.memory import MEMORY_LEGEND, memory_table
from fourfold.report.plan import as_plain
from fourfold.report.simulation.findings import on_path, slowest_rank
from fourfold.report.simulation.measures import exposed, means, own_computing
from fourfold.report.simulation.words import (
    CLASS_WORDS,
    DIMENSION_WORDS,
    PATH_WORDS,
    PHASE_WORDS,
    layout_of,
    percent,
    sentence,
)
from fourfold.report.text import format_count
from fourfold.simulator.causes import duration, idle_by_phase
from fourfold.simulator.critical import CriticalPath
from fourfold.simulator.live import StepMemory
from fourfold.simulator.live import findings as memory_findings
from fourfold.simulator.played import Played
from fourfold.simulator.scenario import Scenario
from fourfold.simulator.whatif import Gain

_INDENT = (0, 0, 0, 2)
_MOST_GAINS = 12  # lines of what would help


def print_simulation(
    scenario: Scenario,
    played: Played,
    *,
    gains: Sequence[Gain],
    path: CriticalPath,
    memory: StepMemory | None = None,
    name: str = "",
    tokens: int | None = None,
    file: TextIO | None = None,
) -> None:
    """Prints a step; pretty where `file` (default stdout) is a terminal, plain elsewhere. See `simulation_page`."""
    file = sys.stdout if file is None else file
    what = _render(scenario, played, gains=gains, path=path, memory=memory, name=name, tokens=tokens)
    if file.isatty():
        Console(file=file, highlight=False).print(what)
    else:
        print(as_plain(what), file=file)


def simulation_text(
    scenario: Scenario,
    played: Played,
    *,
    gains: Sequence[Gain],
    path: CriticalPath,
    memory: StepMemory | None = None,
    name: str = "",
    tokens: int | None = None,
) -> str:
    """The plain form: ASCII, no colour, no trailing spaces. Arguments as those of `simulation_page`."""
    return as_plain(_render(scenario, played, gains=gains, path=path, memory=memory, name=name, tokens=tokens))


def _render(
    scenario: Scenario,
    played: Played,
    *,
    gains: Sequence[Gain],
    path: CriticalPath,
    memory: StepMemory | None,
    name: str,
    tokens: int | None,
) -> RenderableType:
    title = Text.assemble("Step of ", (name or "the layout", "bold"), f" on {scenario.grid.size:,} ranks")
    parts: list[RenderableType] = [
        title,
        Padding(_facts(_overview(scenario, played, tokens=tokens)), (0, 0, 1, 2)),
        *_titled("Pipeline ranks (means of their replicas)", _pipeline(scenario, played, path)),
        *_titled("Communication that nothing hides, of the mean rank's step", _exposed(played)),
        *_titled("The mean rank's step", _seconds(CLASS_WORDS, means(played), played.step_seconds)),
        *_titled("The critical path", _seconds(PATH_WORDS, path.by_class, path.seconds), on_path(path)),
    ]
    if gains:
        parts += _titled("What would help (each alone; gains do not add up)", _gains(gains))
    if memory is not None:
        parts += _titled("Memory of every pipeline rank at its worst moment", memory_table(memory.peaks))
        parts += [Padding(Text(MEMORY_LEGEND, style="dim"), _INDENT)]
        parts += [Padding(Text(sentence(text)), _INDENT) for text in memory_findings(memory)]
    return Group(*parts)


def _titled(title: str, *what: RenderableType | str) -> list[RenderableType]:
    shown = [Padding(Text(one) if isinstance(one, str) else one, _INDENT) for one in what]
    return [Text(title, style="bold"), *shown, Text()]


def _overview(scenario: Scenario, played: Played, *, tokens: int | None) -> Iterable[tuple[str, str]]:
    yield "layout", layout_of(scenario)
    rate = ""
    if tokens:
        per_second = tokens / played.step_seconds
        rate = f"; {format_count(per_second)} tokens/s, {per_second / scenario.grid.size:,.0f} per rank"
    yield "step", f"{duration(played.step_seconds)}{rate}"
    over_compute, over_total = percent(played.bubble_over_compute), percent(played.bubble_over_total)
    if played.bubble_over_compute < 1e-9:
        yield "bubble", "none: no rank waits for another pipeline rank"
    else:
        phases = idle_by_phase(played).sum(axis=1)
        shares = ", ".join(
            f"{share:.0%} while the pipeline {words}"
            for words, share in zip(("fills", "is full", "drains"), phases / phases.sum(), strict=True)
        )
        yield "bubble", f"{over_compute} of computing time, {over_total} of both; {shares}"
    if scenario.grid.size > 1:
        yield "slowest", slowest_rank(scenario, played)
    lanes = played.lanes.size
    if lanes < scenario.grid.size:
        yield "simulated", f"{lanes:,} of {scenario.grid.size:,} ranks, which the others are like"
    if scenario.loads is not None:
        loads = scenario.loads
        yield (
            "documents",
            f"{loads.mix}; the slowest rank has {loads.slowest_over_mean:.2f} times the mean attention of the step",
        )
    for text in scenario.faults.descriptions():
        yield "slow", text


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    for label, text in rows:
        table.add_row(label, Text(text))
    return table


def _numbers(columns: Sequence[str]) -> Table:
    """A table whose first column is words and whose other columns are numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=number > 0)
    return table


def _pipeline(scenario: Scenario, played: Played, path: CriticalPath) -> Table:
    idle = idle_by_phase(played)
    own = own_computing(played).mean(axis=(0, 2, 3))
    table = _numbers(("pp rank", "computes", *(f"waits: {PHASE_WORDS[0]}", *PHASE_WORDS[1:]), "path"))
    for pp_rank in range(scenario.grid.pp):
        waits = (duration(float(seconds)) for seconds in idle[:, pp_rank])
        table.add_row(str(pp_rank), duration(float(own[pp_rank])), *waits, percent(path.by_pipeline_rank[pp_rank]))
    return table


def _exposed(played: Played) -> Table:
    table = _numbers(("dimension", "s", "share", "of it waiting"))
    for dimension, (seconds, waits) in exposed(played).items():
        table.add_row(
            f"{dimension}: {DIMENSION_WORDS[dimension]}",
            duration(seconds),
            percent(seconds / played.step_seconds),
            duration(waits),
        )
    return table


def _seconds(words: dict[str, str], seconds: dict[str, float], whole: float) -> Table:
    """Parts of a whole that are not nothing."""
    table = _numbers(("part", "s", "share"))
    for name, text in words.items():
        if seconds[name] > 0:
            table.add_row(text, duration(seconds[name]), percent(seconds[name] / whole))
    return table


def _gains(gains: Sequence[Gain]) -> Table:
    table = _numbers(("if", "step", "shorter by", "share"))
    for gain in gains[:_MOST_GAINS]:
        table.add_row(gain.condition, duration(gain.step_seconds), duration(gain.seconds), percent(gain.share))
    return table
