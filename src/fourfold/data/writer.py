"""Writing token files: as a stream, under temporary names, and published only when all of it is on disk."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec
import numpy as np

from fourfold.data.indexed import DTYPES, HEADER, MAGIC, VERSION
from fourfold.data.sidecar import BlockChecksums, Sidecar, Skipped, TokenizerId, sidecar_path

PARTIAL = ".partial"  # ends the names of files that are being written
LONGEST = 2**31 - 1  # tokens of a document: the index keeps lengths as int32


def token_dtype(vocab_size: int) -> np.dtype:
    """How ids below vocab_size are stored: uint16 if they fit, else int32."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<i4")


class TokenFileWriter:
    """Writes one token file with its sidecar. As a context, it leaves nothing behind when something is raised inside.

    The .bin and the sidecar get their names first and the .idx last, each after it has been brought to disk. So where
    there is an .idx, the file is whole. A file without documents is only a sidecar: an empty .bin cannot be mapped.

    Args:
        prefix: path of the file without ending. A file of that name is replaced.
        tokenizer: what made the ids.
        vocab_size: of the tokenizer: all ids are below.
    """

    def __init__(self, prefix: Path, tokenizer: TokenizerId, vocab_size: int) -> None:
        self.prefix, self._tokenizer, self._vocab_size = prefix, tokenizer, vocab_size
        self.dtype = token_dtype(vocab_size)
        self.num_tokens = 0
        self._lengths: list[np.ndarray] = []
        self._max_id = -1
        self._checksums = BlockChecksums()
        self._partials: list[Path] = []
        self._bin = self._open(".bin")

    def write(self, documents: Sequence[np.ndarray]) -> None:
        """Appends documents: integer arrays [n]. ValueError: an id is not in the vocabulary, a document is too long."""
        if not documents:
            return
        tokens = np.concatenate(documents)
        lengths = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
        if lengths.max() > LONGEST:
            raise ValueError(f"a document of {lengths.max():,} tokens is longer than the format holds: {LONGEST:,}")
        self._lengths.append(lengths.astype("<i4"))
        if not len(tokens):
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise ValueError(f"id {low if low < 0 else high} is not in a vocabulary of {self._vocab_size}")
        data = tokens.astype(self.dtype, copy=False).data.cast("B")
        self._bin.write(data)
        self._checksums.update(data)
        self._max_id = max(self._max_id, high)
        self.num_tokens += len(tokens)

    def finish(self, *, input_bytes: int = 0, skipped: Sequence[Skipped] = ()) -> Sidecar:
        """Brings everything to disk and gives the files their names; returns what the sidecar says."""
        lengths = np.concatenate(self._lengths) if self._lengths else np.empty(0, "<i4")
        sidecar = Sidecar(
            tokenizer=self._tokenizer,
            vocab_size=self._vocab_size,
            max_id=self._max_id,
            documents=len(lengths),
            tokens=self.num_tokens,
            input_bytes=input_bytes,
            bin_bytes=self.num_tokens * self.dtype.itemsize,
            block_bytes=self._checksums.block_bytes,
            crc32=self._checksums.values(),
            skipped=tuple(skipped),
        )
        _close(self._bin)
        with self._open(".idx") as file:
            _write_index(file, self.dtype, lengths)
            _close(file)
        with self._open(".json") as file:
            file.write(msgspec.json.format(msgspec.json.encode(sidecar), indent=2))
            _close(file)
        self._publish(empty=not len(lengths))
        return sidecar

    def discard(self) -> None:
        """Removes what has been written. After `finish` there is nothing left to remove."""
        with suppress(OSError):  # a full disk, met again by what was still to be written
            self._bin.close()
        for path in self._partials:
            path.unlink(missing_ok=True)

    def _open(self, suffix: str) -> IO[bytes]:
        # The process is part of the name: what a dying run still writes must not be what its successor writes.
        path = self.prefix.with_name(f"{self.prefix.name}{suffix}.{os.getpid()}{PARTIAL}")
        self._partials.append(path)
        return path.open("wb")

    def _publish(self, *, empty: bool) -> None:
        binary, index, sidecar = self._partials
        index_name, binary_name = (self.prefix.with_name(self.prefix.name + suffix) for suffix in (".idx", ".bin"))
        index_name.unlink(missing_ok=True)  # of a file that is replaced: an index must never meet another's tokens
        if empty:
            binary_name.unlink(missing_ok=True)
            sidecar.replace(sidecar_path(self.prefix))
            self.discard()
        else:
            binary.replace(binary_name)
            sidecar.replace(sidecar_path(self.prefix))
            sync_folder(self.prefix.parent)
            index.replace(index_name)
        sync_folder(self.prefix.parent)

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a small file so that it is whole or absent, also after a power cut."""
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            _close(file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Brings the names of a folder's files to disk."""
    with open_folder(folder) as descriptor:
        os.fsync(descriptor)


@contextmanager
def open_folder(path: Path) -> Generator[int]:
    """A folder's descriptor, which stays that of the folder when it is renamed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_index(file: IO[bytes], dtype: np.dtype, lengths: np.ndarray) -> None:
    """An index with one sequence per document. lengths: int32[n]."""
    num = len(lengths)
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
    ends = np.cumsum(lengths, dtype="<i8") * dtype.itemsize
    file.write(HEADER.pack(MAGIC, VERSION, code, num, num + 1))
    for array in (lengths, ends - lengths.astype("<i8") * dtype.itemsize, np.arange(num + 1, dtype="<i8")):
        file.write(array.tobytes())


def _close(file: IO[Any]) -> None:
    """Closes a file once its content is on disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
