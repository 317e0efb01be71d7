"""Why no layout of a job is legal, in the words of the rule that is broken, where one rule alone is enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from fourfold.planner.search.problem import Problem
from fourfold.planner.search.space import divisors, tensor_degrees


def unfilled_node(problem: Problem) -> str | None:
    """A job larger than a node fills its nodes."""
    gpus, node = problem.gpus, problem.cluster.gpus_per_node
    if gpus <= node or not gpus % node:
        return None
    near = ", ".join(str(n) for n in (gpus // node * node, -(-gpus // node) * node))
    return f"gpus = {gpus}: must fill nodes of {node} GPUs; nearest legal: {near}"


def contradiction(problem: Problem) -> str | None:
    """What limits say that cannot be, with each other or with the job; None if no rule alone forbids them."""
    return next((words for rule in _RULES for words in rule(problem)), None)


def runs_as_afab(problem: Problem) -> str | None:
    """What a limit on nc below pp leaves, if it leaves something."""
    nc, pp = _numbers(problem, "nc"), _numbers(problem, "pp")
    if not nc or not pp or max(nc) >= min(pp) or problem.limits.get("schedule") == ("afab",):
        return None
    return (
        f"nc = {_or(nc)} with pp = {_or(pp)}: with nc below pp, ranks run all forwards, then all backwards (afab), "
        f"and hold every micro-batch; from nc = {min(pp)} on they do not"
    )


def _numbers(problem: Problem, name: str) -> list[int]:
    return sorted(int(value) for value in problem.limits.get(name, ()))


def _or(values: object) -> str:
    return " or ".join(map(str, values)) if isinstance(values, list | tuple) else str(values)


def _schedule(problem: Problem) -> Iterator[str]:
    kinds, v, nc = problem.limits.get("schedule", ()), _numbers(problem, "virtual_stages"), _numbers(problem, "nc")
    pp = _numbers(problem, "pp")
    if set(kinds) <= {"1f1b", "zb-h1"} and kinds and v and min(v) > 1:
        more = "; with more it is interleaved" if kinds == ("1f1b",) else ""
        asked = f"schedule = {_or(kinds)} with virtual_stages = {_or(v)}"
        yield (
            f"{asked}: {_or(kinds)} has one virtual stage per rank{more}; "
            "nearest legal: schedule=interleaved, or virtual_stages=1"
        )
    if kinds == ("interleaved",) and v and max(v) == 1:
        yield (
            "schedule = interleaved with virtual_stages = 1: with one virtual stage per rank it is 1f1b; "
            "nearest legal: schedule=1f1b, or virtual_stages=2"
        )
    if pp and pp[-1] == 1 and kinds == ("flexible",):
        yield "schedule = flexible with pp = 1: without a pipeline it is 1f1b; nearest legal: schedule=1f1b"
    if nc and pp and kinds and not {"flexible", "afab"} & set(kinds) and not set(nc) & set(pp):
        yield (
            f"nc = {_or(nc)} with schedule = {_or(kinds)} and pp = {_or(pp)}: there nc is pp; "
            f"nearest legal: nc={pp[0]}, or schedule=flexible"
        )
    if nc and pp and max(nc) < min(pp) and kinds and "afab" not in kinds:
        yield (
            f"nc = {_or(nc)} with pp = {_or(pp)}: nc below pp runs as afab, and schedule = {_or(kinds)} leaves that "
            f"out; nearest legal: nc={pp[0]}, or schedule=afab"
        )


def _grid(problem: Problem) -> Iterator[str]:
    sizes = {name: _numbers(problem, name) for name in ("tp", "cp", "pp", "dp")}
    degrees = tensor_degrees(problem.config)
    if sizes["tp"] and not set(sizes["tp"]) & set(degrees):
        near = min(degrees, key=lambda tp: abs(tp - sizes["tp"][0]))
        yield (
            f"tp = {_or(sizes['tp'])}: must divide heads, key-value heads, feed-forward width and vocabulary: one of "
            f"{', '.join(map(str, degrees))}; nearest legal: {near}"
        )
    if sizes["pp"] and min(sizes["pp"]) > problem.config.num_layers + 2:
        most = problem.config.num_layers + 2
        yield f"pp = {_or(sizes['pp'])}: must be at most the layers and two ends: {most}; nearest legal: {most}"
    if sizes["cp"] and all(problem.seq_len % (2 * cp) for cp in sizes["cp"] if cp > 1) and 1 not in sizes["cp"]:
        legal = [cp for cp in divisors(problem.seq_len) if problem.seq_len % (2 * cp) == 0] or [1]
        near = min(legal, key=lambda cp: abs(cp - sizes["cp"][0]))
        of = f"{problem.seq_len} tokens of a sequence"
        yield f"cp = {_or(sizes['cp'])}: 2 cp must divide the {of}; nearest legal: {near}"
    if sizes["dp"] and all(problem.sequences % dp for dp in sizes["dp"]):
        near = min(divisors(problem.sequences), key=lambda dp: abs(dp - sizes["dp"][0]))
        yield f"dp = {_or(sizes['dp'])}: must divide the {problem.sequences} sequences of a step; nearest legal: {near}"
    one = {name: values[0] for name, values in sizes.items() if len(values) == 1}
    product = math.prod(one.values())
    words = " x ".join(f"{name} {value}" for name, value in one.items())
    if one and problem.gpus % product:
        yield f"{words} = {product}: must divide the {problem.gpus} GPUs"
    if len(one) == len(sizes) and product != problem.gpus:
        yield f"{words} = {product}: must be the {problem.gpus} GPUs; leave one of the four out, and it is what is left"


def _stages(problem: Problem) -> Iterator[str]:
    pp, v, layers = _numbers(problem, "pp"), _numbers(problem, "virtual_stages"), problem.config.num_layers
    if v and "split" not in problem.limits and min(v) * min(pp or [1]) > layers + 2:
        yield (
            f"virtual_stages = {_or(v)}{f' with pp = {_or(pp)}' if pp else ''}: {min(v) * min(pp or [1])} stages are "
            f"more than the {layers} layers and two ends; nearest legal: {(layers + 2) // min(pp or [1])}"
        )
    sizes, dp = _numbers(problem, "micro_batch"), _numbers(problem, "dp")
    if sizes and all(problem.sequences % (size * group) for size in sizes for group in dp or [1]):
        of = (
            f"{problem.sequences // dp[0]} sequences of a DP group"
            if dp
            else f"{problem.sequences} sequences of a step"
        )
        near = min(divisors(problem.sequences // (dp[0] if dp else 1)), key=lambda size: abs(size - sizes[0]))
        yield f"micro_batch = {_or(sizes)}: must divide the {of}; nearest legal: {near}"


_RULES: tuple[Callable[[Problem], Iterator[str]], ...] = (_grid, _stages, _schedule)
