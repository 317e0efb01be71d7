"""Documents packed into rows, and how context parallelism deals the tokens of a micro-batch to its ranks.

A micro-batch is one flat run of tokens: its rows, one after another. A token sees the tokens of its own document up to
itself (causal within the document; Herd report and ISCA'25). Which document a token is in, and where in it, are data
that travel with the batch: nothing here, or after here, derives them from a local index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

Strategy = Literal["head_tail", "per_document"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a document inside a row: tokens start..start+length-1 of the document."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """What every token of a flat run must carry with it, wherever it is moved.

    documents: int64[n], -1 = padding. positions: int64[n] in the document, 0 where padded. labels_valid: bool[n].
    """

    documents: np.ndarray
    positions: np.ndarray
    labels_valid: np.ndarray

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> PackedTokens:
        """A whole micro-batch; see `describe` and `label_validity`."""
        return cls(*describe(rows), label_validity(chain.from_iterable(rows)))

    def take(self, index: np.ndarray) -> PackedTokens:
        """The tokens at `index`, such as `Shard.index`; -1 makes padding."""
        held = index >= 0
        return PackedTokens(
            documents=np.where(held, self.documents[index], -1),
            positions=np.where(held, self.positions[index], 0),
            labels_valid=held & self.labels_valid[index],
        )


@dataclass(frozen=True, slots=True)
class Run:
    """Contiguous local queries of one document, and the contiguous keys they see.

    Local queries query_start..query_start+query_length-1 of the rank attend to tokens key_start..key_start+key_length-1
    of the whole micro-batch. The keys begin with the document and end with the last query, so the causal mask is
    aligned bottom-right: query j of the run sees the first key_length - query_length + j + 1 keys.
    """

    query_start: int
    query_length: int
    key_start: int
    key_length: int


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """What one context-parallel rank holds of a micro-batch.

    index: int64[m], the micro-batch's token at each local place, ascending; -1 where padded, at the end. m is the same
    on all ranks.
    runs: attention over the valid places, in order, without gap or overlap.
    """

    index: np.ndarray
    runs: tuple[Run, ...]

    @property
    def num_tokens(self) -> int:
        """Number of places that are not padding."""
        return int(np.count_nonzero(self.index >= 0))


def pack(lengths: Iterable[int], row_length: int) -> list[list[Segment]]:
    """Documents in order, end to end, into rows of `row_length` tokens; what does not fit continues in the next row.

    Every row but the last is full. ValueError on a document or a row of less than one token.
    """
    if row_length < 1:
        raise ValueError(f"row_length = {row_length}: must be at least 1; nearest legal: 1")
    rows: list[list[Segment]] = []
    free = 0
    for document, length in enumerate(_checked(lengths).tolist()):
        start = 0
        while start < length:
            if free == 0:
                rows.append([])
                free = row_length
            taken = min(free, length - start)
            rows[-1].append(Segment(document, start, taken))
            start += taken
            free -= taken
    return rows


def describe(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Document ids and positions, both int64[n], of the micro-batch whose rows hold documents of these lengths.

    Ids count up over the whole micro-batch; positions restart at 0 with each document. A piece of a long document that
    was carried into another row is a document of its own here: documents never cross rows.
    """
    lengths = _checked(chain.from_iterable(rows))
    starts = np.cumsum(lengths) - lengths
    documents = np.repeat(np.arange(len(lengths)), lengths)
    return documents, np.arange(len(documents)) - np.repeat(starts, lengths)


def label_validity(lengths: Iterable[int]) -> np.ndarray:
    """bool[n]: which tokens have a label, the next token of their document. The last token of a document has none."""
    ends = np.cumsum(_checked(lengths))
    valid = np.ones(ends[-1] if len(ends) else 0, dtype=bool)
    valid[ends - 1] = False
    return valid


def shards(
    row_lengths: Sequence[Sequence[int]],
    *,
    cp: int,
    strategy: Strategy = "head_tail",
    multiple_of: int = 1,
) -> tuple[Shard, ...]:
    """Deal the tokens of a micro-batch to `cp` ranks; `row_lengths` are the document lengths of each row.

    Something is cut into 2 * cp near-equal chunks, of which rank i takes chunks i and 2 * cp - 1 - i (ISCA'25,
    Figure 7): a cheap one from the head, where queries see few keys, and a dear one from the tail.

    strategy="head_tail" cuts each row, as the paper does: balanced for one document per row. Longer chunks come first
    (`np.array_split`), and the tokens of two ranks differ by at most one per row.
    strategy="per_document" cuts each document: balanced whatever the documents. The tokens of two ranks differ by at
    most one.

    All shards are padded to the same length: the largest number of tokens of a rank, rounded up to a multiple of
    `multiple_of`. A rank may hold padding only. ValueError on sizes below 1, on documents without tokens, on no
    document at all, on an unknown strategy.
    """
    for name, size in (("cp", cp), ("multiple_of", multiple_of)):
        if size < 1:
            raise ValueError(f"{name} = {size}: must be at least 1; nearest legal: 1")
    documents, positions = describe(row_lengths)
    if not len(documents):
        raise ValueError(f"row_lengths = {row_lengths}: must hold at least one document")

    if strategy == "head_tail":
        chunk_sizes = _cut([sum(row) for row in row_lengths], cp=cp)
    elif strategy == "per_document":
        chunk_sizes = _cut(list(chain.from_iterable(row_lengths)), cp=cp, take_turns=True)
    else:
        raise ValueError(f'strategy = {strategy!r}: must be "head_tail" or "per_document"')

    chunk = np.arange(2 * cp)
    owner_of_chunk = np.minimum(chunk, chunk[::-1])
    owner = np.repeat(np.resize(owner_of_chunk, chunk_sizes.size), chunk_sizes.ravel())
    held = [np.flatnonzero(owner == rank) for rank in range(cp)]
    padded = -(-max(map(len, held)) // multiple_of) * multiple_of
    return tuple(
        Shard(np.pad(tokens, (0, padded - len(tokens)), constant_values=-1), _runs(tokens, documents, positions))
        for tokens in held
    )


def attention_pairs(row_lengths: Sequence[Sequence[int]], shard: Shard) -> int:
    """The exact number of (query, visible key) pairs of a shard: a token at position p sees p + 1 keys."""
    _, positions = describe(row_lengths)
    return int(np.sum(positions[shard.index[: shard.num_tokens]] + 1))


def _cut(lengths: Sequence[int], *, cp: int, take_turns: bool = False) -> np.ndarray:
    """int64[len(lengths), 2 * cp]: sizes of the chunks of each length, which differ by at most one.

    The rest of the division by 2 * cp makes one chunk each one token longer: always the first ones, or, if they take
    turns, the next ones in the order 0, 1, ..., cp-1, 2cp-1, ..., cp, going on from one length to the next. In that
    order the ranks are 0, ..., cp-1, 0, ..., cp-1: as the whole part gives every rank the same, the next rank in turn
    is always one that holds fewest, and totals differ by at most one. A rank's spare tokens come from the head and the
    tail by turns, so that they even out in work too.
    """
    num_chunks = 2 * cp
    whole, rest = np.divmod(np.asarray(lengths, dtype=np.int64), num_chunks)
    chunk = np.arange(num_chunks)
    if not take_turns:
        return whole[:, None] + (chunk < rest[:, None])
    turn = np.where(chunk < cp, chunk, 3 * cp - 1 - chunk)
    already_dealt = np.cumsum(rest) - rest
    return whole[:, None] + ((turn - already_dealt[:, None]) % num_chunks < rest[:, None])


def _runs(tokens: np.ndarray, documents: np.ndarray, positions: np.ndarray) -> tuple[Run, ...]:
    """Runs of a rank holding `tokens`, ascending: a run ends where the next token does not go on with its document."""
    if not len(tokens):
        return ()
    breaks = (np.diff(tokens) != 1) | (np.diff(documents[tokens]) != 0)
    query_starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    query_lengths = np.diff(query_starts, append=len(tokens))
    first = tokens[query_starts]
    key_starts = first - positions[first]
    key_lengths = first + query_lengths - key_starts
    columns = (query_starts, query_lengths, key_starts, key_lengths)
    return tuple(map(Run, *(column.tolist() for column in columns)))


def _checked(lengths: Iterable[int]) -> np.ndarray:
    """Document lengths as int64[number of documents]. ValueError if one is below 1."""
    checked = np.fromiter(lengths, dtype=np.int64)
    if (checked < 1).any():
        document = int(np.argmax(checked < 1))
        raise ValueError(f"length {checked[document]} of document {document}: must be at least 1 token; leave it out")
    return checked
