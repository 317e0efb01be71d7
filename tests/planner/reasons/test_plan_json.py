"""The keys that are promised, in a form that JSON can hold, and numbers that agree with each other."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fourfold.planner.reasons.plan_json import plan_json
from tests.planner.planned import M, explained, plan_of

PROMISED = (
    "tp", "cp", "pp", "dp", "virtual_stages", "nc", "micro_batch", "schedule", "zero", "recompute", "step_seconds",
    "step_seconds_band", "memory_bytes", "worst_rank", "mfu", "tokens_per_second_per_gpu",
)  # fmt: skip


def dumped(**what: Any) -> dict[str, Any]:
    return json.loads(json.dumps(plan_json(**what), allow_nan=False))


def test_promised_keys() -> None:
    out = dumped(plan=plan_of("llama3-70b", 128))
    assert len(out["candidates"]) == 10
    for one in out["candidates"]:
        assert set(PROMISED) <= set(one)
        assert one["tp"] * one["cp"] * one["pp"] * one["dp"] == 128
        assert one["step_seconds_band"][0] < one["step_seconds"] < one["step_seconds_band"][1]
        assert one["fits"]
        assert one["spare_bytes"] >= 0
    seconds = [one["step_seconds"] for one in out["candidates"]]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-4)


def test_numbers_agree() -> None:
    best = dumped(plan=plan_of("llama3-70b", 128))["candidates"][0]
    assert best["tokens_per_second_per_gpu"] == pytest.approx(4 * M / best["step_seconds"] / 128)
    assert best["mfu_6p"] == pytest.approx(6 * 70_553_706_496 * best["tokens_per_second_per_gpu"] / 989.4e12)
    assert sum(best["breakdown"].values()) == pytest.approx(best["step_seconds"])
    assert len(best["ranks"]) == best["pp"]
    worst = max(best["ranks"], key=lambda rank: rank["total"])
    assert (worst["pp_rank"], worst["total"]) == (best["worst_rank"], pytest.approx(best["memory_bytes"], abs=1))


def test_says_what_is_guessed_and_tight() -> None:
    plan = plan_of("llama3-70b", 128)
    out = dumped(plan=plan)
    assert out["problem"]["measured"] is plan.problem.is_measured
    assert out["problem"]["cluster"] == "h100"
    high, room = plan.problem.stack.allocator_band[1], out["problem"]["usable_bytes"]
    for one in out["candidates"]:
        assert one["has_spare"] == (one["memory_bytes"] * high <= room)
        assert one["untrainable"] == []
    best = replace(plan.candidates[0], recompute="matmuls")
    (said,) = dumped(plan=replace(plan, candidates=(best,)))["candidates"][0]["untrainable"]
    assert said.startswith('recompute = "matmuls"')


def test_rules() -> None:
    rules = dumped(plan=plan_of("llama3-405b", 16_384, tokens=16 * M))["rules"]
    assert (rules["tp"], rules["cp"], rules["pp"], rules["dp"]) == (8, 1, 16, 128)
    assert (rules["zero"], rules["schedule"]) == (2, "afab")
    assert rules["refusal"] is None
    assert rules["predicted"]["pp"] == 16
    assert len(rules["steps"]) == 6


def test_nothing_fits() -> None:
    out = dumped(plan=plan_of("llama3-405b", 8, tokens=16 * M))
    assert out["candidates"] == []
    assert "GiB" in out["infeasible"]["constraint"]
    assert out["infeasible"]["changes"]
    assert "rule 4" in out["rules"]["refusal"]


def test_explanation() -> None:
    explanation = explained("llama3-8b", 32)
    out = dumped(plan=explanation.plan, explanation=explanation)
    assert {"sections", "verdict", "differences"} == set(out["explanation"])
    assert "explanation" not in dumped(plan=explanation.plan)
