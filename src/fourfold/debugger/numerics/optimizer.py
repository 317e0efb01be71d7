"""The optimizer of a recipe, for the references: written from docs/formats.md, not taken from the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fourfold.recipe import RunPlan

EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"


def recipes_optimizer(
    plan: RunPlan, weights: Iterable[tuple[str, int, Sequence[nn.Parameter]]]
) -> torch.optim.Optimizer:
    """AdamW or SGD over weights, each a name, its number of dimensions, and the parts that are updated.

    Norms, embedding and tied head do not decay, unless ``optimizer.decay_all`` says so.
    """
    settings = plan.recipe.optimizer
    spared = (EMBEDDING, HEAD) if plan.config.tied else (EMBEDDING,)
    by_decay: dict[float, list[nn.Parameter]] = {}
    for name, dimensions, parts in weights:
        decays = settings.decay_all or (dimensions > 1 and name not in spared)
        by_decay.setdefault(settings.weight_decay if decays else 0.0, []).extend(parts)
    groups = [{"params": params, "weight_decay": decay} for decay, params in by_decay.items()]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
