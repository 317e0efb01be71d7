"""Packing and context-parallel shards, against the paper's Figure 7, the 4+12 oracle and a dense mask."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.layout.documents import (
    PackedTokens,
    Run,
    Segment,
    Shard,
    Strategy,
    attention_pairs,
    describe,
    label_validity,
    pack,
    shards,
)

STRATEGIES: tuple[Strategy, ...] = ("head_tail", "per_document")

lengths = st.lists(st.integers(1, 20), min_size=1, max_size=5)
micro_batches = st.lists(lengths, min_size=1, max_size=4)


def held(shard: Shard) -> list[int]:
    """The shard's tokens, padding left out."""
    return shard.index[shard.index >= 0].tolist()


def visible(rows: list[list[int]]) -> np.ndarray:
    """bool[n, n], query by key, written down document by document."""
    documents = list(chain.from_iterable(rows))
    mask = np.zeros((sum(documents), sum(documents)), dtype=bool)
    start = 0
    for length in documents:
        mask[start : start + length, start : start + length] = np.tri(length, dtype=bool)
        start += length
    return mask


def seen_through_runs(shard: Shard, num_keys: int) -> np.ndarray:
    """int[m, num_keys]: how often the runs let each local query see each key."""
    seen = np.zeros((len(shard.index), num_keys), dtype=int)
    for run in shard.runs:
        for query in range(run.query_length):
            num_visible = run.key_length - run.query_length + query + 1
            seen[run.query_start + query, run.key_start : run.key_start + num_visible] += 1
    return seen


# --- packing -------------------------------------------------------------------------------------------------------


def test_pack_by_hand() -> None:
    assert pack([3, 7, 2], row_length=5) == [
        [Segment(0, 0, 3), Segment(1, 0, 2)],
        [Segment(1, 2, 5)],
        [Segment(2, 0, 2)],
    ]
    assert pack([12], row_length=5) == [[Segment(0, 0, 5)], [Segment(0, 5, 5)], [Segment(0, 10, 2)]]
    assert pack([5], row_length=5) == [[Segment(0, 0, 5)]]
    assert pack([], row_length=5) == []


@given(st.lists(st.integers(1, 20), max_size=8), st.integers(1, 25))
def test_pack_covers_all_tokens_in_order(lengths: list[int], row_length: int) -> None:
    rows = pack(lengths, row_length)
    packed = [
        (segment.document, token)
        for segment in chain.from_iterable(rows)
        for token in range(segment.start, segment.start + segment.length)
    ]
    assert packed == [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    filled = [sum(segment.length for segment in row) for row in rows]
    assert all(tokens == row_length for tokens in filled[:-1])
    assert all(0 < tokens <= row_length for tokens in filled[-1:])
    # No more cuts than rows force: one piece per document, and at most one more per row boundary.
    assert all(segment.length > 0 for segment in chain.from_iterable(rows))
    assert sum(map(len, rows)) <= len(lengths) + max(len(rows) - 1, 0)


def test_documents_without_tokens_are_refused() -> None:
    message = "length 0 of document 1: must be at least 1 token"
    with pytest.raises(ValueError, match=message):
        pack([3, 0], row_length=4)
    with pytest.raises(ValueError, match=message):
        describe([[3], [0]])
    with pytest.raises(ValueError, match=message):
        label_validity([3, 0])
    with pytest.raises(ValueError, match=message):
        shards([[3, 0]], cp=2)
    with pytest.raises(ValueError, match="length -2 of document 0"):
        describe([[-2, 5]])
    with pytest.raises(ValueError, match="row_length = 0"):
        pack([3], row_length=0)


# --- what every token carries --------------------------------------------------------------------------------------


def test_describe_numbers_documents_over_the_micro_batch_and_restarts_positions() -> None:
    documents, positions = describe([[2, 1], [3]])
    assert documents.tolist() == [0, 0, 1, 2, 2, 2]
    assert positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert documents.dtype == positions.dtype == np.int64


def test_labels() -> None:
    # 16 tokens, three documents: 16 - 3 = 13 have a next token in their document.
    valid = label_validity([5, 3, 8])
    assert valid.sum() == 13
    assert np.flatnonzero(~valid).tolist() == [4, 7, 15]
    assert label_validity([1]).tolist() == [False]
    assert label_validity([]).tolist() == []


def test_packed_tokens_carry_everything_to_a_shard() -> None:
    # pains.md T50: under cp=2, rank 0 of one row of 8 must look up positions 0, 1, 6, 7, not 0, 1, 2, 3.
    packed = PackedTokens.from_rows([[8]])
    assert packed.take(shards([[8]], cp=2)[0].index).positions.tolist() == [0, 1, 6, 7]

    packed = PackedTokens.from_rows([[2, 1], [3]])
    assert packed.labels_valid.tolist() == [True, False, False, True, True, False]
    local = packed.take(np.array([1, 3, 4, -1]))
    assert local.documents.tolist() == [0, 2, 2, -1]
    assert local.positions.tolist() == [1, 0, 1, 0]
    assert local.labels_valid.tolist() == [False, True, True, False]
    # Padding stays padding even where the last token, which index -1 would reach, has a label.
    packed = PackedTokens(np.array([4]), np.array([3]), np.array([True]))
    local = packed.take(np.array([-1]))
    assert (local.documents.tolist(), local.positions.tolist(), local.labels_valid.tolist()) == ([-1], [0], [False])


# --- shards by hand ------------------------------------------------------------------------------------------------


def test_figure_7_of_the_paper() -> None:
    # facts.md 2.7: 16 tokens, documents 3, 3, 8, 2, chunks of 4; zero-length entries of the paper's lists are left out.
    first, second = shards([[3, 3, 8, 2]], cp=2)
    assert held(first) == [0, 1, 2, 3, 12, 13, 14, 15]
    assert held(second) == [4, 5, 6, 7, 8, 9, 10, 11]
    # Chunk 1 has q_len [0, 2, 2] and kv_len [3, 3, 2]; chunk 2 goes on with document 3 next to it, so they are one run.
    assert second.runs == (Run(0, 2, 3, 3), Run(2, 6, 6, 6))
    assert first.runs == (Run(0, 3, 0, 3), Run(3, 1, 3, 1), Run(4, 2, 6, 8), Run(6, 2, 14, 2))
    # By position: 6 + 1 + (7 + 8) + 3 and (2 + 3) + 21.
    assert [attention_pairs([[3, 3, 8, 2]], shard) for shard in (first, second)] == [25, 26]


def test_oracle_of_4_and_12() -> None:
    # algorithms.md 3.7: of 88 pairs the static split gives 52 and 36, per document 44 and 44.
    rows = [[4, 12]]
    assert [attention_pairs(rows, shard) for shard in shards(rows, cp=2)] == [52, 36]
    assert [attention_pairs(rows, shard) for shard in shards(rows, cp=2, strategy="per_document")] == [44, 44]


def test_head_tail_cuts_each_row() -> None:
    first, second = shards([[6], [5]], cp=2)
    # Rows of 6 and 5 in four: 2, 2, 1, 1 and 2, 1, 1, 1.
    assert first.index.tolist() == [0, 1, 5, 6, 7, 10]
    assert second.index.tolist() == [2, 3, 4, 8, 9, -1]


def test_per_document_deals_spare_tokens_in_turn() -> None:
    # Documents of one token, two ranks: token by token in turn; nobody but the padding differs.
    first, second = shards([[1, 1, 1], [1, 1]], cp=2, strategy="per_document")
    assert first.index.tolist() == [0, 2, 4]
    assert second.index.tolist() == [1, 3, -1]
    # Documents of 5 tokens, chunks of 1: the spare goes to rank 0's head, rank 1's head, rank 0's tail, rank 1's.
    spares = shards([[5, 5, 5, 5]], cp=2, strategy="per_document")
    assert held(spares[0]) == [0, 1, 4, 5, 9, 10, 13, 14, 15, 19]
    assert held(spares[1]) == [2, 3, 6, 7, 8, 11, 12, 16, 17, 18]


def test_spare_tokens_do_not_pile_up_work_on_one_rank() -> None:
    # 64 documents of 3 tokens over 2 ranks: the spare 3 of 4 chunks come from head and tail by turns.
    rows = [[3] * 64]
    assert len({attention_pairs(rows, shard) for shard in shards(rows, cp=2, strategy="per_document")}) == 1


def test_fewer_tokens_than_ranks() -> None:
    for strategy in STRATEGIES:
        four = shards([[2]], cp=4, strategy=strategy)
        assert [shard.index.tolist() for shard in four] == [[0], [1], [-1], [-1]]
        assert [shard.num_tokens for shard in four] == [1, 1, 0, 0]
        assert [shard.runs for shard in four] == [(Run(0, 1, 0, 1),), (Run(0, 1, 0, 2),), (), ()]
        assert [attention_pairs([[2]], shard) for shard in four] == [1, 2, 0, 0]


def test_one_rank_holds_everything_in_order() -> None:
    for strategy in STRATEGIES:
        (shard,) = shards([[3, 2], [4]], cp=1, strategy=strategy)
        assert shard.index.tolist() == list(range(9))
        assert shard.runs == (Run(0, 3, 0, 3), Run(3, 2, 3, 2), Run(5, 4, 5, 4))


@pytest.mark.parametrize(("cp", "worst_over_mean"), [(2, 1.89), (4, 2.80), (8, 3.26), (16, 3.49)])
def test_one_long_document_among_short_ones(cp: int, worst_over_mean: float) -> None:
    # algorithms.md 3.7: 131,072 tokens, one document of 32K, then 96 of 1K; static max/mean as given there.
    rows = [[32 * 1024] + [1024] * 96]
    work = {
        strategy: [attention_pairs(rows, shard) for shard in shards(rows, cp=cp, strategy=strategy)]
        for strategy in STRATEGIES
    }
    total = sum(length * (length + 1) // 2 for length in rows[0])
    assert sum(work["head_tail"]) == sum(work["per_document"]) == total
    assert max(work["head_tail"]) * cp / total == pytest.approx(worst_over_mean, abs=0.005)
    assert len(set(work["per_document"])) == 1


def test_ragged_documents_are_balanced_per_document() -> None:
    lengths = [1 + 997 * at % 2000 for at in range(131)]
    work = [attention_pairs([lengths], shard) for shard in shards([lengths], cp=16, strategy="per_document")]
    assert max(work) / min(work) < 1.001


def test_illegal_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="cp = 0: must be at least 1"):
        shards([[4]], cp=0)
    with pytest.raises(ValueError, match="multiple_of = 0: must be at least 1"):
        shards([[4]], cp=2, multiple_of=0)
    with pytest.raises(ValueError, match='strategy = \'ring\': must be "head_tail" or "per_document"'):
        shards([[4]], cp=2, strategy=cast(Strategy, "ring"))
    for nothing in ([], [[]]):
        with pytest.raises(ValueError, match="must hold at least one document"):
            shards(nothing, cp=2)


# --- properties ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(rows=micro_batches, cp=st.integers(1, 6), multiple_of=st.integers(1, 8))
def test_every_token_is_owned_once_and_local_lengths_are_equal(
    strategy: Strategy, rows: list[list[int]], cp: int, multiple_of: int
) -> None:
    ranks = shards(rows, cp=cp, strategy=strategy, multiple_of=multiple_of)
    num_tokens = sum(map(sum, rows))
    assert len(ranks) == cp
    assert sorted(chain.from_iterable(map(held, ranks))) == list(range(num_tokens))

    largest = max(shard.num_tokens for shard in ranks)
    for shard in ranks:
        assert shard.index.dtype == np.int64
        assert shard.index[: shard.num_tokens].tolist() == sorted(held(shard))
        assert (shard.index[shard.num_tokens :] == -1).all()
        assert len(shard.index) % multiple_of == 0
        assert largest <= len(shard.index) < largest + multiple_of


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(rows=micro_batches, cp=st.integers(1, 6), multiple_of=st.integers(1, 8))
def test_runs_are_the_mask(strategy: Strategy, rows: list[list[int]], cp: int, multiple_of: int) -> None:
    mask = visible(rows)
    documents, positions = describe(rows)
    from_data = (documents[:, None] == documents) & (positions[:, None] >= positions)
    assert (from_data == mask).all()

    for shard in shards(rows, cp=cp, strategy=strategy, multiple_of=multiple_of):
        expected = np.zeros((len(shard.index), len(mask)), dtype=int)
        expected[: shard.num_tokens] = mask[held(shard)]
        assert (seen_through_runs(shard, len(mask)) == expected).all()
        assert attention_pairs(rows, shard) == expected.sum()

        tiled = [query for run in shard.runs for query in range(run.query_start, run.query_start + run.query_length)]
        assert tiled == list(range(shard.num_tokens))
        # As few as there can be: neighbouring runs could not be one.
        for run, following in pairwise(shard.runs):
            last, first = shard.index[following.query_start - 1], shard.index[following.query_start]
            assert first != last + 1 or documents[first] != documents[last]
            assert run.query_length > 0


@given(rows=micro_batches, cp=st.integers(1, 6))
def test_head_tail_is_two_array_splits(rows: list[list[int]], cp: int) -> None:
    expected: list[list[int]] = [[] for _ in range(cp)]
    start = 0
    for row in rows:
        chunks = np.array_split(np.arange(start, start + sum(row)), 2 * cp)
        for rank in range(cp):
            expected[rank] += [*chunks[rank].tolist(), *chunks[2 * cp - 1 - rank].tolist()]
        start += sum(row)
    ranks = shards(rows, cp=cp)
    assert [held(shard) for shard in ranks] == expected
    counts = [shard.num_tokens for shard in ranks]
    assert max(counts) - min(counts) <= len(rows)


@given(rows=micro_batches, cp=st.integers(1, 6))
def test_per_document_is_level_in_tokens_and_in_every_document(rows: list[list[int]], cp: int) -> None:
    ranks = shards(rows, cp=cp, strategy="per_document")
    counts = [shard.num_tokens for shard in ranks]
    assert max(counts) - min(counts) <= 1

    owner = {token: rank for rank, shard in enumerate(ranks) for token in held(shard)}
    start = 0
    for length in chain.from_iterable(rows):
        owners = [owner[token] for token in range(start, start + length)]
        of_rank = Counter(owners)
        shares = [of_rank[rank] for rank in range(cp)]
        assert max(shares) - min(shares) <= 1
        # In the order of ranks to the middle of the document, and back: no rank gets more than a head and a tail.
        turning_point = next((at for at in range(1, length) if owners[at] < owners[at - 1]), length)
        assert owners == sorted(owners[:turning_point]) + sorted(owners[turning_point:], reverse=True)
        start += length


@given(rows=micro_batches, cp=st.integers(1, 6))
def test_per_document_of_whole_multiples_is_exactly_balanced(rows: list[list[int]], cp: int) -> None:
    rows = [[length * 2 * cp for length in row] for row in rows]
    work = {attention_pairs(rows, shard) for shard in shards(rows, cp=cp, strategy="per_document")}
    assert len(work) == 1
