"""Traces of PyTorch's profiler, and of the simulator, which writes the same: one file to the columns of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fourfold.debugger.reading import ranks as which
from fourfold.debugger.reading.classes import Category
from fourfold.debugger.reading.device import Context, calls_of, launches_of, split, works_of
from fourfold.debugger.reading.document import Document, Header
from fourfold.debugger.reading.events import integer
from fourfold.debugger.reading.groups import Groups, Listed, listed, ranks_of
from fourfold.debugger.reading.host import work_and_calls
from fourfold.debugger.reading.ranges import Marks, host_ranges, label_columns, marks, parsed
from fourfold.debugger.reading.recording import KEPT, Recorder, Recording, Table
from fourfold.debugger.reading.trace import UNKNOWN, Calls, RankTrace, Works
from fourfold.layout import Grid

_EPOCH = 10**18  # nanoseconds: times from 2001 on are dates, smaller ones the time since a machine was started


def read(path: Path | str) -> list[RankTrace]:
    """Reads a file: the trace of one rank, or of several, of which each is a process.

    A file that does not say its rank is of rank 0, with a note.

    Raises:
        ValueError: it is no trace, or holds no events.
    """
    return named_by_default(read_as_it_says(Path(path)))


def named_by_default(traces: list[RankTrace]) -> list[RankTrace]:
    """Makes the only trace rank 0 if nothing tells its rank."""
    if len(traces) != 1 or traces[0].rank != UNKNOWN:
        return traces
    note = "neither the file nor its name says which rank it is of: taken for rank 0"
    return [replace(traces[0], rank=0, notes=(*traces[0].notes, note))]


def read_as_it_says(path: Path) -> list[RankTrace]:
    """The same, with rank UNKNOWN where nothing tells it."""
    document = Document(path)
    recorder = Recorder()
    for block in document.blocks():
        recorder.add(block)
    recording = recorder.finish()
    facts = _Facts.of(path, document.header, document.notes, recording)
    if not any(len(table) for table in recording.tables.values()):
        why = f": {'; '.join(document.notes)}" if document.notes else ""
        raise ValueError(f"{path}: no event of a profiler is in it{why}")
    if facts.by_process:
        return [_trace(part, facts, rank) for rank, part in _by_rank(recording, facts.by_process)]
    return [_trace(recording, facts, facts.rank)]


@dataclass(frozen=True)
class _Facts:
    """What the file says as a whole."""

    path: Path
    rank: int
    by_process: dict[int, int]
    """Rank of each process, of a file of several ranks; else empty."""
    world_size: int
    base: int
    host: str
    grid: Grid | None
    shares: tuple[float, ...]
    processor: dict[int, int]
    """Nanoseconds of processor time, by number of the step."""
    listed: tuple[Listed, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, header: Header, notes: Iterable[str], recording: Recording) -> _Facts:
        notes = list(notes)
        if recording.dropped:
            notes.append(f"{recording.dropped:,} events without a time were left out")
        known = listed(header.distributed)
        by_process = {recording.processes.index(pid): rank for pid, rank in recording.ranks.items()
                      if pid in recording.processes}  # fmt: skip
        said = integer(header.distributed.get("rank"), UNKNOWN) if isinstance(header.distributed, dict) else UNKNOWN
        if said < 0 and len({*by_process.values()}) > 1:
            rank = UNKNOWN
        else:
            rank = _rank(path, said, known, {*by_process.values()}, recording, notes)
            by_process = {}
        ours = header.fourfold if isinstance(header.fourfold, dict) else {}
        if "reduced" in ours:
            raise ValueError(f"{path}: this copy for viewers lacks what a diagnosis needs; give the traces themselves")
        grid, shares = _layout(ours, notes)
        host = ours.get("host") or header.host
        return cls(
            path, rank, by_process, which.world_size(header.distributed, known), max(integer(header.base, 0), 0),
            str(host) if host else "", grid, shares, _by_step(ours.get("processor_ns")), known, tuple(notes),
        )  # fmt: skip


def _rank(
    path: Path, said: int, known: tuple[Listed, ...], named: set[int], recording: Recording, notes: list[str]
) -> int:
    """By what stands in the file, the surest first, then by its name."""
    rank = said
    if rank < 0 and len(named) == 1:
        rank = next(iter(named))
    if rank < 0:
        texts = {
            str(arguments.ranks): arguments.ranks for kind in (Category.DEVICE, Category.OPERATOR)
            for arguments in recording.tables[kind].arguments.values()
        }  # fmt: skip
        whole = [ranks for ranks, is_whole in map(ranks_of, texts.values()) if is_whole]
        rank = which.from_groups([*known, *whole])
        if rank >= 0:
            notes.append(f"the file does not say its rank; its groups have none but rank {rank} in common")
    by_name = which.from_name(path)
    if rank < 0:
        if by_name >= 0:
            notes.append(f"the file does not say its rank: {by_name} is from its name")
        return by_name
    if by_name >= 0 and by_name != rank:
        notes.append(f"by its name the file is of rank {by_name}, by its content of rank {rank}, which counts")
    return rank


def _layout(ours: dict, notes: list[str]) -> tuple[Grid | None, tuple[float, ...]]:
    """What our trainer and simulator say about the run."""
    sizes, given = ours.get("grid"), ours.get("shares")
    grid = None
    if isinstance(sizes, dict):
        try:
            grid = Grid(**{key: integer(sizes.get(key, 1), 0) for key in ("tp", "cp", "pp", "dp")})
        except ValueError as error:
            notes.append(f"its layout is none: {error}")
    shares: tuple[float, ...] = ()
    if isinstance(given, list) and given and all(isinstance(share, int | float) and share > 0 for share in given):
        shares = tuple(share / sum(given) for share in given)
    return grid, shares


def _by_step(said: object) -> dict[int, int]:
    if not isinstance(said, dict):
        return {}
    return {integer(step, UNKNOWN): integer(value, UNKNOWN) for step, value in said.items()}


def _by_rank(recording: Recording, by_process: dict[int, int]) -> list[tuple[int, Recording]]:
    """The recording of each rank, ascending."""
    numbers = np.full(len(recording.processes), UNKNOWN)
    numbers[list(by_process)] = list(by_process.values())
    parts: dict[int, dict[Category, Table]] = {rank: {} for rank in sorted({*by_process.values()})}
    for kind, table in recording.tables.items():
        rank = numbers[table.process]
        order = np.argsort(rank, kind="stable")
        wanted = np.array(list(parts))
        begins, ends = (np.searchsorted(rank[order], wanted, side=side) for side in ("left", "right"))
        for number, begin, end in zip(parts, begins, ends, strict=True):
            parts[number][kind] = table.taken(order[begin:end])
    return [(rank, replace(recording, tables=tables)) for rank, tables in parts.items()
            if any(len(table) for table in tables.values())]  # fmt: skip


def _trace(recording: Recording, facts: _Facts, rank: int) -> RankTrace:
    """One rank's columns."""
    some = [table for table in recording.tables.values() if len(table)]
    zero = min(int(table.start.min()) for table in some)
    end = max(int(table.end.max()) for table in some) - zero
    recording = replace(
        recording, tables={kind: _since(table, zero).ordered() for kind, table in recording.tables.items()}
    )
    operators, annotations, launches, device, device_annotations = (recording.tables[kind] for kind in KEPT)
    names = recording.names
    marked = marks(annotations, device_annotations, names, (0, end))
    labels = parsed(annotations, names), parsed(device_annotations, names)
    groups = Groups(facts.listed, facts.grid, rank)
    notes = list(facts.notes)
    if len(device):
        works, calls = _of_device(recording, marked, labels[0], groups, notes)
    else:
        works, calls = work_and_calls(recording, marked, labels[0], groups, grid=facts.grid, rank=rank)
        if len(launches):
            notes.append("nothing of the GPU was recorded: what its host did stands for it")
    if not any(names[name].startswith("ProfilerStep#") for name in np.unique(annotations.name)):
        notes.append("no steps are marked: all of it counts as one")
    used, which_name = np.unique(works.name, return_inverse=True)
    return RankTrace(
        str(facts.path),
        rank,
        facts.world_size,
        "gpu" if len(device) else "cpu",
        _origin(facts.base, zero),
        facts.host,
        tuple(groups.found),
        tuple(names[name] for name in used),
        marked.steps,
        replace(works, name=which_name.astype(np.int32)),
        calls,
        label_columns(*labels),
        host_ranges((annotations, operators), names),
        facts.grid,
        facts.shares,
        tuple(facts.processor.get(int(n), UNKNOWN) for n in marked.steps.number) if facts.processor else (),
        tuple(notes),
    )


def _origin(base: int, zero: int) -> int:
    """Of times with a base, or that are dates themselves, since 1970; of others since the start of a machine."""
    return zero if zero > _EPOCH else base + zero


def _since(table: Table, zero: int) -> Table:
    return replace(table, start=table.start - zero, end=table.end - zero)


def _of_device(
    recording: Recording, marked: Marks, labels: tuple, groups: Groups, notes: list[str]
) -> tuple[Works, Calls]:
    device, launches = recording.tables[Category.DEVICE], recording.tables[Category.LAUNCH]
    launch = launches_of(device, launches)
    launched = np.where(launch >= 0, launches.start[launch], UNKNOWN) if len(launches) else launch
    work, talk = split(device, recording.names)
    if not np.any(launch[np.append(work, talk)] >= 0):
        notes.append("no kernel can be traced to its launch: it counts to the step in which it ran")
    context = Context(
        (recording.tables[Category.OPERATOR], recording.tables[Category.ANNOTATION]), labels, recording.names
    )
    works = works_of(device.taken(work), launched[work], recording, marked)
    calls = calls_of(device.taken(talk), (launches, launch[talk]), context, recording, marked, groups)
    return works, calls
