"""Figure 11 without communication: the attention of every context-parallel rank, one rank after the other on one GPU.

A rank of cp has the queries of its tokens and all keys and values, as if gathered. All wait for the slowest, so cp
ranks take as long as that one. Relative HFU is the paper's: FLOP/s per GPU over those of one GPU that attends to as
many tokens with the full causal mask. Documents are random, of exponential lengths; a value is the mean over some rows.
What is timed is :func:`fourfold.model.attention`, as a layer calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from fourfold.layout import attention_pairs, pack, shards
from fourfold.layout.documents import Strategy
from fourfold.model import Batch, attention
from fourfold.planner.imbalance import Documents
from fourfold.simulator.figures.attention import CPS, label, published
from fourfold.simulator.figures.cp_attention import relative_hfu
from gpu.clock import seconds_of
from gpu.part import Figures, Part
from gpu.sizes import Sizes

WAYS = ("forward", "both")  # both: and backward
WHAT: tuple[tuple[str, int, Strategy], ...] = (
    *(("causal", cp, "head_tail") for cp in CPS),  # both splits cut a row of one document alike
    *(("documents", cp, split) for cp in CPS for split in get_args(Strategy)),
)
"""Mask, cp and split."""


def measure_context(part: Part, sizes: Sizes, device: torch.device, *, seed: int) -> None:
    """The part: an item per length of row, mask, cp and split, the short rows first."""
    part.facts |= {"heads": vars(sizes.heads), "mean_document": sizes.document, "rows": sizes.document_rows}
    expected = 0.0
    for seq_len in sizes.seq_lens:
        bench = AttentionBench(sizes, device, seq_len, seed=seed)
        name = f"{seq_len} tokens, one GPU"
        alone = part.item(name, partial(bench.measure, [[seq_len]], 1, "head_tail"), expected=2 * expected)
        for mask, cp, split in WHAT:
            name = f"{seq_len} tokens, {mask}, cp {cp}, {split}"
            if alone is None:  # there is nothing that it would be relative to
                part.left_out.append(name)
                continue
            rows = [[seq_len]] if mask == "causal" else document_rows(sizes, seq_len, seed=seed)
            part.item(name, partial(bench.relative, rows, cp, split, mask, alone), expected=alone["seconds"])
        expected = alone["seconds"] if alone else expected


def document_rows(sizes: Sizes, seq_len: int, *, seed: int) -> list[list[int]]:
    """Document lengths of some rows of random documents, packed without a gap."""
    documents = Documents(mean=sizes.document, distribution="exponential")
    lengths = documents.fill(sizes.document_rows * seq_len, np.random.default_rng(seed))
    packed = pack(lengths.tolist(), seq_len)[: sizes.document_rows]
    return [[segment.length for segment in row] for row in packed]


class AttentionBench:
    """Times attention over rows of one length on one device, with random numbers."""

    def __init__(self, sizes: Sizes, device: torch.device, seq_len: int, *, seed: int) -> None:
        self.sizes, self.device, self.seq_len = sizes, device, seq_len
        self._generator = torch.Generator(device).manual_seed(seed)
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def relative(self, rows: Sequence[Sequence[int]], cp: int, split: Strategy, mask: str, alone: Figures) -> Figures:
        """What :meth:`measure` finds, and what it is relative to one GPU."""
        found = self.measure(rows, cp, split)
        hfu = {}
        for way in WAYS:
            (reference,) = alone["rows"][0][way]
            hfu[way] = mean(
                100 * relative_hfu(lengths, cp=cp, seconds=max(ranks[way]), alone=reference)
                for lengths, ranks in zip(rows, found["rows"], strict=True)
            )
        paper = published("11", cp=cp, mask=mask).get(label(self.seq_len))
        return {**found, "mask": mask, "relative_hfu": hfu, "paper_with_communication": paper}

    def measure(self, rows: Sequence[Sequence[int]], cp: int, split: Strategy) -> Figures:
        """Seconds of every rank, row by row, and how much longer than the mean the slowest takes."""
        measured = [self._row(list(lengths), cp, split) for lengths in rows]
        slowest = {way: mean(max(row[way]) / mean(row[way]) for row in measured) for way in WAYS}
        return {"seq_len": self.seq_len, "cp": cp, "split": split, "rows": measured, "slowest_over_mean": slowest}

    def _row(self, lengths: list[int], cp: int, split: Strategy) -> Figures:
        whole = Batch.from_rows(torch.zeros(self.seq_len, dtype=torch.int64), [lengths])
        cut = shards([lengths], cp=cp, strategy=split)
        times = [self._rank(whole.take(shard).to(self.device), len(shard.index)) for shard in cut]
        pairs = [attention_pairs([lengths], shard) for shard in cut]
        return {"documents": len(lengths), "pairs": pairs, **{way: [t[way] for t in times] for way in WAYS}}

    def _rank(self, batch: Batch, num_queries: int) -> dict[str, float]:
        heads = self.sizes.heads
        q = self._draw(num_queries, heads.query)
        k, v = self._draw(self.seq_len, heads.kv), self._draw(self.seq_len, heads.kv)
        arriving = torch.randn_like(q)

        def forward() -> None:
            with torch.no_grad():
                attention(q, k, v, batch)

        def both() -> None:
            torch.autograd.grad(attention(q, k, v, batch), (q, k, v), arriving)

        repeats = self.sizes.repeats
        return {
            "forward": seconds_of(forward, self.device, repeats=repeats),
            "both": seconds_of(both, self.device, repeats=repeats),
        }

    def _draw(self, length: int, num_heads: int) -> Tensor:
        shape = (length, num_heads, self.sizes.heads.dim)
        drawn = torch.randn(shape, generator=self._generator, device=self.device, dtype=self._dtype)
        return drawn.requires_grad_()
