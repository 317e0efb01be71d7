"""Every kind of pipeline schedule on one recipe: what a step takes, and what the fullest rank needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from fourfold.planner.memory.peak import RESERVED
from fourfold.planner.memory.walk import walk
from fourfold.planner.search.own import plain_schedule
from fourfold.recipe import RecipeError, check
from fourfold.simulator.engine import simulate
from fourfold.simulator.scenario import recipe_job, recipe_scenario

if TYPE_CHECKING:
    from fourfold.planner.machines.cluster import Cluster
    from fourfold.planner.timing.stack import Stack
    from fourfold.recipe import Recipe, RunPlan


@dataclass(frozen=True)
class Compared:
    """One kind of schedule. Where the recipe cannot have it, `refused` says why, and the rest is None."""

    kind: str
    virtual_stages: int
    nc: int | None
    zero: int | None = None
    step_seconds: float | None = None
    bubble_over_compute: float | None = None
    bubble_over_total: float | None = None
    memory_bytes: float | None = None
    """Allocated on the fullest rank."""
    worst_rank: int | None = None
    in_flight: int | None = None
    """(micro-batch, chunk) pairs on that rank."""
    of_recipe: bool = False
    """Whether it is what the recipe asks for."""
    fits: bool | None = None
    """In the usable memory of a GPU, with what the allocator loses."""
    note: str = ""
    """Why another kind runs than was asked for."""
    refused: str | None = None


def compare_schedules(plan: RunPlan, machines: Cluster, stack: Stack) -> tuple[Compared, ...]:
    """All kinds, fastest first, those that the recipe cannot have last. Everything else is as the recipe says.

    Memory is the planner's: that of the stack.
    """
    own = _judged(plan.recipe, machines, stack, of_recipe=True)
    found = [own]
    for recipe in _variants(plan):
        one = _judged(recipe, machines, stack)
        if (one.kind, one.virtual_stages, one.nc) not in {(o.kind, o.virtual_stages, o.nc) for o in found}:
            found.append(one)
    return tuple(sorted(found, key=lambda one: (one.step_seconds is None, one.step_seconds)))


def _variants(plan: RunPlan) -> Iterator[Recipe]:
    recipe, pp, number = plan.recipe, plan.grid.pp, plan.num_micro_batches
    v = plan.schedule.v
    several = v if v > 1 else 2
    kinds: list[tuple[str, int, int | None]] = [("afab", v, None), ("1f1b", 1, None), ("zb-h1", 1, None)]
    kinds.append(("interleaved", several, None))
    kinds += [("flexible", several, nc) for nc in sorted({2 * pp, number} - {pp}) if pp < nc <= number]
    if several != v:
        kinds.append(("afab", several, None))
    for kind, stages, nc in kinds:
        pipeline = replace(recipe.pipeline, schedule=kind, virtual_stages=stages, nc=nc)
        if stages != v and not isinstance(pipeline.split, str):  # a list of layers for other stages
            pipeline = replace(pipeline, split="even")
        yield replace(recipe, pipeline=pipeline)


def _judged(recipe: Recipe, machines: Cluster, stack: Stack, *, of_recipe: bool = False) -> Compared:
    wanted = recipe.pipeline
    try:
        plan = check(recipe)
    except RecipeError as error:
        reason = "; ".join(map(str, error.problems))
        return Compared(wanted.schedule, wanted.virtual_stages, wanted.nc, refused=reason)
    played = simulate(recipe_scenario(plan, machines, stack), keep=False)
    memory = walk(recipe_job(plan, machines, stack), plan.schedule, plan.stages, None, stack)
    worst = max(memory, key=lambda rank: rank.total)
    return Compared(
        kind=plain_schedule(plan.schedule.kind, v=plan.schedule.v, nc=plan.schedule.nc, pp=plan.grid.pp),
        virtual_stages=plan.schedule.v,
        nc=plan.schedule.nc,
        zero=plan.zero,
        step_seconds=played.step_seconds,
        bubble_over_compute=played.bubble_over_compute,
        bubble_over_total=played.bubble_over_total,
        memory_bytes=worst.total,
        worst_rank=worst.pp_rank,
        in_flight=worst.in_flight,
        of_recipe=of_recipe,
        fits=worst.reserved <= machines.chip.hbm_bytes - RESERVED,
        note=plan.schedule.fallback or "",
    )
