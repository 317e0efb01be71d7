"""Any stretch of a source, against the documents as plain lists."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fourfold.data.indexed import TokenFileError
from fourfold.data.source import TokenSource
from tests.data.token_files import numbered, numbered_source, write_token_file


def expected(documents: list[list[int]], start: int, stop: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens, labels and lengths of pieces, document by document."""
    tokens, labels, lengths, at = [], [], [], 0
    for document in documents:
        places = range(max(start, at), min(stop, at + len(document)))
        tokens += [document[p - at] for p in places]
        labels += [document[p - at + 1] if p - at + 1 < len(document) else -1 for p in places]
        lengths += [len(places)] if places else []
        at += len(document)
    return tokens, labels, lengths


@pytest.mark.parametrize("files", [1, 3, 5])
def test_every_stretch_is_that_of_the_documents(tmp_path: Path, files: int) -> None:
    lengths = (3, 1, 0, 4, 0, 0, 2, 5, 1, 0)
    source = numbered_source(tmp_path, "s", *lengths, files=files)
    documents = numbered(*lengths)
    assert source.num_tokens == 16
    for start in range(16):
        for stop in range(start + 1, 17):
            row = source.read(start, stop - start)
            assert row.tokens.dtype == row.labels.dtype == np.int64
            assert (row.tokens.tolist(), row.labels.tolist(), list(row.lengths)) == expected(documents, start, stop)


def test_files_without_tokens_are_passed_over(tmp_path: Path) -> None:
    prefixes = [write_token_file(tmp_path / name, documents) for name, documents in
                (("a", [[]]), ("b", [[1, 2]]), ("c", [[], []]), ("d", [[3]]), ("e", [[]]))]  # fmt: skip
    row = TokenSource("s", prefixes, vocab_size=4).read(0, 3)
    assert (row.tokens.tolist(), row.labels.tolist(), row.lengths) == ([1, 2, 3], [2, -1, -1], (2, 1))


@pytest.mark.parametrize("wrong", [10, 2**30, -1, -(2**31)])
def test_an_id_beyond_the_vocabulary_is_named_by_file_token_and_document(tmp_path: Path, wrong: int) -> None:
    good = write_token_file(tmp_path / "good", [[1, 2, 3], [4, 5]])
    bad = write_token_file(tmp_path / "bad", [[1, 2, 3], [4, 9], [1, wrong, 1]])
    source = TokenSource("s", [good, bad], vocab_size=10)
    assert source.read(0, 10).tokens.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 9]
    # Also as the label of the last token.
    for start, count in ((8, 3), (5, 8), (10, 1), (11, 1)):
        with pytest.raises(TokenFileError) as caught:
            source.read(start, count)
        assert (caught.value.path, caught.value.offset) == (tmp_path / "bad.bin", 6 * 4)
        assert re.search(rf"token 6 \(document 2\) is {wrong}: .*vocab_size = 10", str(caught.value))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    prefix = write_token_file(tmp_path / "x", [[1]])
    (tmp_path / "x.bin").unlink()
    with pytest.raises(TokenFileError, match=r"x\.bin"):
        TokenSource("s", [prefix], vocab_size=10)


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    # The document index of Megatron's format, not its sequences, says where documents end.
    import struct

    prefix = write_token_file(tmp_path / "x", [[0, 1], [2], [3, 4, 5], [6]])
    index = (tmp_path / "x.idx").read_bytes()
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 4, 3)
    (tmp_path / "x.idx").write_bytes(header + index[34:-40] + np.array([0, 2, 4], dtype=np.int64).tobytes())
    row = TokenSource("s", [prefix], vocab_size=10).read(1, 6)
    assert (row.labels.tolist(), row.lengths) == ([2, -1, 4, 5, 6, -1], (2, 4))
    assert all(a < b for a, b in pairwise(row.tokens.tolist()))
