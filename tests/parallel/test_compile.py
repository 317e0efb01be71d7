"""Compiled arithmetic: the numbers are those of REF, and no run compiles for every length of its micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from fourfold.parallel import missing_compiler
from fourfold.parallel.arithmetic import Arithmetic, arithmetic
from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import Case, compare, reference, run, sequential, train_rank

needs_compiler = pytest.mark.skipif(missing_compiler("cpu") is not None, reason="no C++ compiler")
ODD_LENGTHS = ((43, 1, 19), (63,), (13, 13, 13, 13, 11), (17,), (9, 31), (1, 1, 5))
CASE = Case(tp=2, pp=2, nmb=3, layers=2, steps=2, rows=ODD_LENGTHS, compile=True, recompute=("full", "selective"))
NUMBERS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # dtypes, and how far a kernel may be from eager


def arguments(name: str, tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """What a function is given on a rank of CASE, `tokens` after TP's gathers."""
    generator = torch.Generator().manual_seed(tokens)

    def some(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, grad, weight = some(tokens // 2, 32), some(tokens // 2, 32), some(32)
    q, k, angles = some(tokens, 2, 8), some(tokens, 1, 8), some(tokens, 4, dtype=torch.float32)
    rstd = some(tokens // 2, 1, dtype=torch.float32).abs()
    a, b, wide = (some(tokens, 24) for _ in range(3))
    return {
        "norm": (x, weight, 1e-5),
        "scale": (x, weight, rstd),
        "norm_backward": (grad, x, weight, rstd, True),
        "swiglu": (a, b),
        "swiglu_backward": (wide, a, b),
        "rotate": (q, k, angles.cos(), angles.sin()),
        "rotate_backward": (q, k, angles.cos(), angles.sin()),
    }[name]


@needs_compiler
@torch.no_grad()
def test_equals_eager_and_compiles_twice_at_most() -> None:
    """Once for the first length, and when another comes once for all. What this process has, those it forks have."""
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = Arithmetic(), arithmetic(compiled=True)
    for most, (dtype, tolerance) in enumerate(NUMBERS.items(), start=2):
        for tokens in (64, 18, 40, 6, 62):
            for name in Arithmetic._fields:
                given = arguments(name, tokens, dtype)
                want, got = getattr(eager, name)(*given), getattr(compiled, name)(*given)
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        assert counters["stats"]["unique_graphs"] <= most * len(Arithmetic._fields)

    @torch.enable_grad()
    def train(rank: int) -> Any:
        before = counters["stats"]["unique_graphs"]
        return train_rank(CASE), counters["stats"]["unique_graphs"] - before

    first, *others = fork_ranks(CASE.world, train, timeout=120)
    for outcome, _ in others:
        for whole, part in zip(first[0].gradients, outcome.gradients, strict=True):
            whole.update(part)
        first[0].weights.update(outcome.weights)
    with torch.enable_grad():
        compare(first[0], reference(sequential(CASE)))
    assert {first[1], *(compiled for _, compiled in others)} == {0}

    with torch.enable_grad():
        rounded = replace(CASE, dtype="bfloat16", steps=1)
        compare(run(rounded), run(replace(rounded, compile=False)), tolerance=5e-2)


@needs_compiler
@torch.no_grad()
def test_making_again_is_bitwise_what_was_made() -> None:
    """The kernel of a norm's second half against the kernel of both."""
    compiled = arithmetic(compiled=True)
    for dtype in NUMBERS:
        x, weight, eps = arguments("norm", 64, dtype)
        out, rstd = compiled.norm(x, weight, eps)
        assert torch.equal(compiled.scale(x, weight, rstd), out)


def test_says_what_is_missing() -> None:
    with torch._inductor.config.patch({"cpp.cxx": "no-such-compiler"}):
        assert missing_compiler("cpu") == "on CPU it needs a C++ compiler that runs here: g++, or what CXX names"
