"""The traces of a run: which files they are, and all of them read in parallel, each reduced where it was read."""

from __future__ import annotations

import glob
import os
import re
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from fourfold.debugger.reading import columns, ranks
from fourfold.debugger.reading.kineto import named_by_default, read_as_it_says
from fourfold.debugger.reading.trace import UNKNOWN, RankTrace

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_ENDINGS = (".json", ".json.gz")
_NO_TRACES = ("truth.json", "truth.json.gz")
_SUBFOLDERS = ("profile", "traces", "trace")
_HEAD = 1 << 16  # bytes of a file that tell what it is
_TRACE = re.compile(rb'"(?:traceEvents|distributedInfo|deviceProperties|schemaVersion|ph)"\s*:')
_REDUCED = re.compile(rb'"fourfold"\s*:\s*\{\s*"reduced"\s*:')


def find(path: Path | str) -> list[Path]:
    """The files of traces that a path means: one, those in a folder, or those that a pattern with * or ? fits.

    In a folder without any, its subfolders are looked into. Copies that `fourfold diagnose` wrote for viewers, files
    that are still being written, and what is no trace are passed over.

    Raises:
        ValueError: there are none.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if path.is_dir():
        for pattern in ("*", *(f"{name}/*" for name in _SUBFOLDERS), "*/*"):
            found = [file for file in sorted(path.glob(pattern)) if _is_trace(file)]
            if found:
                return found
        raise ValueError(f"{path}: in this folder are no traces of PyTorch's profiler or of `fourfold simulate`, "
                         "files that end in .json or .json.gz")  # fmt: skip
    if glob.has_magic(str(path)):
        found = [file for file in map(Path, sorted(glob.glob(str(path), recursive=True))) if _is_trace(file)]
        if found:
            return found
        raise ValueError(f"{path}: no trace has such a name")
    raise ValueError(f"{path}: there is no such file or folder")


def _is_trace(path: Path) -> bool:
    if not path.name.endswith(_ENDINGS) or path.name in _NO_TRACES or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return True  # whoever reads it says why that cannot be done
    if head.startswith(b"\x1f\x8b"):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD)
        except zlib.error:
            head = b""
    if _REDUCED.search(head):
        return False
    return ranks.from_name(path) >= 0 or _TRACE.search(head) is not None


@dataclass
class Answer(Generic[T]):
    """What became of a file: its ranks, or why it could not be read."""

    number: int
    found: list[tuple[int, T]] = field(default_factory=list)
    error: str = ""


class Reads(Protocol[T_co]):
    """Reads files by their numbers, in whatever process."""

    @property
    def files(self) -> Sequence[Path]: ...

    def read(self, number: int) -> Answer[T_co]: ...


@dataclass
class _Reader(Generic[T]):
    """Reads one file after the other. Lives in a process of its own, or in the caller's."""

    files: Sequence[Path]
    reduce: Callable[[RankTrace], T]
    keep: bool

    def read(self, number: int) -> Answer[T]:
        """Of one file."""
        path = self.files[number]
        try:
            traces = _traces(path, keep=self.keep)
            if len(self.files) == 1:
                traces = named_by_default(traces)
            return Answer(number, [(trace.rank, self.reduce(trace)) for trace in traces])
        except ValueError as error:
            text = str(error)
            return Answer(number, error=text if str(path) in text else f"{path}: {text}")
        except MemoryError:
            return Answer(number, error=f"{path}: not enough memory to read it")


def _traces(path: Path, *, keep: bool) -> list[RankTrace]:
    """From the copy of the columns, if there is one that is not older; else from the file."""
    kept = columns.load(path)
    if kept is not None:
        return kept
    traces = read_as_it_says(path)
    if keep:
        columns.save(path, traces)
    return traces


def read_all(
    files: Sequence[Path],
    *,
    reduce: Callable[[RankTrace], T],
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    failed: Callable[[str], None] | None = None,
    keep: bool = False,
) -> list[T]:
    """Reads files in parallel.

    Args:
        files: one per rank, or one of several ranks.
        reduce: what is wanted of each rank; it runs in the process that read it, and only its result travels.
        workers: processes; default: as many as there are processors, at most one per file.
        progress: is told how many files are done, and of how many.
        failed: is told why a file could not be read, as long as another can be; default: such a file is an error.
        keep: leaves a copy of the columns beside each file, which the next reading uses.

    Returns:
        The results in the order of ranks.

    Raises:
        ValueError: no file could be read, two are of one rank, or of several one does not say its rank.
    """
    if not files:
        raise ValueError("no files to read")
    owners: dict[int, Path] = {}
    results: dict[int, T] = {}
    errors = []
    for answer in read_in_parallel(_Reader(files, reduce, keep), workers, progress):
        if answer.error:
            if failed is None:
                raise ValueError(answer.error)
            errors.append(answer.error)
        path = files[answer.number]
        for rank, result in answer.found:
            if rank == UNKNOWN:
                raise ValueError(
                    f"{path}: neither the file nor its name says which rank it is of; rename it to rank-N.json"
                )
            if rank in owners:
                first, second = sorted((owners[rank], path))
                raise ValueError(f"{first} and {second} are both of rank {rank}; give one of them")
            owners[rank], results[rank] = path, result
    if not results:
        raise ValueError(errors[0])
    for error in sorted(errors):
        if failed is not None:
            failed(error)
    return [results[rank] for rank in sorted(results)]


def read_in_parallel(
    reader: Reads[T], workers: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Iterator[Answer[T]]:
    """What a reader makes of its files, as they are done; workers and progress as in `read_all`."""
    files = reader.files
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(workers or processors, len(files))
    answers = map(reader.read, range(len(files))) if workers == 1 else _in_parallel(reader, workers)
    for done, answer in enumerate(answers, start=1):
        yield answer
        if progress is not None:
            progress(done, len(files))


def _in_parallel(reader: Reads[T], workers: int) -> Iterator[Answer[T]]:
    """The answers as they come. Processes are forked, so that `reduce` may be any function."""
    context = get_context("fork")
    ends = []
    processes: list[ForkProcess] = []
    running: dict[connection.Connection, tuple[ForkProcess, int]] = {}
    waiting = iter(range(len(reader.files)))
    try:
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(reader, there, [*ends, here]), daemon=True)
            process.start()
            processes.append(process)
            there.close()
            ends.append(here)
            number = next(waiting)
            here.send(number)
            running[here] = (process, number)
        while running:
            ready = {*connection.wait(list(running))}
            for end in [end for end in running if end in ready]:
                process, number = running[end]
                try:
                    answer = end.recv()
                except EOFError:
                    raise ValueError(f"{reader.files[number]}: {_ended(process)}") from None
                number = next(waiting, None)
                if number is None:
                    end.close()
                    del running[end]
                else:
                    end.send(number)
                    running[end] = (process, number)
                yield answer
    finally:
        for process, _ in running.values():
            process.terminate()
        for end in running:
            end.close()
        for process in processes:
            process.join()


def _ended(process: ForkProcess) -> str:
    process.join()
    code = process.exitcode or 0
    return f"the process that read it ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def _serve(reader: Reads, there: connection.Connection, others: Sequence[connection.Connection]) -> None:
    """Reads files by their numbers, until nobody asks any more. Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for end in others:  # of the parent: were they open here, nobody would see it close them
        end.close()
    while True:
        try:
            there.send(reader.read(there.recv()))
        except (EOFError, OSError):
            return
