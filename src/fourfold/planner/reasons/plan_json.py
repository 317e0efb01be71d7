"""A plan as one JSON object; docs/formats.md explains its keys. Bytes are bytes, times seconds, shares 0 to 1."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

from fourfold.planner.memory.peak import RESERVED
from fourfold.planner.reasons.as_recipe import has_spare, untrainable
from fourfold.planner.reasons.explanation import Explanation, explanation_json
from fourfold.planner.search.judge import Candidate
from fourfold.planner.search.paper import PaperAnswer, paper_layout
from fourfold.planner.search.problem import Problem
from fourfold.planner.search.search import Plan

FORMAT = 1


def plan_json(plan: Plan, explanation: Explanation | None = None) -> dict[str, Any]:
    """All that a plan says, and with an explanation its sections as `explanation`."""
    infeasible = plan.infeasible
    out: dict[str, Any] = {
        "format": FORMAT,
        "problem": problem_json(plan.problem),
        "candidates": [candidate_json(plan.problem, one) for one in plan.candidates],
        "rules": rules_json(plan, paper_layout(plan.problem)),
        "pareto": [candidate_json(plan.problem, one) for one in plan.pareto],
        "near_misses": [
            {"kind": miss.kind, "reason": miss.reason, **candidate_json(plan.problem, miss.candidate)}
            for miss in plan.near_misses
        ],
        "recipe_unjudged": None if plan.own is None else plan.own.unjudged,
        "evaluated": plan.evaluated,
        "feasible": plan.feasible,
        "search_seconds": plan.seconds,
        "infeasible": None
        if infeasible is None
        else {
            "constraint": infeasible.constraint,
            "changes": [
                {
                    "kind": change.kind,
                    "words": change.words,
                    "changed": change.changed,
                    **candidate_json(change.problem, change.candidate),
                }
                for change in infeasible.changes
            ],
        },
    }
    if explanation is not None:
        out["explanation"] = explanation_json(explanation)
    return out


def problem_json(problem: Problem) -> dict[str, Any]:
    """What was asked."""
    chip = problem.cluster.chip
    return {
        "model": problem.name,
        "gpu": chip.name,
        "cluster": problem.cluster.name,
        "gpus": problem.gpus,
        "hbm_bytes": chip.hbm_bytes,
        "usable_bytes": chip.hbm_bytes - RESERVED,
        "peak_flops": chip.peaks[problem.precision.name.lower()],
        "seq_len": problem.seq_len,
        "sequences": problem.sequences,
        "tokens": problem.tokens,
        "dtype": problem.precision.name.lower(),
        "measured": problem.is_measured,
        "stack": problem.stack.name,
        "allocator": problem.stack.allocator,
        "documents": None if problem.documents is None else str(problem.documents),
        "limits": {name: list(values) for name, values in problem.limits.items()},
    }


def candidate_json(problem: Problem, one: Candidate) -> dict[str, Any]:
    """One layout with what is predicted of it."""
    return {
        "tp": one.tp,
        "cp": one.cp,
        "pp": one.pp,
        "dp": one.dp,
        "virtual_stages": one.virtual_stages,
        "nc": one.nc,
        "micro_batch": one.micro_batch,
        "schedule": one.schedule,
        "zero": one.zero,
        "recompute": one.recompute,
        "split": one.split if isinstance(one.split, str) else list(one.split),
        "step_seconds": one.step_seconds,
        "step_seconds_band": list(one.step_seconds_band),
        "memory_bytes": one.memory_bytes,
        "reserved_bytes": one.memory_bytes * problem.stack.allocator,
        "spare_bytes": problem.cluster.chip.hbm_bytes - RESERVED - one.memory_bytes * problem.stack.allocator,
        "fits": one.fits,
        "has_spare": has_spare(problem, one),
        "untrainable": list(untrainable(problem, one)),
        "worst_rank": one.worst_rank,
        "mfu": one.mfu,
        "mfu_6p": one.mfu_6p,
        "tokens_per_second_per_gpu": one.tokens_per_second_per_gpu,
        "bubble_over_compute": one.bubble_over_compute,
        "bubble_over_total": one.bubble_over_total,
        "breakdown": dict(one.breakdown),
        "memory_parts": dict(one.memory_parts),
        "ranks": [_plain(rank) for rank in one.ranks],
    }


def rules_json(plan: Plan, paper: PaperAnswer) -> dict[str, Any]:
    """The paper's answer with its steps, and as the same model judges it; or why there is none."""
    judged = next((miss.candidate for miss in plan.near_misses if miss.kind == "paper"), None)
    out: dict[str, Any] = {"refusal": paper.refusal, "steps": list(paper.steps)}
    if paper.refusal is None:
        keys = ("tp", "cp", "pp", "dp", "virtual_stages", "nc", "micro_batch", "schedule", "zero", "split")
        out |= {key: getattr(paper, key) for key in keys}
    out["predicted"] = None if judged is None else candidate_json(plan.problem, judged)
    return out


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and numbers of NumPy as what JSON has."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.item() if hasattr(value, "item") else value
