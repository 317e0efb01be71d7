"""What a simulated step is called in tables and sentences, and how its numbers are printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from fourfold.report.text import percent
from fourfold.simulator.causes import duration
from fourfold.simulator.played import Played
from fourfold.simulator.scenario import Scenario

CLASS_WORDS = {
    "compute": "computing, without attention",
    "attention": "attention",
    "tp": "exposed TP transfers",
    "tp_wait": "waiting for slower TP peers",
    "cp": "exposed CP transfers",
    "cp_wait": "waiting for slower CP peers",
    "pp_wait": "bubble: waiting for other pipeline ranks",
    "dp": "exposed FSDP transfers",
    "dp_wait": "waiting for slower FSDP peers",
    "host": "launched late by the host",
    "end_wait": "bubble: waiting for the last rank to end",
    "optimizer": "optimizer",
    "fixed": "fixed cost per step",
}
"""`played.CLASSES`, in the order in which they are shown."""

PATH_WORDS = {
    "compute": CLASS_WORDS["compute"],
    "attention": CLASS_WORDS["attention"],
    "tp": CLASS_WORDS["tp"],
    "cp": CLASS_WORDS["cp"],
    "pp": "messages between pipeline ranks",
    "dp": CLASS_WORDS["dp"],
    "host": CLASS_WORDS["host"],
    "optimizer": CLASS_WORDS["optimizer"],
    "fixed": CLASS_WORDS["fixed"],
}
"""`critical.PATH_CLASSES`. What both have is called the same."""

DIMENSION_NAMES = {"tp": "TP", "cp": "CP", "dp": "FSDP"}
"""Of collectives. What messages between pipeline ranks cost is in the bubble."""

_DIGITS = 4  # of the largest number of a column
_ROUNDING = 1e-9  # of the largest: what is less is nothing


def layout_of(scenario: Scenario) -> str:
    """tp 8 cp 1 pp 16 dp 128, flexible v8 nc 16, 32 micro-batches, ZeRO-2."""
    grid, schedule = scenario.grid, scenario.schedule
    batches = f"{schedule.num_micro_batches} micro-batch{'' if schedule.num_micro_batches == 1 else 'es'}"
    nc = f" nc {schedule.nc}" if schedule.kind == "flexible" else ""
    kind = f"{schedule.kind} v{schedule.v}{nc}"
    return f"tp {grid.tp} cp {grid.cp} pp {grid.pp} dp {grid.dp}, {kind}, {batches}, ZeRO-{schedule.zero}"


def alike(played: Played) -> bool:
    """Whether one replica of the pipeline was simulated for all."""
    return played.lanes.dp * played.lanes.cp * played.lanes.tp == 1


def bubble_words(played: Played) -> str:
    """1.07 s, 7.4% of the step (10.3% of forwards and backwards)."""
    if played.bubble_over_compute < _ROUNDING:
        return "none"
    return (
        f"{duration(played.bubble_seconds)}, {percent(played.bubble_over_step)} of the step "
        f"({percent(played.bubble_over_compute)} of forwards and backwards)"
    )


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def column(seconds: Iterable[float]) -> list[str]:
    """Durations in one unit and with as many decimals, so that they compare at a glance: 4.460 s, 0.986 s, <0.001 s."""
    values = list(seconds)
    most = max(map(abs, values), default=0.0)
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if most >= size), ("us", 1e-6))
    decimals = max(0, _DIGITS - 1 - int(np.floor(np.log10(most / size)))) if most else 0
    least = 10.0**-decimals

    def shown(value: float) -> str:
        if abs(value) <= _ROUNDING * most:
            return "0"
        return f"<{least:g} {unit}" if 0 < value / size < 0.5 * least else f"{value / size:,.{decimals}f} {unit}"

    return [shown(value) for value in values]


def grouped(rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Rows of pipeline ranks from 0 on, those with equal neighbours as one: "1-14"."""
    for cells, equal in groupby(enumerate(rows), key=lambda row: row[1]):
        numbers = [number for number, _ in equal]
        yield (str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}", *cells)
