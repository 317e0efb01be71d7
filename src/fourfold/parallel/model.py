"""The whole of one rank: its stages, its pipeline, its gradients. What a trainer holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.model import Batch
from fourfold.parallel.batch import LocalBatch
from fourfold.parallel.gradients import Gradients, trained_weights
from fourfold.parallel.groups import Groups
from fourfold.parallel.pipeline import LoggedAction, Pipeline
from fourfold.parallel.stage import TIED_HEAD, WeightSource, build_stages
from fourfold.parallel.torch_private import whole_tensor
from fourfold.recipe import RunPlan

MicroBatch = tuple[Batch, Sequence[Sequence[int]]]
"""A whole micro-batch of one data-parallel group, and the document lengths in each of its rows."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class StepTotals:
    """A forward-backward pass, summed over the whole job.

    Attributes:
        loss: mean over all valid labels of the global batch, the same on every rank.
        valid_tokens: number of those labels.
        log: what this rank did.
    """

    loss: float
    valid_tokens: int
    log: tuple[LoggedAction, ...]


class ParallelModel:
    """A model laid over the ranks as ``plan`` says. Every rank makes one, and calls the same methods in the same order.

    Args:
        plan: a checked recipe.
        groups: from :func:`fourfold.parallel.connect`.
        weights: where initial weights come from.
        device: of this rank.
    """

    def __init__(self, plan: RunPlan, groups: Groups, *, weights: WeightSource, device: torch.device) -> None:
        self.plan = plan
        self.groups = groups
        self.device = device
        dtype = DTYPES[plan.recipe.train.dtype]
        self.stages = build_stages(plan, groups, weights=weights, dtype=dtype, device=device)
        self.pipeline = Pipeline(plan.schedule, self.stages, groups, width=plan.config.dim, dtype=dtype)
        weights_here = trained_weights(self.stages, groups, tied=plan.config.tied)
        self.gradients = Gradients(weights_here, groups, tied=plan.config.tied)

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> StepTotals:
        """Runs the schedule once over this data-parallel group's micro-batches and finishes the gradients.

        The loss is divided once, by the number of valid labels of the global batch: no mean of means.
        """
        groups, grid = self.groups, self.groups.grid
        local = [
            LocalBatch.of(
                batch,
                rows,
                cp=grid.cp,
                cp_rank=groups.cp.rank,
                tp=grid.tp,
                cp_split=self.plan.recipe.layout.cp_split,
                device=self.device,
            )
            for batch, rows in micro_batches
        ]
        valid = sum(int((batch.labels >= 0).sum()) for batch, _ in micro_batches if batch.labels is not None)
        valid_tokens = int(groups.dp.total([valid])[0])
        result = self.pipeline.step(local, gradient_scale=1.0 / max(valid_tokens, 1))
        self.gradients.finish()
        # All TP ranks of the last stage have the same losses: one of them reports.
        reports = result.losses is not None and groups.tp.rank == 0
        own = result.losses.double().sum().item() if reports and result.losses is not None else 0.0
        loss = groups.world.total([own])[0] / max(valid_tokens, 1)
        return StepTotals(loss, valid_tokens, result.log)

    def world_max(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over all ranks."""
        return self.groups.world.total(values, dist.ReduceOp.MAX)

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        for weight in self.gradients.weights:
            weight.sharded.grad = None
            weight.local.grad = None

    def whole_weights(self, *, gradients: bool = False) -> Iterator[tuple[str, Tensor | None]]:
        """This pipeline rank's weights (or their gradients) by name, each gathered whole in turn, as copies on the CPU.

        All ranks must exhaust it together; only those with tp, cp and dp rank 0 get the tensors, the others get None. A
        tied head, which is a second copy, is left out.
        """
        coordinates = self.groups.coordinates
        wanted = (coordinates.tp, coordinates.cp, coordinates.dp) == (0, 0, 0)
        for stage in self.stages.values():
            for name, parameter in stage.module.named_parameters():
                if self.plan.config.tied and name == TIED_HEAD:
                    continue
                tensor = parameter.grad if gradients else parameter
                if tensor is None:
                    yield name, None
                    continue
                assert isinstance(tensor, DTensor)
                whole = whole_tensor(tensor)
                yield name, whole.cpu() if wanted else None
