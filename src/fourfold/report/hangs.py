"""Who waits for whom: the reports that stuck ranks have left, followed to the rank that all the others wait for.

Every rank says what it waits for and how many collectives and messages of each group it has started. A rank that waits
in a collective waits for those members of the group that have not started it, and for those only; so the waits form a
graph, and what stands at its ends is the cause. A stage that waits for a stage whose tensor-parallel neighbour reads a
slow disk is not to be looked at: the neighbour is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from fourfold.layout import Coordinates, Grid
from fourfold.layout.grid import DIMENSIONS

NO_REPORT = "no report: dead or frozen"
CAUSE = "cause: "  # begins the lines of a diagnosis that name one
NO_CAUSE = "All ranks wait, and have started what they wait for: a link, or a device, stands still."
_MOST = 12  # causes and rows that are printed; the files have the rest

Way = Literal["", "send", "receive"]
_OTHER_END: dict[Way, Way] = {"send": "receive", "receive": "send", "": ""}
_Key = tuple[str, tuple[int, int], Way, int]  # dimension, ranks, direction, number


class Entry(msgspec.Struct, frozen=True):
    """A collective or message that a rank has started, ``seconds`` before its report."""

    kind: str
    number: int
    stage: int
    micro_batch: int
    tensor: str
    seconds: float
    ended: bool


class Wait(Entry, frozen=True):
    """What a rank waits for, since ``seconds``. ``ranks``: first and last of the group, or source and destination."""

    dimension: str
    ranks: tuple[int, int]
    way: Way


class Line(msgspec.Struct, frozen=True):
    """A rank's last entries in one group, or in one direction between two ranks. ``ranks`` are those of Wait."""

    dimension: str
    ranks: tuple[int, int]
    way: Way
    started: int
    recent: tuple[Entry, ...]


class RankReport(msgspec.Struct, frozen=True):
    """What one rank writes when a step takes too long; docs/formats.md explains the keys."""

    rank: int
    host: str
    pid: int
    doing: str
    seconds: float
    where: str
    waits: tuple[Wait, ...]
    lines: tuple[Line, ...]
    actions: tuple[dict[str, Any], ...] = ()
    stacks: dict[str, tuple[str, ...]] = {}
    flight_recorder: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Stuck:
    """A collective, or a message, that ranks wait in.

    Attributes:
        wait: as one of them describes it.
        group: its dimension and ranks, in words.
        started: those that have started it, and how many seconds ago; of a message the one that waits.
        missing: those that have not.
        calls: what they called, if that differs: description -> ranks.
    """

    wait: Wait
    group: str
    started: dict[int, float]
    missing: tuple[int, ...]
    calls: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Cause:
    """A rank at the end of the waiting: what it does instead, and how many ranks wait for it, directly or not."""

    rank: int
    place: Coordinates
    what: str
    num_waiting: int


@dataclass(frozen=True)
class Hang:
    """The diagnosis.

    Attributes:
        causes: the likeliest first.
        stuck: what is waited in, nearest to a cause first.
        doing: what each rank does that has left a report.
    """

    causes: tuple[Cause, ...]
    stuck: tuple[Stuck, ...]
    doing: Mapping[int, str]


def report_file(folder: Path, rank: int) -> Path:
    """Where a rank's report is within the folder of a hang."""
    return folder / f"rank-{rank:05d}.json"


def read_reports(folder: Path, num_ranks: int) -> dict[int, RankReport]:
    """The reports in a folder by rank. What is not there, or is damaged, is left out."""
    reports = {}
    for rank in range(num_ranks):
        try:
            reports[rank] = msgspec.json.decode(report_file(folder, rank).read_bytes(), type=RankReport)
        except (OSError, msgspec.DecodeError):
            continue
    return reports


def diagnose(reports: Mapping[int, RankReport], grid: Grid) -> Hang:
    """Follows the waits of all ranks to their ends. A rank without a report waits for nobody: it is an end."""
    stuck = _stuck(reports, grid)
    graph = _Graph(reports, stuck)
    disagreeing = {rank: text for s in stuck.values() for text, ranks in s.calls.items() for rank in ranks}
    ends = set(disagreeing) | {rank for rank in graph.missing_in if not graph.waits_for(rank)}
    if not ends:
        ends = graph.circle()
    if not ends:
        ends = {rank for rank in range(grid.size) if rank not in reports or not reports[rank].waits}
    callers = Counter(disagreeing.values())
    num_waiting = {rank: graph.num_waiting(rank) for rank in ends}

    def likeliest(rank: int) -> tuple[Any, ...]:
        """Those that call what few others call, then the silent, then those for whom most wait."""
        return callers[disagreeing.get(rank, "")], rank in reports, -num_waiting[rank], rank

    causes = tuple(
        Cause(
            rank,
            grid.coordinates(rank),
            _what(reports.get(rank), stuck, disagreeing.get(rank), graph.waits_for(rank)),
            num_waiting[rank],
        )
        for rank in sorted(ends, key=likeliest)
    )
    rows = sorted(stuck.values(), key=lambda s: (not s.calls, not ends & set(s.missing), s.wait.ranks, s.wait.number))
    return Hang(causes, tuple(rows), {rank: _waits(report, stuck) for rank, report in reports.items()})


class _Graph:
    """Ranks wait in collectives, and collectives wait for ranks.

    Attributes:
        missing_in: for each rank that is missing anywhere, where.
    """

    def __init__(self, reports: Mapping[int, RankReport], stuck: Mapping[_Key, Stuck]) -> None:
        self._stuck = stuck
        self._waits_in = {report.rank: [_key(wait) for wait in report.waits] for report in reports.values()}
        self._waiting: dict[_Key, list[int]] = defaultdict(list)
        for rank, keys in self._waits_in.items():
            for key in keys:
                self._waiting[key].append(rank)
        self.missing_in: dict[int, list[_Key]] = defaultdict(list)
        for key, what in stuck.items():
            for rank in what.missing:
                self.missing_in[rank].append(key)

    def waits_for(self, rank: int) -> set[int]:
        """The ranks that ``rank`` waits for."""
        return {other for key in self._waits_in.get(rank, ()) for other in self._stuck[key].missing}

    def num_waiting(self, end: int) -> int:
        """How many other ranks wait for ``end``, directly or through others."""
        seen, todo = {end}, [end]
        while todo:
            keys = self.missing_in.get(todo.pop(), ())
            new = {rank for key in keys for rank in self._waiting[key]} - seen
            seen |= new
            todo += new
        return len(seen) - 1

    def circle(self) -> set[int]:
        """Ranks that wait for one another: what is left when those are taken away for whom nobody waits."""
        left = {rank for rank in self._waits_in if self.waits_for(rank)}
        while left:
            waited_for = {other for rank in left for other in self.waits_for(rank)}
            if left <= waited_for:
                break
            left &= waited_for
        return left


def _stuck(reports: Mapping[int, RankReport], grid: Grid) -> dict[_Key, Stuck]:
    """Everything that is waited in."""
    lines = {(r.rank, line.dimension, line.ranks, line.way): line for r in reports.values() for line in r.lines}
    found: dict[_Key, Stuck] = {}
    for report in reports.values():
        for wait in report.waits:
            if _key(wait) in found:
                continue
            # Of a message, the other end counts it in the other direction.
            way = _OTHER_END[wait.way]
            members = wait.ranks if wait.way else _members(wait, grid)
            others = [rank for rank in members if not wait.way or rank != report.rank]
            theirs = {rank: lines.get((rank, wait.dimension, wait.ranks, way)) for rank in others}
            missing = tuple(rank for rank, line in theirs.items() if line is None or line.started <= wait.number)
            entries = {
                rank: entry
                for rank, line in theirs.items()
                if line is not None and rank not in missing
                for entry in line.recent
                if entry.number == wait.number
            }
            if wait.way:
                group = f"{wait.dimension} {wait.ranks[0]} > {wait.ranks[1]}"
                found[_key(wait)] = Stuck(wait, group, {report.rank: wait.seconds}, missing, {})
            else:
                group = f"{wait.dimension} {join_ranks(members)}"
                started = {rank: entry.seconds for rank, entry in entries.items()}
                found[_key(wait)] = Stuck(wait, group, started, missing, _calls(entries))
    return found


def _members(wait: Wait, grid: Grid) -> tuple[int, ...]:
    """The ranks of the group of a collective."""
    dimensions = {"fsdp": ("dp", "cp"), "world": DIMENSIONS}.get(wait.dimension, (wait.dimension,))
    return grid.group_of(wait.ranks[0], *dimensions)


def _calls(entries: Mapping[int, Entry]) -> dict[str, tuple[int, ...]]:
    """What ranks called under one number, if they do not agree."""
    calls: dict[str, list[int]] = defaultdict(list)
    for rank, entry in sorted(entries.items()):
        calls[f"{entry.kind} {entry.tensor}".rstrip()].append(rank)
    return {text: tuple(ranks) for text, ranks in calls.items()} if len(calls) > 1 else {}


def _key(wait: Wait) -> _Key:
    return wait.dimension, wait.ranks, wait.way, wait.number


def _what(report: RankReport | None, stuck: Mapping[_Key, Stuck], calls: str | None, waits_for: Collection[int]) -> str:
    """What a rank does instead of what others wait for."""
    if report is None:
        return NO_REPORT
    if calls is not None:
        return f"calls {calls} at {report.where}"
    if report.waits:
        return _waits(report, stuck) + (f" for {join_ranks(waits_for)}" if waits_for else ", which all have started")
    return _waits(report, stuck)


def _waits(report: RankReport, stuck: Mapping[_Key, Stuck]) -> str:
    """What a rank waits for, or where it stands."""
    if report.waits:
        return f"waits in {_call(report.waits[0])} of {stuck[_key(report.waits[0])].group}"
    return report.where if report.doing.startswith("step") else f"{report.where} ({report.doing})"


def hang_text(hang: Hang, *, head: str) -> str:
    """The diagnosis for the terminal: ``head``, the causes, and a table of what is waited in; plain lines."""
    lines = [head, ""]
    for cause in hang.causes[:_MOST]:
        place = " ".join(f"{dimension}{at}" for dimension, at in cause.place._asdict().items())
        for_it = f"; {cause.num_waiting} wait for it" if cause.num_waiting else ""
        lines.append(f"{CAUSE}rank {cause.rank} ({place}): {cause.what}{for_it}")
    if len(hang.causes) > _MOST:
        lines.append(f"       and {len(hang.causes) - _MOST} more ranks")
    if not hang.causes:
        lines.append(NO_CAUSE)
    if hang.stuck:
        lines += ["", *_table(hang)]
    return "\n".join(lines)


def _table(hang: Hang) -> list[str]:
    rows = [("group", "call", "stage", "micro-batch", "number", "started (since)", "missing")]
    whereabouts = {**hang.doing, **{cause.rank: cause.what for cause in hang.causes}}
    for stuck in hang.stuck[:_MOST]:
        wait = stuck.wait
        where = "; ".join(f"{rank}: {whereabouts.get(rank, NO_REPORT)}" for rank in stuck.missing[:_MOST])
        more = f"; and {len(stuck.missing) - _MOST} more" if len(stuck.missing) > _MOST else ""
        calls = [f"{text} by {join_ranks(ranks)}" for text, ranks in stuck.calls.items()]
        rows.append(
            (
                stuck.group,
                " but ".join(calls) or _call(wait),
                _or_dash(wait.stage),
                _or_dash(wait.micro_batch),
                str(wait.number),
                f"{join_ranks(stuck.started)} ({max(stuck.started.values(), default=0.0):.1f} s)",
                where + more or "none",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(hang.stuck) > _MOST:
        lines.append(f"and {len(hang.stuck) - _MOST} more")
    return lines


def _call(wait: Wait) -> str:
    return wait.kind if wait.way else f"{wait.kind} {wait.tensor}".rstrip()


def _or_dash(index: int) -> str:
    return str(index) if index >= 0 else "-"


def join_ranks(ranks: Iterable[int]) -> str:
    """Ranks in short: 0-3, 8, 10-11."""
    runs: list[Sequence[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank,))
    return ", ".join("-".join(map(str, run)) for run in runs)
