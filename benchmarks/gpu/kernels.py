"""The attention kernels of this device against a dense oracle in fp64 that knows documents and positions, never runs.

Micro-batches of random documents, whole and as every rank of context parallelism has them, by either split. On a GPU a
bf16 run attends with the varlen kernel and an fp32 run with FlexAttention; on a CPU both use
scaled_dot_product_attention, and FlexAttention has a forward only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fourfold.layout import PackedTokens, Shard, shards
from fourfold.layout.documents import Strategy
from fourfold.model import Batch
from fourfold.model.attention import _flex, attention
from gpu.part import Figures, Part
from gpu.sizes import Sizes

Attend = Callable[[Tensor, Tensor, Tensor, Batch], Tensor]

BOUNDS = {torch.bfloat16: 1.5e-2, torch.float32: 1e-4}
"""Of |out - oracle| / |oracle|, and of the same for gradients: a few roundings. A leak would be far more."""
SPLITS: tuple[tuple[int, Strategy], ...] = (
    (1, "head_tail"),
    (2, "head_tail"),
    (2, "per_document"),
    (4, "head_tail"),
    (4, "per_document"),
)


@dataclass(frozen=True)
class Kernel:
    """A way to attend, and in which numbers."""

    name: str
    attend: Attend
    dtype: torch.dtype
    backward: bool = True


def kernels_of(device: torch.device) -> list[Kernel]:
    """Those that runs on this device use."""
    if device.type == "cuda":
        return [Kernel("varlen, bf16", attention, torch.bfloat16), Kernel("Flex, fp32", attention, torch.float32)]
    return [
        Kernel("SDPA, bf16", attention, torch.bfloat16),
        Kernel("SDPA, fp32", attention, torch.float32),
        Kernel("Flex, fp32, forward", _uncompiled_flex, torch.float32, backward=False),
    ]


def _uncompiled_flex(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # which is the point
        return attention(q, k, v, batch, kernel=_flex)


def check_kernels(part: Part, sizes: Sizes, device: torch.device, *, seed: int) -> None:
    """The part: every kernel on the same micro-batches, each of which is an item."""
    part.facts |= {"bounds": {str(dtype): bound for dtype, bound in BOUNDS.items()}, "seed": seed}
    expected = 0.0
    for kernel in kernels_of(device):
        for number, rows in enumerate(random_rows(sizes, np.random.default_rng(seed))):
            name = f"{kernel.name}: micro-batch {number}"
            found = part.item(name, partial(_check, kernel, rows, sizes, device, seed), expected=expected)
            expected = found["seconds"] if found and number else 0.0  # the first of a kernel may compile


def _check(kernel: Kernel, rows: Sequence[Sequence[int]], sizes: Sizes, device: torch.device, seed: int) -> Figures:
    worst = {"out": 0.0, "dq": 0.0, "dk": 0.0, "dv": 0.0} if kernel.backward else {"out": 0.0}
    num_shards = 0
    for cp, split in SPLITS:
        for shard in shards(rows, cp=cp, strategy=split, multiple_of=8):
            if shard.num_tokens:
                errors = shard_errors(kernel, rows, shard, sizes, device, seed=seed)
                # max keeps what it has if the other is no number: that must not pass.
                worst = {what: max(error, worst[what], key=_nan_first) for what, error in errors.items()}
                num_shards += 1
    good = all(error <= BOUNDS[kernel.dtype] for error in worst.values())
    return {"kernel": kernel.name, "rows": rows, "shards": num_shards, "errors": worst, "good": good}


def _nan_first(error: float) -> float:
    return math.inf if math.isnan(error) else error


def random_rows(sizes: Sizes, generator: np.random.Generator) -> Iterator[list[list[int]]]:
    """Micro-batches of one to three rows of documents, some of one token, some a row long."""
    for number in range(sizes.oracle_cases):
        num_rows = 1 + number % 3
        rows = []
        for _ in range(num_rows):
            left, row = sizes.oracle_tokens // num_rows, []
            while left:
                longest = min(left, int(generator.choice([1, 7, left // 3 + 1, left])))
                row.append(int(generator.integers(1, longest + 1)))
                left -= row[-1]
            rows.append(row)
        yield rows


def shard_errors(
    kernel: Kernel, rows: Sequence[Sequence[int]], shard: Shard, sizes: Sizes, device: torch.device, *, seed: int
) -> dict[str, float]:
    """Relative errors of the output, and of gradients, of what one rank attends to: |a - oracle| / |oracle|."""
    generator = torch.Generator().manual_seed(seed)
    (heads, kv_heads), dim, num_keys = sizes.oracle_heads, sizes.oracle_dim, sum(map(sum, rows))

    def draw(length: int, num_heads: int) -> Tensor:
        # Rounded first, so that the oracle gets the very numbers that the kernel gets.
        drawn = torch.randn(length, num_heads, dim, generator=generator).to(device, kernel.dtype)
        return drawn.requires_grad_(kernel.backward)

    inputs = draw(len(shard.index), heads), draw(num_keys, kv_heads), draw(num_keys, kv_heads)
    whole = Batch.from_rows(torch.zeros(num_keys, dtype=torch.int64), rows)
    out = kernel.attend(*inputs, whole.take(shard).to(device))
    exact_inputs = tuple(x.detach().double().requires_grad_(kernel.backward) for x in inputs)
    exact = dense_attention(exact_inputs, rows, shard)
    errors = {"out": _relative_error(out, exact)}
    if kernel.backward:
        arriving = torch.randn(out.shape, generator=generator).to(device, kernel.dtype)
        gradients = torch.autograd.grad(out, inputs, arriving)
        exact_gradients = torch.autograd.grad(exact, exact_inputs, arriving.double())
        names = zip(("dq", "dk", "dv"), gradients, exact_gradients, strict=True)
        errors |= {name: _relative_error(gradient, wanted) for name, gradient, wanted in names}
    return errors


def dense_attention(inputs: Sequence[Tensor], rows: Sequence[Sequence[int]], shard: Shard) -> Tensor:
    """Softmax over every key of the micro-batch that is in the query's document and not behind it; zero for padding.

    inputs: q [n, H, d] of the shard, k and v [N, KV, d] of the whole micro-batch, all fp64. Returns [n, H, d].
    """
    q, k, v = inputs
    whole = PackedTokens.from_rows(rows)
    own = whole.take(shard.index)
    seen = (own.documents[:, None] == whole.documents) & (own.positions[:, None] >= whole.positions)
    mask = torch.from_numpy(seen).to(q.device)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(q.shape[2])
    padding = ~mask.any(1)
    weights = scores.masked_fill(~(mask | padding[:, None]), -math.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).masked_fill(padding[:, None, None], 0.0)


def _relative_error(value: Tensor, wanted: Tensor) -> float:
    difference = torch.linalg.vector_norm(value.double() - wanted)
    return (difference / torch.linalg.vector_norm(wanted).clamp_min(1e-30)).item()
