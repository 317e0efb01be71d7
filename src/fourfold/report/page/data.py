"""What the charts of a page show: names and sizes as JSON, numbers as columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from fourfold.report.drawing import KINDS, Boxes, HeatMap, Memory, Page, Timeline
from fourfold.report.page.columns import Columns
from fourfold.report.palette import KIND_NAMES, series_colour
from fourfold.report.scale import heat_scale


def page_data(page: Page, columns: Columns) -> dict[str, Any]:
    """The object that the script reads; its numbers go into `columns`.

    Raises:
        ValueError: columns of unequal length, a row, kind or cause that is not there, a time that is not finite.
    """
    return {
        "timeline": None if page.timeline is None else _timeline(page.timeline, columns),
        "memory": [_memory(view, columns) for view in memory_views(page)],
        "heatMaps": [_heat_map(heat_map, columns) for heat_map in page.heat_maps],
    }


def _timeline(timeline: Timeline, columns: Columns) -> dict[str, Any]:
    ends = [boxes.end.max(initial=0.0) for boxes in (timeline.boxes, timeline.lanes) if boxes is not None]
    return {
        "unit": timeline.unit,
        "rows": timeline.rows,
        "pp": timeline.pp,
        "kinds": [{"name": kind, "words": KIND_NAMES[kind]} for kind in KINDS],
        "chunks": max(timeline.num_chunks, 1),
        "causes": timeline.causes,
        "span": max(timeline.span, *map(float, ends)),
        "boxes": _boxes(timeline, timeline.boxes, columns),
        "lanes": None if timeline.lanes is None else _boxes(timeline, timeline.lanes, columns),
    }


def _boxes(timeline: Timeline, boxes: Boxes, columns: Columns) -> dict[str, Any]:
    """Boxes row by row in order of time, so that the script finds what is visible by bisection."""
    lengths = {len(getattr(boxes, name)) for name in Boxes.__dataclass_fields__}
    if len(lengths) > 1:
        raise ValueError(f"boxes of {timeline.title!r}: columns of different lengths {sorted(lengths)}")
    for name, low, high in (
        ("row", 0, len(timeline.rows)),
        ("kind", 0, len(KINDS)),
        ("cause", -1, len(timeline.causes)),
    ):
        values = getattr(boxes, name)
        if len(values) and not (low <= values.min() and values.max() < high):
            raise ValueError(f"boxes of {timeline.title!r}: {name} must be in {low}..{high - 1}")
    order = np.lexsort((boxes.start, boxes.row))
    first = np.searchsorted(boxes.row[order], np.arange(len(timeline.rows) + 1))
    return {
        "first": columns.integers(first),
        "kind": columns.integers(boxes.kind[order]),
        "stage": columns.integers(boxes.stage[order]),
        "microBatch": columns.integers(boxes.micro_batch[order]),
        "cause": columns.integers(boxes.cause[order]),
        "start": columns.times(boxes.start[order]),
        "end": columns.times(boxes.end[order]),
        "wait": columns.times(boxes.wait[order]),
    }


def memory_views(page: Page) -> list[Memory]:
    """What the chart of memory can show, the first at first. ValueError if the rows differ."""
    views = [view for view in (page.memory, page.chunks) if view is not None]
    if len({view.rows for view in views}) > 1:
        raise ValueError("memory: its views must have the same rows")
    return views


def _memory(memory: Memory, columns: Columns) -> dict[str, Any]:
    """Curves one after the other: times of all rows, and bytes [row][part][time]."""
    counts = {len(memory.rows), len(memory.times), len(memory.bytes), len(memory.peaks)}
    if len(counts) > 1:
        raise ValueError("memory: rows, times, bytes and peaks differ in number")
    for label, times, held in zip(memory.rows, memory.times, memory.bytes, strict=True):
        if held.shape != (len(memory.parts), len(times)):
            expected = (len(memory.parts), len(times))
            raise ValueError(f"memory of {label!r}: bytes of shape {held.shape}, must be [parts, times] {expected}")
    none = [np.zeros(0)]
    return {
        "unit": memory.unit,
        "quantity": memory.quantity,
        "rows": memory.rows,
        "parts": memory.parts,
        "colours": None if memory.by_chunk else [series_colour(index) for index in range(len(memory.parts))],
        "peaks": memory.peaks,
        "capacity": memory.capacity,
        "first": columns.integers(np.cumsum([0, *map(len, memory.times)])),
        "times": columns.times(np.concatenate([*memory.times, *none])),
        "bytes": columns.numbers(np.concatenate([*(held.ravel() for held in memory.bytes), *none])),
    }


def _heat_map(heat_map: HeatMap, columns: Columns) -> dict[str, Any]:
    if heat_map.values.ndim != 4:
        raise ValueError(f"heat map {heat_map.title!r}: values must be [dp, pp, cp, tp]")
    low, high = heat_scale(heat_map.values)
    return {
        "unit": heat_map.unit,
        "shape": heat_map.values.shape,
        "marked": heat_map.marked,
        "low": low,
        "high": high,
        "values": columns.numbers(heat_map.values.ravel()),
    }
