"""Which calls of different ranks are one and the same collective or message, and how long it took once all were there.

A collective ends for all of its members together, whenever they came. So the last to come spends the shortest time in
it, and that time is the transfer; what others spend longer is waiting. This needs no clocks.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.reading.trace import MESSAGES, UNKNOWN, Call, Calls
from fourfold.debugger.slow.columns import numbered, occurrence
from fourfold.debugger.slow.idle import RankSteps
from fourfold.debugger.slow.places import Places

Key = tuple[str, tuple[int, ...]]
"""Dimension, and ranks: of a group ascending, of a message source and destination."""


@dataclass(frozen=True)
class Meetings:
    """Calls of all ranks, those of one meeting under one number.

    All columns have one entry per call, in the order of ranks and of each rank's calls.
    """

    rank: NDArray[np.int64]
    """Index into the ranks that were read, not the global rank."""
    call: NDArray[np.int64]
    """Index into that rank's calls."""
    number: NDArray[np.int64]
    """Of the meeting."""
    key: NDArray[np.int64]
    """Index into `keys`; UNKNOWN: nobody knows with whom."""
    kind: NDArray[np.int64]
    """`Call`."""
    elements: NDArray[np.int64]
    itemsize: NDArray[np.int64]
    end: NDArray[np.int64]
    """By the rank's own clock."""
    transfer: NDArray[np.int64]
    """Nanoseconds of the call that are no waiting."""
    wait: NDArray[np.int64]
    """The rest of the call."""
    guessed: NDArray[np.bool_]
    """The trace does not say with whom it is."""
    keys: tuple[Key, ...] = field(repr=False)
    alone: int = 0
    """Calls without a counterpart, whose transfer is that of others like them."""

    def of_rank(self, index: int) -> slice:
        """The rows of one rank."""
        begin, end = np.searchsorted(self.rank, (index, index + 1))
        return slice(int(begin), int(end))

    def per_call(self, index: int, one: RankSteps, column: NDArray[np.int64]) -> NDArray[np.int64]:
        """A column for each of a rank's calls; 0 for those that are no part of any meeting."""
        rows = self.of_rank(index)
        out = np.zeros(len(one.trace.calls.start), dtype=np.int64)
        out[self.call[rows]] = column[rows]
        return out


def in_steps(meetings: Meetings, ranks: Sequence[RankSteps], steps: Collection[int]) -> Meetings:
    """Only what happened in some steps, by the profiler's numbers."""
    kept = np.zeros(len(meetings.rank), dtype=bool)
    for i, one in enumerate(ranks):
        rows = meetings.of_rank(i)
        step = one.trace.calls.step[meetings.call[rows]]
        wanted = np.append(np.isin(one.trace.steps.number, [*steps]), False)  # the last: outside of all, which is -1
        kept[rows] = wanted[step]
    columns = {
        field.name: getattr(meetings, field.name)[kept]
        for field in dataclasses.fields(meetings)
        if field.name not in ("keys", "alone")
    }
    return dataclasses.replace(meetings, **columns)


def exposed(meetings: Meetings, ranks: Sequence[RankSteps]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each row, ns of waiting and of transfer for which its rank computed nothing."""
    wait, transfer = np.zeros_like(meetings.wait), np.zeros_like(meetings.wait)
    for i, one in enumerate(ranks):
        rows, pieces = meetings.of_rank(i), one.in_calls
        turned = one.turned(meetings.per_call(i, one, meetings.transfer))
        row = np.full(len(one.trace.calls.start), UNKNOWN)
        row[meetings.call[rows]] = np.arange(rows.start, rows.stop)
        row = row[pieces.what]
        known = row >= 0
        np.add.at(wait, row[known], (turned - pieces.start)[known])
        np.add.at(transfer, row[known], (pieces.end - turned)[known])
    return wait, transfer


@dataclass(frozen=True)
class Unseen:
    """Ranks without a trace for whom others wait.

    Attributes:
        ranks: of the group that waits most, those without a trace.
        seconds: per step, for which even the last of those that are there waits for them.
    """

    ranks: tuple[int, ...]
    seconds: float


def waits_for_unseen(
    meetings: Meetings,
    ranks: Sequence[RankSteps],
    waited: NDArray[np.int64],
    num_steps: int,
    useless: Collection[int] = (),
) -> Unseen | None:
    """For whom the ranks that are there wait most; None if nobody is missing, or waited for.

    Args:
        meetings: of the ranks that were read.
        ranks: these.
        waited: ns that each row shows of waiting, as `exposed` has it.
        num_steps: in which the meetings are.
        useless: global ranks that were read, but have nothing to tell.
    """
    there = {one.trace.rank for one in ranks} - {*useless}
    rows = np.isin(meetings.rank, [i for i, one in enumerate(ranks) if one.trace.rank in there])
    least = np.full(int(meetings.number.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, meetings.number[rows], waited[rows])
    numbers, first = np.unique(meetings.number[rows], return_index=True)
    key = meetings.key[rows][first]
    by_key = np.bincount(key + 1, weights=least[numbers], minlength=len(meetings.keys) + 1)[1:]
    worst = Unseen((), 0.0)
    for key, nanoseconds in zip(meetings.keys, by_key.tolist(), strict=True):
        if key[0] == "pp":
            continue  # every stage waits for its neighbours at the ends of a step
        missing = tuple(rank for rank in key[1] if rank not in there)
        if missing and nanoseconds / num_steps / 1e9 > worst.seconds:
            worst = Unseen(missing, nanoseconds / num_steps / 1e9)
    return worst if worst.ranks else None


def _by_key(
    steps: RankSteps, places: Places, guessed: Mapping[int, tuple[int, ...]]
) -> dict[Key | None, NDArray[np.int64]]:
    """One rank's calls by whom they are with, in order; None: nobody knows."""
    trace = steps.trace
    calls = trace.calls
    columns = calls.group, calls.kind, calls.peer, np.where(calls.group < 0, calls.stream, 0)
    first, which = numbered(*columns)
    looks = zip(*(column[first].tolist() for column in columns), strict=True)
    members = [places.complete(group, trace.rank) for group in trace.groups]
    keys = [_key(trace.rank, look, members, places, guessed) for look in looks]
    out: dict[Key | None, NDArray[np.int64]] = {}
    for key in dict.fromkeys(keys):
        if key is None or len(key[1]) > 1:
            out[key] = np.flatnonzero(np.isin(which, [i for i, other in enumerate(keys) if other == key]))
    return out


def _key(
    rank: int,
    look: Sequence[int],
    members: Sequence[tuple[int, ...] | None],
    places: Places,
    guessed: Mapping[int, tuple[int, ...]],
) -> Key | None:
    """With whom calls of one look are: group, kind, peer, and the stream of those whose group is unknown."""
    group, kind, peer, stream = look
    ranks = members[group] if group >= 0 else guessed.get(stream)
    if kind in (Call.SEND, Call.RECV):
        if peer < 0 and ranks is not None and len(ranks) == 2:
            peer = ranks[0] + ranks[1] - rank
        if peer < 0:
            return None
        return "pp", (rank, peer) if kind == Call.SEND else (peer, rank)
    if ranks is None or (kind == Call.MESSAGE and len(ranks) > 2):
        return None  # to or from any of them
    return ("pp" if kind == Call.MESSAGE else places.dimension(ranks)), ranks


def meet(ranks: Sequence[RankSteps], places: Places) -> Meetings:
    """Finds the meetings of some ranks."""
    guessed = _guess_groups(ranks, places)
    known = [_by_key(steps, places, guessed.get(steps.trace.rank, {})) for steps in ranks]
    index = {steps.trace.rank: i for i, steps in enumerate(ranks)}
    keys = sorted({key for one in known for key in one if key is not None})
    parts: list[np.ndarray] = []  # rows of rank, call, meeting, key
    total = 0
    for number, key in enumerate(keys):
        members = [index[rank] for rank in dict.fromkeys(key[1]) if rank in index]
        columns = {i: known[i][key] for i in members if key in known[i]}
        place = _places({i: (ranks[i].trace.calls, chosen) for i, chosen in columns.items()})
        rows = np.stack([np.repeat([*columns], list(map(len, columns.values()))), np.concatenate([*columns.values()])])
        first, meeting = numbered(*place.T)
        parts.append(np.stack([*rows, total + meeting, np.full(len(meeting), number)], axis=1))
        total += len(first)
    for i, one in enumerate(known):
        alone = one.get(None, np.empty(0, dtype=np.int64))
        number = total + np.arange(len(alone))
        parts.append(np.stack([np.full_like(alone, i), alone, number, np.full_like(alone, UNKNOWN)], axis=1))
        total += len(alone)
    table = np.concatenate(parts).astype(np.int64)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    rank, call, number, key = table.T
    columns = _columns(table, [steps.trace.calls for steps in ranks])
    transfer, unmet = _transfers(table, keys, *columns)
    kind, elements, itemsize, start, end = columns
    wait = end - start - transfer
    (group,) = _columns(table, [steps.trace.calls for steps in ranks], ("group",))
    nameless = (group < 0) & ~np.isin(kind, (Call.SEND, Call.RECV))
    return Meetings(
        rank, call, number, key, kind, elements, itemsize, end, transfer, wait, nameless, tuple(keys), unmet
    )


_COLUMNS = ("kind", "elements", "itemsize", "start", "end")


def _columns(table: np.ndarray, calls: Sequence[Calls], names: Sequence[str] = _COLUMNS) -> tuple[np.ndarray, ...]:
    """Of each row, columns of its call."""
    rows = [table[slice(*np.searchsorted(table[:, 0], (i, i + 1))), 1] for i in range(len(calls))]
    return tuple(
        np.concatenate([getattr(one, name)[chosen] for one, chosen in zip(calls, rows, strict=True)]).astype(np.int64)
        for name in names
    )


def _places(columns: Mapping[int, tuple[Calls, NDArray[np.int64]]]) -> NDArray[np.int64]:
    """[calls, 2] of one group, rank after rank: calls with equal rows are one meeting.

    By sequence number where there is one; else by order within a step.
    """
    counted = all(bool(np.all(calls.sequence[chosen] >= 0)) for calls, chosen in columns.values())
    out = []
    for calls, chosen in columns.values():
        first = calls.sequence[chosen] if counted else calls.step[chosen].astype(np.int64)
        out.append(np.stack([first, occurrence(first)], axis=1))
    if not counted:
        _align(out, list(columns.values()))
    return np.concatenate(out)


def _align(places: list[NDArray[np.int64]], columns: Sequence[tuple[Calls, NDArray[np.int64]]]) -> None:
    """Where ranks differ in how many calls a step has, matches what each has in common with the rank with most."""
    for step in np.unique(np.concatenate([place[:, 0] for place in places])).tolist():
        inside = [np.flatnonzero(place[:, 0] == step) for place in places]
        counts = [*map(len, inside)]
        if len({*counts}) == 1:
            continue
        longest = counts.index(max(counts))
        looks = [_looks(calls, chosen[rows]) for (calls, chosen), rows in zip(columns, inside, strict=True)]
        for place, rows, look in zip(places, inside, looks, strict=True):
            if len(rows) == counts[longest]:
                continue
            place[rows, 1] = counts[longest] + np.arange(len(rows))  # met by nobody
            matcher = SequenceMatcher(None, looks[longest], look, autojunk=False)
            for block in matcher.get_matching_blocks():
                place[rows[block.b : block.b + block.size], 1] = block.a + np.arange(block.size)


def _looks(calls: Calls, chosen: NDArray[np.int64]) -> list[tuple[int, int]]:
    """What calls look like to both ends: the two of a message call it differently."""
    kind = np.where(np.isin(calls.kind[chosen], (Call.SEND, Call.RECV)), Call.MESSAGE, calls.kind[chosen])
    return [*zip(kind.tolist(), calls.elements[chosen].tolist(), strict=True)]


def _transfers(
    table: np.ndarray,
    keys: Sequence[Key],
    kind: np.ndarray,
    elements: np.ndarray,
    itemsize: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
) -> tuple[np.ndarray, int]:
    """Of each row the nanoseconds of its call that are no waiting, and how many calls met nobody."""
    took = end - start
    if not len(table):
        return took, 0
    number = table[:, 2]
    shortest = np.full(number.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(shortest, number, took)
    present = np.bincount(number, minlength=len(shortest))
    wanted = np.array([len(dict.fromkeys(key[1])) for key in keys] + [2], dtype=np.int64)[table[:, 3]]
    complete = present[number] == wanted
    transfer = np.minimum(shortest[number], took)
    # Who came last is not known if somebody's trace is missing: then it takes what it takes others at best.
    names = sorted({key[0] for key in keys})
    dimension = np.array([*(names.index(key[0]) for key in keys), UNKNOWN])[table[:, 3]]
    first, family = numbered(dimension, np.where(kind == Call.SEND, Call.RECV, kind), elements, itemsize)
    usual = np.full(len(first), np.iinfo(np.int64).max)
    np.minimum.at(usual, family[complete], transfer[complete])
    anyhow = np.full_like(usual, np.iinfo(np.int64).max)
    np.minimum.at(anyhow, family, took)
    usual = np.where(usual == np.iinfo(np.int64).max, anyhow, usual)
    transfer = np.where(complete, transfer, np.minimum(transfer, usual[family]))
    return transfer, int(np.count_nonzero(~complete))


def _guess_groups(ranks: Sequence[RankSteps], places: Places) -> dict[int, dict[int, tuple[int, ...]]]:
    """Groups that traces do not name, by rank and stream: the ranks whose collectives of one stream end together.

    The members of a group end as often as each other in a step, and at the same moments but for their clocks. Streams
    are numbered alike on all ranks; the threads of gloo, which stand for them, at least come in the same order.
    """
    out: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
    by_rank = {steps.trace.rank: steps for steps in ranks}
    unknown = {rank: _unknown_streams(steps).tolist() for rank, steps in by_rank.items()}
    grid = places.grid
    candidates = (("tp",), ("cp",), ("dp",), ("cp", "dp"), ("tp", "cp", "pp", "dp"), ("pp",))
    for rank, streams in unknown.items():
        for place, stream in enumerate(streams):
            if rank >= grid.size or stream in out[rank]:
                continue
            best: tuple[float, tuple[int, ...]] | None = None
            for dims in [("pp",)] if _is_messages(by_rank[rank].trace.calls, stream) else candidates:
                members = grid.group_of(rank, *dims)
                apart = _apart(by_rank, unknown, members, rank, place)
                if apart is not None and (best is None or apart < 0.5 * best[0]):
                    best = apart, members
            if best is not None:
                for member in best[1]:
                    out[member][unknown[member][place]] = best[1]
    return out


def _is_messages(calls: Calls, stream: int) -> bool:
    """Whether what goes over a stream are messages, which are along pp alone."""
    return bool(np.all(np.isin(calls.kind[calls.stream == stream], MESSAGES)))


def _unknown_streams(steps: RankSteps) -> np.ndarray:
    calls = steps.trace.calls
    return np.unique(calls.stream[(calls.group < 0) & (calls.kind != Call.SEND)])


def _apart(
    by_rank: Mapping[int, RankSteps],
    unknown: Mapping[int, Sequence[int]],
    members: tuple[int, ...],
    rank: int,
    place: int,
) -> float | None:
    """Nanoseconds by which the ends of these ranks' calls differ, clocks aside; None if they do not go together."""
    if len(members) < 2 or any(place >= len(unknown.get(member, ())) for member in members):
        return None
    ends = []
    for member in members:
        calls = by_rank[member].trace.calls
        ends.append(calls.end[(calls.stream == unknown[member][place]) & (calls.group < 0)])
    if not len(ends[0]) or any(len(one) != len(ends[0]) for one in ends):
        return None
    reference = ends[members.index(rank)]
    apart = [float(np.median(np.abs(d - np.median(d)))) for d in (one - reference for one in ends)]
    return max(apart) + 1.0
