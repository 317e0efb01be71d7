"""What reading all tokens of a run has found, kept in ``RUN/tokens``: a run that goes on need not read them again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from fourfold.data.indexed import TokenFile
from fourfold.data.writer import write_atomically

RECORD = "checked.json"


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Of files in which nothing was wrong. They hold as long as what they were found in is the same."""

    version: int = 1
    files: tuple[tuple[str, int, int], ...]
    """Path, bytes and time of the last change (nanoseconds since 1970) of each ``.bin``."""
    weights: tuple[float, ...]
    vocab_size: int
    row_length: int
    unigram_entropy: float | None
    notes: tuple[str, ...]

    def same_input(self, other: Findings) -> bool:
        """Whether both were found in the same."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("version", "files", "weights", "vocab_size", "row_length")
        )


def looked_at(files: Iterable[TokenFile]) -> tuple[tuple[str, int, int], ...]:
    """The files as they are now, for :attr:`Findings.files`."""
    stats = [(file.bin_path.absolute(), file.bin_path.stat()) for file in files]
    return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def read_findings(folder: Path) -> Findings | None:
    """Those of an earlier start; None if there are none that can be read."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=Findings)
    except (OSError, msgspec.MsgspecError):
        return None


def write_findings(folder: Path, findings: Findings) -> None:
    """Keeps them in ``folder``, which need not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECORD, msgspec.json.encode(findings))
