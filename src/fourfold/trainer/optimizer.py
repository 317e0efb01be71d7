"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fourfold.parallel import TrainedWeight
from fourfold.recipe import Optimizer


def make_optimizer(weights: Sequence[TrainedWeight], settings: Optimizer, *, tied: bool) -> torch.optim.Optimizer:
    """AdamW or SGD over this rank's parts of the weights. Norms, embedding and a tied head are not decayed."""
    undecayed = {"tok_embeddings.weight", "output.weight"} if tied else {"tok_embeddings.weight"}
    by_decay: dict[float, list[torch.nn.Parameter]] = {}
    for weight in weights:
        decay = 0.0 if weight.sharded.ndim == 1 or weight.name in undecayed else settings.weight_decay
        by_decay.setdefault(decay, []).append(weight.local)
    groups = [{"params": params, "weight_decay": decay} for decay, params in by_decay.items()]
    if not groups:  # a rank all of whose stages are frozen
        groups = [{"params": [torch.nn.Parameter(torch.zeros(0))], "weight_decay": 0.0}]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def learning_rate(step: int, *, steps: int, settings: Optimizer) -> float:
    """Of a step counted from 0: linear warm-up to lr, then a cosine down to ``min_lr_ratio`` x lr at the last step."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, steps - 1 - settings.warmup_steps)
    floor = settings.min_lr_ratio
    return settings.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
