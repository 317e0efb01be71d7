"""What is made again in backward is what it was: every loss, gradient and weight is bitwise that of a run that keeps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import Case, bitwise_equal, check_case, run
from tests.parallel.test_collectives import spied_step

LAYOUTS = [
    Case(pp=2, v=2, nmb=4, recompute=("full", "norms", "none", "selective")),
    Case(tp=2, cp=2, recompute="full", rows=((2,), (64,), (9, 31))),  # CP rank 1 has no token in the first row
    Case(tp=2, dp=2, zero=3, recompute="full", dtype="bfloat16", tied=True),
    Case(pp=2, dp=2, zero=2, nmb=4, recompute="swiglu", dtype="bfloat16"),
    Case(pp=2, tp=2, schedule="zb-h1", zero=3, nmb=3, recompute="full", kv=1),
    Case(pp=2, cp=2, schedule="zb-h1", zero=1, nmb=3, recompute="selective", dtype="bfloat16"),
    Case(pp=2, recompute="full", freeze=("tok_embeddings", "layers.0", "layers.2.feed_forward"), nmb=3),
    Case(tp=2, cp=2, pp=2, dp=2, v=2, nmb=3, steps=1, recompute="full"),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_is_bitwise_what_keeping_everything_gives(case: Case) -> None:
    case = replace(case, steps=min(case.steps, 2))
    assert bitwise_equal(run(case), run(replace(case, recompute="none")))


def test_equals_the_reference() -> None:
    check_case(Case(tp=2, pp=2, nmb=3, steps=2, recompute="full"))


@pytest.mark.parametrize(("recompute", "more"), [("none", 0), ("selective", 0), ("full", 3)])
def test_collectives_that_a_layer_costs_more(recompute: str, more: int) -> None:
    """A second forward has three of its four: nothing needs what the last product scatters."""

    def count(layers: int) -> int:
        seen = fork_ranks(2, lambda rank: spied_step(Case(tp=2, nmb=1, layers=layers, recompute=recompute)), timeout=60)
        return Counter(name for name, _ in seen[0]).total()

    assert count(3) - count(2) == 10 + more
