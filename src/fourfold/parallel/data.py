"""The data-parallel dimension: FSDP2 over dp x cp, driven by the schedule's events.

The schedule says when a stage's weights are gathered, when its gradients are reduced and when the weights are freed;
the three ZeRO modes differ in where those events stand, and in what is one group of FSDP2:

- ZeRO-1 and 2 keep a stage's weights gathered through the step. The stage is one FSDP group, so that one event is one
  collective, run at the event's place.
- ZeRO-3 gathers weights for one computation at a time. There the events frame what FSDP2 does layer by layer inside
  that computation: whole are the stage's embedding or head and one layer at a time, each a group of its own.

Gradients are summed, never averaged (the loss is divided by the global token count once), and in fp32: FSDP2
accumulates unsharded gradients in its reduce dtype, and adds reduced ones in the dtype of the fp32 master weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fourfold.model import Llama
from fourfold.parallel.groups import Groups, sum_in_rank_order
from fourfold.parallel.halves import Half, WeightHalves, run_halves
from fourfold.parallel.torch_private import (
    LabelledAllGather,
    LabelledReduceScatter,
    finish_backward,
    finish_whole_groups,
    groups_to_finish,
    reduce_gradients,
    sums_gradients,
)


class ShardedStage:
    """One virtual stage with its weights sharded over the FSDP group.

    Args:
        module: the stage; its parameters are DTensors over the TP mesh.
        groups: of this rank; the weights are sharded over dp x cp.
        halves: where the functions of ``module`` put gradients off.
        zero: ZeRO mode.
        dtype: of computation and gathered weights. Master weights stay in their own.
    """

    def __init__(self, module: Llama, *, groups: Groups, halves: WeightHalves, zero: int, dtype: torch.dtype) -> None:
        self.module = module
        self.halves = halves
        self._per_layer = zero == 3
        # Inputs are not cast: the stage's boundary tensors are in dtype already and the batch has only integers.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

        def shard(part: nn.Module) -> None:
            if any(True for _ in part.parameters()):
                fully_shard(part, mesh=groups.fsdp_mesh, mp_policy=policy, reshard_after_forward=self._per_layer)

        if self._per_layer:
            for layer in module.layers.values():
                shard(layer)
        shard(module)
        for part in self.fsdp_modules():
            # Both are needed for a plain sum, and neither reaches the modules below (a silent trap of torch 2.13).
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_custom_all_gather(LabelledAllGather(groups.fsdp.collective))
            add = sum_in_rank_order if groups.fsdp.ordered else None
            part.set_custom_reduce_scatter(LabelledReduceScatter(groups.fsdp.collective, add=add))
            # FSDP2 guesses the next module of a backward from the last forwards, which here are other micro-batches'.
            part.set_modules_to_backward_prefetch([part])
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(self._per_layer)
            module.set_is_last_backward(self._per_layer)
            module.set_reshard_after_backward(self._per_layer)

    def fsdp_modules(self) -> Iterator[FSDPModule]:
        """The FSDP groups of the stage, none if it has no weights."""
        return (part for part in self.module.modules() if isinstance(part, FSDPModule))

    def sums_gradients(self) -> bool:
        """Whether FSDP adds gradients, as it must, instead of averaging them."""
        return all(sums_gradients(part) for part in self.fsdp_modules())

    def add_gradients(self, kept: list[Half]) -> None:
        """Runs a W: adds the gradients that the I of the same micro-batch has put off, and empties the list.

        As after a whole backward, FSDP2 accumulates them in its reduce dtype. Under ZeRO-3 they do not wait for the
        REDUCE event: a layer's are reduced when its last one is there, so that no more than those of a layer are whole.
        """
        has_weights = isinstance(self.module, FSDPModule)
        unfinished = groups_to_finish(self.module) if self._per_layer and has_weights else []
        run_halves(kept, partial(finish_whole_groups, unfinished))
        if has_weights:
            finish_backward(self.module)

    def gather(self) -> None:
        """Runs a GATHER event."""
        if not self._per_layer:
            for part in self.fsdp_modules():
                part.unshard()

    def reduce(self) -> None:
        """Runs a REDUCE event: afterwards every trained weight's ``grad`` holds its sharded sum over dp x cp so far."""
        if not self._per_layer and isinstance(self.module, FSDPModule):
            reduce_gradients(self.module)

    def free(self) -> None:
        """Runs a FREE event. Weights that stayed gathered would be the old ones in the next step."""
        for part in self.fsdp_modules():
            part.reshard()

    def gathered(self) -> dict[str, Tensor]:
        """The weights that are whole over dp x cp at this moment, by name, each as its local part over TP."""
        gathered = {}
        for name, weight in self.module.named_parameters():
            assert isinstance(weight, DTensor)
            if weight.device_mesh.ndim == 1:
                with torch.no_grad():
                    gathered[name] = weight.to_local()
        return gathered
