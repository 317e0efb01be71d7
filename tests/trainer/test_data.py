"""Which tokens a step sees: every token of an epoch at most once, in an order that no layout changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fourfold.recipe import RecipeError, RunPlan, check, from_table
from fourfold.trainer.data import Loader, Rows, check_vocabulary
from fourfold.trainer.text import TokenSet


def token_set(*lengths: int) -> TokenSet:
    """Documents whose tokens are all different, so that each can be recognised wherever it turns up."""
    return TokenSet(np.arange(sum(lengths), dtype=np.int32), np.array(lengths, dtype=np.int64), sum(lengths), None)


MANY = tuple(int(n) for n in np.random.default_rng(0).integers(1, 40, 60))


def plan(*, dp: int = 1, micro_batch: int = 1, sequences: int = 8, seq_len: int = 16, **data: object) -> RunPlan:
    return check(
        from_table(
            {
                "layout": {"dp": dp},
                "pipeline": {"micro_batch": micro_batch},
                "batch": {"sequences": sequences, "seq_len": seq_len},
                "data": data,
            }
        )
    )


def test_labels_cross_the_end_of_a_row_and_never_that_of_a_document() -> None:
    # 16 tokens; 3 of them end a document and have no label, whatever the rows are (pains.md T41).
    tokens = token_set(5, 3, 8)
    last_of_document = {4, 7, 15}
    for seq_len in (16, 8, 4, 2):
        rows = Rows(tokens, seq_len=seq_len, seed=0)
        assert rows.rows_per_epoch == 16 // seq_len
        found = [rows.row(k) for k in range(rows.rows_per_epoch)]
        ids, labels = (np.concatenate([row[i] for row in found]) for i in (0, 1))
        assert sorted(ids.tolist()) == list(range(16))
        assert (labels >= 0).sum() == 13
        for token, label in zip(ids.tolist(), labels.tolist(), strict=True):
            assert label == (-1 if token in last_of_document else token + 1)
        assert all(sum(row[2]) == seq_len for row in found)


def test_a_row_knows_the_documents_in_it() -> None:
    rows = Rows(token_set(*MANY), seq_len=16, seed=3)
    starts = set(np.cumsum((0, *MANY)).tolist())
    for k in range(rows.rows_per_epoch):
        ids, _, lengths = rows.row(k)
        firsts = np.cumsum([0, *lengths[:-1]])
        breaks = {i for i in range(1, 16) if ids[i] != ids[i - 1] + 1 or int(ids[i]) in starts}
        assert breaks == set(firsts[1:].tolist())


def test_every_epoch_shows_each_token_at_most_once_and_is_shuffled_anew() -> None:
    rows = Rows(token_set(*MANY), seq_len=16, seed=3)
    epochs = []
    for epoch in range(3):
        first = epoch * rows.rows_per_epoch
        ids = np.concatenate([rows.row(first + k)[0] for k in range(rows.rows_per_epoch)])
        assert len(set(ids.tolist())) == len(ids) > sum(MANY) - 16
        epochs.append(ids)
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])


def test_any_row_can_be_had_without_those_before_it() -> None:
    tokens = token_set(*MANY)
    sequential = Rows(tokens, seq_len=16, seed=3)
    in_order = [sequential.row(k) for k in range(200)]
    for k in (199, 0, 71, 70, 199, 5):
        for a, b in zip(Rows(tokens, seq_len=16, seed=3).row(k), in_order[k], strict=True):
            assert np.array_equal(a, b)
    assert not np.array_equal(Rows(tokens, seq_len=16, seed=4).row(0)[0], in_order[0][0])


def global_batch(dp: int, micro_batch: int, step: int) -> tuple[list[int], list[int], list[list[int]]]:
    made = plan(dp=dp, micro_batch=micro_batch)
    rows = Rows(token_set(*MANY), seq_len=16, seed=3)
    tokens, labels, lengths = [], [], []
    for rank in range(dp):
        micro_batches = Loader(rows, made, rank).micro_batches(step)
        assert len(micro_batches) == made.num_micro_batches == 8 // dp // micro_batch
        for batch, row_lengths in micro_batches:
            assert batch.tokens.shape == (16 * micro_batch,)
            assert batch.tokens.dtype == torch.int64
            assert batch.labels is not None
            tokens += batch.tokens.tolist()
            labels += batch.labels.tolist()
            lengths += [list(row) for row in row_lengths]
    return tokens, labels, lengths


@pytest.mark.parametrize("step", [0, 9])
def test_the_global_batch_is_the_same_for_every_layout(step: int) -> None:
    wanted = global_batch(1, 1, step)
    for dp, micro_batch in ((2, 1), (4, 1), (1, 2), (2, 4), (8, 1)):
        assert global_batch(dp, micro_batch, step) == wanted


def test_positions_and_documents_restart_in_a_micro_batch_of_rows() -> None:
    loader = Loader(Rows(token_set(*MANY), seq_len=16, seed=3), plan(micro_batch=2), 0)
    batch, lengths = loader.micro_batches(0)[0]
    flat = [n for row in lengths for n in row]
    assert batch.positions.tolist() == [i for n in flat for i in range(n)]
    assert batch.documents.tolist() == [d for d, n in enumerate(flat) for _ in range(n)]


def test_a_text_shorter_than_a_row_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"batch.seq_len = 17: the text has 16 tokens.*nearest legal: 16"):
        Rows(token_set(5, 3, 8), seq_len=17, seed=0)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    tokens = TokenSet(np.zeros(16, np.int32), np.array([16]), 261, None)
    with pytest.raises(RecipeError, match=r"model.vocab_size = 260: .*has 261 entries.*nearest legal: 261"):
        check_vocabulary(tokens.vocab_size, plan())  # the tiny preset has 260
    check_vocabulary(260, plan())
