"""Faults of a trainer, and changes that are none: each changes the code of the ranks, not that of the references.

What they change is looked up when ranks run, and those are forked after it. `recipe` is what shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from fourfold.layout import Shard, shards
from fourfold.model import Ops
from fourfold.parallel import Group, Groups, ParallelModel, TrainedWeight, batch, data, groups, stage
from fourfold.parallel.batch import LocalBatch
from fourfold.parallel.context import GatherKeysValues
from fourfold.parallel.data import ShardedStage
from fourfold.parallel.gradients import Gradients
from fourfold.parallel.pipeline import Message, Pipeline, StepResult, _Step
from fourfold.parallel.tensor import VocabCrossEntropy
from fourfold.trainer import beside, loop

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


@dataclass(frozen=True)
class Change:
    """What is changed, what shows it, and what the answer must say.

    Attributes:
        plant: changes the code.
        recipe: overrides of the recipe.
        at: step, kind and name of the first tensor that differs.
        ranks: on which it may be found first.
        micro_batches: in which it may.
        pattern: that must be named, by its value; another order has none.
    """

    plant: Plant
    recipe: tuple[str, ...]
    at: tuple[int, str, str]
    ranks: Sequence[int] = (0,)
    micro_batches: Sequence[int] = (0,)
    pattern: str = ""

    @property
    def name(self) -> str:
        """Of the test."""
        return self.plant.__name__


def norm_gradients_not_summed(patch: Patch) -> None:
    """The all-reduce of gradients of weights that every TP rank holds is missing."""
    patch.setattr(Gradients, "_sum_replicated", lambda self: None)


def divided_by_the_local_count(patch: Patch) -> None:
    """Every data-parallel group divides by its own number of labels."""

    def count(self: ParallelModel, micro_batches: Sequence[Any]) -> int:
        return sum(int((made.labels >= 0).sum()) for made, _ in micro_batches)

    patch.setattr(ParallelModel, "_count_valid", count)


def positions_counted_locally(patch: Patch) -> None:
    """Positions begin anew on every CP rank."""
    original = LocalBatch.of.__func__

    def of(cls: type[LocalBatch], *arguments: Any, **keywords: Any) -> LocalBatch:
        made = original(cls, *arguments, **keywords)
        made.positions = torch.arange(len(made.positions))
        return made

    patch.setattr(LocalBatch, "of", classmethod(of))


def documents_see_each_other(patch: Patch) -> None:
    """Every row is taken for one document."""

    def leaking(rows: Sequence[Sequence[int]], **keywords: Any) -> tuple[Shard, ...]:
        return shards([[sum(row)] for row in rows], **keywords)

    patch.setattr(batch, "shards", leaking)


def stale_buffer(patch: Patch) -> None:
    """What arrives for micro-batch 1 is what had arrived for micro-batch 0."""
    original, last = _Step.take, {}

    def take(self: _Step, message: Message) -> Tensor:
        arrived = original(self, message)
        if message[0] == "F":
            last.setdefault(message[1], arrived.detach().clone())
            if message[2] == 1:
                arrived = last[message[1]].clone()
        return arrived

    patch.setattr(_Step, "take", take)


def gradients_accumulated_in_bf16(patch: Patch) -> None:
    """FSDP2 sums over micro-batches and ranks in the dtype of computation."""

    def policy(**keywords: Any) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(**{**keywords, "reduce_dtype": torch.bfloat16})

    patch.setattr(data, "MixedPrecisionPolicy", policy)


def key_gradients_not_summed(patch: Patch) -> None:
    """Every CP rank takes the gradients of its keys and values from itself alone."""
    original = GatherKeysValues.backward

    def backward(ctx: Any, *grads: Tensor) -> Any:
        class Alone:
            @staticmethod
            def reduce_scatter(x: Tensor) -> Tensor:
                return x.chunk(cp.size)[cp.rank]

        cp, ctx.cp = ctx.cp, Alone
        return original(ctx, *grads)

    patch.setattr(GatherKeysValues, "backward", staticmethod(backward))


def a_micro_batch_skipped(patch: Patch) -> None:
    """Rank 1 leaves micro-batch 1 out of its gradients."""
    original = _Step.backward

    def backward(self: _Step, action: Any) -> None:
        scale = self.gradient_scale
        if self.pipeline.groups.rank == 1 and action.micro_batch == 1:
            self.gradient_scale = 0.0
        original(self, action)
        self.gradient_scale = scale

    patch.setattr(_Step, "backward", backward)


def gradients_averaged(patch: Patch) -> None:
    """FSDP2 averages over its group."""
    original = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: original(self, 2.0))


def weights_stay_gathered(patch: Patch) -> None:
    """FREE does nothing, so that the second step computes with the weights of the first."""
    patch.setattr(ShardedStage, "free", lambda self: None)


def tied_ends_not_summed(patch: Patch) -> None:
    """Embedding and head of a tied model each keep a gradient of their own."""
    patch.setattr(Gradients, "_sum_tied", lambda self: None)


def padding_is_vocabulary(patch: Patch) -> None:
    """The softmax has the padded entries in it."""
    original = VocabCrossEntropy.forward

    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, tp: Group, z_loss: float) -> Tensor:
        return original(ctx, logits, labels, tp.size * logits.shape[1], tp, z_loss)

    patch.setattr(VocabCrossEntropy, "forward", staticmethod(forward))


def norms_decay(patch: Patch) -> None:
    """Weight decay reaches the norms, too."""
    original = loop.make_optimizer

    def everything_decays(weights: Any, settings: Any, **keywords: Any) -> torch.optim.Optimizer:
        made = original(weights, settings, **keywords)
        for group in made.param_groups:
            group["weight_decay"] = settings.weight_decay
        return made

    patch.setattr(loop, "make_optimizer", everything_decays)


def copies_count_in_the_norm(patch: Patch) -> None:
    """Weights that every TP rank holds count once for each of them."""
    original = Gradients.__init__

    def counting(self: Gradients, weights: list[TrainedWeight], of: Groups, *, tied: bool) -> None:
        original(self, [replace(weight, counted=True) for weight in weights], of, tied=tied)

    patch.setattr(Gradients, "__init__", counting)


def scaled_by_micro_batches(patch: Patch) -> None:
    """The loss is divided by the number of micro-batches, which the number of labels has in it already."""
    original = Pipeline.step

    def step(self: Pipeline, schedule: Any, batches: Sequence[Any], *, gradient_scale: float) -> StepResult:
        return original(self, schedule, batches, gradient_scale=gradient_scale / len(batches))

    patch.setattr(Pipeline, "step", step)


FAULTS = [
    Change(
        norm_gradients_not_summed,
        ("layout.tp=2",),
        (1, "gradient", "layers.0.attention_norm.weight"),
        (0, 1),
        (-1,),
        "replicas differ",
    ),
    Change(
        divided_by_the_local_count,
        ("layout.dp=2",),
        (1, "arriving", "output"),
        (0, 1),
        (0,),
        "divided by a local count",
    ),
    Change(
        positions_counted_locally,
        ("layout.cp=2",),
        (1, "output", "layers.0.attention.attend"),
        (0, 1),
        (0,),
        "positions",
    ),
    Change(
        documents_see_each_other,
        ("layout.tp=2",),
        (2, "output", "layers.0.attention.attend"),
        (0, 1),
        (0, 1, 2, 3),
        "only beyond a document boundary",
    ),
    Change(
        stale_buffer,
        ("layout.pp=2",),
        (1, "output", "layers.2.attention_norm"),
        (1,),
        (1,),
        "values of another micro-batch",
    ),
    Change(
        gradients_accumulated_in_bf16,
        ("layout.dp=2", "train.dtype=bfloat16"),
        (1, "gradient", "tok_embeddings.weight"),
        (0, 1),
        (-1,),
        "a sum in low precision",
    ),
    Change(
        key_gradients_not_summed,
        ("layout.cp=2",),
        (1, "arriving", "layers.3.attention.wv"),
        (0, 1),
        (0,),
        "gradients of keys and values",
    ),
    Change(
        a_micro_batch_skipped,
        ("layout.dp=2",),
        (1, "arriving", "output"),
        (1,),
        (1,),
        "a term of the sum over micro-batches",
    ),
    Change(
        gradients_averaged, ("layout.dp=2",), (1, "gradient", "tok_embeddings.weight"), (0, 1), (-1,), "constant factor"
    ),
    Change(
        weights_stay_gathered,
        ("layout.dp=2",),
        (1, "weight", "tok_embeddings.weight"),
        (0, 1),
        (-1,),
        "only after the optimizer",
    ),
    Change(
        tied_ends_not_summed,
        ("model.tied=true", "layout.pp=2"),
        (1, "gradient", "tok_embeddings.weight"),
        (0, 1),
        (-1,),
        "replicas differ",
    ),
    Change(padding_is_vocabulary, ("layout.tp=2",), (1, "output", "cross_entropy"), (0, 1), (0,), "only padding"),
    Change(
        norms_decay, ("layout.tp=2",), (1, "weight", "tok_embeddings.weight"), (0, 1), (-1,), "only after the optimizer"
    ),
    Change(
        copies_count_in_the_norm, ("layout.tp=2",), (1, "scalar", "grad_norm"), (-1, 0), (-1,), "only the gradient norm"
    ),
    Change(scaled_by_micro_batches, ("layout.pp=2",), (1, "arriving", "output"), (1,), (0,), "constant factor"),
]


def in_the_back_ends_order(patch: Patch) -> None:
    """FSDP's sums are left to gloo, which makes them in the order of a ring."""
    original = beside.connect
    patch.setattr(beside, "connect", lambda grid, device, *, ordered: original(grid, device))


def from_the_last_rank_on(patch: Patch) -> None:
    """Sums over TP, CP and FSDP begin with the last rank."""
    original = groups.sum_in_rank_order
    for module in (groups, data):
        patch.setattr(module, "sum_in_rank_order", lambda blocks: original(blocks.flip(0)))


def from_the_last_micro_batch_on(patch: Patch) -> None:
    """Backwards, and with them the sums over micro-batches, run in the opposite order."""
    original = Pipeline.step

    def step(self: Pipeline, schedule: Any, batches: Sequence[Any], *, gradient_scale: float) -> StepResult:
        def turned(action: Any) -> Any:
            backwards = action.kind in ("B", "SEND_B", "RECV_B")
            return action._replace(micro_batch=len(batches) - 1 - action.micro_batch) if backwards else action

        other = replace(schedule, actions=tuple(tuple(map(turned, actions)) for actions in schedule.actions))
        return original(self, other, batches, gradient_scale=gradient_scale)

    patch.setattr(Pipeline, "step", step)


def gradients_of_one_input_in_another_order(patch: Patch) -> None:
    """What three consumers of a tensor say of its gradient is added from the last on (torchtitan 4312 is of this kind).

    In bf16 each of these sums is rounded.
    """
    original = stage.sharded_ops

    def turned(*arguments: Any, **keywords: Any) -> Ops:
        ops = original(*arguments, **keywords)
        return replace(ops, project=lambda x, weights: ops.project(x, weights[::-1])[::-1])

    patch.setattr(stage, "sharded_ops", turned)


ORDERS = [
    Change(in_the_back_ends_order, ("layout.dp=4",), (1, "gradient", "tok_embeddings.weight"), range(4), (-1,)),
    Change(from_the_last_rank_on, ("layout.tp=4",), (1, "output", "layers.0.attention.wo"), range(4)),
    Change(from_the_last_rank_on, ("layout.cp=4",), (1, "arriving", "layers.3.attention.wv"), range(4)),
    Change(
        from_the_last_micro_batch_on,
        ("pipeline.schedule=afab", "layout.pp=2"),
        (1, "gradient", "tok_embeddings.weight"),
        (0, 1),
        (-1,),
        "replicas differ",
    ),
    Change(
        gradients_of_one_input_in_another_order,
        ("train.dtype=bfloat16",),
        (1, "arriving", "layers.3.ffn_norm"),
        (0,),
    ),
]
