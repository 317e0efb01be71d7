"""The search against what is known of its jobs, and against itself."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from fourfold.planner.machines.cluster import cluster
from fourfold.planner.reasons.as_recipe import candidate_recipe, layout_for_recipe
from fourfold.planner.search.judge import Candidate, allocatable_bytes, memory_of, sweep
from fourfold.planner.search.misses import NearMiss
from fourfold.planner.search.own import OwnLayout
from fourfold.planner.search.problem import Problem
from fourfold.planner.search.search import Plan, search
from fourfold.planner.search.space import space
from fourfold.recipe import check

GIB = 1 << 30


def problem(
    model: str, gpus: int, sequences: int, *, seq_len: int = 8192, stack: str = "standard", **limits: Any
) -> Problem:
    machine = cluster("h100", gpus)
    return Problem.of(model=model, cluster=machine, seq_len=seq_len, sequences=sequences, stack=stack, limits=limits)


@cache
def plan_70b() -> Plan:
    return search(problem("llama3-70b", 128, 512))


@cache
def plan_405b() -> Plan:
    return search(problem("llama3-405b", 16_384, 2048))


def key(one: Candidate) -> tuple[Any, ...]:
    return (
        *(one.tp, one.cp, one.pp, one.dp, one.virtual_stages, one.nc, one.micro_batch),
        *(one.schedule, one.zero, one.recompute, one.split),
    )


@pytest.mark.parametrize("make", [plan_70b, plan_405b])
class TestPlans:
    def test_candidates(self, make: Any) -> None:
        plan = make()
        assert len(plan.candidates) == 10
        assert plan.best == plan.candidates[0]
        assert len({key(one) for one in plan.candidates}) == 10
        seconds = [one.step_seconds for one in plan.candidates]
        assert seconds == pytest.approx(sorted(seconds), rel=2e-5)
        for one in plan.candidates:
            assert one.played
            assert one.fits
            assert one.tp * one.cp * one.pp * one.dp == plan.problem.gpus
            assert one.memory_bytes <= allocatable_bytes(plan.problem)
            assert one.memory_bytes == round(max(rank.total for rank in one.ranks))
            assert len(one.ranks) == one.pp
            low, high = one.step_seconds_band
            assert low < one.step_seconds < high
            assert sum(one.breakdown.values()) == pytest.approx(one.step_seconds, rel=1e-9)
            assert sum(one.memory_parts.values()) == pytest.approx(one.memory_bytes, rel=1e-6)

    def test_throughput(self, make: Any) -> None:
        """MFU by hand: FLOPs per token of facts.md 5.2 over what the GPUs could do in a step."""
        plan = make()
        per_token = {"llama3-70b": 0.4492e12, "llama3-405b": 2.524e12}[plan.problem.name]
        for one in plan.candidates:
            rate = one.tokens_per_second_per_gpu
            assert rate * plan.problem.gpus * one.step_seconds == pytest.approx(plan.problem.tokens)
            assert one.mfu == pytest.approx(per_token * rate / 989.4e12, rel=1e-3)
            assert 0.2 < one.mfu_6p < one.mfu < 0.7

    def test_front(self, make: Any) -> None:
        """Each point is slower than the one before it and needs less."""
        plan = make()
        assert len(plan.pareto) >= 5
        seconds = [one.step_seconds for one in plan.pareto]
        memory = [one.memory_bytes for one in plan.pareto]
        assert seconds == sorted(seconds)
        assert memory == sorted(memory, reverse=True)

    def test_misses_say_why(self, make: Any) -> None:
        plan = make()
        kinds = [miss.kind for miss in plan.near_misses]
        assert kinds.count("paper") == 1
        assert "tp-beyond-domain" in kinds
        assert len(kinds) == len(set(kinds))
        best = plan.best
        assert best is not None
        for miss in plan.near_misses:
            slower, large = "slower" in miss.reason, "does not fit by" in miss.reason
            same = miss.reason.endswith(("is the first", "as fast, and less simple"))
            assert slower or large or same or "faster" in miss.reason
            assert large == (not miss.candidate.fits) or miss.kind == "paper"
            if slower:
                assert miss.candidate.step_seconds > 0.99 * best.step_seconds
        beyond = next(miss for miss in plan.near_misses if miss.kind == "tp-beyond-domain")
        assert beyond.candidate.tp > 8
        assert "TP leaves the NVLink domain" in beyond.reason

    def test_counts(self, make: Any) -> None:
        plan = make()
        assert plan.evaluated + plan.slow >= len(space(plan.problem))
        assert 10 <= plan.played <= plan.feasible < plan.evaluated
        assert plan.infeasible is None


def test_same_answer_again() -> None:
    first, again = (search(problem("llama3-8b", 32, 128)) for _ in range(2))
    assert [key(one) for one in again.candidates] == [key(one) for one in first.candidates]
    assert [one.step_seconds for one in again.candidates] == [one.step_seconds for one in first.candidates]
    assert [miss.reason for miss in again.near_misses] == [miss.reason for miss in first.near_misses]


class TestKnownJobs:
    def test_plan_a_of_70b_does_not_fit(self) -> None:
        """facts.md 5.5: tp 8 pp 1 dp 16 with fp32 gradients and no recomputation, 82 GB; 2.1: 77.2 GiB + transients."""
        limits = {"tp": (8,), "cp": (1,), "pp": (1,), "zero": (1,), "recompute": ("none",)}
        plan = search(problem("llama3-70b", 128, 512, **limits))
        assert plan.best is None
        assert plan.infeasible is not None
        assert plan.infeasible.leanest is not None
        assert plan.infeasible.leanest.memory_bytes > 77.2 * GIB

    def test_plan_b_of_70b_fits(self) -> None:
        """facts.md 5.5: tp 8 pp 2 dp 8."""
        limits = {"tp": (8,), "cp": (1,), "pp": (2,), "recompute": ("none",), "micro_batch": (1,)}
        assert search(problem("llama3-70b", 128, 512, **limits)).best is not None

    def test_peers_choice_is_near_the_top(self) -> None:
        """peers-measured.md 2.3: calculon and SimuMax both choose tp 4 pp 4 dp 8."""
        best = plan_70b().best
        theirs = search(problem("llama3-70b", 128, 512, tp=(4,), cp=(1,), pp=(4,))).best
        assert best is not None
        assert theirs is not None
        assert best.step_seconds <= theirs.step_seconds * (1 + 1e-9) < 1.15 * best.step_seconds

    @pytest.mark.parametrize(("seq_len", "sequences", "cp", "dp"), [(8192, 2048, 1, 128), (131_072, 128, 16, 8)])
    def test_papers_layout_ranks_well(self, seq_len: int, sequences: int, cp: int, dp: int) -> None:
        """With Meta's saved set and no recomputation, its own layout is among the fastest tenth of what fits."""
        job = problem("llama3-405b", 16_384, sequences, seq_len=seq_len, stack="meta")
        miss = next(miss for miss in search(job, top=1).near_misses if miss.kind == "paper")
        paper = miss.candidate
        assert (paper.tp, paper.cp, paper.pp, paper.dp) == (8, cp, 16, dp)
        assert paper.virtual_stages == 8
        assert paper.fits
        found = re.search(r"number ([\d,]+) of ([\d,]+)", miss.reason)
        assert found is not None
        place, number = (int(text.replace(",", "")) for text in found.groups())
        assert place < 0.1 * number

    def test_8b_on_a_node(self) -> None:
        """facts.md 5.9: 8B on few GPUs wants neither TP nor a pipeline."""
        best = search(problem("llama3-8b", 8, 512)).best
        assert best is not None
        assert (best.tp, best.pp) == (1, 1)

    def test_dimensions_that_are_no_powers_of_two(self) -> None:
        """Pains P33: 24 GPUs and 480 sequences."""
        best = search(problem("llama3-8b", 24, 480)).best
        assert best is not None
        assert best.tp * best.cp * best.pp * best.dp == 24

    def test_tp_of_a_large_domain(self) -> None:
        """Pains P39: tp 16 where NVLink connects 72 GPUs is no crossing."""
        job = Problem.of(model="llama3-405b", cluster=cluster("gb200", 1152), seq_len=8192, sequences=1152)
        kinds = [miss.kind for miss in search(job, top=1).near_misses]
        assert "tp-beyond-domain" not in kinds


def test_layout_of_a_recipe_is_reported() -> None:
    """Whatever comes of it: one that is slow, one that does not fit, and the answer itself."""
    job = problem("llama3-8b", 8, 64)
    best = search(job, top=1).best
    assert best is not None
    names = ("tp", "cp", "pp", "dp", "virtual_stages", "micro_batch", "nc", "schedule", "zero", "recompute", "split")
    slow, large = OwnLayout(tp=8, recompute="full"), OwnLayout(dp=8)
    same = OwnLayout(**{name: getattr(best, name) for name in names})
    for own, words in ((slow, "slower"), (large, "does not fit by"), (same, "is the first")):
        miss = search(job, top=1, own=own).near_misses[0]
        assert miss.kind == "recipe"
        assert miss.reason.startswith("the recipe's layout")
        assert words in miss.reason
        assert all(getattr(miss.candidate, name) == getattr(own, name) for name in names if name != "nc")


def test_layers_of_a_recipe_one_by_one() -> None:
    """8B over pp 2, 20 layers and 12: the first rank computes 20 / 16 as long as with 16 and 16."""
    job = problem("llama3-8b", 32, 128)
    even = OwnLayout(pp=2, dp=16, recompute="full")
    uneven = replace(even, split=(20, 12))
    plans = [search(job, top=1, own=own) for own in (even, uneven)]
    misses = [next(miss for miss in plan.near_misses if miss.kind == "recipe").candidate for plan in plans]
    assert misses[1].split == (20, 12)
    assert [rank.num_layers for rank in misses[1].ranks] == [20, 12]
    # Layers take nine tenths of the time of a rank, the head most of the rest; and that is on the last.
    assert 1.05 < misses[1].step_seconds / misses[0].step_seconds < 20 / 16


def test_layout_that_cannot_be_judged() -> None:
    plan = search(problem("llama3-8b", 8, 64), top=1, own=OwnLayout(dp=8, unjudged="cp_split"))
    assert "recipe" not in [miss.kind for miss in plan.near_misses]
    assert plan.own is not None
    assert plan.own.unjudged == "cp_split"


def test_kind_that_is_slow_is_judged() -> None:
    """What the sweep leaves at its time may fit: "none fits" is said of what was judged alone."""
    job = problem("llama3-405b", 16_384, 2048)
    layouts = space(job)
    for miss in plan_405b().near_misses:
        if "none fits" in miss.reason:
            rows = np.flatnonzero(_of(miss.kind, layouts.columns))
            memory = memory_of(job, layouts, rows)
            assert (memory > allocatable_bytes(job)).all()


def _of(kind: str, columns: dict[str, Any]) -> Any:
    from fourfold.planner.search.misses import _KINDS

    return next(one for one in _KINDS if one.name == kind).holds(columns, plan_405b().problem)


def test_documents_slow_the_ranks_of_cp() -> None:
    """algorithms.md 3.7: with documents of 1K in 128K tokens, the slowest of 16 ranks has twice the mean attention."""
    job = problem("llama3-405b", 16_384, 128, seq_len=131_072, stack="meta", tp=(8,), cp=(16,), pp=(16,))
    packed = Problem.of(
        model="llama3-405b",
        cluster=job.cluster,
        seq_len=131_072,
        sequences=128,
        stack="meta",
        documents="mean=1024,dist=exponential",
        limits=job.limits,
    )
    whole, parts = search(job, top=1).best, search(packed, top=1).best
    assert whole is not None
    assert parts is not None
    assert whole.breakdown["imbalance"] == 0 < parts.breakdown["imbalance"]
    assert parts.step_seconds < whole.step_seconds


def test_limits_hold() -> None:
    plan = search(problem("llama3-70b", 128, 512, tp=(8,), schedule=("1f1b", "interleaved"), recompute=("none",)))
    assert plan.candidates
    for one in plan.candidates:
        assert one.tp == 8
        assert one.schedule in ("1f1b", "interleaved")
        assert one.recompute == "none"


def test_a_zero_bubble_schedule_that_is_asked_for_can_be_trained() -> None:
    limits = {"tp": (8,), "schedule": ("zb-h1",), "pp": (8,)}
    plan = search(problem("llama3-70b", 128, 512, **limits), top=3)
    best = plan.candidates[0]
    assert (best.schedule, best.virtual_stages) == ("zb-h1", 1)
    trained = layout_for_recipe(plan)
    ran = check(candidate_recipe(plan.problem, trained, name="x"))
    assert (ran.schedule.kind, trained.schedule) == ("zb-h1", "zb-h1")
    usual = search(problem("llama3-70b", 128, 512, **(limits | {"schedule": ("1f1b",)})), top=1).best
    assert usual is not None
    assert best.step_seconds < usual.step_seconds


def test_every_layout_judged_in_full_gives_the_same_answer() -> None:
    """Leaving slow layouts out, and looking at one moment of memory first, change nothing among the best."""
    job = problem("llama3-8b", 32, 128)
    layouts = space(job)
    quick, full = sweep(job, layouts, slowest=1.5), sweep(job, layouts)
    assert np.array_equal(quick.seconds, full.seconds)
    judged = np.isfinite(quick.memory)
    assert np.array_equal(quick.fits[judged], full.fits[judged])
    assert quick.seconds[~judged].min(initial=np.inf) > 1.5 * full.seconds[full.fits].min()


def test_top() -> None:
    assert len(search(problem("llama3-8b", 8, 64), top=3).candidates) == 3
    with pytest.raises(ValueError, match="top = 0"):
        search(problem("llama3-8b", 8, 64), top=0)


BREAKDOWNS: list[tuple[str, int, int, int, dict[str, Any]]] = [
    ("llama3-70b", 128, 512, 8192, {}),
    ("llama3-70b", 128, 512, 8192, {"tp": (4,), "cp": (1,)}),
    ("llama3-70b", 256, 32, 131_072, {"tp": (8,), "cp": (8,)}),
    ("llama3-8b", 64, 512, 8192, {"pp": (4,)}),
    ("llama3-8b", 8, 64, 8192, {}),
]


@pytest.mark.parametrize(("model", "gpus", "sequences", "seq_len", "limits"), BREAKDOWNS)
def test_no_part_of_a_step_is_negative(
    model: str, gpus: int, sequences: int, seq_len: int, limits: dict[str, Any]
) -> None:
    """Of what is played and of what is not; and all parts are the step. Idle time is bubble and messages."""
    plan = search(problem(model, gpus, sequences, seq_len=seq_len, **limits), top=50)
    for one in (*plan.candidates, *plan.pareto, *(miss.candidate for miss in plan.near_misses)):
        assert min(one.breakdown.values()) >= 0, (one.layout, one.breakdown)
        assert sum(one.breakdown.values()) == pytest.approx(one.step_seconds, rel=1e-9)
        if one.pp == 1:
            assert one.breakdown["p2p"] == 0
    for miss in plan.near_misses:
        check_reason(plan, miss)


def check_reason(plan: Plan, miss: NearMiss) -> None:
    """What a sentence says follows from the seconds of the two layouts."""
    best = plan.candidates[0].step_seconds
    for sign, word in ((1, "slower"), (-1, "faster")):
        found = re.search(rf"([\d.]+)%\)? {word}", miss.reason)
        if found:
            share = sign * (miss.candidate.step_seconds - best) / best
            assert float(found[1]) / 100 == pytest.approx(share, abs=6e-4), miss.reason
            assert miss.candidate.played or miss.candidate.pp > 1
    if miss.candidate.played and miss.candidate.fits and miss.kind not in ("paper", "recipe"):
        assert miss.candidate.step_seconds >= best * (1 - 2e-5)


@pytest.mark.parametrize("make", [plan_70b, plan_405b])
def test_reasons_follow_from_the_seconds(make: Any) -> None:
    for miss in make().near_misses:
        check_reason(make(), miss)


def test_layouts_of_one_gpu_are_not_repeated() -> None:
    """Stages without a pipeline or ranks to share with change nothing."""
    machine = cluster("b200", 1)
    plan = search(Problem.of(model="llama3-8b", cluster=machine, seq_len=1024, sequences=8), top=50)
    assert {one.virtual_stages for one in plan.candidates} == {1}
    for wanted in (plan, plan_70b()):
        alike = [
            (*key(one)[:4], one.micro_batch, one.recompute, f"{one.step_seconds:.5g}", one.memory_bytes)
            for one in wanted.candidates
        ]
        assert len(alike) == len(set(alike))


def test_layout_outside_of_the_limits_says_so() -> None:
    plan = search(problem("llama3-8b", 64, 512, pp=(4,)), top=1)
    paper = next(miss for miss in plan.near_misses if miss.kind == "paper")
    assert paper.candidate.pp == 1
    assert "(outside of the limit on pp)" in paper.reason
