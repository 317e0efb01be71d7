"""The plan as people read it: what it says, in units, in the width there is, and plain in a pipe."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.text import Text

from fourfold.planner.jobs import Precision
from fourfold.planner.search.problem import Problem
from fourfold.planner.search.search import Plan, search
from fourfold.report.plan import as_plain, plan_text, print_plan, seconds_text, spare_bytes
from tests.planner.planned import M, job, plan_of

GIB = 1 << 30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(plan: Plan, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal of this width gets."""
    monkeypatch.setenv("COLUMNS", str(width))
    file = Terminal()
    print_plan(plan, file=file)
    return re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(412.3, "412"), (38.25, "38.2"), (6.0, "6.00"), (9.996, "10.0"), (0.0421, "0.0421"), (1.0, "1.00")],
)
def test_seconds(seconds: float, text: str) -> None:
    """A second is a second (P17)."""
    assert seconds_text(seconds) == text


class TestPlain:
    def test_is_ascii_without_trailing_spaces(self) -> None:
        file = io.StringIO()
        print_plan(plan_of("llama3-70b", 128), file=file)
        text = file.getvalue()
        assert text.isascii()
        assert all(line == line.rstrip() for line in text.splitlines())
        assert "\x1b" not in text

    def test_says_what_was_asked_and_found(self) -> None:
        plan = plan_of("llama3-70b", 128)
        text, best = plan_text(plan), plan.candidates[0]
        for said in (
            "Plan for llama3-70b on 128 NVIDIA H100",
            "512 sequences of 8,192 tokens = 4,194,304 tokens in bf16",
            "450 GB/s in a node of 8, 50 GB/s beyond (one-way)",
            f"{plan.evaluated:,} layouts",
            "Not counted: ",
            "GiB (2^30 bytes)",
            "of one h100",
        ):
            assert said in text
        row = next(line for line in text.splitlines() if line.lstrip().startswith("1 "))
        for cell in (
            f"{best.tp} {best.cp} {best.pp} {best.dp}",
            best.recompute,
            seconds_text(best.step_seconds),
            f"{best.mfu:.1%}",
            f"{best.tokens_per_second_per_gpu:,.0f}",
            f"{best.memory_bytes / GIB:.1f}",
            f"{spare_bytes(plan.problem, best) / GIB:.1f}",
        ):
            assert cell in row

    def test_tables_are_no_wider_than_120(self) -> None:
        for plan in (plan_of("llama3-70b", 128), plan_of("llama3-405b", 16_384, tokens=16 * M)):
            lines = plan_text(plan).splitlines()
            first = next(i for i, line in enumerate(lines) if "tp cp pp dp" in line)
            table = lines[first : first + 1 + len(plan.candidates)]
            assert max(map(len, table)) <= 120

    def test_every_pipeline_rank_is_printed(self) -> None:
        plan = plan_of("llama3-405b", 16_384, tokens=16 * M)
        ranks = plan.candidates[0].ranks
        sizes = " ".join(f"{rank.total / GIB:.1f}" for rank in ranks)
        assert f"pipeline ranks 0 to {len(ranks) - 1}: {sizes}" in plan_text(plan)

    def test_near_misses_have_reasons(self) -> None:
        plan = plan_of("llama3-70b", 128)
        text = plan_text(plan)
        assert plan.near_misses
        for miss in plan.near_misses:
            assert miss.reason in text

    def test_paper(self) -> None:
        text = plan_text(plan_of("llama3-405b", 16_384, tokens=16 * M))
        after = text.split("By the rules of Llama 3's paper")[1]
        assert "tp 8 cp 1 pp 16 dp 128, afab v8" in after

    def test_nothing_fits(self) -> None:
        plan = plan_of("llama3-405b", 8, tokens=16 * M)
        text = plan_text(plan)
        assert "Nothing fits." in text
        assert plan.infeasible is not None
        assert plan.infeasible.constraint in text
        assert "What would fit" in text
        for change in plan.infeasible.changes:
            assert str(change) in text
        assert "No layout: rule 4" in text


class TestTerminal:
    @pytest.mark.parametrize("width", [80, 100, 112, 160])
    def test_fits_the_width_and_cuts_nothing(self, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        for plan in (plan_of("llama3-70b", 128), plan_of("llama3-405b", 16_384, tokens=16 * M)):
            text = shown(plan, width, monkeypatch)
            assert max(map(len, text.splitlines())) <= width
            assert "\u2026" not in text
            best = plan.candidates[0]
            for said in (best.schedule, f"v{best.virtual_stages}", best.recompute, f"{best.memory_bytes / GIB:.1f}"):
                assert said in text

    def test_has_lines_and_colour(self) -> None:
        file = Terminal()
        print_plan(plan_of("llama3-8b", 32), file=file)
        assert "\u2500" in file.getvalue()


def test_the_margin_is_that_of_the_named_gpu() -> None:
    """The same layout on two GPUs: a plan for 141 GB is no plan for 80 (P19)."""
    small = plan_of("llama3-8b", 32)
    large = search(job("llama3-8b", 32, gpu="h200"))
    one = small.candidates[0]
    more = spare_bytes(large.problem, one) - spare_bytes(small.problem, one)
    assert more / GIB == pytest.approx(139.8 - 79.1)
    assert "of one h200" in plan_text(large)


class TestMarks:
    def test_what_is_tight_and_what_the_trainer_cannot_run(self) -> None:
        plan = plan_of("llama3-70b", 128)
        plan = replace(plan, candidates=(replace(plan.candidates[0], recompute="matmuls"), *plan.candidates[1:]))
        rows = plan_text(plan).split("Layouts, fastest first")[1].splitlines()[2:]
        high = plan.problem.stack.allocator_band[1]
        for row, one in zip(rows, plan.candidates, strict=False):
            room = plan.problem.cluster.chip.hbm_bytes - GIB
            assert row.endswith("!") == (one.memory_bytes * high > room)
            assert ("*" in row) == (one.recompute == "matmuls")

    def test_a_precision_that_the_trainer_lacks_and_nobody_measured(self) -> None:
        problem = job("llama3-8b", 32).replace(precision=Precision.FP16)
        text = plan_text(search(problem, top=1))
        assert "computes in bf16 or fp32" in text
        assert (
            "CAREFUL  no run on h100 in fp16 has been measured" in " ".join(text.split("\n"))
        ) != problem.is_measured

    def test_legend_is_wrapped(self) -> None:
        text = plan_text(plan_of("llama3-70b", 128))
        legend = text.split("v: virtual stages")[1].split("Less memory")[0]
        assert max(map(len, legend.splitlines())) <= 120


def test_without_a_pipeline_stages_are_explained() -> None:
    plan = plan_of("llama3-8b", 32)
    one = replace(plan.candidates[0], pp=1, virtual_stages=4, schedule="interleaved", split="even")
    text = plan_text(replace(plan, candidates=(one,)))
    assert "none v4 mb" in text
    assert "parts of the layers whose gradients are reduced one at a time" in " ".join(text.split())


def test_limits_and_documents_are_said() -> None:
    asked = job("llama3-8b", 8).replace(limits={"recompute": ("none",), "tp": (1, 2)})
    packed = Problem.of(
        model="llama3-8b",
        cluster=asked.cluster,
        seq_len=8_192,
        tokens=4 * M,
        documents="mean=1024,dist=exponential",
        limits=asked.limits,
    )
    text = plan_text(search(packed, top=1))
    assert "recompute = none, tp = 1 or 2" in text
    assert "mean=1024,dist=exponential" in text


def test_as_plain_does_not_wrap() -> None:
    assert as_plain(Text("word " * 200)).count("\n") == 0
