"""The text of a trace file, inflated piece by piece, as far as it can be had."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PIECE = 4 << 20  # bytes
_BITE = 16  # bytes of a damaged file that are unpacked at a time
_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")


class Source:
    """One file, plain or gzip, by what it begins with and not by its name."""

    def __init__(self, path: Path, piece: int = PIECE) -> None:
        self.path = path
        self._piece = piece
        self.damage = ""
        """Why the text ended before the file's author meant it to; empty if it did not."""

    def pieces(self) -> Iterator[bytes]:
        """The text, some megabytes at a time. ValueError if the file cannot be read, is empty, or no text in UTF-8."""
        try:
            with self.path.open("rb") as file:
                head = file.read(2)
                if not head:
                    raise ValueError(f"{self.path}: the file is empty")
                if head in _BYTE_ORDER_MARKS:
                    raise ValueError(f"{self.path}: the text is UTF-16; traces are UTF-8")
                file.seek(0)
                if head == _GZIP:
                    yield from self._inflated(file)
                else:
                    yield from iter(lambda: file.read(self._piece), b"")
        except OSError as error:
            raise ValueError(f"{self.path}: {error.strerror or error}") from None

    def _inflated(self, file: BinaryIO) -> Iterator[bytes]:
        """All members of a gzip file, up to the first damage."""
        inflate = zlib.decompressobj(wbits=31)
        done = 0
        waiting = b""
        while True:
            waiting = waiting or file.read(self._piece)
            if not waiting:
                if not inflate.eof:
                    self.damage = f"the gzip file is cut off; {done:,} bytes could be unpacked"
                return
            if inflate.eof:
                # Another member may follow; padding is none.
                if not waiting.startswith(_GZIP):
                    return
                inflate = zlib.decompressobj(wbits=31)
            before = inflate.copy()
            try:
                out = inflate.decompress(waiting, self._piece)
            except zlib.error:
                rest = _up_to_damage(before, waiting)
                self.damage = f"the gzip file is damaged; {done + len(rest):,} bytes could be unpacked"
                yield rest
                return
            waiting = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
            done += len(out)
            if out:
                yield out


def _up_to_damage(inflate: zlib._Decompress, packed: bytes) -> bytes:
    """What can be unpacked before the damage that is somewhere in it."""
    out = []
    for start in range(0, len(packed), _BITE):
        try:
            out.append(inflate.decompress(packed[start : start + _BITE]))
        except zlib.error:
            break
    return b"".join(out)
