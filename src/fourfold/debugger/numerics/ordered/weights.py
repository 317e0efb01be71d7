"""The weights of the ordered reference: every rank's shard by itself, as the optimizer of that rank has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from fourfold.debugger.numerics.optimizer import EMBEDDING, HEAD
from fourfold.debugger.numerics.ordered.operations import Weights
from fourfold.layout import Coordinates, Stage
from fourfold.model import Llama
from fourfold.recipe import RunPlan, is_frozen, split_dimension

Source = Callable[[str, tuple[int, ...], tuple[slice, ...]], Tensor]
"""(name, shape, slices) -> that part of a weight, float32"""


@dataclass
class ShardedWeight:
    """One weight of one virtual stage, as its ranks hold it.

    Attributes:
        name: in the model.
        stage: global index of the virtual stage.
        shape: of the whole.
        cut: the dimension along which it is cut over TP; None: every TP rank has all of it.
        shards: fp32, [tp][rank of the FSDP group]; along dimension 0, equal but for the last ones.
        trained: whether it is.
        gradients: fp32, the finished gradient of each TP rank's part, [tp]; or None before there is one.
    """

    name: str
    stage: int
    shape: tuple[int, ...]
    cut: int | None
    shards: list[list[nn.Parameter]]
    trained: bool
    gradients: list[Tensor] | None = None

    def local(self, dtype: torch.dtype) -> Weights:
        """What each TP rank computes with, whole over FSDP."""
        with torch.no_grad():
            return [torch.cat([shard.to(dtype) for shard in shards]) for shards in self.shards]

    def first_row(self, t: int, f: int) -> int:
        """Number of the first row of a shard in the whole weight."""
        rows = self.shape[0] // len(self.shards) if self.cut == 0 else self.shape[0]
        before = sum(len(shard) for shard in self.shards[t][:f])
        return (t * rows if self.cut == 0 else 0) + before

    def first_column(self, t: int) -> int:
        """Number of its first column."""
        return t * (self.shape[1] // len(self.shards)) if self.cut == 1 else 0

    def pieces(self, t: int) -> list[Tensor]:
        """The gradient of TP rank t, cut as its shards are."""
        assert self.gradients is not None
        return list(self.gradients[t].split([len(shard) for shard in self.shards[t]]))


def cut_weights(plan: RunPlan, source: Source) -> list[list[ShardedWeight]]:
    """All weights by stage, in the order of their names in a stage's module."""
    tp, num_shards = plan.grid.tp, plan.grid.dp * plan.grid.cp
    found: list[list[ShardedWeight]] = []
    for stage in plan.stages:
        found.append([])
        for name, shape in _held(plan, stage).items():
            cut = split_dimension(name, plan.config, tp)
            shards = []
            for t in range(tp):
                slices = [slice(None)] * len(shape)
                if cut is not None:
                    share = shape[cut] // tp
                    slices[cut] = slice(t * share, (t + 1) * share)
                origin = EMBEDDING if plan.config.tied and name == HEAD else name
                shards.append(_shard(source(origin, shape, tuple(slices)), num_shards))
            trained = not is_frozen(name, plan.recipe.train.freeze, tied=plan.config.tied)
            found[-1].append(ShardedWeight(name, stage.index, shape, cut, shards, trained))
    return found


def _held(plan: RunPlan, stage: Stage) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a stage's weights, in the order of its module. A tied head has a copy of its own everywhere."""
    with torch.device("meta"):
        module = Llama(plan.config, layers=stage.layers, embedding=stage.embedding, head=stage.head)
    held = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if stage.head:
        held.setdefault(HEAD, (plan.config.padded_vocab, plan.config.dim))
    return held


def _shard(weight: Tensor, num_shards: int) -> list[nn.Parameter]:
    """Rows in portions as `torch.chunk` cuts them; the last may be smaller, or none."""
    size = -(-len(weight) // num_shards)
    starts = [min(f * size, len(weight)) for f in range(num_shards + 1)]
    return [nn.Parameter(weight[a:b].clone()) for a, b in pairwise(starts)]


def of_rank(
    weights: list[list[ShardedWeight]], place: Coordinates, plan: RunPlan
) -> Iterator[tuple[ShardedWeight, int]]:
    """All weights that a rank has, in the order in which it has them, each with its index in the FSDP group."""
    f = place.dp * plan.grid.cp + place.cp
    for stage in weights[place.pp :: plan.grid.pp]:
        for weight in stage:
            yield weight, f
