"""How much every rank holds at its peak, and of what: a table, in which ranks that are alike share a row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import groupby

import numpy as np

from fourfold.report.drawing import Memory
from fourfold.report.page.words import BYTES, quantity
from fourfold.report.text import percent

_WORTH_A_COLUMN = 0.02  # of a rank's peak


@dataclass(frozen=True)
class _Peak:
    row: int
    cells: tuple[str, ...]


def peaks_table(memory: Memory) -> Iterable[str]:
    """Folded: the chart and the sentence above it say which rank is the worst."""
    peaks, columns = _peaks(memory)
    yield "<details><summary>Peaks of all ranks</summary>"
    yield '<div class="wide"><table id="peaks"><thead><tr><th>rank</th>'
    yield from (f'<th class="number">{escape(name)}</th>' for name in columns)
    yield "</tr></thead><tbody>"
    for cells, group in groupby(peaks, key=lambda peak: peak.cells):
        rows = [peak.row for peak in group]
        label = memory.rows[rows[0]] + (f" to {memory.rows[rows[-1]]}" if len(rows) > 1 else "")
        yield f'<tr data-row="{rows[0]}" data-last="{rows[-1]}"><th scope="row">'
        yield f'<button type="button">{escape(label)}</button></th>'
        yield from (f'<td class="number">{escape(cell)}</td>' for cell in cells)
        yield "</tr>"
    yield "</tbody></table></div></details>"


def _peaks(memory: Memory) -> tuple[list[_Peak], list[str]]:
    """Of every rank; and the heads of the columns. Parts that are little of every peak are summed up."""
    unit = "bytes" if memory.quantity in BYTES else ""
    at = [
        int(held.sum(axis=0).argmax()) if len(times) else -1
        for times, held in zip(memory.times, memory.bytes, strict=True)
    ]
    none = np.full(len(memory.parts), math.nan)
    parts = np.array([held[:, i] if i >= 0 else none for held, i in zip(memory.bytes, at, strict=True)])
    parts = parts.reshape(len(memory.rows), len(memory.parts))
    totals = parts.sum(axis=1)
    least = np.maximum(_WORTH_A_COLUMN * totals, 1e-9)
    large = [part for part in range(len(memory.parts)) if np.any(parts[:, part] >= least)]
    rest = totals - parts[:, large].sum(axis=1)
    has_rest = bool(np.any(rest > 1e-6 * totals))
    peaks = []
    for row, (i, total) in enumerate(zip(at, totals.tolist(), strict=True)):
        cells = [quantity(total, unit)]
        cells += [percent(total / memory.capacity) if i >= 0 else "-"] if memory.capacity else []
        cells += [quantity(float(memory.times[row][i]), memory.unit) if i >= 0 else "-"]
        cells += [quantity(float(parts[row, part]), unit) for part in large]
        cells += [quantity(float(rest[row]), unit)] if has_rest else []
        peaks.append(_Peak(row, tuple(cells)))
    columns = ["peak", *(["of the usable memory"] if memory.capacity else []), "at"]
    return peaks, [*columns, *(memory.parts[part] for part in large), *(["other"] if has_rest else [])]
