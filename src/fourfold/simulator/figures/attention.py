"""What Figures 11 to 13 share: the published values, and our own from `cp_attention`."""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources

import numpy as np

from fourfold.planner.imbalance import Documents, cut_rows
from fourfold.simulator.cp_attention import Gpu, Heads, all_gather, gather_bandwidth, one_gpu, relative_hfu, ring
from fourfold.simulator.figures.figure import Panel, Values

SEQ_LENS = tuple(4096 << doubling for doubling in range(6))
CPS = (2, 4)
MASKS = {"causal": "causal", "documents": "block causal (mean doc 1K)"}
"""What we call a mask, and what the table of published values does."""
IMPLEMENTATIONS = {"all-gather": "all-gather CP", "ring": "TransformerEngine ring CP"}
HBM2E, HBM3 = "h100-hbm2e", "h100"  # as the planner names the chips
HEADS = Heads()
DOCUMENTS = Documents(mean=1024, distribution="exponential")
ROWS = 16  # with documents, over which a value is the mean
READING_POINTS = 1.0  # of relative HFU: 1 % of the axis
READING_GB_S = 2.5

ASSUMPTIONS = (
    "Not printed: what a GPU computes. Its share of 405B with tp 8, so 16 query heads and one of K and V, of 128 "
    "channels; one row; the forward alone, which agrees with the figures better than both ways; FlashAttention 2's "
    "kernel on all sides.",
    "From NCCL's tuning table: latency and the choice of protocol; large messages take twice the table's latency, the "
    "one constant that is read off these figures (Figure 12). NVLink reaches 370 GB/s (facts.md 4.2).",
)
DOCUMENT_ASSUMPTIONS = (
    f"Documents: exponential lengths of mean 1K, the simplest that the figure's words allow; the mean of {ROWS} rows.",
    "Not printed: what a document mask is relative to. One GPU with the full causal mask, because that agrees: "
    "relative to the same mask on one GPU, where FLOP/s are lower, too, ours would be 8 to 75 % above the bars.",
)


def label(seq_len: int) -> str:
    """As the axis has it: "4K"."""
    return f"{seq_len // 1024}K"


def published(figure: str, *, cp: int, mask: str = "causal", implementation: str = "all-gather") -> Values:
    """By the label of the length, in order."""
    wanted = (f"Fig. {figure}", str(cp), MASKS[mask], IMPLEMENTATIONS[implementation])
    return {
        label(int(row["seq_len"])): float(row["value"])
        for row in _table()
        if (row["figure"], row["cp"], row["mask"], row["implementation"]) == wanted
    }


def hfu(chip: str, *, cp: int, mask: str = "causal", implementation: str = "all-gather") -> Values:
    """Relative HFU in percent, by the label of the length."""
    return {label(seq_len): 100 * _hfu(chip, seq_len, cp, mask, implementation) for seq_len in SEQ_LENS}


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
    off = [
        abs(value / bar - 1)
        for panel in panels
        for series in panel.series
        for name, bar in series.published.items()
        if bar is not None and (value := series.ours[name]) is not None
    ]
    return 100 * float(np.median(off))


@cache
def _hfu(chip: str, seq_len: int, cp: int, mask: str, implementation: str) -> float:
    gpu, alone = Gpu.of(chip), _alone(chip, seq_len)
    rows = [[seq_len]] if mask == "causal" else _document_rows(seq_len)

    def seconds(row: list[int]) -> float:
        if implementation == "ring":
            return ring(gpu, HEADS, seq_len, cp=cp).total
        return all_gather(gpu, HEADS, row, cp=cp).total

    return float(np.mean([relative_hfu(row, cp=cp, seconds=seconds(row), alone=alone) for row in rows]))


@cache
def _alone(chip: str, seq_len: int) -> float:
    return one_gpu(Gpu.of(chip), HEADS, [seq_len])


def _document_rows(seq_len: int) -> list[list[int]]:
    """Lengths of the documents in each of some rows."""
    lengths = DOCUMENTS.fill(ROWS * seq_len, np.random.default_rng(0))
    pieces = cut_rows(lengths, rows=ROWS, seq_len=seq_len)
    row = pieces[:-1] // seq_len
    return [np.diff(pieces)[row == number].tolist() for number in range(ROWS)]


@cache
def _table() -> tuple[dict[str, str], ...]:
    text = (resources.files("fourfold.simulator.figures") / "cp_attention.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
