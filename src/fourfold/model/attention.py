"""Causal attention inside documents: one function, and behind it a kernel for each device and dtype.

Which query sees which key comes from `Batch.runs` alone, whatever the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fourfold.layout import Run
from fourfold.model.batch import Batch, RunIndex, see_only_themselves

Kernel = Callable[[Tensor, Tensor, Tensor, RunIndex], Tensor]
"""(q, k, v, runs) -> [queries, H, d]; as :func:`attention`, of queries that all see something."""


def attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, *, kernel: Kernel | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for every run of the batch; zero for queries that are padding.

    q: [n, H, d], the queries of this rank in local order. k, v: [N, KV, d], the tokens of the whole micro-batch in
    global order (N = n without context parallelism); query head h reads key head h // (H / KV). Returns [n, H, d].
    kernel: default the one for q's device and dtype.

    q, k and v are in the autograd graph of the result even if there is no run: their gradients come from collectives
    that every rank must take part in.
    """
    runs = batch.runs
    if not runs:
        return q.new_zeros(q.shape) + (q[:0].sum() + k[:0].sum() + v[:0].sum())
    num_queries = runs[-1].query_start + runs[-1].query_length
    queries = q[:num_queries]
    if kernel is not None:
        out = kernel(queries, k, v, batch.run_index)
    elif not q.is_cuda:
        out = _sdpa(queries, k, v, runs)
    elif q.dtype in (torch.bfloat16, torch.float16):
        out = varlen(queries, k, v, batch.run_index)
    else:
        out = _flex(queries, k, v, batch.run_index, kernel=_compiled_flex_attention())
    # Padded by nothing it would be a copy, and both be kept for backward.
    return F.pad(out, (0, 0, 0, 0, 0, q.shape[0] - num_queries)) if num_queries < q.shape[0] else out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, runs: Sequence[Run]) -> Tensor:
    """CPU: one scaled_dot_product_attention per shape of run, so that many documents of one length cost one call."""
    query_parts = q.split([run.query_length for run in runs])
    key_parts, value_parts = _parts(k, runs), _parts(v, runs)
    same_shape: dict[tuple[int, int], list[int]] = {}
    for i, run in enumerate(runs):
        same_shape.setdefault((run.query_length, run.key_length), []).append(i)

    results: list[Tensor] = [q] * len(runs)
    for (query_length, key_length), members in same_shape.items():
        square = query_length == key_length
        # is_causal draws its triangle from the top left corner; queries that begin inside a document need it at the
        # bottom right.
        mask = None if square else _bottom_right(query_length, key_length, q.device)
        out = F.scaled_dot_product_attention(
            _stack(query_parts, members),
            _stack(key_parts, members),
            _stack(value_parts, members),
            attn_mask=mask,
            is_causal=square,
            # Measured faster than repeating k and v for the query heads, forward and backward.
            enable_gqa=q.shape[1] != k.shape[1],
        )
        for i, part in zip(members, out.transpose(1, 2).unbind(), strict=True):
            results[i] = part
    return torch.cat(results) if len(results) > 1 else results[0]


def _parts(x: Tensor, runs: Sequence[Run]) -> Sequence[Tensor]:
    """The keys (or values) of each run. They may overlap under context parallelism only."""
    lengths = [run.key_length for run in runs]
    if see_only_themselves(runs):
        # One cat in backward, instead of a sum of as many zero-padded tensors as there are runs.
        return x[: sum(lengths)].split(lengths)
    return Overlapping.apply(x, runs)


class Overlapping(Function):
    """The keys (or values) of each run, which may have some in common: ``apply(x [N, KV, d], runs) -> tuple of views``.

    The gradient of a key that two runs see is their sum in fp32. Autograd's own would be rounded at each of them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, runs: Sequence[Run]) -> tuple[Tensor, ...]:
        ctx.runs, ctx.length = runs, x.shape[0]
        return tuple(x[run.key_start : run.key_start + run.key_length] for run in runs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        dtype, wide = grads[0].dtype, torch.promote_types(grads[0].dtype, torch.float32)
        total = grads[0].new_zeros((ctx.length, *grads[0].shape[1:]), dtype=wide)
        for run, grad in zip(ctx.runs, grads, strict=True):
            total[run.key_start : run.key_start + run.key_length] += grad
        return total.to(dtype), None


def _stack(parts: Sequence[Tensor], members: Sequence[int]) -> Tensor:
    """[number of members, heads, length, d]"""
    if len(members) == 1:
        return parts[members[0]].unsqueeze(0).transpose(1, 2)
    return torch.stack([parts[i] for i in members]).transpose(1, 2)


def _bottom_right(query_length: int, key_length: int, device: torch.device) -> Tensor:
    return torch.ones(query_length, key_length, dtype=torch.bool, device=device).tril(key_length - query_length)


def varlen(q: Tensor, k: Tensor, v: Tensor, index: RunIndex) -> Tensor:
    """CUDA, bf16 and fp16: the FlashAttention kernel for sequences of different lengths; its causal mask is aligned
    bottom-right."""
    from torch.nn.attention.varlen import varlen_attn  # registers CUDA operators: only where they are wanted

    out = varlen_attn(
        q,
        gather_keys(k, index),
        gather_keys(v, index),
        index.query_offsets,
        index.key_offsets,
        index.longest_query,
        index.longest_key,
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)  # a tuple only where auxiliary outputs are asked for
    return out


def gather_keys(x: Tensor, index: RunIndex) -> Tensor:
    """The keys (or values) of every run, one after another, as `RunIndex.key_offsets` counts them.

    A token that two runs see is there twice; its gradient is their sum, made in fp32.
    """
    return x if index.keys is None else x.float().index_select(0, index.keys).to(x.dtype)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, index: RunIndex, *, kernel: Callable[..., Tensor] = flex_attention
) -> Tensor:
    """CUDA, fp32: FlexAttention. (On CPU it has no backward, torch 2.13.)"""
    first_key, last_key = index.first_key, index.last_key

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_key[query]) & (key <= last_key[query])

    mask = create_block_mask(visible, None, None, q.shape[0], k.shape[0], device=q.device)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = kernel(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    """Uncompiled, FlexAttention writes out the whole matrix of scores."""
    return torch.compile(flex_attention)
