"""One source of tokens: its files end to end, from which any stretch can be read with labels and documents."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from fourfold.data.indexed import TokenFile, TokenFileError


@dataclass(frozen=True, eq=False)
class Row:
    """Some tokens with what training needs to know of them.

    Attributes:
        tokens: int64 [n].
        labels: int64 [n], the next token of the same document; -1 for the last of a document.
        lengths: of the pieces of documents in the row, in order; they sum to n.
    """

    tokens: np.ndarray
    labels: np.ndarray
    lengths: tuple[int, ...]

    @classmethod
    def join(cls, pieces: Sequence[Row]) -> Row:
        """Pieces end to end. Where two meet, one document ends and another begins, whatever they hold."""
        if len(pieces) == 1:
            return pieces[0]
        tokens, labels = (np.concatenate([getattr(piece, key) for piece in pieces]) for key in ("tokens", "labels"))
        return cls(tokens, labels, tuple(length for piece in pieces for length in piece.lengths))


class TokenSource:
    """Token files, end to end.

    Args:
        name: by which positions in it are kept.
        prefixes: of the files, in order.
        vocab_size: of the model: every id that is read must be below.

    Raises:
        TokenFileError: a file is missing or is not what it should be.
    """

    def __init__(self, name: str, prefixes: Sequence[Path], *, vocab_size: int) -> None:
        self.name = name
        self._files = [TokenFile(prefix) for prefix in prefixes]
        self._vocab_size = vocab_size
        self._starts = [0, *accumulate(file.num_tokens for file in self._files)]
        self.num_tokens = self._starts[-1]

    def read(self, start: int, count: int) -> Row:
        """Tokens ``start`` ... ``start + count - 1`` of the source.

        Raises:
            TokenFileError: a token is not in the vocabulary.
        """
        pieces = []
        for number in range(bisect_right(self._starts, start) - 1, len(self._files)):
            file, begin = self._files[number], self._starts[number]
            first, stop = max(start - begin, 0), min(start + count - begin, file.num_tokens)
            if first < stop:
                pieces.append(self._read_file(file, first, stop))
            if begin + file.num_tokens >= start + count:
                break
        return Row.join(pieces)

    def _read_file(self, file: TokenFile, start: int, stop: int) -> Row:
        ends = _document_ends(file, start, stop)
        # The token after the stretch is the label of its last one; the file's last token has none.
        tokens = file.read(start, min(stop + 1, file.num_tokens) - start).astype(np.int64)
        self._check(file, start, tokens)
        labels = np.full(stop - start, -1, dtype=np.int64)
        labels[: len(tokens) - 1] = tokens[1:]
        labels[ends - start - 1] = -1
        cuts = ends if len(ends) and ends[-1] == stop else np.append(ends, stop)
        return Row(tokens[: stop - start], labels, tuple(np.diff(cuts, prepend=start).tolist()))

    def _check(self, file: TokenFile, start: int, tokens: np.ndarray) -> None:
        """As one unsigned comparison: a negative id is a huge one."""
        wrong = tokens.view(np.uint64) >= self._vocab_size
        if wrong.any():
            at = int(np.argmax(wrong))
            rule = (
                f"token {start + at:,} (document {file.document_at(start + at):,}) is {tokens[at]}: "
                f"model.vocab_size = {self._vocab_size} has no such entry"
            )
            raise TokenFileError(file.bin_path, (start + at) * file.dtype.itemsize, rule)


def _document_ends(file: TokenFile, start: int, stop: int) -> np.ndarray:
    """int64, ascending: the places in (start, stop] at which a document has just ended."""
    ends = file.starts_between(start + 1, stop + 1)  # where the next begins
    return np.append(ends, stop) if stop == file.num_tokens else ends
