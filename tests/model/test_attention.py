"""Attention against a dense fp64 oracle that knows only document ids and positions, never runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from fourfold.layout import Run, Shard, describe, shards
from fourfold.model.attention import _flex, attention, gather_keys
from fourfold.model.batch import Batch, RunIndex

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
ROWS = [
    [[1]],
    [[5], [5]],
    [[4, 12], [3, 3, 8, 2]],
    [[7, 7, 1, 7, 1], [1, 22]],
]
SPLITS = [(1, "head_tail"), (2, "head_tail"), (3, "head_tail"), (2, "per_document"), (4, "per_document")]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, rows: Sequence[Sequence[int]], index: np.ndarray) -> Tensor:
    """Softmax over every key of the micro-batch that is in the query's document and not behind it; index as in
    Shard."""
    documents, positions = (torch.from_numpy(x) for x in describe(rows))
    out = torch.zeros_like(q)
    for local, token in enumerate(index):
        if token < 0:
            continue
        seen = (documents == documents[token]) & (positions <= positions[token])
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[1])
            scores = k[seen, kv_head] @ q[local, head] / math.sqrt(q.shape[2])
            out[local, head] = scores.softmax(0) @ v[seen, kv_head]
    return out


def batch_of(rows: Sequence[Sequence[int]], shard: Shard) -> Batch:
    return Batch.from_rows(torch.zeros(sum(map(sum, rows)), dtype=torch.int64), rows).take(shard)


def random_inputs(
    shard: Shard, rows: Sequence[Sequence[int]], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(length: int, num_heads: int) -> Tensor:
        return torch.randn(length, num_heads, HEAD_DIM, generator=generator, dtype=dtype, requires_grad=True)

    num_keys = sum(map(sum, rows))
    return draw(len(shard.index), HEADS), draw(num_keys, KV_HEADS), draw(num_keys, KV_HEADS)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("cp", "strategy"), SPLITS)
def test_output_and_gradients_equal_dense_attention(rows: list[list[int]], cp: int, strategy: str) -> None:
    for shard in shards(rows, cp=cp, strategy=strategy, multiple_of=2):  # pyrefly: ignore
        inputs = random_inputs(shard, rows)
        out = attention(*inputs, batch_of(rows, shard))
        expected = dense_attention(*inputs, rows, shard.index)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        assert (out[shard.num_tokens :] == 0).all()
        weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad((out * weights).sum(), inputs)
        expected_gradients = (
            torch.autograd.grad((expected * weights).sum(), inputs)
            if shard.num_tokens
            else [torch.zeros_like(x) for x in inputs]
        )
        for gradient, wanted in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-11)


def test_heads_without_grouping() -> None:
    (shard,) = shards([[3, 4]], cp=1)
    q, _, _ = random_inputs(shard, [[3, 4]])
    out = attention(q, q, q, batch_of([[3, 4]], shard))
    torch.testing.assert_close(out, dense_attention(q, q, q, [[3, 4]], shard.index), rtol=1e-12, atol=1e-12)


def test_a_rank_of_padding_only_keeps_its_inputs_in_the_graph() -> None:
    """Else its collectives would have no backward, and the other ranks would wait for ever."""
    rows = [[2]]
    shard = shards(rows, cp=4)[3]
    assert shard.num_tokens == 0
    inputs = random_inputs(shard, rows)
    out = attention(*inputs, batch_of(rows, shard))
    assert out.shape == inputs[0].shape
    assert (out == 0).all()
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert (gradient == 0).all()


def test_documents_do_not_see_each_other_bit_for_bit() -> None:
    rows = [[20, 44]]
    (shard,) = shards(rows, cp=1)
    q, k, v = random_inputs(shard, rows, torch.float32)
    before = attention(q, k, v, batch_of(rows, shard))
    with torch.no_grad():
        k[3] += 1
        v[3] += 1
    after = attention(q, k, v, batch_of(rows, shard))
    changed = (before != after).flatten(1).any(1)
    assert changed[3:20].all()
    assert not changed[:3].any()
    assert not changed[20:].any()


def varlen_in_a_loop(q: Tensor, k: Tensor, v: Tensor, index: RunIndex) -> Tensor:
    """What torch's varlen_attn computes from these arguments, causal mask aligned at the bottom right."""
    out = torch.zeros_like(q)
    query_bounds, key_bounds = pairwise(index.query_offsets.tolist()), pairwise(index.key_offsets.tolist())
    for (q0, q1), (k0, k1) in zip(query_bounds, key_bounds, strict=True):
        assert q1 - q0 <= index.longest_query
        assert k1 - k0 <= index.longest_key
        for i in range(q0, q1):
            seen = slice(k0, k1 - (q1 - 1 - i))
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // k.shape[1])
                scores = k[seen, kv_head] @ q[i, head] / math.sqrt(q.shape[2])
                out[i, head] = scores.softmax(0) @ v[seen, kv_head]
    return out


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("cp", "strategy"), SPLITS)
def test_index_of_the_cuda_kernels(rows: list[list[int]], cp: int, strategy: str) -> None:
    """The kernels themselves need a GPU (FlexAttention's forward does not); what they are given does not."""
    for shard in shards(rows, cp=cp, strategy=strategy):  # pyrefly: ignore
        num_queries = shard.num_tokens
        if num_queries == 0:
            continue  # attention() returns before any kernel
        q, k, v = random_inputs(shard, rows)
        index = batch_of(rows, shard).run_index
        expected = dense_attention(q, k, v, rows, shard.index)[:num_queries]
        if cp == 1:
            assert index.keys is None  # nothing is copied
        assert {index.query_offsets.dtype, index.key_offsets.dtype} == {torch.int32}

        # gather_keys goes through fp32 for the sum of gradients, so fp32 numbers are compared here.
        q, k, v = (x.detach().float() for x in (q[:num_queries], k, v))
        out = varlen_in_a_loop(q, gather_keys(k, index), gather_keys(v, index), index)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(_flex(q, k, v, index).double(), expected, rtol=1e-5, atol=1e-6)


def test_varlen_kernel_has_the_arguments_we_give() -> None:
    """Only its fake implementation can be called without a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fourfold.model.attention import varlen

    index = RunIndex((Run(0, 3, 0, 3), Run(3, 2, 0, 5)), torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(5, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(5, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        out = varlen(q, k, v, index)
        assert out.shape == (5, 4, 16)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert [tuple(g.shape) for g in gradients] == [(5, 4, 16), (5, 2, 16), (5, 2, 16)]


def test_gradients_of_keys_seen_twice_are_summed_in_fp32() -> None:
    """1 + 3 * 2^-8 is lost if bf16 sums (1 + 2^-8 rounds back to 1), and kept if the sum is rounded once."""
    index = RunIndex(tuple(Run(i, 1, 0, 1) for i in range(4)), torch.device("cpu"))
    key = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.tensor([1.0, 2**-8, 2**-8, 2**-8]).to(torch.bfloat16).reshape(4, 1, 1)
    gather_keys(key, index).backward(gradient)
    assert key.grad is not None
    assert key.grad.item() == torch.tensor(1 + 3 * 2**-8).to(torch.bfloat16).item() > 1
