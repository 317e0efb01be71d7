"""Reasons of near misses name the layout that they are about, and places within the layouts that there are."""

from __future__ import annotations

import re

import pytest

from tests.planner.planned import M, plan_of


@pytest.mark.parametrize(("model", "gpus", "tokens"), [("llama3-70b", 128, 4 * M), ("llama3-405b", 16_384, 16 * M)])
def test_reasons(model: str, gpus: int, tokens: int) -> None:
    plan = plan_of(model, gpus, tokens=tokens)
    for miss in plan.near_misses:
        if miss.kind not in ("paper", "recipe", "memory"):
            assert miss.candidate.layout in miss.reason
        if not miss.candidate.fits:
            largest = max(miss.candidate.memory_parts.values()) / 2**30
            assert f"(largest: {largest:.1f} GiB of " in miss.reason


@pytest.mark.parametrize("gpus", [24, 32, 128])
def test_place_is_one_that_there_is(gpus: int) -> None:
    plan = plan_of("llama3-8b", gpus)
    paper = next(miss for miss in plan.near_misses if miss.kind == "paper")
    found = re.search(r"number ([\d,]+) of ([\d,]+)", paper.reason)
    if found:
        place, number = (int(text.replace(",", "")) for text in found.groups())
        assert 1 <= place <= number
