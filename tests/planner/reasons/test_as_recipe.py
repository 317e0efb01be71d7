"""A plan becomes a recipe that loads, checks and means the same; what the trainer cannot run is refused by name."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from fourfold.planner.machines.cluster import cluster
from fourfold.planner.reasons.as_recipe import (
    candidate_recipe,
    layout_for_recipe,
    recipe_sentence,
    recipe_toml,
    trainable,
    untrainable,
    write_recipe,
)
from fourfold.planner.reasons.published import training_steps, training_tokens
from fourfold.planner.search.judge import Candidate
from fourfold.planner.search.problem import asked_problem
from fourfold.planner.search.search import search
from fourfold.recipe import ModelConfig, RunPlan, check, load, preset
from tests.planner.planned import M, job, plan_of

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ROOT / "recipes"


def jobs_of_recipes() -> dict[str, Any]:
    """JOBS of benchmarks/recipes.py, which is a script and in no package."""
    spec = spec_from_file_location("benchmarks_recipes", ROOT / "benchmarks" / "recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module.JOBS


JOBS = jobs_of_recipes()


def same(plan: RunPlan, one: Candidate) -> None:
    """A recipe's plan is this layout."""
    grid, schedule = plan.grid, plan.schedule
    assert (grid.tp, grid.cp, grid.pp, grid.dp) == (one.tp, one.cp, one.pp, one.dp)
    assert (schedule.v, schedule.kind, plan.zero) == (one.virtual_stages, one.schedule, one.zero)
    assert plan.recipe.pipeline.micro_batch == one.micro_batch
    if one.schedule == "flexible":
        assert schedule.nc == one.nc


class TestRoundTrip:
    @pytest.mark.parametrize(("model", "gpus"), [("llama3-8b", 32), ("llama3-70b", 128)])
    def test_every_trainable_candidate(self, model: str, gpus: int, tmp_path: Path) -> None:
        plan = plan_of(model, gpus)
        written = 0
        for number, one in enumerate(plan.candidates):
            if untrainable(plan.problem, one):
                continue
            path = write_recipe(plan.problem, one, tmp_path / f"r{number}.toml")
            read = check(load(path))
            same(read, one)
            assert read.config == plan.problem.config
            assert (read.recipe.batch.sequences, read.recipe.batch.seq_len) == (512, 8_192)
            assert read.recipe.train.dtype == "bfloat16"
            assert read.recipe.cluster.gpu == "h100"
            assert read.recipe.output.name == f"r{number}"
            written += 1
        assert written

    def test_published_optimizer(self) -> None:
        """Facts 3.1 and 3.3: peaks 3e-4, 1.5e-4, 8e-5; 8,000 steps of warm-up; cosine to a hundredth."""
        for model, gpus, lr in (("llama3-8b", 32, 3e-4), ("llama3-70b", 128, 1.5e-4)):
            plan = plan_of(model, gpus)
            optimizer = candidate_recipe(plan.problem, layout_for_recipe(plan), name="x").optimizer
            assert (optimizer.lr, optimizer.warmup_steps, optimizer.min_lr_ratio) == (lr, 8_000, 0.01)
            assert optimizer.schedule == "cosine"

    def test_a_model_that_is_no_preset(self) -> None:
        config = ModelConfig(2048, 16, 32, 8, 8192, 50_000, tied=True)
        problem = job("llama3-8b", 8).replace(config=config, name="mine")
        one = layout_for_recipe(search(problem, top=3))
        recipe = candidate_recipe(problem, one, name="mine")
        assert check(recipe).config == config
        assert recipe.optimizer.warmup_steps == min(2000, recipe.train.steps // 10)

    def test_slow_steps_are_no_hangs(self) -> None:
        plan = plan_of("llama3-8b", 32)
        slow = replace(layout_for_recipe(plan), step_seconds=300.0, step_seconds_band=(250.0, 350.0))
        timeouts = check(candidate_recipe(plan.problem, slow, name="x")).recipe.timeouts
        assert timeouts.abort >= 3_500


class TestCluster:
    def test_file_is_written_as_it_was_given(self, tmp_path: Path) -> None:
        """So that planning the recipe asks for the same machine."""
        path = tmp_path / "c1.toml"
        path.write_text('[cluster]\nname = "mine"\nchip = "h100"\nnic_gb_s = 25\n', encoding="utf-8")
        problem = job("llama3-8b", 32).replace(cluster=cluster(path, 32))
        one = layout_for_recipe(search(problem, top=3))
        written = write_recipe(problem, one, tmp_path / "r.toml")
        assert load(written).cluster.gpu == str(path)
        assert asked_problem(written)[0].cluster == problem.cluster
        assert "of mine" in written.read_text(encoding="utf-8")


class TestSentence:
    def test_first_of_the_table(self) -> None:
        plan = plan_of("llama3-8b", 32)
        one = plan.candidates[0]
        said = recipe_sentence(plan, one, "f.toml")
        assert said.startswith("Recipe: f.toml: layout 1 of the table")
        assert "since" not in said

    def test_another_than_the_first(self) -> None:
        plan = plan_of("llama3-70b", 128)
        plan = replace(plan, candidates=(replace(plan.candidates[0], recompute="matmuls"), *plan.candidates[1:]))
        one = layout_for_recipe(plan)
        assert one != plan.candidates[0]
        said = recipe_sentence(plan, one, "f.toml")
        assert f"{one.step_seconds:.3g} s a step" in said
        assert "not written since recompute" in said

    def test_one_without_spare(self) -> None:
        plan = plan_of("llama3-8b", 32)
        first = replace(plan.candidates[0], recompute="none")
        other = replace(first, step_seconds=1.1 * first.step_seconds, micro_batch=9)
        said = recipe_sentence(replace(plan, candidates=(first,)), other, "f.toml")
        assert "+10.0% beside layout 1" in said
        assert "would not fit with the 10%" in said


class TestRefusals:
    def candidate(self) -> Candidate:
        return layout_for_recipe(plan_of("llama3-8b", 32))

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"recompute": "matmuls"}, "recompute = .matmuls.: must be one of none, selective, full for the trainer"),
            ({"schedule": "zb-v"}, "schedule = .zb-v.: must be one of afab, 1f1b, interleaved, flexible, zb-h1"),
            ({"zero": 0}, "zero = 0: must be 1, 2 or 3"),
            ({"tp": 3}, "layout.tp = 3: must divide"),
        ],
    )
    def test_layouts(self, changes: dict[str, object], said: str) -> None:
        one = replace(self.candidate(), **changes)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=said):
            candidate_recipe(plan_of("llama3-8b", 32).problem, one, name="x")

    def test_every_reason_is_said_at_once(self) -> None:
        one = replace(self.candidate(), recompute="feed-forward", zero=0)
        assert len(untrainable(plan_of("llama3-8b", 32).problem, one)) == 2

    def test_fp8(self) -> None:
        problem = job("llama3-8b", 32)
        in_fp8 = type(problem).of(
            model="llama3-8b", cluster=problem.cluster, seq_len=8_192, tokens=4 * M, precision="fp8"
        )
        with pytest.raises(ValueError, match="dtype = fp8: the trainer computes in bf16 or fp32"):
            layout_for_recipe(search(in_fp8, top=1))

    def test_existing_file(self, tmp_path: Path) -> None:
        plan, one = plan_of("llama3-8b", 32), self.candidate()
        path = tmp_path / "r.toml"
        write_recipe(plan.problem, one, path)
        write_recipe(plan.problem, one, path)
        path.write_text("mine", encoding="utf-8")
        with pytest.raises(ValueError, match="exists and says something else"):
            write_recipe(plan.problem, one, path)

    def test_not_toml(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"nearest legal: .*r\.toml"):
            write_recipe(plan_of("llama3-8b", 32).problem, self.candidate(), tmp_path / "r.yaml")

    def test_nothing_fits(self) -> None:
        with pytest.raises(ValueError, match="nothing that the trainer can run fits"):
            layout_for_recipe(plan_of("llama3-405b", 8, tokens=16 * M))


class TestChoice:
    def test_trainable_search_finds_what_the_trainer_can_run(self) -> None:
        asked = job("llama3-8b", 32).replace(limits={"recompute": ("matmuls", "full")})
        plan = search(trainable(asked), top=5)
        assert all(not untrainable(plan.problem, one) for one in plan.candidates)
        assert {one.recompute for one in plan.candidates} == {"full"}

    @pytest.mark.parametrize("kind", ["selective", "full"])
    def test_recipe_recomputes_what_the_plan_does(self, kind: str) -> None:
        plan = search(job("llama3-8b", 32).replace(limits={"recompute": (kind,)}), top=3)
        one = layout_for_recipe(plan)
        assert candidate_recipe(plan.problem, one, name="x").train.recompute == kind
        assert f'recompute = "{kind}"' in recipe_toml(plan.problem, one, name="x")


class TestPublished:
    def test_tokens(self) -> None:
        assert training_tokens(preset("llama3-70b"), 8192)[0] == 15e12
        assert training_tokens(preset("llama3.2-1b"), 8192)[0] == pytest.approx(20 * 1.2358e9, rel=1e-4)

    def test_steps(self) -> None:
        assert training_steps(preset("llama3-405b"), 8192, 16 * M) == 929_833  # 15.6e12 / 2^24, rounded up
        assert training_steps(preset("llama3-405b"), 131_072, 16 * M) == 47_684  # 800e9 / 2^24 (facts.md 3.3)
        assert training_steps(preset("llama3-70b"), 8192, 4 * M) == 3_576_279


class TestRecipesOnDisk:
    """recipes/ holds what `./run bench recipes` writes; after a new calibration it has to be run again."""

    @pytest.mark.parametrize("name", list(JOBS))
    def test_is_legal_and_near_the_best(self, name: str) -> None:
        plan = check(load(RECIPES / f"{name}.toml"))
        made = JOBS[name]
        assert plan.config == preset(made.model)
        assert plan.grid.size == made.gpus
        assert plan.recipe.batch.seq_len == made.seq
        assert plan.recipe.batch.sequences * made.seq == made.problem.tokens
        one = made.layout()
        grid, schedule = plan.grid, plan.schedule
        layout = problem_layout(plan)
        judged = search(trainable(made.problem).replace(limits=layout), top=1).candidates
        assert judged, "the recipe's layout does not fit any more: run ./run bench recipes"
        assert judged[0].step_seconds <= 1.03 * one.step_seconds, "there are faster layouts: run ./run bench recipes"
        assert (grid.pp, schedule.v) == (judged[0].pp, judged[0].virtual_stages)

    def test_405b_is_the_papers(self) -> None:
        plan = check(load(RECIPES / "llama3-405b.toml"))
        grid = plan.grid
        assert (grid.tp, grid.cp, grid.pp, grid.dp) == (8, 1, 16, 128)
        assert (plan.schedule.v, plan.schedule.kind, plan.zero) == (8, "afab", 2)
        assert plan.recipe.pipeline.split == "ends_light"
        assert plan.recipe.optimizer.lr == 8e-5
        assert plan.recipe.train.steps == 929_833

    def test_405b_on_long_sequences_trains_for_800b_tokens(self) -> None:
        """facts.md 3.3: about 800 B tokens from 8K to 128K, after pre-training."""
        recipe = load(RECIPES / "llama3-405b-131k.toml")
        assert recipe.train.steps * recipe.batch.sequences * recipe.batch.seq_len == pytest.approx(800e9, rel=1e-4)

    @pytest.mark.parametrize("name", list(JOBS))
    def test_says_how_it_was_made(self, name: str) -> None:
        text = (RECIPES / f"{name}.toml").read_text(encoding="utf-8")
        assert f"recipes/{name}.toml" in text
        assert "Predicted with the stack standard" in text


def problem_layout(plan: RunPlan) -> dict[str, tuple[int | str, ...]]:
    """A recipe's layout as limits of a search."""
    limits: dict[str, tuple[int | str, ...]] = {name: (getattr(plan.grid, name),) for name in ("tp", "cp", "pp", "dp")}
    limits |= {"virtual_stages": (plan.schedule.v,), "micro_batch": (plan.recipe.pipeline.micro_batch,)}
    limits |= {"schedule": (plan.schedule.kind,), "recompute": (plan.recompute[0],)}
    return limits


def test_text_is_the_same_each_time() -> None:
    plan = plan_of("llama3-8b", 32)
    one = layout_for_recipe(plan)
    assert recipe_toml(plan.problem, one, name="x") == recipe_toml(plan.problem, one, name="x")
