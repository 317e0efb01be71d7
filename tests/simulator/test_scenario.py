"""Scenarios from the planner's jobs and from recipes: the simulator says what the planner says, where both know it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.layout import Kind
from fourfold.planner.jobs import Jobs
from fourfold.planner.machines.cluster import cluster
from fourfold.planner.search.exact import play_exactly, schedule_of, stages_of
from fourfold.planner.search.own import OwnLayout
from fourfold.planner.search.problem import Problem
from fourfold.planner.timing.stack import Stack, load_stack
from fourfold.planner.timing.step import parts
from fourfold.recipe import check, load
from fourfold.simulator.compare import compare_schedules
from fourfold.simulator.engine import simulate
from fourfold.simulator.faults import Faults
from fourfold.simulator.loads import Loads, loads_of, parse_mix
from fourfold.simulator.scenario import Scenario, recipe_scenario, scenario
from fourfold.simulator.work import work_of

RECIPES = Path(__file__).parents[2] / "recipes"
M = 1 << 20


def job(
    model: str = "llama3-405b", *, seq_len: int = 8192, tokens: int = 16 * M, stack: str = "meta", **layout: Any
) -> tuple[Jobs, Stack]:
    own = OwnLayout(**layout)
    gpus = own.tp * own.cp * own.pp * own.dp
    problem = Problem.of(model=model, cluster=cluster("h100", gpus), seq_len=seq_len, tokens=tokens, stack=stack)
    return own.job(problem), problem.stack


PRODUCTION = {"tp": 8, "pp": 16, "virtual_stages": 8, "split": "ends_light"}
AT_16K = PRODUCTION | {"dp": 128, "schedule": "afab", "zero": 2}
AT_8K = PRODUCTION | {"dp": 64, "schedule": "interleaved", "zero": 1}


def loads_for(row: Jobs, mix: str, **changes: Any) -> Loads:
    """Documents in the rows of a job."""
    own = {name: int(getattr(row, name)) for name in ("seq_len", "dp", "micro_batches", "cp")}
    return loads_of(parse_mix(mix), **(own | changes))


def made(row: Jobs, stack: Stack, **changes: Any) -> Scenario:
    return scenario(row, stack, schedule_of(row), stages_of(row), **changes)


class TestWork:
    @pytest.mark.parametrize(
        "layout",
        [
            AT_16K,
            {"tp": 8, "cp": 16, "pp": 16, "dp": 8, "virtual_stages": 8, "schedule": "afab", "zero": 2},
            {"tp": 4, "pp": 4, "dp": 8, "virtual_stages": 2, "schedule": "interleaved", "recompute": "selective"},
            {"tp": 1, "dp": 64, "zero": 3, "recompute": "full"},
        ],
    )
    def test_a_layer_takes_what_the_planner_says(self, layout: dict[str, Any]) -> None:
        row, stack = job("llama3-70b", **layout)
        work, pieces = work_of(row, stack, stages_of(row)), parts(row, stack)
        slower = float(pieces.inflation)
        for kind, seconds in ((Kind.FORWARD, pieces.layer_forward), (Kind.BACKWARD, pieces.layer_backward)):
            layer = work.layer[kind]
            assert layer.compute + layer.attention + layer.tp + layer.cp + layer.dp == pytest.approx(slower * seconds)
            assert 0 < layer.before < layer.compute
        halves = [work.layer[kind] for kind in (Kind.INPUT, Kind.WEIGHT)]
        whole = work.layer[Kind.BACKWARD]
        for name in ("compute", "attention", "tp", "cp", "dp"):
            assert sum(getattr(half, name) for half in halves) == pytest.approx(getattr(whole, name))

    def test_shards_of_all_stages_move_as_many_bytes_as_the_rank_has(self) -> None:
        """405B, tp8 pp16 dp128: 3.17e9 parameters per GPU (facts.md 2.5), gathered in bf16 at 50 GB/s or less."""
        row, stack = job(**AT_16K)
        work = work_of(row, stack, stages_of(row))
        on_rank_5 = sum(work.gather[5::16])
        assert on_rank_5 > 2 * 3.17e9 / 50e9
        assert sum(work.reduce[5::16]) > 1.8 * on_rank_5  # gradients in fp32

    def test_free(self) -> None:
        row, stack = job(**AT_16K)
        work = work_of(row, stack, stages_of(row))
        assert work.without("tp").layer[Kind.FORWARD].tp == 0 < work.without("tp").layer[Kind.FORWARD].compute
        assert work.without("pp").message == 0
        assert sum(work.without("dp").gather) == work.without("dp").contention == 0
        assert work.without("optimizer").optimizer == 0


class TestAgainstThePlanner:
    @pytest.mark.parametrize("layout", [AT_16K, AT_8K])
    def test_the_pipeline_is_the_planners(self, layout: dict[str, Any]) -> None:
        """Without FSDP's collectives, which the planner adds in closed form, bubbles and times are the same."""
        row, stack = job(**layout)
        exact = play_exactly(row, stack)
        case = made(row, stack)
        played = simulate(case.replace(work=case.work.without("dp")))
        pieces = parts(row, stack)
        pipeline = exact.seconds - float(
            pieces.inflation * (pieces.gather_exposed + pieces.reduce_exposed + pieces.optimizer + pieces.fixed)
        )
        assert played.pipeline_seconds == pytest.approx(pipeline, rel=1e-9)
        assert played.bubble_over_compute == pytest.approx(exact.bubble_over_compute, rel=1e-9)
        assert played.bubble_over_total == pytest.approx(exact.bubble_over_total, rel=1e-9)

    @pytest.mark.parametrize(
        ("model", "layout", "tokens"),
        [
            ("llama3-405b", AT_16K, 16 * M),
            ("llama3-405b", AT_8K, 16 * M),
            ("llama3-70b", {"tp": 8, "dp": 16, "zero": 1}, 4 * M),
            ("llama3-70b", {"tp": 4, "pp": 4, "dp": 8, "virtual_stages": 5, "schedule": "interleaved"}, 4 * M),
            ("llama3-8b", {"dp": 64, "zero": 3}, 4 * M),
            ("llama3-8b", {"dp": 64, "zero": 1}, 4 * M),
        ],
    )
    def test_the_step_is_the_planners_but_for_sharding(self, model: str, layout: dict[str, Any], tokens: int) -> None:
        """FSDP's collectives are played here, and estimated there: what they leave open is 3 % of a step."""
        row, stack = job(model, tokens=tokens, stack="standard", **layout)
        assert simulate(made(row, stack)).step_seconds == pytest.approx(play_exactly(row, stack).seconds, rel=0.03)

    def test_where_nothing_hides_sharding(self) -> None:
        """70B with 1,024 tokens per GPU: the collectives take longer than the step's computation can hide."""
        row, stack = job("llama3-70b", tokens=M, stack="standard", tp=8, dp=128, zero=1)
        played = simulate(made(row, stack))
        assert played.share("dp") > 0.3
        assert played.step_seconds == pytest.approx(play_exactly(row, stack).seconds, rel=0.09)

    def test_halves_of_a_backward_are_the_planners(self) -> None:
        row, stack = job("llama3-8b", tokens=M, stack="standard", tp=2, pp=4, dp=2, schedule="zb-h1")
        case = made(row, stack)
        exact, pieces = play_exactly(row, stack), parts(row, stack)
        outside = pieces.gather_exposed + pieces.reduce_exposed + pieces.optimizer + pieces.fixed
        pipeline = exact.seconds - float(pieces.inflation * outside)
        assert simulate(case.replace(work=case.work.without("dp"))).pipeline_seconds == pytest.approx(pipeline)

    def test_zero_2_without_a_pipeline_reduces_in_its_layers(self) -> None:
        row, stack = job("llama3-8b", tokens=4 * M, stack="standard", dp=64, zero=2)
        work = work_of(row, stack, stages_of(row))
        assert work.layer[Kind.BACKWARD].dp > 0 < work.gather[0]
        assert work.reduce == (0.0,)

    @pytest.mark.parametrize(
        "layout",
        [
            {"stack": "megatron", "tp": 8, "cp": 16},  # the ring hides K and V behind attention
            {"stack": "megatron", "tp": 8, "cp": 8, "dp": 2, "zero": 3},  # and layers hide gathers
            {"stack": "standard", "tp": 8, "cp": 16, "recompute": "full"},
        ],
    )
    def test_documents_change_what_attention_hides(self, layout: dict[str, Any]) -> None:
        """Even documents are a row with fewer pairs, whatever depends on attention."""
        row, stack = job("llama3-8b", seq_len=131_072, tokens=M, **layout)
        loads = loads_for(row, "mean=1024", strategy="per_document")
        fewer = row.replace(pairs=float(loads.pairs.mean()) * int(row.cp))
        played = simulate(made(row, stack, loads=loads))
        assert played.step_seconds == pytest.approx(simulate(made(fewer, stack)).step_seconds, rel=1e-6)
        assert played.step_seconds == pytest.approx(play_exactly(fewer, stack).seconds, rel=0.03)


class TestSlowLinks:
    def test_what_hides_a_collective_hides_less_of_a_slow_one(self) -> None:
        """CP's ring behind attention (stack megatron): a link ten times as slow leaves open what is too long for it."""
        row, stack = job("llama3-70b", seq_len=32_768, tokens=M, stack="megatron", tp=8, cp=2)
        healthy = work_of(row, stack, stages_of(row), factors=(10.0,))
        layer, slow = healthy.layer[Kind.FORWARD], healthy.behind(10.0, Kind.FORWARD)
        # K and V of one KV head for all tokens, half of them from the other rank, at 450 GB/s and less.
        wire = 2 * 2 * 32_768 * 128 / 2 / 450e9
        assert layer.cp < 0.1 * wire
        assert slow.cp > 10 * wire - layer.attention - 0.2 * wire
        assert slow.compute == layer.compute

    def test_a_slow_link_of_zero_3_is_waited_for(self) -> None:
        row, stack = job("llama3-8b", tokens=M, stack="standard", dp=16, zero=3)
        healthy, slow = (simulate(made(row, stack, faults=Faults(links=links))) for links in ({}, {(0, 1): 100.0}))
        assert slow.step_seconds > 5 * healthy.step_seconds

    def test_replicas_of_zero_3_meet(self) -> None:
        """All 16 wait for the slow one in every computation, and that is no bubble."""
        row, stack = job("llama3-8b", tokens=M, stack="standard", dp=16, zero=3)
        played = simulate(made(row, stack, faults=Faults(ranks={3: 1.5})))
        assert played.bubble_over_compute == pytest.approx(0, abs=1e-9)
        waits = played.spent["dp_wait"].ravel()
        assert waits[3] == pytest.approx(0, abs=1e-9)
        own = (played.spent["compute"] + played.spent["attention"]).ravel()
        assert np.allclose(waits + own, own[3])


class TestProduction:
    """facts.md 2.3: bubbles of 5 % with bs = 2 pp and of 12 % with bs = pp."""

    @pytest.mark.parametrize(("layout", "low", "high"), [(AT_8K, 0.050, 0.064), (AT_16K, 0.100, 0.124)])
    def test_bubbles(self, layout: dict[str, Any], low: float, high: float) -> None:
        row, stack = job(**layout)
        case = made(row, stack)
        schedule_only = simulate(case.replace(work=case.work.without("dp").without("pp")))
        assert low <= schedule_only.bubble_over_compute <= high

    def test_step_of_405b(self) -> None:
        """6.2 to 6.46 s (peers-measured.md, J1)."""
        row, stack = job(**AT_16K)
        assert 6.1 < simulate(made(row, stack)).step_seconds < 6.6


class TestLanes:
    def test_replicas_that_are_alike_are_one(self) -> None:
        """The same step whether one pipeline is played or all 16,384 ranks, and every rank of them spends the same."""
        row, stack = job(**AT_16K)
        one, every = simulate(made(row, stack)), simulate(made(row, stack, all_ranks=True), keep=False)
        assert one.lanes.size == 16
        assert every.lanes.size == 16_384
        assert every.step_seconds == pytest.approx(one.step_seconds, rel=1e-12)
        for name, seconds in every.spent.items():
            assert np.allclose(seconds, one.spent[name], rtol=1e-9, atol=1e-12)

    def test_a_slow_rank_holds_up_everybody(self) -> None:
        row, stack = job(**AT_16K)
        healthy = simulate(made(row, stack)).step_seconds
        played = simulate(made(row, stack, faults=Faults(ranks={77: 1.5})), keep=False)
        rank = 77  # tp 5, cp 0, pp 9, dp 0
        own = played.spent["compute"] + played.spent["attention"]
        assert np.unravel_index(own.argmax(), own.shape) == (0, 9, 0, 5)
        assert own[0, 9, 0, 5] == pytest.approx(1.5 * own[1, 9, 0, 5])
        assert abs(played.spent["tp_wait"][0, 9, 0, 5]) < 1e-9 < played.spent["tp_wait"][0, 9, 0, 4]
        assert healthy < played.step_seconds < 1.5 * healthy
        assert rank == 5 + 8 * (0 + 1 * (9 + 16 * 0))

    def test_documents(self) -> None:
        """Attention is what the documents leave of it, and nothing else changes on a rank."""
        row, stack = job(seq_len=131_072, tp=8, cp=16, pp=16, dp=8, virtual_stages=8, schedule="afab", zero=2)
        loads = loads_for(row, "mean=8192,dist=exponential")
        whole, some = simulate(made(row, stack)), simulate(made(row, stack, loads=loads), keep=False)
        assert np.allclose(some.spent["compute"], whole.spent["compute"][:, :, :, :1])
        ratio = some.spent["attention"].mean() / whole.spent["attention"].mean()
        assert ratio == pytest.approx(loads.pairs.mean() / (131_072 * 131_073 / 2 / 16))
        per_rank = some.spent["attention"].sum(axis=1)[:, :, 0]
        assert np.allclose(per_rank / per_rank.mean(), loads.per_rank / loads.per_rank.mean())
        assert some.spent["cp_wait"].mean() > 10 * whole.spent["cp_wait"].mean()

    def test_loads_of_another_layout(self) -> None:
        row, stack = job(**AT_16K)
        case = made(row, stack)
        loads = loads_for(row, "mean=1024", dp=2)
        with pytest.raises(ValueError, match=r"loads of shape \(2, 16, 1\): must be .* \(128, 16, 1\)"):
            replace(case, loads=loads)


class TestRecipe:
    def test_405b(self) -> None:
        plan = check(load(RECIPES / "llama3-405b.toml", ()))
        machines = cluster("h100", plan.grid.size)
        played = simulate(recipe_scenario(plan, machines, load_stack("meta")))
        assert played.graph.schedule is plan.schedule
        assert 5.5 < played.step_seconds < 7

    def test_frozen(self) -> None:
        plan = check(load(RECIPES / "demo.toml", ("train.freeze=['tok_embeddings']",)))
        with pytest.raises(
            ValueError, match=r"train\.freeze: how long a step with frozen parameters takes is not known"
        ):
            recipe_scenario(plan, cluster("h100", plan.grid.size), load_stack("standard"))

    def test_every_kind_of_schedule(self) -> None:
        plan = check(
            load(
                RECIPES / "demo.toml",
                (
                    "layout.pp=4",
                    "layout.tp=1",
                    "layout.cp=1",
                    "model.num_layers=8",
                    "batch.sequences=24",
                    "pipeline.nc=6",
                ),
            )
        )
        found = compare_schedules(plan, cluster("h100", plan.grid.size), load_stack("standard"))
        kinds = {(one.kind, one.virtual_stages, one.nc) for one in found if one.refused is None}
        assert {("afab", 2, 12), ("1f1b", 1, 4), ("zb-h1", 1, 4), ("interleaved", 2, 4), ("flexible", 2, 6)} <= kinds
        by_kind = {one.kind: one for one in found}
        assert by_kind["zb-h1"].bubble_over_compute < by_kind["1f1b"].bubble_over_compute
        assert by_kind["interleaved"].bubble_over_compute < by_kind["1f1b"].bubble_over_compute
        assert [one.step_seconds for one in found] == sorted(one.step_seconds for one in found)

    def test_a_kind_that_the_recipe_cannot_have_says_why(self) -> None:
        """A later phase with fewer micro-batches than nc."""
        phases = "batch.phases=[{after_tokens=100000, sequences=10}]"
        plan = check(load(RECIPES / "demo.toml", ("batch.sequences=30", phases)))
        found = compare_schedules(plan, cluster("h100", plan.grid.size), load_stack("standard"))
        refused = [one for one in found if one.refused]
        assert [(one.kind, one.nc) for one in refused] == [("flexible", 15)]
        assert "nc" in str(refused[0].refused)
        assert found[-1] is refused[0]
