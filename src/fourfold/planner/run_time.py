"""How long a step of a run will take, from its checked recipe, where the recipe says on what it runs."""

from __future__ import annotations

from fourfold.layout.play import Program
from fourfold.planner.jobs import TRAINED_IN
from fourfold.planner.machines.cluster import Cluster, cluster
from fourfold.planner.run_memory import job_of
from fourfold.planner.search.exact import once_per_step, stage_seconds, weight_seconds
from fourfold.planner.timing.stack import load_stack
from fourfold.planner.timing.step import parts
from fourfold.recipe import RecipeError, RunPlan
from fourfold.recipe.errors import Problem


def run_seconds(plan: RunPlan, machines: Cluster | None, program: Program) -> float | None:
    """Seconds of a step in the first phase, its schedule (`program`) played; None if the recipe names no GPU, runs on
    CPU, or freezes parameters, of which the time model knows nothing."""
    if machines is None or plan.recipe.train.device == "cpu" or plan.recipe.train.freeze:
        return None
    try:
        hardware = machines.columns(TRAINED_IN[plan.recipe.train.dtype])
    except ValueError:  # a chip without these numbers
        return None
    job = job_of(plan, plan.phases[0]).replace(**hardware)
    pieces = parts(job, load_stack("standard"))
    forward, backward = stage_seconds(pieces, plan.stages)
    weight = weight_seconds(pieces, plan.stages)
    pipeline = program.play(forward=forward, backward=backward, weight=weight, message=float(pieces.message))
    return float(pieces.inflation * (pipeline.step_time + once_per_step(pieces)))


def run_cluster(plan: RunPlan) -> Cluster | None:
    """The machines of a recipe; None if it does not say.

    Raises:
        RecipeError: ``cluster.gpu`` is neither a chip that the planner knows nor a readable file.
    """
    gpu = plan.recipe.cluster.gpu
    if gpu is None:
        return None
    try:
        return cluster(gpu, plan.grid.size)
    except ValueError as error:
        raise RecipeError([Problem("cluster.gpu", gpu, str(error))]) from None
