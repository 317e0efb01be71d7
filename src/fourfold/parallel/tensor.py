"""Tensor parallelism with sequence parallelism, on local tensors with the collectives in plain sight.

Between the layers a rank holds its share of the tokens, [n / tp, D]. Attention and feed-forward gather all n tokens,
work on their share of heads or columns, and reduce-scatter back: four collectives per layer forward. The gathered
inputs are not kept for backward but gathered again: six backward. With the two other functions here that keep less than
autograd would (RMSNorm and SwiGLU), a layer of the 405B model keeps 0.54 GB per micro-batch at 8K tokens and tp 8, not
1.32. A product may keep less still: not its input, but what that can be made of (:mod:`fourfold.parallel.recompute`).

The gradients of weights may be put off (:mod:`fourfold.parallel.halves`). A layer's backward then has two gathers more,
eight in all: what LinearScatter gathers for the gradient of its input is not kept for that of its weight.

These functions are the parallel side of :class:`fourfold.model.Ops`; the model's mathematics stays in the model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from fourfold.model import Batch, Ops, Rope, attention
from fourfold.model.attention import Kernel
from fourfold.parallel.arithmetic import Arithmetic
from fourfold.parallel.batch import LocalBatch
from fourfold.parallel.context import gather_keys_values
from fourfold.parallel.groups import Group, Groups, Pending
from fourfold.parallel.halves import Half, WeightHalves
from fourfold.parallel.recompute import Policy, knows_origin, origin_of, remember
from fourfold.parallel.torch_private import LocalPart
from fourfold.recipe import ModelConfig, first_key_head


def sharded_ops(
    config: ModelConfig,
    groups: Groups,
    halves: WeightHalves,
    *,
    arithmetic: Arithmetic,
    policy: Policy,
    z_loss: float = 0.0,
) -> Ops:
    """The operations of a stage with weights split over ``groups.tp`` and tokens over ``groups.cp`` and tp.

    Args:
        config: of the model.
        groups: of this rank.
        halves: takes the gradients of weights that are put off.
        arithmetic: what runs between products and collectives.
        policy: what backward makes again.
        z_loss: factor of the term that :class:`VocabCrossEntropy` adds to what is minimised.
    """
    tp = groups.tp
    kv_head = first_key_head(config, tp=tp.size, rank=tp.rank)
    kv_rows = slice(kv_head * config.head_dim, (kv_head + 1) * config.head_dim)

    def local(weight: Tensor) -> Tensor:
        return LocalPart.apply(weight) if isinstance(weight, DTensor) else weight

    def columns(weight: Tensor) -> Tensor:
        whole = isinstance(weight, DTensor) and weight.placements[0].is_replicate()
        return local(weight)[kv_rows] if whole else local(weight)

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        weight = local(weight)
        out, rstd = LeanRMSNorm.apply(x, weight, eps, halves, arithmetic)
        return remember(out, arithmetic.scale, x, weight, rstd) if policy.norms else out

    def swiglu(a: Tensor, b: Tensor) -> Tensor:
        out = LeanSwiGLU.apply(a, b, arithmetic)
        return remember(out, arithmetic.swiglu, a, b) if policy.swiglu else out

    def combine(x: Tensor, weight: Tensor) -> Tensor:
        # Run again, a layer is needed up to the input of its last product, which is SwiGLU's: the only one that knows
        # its origin. It is a quarter of the layer's products, and its scatter a quarter of the collectives.
        last = policy.again and knows_origin(x)
        return LinearScatter.apply(x, local(weight), tp, halves, not last)

    return Ops(
        embed=lambda tokens, weight: embed(tokens, local(weight), tp, halves),
        norm=norm,
        project=lambda x, weights: GatherLinear.apply(x, tp, halves, *map(columns, weights)),
        rotate=lambda q, k, rope: Rotate.apply(q, k, rope, arithmetic),
        swiglu=swiglu,
        attend=partial(attend, cp=groups.cp),
        combine=combine,
        cross_entropy=lambda logits, labels, vocab_size: VocabCrossEntropy.apply(
            logits, labels, vocab_size, tp, z_loss
        ),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, *, cp: Group, kernel: Kernel | None = None) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks of ``cp``; ``kernel`` as for the model's."""
    assert isinstance(batch, LocalBatch)
    k, v = gather_keys_values(k, v, batch.key_order, cp)
    return attention(q, k, v, batch, kernel=kernel)


class GatherLinear(Function):
    """Gathers the tokens of all TP ranks and multiplies them with this rank's columns of one or more weights.

    ``apply(x [n / tp, D], tp, halves, *weights [out, D]) -> tuple of [n, out]``. Keeps only this rank's tokens, or what
    they can be made of.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group, halves: WeightHalves, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.make, parts = origin_of(x)
        ctx.tp, ctx.halves, ctx.num_parts = tp, halves, len(parts)
        ctx.save_for_backward(*parts, *weights)
        full = tp.all_gather(x)
        return tuple(full @ weight.t() for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        weights = saved[ctx.num_parts :]
        needs_x, _, _, *needs_weights = ctx.needs_input_grad
        tp, halves = ctx.tp, ctx.halves
        x = ctx.make(*saved[: ctx.num_parts]) if any(needs_weights) else None
        # The second gather and the scatter of dX travel while dX and dW are computed.
        gathering = tp.start_all_gather(x) if x is not None and not halves.put_off else None
        scattering = None
        if needs_x:
            grad_full = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                grad_full.addmm_(grad, weight)
            scattering = tp.start_reduce_scatter(grad_full)
        grad_weights: list[Tensor | None] = [None] * len(weights)
        needed = [i for i, need in enumerate(needs_weights) if need]
        kept = [grads[i] for i in needed]

        def products(full: Tensor) -> list[Tensor]:
            return [grad.t() @ full for grad in kept]

        if gathering is not None:
            for i, grad_weight in zip(needed, products(gathering.wait()), strict=True):
                grad_weights[i] = grad_weight
        elif needed:
            assert x is not None
            # Without its place in the graph, of which I leaves nothing: it leads back to the stage's input.
            halves.put(Half([weights[i] for i in needed], partial(tp.start_all_gather, x.detach()), products))
        return (scattering.wait() if scattering is not None else None, None, None, *grad_weights)


class LinearScatter(Function):
    """Multiplies with this rank's rows of a weight, and sums and scatters the result over the TP ranks.

    ``apply(x [n, in / tp], weight [D, in / tp], tp, halves, wanted) -> [n / tp, D]``. Keeps the input, or what it can
    be made of. Where nobody reads the result it is not ``wanted``: then it is not computed, and no number.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: Group, halves: WeightHalves, wanted: bool) -> Tensor:
        ctx.make, parts = origin_of(x)
        ctx.tp, ctx.halves = tp, halves
        ctx.save_for_backward(*parts, weight)
        if not wanted:
            return x.new_empty((x.shape[0] // tp.size, weight.shape[0]))
        return tp.reduce_scatter(x @ weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *parts, weight = ctx.saved_tensors
        tp, own = ctx.tp, grads[0]
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        x = ctx.make(*parts) if needs_weight else None
        if x is not None and ctx.halves.put_off:
            # The gradient of this rank's tokens is kept, which is tp times smaller than that of all.
            kept, x = x.detach(), None
            ctx.halves.put(Half([weight], partial(tp.start_all_gather, own), lambda full: [full.t() @ kept]))
        if x is None and not needs_x:
            return None, None, None, None, None
        full = tp.all_gather(own)
        grad_weight = full.t() @ x if x is not None else None
        return full @ weight if needs_x else None, grad_weight, None, None, None


class LeanRMSNorm(Function):
    """RMSNorm that keeps its input and one number per token.

    ``apply(x [n, D], weight [D], eps, halves, arithmetic) -> ([n, D], the number: fp32 [n, 1])``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, halves: WeightHalves, arithmetic: Arithmetic
    ) -> tuple[Tensor, Tensor]:
        ctx.halves, ctx.arithmetic = halves, arithmetic
        out, rstd = arithmetic.norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.mark_non_differentiable(rstd)
        return out, rstd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        grad_x, grad_weight = ctx.arithmetic.norm_backward(grads[0], x, weight, rstd, needs_weight)
        if needs_weight and ctx.halves.put_off:
            # It is there, from what is at hand, and so small that it only has to be added later.
            there = Pending(grad_weight, None, None)
            ctx.halves.put(Half([weight], lambda: there, lambda made: [made]))
            grad_weight = None
        return grad_x, grad_weight, None, None, None


class LeanSwiGLU(Function):
    """silu(a) * b that keeps only a and b: ``apply(a, b, arithmetic)``, each [n, ffn / tp]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, arithmetic: Arithmetic) -> Tensor:
        ctx.arithmetic = arithmetic
        ctx.save_for_backward(a, b)
        return arithmetic.swiglu(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.arithmetic.swiglu_backward(grads[0], *ctx.saved_tensors), None


class Rotate(Function):
    """Rotary embedding: ``apply(q [n, H, d], k [n, KV, d], rope, arithmetic) -> (q, k)``. Keeps the angles only."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, rope: Rope, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
        ctx.arithmetic = arithmetic
        ctx.save_for_backward(rope.cos, rope.sin)
        return arithmetic.rotate(q, k, rope.cos, rope.sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.arithmetic.rotate_backward(*grads, *ctx.saved_tensors), None, None


class Lookup(Function):
    """Rows of a table that lies split over the TP ranks, each of which is left its tokens.

    ``apply(index int64 [n], inside bool [n], table [V / tp, D], tp, halves) -> [n / tp, D]``, where ``inside`` says
    whose token an index is. The gradient of a row is summed over the tokens in fp32. In bf16 that of a frequent token
    would stop growing.
    """

    @staticmethod
    def forward(ctx: Any, index: Tensor, inside: Tensor, table: Tensor, tp: Group, halves: WeightHalves) -> Tensor:
        ctx.tp, ctx.halves = tp, halves
        ctx.save_for_backward(index, inside, table)
        return tp.reduce_scatter(F.embedding(index, table) * inside.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        index, inside, table = ctx.saved_tensors
        tp, own, num_rows, dtype = ctx.tp, grads[0], table.shape[0], table.dtype

        def sums(full: Tensor) -> list[Tensor]:
            grad = full.float() * inside.unsqueeze(1)
            # PyTorch's own backward of an embedding, which adds in one order on every device.
            return [torch.ops.aten.embedding_dense_backward(grad, index, num_rows, -1, False).to(dtype)]

        if ctx.halves.put_off:
            ctx.halves.put(Half([table], partial(tp.start_all_gather, own), sums))
            return None, None, None, None, None
        (grad_table,) = sums(tp.all_gather(own))
        return None, None, grad_table, None, None


def embed(tokens: Tensor, weight: Tensor, tp: Group, halves: WeightHalves) -> Tensor:
    """Looks up tokens [n] in a table whose entries are split over the TP ranks, [V / tp, D] -> [n / tp, D]."""
    own = tokens - tp.rank * weight.shape[0]
    inside = (own >= 0) & (own < weight.shape[0])
    return Lookup.apply(torch.where(inside, own, 0), inside, weight, tp, halves)


class VocabCrossEntropy(Function):
    """Summed cross-entropy of logits whose vocabulary is split over the TP ranks.

    ``apply(logits [n, V / tp], labels [n], vocab_size, tp, z_loss) -> fp32 scalar``, the same on all TP ranks. Labels
    of -1 count nothing, and entries from ``vocab_size`` on are padding. All that travels is one all-gather of three
    numbers per token and rank; no rank ever holds the logits of the whole vocabulary.

    The gradient is that of the cross-entropy plus ``z_loss`` * log(Z)^2, where Z is the softmax's normaliser: PaLM's
    z-loss, which keeps logits from drifting (Chowdhery et al. 2022, section 5). The value is the cross-entropy alone,
    so that what is logged means the same with and without it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, tp: Group, z_loss: float) -> Tensor:
        start = tp.rank * logits.shape[1]
        num_real = max(0, min(logits.shape[1], vocab_size - start))
        values = logits.to(torch.float32, copy=True)
        values[:, num_real:] = float("-inf")
        own = labels - start
        inside = (own >= 0) & (own < logits.shape[1])
        own = torch.where(inside, own, 0)
        # A rank whose whole share is padding has the maximum -inf, which must not meet itself in a subtraction.
        peak = values.amax(1).clamp_min(torch.finfo(torch.float32).min)
        mass = torch.exp(values - peak.unsqueeze(1)).sum(1)
        target = torch.where(inside, values.gather(1, own.unsqueeze(1)).squeeze(1), 0.0)
        shares = tp.all_gather(torch.stack((peak, mass, target)).unsqueeze(0))
        peaks, masses, targets = shares.unbind(1)
        top = peaks.amax(0)
        log_total = top + torch.log((masses * torch.exp(peaks - top)).sum(0))
        valid = labels >= 0
        ctx.save_for_backward(logits, own, inside, valid, log_total)
        ctx.num_real, ctx.z_loss = num_real, z_loss
        return torch.where(valid, log_total - targets.sum(0), 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, own, inside, valid, log_total = ctx.saved_tensors
        grad = torch.exp(logits.float() - log_total.unsqueeze(1))
        grad[:, ctx.num_real :] = 0.0
        if ctx.z_loss:
            grad *= (1 + 2 * ctx.z_loss * log_total).unsqueeze(1)  # d log(Z) is the softmax
        grad.scatter_add_(1, own.unsqueeze(1), -inside.to(grad.dtype).unsqueeze(1))
        grad *= (valid * grads[0]).unsqueeze(1)
        return grad.to(logits.dtype), None, None, None, None
