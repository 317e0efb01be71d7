"""What pictures and pages show, as plain data: timelines, memory curves, heat maps, splits.

Whoever has something to show (a schedule, a simulation, measured traces) makes these; `pictures` draws them as PNG and
SVG, `page` as one HTML file. So what is drawn looks the same wherever it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fourfold.layout import Grid

KINDS = ("F", "B", "I", "W", "SEND_F", "SEND_B", "GATHER", "REDUCE", "STEP", "WORK", "TP", "CP", "PP", "DP")
"""What boxes stand for, as `layout.Kind` names it. STEP: what follows the pipeline, such as the optimizer. WORK:
computing of which nobody knows more. TP, CP, PP and DP: communication of that dimension; DP is FSDP's, too, and that of
all ranks."""


@dataclass(frozen=True)
class Boxes:
    """The boxes of a timeline, as columns of equal length."""

    row: np.ndarray  # int: of the timeline
    kind: np.ndarray  # int: index into KINDS
    stage: np.ndarray  # int: global virtual stage; -1: none
    micro_batch: np.ndarray  # int; -1: none
    start: np.ndarray  # float, in the timeline's unit
    end: np.ndarray
    wait: np.ndarray  # float: how long the row did nothing just before the box
    cause: np.ndarray  # int: index into the timeline's causes; -1: none


@dataclass(frozen=True)
class Timeline:
    """What happens when, a row per rank."""

    title: str
    unit: str
    """"s", or "F": the time of a forward."""
    rows: tuple[str, ...]
    """Labels, such as "pp 3" or "rank 27 (dp 0 pp 3 cp 0 tp 3)"."""
    num_chunks: int
    """Virtual stages of a row: a box's chunk, which gives its colour, is stage // pp."""
    pp: int
    boxes: Boxes
    lanes: Boxes | None = None
    """Messages and collectives, which run beside the computations of their row."""
    causes: tuple[str, ...] = ()
    """Sentences that say what a box waited for."""
    span: float = 0.0
    """When all is over: the step's time."""


@dataclass(frozen=True)
class Memory:
    """Live bytes over time, a curve per row of the timeline that is shown above it."""

    unit: str
    """Of time, as in the timeline."""
    rows: tuple[str, ...]
    parts: tuple[str, ...]
    """What the bytes are: weights, gradients, activations ..."""
    times: tuple[np.ndarray, ...]
    """Per row, ascending: from when on the bytes are alive."""
    bytes: tuple[np.ndarray, ...]
    """Per row, float [parts, times]."""
    peaks: tuple[str, ...]
    """Per row, a sentence: how much, when and why."""
    capacity: float | None = None
    """Bytes that one GPU has for a program."""
    quantity: str = "bytes"
    """What is alive. Anything but bytes is shown as a plain count under this name."""
    by_chunk: bool = False
    """The parts are a row's chunks, the first first: they have the colours of their forwards in the timeline."""


@dataclass(frozen=True)
class HeatMap:
    """One number per rank, in [DP][PP][CP][TP] order."""

    title: str
    unit: str
    values: np.ndarray  # float [dp, pp, cp, tp]
    marked: tuple[tuple[int, int, int, int], ...] = ()
    """Ranks to point at, as (dp, pp, cp, tp)."""


@dataclass(frozen=True)
class Split:
    """A whole and its parts, such as a step's time by what it goes to."""

    title: str
    unit: str
    parts: tuple[tuple[str, float], ...]
    keys: tuple[str, ...] = ()
    """Per part, what it is, as `Played.spent` names it: parts of one key have one colour, whatever they are called."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a head. Numbers are right-aligned by whoever shows them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """All that one HTML page shows; what is None or empty is left out."""

    title: str
    summary: tuple[tuple[str, str], ...]
    """(name, value) pairs: step time, bubble, peak memory ..."""
    findings: tuple[str, ...] = ()
    """The few sentences that matter most, the most important first, at most four: they stand before the timeline."""
    timeline: Timeline | None = None
    memory: Memory | None = None
    splits: tuple[Split, ...] = ()
    heat_maps: tuple[HeatMap, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """What was assumed."""
    warnings: tuple[str, ...] = ()
    """Names of the entries of `summary` that are bad, such as a memory over the capacity."""
    more: tuple[str, ...] = ()
    """Further sentences: they are folded, after the timeline."""
    chunks: Memory | None = None
    """A second view of `memory`, of the same rows: activations by chunk."""
    planted: tuple[str, ...] = ()
    """Sentences: what was made slow on purpose."""

    @property
    def heading(self) -> tuple[str, ...]:
        """What a picture says of where it comes from: the title, the summary as one line, what was planted."""
        summary = "\N{NO-BREAK SPACE}· ".join(f"{name}\N{NO-BREAK SPACE}{value}" for name, value in self.summary)
        return (self.title, *([summary] if summary else []), *self.planted)


def rank_label(grid: Grid, rank: int) -> str:
    """A global rank by number and coordinates: rank 27 (dp 0 pp 3 cp 0 tp 3)."""
    at = grid.coordinates(rank)
    return f"rank {rank} (dp {at.dp} pp {at.pp} cp {at.cp} tp {at.tp})"
