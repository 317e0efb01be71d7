"""One question, whatever is at a path: a hang, a table of operations, action logs, profiler traces, or memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fourfold.debugger.hangs import Hang, find_hang, is_hang_source
from fourfold.debugger.memory import Memory, find_memory, has_memory, snapshot_files
from fourfold.debugger.reading import find, read_all, write_merged
from fourfold.debugger.reading.trace import RankTrace
from fourfold.debugger.slow import Diagnosis, diagnose_logs, diagnose_traces, is_logs
from fourfold.debugger.slow.diagnosis import Progress
from fourfold.debugger.slow.places import parse_layout
from fourfold.debugger.tables import TableVerdict, analyse, is_table, read_table
from fourfold.debugger.tables import judge as judge_table

Answer = Diagnosis | TableVerdict | Hang | Memory


def ask(
    path: Path,
    *,
    layout: str | None = None,
    steps: tuple[int, int] | None = None,
    workers: int | None = None,
    keep: bool = False,
    progress: Progress | None = None,
) -> Answer:
    """Finds out what is slow, or stuck, or what holds the memory.

    Where traces or logs tell who is slow, the memory that was recorded beside them is said with that.

    Args:
        path: a run's folder, a folder with traces, logs, dumps or memory snapshots, one of them, or a table.
        layout: as in "tp=2,cp=2,pp=2,dp=2"; None: what is known from the files.
        steps: first and last to look at.
        workers, keep, progress: for traces, as in `diagnose_traces`.

    Raises:
        ValueError: there is nothing to be diagnosed, or what there is does not fit together.
    """
    grid = None if layout is None else parse_layout(layout)
    if not path.exists() and not any(sign in str(path) for sign in "*?["):
        raise ValueError(f"{path}: there is no such file or folder")
    if is_table(path):
        if grid is not None:
            raise ValueError("--layout: a table of operations says its layout itself; leave it out")
        table = read_table(path)
        chosen = None if steps is None else [step for step in table.steps if steps[0] <= step <= steps[1]]
        return judge_table(analyse(table, steps=chosen))
    if is_hang_source(path):
        if steps is not None:
            raise ValueError("--steps: has no effect on a hang; leave it out")
        return find_hang(path, grid)
    snapshots, traces = snapshot_files(path), _traces(path)
    if snapshots and not traces and not is_logs(path):
        return find_memory(snapshots, path=path, grid=grid, steps=steps, workers=workers, progress=progress)
    if is_logs(path) and not traces:
        found = diagnose_logs(path, layout=grid, steps=steps)
    else:
        found = diagnose_traces(path, layout=grid, steps=steps, workers=workers, keep=keep, progress=progress)
    recorded = [trace for trace in traces if has_memory(trace)]
    if not snapshots and not recorded:
        return found
    known = None if found.layout.source == "none" else found.layout.grid
    try:
        memory = find_memory(
            snapshots, recorded, path=path, grid=known, steps=steps, workers=workers, progress=progress
        )
    except ValueError as error:  # who is slow is known all the same
        return dataclasses.replace(found, notes=(*found.notes, f"memory: {error}"))
    return dataclasses.replace(found, memory=memory)


def _traces(path: Path) -> list[Path]:
    """The profiler's traces at a path; none if it is a snapshot of memory, or a run that has only logs."""
    if path.is_file() and snapshot_files(path):
        return []
    try:
        return find(path / "profile" if is_logs(path) else path)
    except ValueError:
        return []


def write_merged_of(found: Answer, path: Path) -> tuple[str, ...]:
    """Writes one small trace of all ranks, with clocks aligned. Returns what was joined or left out, a sentence each.

    ValueError: there are no traces. OSError: it cannot be written.
    """
    if not isinstance(found, Diagnosis) or found.clocks is None:
        raise ValueError("--merged: needs profiler traces")
    if path.resolve() in {file.resolve() for file in find(found.path)}:
        raise ValueError(f"--merged {path}: is one of the traces that were read; give another name")
    offsets = dict(zip(found.ranks, found.clocks.offset.tolist(), strict=True))
    traces = read_all(find(found.path), reduce=_itself, failed=lambda _: None)
    return write_merged(path, traces, offsets=offsets)


def _itself(trace: RankTrace) -> RankTrace:
    return trace
