"""Token files for tests, written without the package's own writer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from fourfold.data.source import TokenSource


def write_token_file(prefix: Path, documents: Sequence[Sequence[int]]) -> Path:
    """A Megatron pair of int32 ids; one sequence per document. Returns the prefix."""
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    prefix.parent.mkdir(parents=True, exist_ok=True)
    np.concatenate([np.asarray(d, dtype=np.int32) for d in documents]).tofile(prefix.with_name(prefix.name + ".bin"))
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1)
    arrays = [lengths, starts * 4, np.arange(len(lengths) + 1, dtype=np.int64)]
    prefix.with_name(prefix.name + ".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    return prefix


def numbered(*lengths: int, first: int = 0) -> list[list[int]]:
    """Documents whose tokens are all different, so that each can be recognised wherever it turns up."""
    ends = first + np.cumsum(lengths)
    return [list(range(end - length, end)) for end, length in zip(ends.tolist(), lengths, strict=True)]


def numbered_source(folder: Path, name: str, *lengths: int, first: int = 0, files: int = 1) -> TokenSource:
    """A source of numbered documents, dealt over some files in order."""
    documents = numbered(*lengths, first=first)
    cuts = [round(i * len(documents) / files) for i in range(files + 1)]
    prefixes = [write_token_file(folder / f"{name}-{i}", documents[a:b]) for i, (a, b) in enumerate(pairwise(cuts))]
    return TokenSource(name, prefixes, vocab_size=first + sum(lengths))
