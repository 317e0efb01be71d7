"""Every kind of pipeline schedule on one recipe: what a step takes, and what the fullest rank needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from fourfold.planner.run_memory import run_memory
from fourfold.recipe import RecipeError, check
from fourfold.simulator.engine import simulate
from fourfold.simulator.scenario import recipe_scenario

if TYPE_CHECKING:
    from fourfold.planner.machines.cluster import Cluster
    from fourfold.planner.timing.stack import Stack
    from fourfold.recipe import Recipe, RunPlan

ONE_STAGE = ("1f1b", "zb-h1")  # kinds with one virtual stage per rank


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
    note: str = ""
    """Why another kind runs than was asked for."""
    refused: str | None = None


def compare_schedules(plan: RunPlan, machines: Cluster, stack: Stack) -> tuple[Compared, ...]:
    """All kinds, fastest first, those that the recipe cannot have last. Everything else is as the recipe says."""
    found = [_judged(recipe, machines, stack) for recipe in _variants(plan)]
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


def _judged(recipe: Recipe, machines: Cluster, stack: Stack) -> Compared:
    wanted = recipe.pipeline
    try:
        plan = check(recipe)
    except RecipeError as error:
        reason = "; ".join(map(str, error.problems))
        return Compared(wanted.schedule, wanted.virtual_stages, wanted.nc, refused=reason)
    played = simulate(recipe_scenario(plan, machines, stack), keep=False)
    worst = max(run_memory(plan), key=lambda rank: rank.total)
    return Compared(
        kind=plan.schedule.kind,
        virtual_stages=plan.schedule.v,
        nc=plan.schedule.nc,
        zero=plan.zero,
        step_seconds=played.step_seconds,
        bubble_over_compute=played.bubble_over_compute,
        bubble_over_total=played.bubble_over_total,
        memory_bytes=worst.total,
        worst_rank=worst.pp_rank,
        in_flight=worst.in_flight,
        note=plan.schedule.fallback or "",
    )
