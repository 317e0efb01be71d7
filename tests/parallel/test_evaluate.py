"""Validation: the loss without a backward, in any layout, of any number of micro-batches, and without a trace."""

from __future__ import annotations

import pytest

from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import (
    Case,
    bitwise_equal,
    make_model,
    micro_batches,
    reference,
    run,
    sequential,
    train_rank,
)

LAYOUTS = [
    Case(tp=2, cp=2),
    Case(pp=2, v=2, nmb=3, zero=1),
    Case(pp=2, dp=2, nmb=3, zero=3, tied=True),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_loss_is_that_of_one_process(case: Case) -> None:
    def work(rank: int) -> tuple[float, int]:
        model = make_model(case)
        totals = model.evaluate(micro_batches(case, 0, model.groups.coordinates.dp))
        assert all(weight.sharded.grad is None for weight in model.gradients.weights)
        assert not any(stage.gathered() for stage in model.stages.values())
        return totals.loss, totals.valid_tokens

    wanted = reference(sequential(case)).losses[0]
    reports = fork_ranks(case.world, work, timeout=60)
    assert len(set(reports)) == 1
    assert reports[0][0] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_any_number_of_micro_batches_weighs_every_label_alike(number: int) -> None:
    # pains.md T40: the mean does not depend on how the set is cut. Steps have 2 micro-batches; the set has 1 to 5.
    case = Case(pp=2, nmb=2)
    whole = Case(nmb=number)

    def work(rank: int) -> float:
        return make_model(case).evaluate(micro_batches(whole, 0, 0)).loss

    assert fork_ranks(2, work, timeout=60)[0] == pytest.approx(reference(whole).losses[0], rel=1e-6)


@pytest.mark.parametrize("zero", [1, 3])
def test_training_does_not_notice(zero: int) -> None:
    case = Case(pp=2, dp=2, nmb=2, zero=zero, steps=3)
    reports = fork_ranks(
        4,
        lambda rank: train_rank(case, lambda model, step: model.evaluate(micro_batches(case, 9, 0)) and None),
        timeout=60,
    )
    plain = run(case)
    assert reports[0].losses == plain.losses
    weights = {name: w for report in reports for name, w in report.weights.items()}
    assert bitwise_equal(type(plain)(plain.losses, [], [], weights), type(plain)(plain.losses, [], [], plain.weights))
