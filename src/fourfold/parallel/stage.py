"""Makes the virtual stages of one rank: the plain model, cut by layers, weights split over TP, sharded over dp x cp."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fourfold.layout import Stage
from fourfold.model import Llama, Ops
from fourfold.model.llama import Weight
from fourfold.parallel.arithmetic import arithmetic
from fourfold.parallel.data import ShardedStage
from fourfold.parallel.groups import Groups
from fourfold.parallel.halves import WeightHalves
from fourfold.parallel.recompute import Policy
from fourfold.parallel.tensor import sharded_ops
from fourfold.recipe import RunPlan, is_frozen, split_dimension

WeightSource = Callable[[str, tuple[int, ...], tuple[slice, ...]], Tensor]
"""(name, shape, slices) -> that part of a weight, float32. Reading a part must not need the whole in memory."""

TIED_HEAD, TIED_EMBEDDING = "output.weight", "tok_embeddings.weight"


def build_stages(
    plan: RunPlan, groups: Groups, *, weights: WeightSource, dtype: torch.dtype, device: torch.device
) -> dict[int, ShardedStage]:
    """This rank's virtual stages by global index, with weights from ``weights``; ``dtype`` is that of computation."""
    train, halves = plan.recipe.train, WeightHalves()
    kernels = arithmetic(compiled=train.compile)
    stages = {}
    for stage in plan.stages[groups.pp.rank :: plan.grid.pp]:
        policy = Policy(plan.recompute[stage.index])
        ops = sharded_ops(plan.config, groups, halves, arithmetic=kernels, policy=policy, z_loss=train.z_loss)
        module = _build(stage, plan, groups, ops, weights, device)
        policy.apply(module)
        stages[stage.index] = ShardedStage(module, groups=groups, halves=halves, zero=plan.zero, dtype=dtype)
    return stages


def _build(stage: Stage, plan: RunPlan, groups: Groups, ops: Ops, weights: WeightSource, device: torch.device) -> Llama:
    with torch.device("meta"):
        module = Llama(plan.config, layers=stage.layers, embedding=stage.embedding, head=stage.head, ops=ops)
        if module.output is not None and module.output is module.tok_embeddings:
            # Both ends of a tied model get a copy, also where they meet in one process: FSDP2 would sum the gradients
            # of a shared one in the dtype of computation. Their gradients are summed in fp32 at the end of the step.
            module.output = Weight(plan.config.padded_vocab, plan.config.dim)
    for name, parameter in list(module.named_parameters()):
        holder = module.get_submodule(name.rpartition(".")[0])
        shape = tuple(parameter.shape)
        source = TIED_EMBEDDING if plan.config.tied and name == TIED_HEAD else name
        # One dimension of DTensor cannot say "every pair of ranks shares a KV head": such weights are held whole.
        cut = split_dimension(name, plan.config, groups.tp.size)
        placement = Replicate() if cut is None else Shard(cut)
        slices = [slice(None)] * len(shape)
        if cut is not None:
            share = shape[cut] // groups.tp.size
            slices[cut] = slice(groups.tp.rank * share, (groups.tp.rank + 1) * share)
        local = weights(source, shape, tuple(slices)).to(device)
        whole = DTensor.from_local(
            local, groups.tp_mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        trained = not is_frozen(name, plan.recipe.train.freeze, tied=plan.config.tied)
        holder.register_parameter("weight", nn.Parameter(whole, requires_grad=trained))
    return module
