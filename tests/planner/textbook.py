"""Formulas of the sources that nothing in Fourfold needs, for the tests that check the sources' numbers."""

from __future__ import annotations

import math

from fourfold.planner.reasons.thresholds import gather_seconds, intensity


def seconds_at_mfu(flops: float, *, gpus: int, peak: float, mfu: float) -> float:
    """Seconds of so many FLOPs (of all GPUs) at a share `mfu` of the dense peak, both in the same convention."""
    return flops / (gpus * peak * mfu)


def compute_over_communication(
    batch_tokens: int, gpus: int, ffn_dim: int, peak: float, bandwidth: float, *, axes: tuple[int, int] = (1, 1)
) -> float:
    """Time of the products over time of the collectives of FSDP with TP at X_opt; below 1, communication bounds."""
    return math.sqrt(batch_tokens / gpus * ffn_dim * axes[0] * axes[1]) / (2 * intensity(peak, bandwidth))


def all_reduce_seconds(size: float, ranks: int, bandwidth: float) -> float:
    """Twice a reduce-scatter."""
    return 2 * gather_seconds(size, ranks, bandwidth)


def p2p_seconds(tokens: int, dim: int, *, tp: int, bandwidth: float, bytes_per_value: int = 2) -> float:
    """One hop between pipeline stages: each TP rank sends its share of the boundary."""
    return bytes_per_value * tokens * dim / tp / bandwidth
