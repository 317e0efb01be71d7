"""Where memory can be read from: snapshots of PyTorch's allocator, and profiler traces with [memory] events."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.debugger.memory.history import History
from fourfold.debugger.memory.peaks import DeviceMemory, summarise
from fourfold.debugger.memory.snapshots import read_snapshot
from fourfold.debugger.memory.traces import read_trace
from fourfold.debugger.memory.verdict import Memory, judge
from fourfold.debugger.reading.folder import Answer, read_in_parallel
from fourfold.debugger.runs import layout_of_run
from fourfold.layout import Grid

_NAME = re.compile(r"memory-(\d+)\.pickle(?:\.gz)?")
_NUMBER = re.compile(r"(\d+)(?:\.[a-z]+)*$")
_SUBFOLDERS = ("", "profile")
_HEAD = 1 << 16  # bytes of a file that tell what it is
_RECORDED = re.compile(rb'"profile_memory"\s*:\s*1\b')
_GZIP = b"\x1f\x8b"


def snapshot_files(path: Path) -> list[Path]:
    """Snapshots at a path: the file itself, or those in the folder or in the traces of a run. Those too that are
    damaged, if they have the name of one of ours."""
    if path.is_file():
        return [path] if _is_snapshot(path) else []
    for name in _SUBFOLDERS:
        folder = path / name
        found = [file for file in sorted(folder.iterdir()) if _is_snapshot(file)] if folder.is_dir() else []
        if found:
            return found
    return []


def has_memory(trace: Path) -> bool:
    """Whether a profiler's trace has been told to hold memory, by its beginning."""
    return _RECORDED.search(_head(trace)) is not None


def find_memory(
    snapshots: Sequence[Path],
    traces: Sequence[Path] = (),
    *,
    path: Path,
    grid: Grid | None = None,
    steps: tuple[int, int] | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Memory:
    """What the ranks of a job held. Of a rank with a snapshot, which knows more, its trace does not count.

    Args:
        snapshots, traces: files, one at least.
        path: where they were found.
        grid: the layout; None: what run.json beside them says.
        steps: first and last to look at.
        workers, progress: as in `read_all`.

    Raises:
        ValueError: none can be read, two are of one rank, or the layout has fewer ranks.
    """
    files = (*snapshots, *traces)
    ranks = {file: rank for rank, file in _ranks(snapshots).items()}
    answers = sorted(read_in_parallel(_Reader(files, ranks, steps), workers, progress), key=lambda one: one.number)
    owners: dict[int, Path] = {}
    found: dict[int, list[DeviceMemory]] = {}
    for answer in answers:
        file = files[answer.number]
        for rank, devices in answer.found:
            if rank in owners and owners[rank] not in ranks:
                raise ValueError(f"{owners[rank]} and {file} are both of rank {rank}; give one of them")
            if rank not in owners:
                owners[rank], found[rank] = file, devices
    notes = [answer.error for answer in answers if answer.error]
    devices = [device for rank in sorted(found) for device in _chosen(found[rank])]
    if not devices:
        raise ValueError(notes[0] if notes else f"{path}: nothing of memory was recorded")
    grid = grid or layout_of_run(path)
    if grid is not None and max(found) >= grid.size:
        raise ValueError(
            f"{path}: there is memory of rank {max(found)}, but the layout tp={grid.tp},cp={grid.cp},pp={grid.pp},"
            f"dp={grid.dp} has {grid.size} ranks; give the layout of the job"
        )
    return judge(path, devices, grid, notes)


@dataclass
class _Reader:
    """Reads one file after the other, in whatever process."""

    files: Sequence[Path]
    ranks: dict[Path, int]
    """Of the files that are snapshots."""
    steps: tuple[int, int] | None

    def read(self, number: int) -> Answer[list[DeviceMemory]]:
        """Of one file."""
        path = self.files[number]
        try:
            rank = self.ranks.get(path)
            histories: list[History] = read_trace(path) if rank is None else read_snapshot(path, rank)
            found = [summarise(history, self.steps) for history in histories]
            return Answer(number, [(found[0].rank, found)] if found else [])
        except ValueError as error:
            text = str(error)
            return Answer(number, error=text if str(path) in text else f"{path}: {text}")
        except MemoryError:
            return Answer(number, error=f"{path}: not enough memory to read it")


def _ranks(snapshots: Sequence[Path]) -> dict[int, Path]:
    """By the last number in the name; one file needs none."""
    ranks: dict[int, Path] = {}
    for file in snapshots:
        match = _NUMBER.search(file.name)
        if match is None and len(snapshots) > 1:
            raise ValueError(f"{file}: no rank in its name; snapshots are named like memory-00012.pickle")
        rank = int(match[1]) if match else 0
        if rank in ranks:
            raise ValueError(f"{ranks[rank]} and {file} are both of rank {rank}; leave one of them")
        ranks[rank] = file
    return ranks


def _chosen(devices: list[DeviceMemory]) -> list[DeviceMemory]:
    """A rank's GPUs, if it has any that hold something, else its CPU."""
    return [one for one in devices if one.device != "cpu"] or devices


def _is_snapshot(path: Path) -> bool:
    if _NAME.fullmatch(path.name):
        return path.is_file()
    if path.name.endswith(".partial"):  # it is still being written
        return False
    head = _head(path)
    return head[:1] == b"\x80" and b"segments" in head and any(
        key in head for key in (b"total_size", b"device_traces", b"allocated_size", b"blocks")
    )  # fmt: skip


def _head(path: Path) -> bytes:
    """The beginning of a file, unpacked; nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
        return zlib.decompressobj(wbits=31).decompress(head, _HEAD) if head.startswith(_GZIP) else head
    except (OSError, zlib.error):
        return b""
