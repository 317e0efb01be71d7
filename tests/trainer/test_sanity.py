"""Every invariant is broken on purpose on one rank, through the model's public parts; the check must name the ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fourfold.parallel import ParallelModel
from fourfold.parallel.gradients import TrainedWeight
from fourfold.parallel.stage import TIED_EMBEDDING, TIED_HEAD
from fourfold.trainer import sanity
from fourfold.trainer.optimizer import make_optimizer
from fourfold.trainer.ranks import RankFailure, fork_ranks
from tests.parallel import harness

RATE = 1e-3
Break = Callable[[ParallelModel], None]


def nothing(model: ParallelModel) -> None:
    """Breaks nothing."""


def step(
    case: harness.Case,
    *,
    before_gradients: Break = nothing,
    before_weights: Break = nothing,
    rate: Callable[[int], float] = lambda rank: RATE,
    token: Callable[[int], int] = lambda rank: 0,
) -> Callable[[int], str]:
    """The work of a rank: one checked step, as the loop makes it."""

    def work(rank: int) -> str:
        model = harness.make_model(case)
        optimizer = make_optimizer(model.gradients.weights, case.plan().recipe.optimizer, tied=case.tied)
        batches = harness.micro_batches(case, 0, model.groups.grid.coordinates(rank).dp)
        batches[1][0].tokens[5] += token(rank)
        sanity.check_inputs(model, batches)
        model.forward_backward(batches)
        before_gradients(model)
        sanity.check_gradients(model)
        for group in optimizer.param_groups:
            group["lr"] = rate(rank)
        sanity.check_learning_rate(model, optimizer, RATE)
        model.gradients.hand_over()
        optimizer.step()
        model.zero_grad()
        before_weights(model)
        sanity.check_weights(model)
        return "well"

    return work


def on_rank(rank: int, change: Break) -> Break:
    return lambda model: change(model) if model.groups.rank == rank else None


def named(model: ParallelModel, name: str) -> TrainedWeight:
    return next(weight for weight in model.gradients.weights if weight.name == name)


def nudge(name: str) -> Break:
    """Changes one element by the least there is."""

    def change(model: ParallelModel) -> None:
        with torch.no_grad():
            element = named(model, name).local.view(-1)[0]
            element.copy_(torch.nextafter(element, element + 1))

    return change


def nudge_gradient(name: str) -> Break:
    def change(model: ParallelModel) -> None:
        element = named(model, name).gradient.view(-1)[:1]
        element.copy_(torch.nextafter(element, element + 1))

    return change


def forget_gradient(name: str) -> Break:
    def change(model: ParallelModel) -> None:
        named(model, name).sharded.grad = None

    return change


def leave_gathered(model: ParallelModel) -> None:
    next(iter(model.stages.values())).gather()


def average(model: ParallelModel) -> None:
    for stage in model.stages.values():
        for part in stage.fsdp_modules():
            part.set_gradient_divide_factor(2.0)


TP_DP = harness.Case(tp=2, dp=2, layers=2, nmb=2)
TIED = harness.Case(pp=3, layers=3, tied=True, nmb=2)
TIED_ALONE = harness.Case(tied=True, layers=2, v=2, nmb=2)


@pytest.mark.parametrize(
    "case",
    [
        harness.Case(layers=2),
        TIED,
        TIED_ALONE,
        harness.Case(tp=2, pp=2, layers=2, kv=1, tied=True, nmb=2),
        harness.Case(tp=2, dp=2, layers=2, zero=3, nmb=2),
        harness.Case(pp=2, v=2, layers=2, nmb=3, split=[0, 1, 1, 0], freeze=("tok_embeddings", "layers.0")),
        harness.Case(pp=2, layers=2, freeze=("layers.1", "norm", "output")),
    ],
    ids=lambda case: case.name,
)
def test_a_sound_step_passes(case: harness.Case) -> None:
    assert fork_ranks(case.world, step(case), timeout=60) == ["well"] * case.world


NORM = "layers.0.attention_norm.weight"
FAULTS: dict[str, tuple[harness.Case, dict[str, Any], set[int], str]] = {
    "different tokens over tp": (TP_DP, {"token": lambda rank: int(rank == 1)}, {0, 1}, "the tokens of the batch"),
    "different tokens over cp and pp": (
        harness.Case(cp=2, pp=2, layers=2),
        {"token": lambda rank: int(rank == 3)},
        {1, 2, 3},
        "the tokens of the batch",
    ),
    "a replicated gradient": (
        TP_DP,
        {"before_gradients": on_rank(1, nudge_gradient(NORM))},
        {0, 1},
        "the gradients of replicated weights should be equal on ranks [0, 1], but differ on [1]",
    ),
    "no gradient": (
        TP_DP,
        {"before_gradients": on_rank(3, forget_gradient("output.weight"))},
        {3},
        "output.weight is trained but received no gradient",
    ),
    "no gradient of a copy": (
        TIED,
        {"before_gradients": on_rank(2, forget_gradient(TIED_HEAD))},
        {2},
        f"{TIED_HEAD} is trained but received no gradient",
    ),
    "gathered weights": (
        TP_DP,
        {"before_gradients": leave_gathered},
        {0, 1, 2, 3},
        "stage 0: weights are still gathered: tok_embeddings.weight",
    ),
    "averaged gradients": (
        TP_DP,
        {"before_gradients": on_rank(2, average)},
        {2},
        "stage 0: FSDP would average gradients instead of adding them",
    ),
    "learning rate on one rank": (
        TP_DP,
        {"rate": lambda rank: RATE * (1 + (rank == 2))},
        {2},
        "the optimizer's learning rates are [0.002], the schedule says 0.001",
    ),
    "a replicated weight": (
        TP_DP,
        {"before_weights": on_rank(1, nudge(NORM))},
        {0, 1},
        "replicated weights should be equal on ranks [0, 1], but differ on [1]",
    ),
    "a replicated key weight": (
        harness.Case(tp=2, layers=2, kv=1),
        {"before_weights": on_rank(0, nudge("layers.1.attention.wk.weight"))},
        {0, 1},
        "replicated weights should be equal",
    ),
    "the tied head": (
        TIED,
        {"before_weights": on_rank(2, nudge(TIED_HEAD))},
        {0, 1, 2},
        "embedding and tied head should be equal on ranks [0, 2], but differ on [2]",
    ),
    "the tied head on one rank": (
        TIED_ALONE,
        {"before_weights": nudge(TIED_HEAD)},
        {0},
        "embedding and tied head differ",
    ),
    "embedding of a tied pair": (
        TIED,
        {"before_weights": on_rank(0, nudge(TIED_EMBEDDING))},
        {0, 1, 2},
        "embedding and tied head should be equal",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_its_ranks_named(fault: str) -> None:
    case, changes, ranks, message = FAULTS[fault]
    with pytest.raises(RankFailure, match=re.escape(message)) as caught:
        fork_ranks(case.world, step(case, **changes), timeout=60)
    assert "SanityError" in str(caught.value)
    assert caught.value.rank in ranks


def test_a_change_to_one_shard_is_no_fault_since_nobody_has_a_copy() -> None:
    change = on_rank(2, nudge("layers.0.attention.wq.weight"))
    assert fork_ranks(4, step(TP_DP, before_weights=change), timeout=60) == ["well"] * 4


def test_what_differs_after_a_gather_is_found() -> None:
    # FSDP's gather gives all the same; here one rank's view of it is another, as after a fault of the network.
    case = harness.Case(dp=2, layers=2)

    def work(rank: int) -> None:
        model = harness.make_model(case)
        stage = model.stages[0]
        plain = stage.gathered
        if rank == 1:
            stage.gathered = lambda: {name: weight + 1 for name, weight in plain().items()}  # type: ignore[method-assign]
        sanity.check_weights(model)

    with pytest.raises(RankFailure, match=re.escape("the gathered weights of stage 0 should be equal on ranks [0, 1]")):
        fork_ranks(2, work, timeout=60)
