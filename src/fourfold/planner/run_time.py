"""How long a step of a run will take, from its checked recipe, where the recipe says on what it runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fourfold.layout import Stage
from fourfold.layout.play import Program
from fourfold.planner.jobs import TRAINED_IN
from fourfold.planner.machines.cluster import Cluster, cluster
from fourfold.planner.run_memory import job_of
from fourfold.planner.search.exact import once_per_step, stage_seconds, weight_seconds
from fourfold.planner.timing.stack import load_stack
from fourfold.planner.timing.step import Parts, parts
from fourfold.recipe import RecipeError, RunPlan
from fourfold.recipe.errors import Problem
from fourfold.recipe.schema import Recompute


def run_seconds(plan: RunPlan, machines: Cluster | None, program: Program) -> float | None:
    """Seconds of a step in the first phase, its schedule (`program`) played; None if the recipe names no GPU, runs on
    CPU, or freezes parameters, of which the time model knows nothing."""
    if machines is None or plan.recipe.train.device == "cpu" or plan.recipe.train.freeze:
        return None
    try:
        hardware = machines.columns(TRAINED_IN[plan.recipe.train.dtype])
    except ValueError:  # a chip without these numbers
        return None

    def pieces_of(kind: Recompute | None) -> Parts:
        return parts(job_of(plan, plan.phases[0], kind).replace(**hardware), load_stack("standard"))

    def each(seconds: Callable[[Parts, tuple[Stage, ...]], np.ndarray]) -> np.ndarray:
        of_kind = {kind: seconds(pieces, plan.stages) for kind, pieces in kinds.items()}
        return np.array([of_kind[kind][stage] for stage, kind in enumerate(plan.recompute)])

    pieces, kinds = pieces_of(None), {kind: pieces_of(kind) for kind in plan.recompute}
    pipeline = program.play(
        forward=each(lambda pieces, stages: stage_seconds(pieces, stages)[0]),
        backward=each(lambda pieces, stages: stage_seconds(pieces, stages)[1]),
        weight=each(weight_seconds),
        message=float(pieces.message),
    )
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
