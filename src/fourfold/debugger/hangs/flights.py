"""A hang from dumps of PyTorch's flight recorder, one of each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fourfold.debugger.hangs.members import Communicator, Name, communicators, num_ranks, too_small
from fourfold.debugger.hangs.recordings import KEPT, Call, Dump, rank_in_name, read_dump
from fourfold.debugger.hangs.reports import Entry, Line, RankReport, Wait, Way
from fourfold.debugger.hangs.waits import Hang, follow
from fourfold.layout import Grid, join_ranks

NO_DUMP = "no dump: dead or frozen, or its file is missing"
_MEETINGS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}  # which end when all have come
_Line = tuple[str, tuple[int, int], Way]
_Groups = Mapping[tuple[int, Name], Communicator]


def from_dumps(files: Iterable[Path], grid: Grid | None) -> Hang:
    """Reads the dumps of a job and follows its waits. What is damaged is named, and worked around.

    Raises:
        ValueError: two files are of one rank, none can be read, or the layout is another one's.
    """
    dumps, damaged = _read(files)
    if not dumps:
        raise ValueError(f"no dump can be read; {'; '.join(damaged.values()) or 'there are no files'}")
    if not any(dump.calls for dump in dumps.values()):
        raise ValueError("the dumps hold no calls: the flight recorder was off, or was told to leave collectives out")
    size = num_ranks(dumps, grid)
    groups = communicators(dumps, size, grid)
    size = max(size, *(group.ranks[-1] + 1 for group in groups.values()), 1)
    missing = sorted({*range(size)} - {*dumps})
    notes = [*damaged.values(), *(note for dump in dumps.values() for note in dump.notes)]
    if missing:
        notes.append(f"of {size} ranks there is no readable dump of rank {join_ranks(missing)}")
    if any(call.back_end == "gloo" for dump in dumps.values() for call in dump.calls):
        notes.append("gloo records no messages: a rank that waits for one looks as if it computed after its last call")
    notes += [*too_small(dumps, groups), *_uneven_messages(dumps, groups)]
    reports = _reports(dumps, groups)
    if not missing and not any(report.waits for report in reports.values()):
        return Hang((), (), {rank: report.where for rank, report in reports.items()}, NO_DUMP, tuple(notes))
    notes.append("seconds count back from the last call that any rank made")
    ranks_of = {(group.title, group.ends): group.ranks for group in groups.values()}
    return follow(
        reports,
        range(size),
        lambda wait: ranks_of[wait.dimension, wait.ranks],
        grid=grid,
        silent=NO_DUMP,
        notes=tuple(notes),
    )


def _read(files: Iterable[Path]) -> tuple[dict[int, Dump], dict[int, str]]:
    """The dumps by rank, and what is wrong with those that cannot be read."""
    paths: dict[int, Path] = {}
    for path in sorted(files):
        rank = rank_in_name(path)
        if rank is None:
            raise ValueError(f"{path}: no rank in its name; dumps are named like nccl_trace_rank_12")
        if rank in paths:
            raise ValueError(f"{paths[rank]} and {path} are both of rank {rank}; leave one of them")
        paths[rank] = path
    dumps, damaged = {}, {}
    for rank, path in paths.items():
        try:
            dumps[rank] = read_dump(path, rank)
        except (ValueError, OSError) as error:
            damaged[rank] = str(error)
    return dumps, damaged


def _reports(dumps: Mapping[int, Dump], groups: _Groups) -> dict[int, RankReport]:
    """What each rank says of itself."""
    last = max((call.created for dump in dumps.values() for call in dump.calls), default=0)
    keys = {rank: _keys(dump, groups) for rank, dump in dumps.items()}
    begun = {rank: _begun(dump.calls) for rank, dump in dumps.items()}
    started: dict[tuple[int, _Line], int] = defaultdict(int)
    for rank, of in keys.items():
        for i, (line, number) in of.items():
            if i in begun[rank]:
                started[rank, line] = max(started[rank, line], number + 1)

    def missed(rank: int, i: int) -> bool:
        """Whether a member of a collective has not come to it."""
        line, number = keys[rank][i]
        members = groups[rank, dumps[rank].calls[i].group].ranks
        return not line[2] and any(started.get((other, line), 0) <= number for other in members)

    return {rank: _report(dump, keys[rank], begun[rank], missed, groups, last) for rank, dump in dumps.items()}


def _report(
    dump: Dump,
    keys: Mapping[int, tuple[_Line, int]],
    begun: set[int],
    missed: Callable[[int, int], bool],
    groups: _Groups,
    last: int,
) -> RankReport:
    """What one rank says of itself, ``last`` being when the last call of all was made."""
    waited = _waited(dump, [i for i in keys if i in begun], missed)
    lines: dict[_Line, list[Entry]] = defaultdict(list)
    waits = []
    for i, (line, number) in sorted(keys.items()):
        if i in begun:
            call = dump.calls[i]
            ended = call.ended and i not in waited
            kind = line[2] or call.kind
            seconds = (last - call.created) / 1e9
            lines[line].append(Entry(kind, number, -1, -1, call.tensor, seconds, ended))
            if i in waited:
                waits.append(Wait(kind, number, -1, -1, call.tensor, seconds, False, *line))
    latest = waited[0] if waited else max(begun, default=None)
    call = None if latest is None else dump.calls[latest]
    return RankReport(
        rank=dump.rank,
        host="",
        pid=0,
        doing="",
        seconds=(last - call.created) / 1e9 if call else 0.0,
        where=_where(call, groups.get((dump.rank, call.group)) if call else None, waiting=bool(waits)),
        waits=tuple(waits),
        lines=tuple(
            Line(*line, max(entry.number for entry in entries) + 1, tuple(entries[-KEPT:]))
            for line, entries in lines.items()
        ),
        stacks={"at its last call": call.stack} if call and call.stack else {},
    )


def _where(call: Call | None, group: Communicator | None, *, waiting: bool) -> str:
    """Where a rank stands by its last call."""
    if call is None or group is None:
        return "has called nothing"
    at = call.where or "an unknown place"
    if waiting:
        return at
    name = f"{call.kind} {call.tensor}".rstrip()
    how = "ended" if call.ended else "which all have begun"
    return f"its last call, {how}, was {name} of {group.title} {join_ranks(group.ranks)} at {at}"


def _begun(calls: Sequence[Call]) -> set[int]:
    """Those that the device has come to.

    NCCL marks what has begun only if timing is on. Else the first call that has not ended is what the device stands at,
    with the messages that were posted together with it: what was enqueued later comes later.
    """
    front = next((call for call in calls if not call.ended), None)
    posted = (front.group, front.batch) if front and front.ends and front.batch else None
    return {
        i
        for i, call in enumerate(calls)
        if call.ended
        or call.begun
        or call is front
        or (call.begun is None and call.ends and (call.group, call.batch) == posted)
    }


def _keys(dump: Dump, groups: _Groups) -> dict[int, tuple[_Line, int]]:
    """Of each call, its line and its number there."""
    keys: dict[int, tuple[_Line, int]] = {}
    messages: dict[_Line, list[int]] = defaultdict(list)
    for i, call in enumerate(dump.calls):
        group = groups[dump.rank, call.group]
        if call.ends is None:
            if call.kind != "coalesced" or call.number:
                keys[i] = (group.title, group.ends, ""), call.number
        elif max(call.ends) < len(group.ranks):
            source, destination = (group.ranks[end] for end in call.ends)
            messages[group.title, (source, destination), "send" if source == dump.rank else "receive"].append(i)
    for line, indices in messages.items():
        # Both ends count alike from the first message, or where that is forgotten, from the last that has ended.
        first = sum(dump.calls[i].ended for i in indices) if dump.cut else 0
        keys |= {i: (line, number - first) for number, i in enumerate(indices)}
    return keys


def _waited(dump: Dump, begun: Sequence[int], missed: Callable[[int, int], bool]) -> list[int]:
    """Of the calls that have begun, those that the rank waits for.

    gloo's calls begin at once, and some are not waited for until later: the last that somebody misses is what the rank
    stands in, for with that open it could not have made another. One that has failed, because another rank has died or
    has been ended, looks as if it had ended: but nothing ends that somebody misses. A device stands at its first.
    """
    calls = dump.calls
    if not begun:
        return []
    open_calls = [i for i in begun if not calls[i].ended]
    latest = max(begun)
    if calls[latest].back_end == "gloo":
        if calls[latest].kind in _MEETINGS and missed(dump.rank, latest):
            return [latest]
        return next(([i] for i in sorted(open_calls, reverse=True) if missed(dump.rank, i)), open_calls[-1:])
    first = min(open_calls, default=None)
    if first is None:
        return []
    posted = (calls[first].group, calls[first].batch) if calls[first].ends and calls[first].batch else None
    return [i for i in open_calls if i == first or (calls[i].ends and (calls[i].group, calls[i].batch) == posted)]


def _uneven_messages(dumps: Mapping[int, Dump], groups: _Groups) -> list[str]:
    """gloo records no messages, but counts them: members of a group that come to a collective with other counts."""
    before: dict[tuple[str, tuple[int, ...], int], dict[int, int]] = defaultdict(dict)
    for rank, dump in dumps.items():
        for call in dump.calls:
            if call.back_end == "gloo" and call.ends is None and call.others >= 0:
                group = groups[rank, call.group]
                before[group.title, group.ranks, call.number][rank] = call.others - (call.number - 1)
    notes = []
    for (title, ranks, number), counts in before.items():
        if len(ranks) > 2 and len({*counts.values()}) > 1:
            said = ", ".join(f"rank {rank} {counts[rank]}" for rank in sorted(counts)[:KEPT])
            notes.append(
                f"before collective {number} of {title} {join_ranks(ranks)} its ranks had made unlike numbers of calls "
                f"that gloo does not record, such as messages: {said}"
            )
    return notes[:KEPT]
