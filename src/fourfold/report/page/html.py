"""The document: everything on a page that can be read without a program, and places for the charts.

A page must open from a disk, on a stage, without a network. So styles, script and numbers are inside it, and a content
security policy forbids everything else: no address is ever asked, and no script but ours runs, whatever a name says.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from fourfold.recipe.write import write_whole
from fourfold.report import palette
from fourfold.report.drawing import KINDS, Page, Split, Table
from fourfold.report.page.charts import heat_map_reading, heat_map_section, memory_section, swatch, timeline_section
from fourfold.report.page.columns import Columns
from fourfold.report.page.data import memory_views, page_data
from fourfold.report.page.words import quantity
from fourfold.report.text import percent

_FOLDER = resources.files("fourfold.report.page")
# What `main` needs, in the order in which it is run.
_SCRIPTS = (
    "columns",
    "words",
    "surface",
    "frame",
    "gestures",
    "tip",
    "boxes",
    "strip",
    "timeline",
    "memory",
    "heat_map",
)

_MOST_FINDINGS = 4  # before the timeline, which a page is opened for
_NAME_WIDTH = 0.72  # of a bar in percent: what a letter needs
_SHARE_WIDTH = 3.2  # likewise what "12.3%" needs

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
            f"<style>\n{_colours(page)}\n{_text('page.css')}</style>",
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


def _colours(page: Page) -> str:
    """What pages share with pictures, for a light and a dark background; the rest is in page.css."""
    names = ("ink", "quiet", "faint", "paper", "idle", "alarm", "below", "above")
    light = {name: getattr(palette, name.upper()) for name in names}
    return f":root {{ {_variables(light | _boxes(page))} }}\n" + (
        f':root[data-theme="dark"] {{ {_variables(_boxes(page, dark=True))} }}'
    )


def _boxes(page: Page, *, dark: bool = False) -> dict[str, str]:
    """The colour of every kind and chunk of the timeline, and that of a text on it."""
    chunks = max(
        0 if page.timeline is None else max(page.timeline.num_chunks, 1),
        *(len(view.parts) for view in memory_views(page) if view.by_chunk),
        0,
    )
    shades = {f"{kind}-{i}": palette.colour(kind, i, chunks, dark=dark) for kind in KINDS for i in range(chunks)}
    return shades | {f"{name}-ink": palette.ink_on(shade) for name, shade in shades.items()}


def _variables(values: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in values.items())


def _body(page: Page) -> Iterable[str]:
    yield '<header><button type="button" id="theme" hidden>dark</button>'
    yield f"<h1>{escape(page.title)}</h1></header>"
    yield "<main>"
    yield "<noscript><p>The charts of this page are drawn by a script, which is switched off here.</p></noscript>"
    if page.summary:
        yield '<dl class="tiles">'
        for name, value in page.summary:
            bad = ' class="bad"' if name in page.warnings else ""
            yield f"<div{bad}><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        yield "</dl>"
    if page.findings:
        yield '<ul class="findings">'
        yield from (f"<li>{escape(finding)}</li>" for finding in page.findings[:_MOST_FINDINGS])
        yield "</ul>"
    if page.timeline is not None:
        yield from timeline_section(page.timeline)
    yield from _more((*page.findings[_MOST_FINDINGS:], *page.more))
    if views := memory_views(page):
        yield from memory_section(views)
    for split in page.splits:
        yield from _split(split)
    if page.heat_maps:
        yield '<div class="maps">'
        for number, heat_map in enumerate(page.heat_maps):
            yield from heat_map_section(heat_map, number)
        yield f'</div><p class="hint">{escape(heat_map_reading(page.heat_maps))}</p>'
    for table in page.tables:
        yield from _table(table)
    if page.notes or page.planted:
        yield "<section><h2>Assumptions</h2><ul>"
        yield from (f"<li>{escape(note)}</li>" for note in (*page.notes, *page.planted))
        yield "</ul></section>"
    yield '</main><div id="tip" role="status" aria-live="polite" hidden></div>'


def _more(sentences: Sequence[str]) -> Iterable[str]:
    if sentences:
        yield f'<details class="more"><summary>More findings ({len(sentences)})</summary><ul>'
        yield from (f"<li>{escape(sentence)}</li>" for sentence in sentences)
        yield "</ul></details>"


def _split(split: Split) -> Iterable[str]:
    """A bar, and under it a list of its parts: a part that is too narrow for its name is found there."""
    whole = sum(value for _, value in split.parts)
    keys = split.keys or tuple(name for name, _ in split.parts)
    parts = []
    for index, ((name, value), key) in enumerate(zip(split.parts, keys, strict=True)):
        share = value / whole if whole else 0.0
        parts.append((name, quantity(value, split.unit), share, *palette.step_colour(key, index)))
    yield f'<section class="split"><h2>{escape(split.title)}: {escape(quantity(whole, split.unit))}</h2>'
    yield '<div class="bar" aria-hidden="true">'
    for name, amount, share, shade, striped in parts:
        title = escape(f"{name}: {amount}, {percent(share)}", quote=True)
        room = share * 100
        texts = ((f"{name} {percent(share)}", _NAME_WIDTH), (name, _NAME_WIDTH), (percent(share), None))
        fitting = (t for t, letter in texts if room > (_SHARE_WIDTH if letter is None else letter * len(t)))
        yield (
            f'<div class="part{" striped" if striped else ""}" title="{title}" style="width:{max(share, 0.0):.4%};'
            f'background-color:{shade};color:{palette.ink_on(shade)}"><span>{escape(next(fitting, ""))}</span></div>'
        )
    yield '</div><ul class="parts">'
    for name, amount, share, shade, striped in parts:
        amounts = f"<b>{escape(amount)}</b> <span>{escape(percent(share))}</span>"
        yield f"<li>{swatch(shade, striped=striped)}<span>{escape(name)}</span> {amounts}</li>"
    yield "</ul></section>"


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
