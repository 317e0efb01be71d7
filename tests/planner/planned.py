"""Plans that several tests look at, made once."""

from __future__ import annotations

from functools import cache

from fourfold.planner.machines.cluster import cluster
from fourfold.planner.reasons.explain import explain
from fourfold.planner.reasons.explanation import Explanation
from fourfold.planner.search.problem import Problem
from fourfold.planner.search.search import Plan, search

M = 1 << 20


def job(
    model: str, gpus: int, *, seq: int = 8_192, tokens: int = 4 * M, gpu: str = "h100", stack: str = "standard"
) -> Problem:
    """A job on so many GPUs."""
    return Problem.of(model=model, cluster=cluster(gpu, gpus), seq_len=seq, tokens=tokens, stack=stack)


def plan_of(model: str, gpus: int, *, seq: int = 8_192, tokens: int = 4 * M, stack: str = "standard") -> Plan:
    """The plan of a job."""
    return _plan(model, gpus, seq, tokens, stack)


def explained(model: str, gpus: int, *, seq: int = 8_192, tokens: int = 4 * M, stack: str = "standard") -> Explanation:
    """The explanation of its plan."""
    return _explanation(model, gpus, seq, tokens, stack)


@cache
def _plan(model: str, gpus: int, seq: int, tokens: int, stack: str) -> Plan:
    return search(job(model, gpus, seq=seq, tokens=tokens, stack=stack))


@cache
def _explanation(model: str, gpus: int, seq: int, tokens: int, stack: str) -> Explanation:
    return explain(_plan(model, gpus, seq, tokens, stack))
