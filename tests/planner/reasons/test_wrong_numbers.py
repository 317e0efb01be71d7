"""Numbers that the sources of facts.md have wrong, as printed and as they are.

A study guide (its chapter 9), the Scaling Book and the Herd report. `WRONG` lists them; `ours` is what the planner
says, `theirs` makes the printed number by the slip that it is from, where that is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from fourfold.planner.arithmetic import count_parameters
from fourfold.planner.machines.cluster import cluster, find_chip
from fourfold.planner.reasons.cost import (
    DAY,
    checkpoint_bytes,
    mean_time_between_failures,
    minimum_gpus,
)
from fourfold.planner.reasons.thresholds import fsdp_tokens, fsdp_tp_tokens, tp_layer_seconds, tp_limit
from fourfold.planner.search.paper import paper_layout
from fourfold.planner.search.problem import Problem
from fourfold.recipe import preset
from tests.planner.textbook import all_reduce_seconds, seconds_at_mfu

H100, V5P = 9.9e14, 4.59e14  # FLOP/s as the texts round them
NVLINK, NIC, ICI = 450e9, 50e9, 1.8e11  # bytes/s one-way
P8B, P70B, P405B = (count_parameters(preset(f"llama3-{size}")) for size in ("8b", "70b", "405b"))
PEAK = find_chip("h100").peaks["bf16"]


class Wrong(NamedTuple):
    """A number that a source has wrong."""

    what: str
    unit: str
    printed: float
    right: float
    ours: Callable[[], float]
    theirs: Callable[[], float] | None = None


def minimum_activations(saved_per_layer: int) -> float:
    found = minimum_gpus(preset("llama3-70b"), batch_tokens=4_000_000, hbm_bytes=80e9, saved_per_layer=saved_per_layer)
    return found.activations / 1e12


def job(model: str, gpus: int, *, sequences: int) -> Problem:
    return Problem.of(model=model, cluster=cluster("h100", gpus), seq_len=8192, sequences=sequences)


WRONG = [
    Wrong("attention of 405B (guide 9.2)", "B parameters", 70.5, 71.87, lambda: P405B.attention / 1e9),
    Wrong("405B by its parts (guide, Q3)", "B parameters", 404.7, 405.85,
          lambda: P405B.total / 1e9, lambda: 330 + 70.5 + 4.2),
    Wrong("FFN share of 8B (guide: 80 % of any model)", "%", 80, 70.2,
          lambda: 100 * P8B.ffn / P8B.total, lambda: 100 * P70B.ffn / P70B.total),
    Wrong("peak of an H100 in bf16 (sparse matrices)", "TFLOP/s", 1979, 989.4,
          lambda: PEAK / 1e12, lambda: 2 * PEAK / 1e12),
    Wrong("FSDP in a node of H100 (guide: both directions of NVLink)", "tokens/GPU", 1100, 2200,
          lambda: fsdp_tokens(H100, NVLINK), lambda: fsdp_tokens(H100, 2 * NVLINK)),
    Wrong("TP limit of 70B on H100 (the same)", "ways", 26, 13,
          lambda: tp_limit(28_672, H100, NVLINK), lambda: tp_limit(28_672, H100, 2 * NVLINK)),
    Wrong("FSDP with TP on v5p (guide: a factor of 4 lost)", "tokens/chip", 113, 453,
          lambda: fsdp_tp_tokens(28_672, V5P, ICI, axes=(2, 1)), lambda: (V5P / ICI) ** 2 / (2 * 28_672)),
    Wrong("TP's collectives in a layer's forward, 8K tokens (guide: 4 MB of 4 GB)", "ms", 4.4e-3, 1.04,
          lambda: 1e3 * tp_layer_seconds(8192, 8192, tp=8, bandwidth=NVLINK), lambda: 1e3 * 4e6 / 900e9),
    Wrong("all-reduce of Q4 (guide: a GPU has its whole node's NICs)", "s", 0.0875, 0.656,
          lambda: all_reduce_seconds(17.5e9, 16, NIC), lambda: 2 * 17.5e9 / 400e9),
    Wrong("Adam with master weights, 70B (guide: 8 bytes)", "GB", 560, 840,
          lambda: checkpoint_bytes(70_000_000_000) / 1e9, lambda: 8 * 70.0),
    Wrong("checkpoint of 70B (guide: 16 bytes, gradients with it)", "TB", 1.12, 0.84,
          lambda: checkpoint_bytes(70_000_000_000) / 1e12, lambda: 16 * 0.07),
    Wrong("static bytes of 70B at tp8 dp16 (guide: no master weights, gradients in 16 bits)", "GB", 39.4, 59.5,
          lambda: P70B.total / 8 * (2 + 4 + 12 / 16) / 1e9, lambda: 70 / 8 * (2 + 2 + 8 / 16)),
    Wrong("state of 8B on 32 GPUs (guide, Q2: 12 bytes)", "GB", 3, 4.5,
          lambda: 18 * P8B.total / 32e9, lambda: 12 * 8.03 / 32),
    Wrong("failures on 16,384 GPUs (guide: 2 % per GPU and year)", "1/day", 0.88, 7.8,
          lambda: DAY / mean_time_between_failures(16_384), lambda: 16_000 * 0.02 / 365),
    Wrong("tokens of 1,024 sequences of 8,192 (guide; the book has the same slip)", "M", 4, 8.39,
          lambda: job("llama3-405b", 16_384, sequences=1024).tokens / 1e6),
    Wrong("dp of 405B (guide: on 16,000 GPUs)", "ways", 125, 128,
          lambda: paper_layout(job("llama3-405b", 16_384, sequences=2048)).dp, lambda: 16_000 / (8 * 16)),
    Wrong("8B on 64 GPUs at 50 % (guide: days to weeks)", "days", 14, 264,
          lambda: seconds_at_mfu(6 * P8B.total * 15e12, gpus=64, peak=H100, mfu=0.5) / DAY),
    Wrong("activations at 3 per layer (book: says 3, prints 4)", "TB", 20.9, 15.7,
          lambda: minimum_activations(3), lambda: minimum_activations(4)),
]  # fmt: skip


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row.what)
def test_wrong_numbers_of_the_sources(row: Wrong) -> None:
    assert row.ours() == pytest.approx(row.right, rel=0.01)
    assert row.ours() != pytest.approx(row.printed, rel=0.002)
    if row.theirs is not None:
        assert row.theirs() == pytest.approx(row.printed, rel=0.02)
