"""The whole of one rank: its stages, its pipeline, its gradients. What a trainer holds."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.layout import Doing, Schedule, generate
from fourfold.model import Batch
from fourfold.parallel.batch import LocalBatch
from fourfold.parallel.gradients import Gradients, trained_weights
from fourfold.parallel.groups import Groups
from fourfold.parallel.pipeline import LoggedAction, Pipeline, StepResult
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


class Witness(Protocol):
    """Who is told of the forward-backward passes of this rank."""

    def begins(self, micro_batches: Sequence[MicroBatch], batches: Sequence[LocalBatch]) -> None:
        """Before one: the whole micro-batches of the data-parallel group, and this rank's share of each."""

    def ended(self, totals: StepTotals) -> None:
        """After one. Its gradients are finished, and nobody has changed them."""


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
        if device.type == "cuda":  # else cuBLAS may add the parts of a long product in bf16
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.stages = build_stages(plan, groups, weights=weights, dtype=dtype, device=device)
        self.pipeline = Pipeline(self.stages, groups, width=plan.config.dim, dtype=dtype)
        self._forward_schedules: dict[int, Schedule] = {}
        self._witnesses: list[Witness] = []
        weights_here = trained_weights(self.stages, groups, tied=plan.config.tied)
        self.gradients = Gradients(weights_here, groups, tied=plan.config.tied)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], *, schedule: Schedule | None = None) -> StepTotals:
        """Runs a schedule once over this data-parallel group's micro-batches and finishes the gradients.

        The loss is divided once, by the number of valid labels of the global batch: no mean of means.

        Args:
            micro_batches: as many as the schedule has.
            schedule: default that of the plan's first phase.
        """
        valid_tokens = self._count_valid(micro_batches)
        batches = self._local(micro_batches)
        for witness in self._witnesses:
            witness.begins(micro_batches, batches)
        result = self.pipeline.step(schedule or self.plan.schedule, batches, gradient_scale=1.0 / max(valid_tokens, 1))
        with self.groups.recorder.doing(Doing.SUM):
            self.gradients.finish()
            loss = self._total_loss([result])
        totals = StepTotals(loss / max(valid_tokens, 1), valid_tokens, result.log)
        for witness in self._witnesses:
            witness.ended(totals)
        return totals

    @contextmanager
    def witnessed(self, witness: Witness) -> Generator[None]:
        """While it is open, a witness is told of every :meth:`forward_backward`; of validation nobody is told."""
        self._witnesses.append(witness)
        try:
            yield
        finally:
            self._witnesses.remove(witness)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> StepTotals:
        """The loss alone, of any number of micro-batches, as long as all data-parallel groups have as many.

        They run in portions of a training step, so that no more than a step's messages are held at a time.
        """
        valid_tokens = self._count_valid(micro_batches)
        size, results = self.plan.num_micro_batches, []
        for first in range(0, len(micro_batches), size):
            portion = micro_batches[first : first + size]
            schedule = self._forward_schedule(len(portion))
            results.append(self.pipeline.step(schedule, self._local(portion), gradient_scale=0.0))
        log = tuple(entry for result in results for entry in result.log)
        return StepTotals(self._total_loss(results) / max(valid_tokens, 1), valid_tokens, log)

    def _forward_schedule(self, num_micro_batches: int) -> Schedule:
        if num_micro_batches not in self._forward_schedules:
            grid, v = self.plan.grid, self.plan.schedule.v
            self._forward_schedules[num_micro_batches] = generate(
                pp=grid.pp,
                v=v,
                num_micro_batches=num_micro_batches,
                kind="afab",
                zero=self.plan.zero,
                num_frozen_stages=grid.pp * v,
            )
        return self._forward_schedules[num_micro_batches]

    def _local(self, micro_batches: Sequence[MicroBatch]) -> list[LocalBatch]:
        groups, grid = self.groups, self.groups.grid
        return [
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

    def _count_valid(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Labels in the global batch."""
        valid = sum(int((batch.labels >= 0).sum()) for batch, _ in micro_batches if batch.labels is not None)
        with self.groups.recorder.doing(Doing.COUNT):
            return int(self.groups.dp.total([valid])[0])

    def _total_loss(self, results: Sequence[StepResult]) -> float:
        """Summed over labels and ranks. All TP ranks of the last stage have the same losses: one of them reports."""
        own = [r.losses.double().sum().item() for r in results if r.losses is not None and self.groups.tp.rank == 0]
        return self.groups.world.total([sum(own)])[0]

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
