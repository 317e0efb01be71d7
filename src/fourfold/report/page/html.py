"""The document: everything on a page that can be read without a program, and places for the charts.

A page must open from a disk, on a stage, without a network. So styles, script and numbers are inside it, and a content
security policy forbids everything else: no address is ever asked, and no script but ours runs, whatever a name says.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

import numpy as np

from fourfold.report import palette
from fourfold.report.drawing import KINDS, Boxes, HeatMap, Memory, Page, Split, Table, Timeline
from fourfold.report.files import write_whole
from fourfold.report.page.columns import Columns
from fourfold.report.page.data import page_data
from fourfold.report.page.words import BYTES, quantity

_FOLDER = resources.files("fourfold.report.page")
# What `main` needs, in the order in which it is run.
_SCRIPTS = ("columns", "words", "surface", "frame", "gestures", "tip", "boxes", "timeline", "memory", "heat_map")

# Pixels. Heights are known before the script runs, so that nothing moves when it does.
_AXIS, _MEMORY_HEIGHT = 30, 250
_ROWS_HEIGHT, _MIN_ROW, _MAX_ROW = 432, 12, 40
_OPEN_ROWS = 32  # a longer table is shown when asked for

_NUMBER = re.compile(r"[-+−~<>≤≥]?\s*[\d,.]*\d\s*(%|[^\s\d]{1,9})?(/\S{1,9})?|-|–|—|")


def write_page(page: Page, path: Path) -> None:
    """Writes a page so that the file is whole or as it was. Raises OSError if it cannot be written."""
    write_whole(path, page_html(page).encode("utf-8"))


def page_html(page: Page) -> str:
    """A page as one HTML document. Raises ValueError if what it should show does not fit together."""
    columns = Columns()
    data = json.dumps(page_data(page, columns), separators=(",", ":"), ensure_ascii=False)
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(page.title)}</title>",
            f"<style>\n{_light()}\n{_text('page.css')}</style>",
            f"<script>{script}</script>",
            "</head>",
            "<body>",
            *_body(page),
            # "<" is all that could end the element early; JSON may write it so.
            f'<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>',
            f'<script type="text/plain" id="columns">{columns.text()}</script>',
            "</body>",
            "</html>",
            "",
        ]
    )


def _text(name: str) -> str:
    return _FOLDER.joinpath(name).read_text(encoding="utf-8")


def _script() -> str:
    """All files as one function, so that their names are theirs alone."""
    return (
        '(() => {\n"use strict";\n' + "\n".join(_text(f"script/{name}.js") for name in (*_SCRIPTS, "main")) + "})();\n"
    )


def _light() -> str:
    """The colours that pages share with pictures; those for a dark background are in page.css."""
    names = ("ink", "quiet", "faint", "paper", "idle", "alarm")
    return ":root { " + " ".join(f"--{name}: {getattr(palette, name.upper())};" for name in names) + " }"


def _body(page: Page) -> Iterable[str]:
    yield '<header><button type="button" id="theme" hidden>dark</button>'
    yield f"<h1>{escape(page.title)}</h1></header>"
    yield "<main>"
    yield "<noscript><p>The charts of this page are drawn by a script, which is switched off here.</p></noscript>"
    if page.summary:
        yield '<dl class="tiles">'
        yield from (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in page.summary)
        yield "</dl>"
    if page.findings:
        yield '<ul class="findings">'
        yield from (f"<li>{escape(finding)}</li>" for finding in page.findings)
        yield "</ul>"
    if page.timeline is not None:
        yield from _timeline(page.timeline)
    if page.memory is not None:
        yield from _memory(page.memory)
    for split in page.splits:
        yield from _split(split)
    for number, heat_map in enumerate(page.heat_maps):
        yield from _heat_map(heat_map, number)
    for table in page.tables:
        yield from _table(table)
    if page.notes:
        yield "<section><h2>Assumptions</h2><ul>"
        yield from (f"<li>{escape(note)}</li>" for note in page.notes)
        yield "</ul></section>"
    yield '</main><div id="tip" role="status" aria-live="polite" hidden></div>'


def _timeline(timeline: Timeline) -> Iterable[str]:
    row = min(max(_ROWS_HEIGHT // max(len(timeline.rows), 1), _MIN_ROW), _MAX_ROW)
    height = _AXIS + row * len(timeline.rows)
    yield f'<section id="timeline"><h2>{escape(timeline.title)}</h2>'
    yield from _toolbar(timeline)
    yield from _legend(
        _kinds(timeline.boxes),
        timeline.num_chunks,
        '<i class="swatch idle"></i>empty: the rank waits',
        '<i class="swatch mark"></i>same micro-batch as under the pointer',
    )
    yield (
        f'<div class="plot" tabindex="0" role="application" aria-label="Timeline, a row per rank. Plus and minus zoom, '
        f'left and right move, up and down choose a row, n and p go from box to box." '
        f'data-row-height="{row}" style="height:{height}px"></div>'
    )
    yield (
        '<p class="hint">Wheel or pinch: zoom. Drag: move. Click on a row: its memory. '
        "Keys: + − ← → ↑ ↓, 0 for the whole step, n and p from box to box. "
        "3F7 is the forward of stage 3 on micro-batch 7.</p></section>"
    )


def _toolbar(timeline: Timeline) -> Iterable[str]:
    yield '<div class="tools">'
    for action, sign, words in (
        ("in", "+", "zoom in (key +)"),
        ("out", "−", "zoom out (key −)"),
        ("left", "←", "earlier (key ←)"),
        ("right", "→", "later (key →)"),
    ):
        yield f'<button type="button" data-do="{action}" aria-label="{words}" title="{words}">{sign}</button>'
    yield '<button type="button" data-do="all" title="key 0">whole step</button>'
    if timeline.lanes is not None:
        yield '<label><input type="checkbox" id="lanes"> messages and collectives:</label>'
        yield from _legend(_kinds(timeline.lanes), timeline.num_chunks)
    yield '<output id="range"></output></div>'


def _kinds(boxes: Boxes) -> list[str]:
    """The kinds that occur, in their usual order."""
    return [kind for number, kind in enumerate(KINDS) if np.any(boxes.kind == number)]


def _legend(kinds: Sequence[str], num_chunks: int, *more: str) -> Iterable[str]:
    yield '<ul class="legend">'
    yield from (f"<li>{_kind(kind, num_chunks)}</li>" for kind in kinds)
    yield from (f"<li>{entry}</li>" for entry in more)
    yield "</ul>"


def _kind(kind: str, num_chunks: int) -> str:
    """A kind's name beside the colours of all its chunks."""
    chunks = max(num_chunks, 1)
    shades = list(dict.fromkeys(palette.colour(kind, chunk, chunks) for chunk in range(chunks)))
    of_chunks = f", chunk 0 to {chunks - 1}" if len(shades) > 1 else ""
    return f'<span class="run">{"".join(map(_swatch, shades))}</span>{escape(palette.KIND_NAMES[kind])}{of_chunks}'


def _swatch(shade: str, *, striped: bool = False) -> str:
    return f'<i class="swatch{" striped" if striped else ""}" style="background-color:{shade}"></i>'


def _memory(memory: Memory) -> Iterable[str]:
    is_bytes = memory.quantity in BYTES
    title = "Memory of every rank over the step" if is_bytes else f"Held by every rank: {memory.quantity}"
    yield f'<section id="memory"><h2>{escape(title)}</h2>'
    options = "".join(f'<option value="{row}">{escape(label)}</option>' for row, label in enumerate(memory.rows))
    yield f'<div class="tools"><label>rank: <select id="rank">{options}</select></label>'
    yield '<span id="peak"></span></div>'
    yield '<ul class="legend areas">'
    yield from (f"<li>{_part_swatch(index)}{escape(part)}</li>" for index, part in reversed([*enumerate(memory.parts)]))
    yield '<li><span class="line"></span>other ranks</li>'
    if memory.capacity is not None:
        capacity = escape(quantity(memory.capacity, memory.quantity))
        yield f'<li><span class="line limit"></span>a program has {capacity}</li>'
    yield "</ul>"
    yield (
        f'<div class="plot" tabindex="0" role="application" aria-label="Memory over the same time as the timeline" '
        f'style="height:{_MEMORY_HEIGHT}px"></div>'
    )
    yield from _peaks(memory)
    yield "</section>"


def _peaks(memory: Memory) -> Iterable[str]:
    capacity, is_bytes = memory.capacity, memory.quantity in BYTES
    yield f"<details{' open' if len(memory.rows) <= _OPEN_ROWS else ''}><summary>Peaks of all ranks</summary>"
    yield '<div class="wide"><table id="peaks"><thead><tr><th>rank</th><th class="number">peak</th>'
    yield ('<th class="number">of capacity</th>' if capacity else "") + '<th class="number">at</th><th>why</th>'
    yield "</tr></thead><tbody>"
    for row, (label, times, held, why) in enumerate(
        zip(memory.rows, memory.times, memory.bytes, memory.peaks, strict=True)
    ):
        totals = held.sum(axis=0)
        peak, at = (float(totals.max()), float(times[totals.argmax()])) if len(times) else (math.nan, math.nan)
        share = f'<td class="number">{peak / capacity:.1%}</td>' if capacity else ""
        yield (
            f'<tr data-row="{row}"><th scope="row"><button type="button">{escape(label)}</button></th>'
            f'<td class="number">{quantity(peak, "bytes" if is_bytes else "")}</td>{share}'
            f'<td class="number">{escape(quantity(at, memory.unit))}</td><td>{escape(why)}</td></tr>'
        )
    yield "</tbody></table></div></details>"


def _part_swatch(index: int) -> str:
    """Colours are repeated after the last, then with stripes."""
    return _swatch(palette.series_colour(index), striped=index >= len(palette.SERIES))


def _split(split: Split) -> Iterable[str]:
    whole = sum(value for _, value in split.parts)
    shares = [value / whole if whole else 0.0 for _, value in split.parts]
    yield f'<section class="split"><h2>{escape(split.title)}: {escape(quantity(whole, split.unit))}</h2>'
    yield '<div class="bar" aria-hidden="true">'
    for index, ((name, value), share) in enumerate(zip(split.parts, shares, strict=True)):
        shade = palette.series_colour(index)
        striped = " striped" if index >= len(palette.SERIES) else ""
        title = escape(f"{name}: {quantity(value, split.unit)}, {share:.1%}", quote=True)
        # A name is written into its part where it surely fits; the table has them all.
        inside = f"<span>{escape(name)}</span>" if share * 100 > 0.9 * len(name) else ""
        yield (
            f'<div class="part{striped}" title="{title}" style="width:{max(share, 0.0):.4%};background-color:{shade};'
            f'color:{palette.ink_on(shade)}">{inside}</div>'
        )
    yield '</div><ul class="parts">'
    for index, ((name, value), share) in enumerate(zip(split.parts, shares, strict=True)):
        amounts = f"<b>{escape(quantity(value, split.unit))}</b> <span>{share:.1%}</span>"
        yield f"<li>{_part_swatch(index)}<span>{escape(name)}</span> {amounts}</li>"
    yield "</ul></section>"


def _heat_map(heat_map: HeatMap, number: int) -> Iterable[str]:
    dp, pp, cp, tp = heat_map.values.shape
    yield f'<section class="heat"><h2>{escape(heat_map.title)}</h2>'
    yield f"<p>{escape(_extremes(heat_map))}</p>"
    yield (
        f'<div class="scale" data-map="{number}"><span></span><i></i><span></span></div>'
        f'<div class="plot" data-map="{number}" tabindex="0" role="application" aria-label="{escape(heat_map.title)}: '
        f'{dp * pp * cp * tp} ranks. Arrows go from rank to rank."></div>'
    )
    where = [f"dp 0 to {dp - 1} downwards and from part to part", f"pp 0 to {pp - 1} from left to right"]
    where += [f"tp 0 to {tp - 1} from left to right inside a block"] * (tp > 1)
    where += [f"cp 0 to {cp - 1} downwards inside a block"] * (cp > 1)
    yield f'<p class="hint">A cell per rank: {", ".join(where)}.</p></section>'


def _extremes(heat_map: HeatMap) -> str:
    """The highest, lowest and middle values, and who has them."""
    values = heat_map.values
    known = values[~np.isnan(values)]
    if not known.size:
        return "No rank has a value."
    low, middle, high = float(known.min()), float(np.median(known)), float(known.max())
    if low == high:
        return f"All ranks alike: {quantity(low, heat_map.unit)}."
    highest, lowest = (
        rank_words(np.argwhere(values == extreme)[0].tolist(), values.shape) for extreme in (known.max(), known.min())
    )
    text = (
        f"Highest {quantity(high, heat_map.unit)}: {highest}. Median {quantity(middle, heat_map.unit)}. "
        f"Lowest {quantity(low, heat_map.unit)}: {lowest}."
    )
    if heat_map.marked:
        shown = ", ".join(rank_words(where, values.shape) for where in heat_map.marked[:4])
        more = len(heat_map.marked) - 4
        text += f" Ringed: {shown}{f' and {more} more' if more > 0 else ''}."
    return text


def rank_words(where: Sequence[int], shape: Sequence[int]) -> str:
    """A rank by number and coordinates (dp, pp, cp, tp): rank = tp + TP (cp + CP (pp + PP dp))."""
    dp, pp, cp, tp = where
    rank = tp + shape[3] * (cp + shape[2] * (pp + shape[1] * dp))
    return f"rank {rank} (dp {dp} pp {pp} cp {cp} tp {tp})"


def _table(table: Table) -> Iterable[str]:
    numeric = [
        bool(table.rows) and all(_NUMBER.fullmatch(row[column].strip()) for row in table.rows)
        for column in range(len(table.columns))
    ]
    kinds = [' class="number"' if is_number else "" for is_number in numeric]
    yield f'<section><h2>{escape(table.title)}</h2><div class="wide"><table><thead><tr>'
    yield from (f"<th{kind}>{escape(name)}</th>" for name, kind in zip(table.columns, kinds, strict=True))
    yield "</tr></thead><tbody>"
    for row in table.rows:
        cells = (f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield f"</tbody></table></div>{f'<p>{escape(table.note)}</p>' if table.note else ''}</section>"
