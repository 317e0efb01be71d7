"""What "The Llama 3 Herd of Models" (2407.21783) prints of its pre-trainings, for recipes and for what a run costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fourfold.planner.arithmetic import count_parameters
from fourfold.recipe import PRESETS, ModelConfig

SHORT = 8192
"""Tokens of a sequence in pre-training; longer ones are those of the training that follows."""
HERD = "The Llama 3 Herd of Models (2407.21783)"
COMPUTE_OPTIMAL = "Training Compute-Optimal Large Language Models (2203.15556)"
TOKENS_PER_PARAMETER = 20
"""For other models: about what is best for a given number of FLOPs (2203.15556)."""


@dataclass(frozen=True, slots=True)
class Published:
    """One model's pre-training."""

    tokens: float
    lr: float  # peak
    warmup_steps: int
    min_lr_ratio: float
    source: str
    long_tokens: float | None = None
    """Of the training that follows on sequences longer than `SHORT`."""


_SIMILAR = "lr: Table 3; the rest as 405B's, which it calls similar"
PUBLISHED = {
    "llama3-8b": Published(15e12, 3e-4, 8000, 0.01, _SIMILAR),
    "llama3-70b": Published(15e12, 1.5e-4, 8000, 0.01, _SIMILAR),
    "llama3-405b": Published(
        15.6e12, 8e-5, 8000, 0.01, "3.4.1: cosine to 8e-7 over 1,200,000 steps", long_tokens=800e9
    ),
}


def preset_of(config: ModelConfig) -> str | None:
    """The name of the preset that a model is, if it is one."""
    return next((name for name, known in PRESETS.items() if known == config), None)


def published(config: ModelConfig) -> Published | None:
    """The published pre-training of a model, if there is one."""
    return PUBLISHED.get(preset_of(config) or "")


def long_tokens(config: ModelConfig, seq_len: int) -> float | None:
    """Tokens of the published training on long sequences, after pre-training; None: such a job is not that."""
    known = published(config)
    return known.long_tokens if known is not None and seq_len > SHORT else None


def training_tokens(config: ModelConfig, seq_len: int) -> tuple[float, str]:
    """(tokens of a whole training on sequences of this length, where the number comes from)."""
    known = published(config)
    if (long := long_tokens(config, seq_len)) is not None:
        return long, f"{HERD}, 3.4.2: about, in six stages of longer and longer sequences"
    if known is not None:
        return known.tokens, HERD
    parameters = count_parameters(config).total
    return float(TOKENS_PER_PARAMETER * parameters), f"{TOKENS_PER_PARAMETER} per parameter, {COMPUTE_OPTIMAL}"


def training_steps(config: ModelConfig, seq_len: int, tokens_per_step: int) -> int:
    """Steps of a whole training: as many as its tokens take."""
    return math.ceil(training_tokens(config, seq_len)[0] / tokens_per_step)
