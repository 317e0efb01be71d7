"""How unevenly document masks spread the work of attention, over context-parallel ranks and over data-parallel groups.

A token sees its own document up to itself, so that a row of many short documents is cheap and a row of one long
document dear. Two things follow. Context parallelism cuts every row at the same places whatever is in it (ISCA'25,
Figure 7), and the ranks wait for the slowest in every layer. And the data-parallel groups wait at the end of a step for
the one whose rows were dearest; in ISCA'25's Figure 14 that is most of the spread. Both are expectations here, over
rows packed with documents from a distribution: a seeded sample, so that the same question has the same answer.

Only attention over pairs is meant. Everything else costs the same per token, and evens the whole out accordingly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from fourfold.layout.documents import Strategy
from fourfold.recipe.errors import nearest_name, show

if TYPE_CHECKING:
    from fourfold.planner.jobs import Jobs

Distribution = Literal["fixed", "exponential", "lognormal"]
_DISTRIBUTIONS = ("fixed", "exponential", "lognormal")
_KEYS = ("mean", "median", "dist", "sigma")
_EXAMPLE = "mean=1024,dist=exponential"

_LONGEST = 1 << 40  # tokens of a document, so that sums of them are exact
_SAMPLE_DOCUMENTS = 100_000  # so many make factors good to about a percent, in some 10 ms
_MIN_ROWS, _MAX_ROWS = 128, 4096
_DRAWS = 1 << 16  # of rows, for sums of several
_MIN_GROUPS = 4096
_FAR = 40  # the largest of n is not among the smallest 1 - 40 / n but once in e^40
_MOST_CHUNKS = 200_000  # of documents that are cut one by one: these come out nearly even, and few are enough to tell
_MOST_ROWS_DRAWN = 64  # sums of more rows are as good as normally distributed


@dataclass(frozen=True, slots=True)
class Documents:
    """Lengths of documents in tokens, as they come before packing."""

    mean: float
    distribution: Distribution = "fixed"
    sigma: float = 0.0
    """Of the logarithm of the length, if lognormal. Text from the web has about 1 to 1.5."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "mean=1024,dist=exponential", "mean=4096" (all equal) or "median=1024,dist=lognormal,sigma=1.5".

        ValueError naming key, value, rule and nearest legal value.
        """
        values = _split(text)
        distribution = values.get("dist", "fixed")
        if distribution not in _DISTRIBUTIONS:
            nearest = nearest_name(distribution, _DISTRIBUTIONS) or "exponential"
            raise ValueError(
                f"documents: dist = {distribution}: must be one of {', '.join(_DISTRIBUTIONS)}; "
                f"nearest legal: {nearest}"
            )
        if ("mean" in values) == ("median" in values):
            raise ValueError(f"documents = {show(text)}: needs either mean or median, in tokens, as in {_EXAMPLE}")
        lognormal = distribution == "lognormal"
        for key in ("median", "sigma"):
            if key in values and not lognormal:
                raise ValueError(
                    f"documents: {key}: belongs to dist=lognormal; nearest legal: mean=..., dist={distribution}"
                )
        if lognormal and "sigma" not in values:
            raise ValueError(f"documents = {show(text)}: dist=lognormal needs sigma; typical: sigma=1.5")

        numbers = {key: _number(key, values[key]) for key in ("mean", "median", "sigma") if key in values}
        sigma = numbers.get("sigma", 0.0)
        mean = numbers["mean"] if "mean" in numbers else numbers["median"] * float(np.exp(sigma**2 / 2))
        if mean < 1:
            raise ValueError(f"documents: mean = {mean:g}: must be at least 1 token; nearest legal: 1")
        return cls(mean, distribution, sigma)

    def __str__(self) -> str:
        """What `parse` reads."""
        sigma = f",sigma={self.sigma:g}" if self.distribution == "lognormal" else ""
        return f"mean={self.mean:g},dist={self.distribution}{sigma}"

    def sample(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """int64[count]: lengths, at least 1."""
        if self.distribution == "exponential":
            lengths = generator.exponential(self.mean, count)
        elif self.distribution == "lognormal":
            lengths = np.exp(generator.normal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, count))
        else:
            lengths = np.full(count, self.mean)
        return np.clip(np.rint(lengths), 1, _LONGEST).astype(np.int64)

    def fill(self, tokens: int, generator: np.random.Generator) -> np.ndarray:
        """int64: lengths that sum to at least so many tokens."""
        lengths = np.zeros(0, dtype=np.int64)
        while lengths.sum() < tokens:
            missing = tokens - int(lengths.sum())
            # Of a heavy tail, a sample may be much shorter than its mean: twice as many then.
            more = self.sample(16 + max(int(1.1 * missing / self.mean), len(lengths)), generator)
            lengths = np.concatenate((lengths, more))
        return lengths


class Imbalance:
    """Factors by which the slowest has more attention to do than the mean; 1 without documents."""

    def __init__(
        self, documents: Documents | None, seq_len: int, *, strategy: Strategy = "head_tail", seed: int = 0
    ) -> None:
        """Rows of `seq_len` tokens, packed from `documents`; None: one document fills each row."""
        self.documents = documents
        self.seq_len = seq_len
        self._strategy: Strategy = strategy
        self._seed = seed
        self._work: dict[int, np.ndarray] = {}
        self._groups: dict[tuple[int, int], np.ndarray] = {}
        self._known: dict[tuple[Any, ...], float] = {}

    @cached_property
    def pairs_per_sequence(self) -> float:
        """Mean number of (query, visible key) pairs of a row."""
        if self.documents is None:
            return self.seq_len * (self.seq_len + 1) / 2
        return float(self.work(1).mean())

    def cp_factor(self, cp: Any, micro_batch: Any = 1) -> np.ndarray:
        """Attention of the slowest context-parallel rank of a micro-batch over that of the mean rank, both summed over
        many micro-batches."""
        return self._each(self._cp_factor, cp, micro_batch)

    def dp_factor(self, dp: Any, rows: Any, cp: Any = 1) -> np.ndarray:
        """Attention of the slowest data-parallel group of a step over that of the mean group.

        `rows`: sequences per group and step. With `cp`, a group is as slow as its slowest ranks, row by row; multiply
        by `cp_factor` for the whole.
        """
        return self._each(self._dp_factor, dp, rows, cp)

    def factor(self, jobs: Jobs) -> np.ndarray:
        """Attention of the slowest rank of the slowest group over that of the mean rank, for each job."""
        rows = np.maximum(1, np.rint(jobs.sequences / jobs.dp))
        return self.cp_factor(jobs.cp, jobs.micro_batch) * self.dp_factor(jobs.dp, rows, jobs.cp)

    def work(self, cp: int) -> np.ndarray:
        """int64[rows, cp]: pairs that each rank has of each row of the sample; of fewer rows if `per_document`."""
        if cp not in self._work:
            pieces = self._pieces
            rows = pieces[-1] // self.seq_len
            if self._strategy == "per_document":
                some = min(rows, max(1, _MOST_CHUNKS * rows // (2 * cp * len(pieces)))) * self.seq_len
                pieces = pieces[pieces <= some]
            self._work[cp] = pairs_of_ranks(pieces, seq_len=self.seq_len, cp=cp, strategy=self._strategy)
        return self._work[cp]

    @cached_property
    def _pieces(self) -> np.ndarray:
        """Of a long run of rows, as `cut_rows` has them."""
        if self.documents is None:
            return np.array([0, self.seq_len], dtype=np.int64)
        wanted = round(_SAMPLE_DOCUMENTS * self.documents.mean / self.seq_len)
        rows = min(max(wanted, _MIN_ROWS), _MAX_ROWS)
        lengths = self.documents.fill(rows * self.seq_len, np.random.default_rng(self._seed))
        return cut_rows(lengths, rows=rows, seq_len=self.seq_len)

    def _cp_factor(self, cp: int, micro_batch: int) -> float:
        work = self.work(cp)
        if cp == 1 or self.documents is None:
            return 1.0
        together = work[: len(work) // micro_batch * micro_batch].reshape(-1, micro_batch, cp).sum(axis=1)
        if not len(together):  # more rows than the sample has: they even out
            together = work.sum(axis=0, keepdims=True)
        return float(together.max(axis=1).mean() / together.mean())

    def _dp_factor(self, dp: int, rows: int, cp: int) -> float:
        if dp == 1 or self.documents is None:
            return 1.0
        if rows <= _MOST_ROWS_DRAWN:
            return _largest(self._sums(rows, cp), dp)
        slowest = self._slowest(cp)
        return 1 + float(slowest.std() / slowest.mean() / np.sqrt(rows)) * _largest(self._normals, dp)

    def _sums(self, rows: int, cp: int) -> np.ndarray:
        """Work of a group with so many rows over the mean of such groups: ascending, a sample."""
        if (rows, cp) not in self._groups:
            sums = self._slowest(cp)
            if rows > 1:
                generator = np.random.default_rng((self._seed, rows, cp))
                sums = generator.choice(sums, (max(_MIN_GROUPS, _DRAWS // rows), rows)).mean(axis=1)
            self._groups[rows, cp] = np.sort(sums) / sums.mean()
        return self._groups[rows, cp]

    def _slowest(self, cp: int) -> np.ndarray:
        """Work of the slowest rank, row by row."""
        even = self._strategy == "per_document"  # its ranks hardly differ, but its rows do
        return self.work(1 if even else cp).max(axis=1)

    @cached_property
    def _normals(self) -> np.ndarray:
        return np.sort(np.random.default_rng(self._seed).standard_normal(_DRAWS))

    def _each(self, function: Callable[..., float], *columns: Any) -> np.ndarray:
        """The function of every different combination in some columns of integers, once and for all."""
        shaped = np.broadcast_arrays(*(np.asarray(column, dtype=np.int64) for column in columns))
        key = np.zeros(shaped[0].shape, dtype=np.int64)
        for column in shaped:
            key = key * (int(column.max()) + 1) + column
        _, first, place = np.unique(key, return_index=True, return_inverse=True)
        values = np.zeros(len(first))
        for i, where in enumerate(first.tolist()):
            asked = (function.__name__, *(int(column.flat[where]) for column in shaped))
            if asked not in self._known:
                self._known[asked] = function(*asked[1:])
            values[i] = self._known[asked]
        return values[place.ravel()].reshape(shaped[0].shape)


def _largest(ordered: np.ndarray, count: int) -> float:
    """Expectation of the largest of `count` draws from a sample, which is in ascending order."""
    tail = ordered[-min(len(ordered), 1 + _FAR * len(ordered) // count) :]  # the rest is the largest hardly ever
    places = np.arange(len(ordered) - len(tail), len(ordered) + 1) / len(ordered)
    below = np.exp(count * np.log(np.maximum(places, 1e-300)))  # that all are: places**count, but quicker
    below[0] = 0
    return float(np.diff(below) @ tail)


def cut_rows(lengths: np.ndarray, *, rows: int, seq_len: int) -> np.ndarray:
    """int64, ascending: where documents of these lengths, end to end, begin in so many rows, and where the rows end.

    What goes on in the next row is a document of its own there, as in `layout.pack`.
    """
    starts = np.cumsum(lengths) - lengths
    both = np.concatenate((starts[starts < rows * seq_len], np.arange(rows + 1) * seq_len))
    both.sort(kind="stable")  # which merges what is in order already
    return both[np.append(True, np.diff(both) > 0)]


def pairs_of_ranks(
    pieces: np.ndarray, *, seq_len: int, cp: int, strategy: Strategy, micro_batch: int = 1
) -> np.ndarray:
    """int64[micro-batches, cp]: (query, visible key) pairs that each rank has of each micro-batch of so many rows.

    Of documents that begin at `pieces`, the last of which is the end. Exactly what `layout.attention_pairs` counts in
    `layout.shards`.
    """
    if strategy == "per_document":
        return _deal_documents(pieces, seq_len * micro_batch, cp)
    rows = pieces[-1] // seq_len
    bounds = np.cumsum([0, *_chunks(seq_len, cp)[:-1]])
    places = np.append((np.arange(rows)[:, None] * seq_len + bounds).ravel(), rows * seq_len)
    chunks = np.diff(_pairs_before(pieces, places)).reshape(-1, micro_batch, 2 * cp).sum(axis=1)
    return chunks[:, :cp] + chunks[:, : cp - 1 : -1]


def _chunks(length: int, cp: int) -> np.ndarray:
    """Sizes of the 2 cp chunks of a row: longer ones first."""
    whole, rest = divmod(length, 2 * cp)
    return whole + (np.arange(2 * cp) < rest)


def _pairs_before(pieces: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Pairs of all tokens before each place, of documents that begin (and at last end) at `pieces`."""
    lengths = np.diff(pieces)
    before = np.concatenate(([0], np.cumsum(lengths * (lengths + 1) // 2)))
    document = np.searchsorted(pieces, places, side="right") - 1
    inside = places - pieces[document]
    return before[document] + inside * (inside + 1) // 2


def _deal_documents(pieces: np.ndarray, tokens: int, cp: int) -> np.ndarray:
    """int64[micro-batches, cp]: pairs per rank where every document of a micro-batch of so many tokens is cut into
    2 cp chunks."""
    lengths = np.diff(pieces)
    micro_batch = pieces[:-1] // tokens
    whole, rest = np.divmod(lengths, 2 * cp)
    chunk = np.arange(2 * cp)
    turn = np.where(
        chunk < cp, chunk, 3 * cp - 1 - chunk
    )  # spare tokens go round the ranks, on from document to document
    dealt = np.cumsum(rest) - rest
    dealt -= dealt[np.searchsorted(micro_batch, micro_batch)]  # from the first of each micro-batch again
    sizes = whole[:, None] + ((turn - dealt[:, None]) % (2 * cp) < rest[:, None])
    ends = np.cumsum(sizes, axis=1)
    pairs = (ends * (ends + 1) - (ends - sizes) * (ends - sizes + 1)) // 2
    of_rank = pairs[:, :cp] + pairs[:, : cp - 1 : -1]
    return np.add.reduceat(of_rank, np.searchsorted(micro_batch, np.arange(pieces[-1] // tokens)))


def _split(text: str) -> dict[str, str]:
    """Keys and values of "key=value,key=value"."""
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ValueError(f"documents = {show(text)}: {show(part.strip())} must be key=value, as in {_EXAMPLE}")
        if key not in _KEYS:
            nearest = nearest_name(key, _KEYS) or ", ".join(_KEYS)
            raise ValueError(f"documents: {key}: unknown key; nearest legal: {nearest}")
        if key in values:
            raise ValueError(f"documents = {show(text)}: {key} is given twice")
        values[key] = value
    return values


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise ValueError(f"documents: {key} = {text}: must be a number above 0")
    return value
