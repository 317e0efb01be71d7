"""The schedule by hand, which weights decay, and our step over parts against torch.optim over the whole model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fourfold.model import Llama, initialise
from fourfold.parallel.gradients import TrainedWeight
from fourfold.parallel.stage import TIED_EMBEDDING, TIED_HEAD
from fourfold.recipe import Optimizer
from fourfold.trainer.optimizer import learning_rate, make_optimizer
from fourfold.trainer.ranks import fork_ranks
from tests.parallel import harness

ADAMW = Optimizer(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_norm=0.0)


def rates(steps: int, **settings: Any) -> list[float]:
    return [learning_rate(s, steps=steps, settings=Optimizer(**settings)) for s in range(steps)]


def test_warm_up_then_cosine_to_the_floor_at_the_last_step() -> None:
    found = rates(9, lr=8.0, warmup_steps=4, min_lr_ratio=0.25)
    # Cosine from 8 to 2 over steps 4..8: 5 + 3 cos(0, 45, 90, 135, 180 degrees).
    assert found == pytest.approx([2, 4, 6, 8, 8, 5 + 4.5**0.5, 5, 5 - 4.5**0.5, 2])


def test_linear_to_the_floor_at_the_last_step() -> None:
    found = rates(9, lr=8.0, warmup_steps=4, min_lr_ratio=0.25, schedule="linear")
    assert found == pytest.approx([2, 4, 6, 8, 8, 6.5, 5, 3.5, 2])


def test_wsd_is_constant_until_its_last_steps() -> None:
    found = rates(9, lr=8.0, warmup_steps=2, min_lr_ratio=0.25, schedule="wsd", decay_steps=4)
    assert found == pytest.approx([4, 8, 8, 8, 8, 6.5, 5, 3.5, 2])
    # It begins at the peak, even where warm-up and decay fill the run.
    assert rates(4, lr=1.0, schedule="wsd", decay_steps=4, min_lr_ratio=0.25) == pytest.approx([1, 0.75, 0.5, 0.25])


def test_wsd_decays_in_the_last_tenth_of_the_run_unless_told_otherwise() -> None:
    found = rates(27, lr=1.0, min_lr_ratio=0.0, schedule="wsd")
    assert found == pytest.approx([1.0] * 25 + [0.5, 0.0])
    assert rates(3, lr=1.0, min_lr_ratio=0.0, schedule="wsd") == pytest.approx([1, 1, 0])
    # A warm-up that reaches into it ends at the peak all the same: the rate never jumps down.
    assert rates(20, lr=1.0, min_lr_ratio=0.0, schedule="wsd", warmup_steps=19)[17:] == pytest.approx([18 / 19, 1, 1])


def test_constant_after_the_warm_up_has_no_floor() -> None:
    found = rates(6, lr=8.0, warmup_steps=2, min_lr_ratio=0.25, schedule="constant")
    assert found == [4, 8, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 1e-8), (3_999, 4e-5), (7_999, 8e-5), (8_000, 8e-5),
        (8_000 + 1_191_999 // 3, 0.75 * 8e-5 + 0.25 * 8e-7),  # 60 degrees into the half wave: 1/2 (1 + 1/2)
        (8_000 + 2 * 1_191_999 // 3, 0.25 * 8e-5 + 0.75 * 8e-7),
        (1_199_999, 8e-7),
    ],
)  # fmt: skip
def test_the_rates_that_llama_3_405b_was_trained_with(step: int, rate: float) -> None:
    """Llama 3's report, section 3.4.1: peak 8e-5, warm-up of 8,000 steps, cosine to 8e-7 over 1,200,000 steps."""
    settings = Optimizer(lr=8e-5, warmup_steps=8_000, min_lr_ratio=0.01)
    assert learning_rate(step, steps=1_200_000, settings=settings) == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_schedules_at_the_edges(schedule: str) -> None:
    assert rates(3, lr=1.0, min_lr_ratio=1.0, schedule=schedule) == [1.0] * 3
    assert rates(2, lr=1.0, warmup_steps=4, schedule=schedule) == [0.25, 0.5]  # the run ends within the warm-up
    whole = rates(3, lr=1.0, warmup_steps=3, min_lr_ratio=0.1, schedule=schedule)
    assert whole == pytest.approx([1 / 3, 2 / 3, 1])


def test_the_shortest_runs() -> None:
    assert rates(3, lr=1.0, min_lr_ratio=0.0) == pytest.approx([1, 0.5, 0])
    assert rates(1, lr=1.0) == [1.0]


def weight(name: str, *shape: int) -> TrainedWeight:
    parameter = nn.Parameter(torch.ones(*shape))
    return TrainedWeight(name, parameter, nn.Parameter(parameter.detach()), replicated=False, counted=True)


@pytest.mark.parametrize(
    ("tied", "decay_all", "wanted"),
    [
        (False, False, [0.0, 0.1, 0.0, 0.1]),
        (True, False, [0.0, 0.1, 0.0, 0.0]),
        (False, True, [0.1] * 4),
        (True, True, [0.1] * 4),
    ],
)
def test_norms_and_embedding_are_not_decayed_nor_a_tied_head_unless_asked(
    tied: bool, decay_all: bool, wanted: list[float]
) -> None:
    weights = [
        weight(TIED_EMBEDDING, 4, 2), weight("layers.0.attention.wq.weight", 2, 2), weight("norm.weight", 2),
        weight(TIED_HEAD, 4, 2),
    ]  # fmt: skip
    optimizer = make_optimizer(weights, msgspec.structs.replace(ADAMW, decay_all=decay_all), tied=tied)
    decayed = {
        id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]
    }
    assert [decayed[id(w.local)] for w in weights] == wanted
    assert all((g["betas"], g["eps"]) == (ADAMW.betas, ADAMW.eps) for g in optimizer.param_groups)


def test_sgd_and_a_rank_with_nothing_to_train() -> None:
    optimizer = make_optimizer([weight("norm.weight", 2)], Optimizer(name="sgd", momentum=0.5), tied=False)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == 0.5
    empty = make_optimizer([], ADAMW, tied=False)
    empty.step()
    assert [group["lr"] for group in empty.param_groups] == [ADAMW.lr]  # the loop sets rates, the checks read them


def test_adamw_is_its_formula() -> None:
    """Loshchilov and Hutter 2019, algorithm 2, with the decay times the rate of the step; by hand in fp64."""
    settings = Optimizer(lr=0.02, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, warmup_steps=2, clip_norm=0.0)
    parts = [weight("layers.0.attention.wq.weight", 7, 3), weight("norm.weight", 5)]
    optimizer = make_optimizer(parts, settings, tied=False)
    wanted = [part.local.detach().double().numpy() for part in parts]
    first, second = ([np.zeros_like(p) for p in wanted] for _ in range(2))
    generator = np.random.default_rng(3)
    for step in range(6):
        rate = learning_rate(step, steps=6, settings=settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for i, (part, decay) in enumerate(zip(parts, (0.1, 0.0), strict=True)):
            # Also tiny ones, next to which eps counts.
            gradient = generator.normal(size=wanted[i].shape) * 10.0 ** generator.integers(-8, 2, wanted[i].shape)
            part.local.grad = torch.from_numpy(gradient).float()
            gradient = part.local.grad.double().numpy()
            first[i] = 0.9 * first[i] + 0.1 * gradient
            second[i] = 0.95 * second[i] + 0.05 * gradient**2
            mean, square = first[i] / (1 - 0.9 ** (step + 1)), second[i] / (1 - 0.95 ** (step + 1))
            wanted[i] = wanted[i] - rate * decay * wanted[i] - rate * mean / (np.sqrt(square) + 1e-6)
        optimizer.step()
    for part, value in zip(parts, wanted, strict=True):
        np.testing.assert_allclose(part.local.detach().numpy(), value, rtol=2e-6)


def test_a_bf16_run_keeps_weights_and_moments_in_fp32() -> None:
    case = harness.Case(dtype="bfloat16", layers=2)

    def kinds(rank: int) -> set[tuple[str, torch.dtype]]:
        model = harness.make_model(case)
        optimizer = make_optimizer(model.gradients.weights, ADAMW, tied=False)
        model.forward_backward(harness.micro_batches(case, 0, 0))
        model.gradients.hand_over()
        optimizer.step()
        found = {(name, t.dtype) for state in optimizer.state.values() for name, t in state.items()}
        return found | {("weight", w.local.dtype) for w in model.gradients.weights}

    (found,) = fork_ranks(1, kinds, timeout=60)
    assert found == {(name, torch.float32) for name in ("weight", "step", "exp_avg", "exp_avg_sq")}


def adamw_weights(case: harness.Case) -> dict[str, Tensor]:
    """What our optimizer makes of one rank's parts."""
    model = harness.make_model(case)
    optimizer = make_optimizer(model.gradients.weights, ADAMW, tied=case.tied)
    group = model.groups.grid.coordinates(model.groups.rank).dp
    for step in range(case.steps):
        model.forward_backward(harness.micro_batches(case, step, group))
        model.gradients.hand_over()
        optimizer.step()
        model.zero_grad()
    found = {name: tensor for name, tensor in model.whole_weights() if tensor is not None}
    for part in model.gradients.weights:
        if part.name in (TIED_EMBEDDING, TIED_HEAD):
            rank = SimpleNamespace(**model.groups.grid.coordinates(model.groups.rank)._asdict())
            found[f"{part.name} tp{rank.tp} dp{rank.dp}"] = part.local.detach().clone()
    return found


def adamw_reference(case: harness.Case) -> dict[str, Tensor]:
    """torch.optim.AdamW on the plain model, one group of parameters that decay and one that do not."""
    model = Llama(replace(case.plan().config, vocab_multiple=1))
    initialise(model, harness.SEED)
    named = dict(model.named_parameters())
    still = [n for n in named if n.endswith("norm.weight") or n == TIED_EMBEDDING]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if n not in still], "weight_decay": ADAMW.weight_decay},
            {"params": [named[n] for n in still], "weight_decay": 0.0},
        ],
        lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps,
    )  # fmt: skip
    for step in range(case.steps):
        batches = [b for group in range(case.dp) for b, _ in harness.micro_batches(case, step, group)]
        count = sum(int((cast(Tensor, b.labels) >= 0).sum()) for b in batches)
        torch.stack([model(b.tokens, b) for b in batches]).sum().div(count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in named.items()}


@pytest.mark.parametrize(("tied", "steps"), [(False, 1), (True, 5)])
def test_adamw_over_parts_equals_adamw_over_the_model(tied: bool, steps: int) -> None:
    case = harness.Case(tp=2, pp=2, dp=2, tied=tied, steps=steps, layers=2)
    ranks = fork_ranks(case.world, lambda rank: adamw_weights(case), timeout=120)
    merged = {name: tensor for found in ranks for name, tensor in found.items()}
    start = Llama(replace(case.plan().config, vocab_multiple=1))
    initialise(start, harness.SEED)
    initial = dict(start.named_parameters())
    for name, wanted in adamw_reference(case).items():
        found = merged[name][: wanted.shape[0]]
        # What a step changes, relative to its size. AdamW divides a gradient by itself, so that an element whose
        # gradient is next to nothing carries its rounding error: hence 1e-3 and not 1e-5.
        change, difference = wanted - initial[name], found - wanted
        assert difference.norm() <= 1e-3 * change.norm(), name
    if tied:
        for tp in (0, 1):
            for dp in (0, 1):
                ends = [merged[f"{name} tp{tp} dp{dp}"] for name in (TIED_EMBEDDING, TIED_HEAD)]
                assert torch.equal(*ends)
