"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fourfold.parallel import TIED_EMBEDDING, TIED_HEAD, TrainedWeight
from fourfold.recipe import Optimizer


def make_optimizer(weights: Sequence[TrainedWeight], settings: Optimizer, *, tied: bool) -> torch.optim.Optimizer:
    """AdamW or SGD over this rank's parts of the weights.

    Moments are float32, as the parts are. Norms, embedding and a tied head are not decayed unless
    ``optimizer.decay_all`` asks for it. Settings come from the recipe alone, also when a run resumes.
    """
    by_decay: dict[float, list[torch.nn.Parameter]] = {}
    for weight in weights:
        decay = settings.weight_decay if settings.decay_all or _decays(weight, tied) else 0.0
        by_decay.setdefault(decay, []).append(weight.local)
    groups = [{"params": params, "weight_decay": decay} for decay, params in by_decay.items()]
    if not groups:  # a rank all of whose stages are frozen
        groups = [{"params": [torch.nn.Parameter(torch.zeros(0))], "weight_decay": 0.0}]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def _decays(weight: TrainedWeight, tied: bool) -> bool:
    undecayed = (TIED_EMBEDDING, TIED_HEAD) if tied else (TIED_EMBEDDING,)
    return weight.sharded.ndim > 1 and weight.name not in undecayed


def learning_rate(step: int, *, steps: int, settings: Optimizer) -> float:
    """The learning rate of a step, counted from 0, of a run of ``steps``: a function of nothing else.

    Linear warm-up to ``lr``, then what ``schedule`` says, down to the floor ``min_lr_ratio`` x ``lr`` at the last step:

    - cosine: half a wave, as Llama 3 was trained.
    - linear: a straight line.
    - wsd (warm-up, stable, decay): ``lr`` until the last ``decay_steps`` (default a tenth of the run), then a straight
      line.
    - constant: ``lr`` to the end; it has no floor.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    start = settings.warmup_steps
    if settings.schedule == "wsd":
        start = max(start, steps - 1 - (settings.decay_steps or max(1, steps // 10)))
    progress = min(1.0, max(0, step - start) / max(1, steps - 1 - start))
    height = {  # of the curve: 1 at the peak, 0 at the floor
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "wsd": 1 - progress,
        "constant": 1.0,
    }[settings.schedule]
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * height)
