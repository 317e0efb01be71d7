"""The places of the charts in the document: titles, tools, legends, and what can be read of them without a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from fourfold.layout import Grid
from fourfold.report import palette
from fourfold.report.drawing import KINDS, Boxes, HeatMap, Memory, Timeline, rank_label
from fourfold.report.page.peaks import peaks_table
from fourfold.report.page.words import BYTES, quantity

# Pixels. Heights are known before the script runs, so that nothing moves when it does.
_AXIS, _MEMORY_HEIGHT = 34, 280
_ROWS_HEIGHT, _MIN_ROW, _MAX_ROW = 432, 12, 40

_KEYS = (
    "Wheel or pinch: zoom. Drag: move. Click: keep what is said of a box, and show the memory of its rank. "
    "Keys while the pointer is over the timeline: <kbd>+</kbd> <kbd>−</kbd> <kbd>←</kbd> <kbd>→</kbd>, "
    "<kbd>0</kbd> whole step, <kbd>n</kbd> <kbd>p</kbd> next and previous box, <kbd>Esc</kbd>; "
    "after a click <kbd>↑</kbd> <kbd>↓</kbd>: another rank."
)


def timeline_section(timeline: Timeline) -> Iterable[str]:
    row = min(max(_ROWS_HEIGHT // max(len(timeline.rows), 1), _MIN_ROW), _MAX_ROW)
    height = _AXIS + row * len(timeline.rows)
    yield f'<section id="timeline"><h2>{escape(timeline.title)}</h2>'
    yield from _toolbar(timeline)
    yield from _legend(
        _kinds(timeline.boxes),
        timeline.num_chunks,
        '<i class="swatch idle"></i>idle: the rank waits',
        '<i class="swatch mark"></i>same micro-batch as under the pointer',
    )
    yield (
        f'<div class="plot" tabindex="0" role="application" aria-label="Timeline, a row per rank. Plus and minus zoom, '
        f'left and right move, up and down choose a row, n and p go from box to box." '
        f'data-row-height="{row}" style="height:{height}px"></div>'
    )
    if np.any(timeline.boxes.micro_batch >= 0):
        yield f'<p class="hint">{escape(_reading(timeline))}</p>'
    yield f'<p class="hint keys">{_KEYS}</p></section>'


def _reading(timeline: Timeline) -> str:
    """What a stage, a chunk and 3F7 are, once, with the numbers of this timeline."""
    chunks, pp = timeline.num_chunks, max(timeline.pp, 1)
    stage, batch = min(3, max(chunks, 1) * pp - 1), min(7, max(int(timeline.boxes.micro_batch.max(initial=0)), 0))
    number = "A number in a box is its micro-batch."
    others = "I and W: the halves of the backward" if "I" in _kinds(timeline.boxes) else "B: backward"
    example = f"{stage}F{batch} is the forward ({others}) of stage {stage}"
    if chunks <= 1:
        return f"{number} {example} on micro-batch {batch}; stage {stage} is on pp {stage}."
    return (
        f"{number} The model is cut into {chunks * pp} stages; a pipeline rank has {chunks} of them, its chunks: "
        f"chunk c of pp r is stage {pp} c + r. {example}, which is chunk {stage // pp} of pp {stage % pp}, "
        f"on micro-batch {batch}."
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
        yield '<label><input type="checkbox" id="lanes"> messages and collectives</label>'
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
    shades = len({palette.colour(kind, chunk, chunks) for chunk in range(chunks)})
    of_chunks = f", chunk 0 to {shades - 1}" if shades > 1 else ""
    run = "".join(swatch(f"var(--{kind}-{chunk})") for chunk in range(shades))
    return f'<span class="run">{run}</span>{escape(palette.KIND_NAMES[kind])}{of_chunks}'


def swatch(shade: str, *, striped: bool = False) -> str:
    """A small square of a colour."""
    return f'<i class="swatch{" striped" if striped else ""}" style="background-color:{shade}"></i>'


def memory_section(views: Sequence[Memory]) -> Iterable[str]:
    """A chart of one or several views; the first is shown at first."""
    memory = views[0]
    is_bytes = memory.quantity in BYTES
    title = "Memory of every rank over the step" if is_bytes else f"Held by every rank: {memory.quantity}"
    yield f'<section id="memory"><h2>{escape(title)}</h2>'
    options = "".join(f'<option value="{row}">{escape(label)}</option>' for row, label in enumerate(memory.rows))
    yield f'<div class="tools"><label>rank: <select id="rank">{options}</select></label>'
    if len(views) > 1:
        names = enumerate(map(_view_name, views))
        choices = "".join(f'<option value="{number}">{escape(name)}</option>' for number, name in names)
        yield f'<label>shown: <select id="view">{choices}</select></label>'
    yield '<label><input type="checkbox" id="others"> other ranks, as lines</label></div>'
    yield f'<p id="peak">{escape(_highest(memory))}</p>'
    for number, view in enumerate(views):
        yield from _areas(view, number)
    yield (
        f'<div class="plot" tabindex="0" role="application" aria-label="Memory over the same time as the timeline" '
        f'style="height:{_MEMORY_HEIGHT}px"></div>'
    )
    yield from peaks_table(memory)
    yield "</section>"


def _view_name(memory: Memory) -> str:
    """As the choice between several calls it."""
    if memory.by_chunk:
        return "activations by chunk"
    return "bytes by kind" if memory.quantity in BYTES else memory.quantity


def _areas(memory: Memory, number: int) -> Iterable[str]:
    """The legend of a view, of the parts that there ever are."""
    yield f'<ul class="legend areas" data-view="{number}"{" hidden" if number else ""}>'
    for index, part in reversed([*enumerate(memory.parts)]):
        if any(held[index].any() for held in memory.bytes):
            shade = swatch(f"var(--F-{index})") if memory.by_chunk else _part_swatch(index)
            yield f'<li data-part="{index}">{shade}{escape(part)}</li>'
    if memory.capacity is not None:
        capacity = escape(quantity(memory.capacity, memory.quantity))
        yield f'<li><span class="line limit"></span>usable memory of one GPU: {capacity}</li>'
    yield "</ul>"


def _highest(memory: Memory) -> str:
    """What is said of the rank that peaks highest, which is the one that is shown first."""
    totals = [float(held.sum(axis=0).max(initial=0.0)) for held in memory.bytes]
    return memory.peaks[int(np.argmax(totals))] if totals else ""


def _part_swatch(index: int) -> str:
    """Colours are repeated after the last, then with stripes."""
    return swatch(palette.series_colour(index), striped=index >= len(palette.SERIES))


def heat_map_section(heat_map: HeatMap, number: int) -> Iterable[str]:
    dp, pp, cp, tp = heat_map.values.shape
    yield f'<section class="heat"><h2>{escape(heat_map.title)}</h2>'
    yield f"<p>{escape(_extremes(heat_map))}</p>"
    yield (
        f'<div class="scale" data-map="{number}"><b></b><span></span><i></i><span></span><b></b></div>'
        f'<div class="plot" data-map="{number}" tabindex="0" role="application" aria-label="{escape(heat_map.title)}: '
        f'{dp * pp * cp * tp} ranks. Arrows go from rank to rank."></div>'
    )
    yield "</section>"


def heat_map_reading(heat_maps: Sequence[HeatMap]) -> str:
    """How to read all of them, once."""
    dp, pp, cp, tp = np.max([heat_map.values.shape for heat_map in heat_maps], axis=0).tolist()
    where = [f"dp 0 to {dp - 1} downwards and from part to part", f"pp 0 to {pp - 1} from left to right"]
    where += [f"tp 0 to {tp - 1} from left to right inside a block"] * (tp > 1)
    where += [f"cp 0 to {cp - 1} downwards inside a block"] * (cp > 1)
    return f"A cell per rank: {', '.join(where)}. Ranks far from all others have a colour outside the scale."


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
    """The rank at (dp, pp, cp, tp) of a heat map of this shape, by number and coordinates."""
    names = ("dp", "pp", "cp", "tp")
    grid = Grid(**dict(zip(names, shape, strict=True)))
    return rank_label(grid, grid.rank(**dict(zip(names, where, strict=True))))
