"""Which tokens each row holds: an order that depends on the seed and on what was taken before, and on nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from fourfold.data.source import Row, TokenSource
from fourfold.data.stream import EndlessSource, Position, Stream
from tests.data.token_files import numbered_source

MANY = tuple(int(n) for n in np.random.default_rng(0).integers(1, 40, 60))
TOTAL = sum(MANY)
CHUNK = 16


@pytest.fixture
def many(tmp_path: Path) -> TokenSource:
    return numbered_source(tmp_path, "many", *MANY, files=3)


def endless(source: TokenSource, chunk: int = CHUNK, seed: int = 3) -> EndlessSource:
    return EndlessSource(source, chunk=chunk, seed=seed)


def tokens_of(rows: Iterable[Row]) -> list[int]:
    return [token for row in rows for token in row.tokens.tolist()]


def same(a: Row, b: Row) -> bool:
    return np.array_equal(a.tokens, b.tokens) and np.array_equal(a.labels, b.labels) and a.lengths == b.lengths


@pytest.mark.parametrize("chunk", [1, 3, 7, CHUNK, TOTAL - 1, TOTAL])
def test_an_epoch_has_every_token_at_most_once_and_leaves_out_less_than_a_chunk(many: TokenSource, chunk: int) -> None:
    size, left_out = TOTAL // chunk * chunk, []
    for epoch in range(4):
        tokens = endless(many, chunk).read(epoch * size, size).tokens.tolist()
        assert len(set(tokens)) == len(tokens) == size
        left_out.append(set(range(TOTAL)) - set(tokens))
    assert chunk == 1 or TOTAL % chunk == 0 or len({frozenset(tokens) for tokens in left_out}) > 1


def test_epochs_are_cut_and_ordered_anew(many: TokenSource) -> None:
    size = TOTAL // CHUNK * CHUNK
    epochs = [endless(many).read(epoch * size, size) for epoch in range(3)]
    cuts = [set(epoch.tokens[::CHUNK].tolist()) for epoch in epochs]
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert not np.array_equal(epochs[a].tokens, epochs[b].tokens)
        assert len(cuts[a] & cuts[b]) < len(cuts[a]) / 2


def test_labels_cross_rows_and_chunks_and_never_the_end_of_a_document(tmp_path: Path) -> None:
    # 16 tokens; 3 of them end a document and have no label, however they are cut (pains.md T41).
    source = numbered_source(tmp_path, "s", 5, 3, 8)
    for chunk in (16, 8, 4, 2, 1):
        for seq_len in (16, 8, 2, 1):
            stream = endless(source, chunk)
            rows = [stream.read(start, seq_len) for start in range(0, 16, seq_len)]
            labels = [label for row in rows for label in row.labels.tolist()]
            assert sum(label >= 0 for label in labels) == 13
            for token, label in zip(tokens_of(rows), labels, strict=True):
                assert label == (-1 if token in (4, 7, 15) else token + 1)


def test_a_row_knows_the_documents_in_it_and_chunks_part_them(many: TokenSource) -> None:
    stream, begins = endless(many), set(np.cumsum((0, *MANY)).tolist())
    for start in range(0, 3 * TOTAL, 37):
        row = stream.read(start, 37)
        wanted = {
            i
            for i in range(1, 37)
            if (start + i) % CHUNK == 0 or int(row.tokens[i]) in begins or row.tokens[i] != row.tokens[i - 1] + 1
        }
        assert set(np.cumsum(row.lengths[:-1]).tolist()) == wanted
        assert sum(row.lengths) == len(row.tokens) == len(row.labels) == 37


def test_rows_of_any_length_are_stretches_of_one_stream(many: TokenSource) -> None:
    whole = endless(many).read(0, 3 * TOTAL).tokens.tolist()
    for seq_len in (1, 5, CHUNK, 50, TOTAL + 3):
        stream = endless(many)
        starts = range(0, 3 * TOTAL - seq_len, seq_len)
        assert tokens_of(stream.read(start, seq_len) for start in starts) == whole[: len(starts) * seq_len]


def test_seed_and_name_choose_the_order(tmp_path: Path, many: TokenSource) -> None:
    other = numbered_source(tmp_path, "other", *MANY)
    rows = [endless(*args).read(0, TOTAL).tokens.tolist() for args in ((many, 16, 3), (many, 16, 4), (other, 16, 3))]
    assert rows[0] != rows[1]
    assert rows[0] != rows[2]


@pytest.fixture
def sources(tmp_path: Path) -> list[TokenSource]:
    """Three, whose tokens tell which one they are from."""
    return [
        numbered_source(tmp_path, name, *MANY, first=first, files=2)
        for name, first in (("a", 0), ("b", 10_000), ("c", 20_000))
    ]


def mixed(sources: list[TokenSource], *weights: float, skip: Iterable[tuple[int, int]] = ()) -> Stream:
    return Stream(sources, weights, chunk=CHUNK, seed=3, skip=tuple(skip))


def origin(row: Row) -> str:
    return "abc"[int(row.tokens[0]) // 10_000]


def test_sources_are_mixed_by_weight_and_each_is_read_in_its_own_order(sources: list[TokenSource]) -> None:
    stream = mixed(sources, 0.5, 0.3, 0.2)
    rows = stream.rows(Position(), 8, 0, 1000)
    for window in range(0, 1000, 10):
        names = [origin(row) for row in rows[window : window + 10]]
        assert sorted(names) == list("aaaaabbbcc")
    for source in sources:
        own = tokens_of(row for row in rows if origin(row) == source.name)
        assert own == endless(source).read(0, len(own)).tokens.tolist()


def test_a_step_can_begin_anywhere(sources: list[TokenSource]) -> None:
    # Three interruptions inside one epoch (pains.md T73), each with another batch, the position through JSON.
    stream = mixed(sources, 0.5, 0.3, 0.2)
    wanted = stream.rows(Position(), 16, 0, 120)
    position, found = Position(), []
    for sequences, steps in ((4, 5), (10, 3), (7, 2), (6, 6)):
        stream = mixed(sources, 0.5, 0.3, 0.2)
        position = Position.from_json(json.loads(json.dumps(position.to_json())))
        for _ in range(steps):
            found += stream.rows(position, 16, 0, sequences)
            position = stream.advance(position, 16, sequences)
    assert len(found) < TOTAL / 16 * 3
    assert all(map(same, found, wanted[: len(found)]))
    assert position.samples == len(found)


def test_the_parts_of_a_batch_are_that_batch_whoever_takes_them(sources: list[TokenSource]) -> None:
    stream = mixed(sources[:2], 1, 2)
    position = stream.advance(Position(), 16, 5)
    whole = stream.rows(position, 16, 0, 12)
    for groups in (2, 3, 4, 12):
        size = 12 // groups
        parts = [stream.rows(position, 16, g * size, (g + 1) * size) for g in range(groups)]
        assert all(map(same, [row for part in parts for row in part], whole))


def test_another_row_length_goes_on_at_the_next_token(sources: list[TokenSource]) -> None:
    stream = mixed(sources[:2], 0.5, 0.5)
    position, found = Position(), []
    for seq_len, sequences in ((4, 10), (16, 4), (8, 6), (32, 2)):
        found += stream.rows(position, seq_len, 0, sequences)
        position = stream.advance(position, seq_len, sequences)
    assert position.samples == 22
    for source in sources[:2]:
        own = tokens_of(row for row in found if origin(row) == source.name)
        assert own == endless(source).read(0, len(own)).tokens.tolist()
        assert position.tokens[source.name] == len(own)


def test_skipped_samples_are_taken_and_not_returned(sources: list[TokenSource]) -> None:
    weights = (0.5, 0.3, 0.2)
    every = mixed(sources, *weights).rows(Position(), 16, 0, 100)
    wanted = [row for number, row in enumerate(every) if not (7 <= number < 12 or 12 <= number < 20 or number == 50)]
    stream = mixed(sources, *weights, skip=((7, 12), (12, 20), (50, 51)))
    position, found = Position(), []
    for sequences in (3, 4, 1, 9, 20, 30):
        found += stream.rows(position, 16, 0, sequences)
        position = stream.advance(position, 16, sequences)
    assert all(map(same, found, wanted))
    assert position.samples == 67 + 14
    # Ranges that begin after a resume, lie behind it, or hold it.
    for samples, skip, first in ((40, (10, 20), 40), (40, (30, 45), 45), (40, (40, 41), 41), (40, (41, 42), 40)):
        at = mixed(sources, *weights).advance(Position(), 16, samples)
        assert same(mixed(sources, *weights, skip=(skip,)).rows(at, 16, 0, 1)[0], every[first])


def test_a_changed_mixture_goes_on_where_each_source_stood(sources: list[TokenSource]) -> None:
    position, found = Position(), []
    phases = (([0, 1], (0.9, 0.1)), ([1, 2], (0.5, 0.5)), ([0, 1, 2], (0.2, 0.3, 0.5)))
    for members, weights in phases:
        stream = mixed([sources[i] for i in members], *weights)
        rows = stream.rows(position, 8, 0, 40)
        for i, weight in zip(members, weights, strict=True):
            assert abs(sum(origin(row) == sources[i].name for row in rows) - 40 * weight) < 2
        found += rows
        position = stream.advance(position, 8, 40)
    for source in sources:
        own = tokens_of(row for row in found if origin(row) == source.name)
        assert own == endless(source).read(0, len(own)).tokens.tolist()
        assert position.tokens[source.name] == len(own)


def test_far_out_costs_no_more_and_is_the_same_stream(sources: list[TokenSource]) -> None:
    stream = mixed(sources, 0.5, 0.3, 0.2, skip=((5, 10**9),))
    far = stream.advance(Position(), 16, 10**12)
    assert far.samples == 10**12 + 10**9 - 5
    assert sum(far.tokens.values()) == 16 * far.samples
    assert all(map(same, stream.rows(Position(), 16, 10**12, 10**12 + 20), stream.rows(far, 16, 0, 20)))


@pytest.mark.parametrize(
    "values", [{}, {"samples": 1}, {"samples": -1, "tokens": {}}, {"samples": 1, "tokens": {"a": "2"}}]
)
def test_what_is_no_position_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no position in a data stream"):
        Position.from_json(values)


def test_a_source_shorter_than_a_chunk_is_refused(many: TokenSource) -> None:
    with pytest.raises(ValueError, match="at most the"):
        endless(many, TOTAL + 1)
