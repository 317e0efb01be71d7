"""A run of any layout in one process, every sum in the order in which the ranks make it under ``train.ordered``.

The order of sums, from the inside out:

1. inside of a rank: matrix products of the rank's own shapes, one micro-batch at a time;
2. over TP in each operation, over CP in the gradients of keys and values: from rank 0 on, in fp32, rounded;
3. over micro-batches: as the schedule orders the backwards of each stage, in fp32;
4. over FSDP (dp x cp, cp innermost): from rank 0 on, whenever the schedule reduces; reduced sums are added in turn;
5. over TP, of weights that every rank holds whole; over both ends of a tied embedding, first plus last;
6. the norm: over weights of a rank, then over ranks, in fp64.

If a layout's run is the same to the bit, then whatever distinguishes it from a plain run is the order of these sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.debugger.numerics.fingerprints import Fingerprinter
from fourfold.debugger.numerics.optimizer import EMBEDDING, HEAD, recipes_optimizer
from fourfold.debugger.numerics.ordered.operations import Block, Parts, summed
from fourfold.debugger.numerics.ordered.passes import Passes
from fourfold.debugger.numerics.ordered.seeing import Seeing
from fourfold.debugger.numerics.ordered.weights import ShardedWeight, Source, cut_weights, of_rank
from fourfold.debugger.numerics.records import RankStep
from fourfold.layout import Kind, Schedule, shards
from fourfold.layout.actions import ENDS
from fourfold.model import Batch
from fourfold.recipe import Phase, RunPlan

MicroBatch = tuple[Batch, Sequence[Sequence[int]]]
"""A whole micro-batch, and the document lengths in each of its rows."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ReferenceStep:
    """What one step was.

    Attributes:
        loss: mean over all valid labels of the global batch.
        grad_norm: of all gradients together, before clipping.
        records: of every rank of the layout, by rank.
    """

    loss: float
    grad_norm: float
    records: list[RankStep]


class OrderedReference:
    """The model, its optimizer and its steps.

    Args:
        plan: of the run; its layout says which sums there are.
        source: of the initial weights.
        everything: whether records have every operation, or weights and gradients alone.
    """

    def __init__(self, plan: RunPlan, source: Source, *, everything: bool) -> None:
        self.plan = plan
        self.weights = cut_weights(plan, source)
        self.dtype = DTYPES[plan.recipe.train.dtype]
        self._everything = everything
        trained = (
            (weight.name, len(weight.shape), [shard for row in weight.shards for shard in row])
            for stage in self.weights
            for weight in stage
            if weight.trained
        )
        self._optimizer = recipes_optimizer(plan, trained)
        self._maker = Fingerprinter()
        self._number = 0

    def step(self, groups: Sequence[Sequence[MicroBatch]], *, phase: Phase, lr: float) -> ReferenceStep:
        """One optimizer step.

        Args:
            groups: the micro-batches of every data-parallel group, in order.
            phase: that the step is in.
            lr: its learning rate.
        """
        self._number += 1
        valid = sum(
            int((batch.labels >= 0).sum()) for group in groups for batch, _ in group if batch.labels is not None
        )
        seeing = Seeing(self.plan, self._number, phase, self._maker, everything=self._everything)
        sums = _Sums(self.plan, self.weights, phase.schedule)
        losses = self._forward_backward(groups, phase, seeing, sums, scale=1.0 / max(valid, 1))
        sums.finish()
        self._sum_tied()
        norm = self._norm()
        loss = losses / max(valid, 1)
        seeing.gradients(self.weights)
        self._update(norm, lr)
        seeing.weights(self.weights)
        for record in seeing.records:
            record.scalars.update(loss=loss, grad_norm=norm)
        return ReferenceStep(loss, norm, seeing.records)

    def _forward_backward(
        self, groups: Sequence[Sequence[MicroBatch]], phase: Phase, seeing: Seeing, sums: _Sums, *, scale: float
    ) -> float:
        """Gradients go to ``sums``. Returns the loss, summed over labels and ranks."""
        plan, train = self.plan, self.plan.recipe.train
        weights = [{weight.name: weight.local(self.dtype) for weight in stage} for stage in self.weights]
        frozen = phase.schedule.num_frozen_stages
        losses: list[list[list[Tensor]]] = [[] for _ in groups]
        for number in range(phase.num_micro_batches):
            made = []
            for group, micro_batches in enumerate(groups):
                batch, rows = micro_batches[number]
                cut = shards(rows, cp=plan.grid.cp, strategy=plan.recipe.layout.cp_split, multiple_of=plan.grid.tp)
                block = Block(batch, cut, plan.config, tp=plan.grid.tp)
                see = seeing.micro_batch(group, number, rows, cut)
                passes = Passes(plan.config, block, weights, see)
                with torch.no_grad():
                    of_ranks = passes.forward(plan.stages, z_loss=train.z_loss)
                    passes.backward(of_ranks[0].new_tensor(scale))
                losses[group].append(of_ranks)
                made.append(passes.gradients)
            for stage in range(frozen, len(plan.stages)):
                sums.add(stage, number, [gradients[stage] for gradients in made])
        total = 0.0
        for group in losses:
            for of_rank_ in zip(*group, strict=True):
                total += torch.stack(of_rank_).double().sum().item()
        return total

    def _sum_tied(self) -> None:
        """First stage plus last, at both ends."""
        if not self.plan.config.tied:
            return
        ends = {w.name: w for stage in self.weights for w in stage if w.name in (EMBEDDING, HEAD) and w.trained}
        if len(ends) == 2:
            first, last = ends[EMBEDDING], ends[HEAD]
            assert first.gradients is not None and last.gradients is not None
            first.gradients = [a + b for a, b in zip(first.gradients, last.gradients, strict=True)]
            last.gradients = [grad.clone() for grad in first.gradients]

    def _norm(self) -> float:
        """Of all gradients of the model together, 2 or inf; what several ranks hold counts once."""
        plan, kind = self.plan, self.plan.recipe.optimizer.clip_norm_type
        of_ranks = []
        for rank in range(plan.grid.size):
            place = plan.grid.coordinates(rank)
            norms = [
                torch.linalg.vector_norm(piece, kind).double()
                for weight, f in of_rank(self.weights, place, plan)
                if weight.trained and self._counts(weight, place.tp)
                if (piece := weight.pieces(place.tp)[f]).numel()
            ]
            each = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
            of_ranks.append(each.amax().item() if math.isinf(kind) else each.square().sum().item())
        if math.isinf(kind):
            return max(of_ranks)
        total = 0.0
        for square in of_ranks:  # not sum(), which compensates for rounding from Python 3.12 on
            total += square
        return math.sqrt(total)

    def _counts(self, weight: ShardedWeight, t: int) -> bool:
        return (t == 0 or weight.cut is not None) and not (self.plan.config.tied and weight.name == HEAD)

    def _update(self, norm: float, lr: float) -> None:
        """Clips, and steps."""
        limit = self.plan.recipe.optimizer.clip_norm
        scale = limit / norm if limit > 0 and norm > limit else None
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for stage in self.weights:
            for weight in stage:
                if not weight.trained:
                    continue
                for t, shards_of_rank in enumerate(weight.shards):
                    for shard, piece in zip(shards_of_rank, weight.pieces(t), strict=True):
                        shard.grad = piece.clone() if scale is None else piece * scale
        self._optimizer.step()
        self._optimizer.zero_grad()


class _Sums:
    """The sums over micro-batches and over the FSDP group, in the order of the schedule.

    Micro-batches come in ascending order, all groups together; a stage whose backwards are in another order waits with
    those that came too early.
    """

    def __init__(self, plan: RunPlan, weights: list[list[ShardedWeight]], schedule: Schedule) -> None:
        self._plan = plan
        self._weights = weights
        self._events: list[list[int | None]] = [[] for _ in weights]  # a micro-batch, or None: a reduction
        for actions in schedule.actions:
            for action in actions:
                if action.kind in ENDS:
                    self._events[action.stage].append(action.micro_batch)
                elif action.kind is Kind.REDUCE:
                    self._events[action.stage].append(None)
        self._early: list[dict[int, list[dict[str, Parts]]]] = [{} for _ in weights]
        self._whole: dict[tuple[int, str, int, int], Tensor] = {}  # by stage, name, FSDP rank and TP rank
        for stage in weights:
            for weight in stage:
                weight.gradients = None

    def add(self, stage: int, micro_batch: int, of_groups: list[dict[str, Parts]]) -> None:
        """Gradients of one micro-batch of every group, by name, [cp][tp]."""
        self._early[stage][micro_batch] = of_groups
        events = self._events[stage]
        while events and (events[0] is None or events[0] in self._early[stage]):
            event = events.pop(0)
            if event is None:
                self._reduce(stage)
            else:
                self._accumulate(stage, self._early[stage].pop(event))

    def _accumulate(self, stage: int, of_groups: list[dict[str, Parts]]) -> None:
        for weight in self._weights[stage]:
            if not weight.trained:
                continue
            for group, gradients in enumerate(of_groups):
                for c, row in enumerate(gradients[weight.name]):
                    for t, gradient in enumerate(row):
                        key = (stage, weight.name, group * self._plan.grid.cp + c, t)
                        before = self._whole.get(key)
                        self._whole[key] = gradient.float() if before is None else before + gradient.float()

    def _reduce(self, stage: int) -> None:
        num_shards = self._plan.grid.dp * self._plan.grid.cp
        for weight in self._weights[stage]:
            if not weight.trained:
                continue
            totals = [
                summed([self._whole.pop((stage, weight.name, f, t)) for f in range(num_shards)])
                for t in range(self._plan.grid.tp)
            ]
            if weight.gradients is None:
                weight.gradients = totals
            else:
                weight.gradients = [a + b for a, b in zip(weight.gradients, totals, strict=True)]

    def finish(self) -> None:
        """Sums over TP what all its ranks hold whole."""
        assert not self._whole and not any(self._early) and not any(self._events), "the schedule left gradients over"
        for stage in self._weights:
            for weight in stage:
                if weight.cut is None and weight.gradients is not None:
                    total = summed(weight.gradients)
                    weight.gradients = [total.clone() for _ in weight.gradients]
