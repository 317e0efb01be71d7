"""What is known of the time model's constants before any run is seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Prior:
    """A guess, and standard deviations around it: of the constant's logarithm, or of its logit if it is a share."""

    guess: float
    common: float  # of what all stacks (or the chips of a family) share, around `guess`; 0: that is what it is
    own: float  # of one stack (or chip) around that
    share: bool = False  # between 0 and 1


PRIORS: Mapping[str, Prior] = {
    "matmul": Prior(1.0, 0.0, 0.05),
    "depth": Prior(200.0, 0.5, 0.2),
    "attention": Prior(1.0, 0.0, 0.2),
    "reach": Prior(800.0, 0.5, 0.5),
    "scores": Prior(1.0, 0.3, 0.15),
    "elementwise": Prior(1.5, 0.4, 0.25),
    "cast": Prior(1.0, 0.5, 0.2),
    "launch": Prior(500e-6, 0.5, 0.3),
    "link": Prior(0.75, 0.5, 0.4, share=True),
    "latency": Prior(8e-6, 0.7, 0.5),
    "tp_hidden": Prior(0.7, 0.7, 0.3, share=True),
    "nic": Prior(0.75, 0.5, 0.5, share=True),
    "dp_hidden": Prior(0.7, 1.0, 0.7, share=True),
    "contention": Prior(0.1, 0.7, 0.5, share=True),
    "p2p": Prior(0.5, 1.0, 0.5, share=True),
    "optimizer": Prior(1.0, 0.2, 0.2),
    "fixed": Prior(0.02, 1.0, 0.8),
    "slow": Prior(0.005, 0.7, 0.5),
}
"""Of the constants of a stack. Shares of bandwidth: what vendors' own benchmarks reach. Seconds: a layer launches some
50 kernels, a hop between nodes takes microseconds. The rest are orders of magnitude."""

SUSTAINED_PRIORS: Mapping[str, Prior] = {
    "matmul_16": Prior(0.75, 0.35, 0.25, share=True),
    "matmul_8": Prior(0.62, 0.3, 0.2, share=True),
    "matmul_4": Prior(0.5, 0.4, 0.2, share=True),
    "attention": Prior(0.55, 0.4, 0.15, share=True),
    "portable": Prior(0.4, 0.4, 0.15, share=True),
}
"""Of what chips sustain; `common` is of a family, `own` of a chip in it."""

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "v100": ("v100-32", "v100-32-dgx1"),
    "a100": ("a100-40", "a100-80"),
    "hopper": ("h100", "h100-hbm2e", "h200"),
    "blackwell": ("b200", "b300", "gb200", "gb300"),
    "cdna": ("mi300x", "mi355x"),
    "v5p": ("v5p",),
}
"""Chips of one architecture reach much the same share of their peaks."""

GUESSES: Mapping[tuple[str, str], float] = {("cdna", "matmul_16"): 0.5, ("cdna", "matmul_8"): 0.4}
"""(family, share) for which another guess than `SUSTAINED_PRIORS` has is known: SemiAnalysis (December 2024) measured
620 of MI300X's 1,307 TFLOP/s in bf16 and 990 of its 2,615 in FP8, where H100 reached 720 of 989."""

PORTABLE: Mapping[str, float] = {"v100": 0.3, "a100": 0.5, "hopper": 0.33, "blackwell": 0.2, "cdna": 0.2, "v5p": 0.4}
"""Guess of `Sustained.portable` by family. FlashAttention 2, as its authors measured it, sustains about as many FLOP/s
on chips younger than itself as on those it was written for: a share that falls as peaks grow."""
