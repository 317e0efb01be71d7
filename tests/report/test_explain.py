"""The reasons as people read them: numbers in units, formulas, and nothing lost in a narrow terminal."""

from __future__ import annotations

import io
import re

import pytest

from fourfold.planner.reasons.explanation import Figure, Unit
from fourfold.report.explain import explanation_text, figure_text, print_explanation
from tests.planner.planned import M, explained


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (405_853_388_800, "parameters", "405,853,388,800"),
        (61.3 * 2**30, "bytes", "61.3 GiB"),
        (-2.0 * 2**30, "bytes", "-2.00 GiB"),
        (0.1172, "share", "11.7%"),
        (0.00104, "s", "1.04 ms"),
        (6.2, "s", "6.20 s"),
        (15_177, "s", "15,177 s"),
        (2.524e12, "FLOP", "2.5240 TFLOP"),
        (400e12, "FLOP/s", "400.0 TFLOP/s"),
        (15.6e12, "tokens", "15.6 T tokens"),
        (2_473.5, "tokens", "2,474 tokens"),
        (24.2, "GPUs", "24.2 GPUs"),
        (7.07e6, "dollars", "$7.07 M"),
        (0.03125, "", "0.03125"),
    ],
)
def test_figures(value: float, unit: Unit, text: str) -> None:
    assert figure_text(Figure("x", value, unit)) == text


def test_plain_says_everything() -> None:
    explanation = explained("llama3-405b", 16_384, tokens=16 * M)
    text = explanation_text(explanation)
    assert text.isascii()
    assert all(line == line.rstrip() for line in text.splitlines())
    for number, section in enumerate(explanation.sections, 1):
        assert f"{number}. {section.title}" in text
        assert section.sentence in text
        for figure in section.figures:
            assert figure.formula in text
    for difference in explanation.comparison.differences:
        assert difference.sentence in text
    for step in explanation.comparison.paper.steps:
        assert step in text


@pytest.mark.parametrize("width", [80, 120])
def test_fits_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    file = Terminal()
    explanation = explained("llama3-70b", 128)
    print_explanation(explanation, file=file)
    text = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text
    words = " ".join(text.split())
    assert explanation.section("fsdp").sentence in words


def test_every_pipeline_rank_is_printed() -> None:
    explanation = explained("llama3-405b", 16_384, tokens=16 * M)
    text = explanation_text(explanation)
    table = text.split("Memory per rank")[1]
    for rank in explanation.plan.candidates[0].ranks:
        assert f"{rank.total / 2**30:.1f}" in table


def test_without_a_layout() -> None:
    text = explanation_text(explained("llama3-405b", 8, tokens=16 * M))
    assert "1. How many parameters" in text
    assert "The paper's rules give no layout for this job" in text
