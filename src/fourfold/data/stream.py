"""The endless mixed stream of rows that training reads, any part of which can be had directly.

A source is a virtual stream of tokens without end. In each epoch it is cut into chunks, as long as the longest row of
the recipe, from a random place on and around its end. The chunks come in a random order, new in every epoch; the tokens
that fill no chunk are left out of the epoch. A row of any length is the next stretch of that stream and may lie over
chunks, whose borders are borders of documents. Samples are rows of mixed sources, and the sample number says of which
(:mod:`fourfold.data.mixture`).

So where training stands is a sample number and, for each source, how many of its tokens have been taken. No layout,
batch size or row length enters, and to go on from there costs the same in any epoch. A mixture that is changed on
resuming takes over those counts: every source goes on where it stood, by name; a new one begins at its beginning, and
one that is gone keeps its place in case it returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from fourfold.data.mixture import Mixture
from fourfold.data.permutation import Permutation, keys
from fourfold.data.source import Row, TokenSource


@dataclass(frozen=True)
class Position:
    """Where a stream stands: a small piece of every checkpoint.

    Attributes:
        samples: number of the next sample of the mixture, counted from 0, those passed over included.
        tokens: taken from each source so far, by name, in all epochs together.
    """

    samples: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """What :meth:`from_json` reads."""
        return {"samples": self.samples, "tokens": dict(self.tokens)}

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Position:
        """Raises ValueError if it is no position."""
        samples, tokens = values.get("samples"), values.get("tokens")
        if not isinstance(samples, int) or not isinstance(tokens, Mapping):
            raise ValueError(f"{values} is no position in a data stream: it needs samples and tokens")
        for value in (samples, *tokens.values()):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{values} is no position in a data stream: {value!r} is no count")
        return cls(samples, {str(name): count for name, count in tokens.items()})


class EndlessSource:
    """The virtual stream of one source.

    Args:
        source: its tokens.
        chunk: tokens that stay together; at most as many as the source has.
        seed: of the order.
    """

    def __init__(self, source: TokenSource, *, chunk: int, seed: int) -> None:
        if not 1 <= chunk <= source.num_tokens:
            raise ValueError(f"chunk = {chunk}: must be at least 1 and at most the {source.num_tokens} tokens")
        self.name = source.name
        self._source = source
        self._chunk = chunk
        self._seed = seed
        self._num_chunks = source.num_tokens // chunk
        self._order = lru_cache(maxsize=2)(self._make_order)  # a row may lie over the end of an epoch

    def read(self, start: int, count: int) -> Row:
        """Tokens ``start`` ... ``start + count - 1`` of the virtual stream."""
        pieces, stop = [], start + count
        while start < stop:
            number, inside = divmod(start, self._chunk)
            epoch, place = divmod(number, self._num_chunks)
            taken = min(stop - start, self._chunk - inside)
            pieces += self._around(self._begin(epoch, place) + inside, taken)
            start += taken
        return Row.join(pieces)

    def _begin(self, epoch: int, place: int) -> int:
        """Where the chunk at a place of an epoch begins in the source, which counts around its end."""
        order, offset = self._order(epoch)
        return offset + order[place] * self._chunk

    def _make_order(self, epoch: int) -> tuple[Permutation, int]:
        of = (self._seed, self.name, epoch)
        (number,) = keys("offset", *of, count=1)
        return Permutation(self._num_chunks, "order", *of), number % self._source.num_tokens

    def _around(self, start: int, count: int) -> list[Row]:
        size = self._source.num_tokens
        start %= size
        first = min(count, size - start)
        pieces = [self._source.read(start, first)]
        if first < count:
            pieces.append(self._source.read(0, count - first))
        return pieces


class Stream:
    """All sources, mixed.

    Args:
        sources: with different names.
        weights: of the sources.
        chunk: see :class:`EndlessSource`: the longest row there will be.
        seed: of the order.
        skip: ranges [first, end) of sample numbers, in order and apart, that are taken from their sources but never
            returned.

    Raises:
        RecipeError: weights that :class:`~fourfold.data.mixture.Mixture` refuses.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        weights: Sequence[float],
        *,
        chunk: int,
        seed: int,
        skip: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._sources = [EndlessSource(source, chunk=chunk, seed=seed) for source in sources]
        self._mixture = Mixture(weights)
        self._skip = tuple(skip)

    def rows(self, position: Position, seq_len: int, first: int, stop: int) -> list[Row]:
        """Rows ``first`` ... ``stop - 1`` of those that follow ``position``, if all have ``seq_len`` tokens.

        Raises:
            TokenFileError: a token is not in the vocabulary.
        """
        return [self._row(position, seq_len, self._sample(position, index)) for index in range(first, stop)]

    def advance(self, position: Position, seq_len: int, count: int) -> Position:
        """The position after the next ``count`` rows, which must be one at least. Reads nothing."""
        samples = self._sample(position, count - 1) + 1
        taken = {
            source.name: position.tokens.get(source.name, 0)
            + seq_len * (self._mixture.count(index, samples) - self._mixture.count(index, position.samples))
            for index, source in enumerate(self._sources)
        }
        return Position(samples, {**position.tokens, **taken})

    def _row(self, position: Position, seq_len: int, sample: int) -> Row:
        index = self._mixture.source(sample)
        before = self._mixture.count(index, sample) - self._mixture.count(index, position.samples)
        source = self._sources[index]
        return source.read(position.tokens.get(source.name, 0) + before * seq_len, seq_len)

    def _sample(self, position: Position, index: int) -> int:
        """The sample number of row ``index`` after ``position``: ranges to be skipped do not count."""
        sample = position.samples + index
        for first, end in self._skip:
            begin = max(first, position.samples)
            if begin > sample:
                break
            sample += max(0, end - begin)
        return sample
