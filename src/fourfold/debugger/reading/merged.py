"""All ranks in one trace that viewers can open: what matters of each, on one clock, below a size.

Neighbouring kernels of one class are joined into one range, across gaps that grow until the file is small enough.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.reading.trace import UNKNOWN, Call, Host, RankTrace, Times, Work

LARGEST = 200_000_000
"""Bytes that viewers open without trouble; at 500 MB they fail."""
_ACTIONS = ("F", "B", "I", "W")
_GAPS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
"""Nanoseconds between kernels that are joined, in the order in which they are tried."""
_BYTES = 190  # of an event, with its arguments
_HOST, _ACTION, _WORK, _CALL = 1, 2, 10, 20  # threads


@dataclass(frozen=True)
class _Rows:
    """Ranges of one row of one rank."""

    thread: int
    start: Times
    end: Times
    names: Sequence[str]
    arguments: Sequence[str]

    def longest(self, most: int) -> _Rows:
        """So many of them, in order of start."""
        if len(self.start) <= most:
            return self
        order = np.sort(np.argsort(self.start - self.end, kind="stable")[:most])
        return _Rows(
            self.thread, self.start[order], self.end[order], [self.names[i] for i in order],
            [self.arguments[i] for i in order],
        )  # fmt: skip


def write_merged(
    path: Path, traces: Sequence[RankTrace], *, offsets: Mapping[int, int] | None = None, largest: int = LARGEST
) -> tuple[str, ...]:
    """Writes the trace of all ranks; gzip if the name ends in .gz.

    Args:
        path: of the file.
        traces: of the ranks.
        offsets: by rank, nanoseconds that are added to its times to make the clock common; default: none.
        largest: bytes of the text, about.

    Returns:
        What was joined or left out, a sentence each.
    """
    offsets = offsets or {}
    budget = max(largest // max(len(traces), 1) // _BYTES, 1)
    zero = min((_first(trace) + offsets.get(trace.rank, 0) for trace in traces), default=0)
    rows = {trace.rank: _reduced(trace, budget) for trace in traces}
    notes = _notes(list(rows.values()))
    partial = path.with_name(f"{path.name}.partial")
    try:
        with gzip.open(partial, "wt", compresslevel=3) if path.suffix == ".gz" else partial.open("w") as file:
            about = json.dumps({"reduced": {"ranks": len(traces), "notes": list(notes)}})
            file.write(f'{{"fourfold": {about}, "displayTimeUnit": "ms", "traceEvents": [\n')
            lines = (line for trace in traces for line in _lines(trace, rows[trace.rank][0], offsets, zero))
            file.write(next(lines, ""))
            for line in lines:
                file.write(",\n")
                file.write(line)
            file.write("\n]}\n")
        os.replace(partial, path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return notes


def _first(trace: RankTrace) -> int:
    starts = [table.start[0] for table in (trace.steps, trace.works, trace.calls) if len(table.start)]
    return int(min(starts, default=0))


def _reduced(trace: RankTrace, budget: int) -> tuple[list[_Rows], int, int]:
    """At most so many ranges, the nanoseconds of the largest gap that was joined, and how many ranges were left out."""
    fixed = [_host(trace), _actions(trace), *_calls(trace)]
    room = budget - sum(len(row.start) for row in fixed)
    gap, works = _GAPS[0], _works(trace, _GAPS[0])
    for gap in _GAPS:
        works = _works(trace, gap)
        if sum(len(row.start) for row in works) <= max(room, budget // 2):
            break
    rows = [*fixed, *works]
    total = sum(len(row.start) for row in rows)
    if total > budget:
        rows = [row.longest(max(budget * len(row.start) // total, 1)) for row in rows]
    return rows, gap, total - sum(len(row.start) for row in rows)


def _notes(reduced: Sequence[tuple[list[_Rows], int, int]]) -> tuple[str, ...]:
    gap = max((gap for _, gap, _ in reduced), default=_GAPS[0])
    gone = sum(left for _, _, left in reduced)
    notes = [f"kernels of one class that follow each other within {gap / 1000:,g} us are one range"]
    if gone:
        notes.append(f"{gone:,} of the shortest ranges were left out")
    return tuple(notes)


def _host(trace: RankTrace) -> _Rows:
    steps, ranges = trace.steps, trace.ranges
    names = [f"step {number}" for number in steps.number] + [Host(kind).name.lower() for kind in ranges.kind]
    start, end = np.concatenate((steps.start, ranges.start)), np.concatenate((steps.end, ranges.end))
    return _Rows(_HOST, start, end, names, [""] * len(names))


def _actions(trace: RankTrace) -> _Rows:
    """Labels of computations: the device's, if it has them."""
    labels = trace.labels
    is_action = np.array([kind in _ACTIONS for kind in labels.kind], dtype=bool)
    on_device = labels.on_device & is_action
    rows = np.flatnonzero(on_device if on_device.any() else is_action)
    names = [f"{labels.stage[i]}{labels.kind[i]}{labels.micro_batch[i]}" for i in rows]
    return _Rows(_ACTION, labels.start[rows], labels.end[rows], names, [""] * len(rows))


def _works(trace: RankTrace, gap: int) -> list[_Rows]:
    """A row per stream, of ranges of one class."""
    works = trace.works
    out = []
    for number, stream in enumerate(np.unique(works.stream)):
        mine = np.flatnonzero(works.stream == stream)
        start, end, kind, count = joined(works.start[mine], works.end[mine], works.kind[mine], gap)
        names = [Work(k).name.lower() for k in kind]
        out.append(_Rows(_WORK + number % 10, start, end, names, [f'"kernels":{n}' for n in count]))
    return out


def joined(
    start: Times, end: Times, kind: NDArray[np.int8], gap: int
) -> tuple[Times, Times, NDArray[np.int8], NDArray[np.int64]]:
    """Neighbours of one kind that begin within `gap` of the end before, as one; and how many each was made of."""
    if not len(start):
        return start, end, kind, np.zeros(0, dtype=np.int64)
    reach = np.maximum.accumulate(end)
    begins = np.flatnonzero(np.concatenate(([True], (kind[1:] != kind[:-1]) | (start[1:] - reach[:-1] > gap))))
    count = np.diff(np.append(begins, len(start)))
    return start[begins], np.maximum.reduceat(end, begins), kind[begins], count


def _calls(trace: RankTrace) -> list[_Rows]:
    """A row per group; what one stream does there does not overlap, on several it may."""
    calls = trace.calls
    out = []
    keys = list(dict.fromkeys(zip(calls.group.tolist(), calls.stream.tolist(), strict=True)))
    for number, (group, stream) in enumerate(keys):
        rows = np.flatnonzero((calls.group == group) & (calls.stream == stream))
        about = "" if group == UNKNOWN else trace.groups[group].description or trace.groups[group].name
        names = [f"{Call(calls.kind[i]).name.lower()} {about}".rstrip() for i in rows]
        arguments = [_about(trace, int(i)) for i in rows]
        out.append(_Rows(_CALL + number, calls.start[rows], calls.end[rows], names, arguments))
    return out


def _about(trace: RankTrace, i: int) -> str:
    calls = trace.calls
    said = {"group": "" if calls.group[i] == UNKNOWN else trace.groups[calls.group[i]].name}
    said |= {key: int(value) for key, value in (("seq", calls.sequence[i]), ("elements", calls.elements[i]),
                                                ("peer", calls.peer[i])) if value != UNKNOWN}  # fmt: skip
    return json.dumps(said)[1:-1]


def _lines(trace: RankTrace, rows: Sequence[_Rows], offsets: Mapping[int, int], zero: int) -> Iterator[str]:
    """Events of one rank, and the names of its rows."""
    rank, move = trace.rank, offsets.get(trace.rank, 0) - zero
    yield _named("process_name", rank, 0, f"rank {rank}")
    yield f'{{"ph":"M","name":"process_sort_index","pid":{rank},"tid":0,"args":{{"sort_index":{rank}}}}}'
    for row in rows:
        if not len(row.start):
            continue
        kind = {_HOST: "steps", _ACTION: "computations"}.get(row.thread)
        if kind is None:
            kind = "work" if row.thread < _CALL else f"communication {row.names[0].partition(' ')[2]}".rstrip()
        yield _named("thread_name", rank, row.thread, kind)
        for start, end, name, arguments in zip(row.start, row.end, row.names, row.arguments, strict=True):
            yield (
                f'{{"ph":"X","cat":"{kind}","name":{json.dumps(name)},"pid":{rank},"tid":{row.thread},'
                f'"ts":{_us(int(start) + move)},"dur":{_us(int(end - start))},"args":{{{arguments}}}}}'
            )


def _named(what: str, rank: int, thread: int, name: str) -> str:
    return f'{{"ph":"M","name":"{what}","pid":{rank},"tid":{thread},"args":{{"name":{json.dumps(name)}}}}}'


def _us(nanoseconds: int) -> str:
    sign = "-" if nanoseconds < 0 else ""
    whole, rest = divmod(abs(nanoseconds), 1000)
    return f"{sign}{whole}.{rest:03d}"
