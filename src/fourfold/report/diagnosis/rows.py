"""Rows of a timeline: what a rank does, with what it waits for between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fourfold.report import drawing


class Box(NamedTuple):
    """Something that a rank does. Seconds."""

    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float
    cause: str = ""
    """What is to be said of it; of a computation, what is to be said of the wait before it comes from `Gap`."""


class Gap(NamedTuple):
    """Something for which a rank does nothing."""

    start: float
    end: float
    cause: str


class Rows:
    """Gathers the boxes of a timeline."""

    def __init__(self) -> None:
        self.causes: dict[str, int] = {}
        self._boxes: list[tuple[float, ...]] = []
        self._lanes: list[tuple[float, ...]] = []

    def add(self, row: int, boxes: Iterable[Box], gaps: Sequence[Gap], *, begin: float) -> None:
        """A row, whose first wait begins at `begin`. Of several causes of one wait that which lasts longest is said."""
        at, n = begin, 0
        gaps = sorted(gaps)
        for box in sorted(boxes, key=lambda box: box.start):
            lasts: dict[str, float] = {}
            while n < len(gaps) and gaps[n].start < box.start:
                gap = gaps[n]
                lasts[gap.cause] = lasts.get(gap.cause, 0.0) + gap.end - gap.start
                n += 1
            wait = max(box.start - at, 0.0)
            cause = max(lasts, key=lambda text: lasts[text]) if lasts and wait > 0 else ""
            self._boxes.append(self._line(row, box, wait, cause))
            at = max(at, box.end)

    def add_lanes(self, row: int, boxes: Iterable[Box]) -> None:
        """What runs beside the boxes of a row."""
        self._lanes += [self._line(row, box, 0.0, box.cause) for box in boxes]

    def _line(self, row: int, box: Box, wait: float, cause: str) -> tuple[float, ...]:
        number = self.causes.setdefault(cause, len(self.causes)) if cause else -1
        kind = drawing.KINDS.index(box.kind)
        return row, kind, box.stage, box.micro_batch, box.start, box.end, wait, number

    def timeline(self, title: str, rows: Sequence[str], *, pp: int, span: float) -> drawing.Timeline | None:
        """All of it; None if there is nothing."""
        if not self._boxes:
            return None
        boxes = _columns(self._boxes)
        return drawing.Timeline(
            title=title,
            unit="s",
            rows=tuple(rows),
            num_chunks=max(int(boxes.stage.max()) // pp + 1, 1),
            pp=pp,
            boxes=boxes,
            lanes=_columns(self._lanes) if self._lanes else None,
            causes=tuple(self.causes),
            span=span,
        )


def _columns(lines: Sequence[tuple[float, ...]]) -> drawing.Boxes:
    columns = [np.array(column) for column in zip(*lines, strict=True)]
    row, kind, stage, micro_batch = (column.astype(np.int64) for column in columns[:4])
    start, end, wait = (column.astype(np.float64) for column in columns[4:7])
    return drawing.Boxes(row, kind, stage, micro_batch, start, end, wait, columns[7].astype(np.int64))
