"""What is made again is what it was: losses, gradients and weights are bitwise those of a run that keeps everything."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fourfold.parallel.batch import LocalBatch
from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import Case, bitwise_equal, check_case, make_model, micro_batches, run
from tests.parallel.test_collectives import spied_step
from tests.parallel.test_halves import Watched

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


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_between_forward_and_backward_only_what_is_kept_is_alive(recompute: str) -> None:
    """facts.md 2.11: not the stage's output, nor anything that an operation made on its way. What is kept is counted
    by autograd's hooks, what is alive by looking at every storage that was made."""
    case = Case(pp=2, nmb=1, layers=4, rows=((64,),), recompute=recompute)

    def work(rank: int) -> tuple[int, int]:
        model = make_model(case)
        ((batch, rows),) = micro_batches(case, 0, 0)
        local = LocalBatch.of(batch, rows, cp=1, cp_rank=0, tp=1, cp_split="head_tail")
        stage = model.stages[rank]
        stage.gather()
        weights = {weight.untyped_storage()._cdata for weight in stage.gathered().values()}
        x = local.tokens if rank == 0 else torch.randn(64, 32).requires_grad_()
        others = weights | {tensor.untyped_storage()._cdata for tensor in (x, local.tokens, local.labels)}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with Watched() as watched:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                edge = get_gradient_edge(stage.module(x, local))
            alive = watched.alive(but=others)
        torch.autograd.backward([edge], [torch.ones((64, 32) if rank == 0 else ())])
        return alive, sum(size for key, size in kept.items() if key not in others)

    rotary = 64 * 2 * 4 * 4  # held by layers that run again, as what they were given
    for alive, kept in fork_ranks(2, work, timeout=60):
        assert alive == kept + rotary * (recompute == "full")


@pytest.mark.parametrize(("recompute", "more"), [("none", 0), ("selective", 0), ("full", 3)])
def test_collectives_that_a_layer_costs_more(recompute: str, more: int) -> None:
    """A second forward has three of its four: nothing needs what the last product scatters."""

    def count(layers: int) -> int:
        seen = fork_ranks(2, lambda rank: spied_step(Case(tp=2, nmb=1, layers=layers, recompute=recompute)), timeout=60)
        return Counter(name for name, _ in seen[0]).total()

    assert count(3) - count(2) == 10 + more
