"""The z-loss moves the weights as plain autograd says, and the loss that is reported knows nothing of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import Case, check_case, make_model, micro_batches, reference, run

Z_LOSS = 0.02  # two hundred times what is usual: log(Z)^2 is about 31 here, and both terms should count
LAYOUTS = {
    "single": Case(z_loss=Z_LOSS, steps=3, layers=2),
    "tp2, a rank with padding": Case(tp=2, vocab=257, z_loss=Z_LOSS, steps=3, layers=2),
    "cp2 pp2": Case(cp=2, pp=2, z_loss=Z_LOSS, steps=3, layers=2),
    "tp2 dp2 with unequal labels, tied": Case(
        tp=2, dp=2, rows=((1, 1, 2, 1), (63,)), tied=True, z_loss=Z_LOSS, steps=3, layers=2
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_plain_autograd(layout: str) -> None:
    check_case(LAYOUTS[layout])


def test_the_term_is_large_enough_to_be_seen() -> None:
    with_term, without = (reference(replace(LAYOUTS["single"], z_loss=z)).gradients[0] for z in (Z_LOSS, 0.0))
    for name, gradient in without.items():
        assert (with_term[name] - gradient).norm() > 0.01 * gradient.norm(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_logged_loss_of_the_first_step_is_bitwise_the_same(dtype: str) -> None:
    case = Case(tp=2, pp=2, dtype=dtype, steps=2, layers=2)
    with_term, without = (run(replace(case, z_loss=z)) for z in (Z_LOSS, 0.0))
    assert with_term.losses[0] == without.losses[0]
    assert with_term.norms[0] != without.norms[0]
    assert with_term.losses[1] != without.losses[1]  # the weights went another way


def test_an_evaluation_is_the_cross_entropy_alone() -> None:
    def losses(rank: int) -> list[float]:
        models = [make_model(Case(layers=2, z_loss=z)) for z in (Z_LOSS, 0.0)]
        return [model.evaluate(micro_batches(Case(), 0, 0)).loss for model in models]

    ((with_term, without),) = fork_ranks(1, losses, timeout=60)
    assert with_term == without
