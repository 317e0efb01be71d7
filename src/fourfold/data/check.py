"""Reading token files through before they are trained on: checksums, ids, and documents that are longer than a row.

Structure is checked by opening a file. What is done here takes all of its bytes: in the blocks that the sidecar has
checksums of, by a few threads. Reading, checksums and comparisons run beside each other; only counting holds Python's
lock.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from fourfold.data.indexed import TokenFile, TokenFileError, find_token_files
from fourfold.data.shards import missing_files
from fourfold.data.sidecar import BLOCK, Sidecar, read_sidecar

THREADS = 8  # at most: more would wait for the disk or for each other
CHUNK = 2**20  # tokens that are counted at once, so that they stay in cache


@dataclass(frozen=True)
class Document:
    """Where a document is.

    Attributes:
        path, offset: its first byte in a .bin.
        number: in its file, from 0.
        length: tokens.
    """

    path: Path
    offset: int
    number: int
    length: int

    def __str__(self) -> str:
        return f"document {self.number:,} of {self.length:,} tokens at {self.path}, byte {self.offset:,}"


@dataclass(frozen=True, eq=False)
class CheckReport:
    """What was found in some token files.

    Attributes:
        problems: in order of files and places in them, at most one of a kind per file; a checksum per block.
        num_files, num_documents, num_tokens: in all files.
        num_checksummed: files whose sidecar had checksums to compare with.
        max_id: the largest id; -1 without tokens.
        longest: the longest document, the first of equals; None without documents.
        num_long, first_long: documents longer than the row length that was asked about.
        counts: int64[vocab_size], how often each id of the vocabulary occurs; None without a vocabulary size.
    """

    problems: tuple[TokenFileError, ...]
    num_files: int
    num_documents: int
    num_tokens: int
    num_checksummed: int
    max_id: int
    longest: Document | None
    num_long: int
    first_long: Document | None
    counts: np.ndarray | None


@dataclass(frozen=True, eq=False)
class _Block:
    """What one block of a .bin holds. first_wrong: a token of the file; counts: of ids, empty if not asked for."""

    num_bytes: int
    crc32: int
    max_id: int
    num_wrong: int
    first_wrong: int
    wrong_id: int
    counts: np.ndarray


def check_files(
    files: Sequence[TokenFile],
    vocab_size: int | None,
    row_length: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CheckReport:
    """Reads token files through.

    Args:
        files: opened.
        vocab_size: every id has to be below; None: for each file, what its sidecar says.
        row_length: longer documents are counted; None: none are.
        progress: is told bytes read, and bytes in all.
    """
    opened = [_read_sidecar(file) for file in files]
    sidecars, problems = [sidecar for sidecar, _ in opened], [found for _, found in opened]
    limits = [vocab_size if vocab_size is not None else sidecar.vocab_size if sidecar else None for sidecar in sidecars]
    wrong: list[list[_Block]] = [[] for _ in files]
    counts = np.zeros(vocab_size or 0, dtype=np.int64)
    done, total, max_id = 0, sum(_num_bytes(file) for file in files), -1
    for number, offset, future in _read_blocks(files, limits, counting=vocab_size is not None):
        file, sidecar = files[number], sidecars[number]
        try:
            block = future.result()
        except TokenFileError as error:
            problems[number].append(error)
            continue
        if sidecar is not None and block.crc32 != sidecar.crc32[offset // BLOCK]:
            rule = f"the {block.num_bytes:,} bytes from here on are not those that were written (CRC-32)"
            problems[number].append(TokenFileError(file.bin_path, offset, rule))
        if block.num_wrong:
            wrong[number].append(block)
        counts += block.counts
        max_id = max(max_id, block.max_id)
        done += block.num_bytes
        progress(done, total)
    for file, limit, blocks, found in zip(files, limits, wrong, problems, strict=True):
        found += _wrong_ids(file, limit, blocks)
    longest, num_long, first_long = _long_documents(files, row_length)
    return CheckReport(
        problems=tuple(chain.from_iterable(problems)),
        num_files=len(files),
        num_documents=sum(file.num_documents for file in files),
        num_tokens=sum(file.num_tokens for file in files),
        num_checksummed=sum(sidecar is not None for sidecar in sidecars),
        max_id=max_id,
        longest=longest,
        num_long=num_long,
        first_long=first_long,
        counts=counts if vocab_size is not None else None,
    )


def open_files(paths: Sequence[str]) -> tuple[list[TokenFile], list[TokenFileError]]:
    """The token files that paths mean, opened, and what is wrong with those that cannot be, or should be there.

    Raises:
        ValueError: there is no path, or one that means none.
    """
    if not paths:
        raise ValueError("name a folder with token files, or one of them")
    files: list[TokenFile] = []
    problems: list[TokenFileError] = []
    for path in paths:
        prefixes = find_token_files(path)
        if not prefixes:
            raise ValueError(
                f"{path}: must be a folder with token files, or the path of one, with or without .idx or .bin"
            )
        opened, found = open_prefixes(prefixes)
        files += opened
        problems += found + missing_files(Path(path), prefixes)
    return files, problems


def open_prefixes(prefixes: Sequence[Path]) -> tuple[list[TokenFile], list[TokenFileError]]:
    """Token files, opened, and what is wrong with those that cannot be."""
    files: list[TokenFile] = []
    problems: list[TokenFileError] = []
    for prefix in prefixes:
        try:
            files.append(TokenFile(prefix))
        except TokenFileError as error:
            problems.append(error)
    return files, problems


def _read_sidecar(file: TokenFile) -> tuple[Sidecar | None, list[TokenFileError]]:
    """The sidecar, if there is one that belongs to the file."""
    try:
        sidecar = read_sidecar(file.prefix)
    except TokenFileError as error:
        return None, [error]
    if sidecar is None:
        return None, []
    here = (file.num_documents, file.num_tokens, file.num_tokens * file.dtype.itemsize, BLOCK)
    there = (sidecar.documents, sidecar.tokens, sidecar.bin_bytes, sidecar.block_bytes)
    if here != there or len(sidecar.crc32) != -(-sidecar.bin_bytes // BLOCK):
        parts = "({:,} documents, {:,} tokens, {:,} bytes in blocks of {:,})"
        rule = f"is not of the files beside it: it says {parts.format(*there)}, but they hold {parts.format(*here)}"
        return None, [TokenFileError(file.prefix.with_name(file.prefix.name + ".json"), 0, rule)]
    return sidecar, []


def _num_bytes(file: TokenFile) -> int:
    return file.num_tokens * file.dtype.itemsize


def _read_blocks(
    files: Sequence[TokenFile], limits: Sequence[int | None], *, counting: bool
) -> Iterator[tuple[int, int, Future[_Block]]]:
    """All blocks of all files in order, by number of the file and offset in it; a few are read ahead."""
    threads = min(THREADS, os.cpu_count() or 1)
    blocks = ((i, offset) for i, file in enumerate(files) for offset in range(0, _num_bytes(file), BLOCK))
    pending: deque[tuple[int, int, Future[_Block]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for i, offset in blocks:
                pending.append((i, offset, pool.submit(_read_block, files[i], offset, limits[i], counting)))
                if len(pending) > threads:
                    yield pending.popleft()
            while pending:
                yield pending.popleft()
        finally:
            pool.shutdown(cancel_futures=True)


def _read_block(file: TokenFile, offset: int, limit: int | None, counting: bool) -> _Block:
    """Reads from the file itself, not from its mapping: a disk that fails would end the process there, by a signal."""
    count = min(BLOCK // file.dtype.itemsize, file.num_tokens - offset // file.dtype.itemsize)
    try:
        tokens = np.fromfile(file.bin_path, dtype=file.dtype, count=count, offset=offset)
    except OSError as error:
        raise TokenFileError(file.bin_path, offset, f"cannot be read: {error.strerror}") from None
    if len(tokens) < count:
        raise TokenFileError(file.bin_path, offset + tokens.nbytes, "the file ends here, and was longer a moment ago")
    counts = np.zeros(limit or 0 if counting else 0, dtype=np.int64)
    max_id, num_wrong, first_wrong, wrong_id = -1, 0, -1, 0
    for start in range(0, count, CHUNK):
        ids = tokens[start : start + CHUNK].astype(np.int64)
        max_id = max(max_id, int(ids.max()))
        # As one unsigned comparison: a negative id is a huge one.
        wrong = ids.view(np.uint64) >= (limit if limit is not None else 2**63)
        if wrong.any():
            if not num_wrong:
                at = int(np.argmax(wrong))
                first_wrong, wrong_id = offset // file.dtype.itemsize + start + at, int(ids[at])
            num_wrong += int(wrong.sum())
            ids = ids[~wrong]
        if counting:
            counts += np.bincount(ids, minlength=len(counts))
    return _Block(tokens.nbytes, zlib.crc32(tokens.data), max_id, num_wrong, first_wrong, wrong_id, counts)


def _wrong_ids(file: TokenFile, limit: int | None, blocks: Sequence[_Block]) -> list[TokenFileError]:
    """One problem for all ids of a file that are not in the vocabulary, by the first of them."""
    if not blocks:
        return []
    first, num = blocks[0], sum(block.num_wrong for block in blocks)
    allowed = f"the vocabulary has {limit:,} entries" if limit is not None else "an id cannot be negative"
    more = f"; so are {num - 1:,} more" if num > 1 else ""
    token = f"token {first.first_wrong:,}, in document {file.document_at(first.first_wrong):,}, is {first.wrong_id}"
    return [TokenFileError(file.bin_path, first.first_wrong * file.dtype.itemsize, f"{token}: {allowed}{more}")]


def _long_documents(files: Sequence[TokenFile], row_length: int | None) -> tuple[Document | None, int, Document | None]:
    """The longest document, the number of documents longer than a row, and the first of those."""
    longest: Document | None = None
    first_long: Document | None = None
    num_long = 0
    for file in files:
        if not file.num_documents:
            continue
        at = int(np.argmax(file.lengths))
        if longest is None or file.lengths[at] > longest.length:
            longest = _document(file, at)
        if row_length is None or file.lengths[at] <= row_length:
            continue
        long = file.lengths > row_length
        if first_long is None:
            first_long = _document(file, int(np.argmax(long)))
        num_long += int(np.count_nonzero(long))
    return longest, num_long, first_long


def _document(file: TokenFile, number: int) -> Document:
    offset = file.document_start(number) * file.dtype.itemsize
    return Document(file.bin_path, offset, number, int(file.lengths[number]))
