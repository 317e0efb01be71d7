"""How much attention every rank has to do in one step: documents, packed into rows, and dealt to context parallelism.

A token sees its own document up to itself, so that work is counted in pairs of a query and a key that it sees. Ranks of
context parallelism wait for each other in every layer of every micro-batch, and data-parallel groups at the end of the
step. (algorithms.md 3.7; ISCA'25, Figures 7 and 14)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fourfold.data.indexed import TokenFile, find_token_files
from fourfold.layout.documents import Strategy
from fourfold.planner.imbalance import Documents, cut_rows, pairs_of_ranks
from fourfold.recipe.errors import nearest_name, show

STRATEGIES: tuple[Strategy, ...] = ("head_tail", "per_document")

_LISTS = ("lengths", "file", "tokens")  # keys of what is no distribution
_DRAWN = ("mean", "median", "dist", "sigma")  # keys that `Documents` reads
_BITE = 1 << 20  # documents that are looked at in one go
_MOST_CHUNKS = 1 << 22  # of documents that are cut one by one, in one go: some 100 MB


@dataclass(frozen=True, eq=False)
class Lengths:
    """Documents one after another as they are stored; after the last comes the first again."""

    name: str
    """What `parse_mix` reads."""
    parts: tuple[np.ndarray, ...]
    """Integers; end to end. Documents without tokens count for nothing."""

    def __str__(self) -> str:
        return self.name

    def fill(self, tokens: int) -> np.ndarray:
        """int64: the first lengths, as many as sum to at least so many tokens."""
        taken, total = [], 0
        for some in self._bites():
            taken.append(some)
            total += int(some.sum())
            if total >= tokens:
                return np.concatenate(taken)
        return np.tile(np.concatenate(taken), -(-tokens // total))

    def _bites(self) -> Iterator[np.ndarray]:
        for part in self.parts:
            for first in range(0, len(part), _BITE):
                some = part[first : first + _BITE].astype(np.int64)
                yield some[some > 0]


Mix = Documents | Lengths


def parse_mix(text: str) -> Mix:
    """What documents there are, in any of these forms:

    "mean=1024,dist=exponential"     a distribution, as `planner.Documents` reads it
    "lengths=32768,1024x96"          these lengths in this order; 1024x96: 96 times 1,024
    "file=lengths.txt"               the same from a file, one per line
    "tokens=data/shard"              the documents of token files, by their folder or prefix, in the order stored

    ValueError naming key, value, rule and nearest legal value.
    """
    key, equals, value = (piece.strip() for piece in text.partition("="))
    if not equals or key in _DRAWN:
        return Documents.parse(text)
    if key not in _LISTS:
        nearest = nearest_name(key, (*_DRAWN, *_LISTS)) or ", ".join(("mean", "median", *_LISTS))
        raise ValueError(f"documents: {key}: unknown key; nearest legal: {nearest}")
    name = f"{key}={value}"
    if key == "lengths":
        return Lengths(name, (_lengths(value.split(","), where="lengths"),))
    if key == "file":
        return Lengths(name, (_lengths(_lines(value), where=value),))
    return Lengths(name, _stored_lengths(value))


@dataclass(frozen=True, eq=False)
class Loads:
    """Attention of one step, in (query, visible key) pairs of one head and one layer."""

    pairs: np.ndarray
    """int64 [dp, micro-batches, cp]: of each rank, exactly."""
    strategy: Strategy
    seq_len: int
    micro_batch: int
    """Rows of a micro-batch."""
    mix: str

    @cached_property
    def per_rank(self) -> np.ndarray:
        """int64 [dp, cp]: of each rank in the whole step."""
        return self.pairs.sum(axis=1)

    @property
    def slowest_over_mean(self) -> float:
        """Of all ranks, over the step: the largest work over the mean."""
        return float(self.per_rank.max() / self.per_rank.mean())

    @property
    def slowest_over_fastest(self) -> float:
        """Of all ranks, over the step: the largest work over the smallest; infinite if a rank has none."""
        least = int(self.per_rank.min())
        return float(self.per_rank.max()) / least if least else float("inf")

    @property
    def slowest_over_mean_per_micro_batch(self) -> float:
        """Of the ranks of one micro-batch: the largest work over the mean; the mean over all micro-batches. By so much
        the slowest rank delays the others, as they meet in every layer."""
        return float((self._slowest / self.pairs.mean(axis=2)).mean())

    @property
    def slowest_over_fastest_per_micro_batch(self) -> float:
        """Of the ranks of one micro-batch: the largest work over the smallest; the median of all micro-batches.
        Infinite where a rank has none."""
        with np.errstate(divide="ignore"):
            return float(np.median(self._slowest / self.pairs.min(axis=2)))

    @property
    def waiting(self) -> np.ndarray:
        """int64 [dp, micro-batches, cp]: pairs for whose time a rank waits for the slowest of its group."""
        return self._slowest[:, :, None] - self.pairs

    @property
    def waiting_share(self) -> float:
        """Of the time from the first rank's attention to the last one's end, in every micro-batch and on the mean rank:
        what is spent waiting."""
        return float(self.waiting.sum() / (self._slowest.sum() * self.pairs.shape[2]))

    @cached_property
    def _slowest(self) -> np.ndarray:
        """int64 [dp, micro-batches]: pairs of the slowest rank."""
        return self.pairs.max(axis=2)


def loads_of(
    mix: Mix | None,
    *,
    seq_len: int,
    micro_batch: int = 1,
    dp: int,
    micro_batches: int,
    cp: int,
    strategy: Strategy = "head_tail",
    seed: int = 0,
) -> Loads:
    """The work of one step of `dp` groups with so many micro-batches of `micro_batch` rows of `seq_len` tokens.

    Documents are packed end to end into rows; what goes on in the next row is a document of its own there. The rows
    of a group are one after another, as the trainer deals them. `mix` None: every row is one document. `seed`: of the
    draws from a distribution; both strategies get the same documents from it.

    ValueError on a size below 1, or an unknown strategy.
    """
    sizes = {"seq_len": seq_len, "micro_batch": micro_batch, "dp": dp, "micro_batches": micro_batches, "cp": cp}
    for key, size in sizes.items():
        if size < 1:
            raise ValueError(f"{key} = {size}: must be at least 1; nearest legal: 1")
    if strategy not in STRATEGIES:
        nearest = nearest_name(strategy, STRATEGIES) or STRATEGIES[0]
        raise ValueError(f"strategy = {show(strategy)}: must be head_tail or per_document; nearest legal: {nearest}")
    if seed < 0:
        raise ValueError(f"seed = {seed}: must be at least 0; nearest legal: 0")

    rows = dp * micro_batches * micro_batch
    pieces = _pieces(mix, rows=rows, seq_len=seq_len, seed=seed)
    pairs = [
        pairs_of_ranks(some, seq_len=seq_len, cp=cp, strategy=strategy, micro_batch=micro_batch)
        for some in _in_parts(pieces, tokens=seq_len * micro_batch, chunks=2 * cp)
    ]
    return Loads(
        pairs=np.concatenate(pairs).reshape(dp, micro_batches, cp),
        strategy=strategy,
        seq_len=seq_len,
        micro_batch=micro_batch,
        mix="one document per row" if mix is None else str(mix),
    )


def both_splits(
    mix: Mix | None, *, seq_len: int, micro_batch: int = 1, dp: int, micro_batches: int, cp: int, seed: int = 0
) -> tuple[Loads, Loads]:
    """The work of `loads_of` by head_tail and by per_document, of the same documents."""

    def of(strategy: Strategy) -> Loads:
        return loads_of(
            mix,
            seq_len=seq_len,
            micro_batch=micro_batch,
            dp=dp,
            micro_batches=micro_batches,
            cp=cp,
            strategy=strategy,
            seed=seed,
        )

    return of("head_tail"), of("per_document")


def _pieces(mix: Mix | None, *, rows: int, seq_len: int, seed: int) -> np.ndarray:
    """As `cut_rows` has them."""
    if mix is None:
        return np.arange(rows + 1, dtype=np.int64) * seq_len
    tokens = rows * seq_len
    lengths = mix.fill(tokens) if isinstance(mix, Lengths) else mix.fill(tokens, np.random.default_rng(seed))
    return cut_rows(lengths, rows=rows, seq_len=seq_len)


def _in_parts(pieces: np.ndarray, *, tokens: int, chunks: int) -> Iterator[np.ndarray]:
    """The pieces of some micro-batches (of so many tokens) after the other, so that memory stays small."""
    number = int(pieces[-1]) // tokens
    bounds = np.searchsorted(pieces, np.arange(number + 1) * tokens)
    first = 0
    while first < number:
        most = bounds[first] + _MOST_CHUNKS // chunks
        last = max(first + 1, int(np.searchsorted(bounds, most, side="right")) - 1)
        yield pieces[bounds[first] : bounds[last] + 1] - first * tokens
        first = last


def _lengths(items: Iterable[str], *, where: str) -> np.ndarray:
    """int64: of "1024" or "1024x96"."""
    lengths, counts = [], []
    for number, item in enumerate(items, start=1):
        length, times, count = (piece.strip() for piece in item.partition("x"))
        for kind, text in (("length", length), *((("count", count),) if times else ())):
            if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 40):
                rule = f"entry {number}: {kind} = {show(text)}: must be a whole number of at least 1"
                raise ValueError(f"documents: {where}: {rule}; nearest legal: 1")
        lengths.append(int(length))
        counts.append(int(count) if times else 1)
    if not lengths:
        raise ValueError(f"documents: {where}: holds no length; as in 32768 or 1024x96, one per line")
    return np.repeat(np.array(lengths, dtype=np.int64), counts)


def _lines(path: str) -> Iterator[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"documents: file = {show(path)}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"documents: file = {show(path)}: is not text; one length per line") from None
    return (line for line in text.splitlines() if line.strip())


def _stored_lengths(path: str) -> tuple[np.ndarray, ...]:
    """Of the documents of token files: only their index is read."""
    files = find_token_files(path) if path else []
    if not files:
        raise ValueError(f"documents: tokens = {show(path)}: must be a folder or a prefix of token files (.bin, .idx)")
    parts = tuple(TokenFile(prefix).lengths for prefix in files)
    if not any(part.any() for part in parts):
        raise ValueError(f"documents: tokens = {show(path)}: has no document with tokens")
    return parts
