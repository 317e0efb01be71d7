"""``NAME.json`` beside a token file: what made it, what is in it, and checksums. Ours; other tools' files have none."""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec

from fourfold.data.indexed import TokenFileError

FORMAT = "fourfold-tokens"
VERSION = 1
BLOCK = 64 * 2**20  # bytes of the .bin per checksum


class TokenizerId(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokenizer it was."""

    name: str
    """As it was asked for: "bytes", "bpe:2048", a path."""
    sha256: str | None
    """Of the tokenizer's file; None for "bytes"."""
    file: str | None
    """Name of the tokenizer's file in the folder of the token file; None for "bytes"."""


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """Input that gave no document, for one reason."""

    reason: str
    count: int
    first: str
    """The first one: a file, or a file and a line or row."""


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file. Unknown keys are passed over, so a later version may add some."""

    format: str = FORMAT
    version: int = VERSION
    tokenizer: TokenizerId
    vocab_size: int
    max_id: int
    """The largest id that occurs; -1 when there is no token."""
    documents: int
    tokens: int
    input_bytes: int
    """UTF-8 bytes of the documents' text; 0 where the writer did not know."""
    bin_bytes: int
    block_bytes: int
    crc32: tuple[int, ...]
    """CRC-32 of each block of the .bin; the last block is shorter."""
    skipped: tuple[Skipped, ...] = ()


def sidecar_path(prefix: Path) -> Path:
    """Where the sidecar of a token file is."""
    return prefix.with_name(prefix.name + ".json")


def read_sidecar(prefix: Path) -> Sidecar | None:
    """The sidecar of a token file; None if there is none, or a file of that name that is not ours.

    Others' files may be anything and of any size: JSON lines that the tokens were made of, say. Of those only the
    beginning is read, for ours say there that they are ours.

    Raises:
        TokenFileError: it is ours and damaged, or of a later version.
    """
    path = sidecar_path(prefix)
    try:
        with path.open("rb") as file:
            head = file.read(64)
            if FORMAT.encode() not in head:
                return None
            data = head + file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenFileError(path, 0, f"cannot be read: {error.strerror}") from None
    try:
        table = msgspec.json.decode(data)
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            return None
        if table.get("version") != VERSION:
            raise TokenFileError(path, 0, f"version must be {VERSION}, not {table.get('version')}")
        return msgspec.convert(table, Sidecar)
    except msgspec.MsgspecError as error:
        raise TokenFileError(path, 0, f"is damaged: {error}") from None


class BlockChecksums:
    """CRC-32 of each block of a stream of bytes."""

    def __init__(self) -> None:
        self.block_bytes = BLOCK
        self._done: list[int] = []
        self._crc, self._filled = 0, 0

    def update(self, data: memoryview) -> None:
        """Takes the next bytes."""
        while len(data):
            part = data[: self.block_bytes - self._filled]
            self._crc = zlib.crc32(part, self._crc)
            self._filled += len(part)
            if self._filled == self.block_bytes:
                self._done.append(self._crc)
                self._crc, self._filled = 0, 0
            data = data[len(part) :]

    def values(self) -> tuple[int, ...]:
        """Of the blocks so far, an unfinished one included."""
        return (*self._done, self._crc) if self._filled else tuple(self._done)
