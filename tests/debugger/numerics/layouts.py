"""A layout's run on forked ranks, and the ordered reference of the same steps: what every rank has, to compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fourfold.debugger.numerics.ordered import OrderedReference
from fourfold.debugger.numerics.ordered.reference import ReferenceStep
from fourfold.debugger.numerics.ordered.weights import ShardedWeight, of_rank
from fourfold.model import fill
from fourfold.parallel import ParallelModel, WeightSource, connect
from fourfold.recipe import RunPlan, check, from_table, to_table
from fourfold.trainer.optimizer import make_optimizer
from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import SEED, Case, micro_batches

LR = 0.01
STEPS = 3
Numbers = dict[tuple[int, str], Tensor]
"""By rank and name, the rank's part."""


@dataclass(frozen=True)
class Steps:
    """Per step: loss, norm of the gradient, and of every trained weight each rank's part and the gradient of it."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Numbers] = field(default_factory=list)
    weights: list[Numbers] = field(default_factory=list)

    def differences(self, other: Steps) -> list[tuple[int, str]]:
        """(step, what) of all that is not the same to the bit."""
        found = []
        for step in range(STEPS):
            if self.losses[step] != other.losses[step]:
                found.append((step, "loss"))
            if self.norms[step] != other.norms[step]:
                found.append((step, "norm"))
            for kind in ("gradients", "weights"):
                mine, others = getattr(self, kind)[step], getattr(other, kind)[step]
                assert mine.keys() == others.keys()
                found += [(step, f"{kind}: {key}") for key in mine if not torch.equal(mine[key], others[key])]
        return found


def plan_of(case: Case, **optimizer: Any) -> RunPlan:
    """With AdamW and clipping, which the harness's own plans leave out."""
    table = to_table(case.plan().recipe)
    table["optimizer"] = {"lr": LR, "clip_norm": case.clip or 0.5, "clip_norm_type": case.clip_type, **optimizer}
    return check(from_table(table))


def source_of(plan: RunPlan) -> WeightSource:
    """Initial weights."""

    def weights(name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
        rows, columns = (*slices, slice(None))[:2]
        return fill(name, shape, SEED, plan.config, rows=rows, columns=columns)

    return weights


def run_ranks(case: Case, *, ordered: bool = True, **optimizer: Any) -> Steps:
    """The layout's run."""
    first, *others = fork_ranks(case.world, lambda rank: _rank(case, ordered, optimizer), timeout=120)
    for other in others:
        assert (first.losses, first.norms) == (other.losses, other.norms)
        for step in range(STEPS):
            first.gradients[step].update(other.gradients[step])
            first.weights[step].update(other.weights[step])
    return first


def _rank(case: Case, ordered: bool, optimizer: dict[str, Any]) -> Steps:
    plan, out = plan_of(case, **optimizer), Steps()
    groups = connect(plan.grid, "cpu", ordered=ordered)
    model = ParallelModel(plan, groups, weights=source_of(plan), device=torch.device("cpu"))
    weights = model.gradients.weights
    steps = make_optimizer(weights, plan.recipe.optimizer, tied=plan.config.tied)
    for step in range(STEPS):
        out.losses.append(model.forward_backward(micro_batches(case, step, groups.coordinates.dp)).loss)
        out.norms.append(model.gradients.norm(case.clip_type))
        out.gradients.append({(groups.rank, w.name): w.gradient.clone() for w in weights})
        model.gradients.clip(out.norms[-1], plan.recipe.optimizer.clip_norm)
        model.gradients.hand_over()
        steps.step()
        model.zero_grad()
        out.weights.append({(groups.rank, w.name): w.local.detach().clone() for w in weights})
    return out


def run_reference(case: Case, **optimizer: Any) -> Steps:
    """The ordered reference of it, rank by rank."""
    plan, out = plan_of(case, **optimizer), Steps()
    reference = OrderedReference(plan, source_of(plan), everything=False)
    for step in range(STEPS):
        made = _step(reference, case, step)
        out.losses.append(made.loss)
        out.norms.append(made.grad_norm)
        out.gradients.append({})
        out.weights.append({})
        for rank in range(case.world):
            place = plan.grid.coordinates(rank)
            for weight, f in of_rank(reference.weights, place, plan):
                if weight.trained:
                    out.gradients[-1][rank, weight.name] = weight.pieces(place.tp)[f].clone()
                    out.weights[-1][rank, weight.name] = weight.shards[place.tp][f].detach().clone()
    return out


def first_step_of_reference(case: Case, **optimizer: Any) -> tuple[ReferenceStep, dict[str, Tensor]]:
    """The first step of the ordered reference, and its gradients whole."""
    plan = plan_of(case, **optimizer)
    reference = OrderedReference(plan, source_of(plan), everything=False)
    made = _step(reference, case, 0)
    weights = [weight for stage in reference.weights for weight in stage]
    return made, {w.name: _whole(w, w.gradients) for w in weights if w.gradients is not None}


def _step(reference: OrderedReference, case: Case, step: int) -> ReferenceStep:
    groups = [micro_batches(case, step, group) for group in range(case.dp)]
    return reference.step(groups, phase=reference.plan.phases[0], lr=LR)


def _whole(weight: ShardedWeight, parts: list[Tensor]) -> Tensor:
    return parts[0] if weight.cut is None else torch.cat(parts, dim=weight.cut)
