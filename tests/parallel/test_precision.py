"""A sum of every kind, through the code that makes it: 256 + 1 is 257 in fp32, and 256 in bf16.

Where the sum itself is rounded to bf16 at its end, three ones are added: 259 becomes 260, where bf16 would stay at 256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.layout import Grid, Run
from fourfold.model.attention import Overlapping
from fourfold.parallel import ParallelModel, connect
from fourfold.parallel.arithmetic import Arithmetic
from fourfold.parallel.batch import LocalBatch
from fourfold.parallel.context import gather_keys_values
from fourfold.parallel.groups import Group
from fourfold.parallel.halves import WeightHalves
from fourfold.parallel.pipeline import StepResult
from fourfold.parallel.tensor import GatherLinear, LeanRMSNorm, LinearScatter, embed
from fourfold.parallel.torch_private import LocalPart
from fourfold.planner import precisions
from fourfold.recipe import Optimizer
from fourfold.trainer.optimizer import make_optimizer
from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import Case, make_model, micro_batches

BF16 = torch.bfloat16
Factors = Callable[[ParallelModel, int, int], float]


def weighted(model: ParallelModel, factor: Factors) -> None:
    """Makes every stage the sum of its weights times ``factor(model, stage, micro-batch)``: the gradient of each weight
    is that, and what comes from the stage behind passes through. A layer stays a module, for FSDP gathers each in
    ZeRO-3."""
    last = model.plan.grid.pp * model.plan.schedule.v - 1

    for index, stage in model.stages.items():

        def more(x: Tensor, weights: Iterable[Tensor], index: int = index) -> Tensor:
            scale = factor(model, index, model.groups.position.micro_batch)
            for weight in weights:
                x = x + LocalPart.apply(weight).sum() * scale
            return x

        def forward(
            x: Tensor, batch: Any, *, index: int = index, module: Any = stage.module, more: Any = more
        ) -> Tensor:
            total = x[0, 0] if x.is_floating_point() else torch.zeros((), dtype=BF16)
            total = more(total, [w for name, w in module.named_parameters() if not name.startswith("layers.")])
            for layer in module.layers.values():
                total = layer(total)
            if index == last:
                return total.float()
            tokens = x.shape[0] if x.is_floating_point() else x.shape[0] // model.groups.tp.size
            out = total.new_zeros((tokens, model.plan.config.dim))
            return out.index_put((torch.tensor(0), torch.tensor(0)), total)

        stage.module.forward = forward
        for layer in stage.module.layers.values():
            layer.forward = lambda x, layer=layer, more=more: more(x, layer.parameters())


def gradients(case: Case, factor: Factors) -> list[dict[str, Tensor]]:
    """Of one step in bf16 on every rank: the local parts of all gradients, by name."""

    def work(rank: int) -> dict[str, Tensor]:
        model = make_model(case)
        weighted(model, factor)
        batches = micro_batches(case, 0, model.groups.coordinates.dp)
        grid = model.groups.grid
        local = [
            LocalBatch.of(b, rows, cp=grid.cp, cp_rank=model.groups.cp.rank, tp=grid.tp, cp_split="head_tail")
            for b, rows in batches
        ]
        model.pipeline.step(model.plan.schedule, local, gradient_scale=1.0)
        model.gradients.finish()
        assert all(weight.gradient.dtype == torch.float32 for weight in model.gradients.weights)
        return {weight.name: weight.gradient.clone() for weight in model.gradients.weights}

    return fork_ranks(case.world, work, timeout=60)


def first_is_large(model: ParallelModel, stage: int, micro_batch: int) -> float:
    """256 for the first micro-batch of the first data-parallel rank, else 1."""
    return 256.0 if (model.groups.fsdp.rank, micro_batch) == (0, 0) else 1.0


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_micro_batches_add_up_in_fp32(zero: int, schedule: str) -> None:
    """T94, T95: in every ZeRO mode, on one rank and over two, whose reduction has 257 to add to 2."""
    case = Case(nmb=2, layers=2, zero=zero, schedule=schedule, dtype="bfloat16")
    for grads in gradients(case, first_is_large):
        assert all((grad == 257).all() for grad in grads.values())


@pytest.mark.parametrize(
    ("zero", "layout"), [(1, {"dp": 2}), (2, {"dp": 2}), (3, {"dp": 2}), (1, {"cp": 2}), (3, {"dp": 2, "pp": 2})]
)
def test_fsdp_reduces_in_fp32(zero: int, layout: dict[str, int]) -> None:
    case = Case(nmb=2, layers=2, zero=zero, dtype="bfloat16", **layout)
    for grads in gradients(case, first_is_large):
        assert all((grad == 259).all() for grad in grads.values())


@pytest.mark.parametrize("zero", [2, 3])
def test_reduced_gradients_add_up_in_fp32(zero: int) -> None:
    """ZeRO-2 with two rounds reduces twice, ZeRO-3 four times: sums of shards."""
    case = Case(dp=2, v=2, nmb=4, nc=2, schedule="flexible", layers=2, zero=zero, dtype="bfloat16")
    plan = case.plan()
    if zero == 2:
        assert plan.schedule.reduce_scatters == (4,)
        assert "sum over reductions, sharded" in {row.what for row in precisions(plan)}
    for grads in gradients(case, first_is_large):
        assert all((grad == 263).all() for grad in grads.values())


def test_weights_that_tensor_ranks_share_are_summed_in_fp32() -> None:
    """Norms, and here wk and wv, which two of four ranks each have whole."""
    case = Case(tp=4, kv=2, layers=2, nmb=1, dtype="bfloat16")

    def by_tensor_rank(model: ParallelModel, stage: int, micro_batch: int) -> float:
        return 256.0 if model.groups.tp.rank == 0 else 1.0

    for grads in gradients(case, by_tensor_rank):
        assert (grads["norm.weight"] == 259).all()
        assert (grads["layers.0.attention_norm.weight"] == 259).all()
        assert (grads["layers.1.attention.wk.weight"] == 259).all()
        assert set(grads["layers.1.feed_forward.w1.weight"].flatten().tolist()) <= {256.0, 1.0}


@pytest.mark.parametrize("layout", [{"v": 2}, {"pp": 2}])
def test_both_ends_of_a_tied_embedding_are_summed_in_fp32(layout: dict[str, int]) -> None:
    case = Case(tied=True, layers=2, nmb=1, dtype="bfloat16", **layout)
    ends = [
        grads[name]
        for grads in gradients(case, lambda model, stage, micro_batch: 256.0 if stage == 0 else 1.0)
        for name in ("tok_embeddings.weight", "output.weight")
        if name in grads
    ]
    assert len(ends) == 2
    assert all((end == 257).all() for end in ends)


def large_on_rank_0(group: Group, *shape: int) -> Tensor:
    return torch.full(shape, 256.0 if group.rank == 0 else 1.0, dtype=BF16)


def test_reduce_scatters_of_tensor_parallelism_add_in_fp32() -> None:
    """Forward of the products back into the hidden state, backward of those out of it: 259 is 260 in bf16."""

    def work(rank: int) -> tuple[Tensor, Tensor]:
        tp = connect(Grid(tp=4), "cpu").tp
        scattered = LinearScatter.apply(
            large_on_rank_0(tp, 8, 1), torch.ones(3, 1, dtype=BF16), tp, WeightHalves(), True
        )
        x = torch.ones(2, 3, dtype=BF16, requires_grad=True)
        (y,) = GatherLinear.apply(x, tp, WeightHalves(), torch.ones(1, 3, dtype=BF16))
        y.backward(large_on_rank_0(tp, 8, 1))
        assert x.grad is not None
        return scattered, x.grad

    for scattered, grad in fork_ranks(4, work, timeout=60):
        assert scattered.dtype == grad.dtype == BF16
        assert (scattered == 260).all()
        assert (grad == 260).all()


def test_keys_and_values_of_context_parallelism_add_in_fp32() -> None:
    def work(rank: int) -> Tensor:
        cp = connect(Grid(cp=4), "cpu").cp
        k, v = (torch.ones(2, 1, 4, dtype=BF16, requires_grad=True) for _ in range(2))
        keys, values = gather_keys_values(k, v, torch.arange(8), cp)
        torch.autograd.backward([keys, values], [large_on_rank_0(cp, 8, 1, 4)] * 2)
        assert k.grad is not None
        assert v.grad is not None
        return torch.cat((k.grad, v.grad))

    for grads in fork_ranks(4, work, timeout=60):
        assert grads.dtype == BF16
        assert (grads == 260).all()


def test_keys_that_several_runs_see_add_in_fp32() -> None:
    """On one rank: the pieces of a document that context parallelism has left it."""
    keys = torch.ones(4, 1, 2, dtype=BF16, requires_grad=True)
    runs = [Run(query_start=i, query_length=1, key_start=0, key_length=4) for i in range(4)]
    parts = Overlapping.apply(keys, runs)
    torch.autograd.backward(parts, [torch.full_like(part, 256.0 if i == 0 else 1.0) for i, part in enumerate(parts)])
    assert keys.grad is not None
    assert (keys.grad == 260).all()


def test_a_token_that_comes_again_adds_to_its_row_in_fp32() -> None:
    def work(rank: int) -> Tensor:
        tp = connect(Grid(), "cpu").tp
        table = torch.zeros(3, 2, dtype=BF16, requires_grad=True)
        embed(torch.tensor([1, 1, 1, 1]), table, tp, WeightHalves()).backward(column(256, 1, 1, 1).expand(4, 2))
        assert table.grad is not None
        return table.grad

    (grad,) = fork_ranks(1, work, timeout=60)
    assert grad.tolist() == [[0, 0], [260, 260], [0, 0]]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=BF16).unsqueeze(1)


def test_a_norm_adds_over_tokens_and_channels_in_fp32() -> None:
    """The gradient of its weight over tokens; the mean square over channels, which in bf16 would stay at 256."""
    weight = torch.ones(2, dtype=BF16, requires_grad=True)
    out, _ = LeanRMSNorm.apply(torch.ones(4, 2, dtype=BF16), weight, 0.0, WeightHalves(), Arithmetic())
    out.backward(column(256, 1, 1, 1).expand(4, 2))
    assert weight.grad is not None
    assert (weight.grad == 260).all()
    _, rstd = Arithmetic().norm(torch.tensor([[16.0, *[1.0] * 255]], dtype=BF16), torch.ones(256, dtype=BF16), 0.0)
    assert rstd.dtype == torch.float32
    assert rstd.item() == pytest.approx((511 / 256) ** -0.5, rel=1e-6)


def test_a_matrix_product_adds_in_fp32() -> None:
    assert (column(256, 1, 1, 1).t() @ torch.ones(4, 1, dtype=BF16)).item() == 260


def test_norm_and_loss_add_in_fp64() -> None:
    """2^24 + 1 has no place in fp32."""

    def work(rank: int) -> tuple[float, float]:
        model = make_model(Case(dp=2, layers=2, nmb=1, dtype="bfloat16"))
        for weight in model.gradients.weights:
            weight.sharded.grad = torch.zeros_like(weight.sharded)
        for value, name in ((4096.0, "norm.weight"), (1.0, "output.weight")):
            (weight,) = (weight for weight in model.gradients.weights if weight.name == name)
            grad = weight.sharded.grad
            assert isinstance(grad, DTensor)
            if rank == 0:
                grad._local_tensor.view(-1)[0] = value
        losses = torch.tensor([2.0**24, 1.0]) if rank == 0 else torch.tensor([1.0])
        return model.gradients.norm() ** 2, model._total_loss([StepResult(losses, ())])

    for squared, loss in fork_ranks(2, work, timeout=60):
        assert squared == pytest.approx(2**24 + 1, rel=1e-9)
        assert loss == 2**24 + 2


@pytest.mark.parametrize("settings", [Optimizer(), Optimizer(name="sgd", momentum=0.9)])
def test_the_optimizer_holds_fp32(settings: Optimizer) -> None:
    def work(rank: int) -> list[torch.dtype]:
        model = make_model(Case(layers=2, nmb=1, dtype="bfloat16"))
        model.forward_backward(micro_batches(Case(layers=2, nmb=1), 0, 0))
        optimizer = make_optimizer(model.gradients.weights, settings, tied=False)
        model.gradients.hand_over()
        optimizer.step()
        kept: Sequence[Any] = [value for state in optimizer.state.values() for value in state.values()]
        return [value.dtype for value in (*kept, *(weight.local for weight in model.gradients.weights))]

    (dtypes,) = fork_ranks(1, work, timeout=60)
    assert set(dtypes) == {torch.float32}
