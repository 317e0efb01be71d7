"""Where the checkpoints of a run lie: their names, which are complete, publication, retention, and verification.

The order that makes a checkpoint safe against a crash at any moment:

1. All ranks write into ``step-00000123.TOKEN.partial``, where TOKEN names this one attempt, and sync each file.
2. Rank 0 has seen the report of every rank. It writes ``index.json``, last of all, and syncs the folder.
3. One rename makes it ``step-00000123``, and the parent folder is synced.
4. The small file ``latest`` is replaced.
5. Older checkpoints go: each is renamed to ``.partial`` first, so that none that is half removed looks complete.

An object store cannot rename. There the folder is ``step-00000123.TOKEN`` from the start, and step 2 publishes it: a
folder without ``index.json`` is no checkpoint, and one that is removed loses that file first.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from fourfold.trainer.checkpoint.files import Files, files_at
from fourfold.trainer.checkpoint.format import (
    INDEX,
    STATE,
    CheckpointError,
    FileCheck,
    Index,
    SavedState,
    decode,
    read_index,
)

LATEST = "latest"
PARTIAL = ".partial"
_NAME = re.compile(r"step-(\d{8,})(?:\.([0-9a-f]+-\d+))?")
_BLOCK = 1 << 24  # bytes of a tensor that are checked at once


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        step: optimizer steps that were done.
        path: folder or URL.
        files: in that folder.
    """

    step: int
    path: str
    files: Files = field(repr=False, compare=False)

    def index(self) -> Index:
        """What is in it. Raises CheckpointError if its index is damaged or missing."""
        return read_index(_read(self.files, INDEX), path=f"{self.path}/{INDEX}")

    def state(self) -> SavedState:
        """Where training stood. Raises CheckpointError if that is damaged or missing."""
        return decode(_read(self.files, STATE), SavedState, path=f"{self.path}/{STATE}")


class CheckpointStore:
    """The checkpoints under one folder, or one URL that fsspec knows.

    Args:
        place: folder or URL; it need not exist.

    Raises:
        OSError: the URL is of a kind that is not known here.
    """

    def __init__(self, place: str | Path) -> None:
        self.files = files_at(place)
        self.place = self.files.root

    def complete(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first: by step, and of one step the one that was saved last is last."""
        found = []
        for name in self.files.names():
            matched = _NAME.fullmatch(name)
            if matched and self.files.size(f"{name}/{INDEX}") is not None:
                found.append((int(matched[1]), matched[2] or "", name))
        return [self.checkpoint(name) for _, _, name in sorted(found)]

    def checkpoint(self, name: str) -> Checkpoint:
        """The one in the folder of this name."""
        matched = _NAME.fullmatch(name)
        files = self.files.below(name)
        return Checkpoint(int(matched[1]) if matched else 0, files.root, files)

    def unfinished(self) -> list[str]:
        """Names of folders in which a save, or a removal, was broken off."""
        return [
            name
            for name in self.files.names()
            if name.startswith("step-")
            and (name.endswith(PARTIAL) or (_NAME.fullmatch(name) and self.files.size(f"{name}/{INDEX}") is None))
        ]

    def newest_good(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint all of whose bytes are as they were written, if there is one.

        Returns:
            It, and a sentence about each newer one that is damaged.
        """
        damaged = []
        for checkpoint in reversed(self.complete()):
            reason = damage(checkpoint)
            if reason is None:
                return checkpoint, damaged
            damaged.append(reason)
        return None, damaged

    def begin(self, step: int, token: str) -> str:
        """Name of the folder that an attempt to save a step writes into. Tokens sort by time."""
        return f"step-{step:08d}.{token}{PARTIAL if self.files.renames else ''}"

    def publish(self, folder: str, index: bytes) -> Checkpoint:
        """Makes the checkpoint in ``folder`` complete, all of whose other files are there, and moves ``latest``."""
        self.files.replace(f"{folder}/{INDEX}", index)
        name = folder
        if self.files.renames:
            name = folder.removesuffix(PARTIAL)
            plain = name.partition(".")[0]
            # A step that was saved before keeps its folder until this one is there.
            if not any(_NAME.fullmatch(other) and other.partition(".")[0] == plain for other in self.files.names()):
                name = plain
            self.files.rename(folder, name)
        self.files.replace(LATEST, f"{name}\n".encode())
        return self.checkpoint(name)

    def retain(self, newest: Checkpoint, keep: int) -> None:
        """Removes what is older than the ``keep`` newest steps up to ``newest``, which was published just now.

        ``keep`` 0 keeps all steps. Of one step only the last save stays. Later steps are left alone: they are damaged,
        or this run would have begun there.
        """
        by_step: dict[int, list[Checkpoint]] = {}
        for checkpoint in self.complete():
            if checkpoint.step <= newest.step:
                by_step.setdefault(checkpoint.step, []).append(checkpoint)
        kept = sorted(by_step)[-keep:] if keep else sorted(by_step)
        for step, saves in by_step.items():
            for checkpoint in saves[:-1] if step in kept else saves:
                self._remove(checkpoint.path.rpartition("/")[2])

    def remove_unfinished(self) -> None:
        """Removes what broken saves and removals have left. No rank may be saving."""
        for name in self.unfinished():
            self.files.remove(name)

    def _remove(self, name: str) -> None:
        if self.files.renames:
            self.files.remove(name + PARTIAL)
            self.files.rename(name, name + PARTIAL)
            name += PARTIAL
        else:
            self.files.remove(f"{name}/{INDEX}")
        self.files.remove(name)


def damage(checkpoint: Checkpoint, *, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint, in a sentence that names it; None if nothing is.

    Args:
        checkpoint: to be looked at.
        part: which share of its files is read and checked byte by byte.
        parts: number of shares.
    """
    try:
        index = checkpoint.index()
        if STATE not in index.files or not index.tensors:
            return f"{checkpoint.path} is damaged: its index names no {'tensor' if STATE in index.files else STATE}"
        for file, ranges in _checks(index, part, parts).items():
            wrong = _wrong_size(checkpoint, file, index.files[file]) or _wrong_bytes(checkpoint, file, ranges)
            if wrong is not None:
                return f"{checkpoint.path} is damaged: {file} {wrong}"
    except CheckpointError as error:
        return str(error)
    except (OSError, EOFError) as error:
        return f"{checkpoint.path} cannot be read: {error}"
    return None


_Range = tuple[int, int, int, str]  # first byte, the one after the last, their crc32, and what they are


def _checks(index: Index, part: int, parts: int) -> dict[str, list[_Range]]:
    """The checksums of one share of the files: of whole files, or of the header and each tensor in it."""
    checks: dict[str, list[_Range]] = {
        file: [(0, check.head, check.crc32, "its header" if check.head < check.bytes else "its content")]
        for file, check in sorted(index.files.items())[part::parts]
    }
    for name, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            if chunk.file not in index.files:
                raise CheckpointError(f"the index names no file {chunk.file}, which has a part of {name}")
            if chunk.file in checks:
                checks[chunk.file].append((chunk.begin, chunk.end, chunk.crc32, name))
    return checks


def _wrong_size(checkpoint: Checkpoint, file: str, check: FileCheck) -> str | None:
    size = checkpoint.files.size(file)
    if size == check.bytes:
        return None
    return "is missing" if size is None else f"has {size:,} bytes instead of {check.bytes:,}"


def _wrong_bytes(checkpoint: Checkpoint, file: str, ranges: list[_Range]) -> str | None:
    buffer = memoryview(bytearray(min(_BLOCK, max(end - begin for begin, end, _, _ in ranges))))
    for begin, end, wanted, what in sorted(ranges):
        found = 0
        for start in range(begin, end, _BLOCK):
            block = buffer[: min(_BLOCK, end - start)]
            checkpoint.files.read_into(file, start, block)
            found = zlib.crc32(block, found)
        if found != wanted:
            return f"does not have the checksum of {what}, bytes {begin} to {end}"
    return None


def is_checkpoint(place: str | Path) -> bool:
    """Whether a path or URL is the folder of a complete checkpoint."""
    return {INDEX, STATE} <= set(files_at(place).names())


def find_checkpoint(place: str | Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint at a path or URL: a checkpoint's own folder, or the newest good one of a store, or of a run.

    ``verify`` False reads no more than what is needed to find it, and takes the newest.

    Raises:
        CheckpointError: there is none, or none is good.
    """
    try:
        if is_checkpoint(place):
            files = files_at(place)
            found = Checkpoint(0, files.root, files)
            if verify and (reason := damage(found)) is not None:
                raise CheckpointError(reason)
            return replace(found, step=found.state().step)
        damaged: list[str] = []
        for folder in (str(place), f"{str(place).rstrip('/')}/checkpoints"):
            store = CheckpointStore(folder)
            good, reasons = store.newest_good() if verify else (next(reversed(store.complete()), None), [])
            if good is not None:
                return good
            damaged += reasons
    except OSError as error:
        raise CheckpointError(str(error)) from None
    raise CheckpointError("\n".join(damaged) or f"{place} is no checkpoint and holds none: there is no {INDEX} in it")


def _read(files: Files, name: str) -> bytes:
    try:
        return files.read(name)
    except OSError as error:
        raise CheckpointError(f"{files.root}/{name} cannot be read: {error.strerror or error}") from None
