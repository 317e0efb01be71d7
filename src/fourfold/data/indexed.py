"""Token files in Megatron's format: documents of token ids, one after the other, and an index that says where they are.

A token file is a pair. ``NAME.bin`` holds token ids and nothing else. ``NAME.idx`` holds, little-endian:

    9 bytes    b"MMIDIDX\\0\\0"
    uint64     version, 1
    uint8      code of the dtype of the ids
    uint64     number of sequences, n
    uint64     entries of the document index, m
    int32[n]   tokens in each sequence
    int64[n]   byte of NAME.bin at which each sequence begins
    int64[m]   the document index: the first sequence of each document, then n
    int8[n]    mode of each sequence; only in files made for several modalities, passed over here

Most files have one sequence per document, but a document may have several. Both files are mapped into memory, so
opening costs one pass over the index, and any place in the file is equally near.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of the document index
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # by code; 6 and 7 are floats, which are no ids
VERSION_AT, DTYPE_AT, SEQUENCES_AT, DOCUMENTS_AT = 9, 17, 18, 26  # bytes
SCAN = 1 << 20  # sequences per bite of the scan, so that it needs a few MB whatever the size of the index


class TokenFileError(ValueError):
    """Something is wrong with a token file: in which of its files, at which byte, and what should be there."""

    def __init__(self, path: Path, offset: int, rule: str) -> None:
        super().__init__(path, offset, rule)  # as arguments, so that it can be pickled
        self.path, self.offset, self.rule = path, offset, rule

    def __str__(self) -> str:
        return f"{self.path}, byte {self.offset:,}: {self.rule}"


@dataclass(frozen=True, eq=False)
class _Index:
    """The arrays of an index, mapped and not aligned, which is why nothing here sorts or searches them with NumPy."""

    dtype: np.dtype
    sizes: np.ndarray  # int32[n]
    pointers: np.ndarray  # int64[n]
    documents: np.ndarray  # int64[m]
    sizes_at: int
    pointers_at: int
    documents_at: int


class TokenFile:
    """A token file, opened for reading. Its tokens are one stream; its documents divide the stream.

    Attributes:
        prefix: the path without ``.bin`` and ``.idx``.
        dtype: of the ids, as stored.
        num_tokens, num_documents: in the whole file.
        lengths: int32 or int64[num_documents], tokens of each document; read-only.

    Raises:
        TokenFileError: either file is missing, or the structure is not that of the format.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        index = _read_index(self.idx_path)
        self.dtype = index.dtype
        tokens = _map(self.bin_path)
        one_each = _scan(index, self.idx_path, self.bin_path, len(tokens))
        self._tokens = np.frombuffer(tokens, dtype=index.dtype) if tokens else np.empty(0, index.dtype)
        self.num_tokens = len(self._tokens)
        self.num_documents = len(index.documents) - 1
        if one_each:
            self.lengths, self._starts = index.sizes, index.pointers  # mapped: no memory of our own
        else:
            starts = np.append(index.pointers, len(tokens))[index.documents]
            self.lengths, self._starts = np.diff(starts) // self.dtype.itemsize, starts[:-1]
            self.lengths.flags.writeable = False

    @property
    def bin_path(self) -> Path:
        """The file of token ids."""
        return self.prefix.with_name(self.prefix.name + ".bin")

    @property
    def idx_path(self) -> Path:
        """The file that says where sequences and documents are."""
        return self.prefix.with_name(self.prefix.name + ".idx")

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start..start+count-1 of the stream: a read-only view, of ``dtype``. ValueError beyond the end."""
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise ValueError(f"{self.bin_path} has no tokens {start}..{start + count - 1}: it holds {self.num_tokens}")
        return self._tokens[start : start + count]

    def document_at(self, token: int) -> int:
        """The document that a token of the stream is in, by binary search."""
        if not 0 <= token < self.num_tokens:
            raise ValueError(f"{self.bin_path} has no token {token}: it holds {self.num_tokens}")
        return bisect_right(self._starts, token * self.dtype.itemsize) - 1

    def document_start(self, document: int) -> int:
        """The place in the stream of a document's first token."""
        return int(self._starts[document]) // self.dtype.itemsize

    def starts_between(self, start: int, stop: int) -> np.ndarray:
        """int64, ascending: the tokens in [start, stop) that are the first of a document. Empty documents have none."""
        size = self.dtype.itemsize
        first, last = (bisect_right(self._starts, place * size - 1) for place in (start, min(stop, self.num_tokens)))
        return np.unique(np.asarray(self._starts[first:last], dtype=np.int64) // size)


def find_token_files(path: str | Path) -> list[Path]:
    """The prefixes of the token files that a path means, in order of their names.

    A path is a folder, or a prefix with or without ``.bin`` or ``.idx``. Half a pair counts: opening it says what is
    missing. Empty when there is nothing of the kind, and when a folder has ``.bin`` files only, which may be anything.
    """
    path = Path(path)
    if path.is_dir():
        indexes, binaries = ({f.with_suffix("") for f in path.glob(f"*{suffix}")} for suffix in (".idx", ".bin"))
        return sorted(indexes | binaries) if indexes else []
    prefix = path.with_suffix("") if path.suffix in (".idx", ".bin") else path
    return [prefix] if any(prefix.with_name(prefix.name + suffix).is_file() for suffix in (".idx", ".bin")) else []


def _map(path: Path) -> mmap.mmap | bytes:
    """The file's bytes, mapped; an empty file, which cannot be mapped, as empty bytes."""
    try:
        with open(path, "rb") as file:
            empty = file.seek(0, 2) == 0
            return b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise TokenFileError(path, 0, "the file is missing") from None
    except OSError as error:
        raise TokenFileError(path, 0, f"cannot be opened: {error.strerror}") from None


def _read_index(path: Path) -> _Index:
    """The index's arrays, after its header and its size have been checked."""
    data = _map(path)
    if len(data) < HEADER.size:
        rule = f"the file ends here, in the {HEADER.size} bytes of its header"
        raise TokenFileError(path, len(data), rule)
    magic, version, code, num_sequences, num_entries = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise TokenFileError(path, 0, f"must begin with {MAGIC!r}, not {magic!r}: it is not the index of a token file")
    if version != VERSION:
        raise TokenFileError(path, VERSION_AT, f"version must be {VERSION}, not {version}")
    if code not in DTYPES:
        known = ", ".join(f"{number} {np.dtype(name)}" for number, name in DTYPES.items())
        raise TokenFileError(path, DTYPE_AT, f"the code of the dtype must be that of an integer ({known}), not {code}")
    if num_entries == 0:
        raise TokenFileError(path, DOCUMENTS_AT, "the document index must have an entry: it ends with the sequences")
    sizes_at = HEADER.size
    pointers_at = sizes_at + 4 * num_sequences
    documents_at = pointers_at + 8 * num_sequences
    end = documents_at + 8 * num_entries
    if len(data) not in (end, end + num_sequences):
        rule = (
            f"must have {end:,} bytes for {num_sequences:,} sequences and {num_entries:,} entries of the document index"
        )
        raise TokenFileError(path, min(len(data), end), f"{rule}, not {len(data):,}")
    return _Index(
        dtype=np.dtype(DTYPES[code]),
        sizes=np.frombuffer(data, "<i4", num_sequences, sizes_at) if num_sequences else np.empty(0, "<i4"),
        pointers=np.frombuffer(data, "<i8", num_sequences, pointers_at) if num_sequences else np.empty(0, "<i8"),
        documents=np.frombuffer(data, "<i8", num_entries, documents_at),
        sizes_at=sizes_at,
        pointers_at=pointers_at,
        documents_at=documents_at,
    )


def _scan(index: _Index, idx_path: Path, bin_path: Path, num_bytes: int) -> bool:
    """Holds every entry of the index against its rule; returns whether each document is one sequence."""
    end = 0  # byte of the .bin at which the next sequence must begin
    for first in range(0, len(index.sizes), SCAN):
        sizes = index.sizes[first : first + SCAN].astype(np.int64)
        if (sizes < 0).any():
            at = first + int(np.argmax(sizes < 0))
            rule = f"sequence {at} cannot have {index.sizes[at]} tokens"
            raise TokenFileError(idx_path, index.sizes_at + 4 * at, rule)
        ends = end + np.cumsum(sizes * index.dtype.itemsize)
        wanted, found = np.append(end, ends[:-1]), index.pointers[first : first + SCAN]
        if (wanted != found).any():
            at = int(np.argmax(wanted != found))
            rule = f"sequence {first + at} begins at byte {wanted[at]:,} of the .bin by the sizes, not {found[at]:,}"
            raise TokenFileError(idx_path, index.pointers_at + 8 * (first + at), rule)
        end = int(ends[-1])
    if num_bytes < end:
        raise TokenFileError(bin_path, num_bytes, f"the file ends here, but its index speaks of {end:,} bytes")
    if num_bytes > end:
        raise TokenFileError(bin_path, end, f"the index ends here, but the file goes on to byte {num_bytes:,}")
    return _scan_documents(index, idx_path)


def _scan_documents(index: _Index, path: Path) -> bool:
    num_sequences, last = len(index.sizes), -1
    one_each = len(index.documents) == num_sequences + 1
    for first in range(0, len(index.documents), SCAN):
        entries = index.documents[first : first + SCAN]
        before = np.append(max(last, 0), entries[:-1])
        if (entries < before).any():
            at = int(np.argmax(entries < before))
            rule = f"document {first + at} cannot begin with sequence {entries[at]}, before {before[at]}"
            raise TokenFileError(path, index.documents_at + 8 * (first + at), rule)
        one_each = one_each and bool((entries == np.arange(first, first + len(entries))).all())
        last = int(entries[-1])
    for at, wanted in ((0, 0), (len(index.documents) - 1, num_sequences)):
        if index.documents[at] != wanted:
            rule = f"entry {at} of the document index must be {wanted}, not {index.documents[at]}"
            raise TokenFileError(path, index.documents_at + 8 * at, rule)
    return one_each
