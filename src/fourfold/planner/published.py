"""What "The Llama 3 Herd of Models" (2407.21783) prints of its pre-trainings, for recipes and for what a run costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fourfold.planner.arithmetic import count_parameters
from fourfold.recipe import PRESETS, ModelConfig

TOKENS_PER_PARAMETER = 20
"""For other models: about what is best for a given number of FLOPs (2203.15556)."""


@dataclass(frozen=True, slots=True)
class Published:
    """One model's pre-training."""

    tokens: float
    lr: float  # peak
    warmup_steps: int
    min_lr_ratio: float
    steps: int | None
    """Of the cosine; None: not printed."""
    source: str


_SIMILAR = "lr: Table 3; the rest as 405B's, which it calls similar"
PUBLISHED = {
    "llama3-8b": Published(15e12, 3e-4, 8000, 0.01, None, _SIMILAR),
    "llama3-70b": Published(15e12, 1.5e-4, 8000, 0.01, None, _SIMILAR),
    "llama3-405b": Published(15.6e12, 8e-5, 8000, 0.01, 1_200_000, "3.4.1: cosine to 8e-7 over 1,200,000 steps"),
}


def preset_of(config: ModelConfig) -> str | None:
    """The name of the preset that a model is, if it is one."""
    return next((name for name, known in PRESETS.items() if known == config), None)


def published(config: ModelConfig) -> Published | None:
    """The published pre-training of a model, if there is one."""
    return PUBLISHED.get(preset_of(config) or "")


def training_tokens(config: ModelConfig) -> tuple[float, str]:
    """(tokens of a whole training, where the number comes from)."""
    known = published(config)
    if known is not None:
        return known.tokens, "2407.21783"
    parameters = count_parameters(config).total
    return float(TOKENS_PER_PARAMETER * parameters), f"{TOKENS_PER_PARAMETER} per parameter, 2203.15556"


def training_steps(config: ModelConfig, tokens_per_step: int) -> int:
    """Steps of a whole training: those of the published cosine, else as many as the tokens take."""
    known = published(config)
    if known is not None and known.steps is not None:
        return known.steps
    return math.ceil(training_tokens(config)[0] / tokens_per_step)
