"""Which tokens a step sees. The order depends on the seed and on the number of rows consumed, never on the layout."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from fourfold.layout import pack
from fourfold.model import Batch
from fourfold.parallel import MicroBatch
from fourfold.recipe import Problem, RecipeError, RunPlan
from fourfold.trainer.text import TokenSet


class Rows:
    """Endless rows of ``seq_len`` tokens, packed from documents that are shuffled anew in every epoch.

    A document that does not fit goes on in the next row. A token's label is the next token of its document, also across
    the end of a row; the last token of a document has none. The last documents of an epoch that fill no row are left
    out of it. Any row can be had directly, without those before it.
    """

    def __init__(self, tokens: TokenSet, *, seq_len: int, seed: int) -> None:
        self._tokens = tokens
        self._seq_len = seq_len
        self._seed = seed
        self._starts = np.cumsum(tokens.lengths) - tokens.lengths
        self.rows_per_epoch = len(tokens.tokens) // seq_len
        if self.rows_per_epoch == 0:
            rule = f"the text has {len(tokens.tokens)} tokens, which fill no row; must be at most that many"
            raise RecipeError([Problem("batch.seq_len", seq_len, rule, (len(tokens.tokens),))])
        self._epoch = lru_cache(maxsize=2)(self._shuffle)

    def _shuffle(self, epoch: int) -> tuple[np.ndarray, list[list]]:
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._tokens.lengths))
        return order, pack(self._tokens.lengths[order], self._seq_len)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """(tokens int64 [seq_len], labels int64 [seq_len] with -1 for none, lengths of the documents) of a row."""
        epoch, number = divmod(index, self.rows_per_epoch)
        order, rows = self._epoch(epoch)
        tokens, labels = [], []
        for segment in rows[number]:
            document = order[segment.document]
            first = self._starts[document] + segment.start
            end_of_document = self._starts[document] + self._tokens.lengths[document]
            piece = self._tokens.tokens[first : first + segment.length + 1].astype(np.int64)
            tokens.append(piece[: segment.length])
            following = (
                piece[1:] if first + segment.length < end_of_document else np.append(piece[1 : segment.length], -1)
            )
            labels.append(following)
        return np.concatenate(tokens), np.concatenate(labels), [segment.length for segment in rows[number]]


class Loader:
    """The micro-batches of one data-parallel group. All its TP, CP and PP ranks load the same, whole rows."""

    def __init__(self, rows: Rows, plan: RunPlan, dp_rank: int) -> None:
        self._rows = rows
        self._plan = plan
        self._dp_rank = dp_rank

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Those of a step, counted from 0: each group takes its stretch of the global batch."""
        plan, size = self._plan, self._plan.recipe.pipeline.micro_batch
        first = step * plan.recipe.batch.sequences + self._dp_rank * plan.sequences_per_dp_group
        return [self._micro_batch(first + m * size, size) for m in range(plan.num_micro_batches)]

    def _micro_batch(self, first: int, size: int) -> MicroBatch:
        rows = [self._rows.row(first + i) for i in range(size)]
        tokens, labels = (torch.from_numpy(np.concatenate([row[i] for row in rows])) for i in (0, 1))
        lengths = [row[2] for row in rows]
        return Batch.from_rows(tokens, lengths, labels=labels), lengths


def check_vocabulary(num_entries: int, plan: RunPlan) -> None:
    """Raises RecipeError if the model has no entry for some token of a tokenizer with ``num_entries``."""
    if num_entries > plan.config.vocab_size:
        rule = f"data.tokenizer = {plan.recipe.data.tokenizer!r} has {num_entries} entries; must be at least as many"
        raise RecipeError([Problem("model.vocab_size", plan.config.vocab_size, rule, (num_entries,))])
