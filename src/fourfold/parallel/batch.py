"""What one rank sees of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.layout import shards
from fourfold.model import Batch


class LocalBatch(Batch):
    """The part of a micro-batch that one context-parallel rank holds; all its TP and PP ranks hold the same.

    num_tokens: m, the tokens of this rank with padding, the same on all CP ranks and a multiple of tp.
    key_order: int64 [N], where token i of the whole micro-batch lies in the tokens of all CP ranks, end to end.
    index: int64 [m] on the CPU, which tokens of the whole micro-batch these are; -1 = padding.
    """

    key_order: Tensor
    index: Tensor

    @property
    def num_tokens(self) -> int:
        """m, from which every rank knows the shapes of what its neighbours send."""
        return self.tokens.shape[0]

    @classmethod
    def of(
        cls,
        batch: Batch,
        rows: Sequence[Sequence[int]],
        *,
        cp: int,
        cp_rank: int,
        tp: int,
        cp_split: str,
        device: torch.device | str = "cpu",
    ) -> LocalBatch:
        """Cuts a whole micro-batch, whose rows hold documents of the given lengths, as ``cp_split`` says."""
        cut = shards(rows, cp=cp, strategy=cp_split, multiple_of=tp)  # type: ignore[arg-type]
        key_order = torch.empty(batch.tokens.shape[0], dtype=torch.int64)
        for rank, shard in enumerate(cut):
            held = torch.from_numpy(shard.index[: shard.num_tokens])
            key_order[held] = rank * len(shard.index) + torch.arange(len(held))
        part = batch.take(cut[cp_rank]).to(device)
        local = cls(
            tokens=part.tokens, labels=part.labels, positions=part.positions, documents=part.documents, runs=part.runs
        )
        local.key_order = key_order.to(device)
        local.index = torch.from_numpy(cut[cp_rank].index)
        return local
