"""What a model is given besides its weights: the tokens of a micro-batch, and which of them see each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fourfold.layout import PackedTokens, Run, Shard, shards


class Batch:
    """One micro-batch, or the part of it that one context-parallel rank holds: a flat run of n tokens.

    tokens: int64[n] token ids (0 where padded).
    labels: int64[n] next tokens, -1 = none; or None when logits are wanted instead of a loss.
    positions: int64[n] place of the token in its document; rotary embedding and nothing else reads it.
    documents: int64[n], -1 = padding.
    runs: which keys each stretch of queries sees; in order, without gap, padding behind them. Plain integers, so that
        shapes never depend on data.

    Not a dataclass on purpose: FSDP2 takes dataclass arguments apart to cast the tensors in them, at every wrapped
    module.
    """

    def __init__(
        self,
        *,
        tokens: Tensor,
        labels: Tensor | None,
        positions: Tensor,
        documents: Tensor,
        runs: tuple[Run, ...],
    ) -> None:
        self.tokens = tokens
        self.labels = labels
        self.positions = positions
        self.documents = documents
        self.runs = runs

    @classmethod
    def from_rows(cls, tokens: Tensor, rows: Sequence[Sequence[int]], *, labels: Tensor | None = None) -> Batch:
        """A whole micro-batch: tokens int64[n] of all rows, one after another; rows give the document lengths in each
        row.

        labels default to the next token of the same document. Raises ValueError if the lengths do not sum to n.
        """
        num_tokens = sum(sum(row) for row in rows)
        if tokens.shape != (num_tokens,):
            raise ValueError(f"tokens of shape {tuple(tokens.shape)}: the rows hold {num_tokens} tokens")
        packed = PackedTokens.from_rows(rows)
        if labels is None:
            labels = tokens.roll(-1).where(torch.from_numpy(packed.labels_valid).to(tokens.device), -1)
        return cls(
            tokens=tokens,
            labels=labels,
            positions=torch.from_numpy(packed.positions).to(tokens.device),
            documents=torch.from_numpy(packed.documents).to(tokens.device),
            runs=shards(rows, cp=1)[0].runs,
        )

    def take(self, shard: Shard) -> Batch:
        """The part of this whole micro-batch that one context-parallel rank holds; its keys stay those of the whole."""
        index = torch.from_numpy(shard.index).to(self.tokens.device)
        held, index = index >= 0, index.clamp(min=0)

        def pick(values: Tensor, padding: int) -> Tensor:
            return values[index].where(held, padding)

        return Batch(
            tokens=pick(self.tokens, 0),
            labels=None if self.labels is None else pick(self.labels, -1),
            positions=pick(self.positions, 0),
            documents=pick(self.documents, -1),
            runs=shard.runs,
        )

    def to(self, device: torch.device | str) -> Batch:
        """A copy with its tensors on another device."""
        return Batch(
            tokens=self.tokens.to(device, non_blocking=True),
            labels=None if self.labels is None else self.labels.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            documents=self.documents.to(device, non_blocking=True),
            runs=self.runs,
        )

    def without_labels(self) -> Batch:
        """The same micro-batch for logits instead of a loss."""
        return Batch(
            tokens=self.tokens,
            labels=None,
            positions=self.positions,
            documents=self.documents,
            runs=self.runs,
        )

    @cached_property
    def run_index(self) -> RunIndex:
        """The runs as tensors beside the tokens, made once per micro-batch: every layer needs the same."""
        return RunIndex(self.runs, self.tokens.device)


class RunIndex:
    """Runs as tensors, for attention kernels that take a whole micro-batch in one call. t = queries that are not
    padding.

    keys: int64[sum of key lengths], the keys of every run one after another (a document's keys once for each of its
        runs); None if they are the tokens as they are.
    query_offsets, key_offsets: int32[number of runs + 1], where each run begins in the queries and in `keys`.
    longest_query, longest_key: the largest lengths, in tokens.
    first_key, last_key: int64[t], the keys that each query sees, both ends included.
    """

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        columns = [(run.query_length, run.key_start, run.key_length) for run in runs]
        # NumPy's integers: that lengths are read off them must not depend on what the tensors hold.
        query_lengths, key_starts, key_lengths = np.array(columns, dtype=np.int64).reshape(-1, 3).T
        query_offsets, key_offsets = _offsets(query_lengths), _offsets(key_lengths)
        num_queries, num_keys = int(query_offsets[-1]), int(key_offsets[-1])
        keys = np.arange(num_keys) + (key_starts - key_offsets[:-1]).repeat(key_lengths)
        ends = (key_starts + key_lengths).repeat(query_lengths)
        left_in_run = query_offsets[1:].repeat(query_lengths) - np.arange(num_queries)

        def on_device(values: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(values).to(device, dtype)

        self.keys = None if see_only_themselves(runs) else on_device(keys)
        self.query_offsets = on_device(query_offsets, torch.int32)
        self.key_offsets = on_device(key_offsets, torch.int32)
        self.longest_query = max((run.query_length for run in runs), default=0)
        self.longest_key = max((run.key_length for run in runs), default=0)
        self.first_key = on_device(key_starts.repeat(query_lengths))
        self.last_key = on_device(ends - left_in_run)


def see_only_themselves(runs: Sequence[Run]) -> bool:
    """Whether the queries of every run are also its keys, as without context parallelism."""
    return all(run.key_start == run.query_start and run.key_length == run.query_length for run in runs)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], lengths.cumsum()))
