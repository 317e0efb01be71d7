"""Who waits for whom, from rank to rank, until one is reached that is late by its own doing.

Whoever comes last to a collective, or sends a message, is who the others there wait for. Since the two last met, that
rank has either done more than the one that waits (it computed longer, its host was late), or it has waited longer
itself, for another. So each wait is divided between what the late rank did and the waits that made it late, and those
are followed in the same way. This is how wait states spread (Boehme et al., Identifying the root causes of wait states
in large-scale parallel applications, ICPP 2010). Clocks must be aligned; nothing is counted twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.reading.trace import UNKNOWN, Call, Times
from fourfold.debugger.slow.accounts import HOST
from fourfold.debugger.slow.clocks import Clocks
from fourfold.debugger.slow.idle import RankSteps
from fourfold.debugger.slow.meetings import Meetings

COMPUTING, MOVING, UNSEEN, BRIEF = "computing", "moving", "unseen", "brief"
"""Why a rank is late by its own doing, besides `accounts.HOST`: it computes; data move, though all are there; it
has no trace; the wait is too short to be followed."""

OWN = (COMPUTING, MOVING, *HOST)

_WAIT, _MOVE, _FIRST_PAUSE = 0, 1, 2  # states of a stretch; pauses of the host follow in the order of HOST
_MOST_WAITS = 60_000  # of all ranks together that are followed: of more, the longest
_KEPT = 0.99  # of a wait: smaller ways, which together are the rest, are left out of it


class Hop(NamedTuple):
    """One rank waits for another. Global ranks; UNKNOWN if nobody's trace tells who came last."""

    waiting: int
    awaited: int
    dimension: str


class Way(NamedTuple):
    """From a rank that waits, from hop to hop, to one that is late by its own doing."""

    hops: tuple[Hop, ...]
    doing: str


@dataclass(frozen=True)
class Wait:
    """What one rank waited for another in a step, and why.

    Attributes:
        hop: who waits for whom.
        seconds: in all. They are those of `doing` and of `behind` together.
        kinds: the communication in which it waits, that with most seconds first.
        doing: seconds for which the other is late by its own doing.
        behind: seconds for which it is late because it waited itself, the longest first.
    """

    hop: Hop
    seconds: float
    kinds: tuple[Call, ...]
    doing: Mapping[str, float]
    behind: tuple[Wait, ...] = field(repr=False, default=())

    def ends(self) -> dict[tuple[int, str], float]:
        """Seconds by the rank that this ends at, and why that is late."""
        out = {(self.hop.awaited, doing): seconds for doing, seconds in self.doing.items()}
        for wait in self.behind:
            for end, seconds in wait.ends().items():
                out[end] = out.get(end, 0.0) + seconds
        return out

    def because_of(self, ends: Collection[tuple[int, str]]) -> float:
        """Seconds that end at one of these ranks, late for this reason."""
        return sum(seconds for end, seconds in self.ends().items() if end in ends)

    def path(self, ends: Collection[tuple[int, str]] = ()) -> tuple[Wait, ...]:
        """The way on which most seconds go, from here on: to one of some ends, if any go there."""
        out: list[Wait] = [self]
        while out[-1].behind:
            at = out[-1]
            if at.because_of(ends) > 0:
                best = max(at.behind, key=lambda wait: wait.because_of(ends))
                here = sum(seconds for doing, seconds in at.doing.items() if (at.hop.awaited, doing) in ends)
                on = best.because_of(ends)
            else:
                best = at.behind[0]
                here, on = sum(at.doing.values()), best.seconds
            if here >= on:
                break
            out.append(best)
        return tuple(out)


class Stretches(NamedTuple):
    """All that a rank does besides computing in a step, by start. Aligned nanoseconds; no two overlap."""

    start: Times
    end: Times
    state: NDArray[np.int64]
    call: NDArray[np.int64]
    """Index into the rank's calls; of a pause of the host UNKNOWN."""
    awaited: NDArray[np.int64]
    """Global rank; UNKNOWN."""

    @property
    def waits(self) -> NDArray[np.bool_]:
        """Which are waits for another rank."""
        return self.state == _WAIT

    @property
    def moves(self) -> NDArray[np.bool_]:
        """Which are transfers; what is neither is a pause of the host."""
        return self.state == _MOVE

    def pause(self, i: int) -> str:
        """Of a pause of the host its name, as in HOST."""
        return HOST[int(self.state[i]) - _FIRST_PAUSE]


Ways = Mapping[Way, float]
"""Shares of a wait; they sum to 1."""


class Chains:
    """The waits of all ranks that were read, in one step."""

    def __init__(self, ranks: Sequence[RankSteps], meetings: Meetings, clocks: Clocks, step: int) -> None:
        self._lanes: dict[int, _Lane] = {}
        last = _last_to_come(ranks, meetings)
        for index, one in enumerate(ranks):
            where = np.flatnonzero(one.trace.steps.number == step)
            if len(where):
                lane = _Lane(one, int(where[0]), meetings, index, last, int(clocks.offset[index]))
                self._lanes[one.trace.rank] = lane
        self._ways: dict[tuple[int, int], Ways] = {}
        self._met: dict[tuple[int, int], list[int]] = {}
        self._follow()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that have the step."""
        return tuple(self._lanes)

    def stretches(self, rank: int) -> Stretches:
        """What a rank does besides computing."""
        return self._lanes[rank].stretches

    def dimension(self, rank: int, call: int) -> str:
        """Which dimension a call is of: tp, cp, pp, dp, fsdp, world or other."""
        return self._lanes[rank].dimension[call]

    def awaited(self, rank: int, call: int) -> int:
        """Who came last to a call, or sent the message; UNKNOWN: nobody knows, or the rank itself."""
        return int(self._lanes[rank].awaited[call])

    def transfer(self, rank: int, call: int) -> int:
        """Nanoseconds that a call takes once all are there."""
        return int(self._lanes[rank].moved[call])

    def window(self, rank: int) -> tuple[int, int]:
        """When the step begins and ends on a rank, in aligned nanoseconds."""
        return self._lanes[rank].begin, self._lanes[rank].end

    def waiting(self, rank: int) -> float:
        """Seconds for which a rank waits for others."""
        what = self.stretches(rank)
        return float((what.end - what.start)[what.waits].sum()) / 1e9

    def way(self, rank: int, i: int) -> Way:
        """Of the wait at a place of `stretches`: the way that most of it goes."""
        ways = self._ways.get((rank, i))
        return Way((self._lanes[rank].hop(i),), BRIEF) if ways is None else max(ways, key=lambda way: ways[way])

    def of_rank(self, rank: int) -> tuple[Wait, ...]:
        """Whom a rank waits for in the step, and what is behind that; the longest first."""
        root = _Node()
        what = self.stretches(rank)
        for i in np.flatnonzero(what.waits).tolist():
            ns = int(what.end[i] - what.start[i])
            for way, share in self._ways.get((rank, i), {self.way(rank, i): 1.0}).items():
                root.add(way, ns * share / 1e9)
        return root.waits(self._kinds)

    def _kinds(self, hop: Hop) -> tuple[Call, ...]:
        return tuple(kind for kind, _ in self._lanes[hop.waiting].kinds.get(hop, Counter()).most_common())

    def _follow(self) -> None:
        """Finds the ways of all waits, those that end first before those that they may be behind of."""
        waits = [
            (int(lane.stretches.end[i]), rank, i, int(lane.stretches.end[i] - lane.stretches.start[i]))
            for rank, lane in self._lanes.items()
            for i in np.flatnonzero(lane.stretches.waits).tolist()
        ]
        if len(waits) > _MOST_WAITS:
            waits = sorted(waits, key=lambda wait: -wait[3])[:_MOST_WAITS]
        for _, rank, i, _ in sorted(waits):
            self._ways[rank, i] = _largest(self._divided(rank, i))

    def _divided(self, rank: int, i: int) -> dict[Way, float]:
        """How a wait is divided, in shares of any sum."""
        waiting, hop = self._lanes[rank], self._lanes[rank].hop(i)
        late = self._lanes.get(hop.awaited)
        if late is None:
            return {Way((hop,), UNSEEN): 1.0}
        come, over = int(waiting.stretches.start[i]), int(waiting.stretches.end[i])
        since = min(max(self._last_met(rank, hop.awaited, come), waiting.begin, late.begin), come)
        theirs, ours = late.spent(since, over), waiting.spent(since, come)
        more = np.maximum(theirs - ours, 0)
        if not more.any():
            more = late.spent(come, over)
        out = {Way((hop,), doing): float(ns) for doing, ns in zip(OWN, more[1:].tolist(), strict=True) if ns > 0}
        waited = theirs[0]
        if more[0] > 0 and waited > 0:
            for j, ns in late.waits_in(since, over):
                for way, share in self._ways.get((hop.awaited, j), {}).items():
                    longer = _without_circle(hop, way)
                    out[longer] = out.get(longer, 0.0) + share * float(more[0]) * ns / float(waited)
        return out or {Way((hop,), MOVING): 1.0}

    def _last_met(self, rank: int, other: int, before: int) -> int:
        """The end of the last call that two ranks had in common before a moment; both begin anew there."""
        if (rank, other) not in self._met:
            one, two = self._lanes[rank], self._lanes[other]
            _, mine, _ = np.intersect1d(one.number, two.number, return_indices=True)
            self._met[rank, other] = np.sort(one.ends[mine]).tolist()
        ends = self._met[rank, other]
        i = bisect_right(ends, before) - 1
        return ends[i] if i >= 0 else before - (1 << 62)


def _without_circle(hop: Hop, way: Way) -> Way:
    """A hop before a way. If the way comes by the same hop again, it begins there: what is between says nothing."""
    if hop in way.hops:
        return Way(way.hops[way.hops.index(hop) :], way.doing)
    return Way((hop, *way.hops), way.doing)


def _largest(ways: dict[Way, float]) -> Ways:
    """The largest, as shares of their sum."""
    whole, kept = sum(ways.values()), 0.0
    out = {}
    for way, share in sorted(ways.items(), key=lambda item: -item[1]):
        out[way] = share
        kept += share
        if kept >= _KEPT * whole:
            break
    return {way: share / kept for way, share in out.items()}


@dataclass
class _Node:
    """Waits in the making: seconds."""

    seconds: float = 0.0
    doing: dict[str, float] = field(default_factory=dict)
    behind: dict[Hop, _Node] = field(default_factory=dict)

    def add(self, way: Way, seconds: float) -> None:
        node = self
        for hop in way.hops:
            node = node.behind.setdefault(hop, _Node())
            node.seconds += seconds
        node.doing[way.doing] = node.doing.get(way.doing, 0.0) + seconds

    def waits(self, kinds: Callable[[Hop], tuple[Call, ...]]) -> tuple[Wait, ...]:
        found = (
            Wait(
                hop,
                node.seconds,
                kinds(hop),
                dict(sorted(node.doing.items(), key=lambda item: -item[1])),
                node.waits(kinds),
            )
            for hop, node in self.behind.items()
        )
        return tuple(sorted(found, key=lambda wait: -wait.seconds))


class _Lane:
    """One rank in the step."""

    def __init__(
        self,
        one: RankSteps,
        step: int,
        meetings: Meetings,
        index: int,
        last: NDArray[np.int64],
        offset: int,
    ) -> None:
        calls, rows = one.trace.calls, meetings.of_rank(index)
        self.rank = one.trace.rank
        self.begin, self.end = int(one.start[step]) + offset, int(one.end[step]) + offset
        self.moved = meetings.per_call(index, one, meetings.transfer)
        # UNKNOWN, which is -1, for calls that are no part of any meeting.
        self.awaited = meetings.per_call(index, one, last + 1) - 1
        key = meetings.per_call(index, one, meetings.key + 1) - 1
        names = [*(name for name, _ in meetings.keys), "other"]
        self.dimension = [names[k] for k in key.tolist()]
        self.number, self.ends = meetings.number[rows], meetings.end[rows] + offset
        self.stretches = _stretches(one, step, self.moved, self.awaited, offset)
        self._starts, self._ends = self.stretches.start.tolist(), self.stretches.end.tolist()
        self._waits = np.flatnonzero(self.stretches.waits).tolist()
        self._wait_ends = self.stretches.end[self._waits].tolist()
        states = self.stretches.state
        took = np.zeros((len(states) + 1, _FIRST_PAUSE + len(HOST)), dtype=np.int64)
        took[np.arange(1, len(states) + 1), states] = self.stretches.end - self.stretches.start
        self._took = np.cumsum(took, axis=0)
        self.kinds: dict[Hop, Counter[Call]] = {}
        for i in self._waits:
            kind = Call(int(calls.kind[self.stretches.call[i]]))
            self.kinds.setdefault(self.hop(i), Counter())[kind] += self._ends[i] - self._starts[i]

    def hop(self, i: int) -> Hop:
        return Hop(self.rank, int(self.stretches.awaited[i]), self.dimension[int(self.stretches.call[i])])

    def spent(self, begin: int, end: int) -> NDArray[np.int64]:
        """Nanoseconds between two moments: waiting, then as `OWN`."""
        states = self._until(end) - self._until(begin)
        computing = max(end - begin - int(states.sum()), 0)
        return np.concatenate(([states[_WAIT], computing], states[_MOVE:]))

    def _until(self, moment: int) -> NDArray[np.int64]:
        """Nanoseconds of each state before a moment."""
        i = bisect_right(self._starts, moment) - 1
        if i < 0:
            return self._took[0]
        left = max(self._ends[i] - moment, 0)
        states = self._took[i + 1].copy()
        states[self.stretches.state[i]] -= left
        return states

    def waits_in(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Waits between two moments, and how many nanoseconds of each."""
        out = []
        for place in range(bisect_right(self._wait_ends, begin), len(self._waits)):
            i = self._waits[place]
            if self._starts[i] >= end:
                break
            out.append((i, min(self._ends[i], end) - max(self._starts[i], begin)))
        return out


def _last_to_come(ranks: Sequence[RankSteps], meetings: Meetings) -> NDArray[np.int64]:
    """Of each row, the global rank that is awaited there; UNKNOWN if nobody knows.

    All end together, so the last to come is there for the shortest time: no clock is needed. If members of the group
    have no trace, the last of the others may wait for one of them.
    """
    rows = len(meetings.rank)
    if not rows:
        return np.empty(0, dtype=np.int64)
    took = np.empty(rows, dtype=np.int64)
    for i, one in enumerate(ranks):
        mine = meetings.of_rank(i)
        took[mine] = meetings.end[mine] - one.trace.calls.start[meetings.call[mine]]
    ranked = np.array([one.trace.rank for one in ranks], dtype=np.int64)[meetings.rank]
    order = np.lexsort((took, meetings.number))
    first = np.ones(rows, dtype=bool)
    first[1:] = np.diff(meetings.number[order]) != 0
    last = np.full(int(meetings.number.max()) + 1, UNKNOWN, dtype=np.int64)
    last[meetings.number[order[first]]] = ranked[order[first]]
    awaited = last[meetings.number]
    awaited[awaited == ranked] = UNKNOWN  # who came last and still waits, waits for somebody without a trace
    source = np.array([*(key[1][0] for key in meetings.keys), UNKNOWN], dtype=np.int64)[meetings.key]
    return np.where(meetings.key < 0, UNKNOWN, np.where(meetings.kind == Call.RECV, source, awaited))


def _stretches(
    one: RankSteps, step: int, moved: NDArray[np.int64], awaited: NDArray[np.int64], offset: int
) -> Stretches:
    """Pieces of a step's pauses in order, each call's divided into waiting and the transfer, which comes last."""
    mine, host = one.in_calls.step == step, one.by_host.step == step
    call = one.in_calls.what[mine].astype(np.int64)
    start, end = one.in_calls.start[mine], one.in_calls.end[mine]
    turned = one.turned(moved)[mine]
    pause = one.by_host.what[host].astype(np.int64)
    pause = pause + _FIRST_PAUSE
    none = np.full(len(pause), UNKNOWN, dtype=np.int64)
    starts = np.concatenate((start, turned, one.by_host.start[host]))
    ends = np.concatenate((turned, end, one.by_host.end[host]))
    state = np.concatenate((np.full(len(call), _WAIT), np.full(len(call), _MOVE), pause))
    calls = np.concatenate((call, call, none))
    whom = np.concatenate((awaited[call], awaited[call], none))
    order = np.argsort(starts, kind="stable")
    order = order[ends[order] > starts[order]]
    return Stretches(starts[order] + offset, ends[order] + offset, state[order], calls[order], whom[order])
