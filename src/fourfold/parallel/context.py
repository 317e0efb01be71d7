"""Context parallelism: keys and values of the whole micro-batch are gathered, once per layer, and queries stay local.

All-gather rather than ring, as the paper argues (ISCA'25 section 4): any mask, few large kernels, and little data under
grouped-query attention. What may see what is decided by the batch's attention runs, which know nothing of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fourfold.parallel.groups import Group


def gather_keys_values(k: Tensor, v: Tensor, key_order: Tensor, cp: Group) -> tuple[Tensor, Tensor]:
    """Local keys and values [m, KV, d] -> those of the whole micro-batch [N, KV, d], in the order of its tokens.

    Args:
        k, v: of this rank's tokens, after RoPE; m is the same on all ranks, with padding at the end.
        key_order: int64 [N]; where token i of the micro-batch lies in the ranks' tokens one after the other.
        cp: the group. With one rank nothing moves, and the result has the padding too.

    Backward sums the gradients over the ranks in fp32. It must run on every rank, also on one without a valid token:
    the others would wait for it. So its result must stay in the graph of the loss.
    """
    if cp.size == 1:
        return k, v
    return GatherKeysValues.apply(k, v, key_order, cp)


class GatherKeysValues(Function):
    """See :func:`gather_keys_values`."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, key_order: Tensor, cp: Group) -> tuple[Tensor, Tensor]:
        ctx.cp = cp
        ctx.num_gathered = cp.size * k.shape[0]
        ctx.save_for_backward(key_order)
        both = cp.all_gather(torch.stack((k, v), dim=1)).index_select(0, key_order)
        return both[:, 0], both[:, 1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (key_order,) = ctx.saved_tensors
        both = torch.stack(grads, dim=1)
        # Padding was gathered but used by nobody: its gradient is zero.
        gathered = both.new_zeros((ctx.num_gathered, *both.shape[1:])).index_copy_(0, key_order, both)
        grad = ctx.cp.reduce_scatter(gathered)
        return grad[:, 0], grad[:, 1], None, None
