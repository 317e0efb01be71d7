"""A bad value is planted on one rank; every rank must name the same weight or module, rank and micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from fourfold.model import Ops
from fourfold.parallel import ParallelModel
from fourfold.recipe import Train
from fourfold.trainer.nonfinite import NonFinite, NonFiniteError, NonFinitePolicy, Watch, find_non_finite
from fourfold.trainer.ranks import fork_ranks
from tests.parallel import harness

Plant = Callable[[ParallelModel], None]
INF, NAN = math.inf, math.nan
FOUR = harness.Case(tp=2, pp=2, layers=2, schedule="1f1b")  # rank = tp + 2 pp: (pp1, tp1) is rank 3, and has layer 1


def parts(model: ParallelModel, name: str) -> Iterator[Tensor]:
    """This rank's part of a weight, if it has one."""
    for stage in model.stages.values():
        for found, weight in stage.module.named_parameters():
            if found == name:
                assert isinstance(weight, DTensor)
                yield weight.to_local()


def fill(rank: int, name: str, value: float, *, rows: slice = slice(0, 1)) -> Plant:
    """Sets rows of a rank's part of a weight."""

    def plant(model: ParallelModel) -> None:
        if model.groups.rank == rank:
            with torch.no_grad():
                for part in parts(model, name):
                    part[rows] = value

    return plant


def spoil(rank: int, module: str, operation: str, change: Callable[[Tensor, int], Tensor]) -> Plant:
    """Passes the output of an operation of a module on one rank through ``change(output, micro-batch)``."""

    def plant(model: ParallelModel) -> None:
        def run(plain: Callable[..., Tensor], *arguments: Any) -> Tensor:
            return change(plain(*arguments), model.groups.position.micro_batch)

        for stage in model.stages.values():
            spoiled = dict(stage.module.named_modules()).get(module)
            if spoiled is not None and model.groups.rank == rank:
                ops = spoiled.ops
                assert isinstance(ops, Ops)
                spoiled.ops = replace(ops, **{operation: partial(run, getattr(ops, operation))})

    return plant


def both(*plants: Plant) -> Plant:
    """All of them."""

    def plant(model: ParallelModel) -> None:
        for each in plants:
            each(model)

    return plant


class AddToGradient(Function):
    """``apply(x, extra)`` is x; its backward adds ``extra``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor) -> Tensor:
        ctx.extra = extra
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] + ctx.extra, None


def becomes(value: float, micro_batch: int) -> Callable[[Tensor, int], Tensor]:
    """The first element of the output of one micro-batch becomes ``value``."""

    def change(out: Tensor, now: int) -> Tensor:
        mask = torch.zeros_like(out, dtype=torch.bool)
        mask.view(-1)[0] = now == micro_batch
        return out.masked_fill(mask, value)

    return change


def grows(value: float) -> Callable[[Tensor, int], Tensor]:
    """Adds to every element."""
    return lambda out, now: out + value


def gradient_becomes(value: float, micro_batch: int) -> Callable[[Tensor, int], Tensor]:
    """Adds to the gradient of every element of the output of one micro-batch."""
    return lambda out, now: AddToGradient.apply(out, torch.full_like(out, value if now == micro_batch else 0.0))


def find(case: harness.Case, plant: Plant) -> tuple[NonFinite, str]:
    """What all ranks find, and as a sentence. The step before must really be bad, and nothing may be left behind."""

    def work(rank: int) -> tuple[NonFinite, str, float, float]:
        model = harness.make_model(case)
        batches = harness.micro_batches(case, 0, model.groups.coordinates.dp)
        plant(model)
        before = [weight.local.clone() for weight in model.gradients.weights]
        operations = [getattr(m, "ops", None) for s in model.stages.values() for m in s.module.modules()]
        totals = model.forward_backward(batches)
        norm = model.gradients.norm(case.clip_type)
        found = find_non_finite(model, batches)
        for weight, old in zip(model.gradients.weights, before, strict=True):
            assert weight.sharded.grad is None
            assert weight.local.grad is None
            assert torch.equal(weight.local.view(torch.int32), old.view(torch.int32))  # NaN equals itself there
        assert operations == [getattr(m, "ops", None) for s in model.stages.values() for m in s.module.modules()]
        assert not any(stage.gathered() for stage in model.stages.values())
        return found, found.describe(model.groups.grid), totals.loss, norm

    reports = fork_ranks(case.world, work, timeout=60)
    assert len({str(report) for report in reports}) == 1, "ranks disagree"
    found, text, loss, norm = reports[0]
    assert not NonFinitePolicy(Train()).accepts(loss, norm)
    return found, text


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_poisoned_weight_is_named_with_its_rank(value: float) -> None:
    """T108."""
    found, text = find(FOUR, fill(3, "layers.1.feed_forward.w1.weight", value))
    assert (found.kind, found.name, found.rank, found.other_ranks) == (
        "weight", "layers.1.feed_forward.w1.weight", 3, ()
    )  # fmt: skip
    kind = "NaN" if math.isnan(value) else "Inf"
    assert text == (
        "first on rank 3 (tp 1, cp 0, pp 1, dp 0): weight layers.1.feed_forward.w1.weight, already before the step: "
        f"32 {kind} of 768 values"
    )


def test_the_first_of_several_weights_is_named_also_a_frozen_one() -> None:
    case = harness.Case(tp=2, pp=2, layers=2, freeze=("tok_embeddings", "layers.0"))
    found, _ = find(case, both(fill(3, "output.weight", NAN), fill(1, "layers.0.attention.wo.weight", NAN)))
    assert (found.kind, found.name, found.rank) == ("weight", "layers.0.attention.wo.weight", 1)


def test_all_ranks_that_have_the_same_are_named() -> None:
    name = "layers.1.ffn_norm.weight"
    found, text = find(FOUR, both(fill(2, name, NAN), fill(3, name, NAN)))
    assert (found.name, found.rank, found.other_ranks) == (name, 2, (3,))
    assert text.endswith(": 1 NaN of 32 values; the same on rank 3")


def test_a_product_that_overflows() -> None:
    # 768 weights of 3e38: finite, but their product with any token's features is not.
    found, text = find(FOUR, fill(3, "layers.1.feed_forward.w1.weight", 3e38, rows=slice(None)))
    assert (found.kind, found.name, found.rank, found.other_ranks, found.micro_batch) == (
        "output", "layers.1.feed_forward.w1", 3, (), 0,
    )  # fmt: skip
    assert text.startswith(
        "first on rank 3 (tp 1, cp 0, pp 1, dp 0): output of layers.1.feed_forward.w1 in the forward of micro-batch 0: "
    )
    # 63 tokens and one of padding, half of the feed-forward's 48 features.
    assert (found.num_nan, found.num_values) == (0, 64 * 24)
    assert 0 < found.num_inf <= found.num_values


LAYOUTS: dict[str, tuple[harness.Case, int, int]] = {  # case, rank and layer
    "cp2": (harness.Case(cp=2, layers=2), 1, 0),
    "dp2 zero3": (harness.Case(dp=2, layers=2, zero=3), 1, 1),
    "dp2 cp2 zero2": (harness.Case(dp=2, cp=2, layers=2, zero=2), 3, 1),
    "pp2 v2 tied": (harness.Case(pp=2, v=2, tied=True, nmb=4), 1, 3),
    "tp2 pp2 v2": (harness.Case(tp=2, pp=2, v=2, nmb=4), 3, 1),
}
SWIGLU, ATTEND, COMBINE = ("feed_forward", "swiglu"), ("attention", "attend"), ("attention", "combine")
NAMES = {SWIGLU: "feed_forward.swiglu", ATTEND: "attention.attend", COMBINE: "attention.wo"}


@pytest.mark.parametrize(
    ("layout", "operation"),
    [
        ("cp2", ATTEND),
        ("dp2 zero3", COMBINE),
        ("dp2 cp2 zero2", SWIGLU),
        ("pp2 v2 tied", COMBINE),
        ("tp2 pp2 v2", ATTEND),
    ],
)
def test_the_first_bad_output_in_a_forward(layout: str, operation: tuple[str, str]) -> None:
    case, rank, layer = LAYOUTS[layout]
    found, _ = find(case, spoil(rank, f"layers.{layer}.{operation[0]}", operation[1], becomes(NAN, case.nmb - 1)))
    assert (found.kind, found.name) == ("output", f"layers.{layer}.{NAMES[operation]}")
    assert (found.rank, found.other_ranks, found.micro_batch) == (rank, (), case.nmb - 1)
    assert (found.num_nan, found.num_inf) == (1, 0)


@pytest.mark.parametrize(
    ("layout", "operation"),
    [
        ("cp2", ATTEND),
        ("dp2 zero3", ATTEND),
        ("dp2 cp2 zero2", SWIGLU),
        ("pp2 v2 tied", COMBINE),
        ("tp2 pp2 v2", SWIGLU),
    ],
)
def test_the_first_bad_gradient_of_a_backward_while_the_forward_is_finite(
    layout: str, operation: tuple[str, str]
) -> None:
    case, rank, layer = LAYOUTS[layout]
    found, text = find(case, spoil(rank, f"layers.{layer}.{operation[0]}", operation[1], gradient_becomes(INF, 1)))
    name = f"layers.{layer}.{NAMES[operation]}"
    # What is spoiled is part of the operation as the watch sees it: its gradient comes in finite and goes out bad.
    assert (found.kind, found.name) == ("leaving", name)
    assert (found.rank, found.other_ranks, found.micro_batch) == (rank, (), 1)
    assert f"gradient that {name} passes on in the backward of micro-batch 1" in text


def test_a_backward_that_explodes_by_itself() -> None:
    """A token that is zero and begins a document stays zero; the norms' backwards multiply by 1 / sqrt(eps) each."""
    case = harness.Case(layers=4)
    (batch, _), *_ = harness.micro_batches(case, 0, 0)

    def plant(model: ParallelModel) -> None:
        fill(0, "tok_embeddings.weight", 0.0, rows=slice(int(batch.tokens[0]), int(batch.tokens[0]) + 1))(model)
        for layer in model.stages[0].module.layers.values():
            layer.norm_eps = 1e-36

    # The feed-forward gives such a token no gradient, since silu(0) * 0 has none. What comes from the head is about 1:
    # times 1e18 in layer 3, again in layer 2, and in layer 1 it is beyond float32.
    found, _ = find(case, plant)
    assert (found.kind, found.name, found.micro_batch) == ("leaving", "layers.1.attention_norm", 0)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 2)])
def test_forward_goes_before_backward(first: int, second: int) -> None:
    """Also where a rank runs them the other way round: 1F1B has the backward of 0 before the forward of 1."""
    found, _ = find(
        FOUR,
        both(
            spoil(first, f"layers.{first // 2}.feed_forward", "swiglu", gradient_becomes(NAN, 0)),
            spoil(second, "layers.1.feed_forward", "swiglu", becomes(NAN, 1)),
        ),
    )
    assert (found.kind, found.rank, found.micro_batch) == ("output", 2, 1)


def test_micro_batches_are_in_order() -> None:
    found, _ = find(
        FOUR,
        both(
            spoil(1, "layers.0.feed_forward", "swiglu", becomes(NAN, 1)),
            spoil(2, "layers.1.feed_forward", "swiglu", becomes(NAN, 0)),
        ),
    )
    assert (found.rank, found.micro_batch) == (2, 0)


def test_the_residual_sums() -> None:
    twice = spoil(0, "layers.0.feed_forward", "combine", grows(2e38))
    found, _ = find(harness.Case(pp=2, layers=2), both(spoil(0, "layers.0.attention", "combine", grows(2e38)), twice))
    assert (found.kind, found.name, found.rank) == ("output", "layers.0", 0)
    found, _ = find(
        harness.Case(layers=2),
        both(spoil(0, "", "embed", grows(2e38)), spoil(0, "layers.0.attention", "combine", grows(2e38))),
    )
    assert (found.kind, found.name) == ("input", "layers.0.ffn_norm")


def common_token(case: harness.Case) -> int:
    """A token that is in both micro-batches of a step, once in each."""
    first, second = (batch.tokens.bincount(minlength=case.vocab) for batch, _ in harness.micro_batches(case, 0, 0))
    return int(((first == 1) & (second == 1)).nonzero()[0])


@pytest.mark.parametrize(("value", "kind"), [(2e38, "gradient"), (1e30, "norm")])
def test_what_is_finite_until_it_is_summed(value: float, kind: str) -> None:
    case = harness.Case(layers=2)
    token = common_token(case)
    tokens = [batch.tokens for batch, _ in harness.micro_batches(case, 0, 0)]

    def change(out: Tensor, now: int) -> Tensor:
        extra = torch.where((tokens[now] == token).unsqueeze(1), value, 0.0).expand_as(out)
        return AddToGradient.apply(out, extra)

    found, text = find(case, spoil(0, "", "embed", change))
    assert found.kind == kind
    if kind == "gradient":
        assert (found.name, found.num_inf) == ("tok_embeddings.weight", 32)
        assert "gradient of tok_embeddings.weight, when summed over micro-batches and ranks: 32 Inf" in text
    else:
        assert text == "every gradient is finite, but their norm is too large for float32"


def test_a_step_that_is_finite_when_repeated() -> None:
    calls = []

    def once(out: Tensor, now: int) -> Tensor:
        calls.append(now)
        return out * (NAN if len(calls) == 1 else 1.0)

    found, text = find(FOUR, spoil(2, "layers.1.feed_forward", "swiglu", once))
    assert found.kind == "none"
    assert "a fault of a machine" in text


@pytest.mark.parametrize(
    "case",
    [
        harness.Case(tp=2, pp=2, v=2, zero=3),
        harness.Case(cp=2, dp=2, tied=True, freeze=("layers.0",)),
        harness.Case(cp=4, rows=((2,), (64,)), vocab=257, layers=2),  # two ranks have nothing but padding
    ],
    ids=lambda case: case.name,
)
def test_watching_changes_no_bit_and_blames_nobody_for_a_sound_step(case: harness.Case) -> None:
    def work(rank: int) -> bool:
        model = harness.make_model(case)
        batches = harness.micro_batches(case, 0, model.groups.coordinates.dp)
        results = []
        for watch in (nullcontext(), Watch(model)):
            with watch:
                loss = model.forward_backward(batches).loss
            results.append((loss, [w.gradient.clone() for w in model.gradients.weights]))
            model.zero_grad()
        assert watch.found is None
        return results[0][0] == results[1][0] and all(map(torch.equal, results[0][1], results[1][1]))

    assert all(fork_ranks(case.world, work, timeout=60))


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_largest_element_is_nan_on_all_ranks_if_it_is_on_one(culprit: int) -> None:
    """A maximum drops a NaN or not, as the back end compares; then ranks would decide differently."""
    case = harness.Case(dp=3, layers=2, nmb=1)

    def work(rank: int) -> float:
        model = harness.make_model(case)
        model.forward_backward(harness.micro_batches(case, 0, rank))
        if rank == culprit:
            model.gradients.weights[1].gradient.view(-1)[0] = NAN
        return model.gradients.norm(INF)

    assert all(map(math.isnan, fork_ranks(3, work, timeout=60)))


def test_stop() -> None:
    policy = NonFinitePolicy(Train(non_finite="stop"))
    assert policy.accepts(1.0, 1.0)
    for bad in ((NAN, 1.0), (1.0, NAN), (INF, INF), (-INF, 1.0)):
        assert not policy.accepts(*bad)
    with pytest.raises(NonFiniteError, match=r"^step 7: loss nan, gradient norm inf: the cause$"):
        policy.refuse(7, NAN, INF, "the cause")
    assert policy.skipped == 0


def test_skip_until_too_many_in_a_row() -> None:
    policy = NonFinitePolicy(Train(non_finite="skip", max_skipped=2), skipped=5)
    for _ in range(3):  # two in a row are allowed, as often as it happens
        assert policy.refuse(7, NAN, NAN, "why") == ("step 7: loss nan, gradient norm nan: why; the step is left out")
        policy.refuse(8, NAN, NAN, "why")
        assert policy.accepts(1.0, 1.0)
    assert policy.skipped == 11
    policy.refuse(1, NAN, NAN, "why")
    policy.refuse(2, NAN, NAN, "why")
    with pytest.raises(NonFiniteError, match=r"why; 3 steps in a row were not finite, and train.max_skipped is 2"):
        policy.refuse(3, NAN, NAN, "why")
