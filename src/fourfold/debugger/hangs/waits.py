"""Who waits for whom: what stuck ranks say of themselves, followed to the rank that all the others wait for.

A rank that waits in a collective waits for those members of the group that have not started it, and for those only; so
the waits form a graph, and what stands at its ends is the cause. A stage that waits for a stage whose tensor-parallel
neighbour reads a slow disk is not to be looked at: the neighbour is.

Where the waits end nowhere, ranks wait for one another, because one has left a call out or made one too many. Which it
was its peers tell, who have come to the same point: they have made that call before, or they have not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fourfold.debugger.hangs.reports import Entry, RankReport, Wait, Way
from fourfold.layout import Coordinates, Grid, join_ranks
from fourfold.layout.grid import DIMENSIONS

NO_REPORT = "no report: dead or frozen"

Members = Callable[[Wait], tuple[int, ...]]
"""All ranks of the group of a collective."""

_OTHER_END: dict[Way, Way] = {"send": "receive", "receive": "send", "": ""}
_Key = tuple[str, tuple[int, int], Way, int]  # dimension, ranks, direction, number


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
    """A rank at the end of the waiting: what it does instead, and how many ranks wait for it, directly or not.

    Attributes:
        place: None if the layout is not known.
        stack: what stands there, its main thread or its last call, and the frames, outermost first; empty if it has
            left none.
    """

    rank: int
    place: Coordinates | None
    what: str
    num_waiting: int
    stack: tuple[str, tuple[str, ...]] = ("", ())


@dataclass(frozen=True)
class Hang:
    """The diagnosis.

    Attributes:
        causes: the likeliest first.
        stuck: what is waited in, nearest to a cause first.
        doing: what each rank does that has left a report.
        silent: what is said of a rank that has left none.
        notes: what is wrong with the files, or must be known besides, a sentence each.
    """

    causes: tuple[Cause, ...]
    stuck: tuple[Stuck, ...]
    doing: Mapping[int, str]
    silent: str = NO_REPORT
    notes: tuple[str, ...] = ()


def diagnose(reports: Mapping[int, RankReport], grid: Grid) -> Hang:
    """Follows the waits of all ranks to their ends. A rank without a report waits for nobody: it is an end."""
    return follow(reports, range(grid.size), members_in(grid), grid=grid)


def members_in(grid: Grid) -> Members:
    """The groups of our own runs."""

    def members(wait: Wait) -> tuple[int, ...]:
        dimensions = {"fsdp": ("dp", "cp"), "world": DIMENSIONS}.get(wait.dimension, (wait.dimension,))
        return grid.group_of(wait.ranks[0], *dimensions)

    return members


def follow(
    reports: Mapping[int, RankReport],
    ranks: Sequence[int],
    members: Members,
    *,
    grid: Grid | None = None,
    silent: str = NO_REPORT,
    notes: tuple[str, ...] = (),
) -> Hang:
    """Follows the waits of all ranks to their ends.

    Args:
        reports: of those ranks that have left one.
        ranks: all that there should be.
        members: of the groups that are waited in.
        grid: the layout, if it is known.
        silent: what to say of a rank without a report.
        notes: handed on.
    """
    stuck = _stuck(reports, members)
    graph = _Graph(reports, stuck)
    blamed = {rank: text for s in stuck.values() for text, callers in s.calls.items() for rank in callers}
    callers = _callers(reports, stuck) if blamed else Counter()
    ends = set(blamed) | {rank for rank in graph.missing_in if not graph.waits_for(rank)}
    words = {rank: f"calls {text} at {reports[rank].where}" for rank, text in blamed.items()}
    if not ends:
        ends = graph.circle()
        out_of_order = _out_of_order(ends, reports, graph, grid)
        if out_of_order:
            ends, words = set(out_of_order), out_of_order
    if not ends:
        ends = {rank for rank in ranks if rank not in reports or not reports[rank].waits}
    num_waiting = {rank: graph.num_waiting(rank) for rank in ends}

    def likeliest(rank: int) -> tuple[Any, ...]:
        """Those that call what few others call, then the silent, then those for whom most wait."""
        return callers[blamed.get(rank, "")], rank in reports, -num_waiting[rank], rank

    causes = tuple(
        Cause(
            rank,
            grid.coordinates(rank) if grid else None,
            words.get(rank) or _what(reports.get(rank), stuck, graph.waits_for(rank), silent),
            num_waiting[rank],
            reports[rank].stack if rank in reports else ("", ()),
        )
        for rank in sorted(ends, key=likeliest)
    )
    rows = sorted(stuck.values(), key=lambda s: (not s.calls, not ends & set(s.missing), s.wait.ranks, s.wait.number))
    doing = {rank: _waits(report, stuck) for rank, report in reports.items()}
    return Hang(causes, tuple(rows), doing, silent, notes)


class _Graph:
    """Ranks wait in collectives, and collectives wait for ranks.

    Attributes:
        missing_in: for each rank that is missing anywhere, where.
    """

    def __init__(self, reports: Mapping[int, RankReport], stuck: Mapping[_Key, Stuck]) -> None:
        self.stuck = stuck
        self.waits_in = {report.rank: [_key(wait) for wait in report.waits] for report in reports.values()}
        self._waiting: dict[_Key, list[int]] = defaultdict(list)
        for rank, keys in self.waits_in.items():
            for key in keys:
                self._waiting[key].append(rank)
        self.missing_in: dict[int, list[_Key]] = defaultdict(list)
        for key, what in stuck.items():
            for rank in what.missing:
                self.missing_in[rank].append(key)

    def waits_for(self, rank: int) -> set[int]:
        """The ranks that ``rank`` waits for."""
        return {other for key in self.waits_in.get(rank, ()) for other in self.stuck[key].missing}

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
        left = {rank for rank in self.waits_in if self.waits_for(rank)}
        while left:
            waited_for = {other for rank in left for other in self.waits_for(rank)}
            if left <= waited_for:
                break
            left &= waited_for
        return left


def _stuck(reports: Mapping[int, RankReport], members: Members) -> dict[_Key, Stuck]:
    """Everything that is waited in."""
    lines = {(r.rank, line.dimension, line.ranks, line.way): line for r in reports.values() for line in r.lines}
    found: dict[_Key, Stuck] = {}
    for report in reports.values():
        for wait in report.waits:
            if _key(wait) in found:
                continue
            # Of a message, the other end counts it in the other direction.
            way = _OTHER_END[wait.way]
            everyone = wait.ranks if wait.way else members(wait)
            others = [rank for rank in everyone if not wait.way or rank != report.rank]
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
                group = f"{wait.dimension} {join_ranks(everyone)}"
                started = {rank: entry.seconds for rank, entry in entries.items()}
                found[_key(wait)] = Stuck(wait, group, started, missing, _calls(entries))
    return found


def _calls(entries: Mapping[int, Entry]) -> dict[str, tuple[int, ...]]:
    """What ranks called under one number, if they do not agree."""
    calls: dict[str, list[int]] = defaultdict(list)
    for rank, entry in sorted(entries.items()):
        calls[_text(entry)].append(rank)
    return {text: tuple(ranks) for text, ranks in calls.items()} if len(calls) > 1 else {}


def _callers(reports: Mapping[int, RankReport], stuck: Mapping[_Key, Stuck]) -> Counter[str]:
    """How many ranks made each of the calls that are disagreed on, under the same number, in any group of its kind."""
    asked = {(s.wait.dimension, s.wait.number): s.calls.keys() for s in stuck.values() if s.calls}
    found: Counter[str] = Counter()
    for report in reports.values():
        for line in report.lines:
            if not line.way:
                found.update(
                    _text(entry)
                    for entry in line.recent
                    if _text(entry) in asked.get((line.dimension, entry.number), ())
                )
    return found


def _out_of_order(
    circle: Collection[int], reports: Mapping[int, RankReport], graph: _Graph, grid: Grid | None
) -> dict[int, str]:
    """Of ranks that wait for one another, those that have left a call out, or made one too many; and which.

    One waits in a call A, and is missing in a call B in which another waits. Peers that stand in A, too, have either
    made B before: then the first has left it out; or they have not: then B is one too many.
    """
    counts = {rank: {line.dimension: line.started for line in reports[rank].lines if not line.way} for rank in reports}
    standing: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    for report in reports.values():
        for wait in report.waits:
            standing[_point(wait)].append(report.rank)
    left_out: dict[int, str] = {}
    too_many: dict[int, str] = {}
    for rank in circle:
        for key, a in product(graph.missing_in[rank], reports[rank].waits):
            b = graph.stuck[key]
            # Who has come to A on the way to B is not at odds with this rank: B comes later.
            at_odds = {other for other in b.started if counts[other].get(a.dimension, 0) <= a.number}
            if a.way or b.wait.way or not at_odds:
                continue
            peers = [peer for peer in standing[_point(a)] if peer != rank and _same_stage(peer, rank, grid)]
            made = sum(counts[peer].get(b.wait.dimension, 0) > b.wait.number for peer in peers)
            call = f"{_text(b.wait)} of {b.group}"
            if 2 * made > len(peers):
                left_out[rank] = f"has left out {call}, and {_what(reports[rank], graph.stuck, (), '')}"
            elif peers and not made:
                for other in at_odds & {*circle}:
                    too_many[other] = f"calls {call} at {reports[other].where}, which its peers do not call here"
    found = left_out or too_many
    return found if 2 * len(found) <= len(circle) else {}  # most of them: then it is all that disagree, not a few


def _point(wait: Wait) -> tuple[str, int, str]:
    """A call, in whichever group of its dimension."""
    return wait.dimension, wait.number, _text(wait)


def _same_stage(a: int, b: int, grid: Grid | None) -> bool:
    """Whether two ranks make the same calls, as those of one pipeline rank do."""
    return grid is None or grid.coordinates(a).pp == grid.coordinates(b).pp


def _key(wait: Wait) -> _Key:
    return wait.dimension, wait.ranks, wait.way, wait.number


def _text(entry: Entry) -> str:
    return f"{entry.kind} {entry.tensor}".rstrip()


def _what(report: RankReport | None, stuck: Mapping[_Key, Stuck], waits_for: Collection[int], silent: str) -> str:
    """What a rank does instead of what others wait for."""
    if report is None:
        return silent
    if report.waits and waits_for:
        return f"{_waits(report, stuck)} for {join_ranks(waits_for)}"
    if report.waits and not any(stuck[_key(wait)].missing for wait in report.waits):
        return f"{_waits(report, stuck)}, which all have started"
    return _waits(report, stuck)


def _waits(report: RankReport, stuck: Mapping[_Key, Stuck]) -> str:
    """What a rank waits for, or where it stands."""
    if report.waits:
        return f"waits in {call_text(report.waits[0])} of {stuck[_key(report.waits[0])].group}"
    return report.where if not report.doing or report.doing.startswith("step") else f"{report.where} ({report.doing})"


def call_text(wait: Wait) -> str:
    """A wait's call, in words."""
    return wait.kind if wait.way else _text(wait)
