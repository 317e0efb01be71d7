"""One process that makes a layout's sums in their order has its numbers, to the bit; and they are the right ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.debugger.numerics.layouts import STEPS, first_step_of_reference, run_ranks, run_reference
from tests.parallel.harness import MIXED_ROWS, Case, reference, sequential

FLEXIBLE = {"schedule": "flexible", "v": 2, "nmb": 5, "nc": 2}
LAYOUTS = [
    Case(),
    Case(tp=2), Case(cp=2), Case(pp=2), Case(dp=2),  # every dimension alone
    Case(tp=2, cp=2), Case(tp=2, pp=2, nmb=3), Case(cp=2, dp=2), Case(pp=2, dp=2, v=2, nmb=4),  # pairs
    Case(tp=2, cp=2, pp=2, dp=2, **FLEXIBLE),  # all four
    Case(dp=4, zero=3), Case(pp=2, dp=2, zero=2, **FLEXIBLE), Case(pp=2, cp=2, zero=1, nmb=3),  # ZeRO modes
]  # fmt: skip
PARTICULARS = [
    Case(tp=4, kv=2, tied=True, pp=2, v=2, nmb=3),  # ranks that share a key head, and tied ends
    Case(cp=3, tp=2, nmb=3, cp_split="per_document"),
    Case(cp=4, tp=2, rows=((1,), (3,), (30, 2))),  # ranks without a token
    Case(pp=2, dp=2, schedule="zb-h1", nmb=3, dtype="bfloat16"),
    Case(pp=2, tp=2, freeze=("tok_embeddings", "layers.0", "layers.1"), nmb=3, zero=2),
    Case(tp=4, vocab=241, tied=True, z_loss=1e-2),  # a rank all of whose entries are padding
    Case(dp=3, micro_batch=2, clip_type=float("inf"), clip=0.01),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_a_layout_is_the_ordered_reference(case: Case, dtype: str) -> None:
    case = replace(case, dtype=dtype)
    assert run_ranks(case).differences(run_reference(case)) == []


@pytest.mark.parametrize("case", PARTICULARS, ids=lambda case: case.name)
def test_so_are_the_particulars_of_layouts(case: Case) -> None:
    assert run_ranks(case).differences(run_reference(case)) == []


def test_a_back_ends_own_order_is_another() -> None:
    """gloo adds in the order of a ring, which is that of ranks for two of them only: so there is train.ordered."""
    case = Case(dp=4)
    assert run_ranks(case, ordered=False).differences(run_reference(case))


def test_the_ordered_reference_computes_what_plain_autograd_does() -> None:
    """Its formulas of gradients are its own; a layout has equal numbers also where both have the same mistake."""
    case = Case(tp=2, cp=2, dp=2, kv=1, z_loss=1e-2, steps=STEPS, rows=MIXED_ROWS)
    plain = reference(sequential(case))
    made, gradients = first_step_of_reference(case)
    assert made.loss == pytest.approx(plain.losses[0], rel=1e-6)
    assert made.grad_norm == pytest.approx(plain.norms[0], rel=1e-6)
    for name, gradient in plain.gradients[0].items():
        mine = gradients[name][: len(gradient)]
        assert torch.linalg.vector_norm(mine - gradient) <= 1e-5 * torch.linalg.vector_norm(gradient), name
