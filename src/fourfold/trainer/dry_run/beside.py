"""A dry run beside the planner: what the code that trains does, and what formulas say of it."""

from __future__ import annotations

from collections.abc import Iterator

from fourfold.layout import compile_program
from fourfold.planner.arithmetic import count_stages, moments_per_parameter, rank_bytes
from fourfold.planner.memory.peak import PARTS
from fourfold.planner.memory.walk import live_bytes, peak_of
from fourfold.planner.rank_flops import rank_flops
from fourfold.planner.run_memory import Trainer, held_of, job_of
from fourfold.planner.traffic import traffic
from fourfold.recipe import RunPlan
from fourfold.trainer.dry_run.results import Beside, DryRank, Held

ACTIVATIONS = 0.02  # what the planner leaves out: whole numbers, which say what is whose token
PEAK = 0.05  # of what is alive for a moment it takes a layer more in ZeRO-3, which a GPU gathers ahead
# In zb-h1 it takes W to need as much as a forward keeps, which in the stage with the head is one hidden state more, and
# I and W each to need as much for a moment as a whole backward.
ACTIVATIONS_IN_HALVES, PEAK_IN_HALVES = 0.05, 0.12
KEPT = ("activations", "gathered_kv", "logits")  # of the planner's parts


def beside(plan: RunPlan, dry: DryRank) -> tuple[Beside, ...]:
    """Everything that both know of a rank. Of runs with frozen parameters the planner knows no traffic or FLOPs."""
    known = [*_static(plan, dry), *_alive(plan, dry)]
    if not plan.recipe.train.freeze:
        known += [*_traffic(plan, dry), *_flops(plan, dry)]
    return tuple(known)


def _static(plan: RunPlan, dry: DryRank) -> Iterator[Beside]:
    """Parameters, and what they, their gradients and moments take (algorithms.md 3.1)."""
    recipe, grid = plan.recipe, plan.grid
    counts = count_stages(
        plan.config, plan.stages, tp=grid.tp, num_shards=grid.dp * grid.cp, freeze=recipe.train.freeze
    )
    moments = moments_per_parameter(recipe.optimizer.name, momentum=recipe.optimizer.momentum)
    planned = rank_bytes(
        dry.at.pp, schedule=plan.schedule, counts=counts, dtype=recipe.train.dtype, num_moments=moments
    )
    yield Beside("parameters", "parameters", dry.parameters, sum(c.held for c in counts[dry.at.pp :: grid.pp]))
    of_kind = {
        Held.MASTER: planned.master,
        Held.OPTIMIZER: planned.optimizer,
        Held.GATHERED: planned.weights,
        Held.SUMS: planned.gradients,
        Held.SHARDS: planned.gradient_shards,
    }
    for kind, num_bytes in of_kind.items():
        yield Beside(kind, "bytes", dry.most[kind], num_bytes)


def _alive(plan: RunPlan, dry: DryRank) -> Iterator[Beside]:
    """Activations at their own peak, and everything at its peak, without what libraries hold."""
    phase = plan.phases[0]
    job, held, stack = job_of(plan, phase), held_of(plan, phase), Trainer()
    timeline = compile_program(phase.schedule).play()
    rank = list(live_bytes(job, phase.schedule, plan.stages, timeline, stack, held=held))[dry.at.pp]
    kept = rank.parts[[PARTS.index(name) for name in KEPT]].sum(axis=0).max()
    peak = peak_of(rank, plan.stages, timeline, stack)
    halves = phase.schedule.splits_backward
    of_kept, of_peak = (ACTIVATIONS_IN_HALVES, PEAK_IN_HALVES) if halves else (ACTIVATIONS, PEAK)
    yield Beside(Held.ACTIVATIONS, "bytes", dry.most[Held.ACTIVATIONS], round(kept), of_kept)
    yield Beside("peak", "bytes", dry.peak.bytes, round(peak.total - peak.buffers), of_peak)


def _traffic(plan: RunPlan, dry: DryRank) -> Iterator[Beside]:
    """Every kind of collective and message, by group, kind, dtype and the action that it belongs to."""
    found = {t.alike: (t.count, t.bytes) for t in dry.traffic}
    planned = {t.alike: (t.count, t.bytes) for t in traffic(plan, dry.at.pp)}
    for alike in dict.fromkeys([*found, *planned]):
        (count, num_bytes), (planned_count, planned_bytes) = found.get(alike, (0, 0)), planned.get(alike, (0, 0))
        name = " ".join(alike)
        yield Beside(name, "calls", count, planned_count)
        yield Beside(name, "bytes", num_bytes, planned_bytes)


def _flops(plan: RunPlan, dry: DryRank) -> Iterator[Beside]:
    planned = rank_flops(plan, pp_rank=dry.at.pp, cp_rank=dry.at.cp)
    for name, found, known in (
        ("matrix products", dry.flops.products, planned.products),
        ("attention", dry.flops.attention, planned.attention),
        ("made again", dry.flops.again, planned.again),
    ):
        yield Beside(name, "FLOPs", found, known)
