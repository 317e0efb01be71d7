"""What Figures 11 to 13 share: the published values, and our own from `cp_attention`."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from fourfold.planner.imbalance import Documents, cut_rows
from fourfold.planner.measured.tables import MEASUREMENTS
from fourfold.planner.search.words import listed
from fourfold.simulator.figures.cp_attention import (
    Gpu,
    Heads,
    all_gather,
    gather_bandwidth,
    one_gpu,
    relative_hfu,
    ring,
)
from fourfold.simulator.figures.figure import Panel, Point, Series, Values

SEQ_LENS = tuple(4096 << doubling for doubling in range(6))
CPS = (2, 4)
MASKS = {"causal": "causal mask", "documents": "document mask, mean 1K"}
_MASKS_IN_TABLE = {"causal": "causal", "documents": "block causal (mean doc 1K)"}
IMPLEMENTATIONS = {"all-gather": "all-gather CP", "ring": "TransformerEngine ring CP"}
"""What we call it, and what the table of published values does."""
HBM2E, HBM3 = "h100-hbm2e", "h100"  # as the planner names the chips
HEADS = Heads()
DOCUMENTS = Documents(mean=1024, distribution="exponential")
ROWS = 32  # with documents, over which a value is the mean
READING_POINTS = 1.0  # of relative HFU: 1 % of the axis
READING_GB_S = 2.5

ASSUMPTIONS = (
    "Not printed: what a GPU computes. Its share of 405B with tp 8, so 16 query heads and one of K and V, of 128 "
    "channels; one row; the forward alone, chosen because it agrees with the figures better than both ways; "
    "FlashAttention 2's kernel on all sides.",
    "From NCCL's tuning table: latency and the choice of protocol; large messages take twice the table's latency, the "
    "one constant that is read off these figures (Figure 12). NVLink reaches 370 GB/s (facts.md 4.2).",
)
DOCUMENT_ASSUMPTIONS = (
    f"Documents: exponential lengths of mean 1K, the simplest that the figure's words allow; the mean of {ROWS} rows.",
    "Not printed: what a document mask is relative to. One GPU with the full causal mask, chosen because that agrees: "
    "relative to the same mask on one GPU, where FLOP/s are lower, too, ours would be far above the bars.",
)


@dataclass(frozen=True)
class Line:
    """A line of a figure of relative HFU."""

    name: str
    cp: int
    mask: str = "causal"
    implementation: str = "all-gather"


def hfu_panel(figure: str, chip: str, title: str, lines: Iterable[Line]) -> Panel:
    """A diagram of relative HFU."""
    return Panel(
        title=f"Relative HFU, {title}",
        unit="% of one GPU",
        x="tokens",
        series=tuple(
            Series(
                line.name,
                published(figure, cp=line.cp, mask=line.mask, implementation=line.implementation),
                hfu(chip, cp=line.cp, mask=line.mask, implementation=line.implementation),
            )
            for line in lines
        ),
        reading_error=READING_POINTS,
        kind="lines",
    )


def label(seq_len: int) -> str:
    """As the axis has it: "4K"."""
    return f"{seq_len // 1024}K"


def published(figure: str, *, cp: int, mask: str = "causal", implementation: str = "all-gather") -> Values:
    """By the label of the length, in order."""
    wanted = (f"Fig. {figure}", str(cp), _MASKS_IN_TABLE[mask], IMPLEMENTATIONS[implementation])
    return {
        label(int(row["seq_len"])): float(row["value"])
        for row in _table()
        if (row["figure"], row["cp"], row["mask"], row["implementation"]) == wanted
    }


def hfu(
    chip: str, *, cp: int, mask: str = "causal", implementation: str = "all-gather", evenly: bool = False
) -> Values:
    """Relative HFU in percent, by the label of the length. `evenly`: as for `Gpu`."""
    return {
        label(seq_len): float(np.mean(hfu_of_rows(chip, seq_len, cp, mask, implementation, evenly)))
        for seq_len in SEQ_LENS
    }


@cache
def hfu_of_rows(
    chip: str, seq_len: int, cp: int, mask: str, implementation: str = "all-gather", evenly: bool = False
) -> tuple[float, ...]:
    """Relative HFU in percent of each row: `ROWS` of documents, or the one that a causal mask has."""
    gpu = Gpu.of(chip, evenly=evenly)
    alone = _alone(gpu, seq_len)

    def seconds(row: list[int]) -> float:
        if implementation == "ring":
            return ring(gpu, HEADS, seq_len, cp=cp).total
        return all_gather(gpu, HEADS, row, cp=cp).total

    rows = [[seq_len]] if mask == "causal" else _document_rows(seq_len)
    return tuple(100 * relative_hfu(row, cp=cp, seconds=seconds(row), alone=alone) for row in rows)


def between(panel: Panel, chip: str, lines: Iterable[Line]) -> frozenset[Point]:
    """Points beyond the reading error whose published value lies between ours and what it would be if units shared
    tiles evenly, give or take the reading error: the order in which a kernel's tiles are dealt can make that much."""
    found = set()
    for line, series in zip(lines, panel.series, strict=True):
        even = hfu(chip, cp=line.cp, mask=line.mask, implementation=line.implementation, evenly=True)
        for name, bar, ours in series.both():
            low, high = sorted((ours, even[name] or ours))
            if low - panel.reading_error <= bar <= high + panel.reading_error:
                found.add(Point(panel.title, series.name, name))
    return panel.beyond() & found


def bandwidth(*, cp: int) -> Values:
    """GB/s of the gather, by the label of the length."""
    return {label(seq_len): gather_bandwidth(HEADS, seq_len, cp=cp) / 1e9 for seq_len in SEQ_LENS}


def forward_and_backward(chip: str, *, seq_len: int, cp: int) -> float:
    """Relative HFU in percent of all-gather with a causal mask, were backward timed as well."""
    gpu, row = Gpu.of(chip), [seq_len]
    alone = sum(one_gpu(gpu, HEADS, row, backward=backward) for backward in (False, True))
    seconds = sum(all_gather(gpu, HEADS, row, cp=cp, backward=backward).total for backward in (False, True))
    return 100 * relative_hfu(row, cp=cp, seconds=seconds, alone=alone)


def median_difference(*panels: Panel) -> float:
    """In percent of the published values: half of ours are less far off."""
    return 100 * float(np.median([abs(ours / bar - 1) for panel in panels for _, bar, ours in panel.compared()]))


def named(points: Iterable[Point]) -> str:
    """The points in words: "cp 2 at 4K and 8K; cp 4 at 16K"."""
    of_series: dict[str, list[str]] = {}
    for point in sorted(points, key=lambda one: (one.series, int(one.label.removesuffix("K")))):
        of_series.setdefault(point.series, []).append(point.label)
    return "; ".join(f"{series} at {listed(dict.fromkeys(labels))}" for series, labels in of_series.items())


@cache
def _alone(gpu: Gpu, seq_len: int) -> float:
    return one_gpu(gpu, HEADS, [seq_len])


@cache
def _document_rows(seq_len: int) -> list[list[int]]:
    """Lengths of the documents in each of some rows."""
    lengths = DOCUMENTS.fill(ROWS * seq_len, np.random.default_rng(0))
    pieces = cut_rows(lengths, rows=ROWS, seq_len=seq_len)
    row = pieces[:-1] // seq_len
    return [np.diff(pieces)[row == number].tolist() for number in range(ROWS)]


@cache
def _table() -> tuple[dict[str, str], ...]:
    return tuple(csv.DictReader((MEASUREMENTS / "cp_attention.csv").read_text(encoding="utf-8").splitlines()))
