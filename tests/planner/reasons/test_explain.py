"""The walk says the numbers of facts.md 5 and 6, as far as this job has them, and every difference from the paper."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from fourfold.planner.reasons.explain import explain, flops_section
from fourfold.planner.reasons.explain_bounds import without_pipeline
from fourfold.planner.reasons.explain_layout import memory_section, time_section
from fourfold.planner.reasons.explanation import Section, explanation_json
from fourfold.planner.search.judge import allocatable_bytes
from fourfold.planner.search.problem import Problem
from tests.planner.planned import M, explained, job, plan_of

GIB = 1 << 30
KEYS = ["parameters", "flops", "minimum_gpus", "pure_dp", "fsdp", "tp_bound", "x_opt", "why_pp", "why_cp"]
LAYOUT_KEYS = ["zero_rule", "bubble", "memory", "step_time", "mfu", "cost"]


def value(section: Section, name: str) -> float:
    return next(figure.value for figure in section.figures if figure.name == name)


def formula(section: Section, name: str) -> str:
    return next(figure.formula for figure in section.figures if figure.name == name)


class TestLlama405B:
    """16,384 H100, 16M tokens (facts 5.1, 5.2, 5.4, 6 Q3, 3.5)."""

    def section(self, key: str) -> Section:
        return explained("llama3-405b", 16_384, tokens=16 * M).section(key)

    def test_asks_all_questions_in_order(self) -> None:
        found = [section.key for section in explained("llama3-405b", 16_384, tokens=16 * M).sections]
        assert found == KEYS + LAYOUT_KEYS

    def test_parameters(self) -> None:
        section = self.section("parameters")
        assert value(section, "all") == 405_853_388_800
        assert value(section, "attention") == pytest.approx(71.874e9, rel=1e-4)
        assert value(section, "feed-forward") == pytest.approx(329.773e9, rel=1e-5)
        assert "70.5 B" in section.notes[0]

    def test_flops(self) -> None:
        section = self.section("flops")
        assert value(section, "per token, model") == pytest.approx(2.524e12, rel=2e-4)
        assert value(section, "per token, 6p") == pytest.approx(2.435e12, rel=2e-4)

    def test_fsdp(self) -> None:
        """1,024 tokens per GPU against 2,475; TP and PP that span nodes divide it."""
        section = self.section("fsdp")
        best = plan_of("llama3-405b", 16_384, tokens=16 * M).candidates[0]
        assert value(section, "tokens per GPU") == 1_024
        assert value(section, "inside a node") == pytest.approx(2_200, rel=1e-3)
        assert value(section, "across nodes") == pytest.approx(2_475, rel=1e-3)
        assert value(section, "across nodes, this layout") == pytest.approx(2_473.5 * 8 / (best.tp * best.pp))
        assert "it can hide" in section.sentence

    def test_tp(self) -> None:
        section = self.section("tp_bound")
        assert value(section, "bound inside a node") == pytest.approx(24, abs=0.3)
        assert value(section, "messages of a layer's forward, tp = 8") == pytest.approx(
            4 * 0.268e9 * 7 / 8 / 450e9, rel=2e-3
        )

    def test_x_opt(self) -> None:
        expected = math.sqrt(16_777_216 * 16_384 * 50 / (53_248 * 450))
        assert value(self.section("x_opt"), "X_opt") == pytest.approx(expected)

    def test_cost(self) -> None:
        """A failure every 3.1 hours; 12 bytes per parameter in a checkpoint."""
        section = self.section("cost")
        assert "every 3.1 hours" in formula(section, "goodput")
        assert value(section, "a checkpoint") == 12 * 405_853_388_800
        assert value(section, "days") == pytest.approx(
            value(section, "days of steps alone") / value(section, "goodput")
        )

    def test_bubble_in_both_definitions(self) -> None:
        section = self.section("bubble")
        best = plan_of("llama3-405b", 16_384, tokens=16 * M).candidates[0]
        ratio, share = value(section, "idle / computing by formula"), value(section, "idle / total by formula")
        nmb = 2_048 // (best.dp * best.micro_batch)
        assert nmb >= best.pp
        assert ratio == pytest.approx((best.pp - 1) / (nmb * best.virtual_stages))
        assert share == pytest.approx(ratio / (1 + ratio))
        played, of_total = (
            value(section, "idle / computing, r, as played"),
            value(section, "idle / total, f, as played"),
        )
        assert of_total == pytest.approx(played / (1 + played), rel=1e-6)

    def test_step_is_all_accounted_for(self) -> None:
        best = plan_of("llama3-405b", 16_384, tokens=16 * M).candidates[0]
        seconds = sum(figure.value for figure in self.section("step_time").figures)
        assert seconds == pytest.approx(best.step_seconds, rel=1e-5)

    def test_headline_of_the_step_is_that_of_the_rows(self) -> None:
        section = self.section("step_time")
        for name in ("matrix products", "attention"):
            assert formula(section, name) in section.sentence

    def test_parts_below_zero_are_shown(self) -> None:
        best = plan_of("llama3-405b", 16_384, tokens=16 * M).candidates[0]
        odd = replace(best, breakdown={**best.breakdown, "bubble": -0.1, "other": best.breakdown["other"] + 0.1})
        changed = replace(odd, step_seconds=sum(odd.breakdown.values()))
        figures = time_section(changed).figures
        assert value(time_section(changed), "the bubble") == -0.1
        assert sum(figure.value for figure in figures) == pytest.approx(changed.step_seconds, rel=1e-5)

    def test_mfu_in_several_conventions(self) -> None:
        section = self.section("mfu")
        ours, six_p = (value(section, f"MFU, {name}") for name in ("6 (P - V D) and attention that masks leave", "6 P"))
        assert ours / six_p == pytest.approx(2.524 / 2.435, rel=1e-3)

    def test_memory_names_rank_and_what_is_left(self) -> None:
        plan = plan_of("llama3-405b", 16_384, tokens=16 * M)
        best, section = plan.candidates[0], self.section("memory")
        assert f"pipeline rank {best.worst_rank}" in section.sentence
        left = plan.problem.cluster.chip.hbm_bytes - GIB - best.memory_bytes * plan.problem.stack.allocator
        assert value(section, "left") == pytest.approx(left)

    def test_memory_has_what_is_allocated_and_what_is_reserved(self) -> None:
        """The two are often taken for each other (P21), and parts are shown, not only a sum (P25)."""
        plan, section = plan_of("llama3-405b", 16_384, tokens=16 * M), self.section("memory")
        allocated, reserved = (figure for figure in section.figures if figure.name[:9] in ("allocated", "reserved "))
        assert reserved.value == pytest.approx(allocated.value * plan.problem.stack.allocator)
        parts = sum(figure.value for figure in section.figures[: section.figures.index(allocated)])
        assert parts == pytest.approx(allocated.value, rel=0.1)

    def test_gradients_by_chunk_and_whole(self) -> None:
        """The paper's layout has 405.85e9 / 128 parameters a rank in sums of 4 bytes; afab holds few at once."""
        explanation = explained("llama3-405b", 16_384, tokens=16 * M)
        theirs = explanation.comparison.candidate
        assert theirs is not None
        section = memory_section(explanation.plan.problem, theirs)
        whole = value(section, "gradients of all its layers at once")
        assert whole == pytest.approx(4 * 405.85e9 / 128, rel=0.1)
        assert value(section, "gradients") < 0.5 * whole
        assert f"+{(whole - value(section, 'gradients')) / GIB:.1f} GiB" in section.sentence

    def test_main_memory_for_a_checkpoint(self) -> None:
        """Staging of a save killed a job on 2 nodes (P23): 12 bytes x P / 2,048 nodes here."""
        section = self.section("cost")
        assert value(section, "main memory of a node to stage it") == pytest.approx(12 * 405_853_388_800 / 2_048)


class TestComparison:
    @pytest.mark.parametrize("stack", ["standard", "meta"])
    def test_every_difference_has_its_price(self, stack: str) -> None:
        explanation = explained("llama3-405b", 16_384, tokens=16 * M, stack=stack)
        comparison, found = explanation.comparison, explanation.plan.candidates[0]
        assert (comparison.paper.tp, comparison.paper.cp, comparison.paper.pp, comparison.paper.dp) == (8, 1, 16, 128)
        theirs = comparison.candidate
        assert theirs is not None
        assert "GiB" in comparison.verdict
        named = {difference.dimension: difference for difference in comparison.differences}
        for name in ("tp", "cp", "pp", "dp", "virtual_stages", "micro_batch", "recompute"):
            assert (name in named) == (getattr(found, name) != getattr(theirs, name)), name
        for name, difference in named.items():
            if name != "dp":
                assert "follows from" in difference.sentence or "GiB" in difference.sentence

    def test_the_same_layout_has_no_differences(self) -> None:
        explanation = explained("llama3-8b", 8)
        found, theirs = explanation.plan.candidates[0], explanation.comparison.candidate
        assert theirs is not None
        if (found.tp, found.cp, found.pp, found.zero) == (theirs.tp, theirs.cp, theirs.pp, theirs.zero):
            assert all(d.dimension not in ("tp", "cp", "pp", "dp", "zero") for d in explanation.comparison.differences)


class TestLlama70B:
    """128 H100, 4M tokens (facts 5.3, 5.5, 5.9)."""

    def test_plan_a_does_not_fit(self) -> None:
        """tp 8, pp 1, dp 16 with float32 gradients and no recomputation: 82 GB, of which 35.3 are gradients."""
        problem = job("llama3-70b", 128)
        flat = without_pipeline(problem, 8)
        assert (flat.tp, flat.pp, flat.dp) == (8, 1, 16)
        assert flat.memory_bytes > allocatable_bytes(problem)
        assert flat.memory_parts["gradients"] == pytest.approx(35.3e9, rel=0.08)
        assert flat.memory_parts["weights"] == pytest.approx(17.6e9, rel=0.03)
        section = explained("llama3-70b", 128).section("why_pp")
        assert "does not fit" in section.sentence
        assert "float32" in section.notes[0]

    def test_pipeline_is_argued_at_the_tp_of_the_layout(self) -> None:
        """As the paper's rule 3 is at its own tp: sections agree on what hides."""
        explanation = explained("llama3-70b", 128)
        section, tp = explanation.section("why_pp"), explanation.plan.candidates[0].tp
        assert f"the network at tp = {tp} wants" in section.sentence
        assert value(section, "what the network wants") == pytest.approx(2_473.5 * tp)
        paper = explanation.comparison.paper
        hides = "can hide its gathers per micro-batch" in " ".join(paper.steps)
        if paper.tp == tp:
            assert ("at best that hides" in section.sentence) == hides

    def test_minimum_gpus(self) -> None:
        """140 GB + 560 GB + 20.97 TB for 4e6 tokens; 79.1 GiB for the book's 80 GB."""
        section = explained("llama3-70b", 128).section("minimum_gpus")
        assert value(section, "weights") == pytest.approx(141.1e9, rel=1e-3)
        assert value(section, "optimizer") == pytest.approx(564.4e9, rel=1e-3)
        assert value(section, "activations of the step") == pytest.approx(20.97e12 * 4_194_304 / 4e6, rel=1e-3)
        assert value(section, "by the book") == pytest.approx(271 * 4_194_304 / 4e6 * 80 / 84.93, rel=0.01)
        assert "no lower bound" in section.sentence

    def test_hides(self) -> None:
        section = explained("llama3-70b", 128).section("fsdp")
        assert value(section, "tokens per GPU") == 32_768
        assert "it can hide" in section.sentence

    def test_tp_bound(self) -> None:
        assert value(explained("llama3-70b", 128).section("tp_bound"), "bound inside a node") == pytest.approx(
            13, abs=0.1
        )

    def test_checkpoint(self) -> None:
        """0.84 TB, not 1.12 (facts row 23); a failure every 16.5 days (5.7)."""
        section = explained("llama3-70b", 128).section("cost")
        assert value(section, "a checkpoint") == pytest.approx(0.84e12, rel=0.01)
        assert "every 395.9 hours" in formula(section, "goodput")


class TestLlama8B:
    """32 H100, 4M tokens (facts 6 Q2)."""

    def test_numbers(self) -> None:
        explanation = explained("llama3-8b", 32)
        assert value(explanation.section("parameters"), "feed-forward") == pytest.approx(5.637e9, rel=1e-4)
        assert value(explanation.section("fsdp"), "tokens per GPU") == 131_072
        assert value(explanation.section("pure_dp"), "one replica") == 18 * 8_030_261_248
        assert "times what a GPU has" in explanation.section("pure_dp").sentence


class TestOtherJobs:
    def test_one_gpu_shares_nothing(self) -> None:
        explanation = explained("llama3.2-1b", 1, tokens=M // 16)
        assert "There is one GPU" in explanation.section("fsdp").sentence
        assert "There is one GPU" in explanation.section("x_opt").sentence
        assert "ZeRO-3 would" not in explanation.section("why_pp").sentence
        text = json.dumps(explanation_json(explanation))
        assert "1 GPUs" not in text
        assert "1 sequences" not in text

    def test_gpus_that_are_no_power_of_two(self) -> None:
        explanation = explained("llama3-8b", 24)
        assert explanation.comparison.paper.refusal is None
        assert explanation.comparison.candidate is not None
        assert "dp = 24 at tp = 1 and cp = 1 does not divide 512" in explanation.section("why_pp").sentence

    def test_nodes_that_are_not_filled(self) -> None:
        explanation = explained("llama3-8b", 100)
        assert "must fill nodes of 8 GPUs" in str(explanation.comparison.paper.refusal)

    def test_documents_leave_fewer_pairs(self) -> None:
        problem = job("llama3-8b", 32)
        packed = Problem.of(
            model="llama3-8b", cluster=problem.cluster, seq_len=8_192, tokens=4 * M, documents="mean=1024,dist=fixed"
        )
        full, fewer = flops_section(problem), flops_section(packed)
        assert value(fewer, "per token, model") < value(full, "per token, model")
        assert value(fewer, "per token, causal") == value(full, "per token, causal")

    def test_without_a_layout_the_job_is_still_explained(self) -> None:
        plan = plan_of("llama3-405b", 8, tokens=16 * M)
        explanation = explain(plan)
        assert [section.key for section in explanation.sections] == KEYS
        assert explanation.comparison.candidate is None
        with pytest.raises(KeyError):
            explanation.section("memory")

    def test_is_json(self) -> None:
        for explanation in (explained("llama3-8b", 32), explained("llama3-70b", 128)):
            text = json.dumps(explanation_json(explanation), allow_nan=False)
            assert [section["key"] for section in json.loads(text)["sections"]] == KEYS + LAYOUT_KEYS
