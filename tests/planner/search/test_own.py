"""The layout of a recipe as a job: the schedule that is played is the one that runs."""

from __future__ import annotations

import pytest

from fourfold.planner.machines.cluster import cluster
from fourfold.planner.search.exact import schedule_of, stages_of
from fourfold.planner.search.own import OwnLayout, plain_schedule
from fourfold.planner.search.problem import Problem
from fourfold.recipe import Batch, Layout, Model, Pipeline, Recipe, Train, check


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(model=Model(preset="tiny")),
        Recipe(layout=Layout(pp=2), pipeline=Pipeline(schedule="flexible", nc=3, virtual_stages=2)),
        Recipe(layout=Layout(pp=2), pipeline=Pipeline(schedule="flexible", nc=2, virtual_stages=2)),
        Recipe(layout=Layout(pp=2), pipeline=Pipeline(schedule="flexible", nc=4)),
        Recipe(layout=Layout(tp=2, pp=4, dp=8), batch=Batch(sequences=16)),
        Recipe(pipeline=Pipeline(schedule="afab")),
        Recipe(layout=Layout(pp=4, cp=2, zero=3), pipeline=Pipeline(virtual_stages=4, split="even")),
        Recipe(layout=Layout(pp=4, cp=2, zero=2), pipeline=Pipeline(virtual_stages=2, split="ends_light")),
        Recipe(model=Model(preset="llama3-8b"), layout=Layout(pp=2), pipeline=Pipeline(split=(20, 12))),
    ],
)
def test_layout_of_any_recipe_is_what_runs(recipe: Recipe) -> None:
    plan = check(recipe)
    own = OwnLayout.of(plan)
    problem = Problem.from_recipe(plan, cluster=cluster("h100", plan.grid.size))
    job = own.job(problem)
    assert int(job.gpus) == plan.grid.size
    assert schedule_of(job).actions == plan.schedule.actions
    assert stages_of(job, own.stage_layers) == plan.stages
    assert own.unjudged is None


def test_cut_by_document_is_not_judged() -> None:
    recipe = Recipe(layout=Layout(cp=2, cp_split="per_document"))
    assert "per_document" in str(OwnLayout.of(check(recipe)).unjudged)


def test_recomputation_is_judged_where_the_planner_knows_it() -> None:
    full = OwnLayout.of(check(Recipe(train=Train(recompute="full"))))
    assert (full.recompute, full.unjudged) == ("full", None)
    for kinds in ("norms", ("full", "none")):
        recipe = Recipe(layout=Layout(pp=2), train=Train(recompute=kinds))
        assert "none, selective and full" in str(OwnLayout.of(check(recipe)).unjudged)


def test_plain_names() -> None:
    assert plain_schedule("flexible", v=1, nc=8, pp=4) == "1f1b"
    assert plain_schedule("flexible", v=2, nc=4, pp=4) == "interleaved"
    assert plain_schedule("flexible", v=2, nc=8, pp=4) == "flexible"
    assert plain_schedule("afab", v=1, nc=4, pp=4) == "afab"
