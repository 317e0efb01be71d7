"""What one rank of a run computes in a step, with all that model FLOPs leave out: padding, what TP ranks do alike, and
what backward makes again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fourfold.layout import attention_pairs, shards
from fourfold.planner.arithmetic import on_tensor_rank
from fourfold.recipe import RunPlan, split_dimension, stage_shapes

WITH_BACKWARD = 3  # forward's products, and those of backward: twice as many, for inputs and for weights
LOOKED_UP = "tok_embeddings.weight"  # and not multiplied
LAST = ".feed_forward.w2.weight"  # product of a layer, which is not made again


@dataclass(frozen=True, slots=True)
class RankFlops:
    """FLOPs of a step on one rank; integers, since they are exact.

    Attributes:
        products: of matrices.
        attention: of the pairs that the mask leaves; that fused kernels multiply Q K^T again is not counted.
        again: the part of both that backward makes a second time.
    """

    products: int
    attention: int
    again: int

    @property
    def total(self) -> int:
        """Products and attention."""
        return self.products + self.attention


def rank_flops(plan: RunPlan, *, pp_rank: int, cp_rank: int = 0) -> RankFlops:
    """One step of a rank in the plan's first phase, where every row is one document.

    Raises:
        ValueError: parameters are frozen, so that some of it is not done; nobody has counted that.
    """
    if plan.recipe.train.freeze:
        raise ValueError("what a rank computes with frozen parameters is not known in closed form")
    config, grid = plan.config, plan.grid
    rows = [(plan.phases[0].seq_len,)] * plan.recipe.pipeline.micro_batch
    shard = shards(rows, cp=grid.cp, strategy=plan.recipe.layout.cp_split, multiple_of=grid.tp)[cp_rank]
    heads = config.num_heads // grid.tp
    attended = 4 * attention_pairs(rows, shard) * heads * config.head_dim  # FLOPs of a layer's forward
    products = attention = again = 0
    for stage, shapes in zip(plan.stages, stage_shapes(config, plan.stages), strict=True):
        if stage.index % grid.pp != pp_rank:
            continue
        each = {name: 2 * len(shard.index) * _elements(plan, name, shape) for name, shape in shapes.items()}
        products += WITH_BACKWARD * sum(each.values())
        attention += WITH_BACKWARD * attended * len(stage.layers)
        if plan.recompute[stage.index] == "full":
            repeated = sum(flops for name, flops in each.items() if _is_repeated(name))
            products, attention = products + repeated, attention + attended * len(stage.layers)
            again += repeated + attended * len(stage.layers)
    number = plan.num_micro_batches
    return RankFlops(number * products, number * attention, number * again)


def _elements(plan: RunPlan, name: str, shape: tuple[int, ...]) -> int:
    """What of a parameter one rank multiplies with."""
    config, tp = plan.config, plan.grid.tp
    if len(shape) == 1 or name == LOOKED_UP:
        return 0
    if split_dimension(name, config, tp) is None:  # keys and values of fewer heads than ranks
        return config.head_dim * shape[1]
    return math.prod(on_tensor_rank(name, shape, config=config, tp=tp))


def _is_repeated(name: str) -> bool:
    return name.startswith("layers.") and not name.endswith(LAST)
