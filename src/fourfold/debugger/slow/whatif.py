"""What a step would have taken: its measured durations through the simulator's graph, some of them replaced.

Of each computation is known how long the rank was busy with it, and how late its host came, without any waiting. When
anything began the graph finds out, from who waits for whom; TP's and CP's ranks end each computation together. So the
gain of a change is the difference of two plays of the same graph, and what the graph leaves out is in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fourfold.debugger.reading.trace import MESSAGES, Call
from fourfold.debugger.slow.idle import RankSteps
from fourfold.debugger.slow.meetings import Meetings
from fourfold.debugger.slow.suspects import typical
from fourfold.layout import Action, Grid, Kind, Schedule
from fourfold.layout.actions import COMPUTE
from fourfold.simulator.costs import Lanes, Spent, latest
from fourfold.simulator.engine import play
from fourfold.simulator.graph import Graph, Node, compile_graph
from fourfold.simulator.played import Played

_KINDS = {kind.value: kind for kind in COMPUTE}

Lane = np.ndarray
"""float64 [dp, cp, tp] seconds."""


@dataclass(frozen=True)
class Replay:
    """One step that can be played again.

    Attributes:
        grid: the layout.
        step: its number.
        measured: seconds from the beginning of the step to the end of the last computation.
        graph: of its computations and messages.
        own: seconds of each computation on every replica of its pipeline rank, without waiting.
        before: seconds that its host was late before it came to wait for what it needs.
        after: seconds that its host was late once all was there, and inside of it.
        message: seconds of a message of each pair of pipeline ranks, on every replica.
    """

    grid: Grid
    step: int
    measured: float
    graph: Graph = field(repr=False)
    own: Mapping[Action, Lane] = field(repr=False)
    before: Mapping[Action, Lane] = field(repr=False)
    after: Mapping[Action, Lane] = field(repr=False)
    message: Mapping[tuple[int, int], Lane] = field(repr=False)

    def seconds(self) -> float:
        """From the first computation to the end of the last."""
        return play(self.graph, _Costs(self), keep=False).pipeline_seconds

    def played(self) -> Played:
        """When everything began and ended."""
        return play(self.graph, _Costs(self))

    def at_speed(self, ranks: Mapping[int, float], *, with_pauses: bool = False) -> Replay:
        """Some ranks, by global rank, compute in this share of the time that they took, and pause for as much less."""
        scaled = dataclasses.replace(self, own=self._scaled(self.own, ranks))
        if not with_pauses:
            return scaled
        before, after = self._scaled(self.before, ranks), self._scaled(self.after, ranks)
        return dataclasses.replace(scaled, before=before, after=after)

    def in_time(self, ranks: Sequence[int]) -> Replay:
        """The hosts of some ranks are as late as those of their peers."""
        return dataclasses.replace(self, before=self._usual(self.before, ranks), after=self._usual(self.after, ranks))

    def _usual(self, late: Mapping[Action, Lane], ranks: Sequence[int]) -> dict[Action, Lane]:
        """With the peers' instead of some ranks' own, where that is less."""
        out = {}
        for action, lanes in late.items():
            usual = float(typical(lanes, (0, 1, 2))[0, 0, 0])
            out[action] = lanes.copy()
            for rank in ranks:
                at = self.grid.coordinates(rank)
                if at.pp == self.graph.schedule.rank_of(action.stage):
                    out[action][at.dp, at.cp, at.tp] = min(usual, lanes[at.dp, at.cp, at.tp])
        return out

    def even_documents(self) -> Replay:
        """In each computation, replicas and CP ranks have the mean of what they have to do."""
        even = {
            action: np.broadcast_to(own.mean(axis=(0, 1), keepdims=True), own.shape) for action, own in self.own.items()
        }
        return dataclasses.replace(self, own=even)

    def at_link_speed(self, ends: tuple[int, int], factor: float) -> Replay:
        """Messages between two ranks take this share of their time."""
        one, other = (self.grid.coordinates(rank) for rank in ends)
        message = dict(self.message)
        for pair in ((one.pp, other.pp), (other.pp, one.pp)):
            if pair in message:
                message[pair] = message[pair].copy()
                message[pair][one.dp, one.cp, one.tp] *= factor
        return dataclasses.replace(self, message=message)

    def _scaled(self, lanes: Mapping[Action, Lane], ranks: Mapping[int, float]) -> dict[Action, Lane]:
        factor = np.ones((self.grid.pp, self.grid.dp, self.grid.cp, self.grid.tp))
        for rank, share in ranks.items():
            at = self.grid.coordinates(rank)
            factor[at.pp, at.dp, at.cp, at.tp] = share
        return {action: own * factor[self.graph.schedule.rank_of(action.stage)] for action, own in lanes.items()}


class Computed(NamedTuple):
    """One computation of one rank, in seconds as in `Replay`."""

    action: Action
    own: float
    before: float
    after: float


class _Costs:
    """Costs of a measured step."""

    contention = optimizer = fixed = 0.0
    hidden = 1.0

    def __init__(self, replay: Replay) -> None:
        self.lanes, self._replay = replay.grid, replay

    def layers(self, stage: int) -> int:
        return 1

    def host(self, node: Node) -> Lanes:
        return self._replay.before[node.action]

    def computation(self, node: Node, start: Lanes) -> Spent:
        own = self._replay.own[node.action] + self._replay.after[node.action]
        # Ranks of a TP and CP group meet many times in a computation: they end it with the slowest.
        end = latest(latest(start + own, 2), 1) + np.zeros_like(own)
        return Spent(end, {"compute": own}, 0.0)

    def message(self, node: Node) -> Lanes:
        return self._replay.message[node.pp_rank, node.receiver]

    def collective(self, node: Node) -> Lanes:
        return 0.0


def make_replay(
    grid: Grid,
    step: int,
    measured: float,
    computed: Mapping[int, Sequence[Computed]],
    message: Mapping[tuple[int, int], float],
) -> Replay | None:
    """A step from what each rank computed.

    Args:
        grid: the layout.
        step: its number.
        measured: see `Replay`.
        computed: by global rank, its computations in order.
        message: seconds of a message by (sender, receiver), global ranks.

    Returns:
        None if no replay can be made: computations do not fit together, or a pipeline rank is unknown altogether.
    """
    lists: list[list[Action]] = [[] for _ in range(grid.pp)]
    for rank, rows in computed.items():
        pp_rank = grid.coordinates(rank).pp
        actions = [row.action for row in rows]
        if lists[pp_rank] and lists[pp_rank] != actions:
            return None
        lists[pp_rank] = actions
    stages = 1 + max((action.stage for actions in lists for action in actions), default=-1)
    if not all(lists) or stages % grid.pp or any(a.stage % grid.pp != pp for pp, s in enumerate(lists) for a in s):
        return None
    micro_batches = 1 + max(action.micro_batch for actions in lists for action in actions)
    splits = any(action.kind is Kind.WEIGHT for actions in lists for action in actions)
    schedule = Schedule(
        pp=grid.pp,
        v=stages // grid.pp,
        num_micro_batches=micro_batches,
        kind="zb-h1" if splits else "flexible",
        nc=grid.pp,
        rounds=(micro_batches,),
        warmup=(0,) * grid.pp,
        zero=1,
        actions=tuple(map(tuple, lists)),
    )
    try:
        graph = compile_graph(schedule, in_line=True)  # hosts are late before they wait
    except ValueError:  # some ranks' computations are missing
        return None
    shape = (grid.dp, grid.cp, grid.tp)
    own, before, after = tables = [
        {action: np.full(shape, np.nan) for actions in lists for action in actions} for _ in range(3)
    ]
    for rank, rows in computed.items():
        at = grid.coordinates(rank)
        for action, *seconds in rows:
            for table, value in zip(tables, seconds, strict=True):
                table[action][at.dp, at.cp, at.tp] = value
    for table in tables:
        for action, lanes in table.items():
            table[action] = np.where(np.isnan(lanes), typical(lanes, (0, 1, 2)), lanes)
    pairs = {(node.pp_rank, node.receiver) for node in graph.nodes if node.receiver >= 0}
    usual = float(np.median([*message.values()])) if message else 0.0
    sent = {pair: np.full(shape, usual) for pair in pairs}
    for (source, destination), seconds in message.items():
        at, to = grid.coordinates(source), grid.coordinates(destination)
        if (at.pp, to.pp) in sent:
            sent[at.pp, to.pp][at.dp, at.cp, at.tp] = seconds
    return Replay(grid, step, measured, graph, own, before, after, sent)


def replays_of_traces(
    ranks: Sequence[RankSteps], meetings: Meetings, transfer: np.ndarray, grid: Grid, steps: Sequence[int]
) -> list[Replay]:
    """Those of some steps that can be replayed, from labelled traces.

    Without labels a step can only be replayed if it has no pipeline: then all that a rank computes is one computation.

    Args:
        ranks, meetings: what was read.
        transfer: ns that each row shows of transfer, as `meetings.exposed` has it.
        grid: the layout.
        steps: their numbers.
    """
    common = _common(meetings, transfer)
    turned = [one.turned(meetings.per_call(index, one, common)) for index, one in enumerate(ranks)]
    message = _messages(meetings)
    replays = (_replay(ranks, turned, grid, step, message) for step in steps)
    return [replay for replay in replays if replay is not None]


def _replay(
    ranks: Sequence[RankSteps],
    turned: Sequence[np.ndarray],
    grid: Grid,
    step: int,
    message: Mapping[tuple[int, int], float],
) -> Replay | None:
    computed: dict[int, Sequence[Computed]] = {}
    measured = 0.0
    for one, ends in zip(ranks, turned, strict=True):
        rows, took = _computations(one, ends, step)
        if rows:
            computed[one.trace.rank], measured = rows, max(measured, took)
    if not computed and grid.pp == 1:
        computed = _whole_steps(ranks, turned, step)
        at = [(one, np.flatnonzero(one.trace.steps.number == step)) for one in ranks]
        measured = max((float((one.end - one.start)[where[0]]) / 1e9 for one, where in at if len(where)), default=0.0)
    if not computed or not measured:
        return None
    return make_replay(grid, step, measured, computed, message)


def _whole_steps(ranks: Sequence[RankSteps], turned: Sequence[np.ndarray], step: int) -> dict[int, Sequence[Computed]]:
    """Of each rank that has the step, all that it did, as one computation."""
    out: dict[int, Sequence[Computed]] = {}
    for one, ends in zip(ranks, turned, strict=True):
        where = np.flatnonzero(one.trace.steps.number == step)
        if len(where):
            waits = ends - one.in_calls.start
            waited = int(waits[one.in_calls.step == where[0]].sum())
            late = one.by_host.step == where[0]
            paused = int((one.by_host.end - one.by_host.start)[late].sum())
            own = int(one.end[where[0]] - one.start[where[0]]) - waited - paused
            out[one.trace.rank] = [Computed(Action(Kind.FORWARD, 0, 0), own / 1e9, paused / 1e9, 0.0)]
    return out


def _common(meetings: Meetings, transfer: np.ndarray) -> np.ndarray:
    """Of each row, ns of transfer that keep all members of the meeting from computing.

    Who waits for a slow rank sees transfers that it would else hide: they are part of its waiting. Messages are in the
    graph by themselves.
    """
    least = np.full(int(meetings.number.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, meetings.number, transfer)
    return np.where(np.isin(meetings.kind, MESSAGES), meetings.transfer, least[meetings.number])


def _computations(one: RankSteps, turned: np.ndarray, step: int) -> tuple[list[Computed], float]:
    """A rank's computations in a step, and seconds from its beginning to the end of the last."""
    trace, labels = one.trace, one.trace.labels
    where = np.flatnonzero(trace.steps.number == step)
    if not len(where):
        return [], 0.0
    on_device = bool(np.any(labels.on_device))
    begin, end = int(one.start[where[0]]), int(one.end[where[0]])
    chosen = [
        i
        for i in np.flatnonzero(
            (labels.on_device == on_device) & (labels.start >= begin) & (labels.end <= end)
        ).tolist()
        if labels.kind[i] in _KINDS and labels.micro_batch[i] >= 0
    ]
    if not chosen:
        return [], 0.0
    starts, ends = labels.start[chosen], labels.end[chosen]
    pieces = one.in_calls
    # A wait lies inside of one computation or outside of all.
    waits = _inside(starts, ends, pieces.start, turned)
    free = np.concatenate(([begin], ends[:-1]))
    there = _received(free, starts, one)
    late = one.by_host
    before = _inside(free, there, late.start, late.end)
    after = _inside(there, starts, late.start, late.end)
    within = _inside(starts, ends, late.start, late.end)
    own = np.maximum(ends - starts - waits - within, 0)
    columns = ((column / 1e9).tolist() for column in (own, before, after + within))
    actions = [Action(_KINDS[labels.kind[i]], int(labels.stage[i]), int(labels.micro_batch[i])) for i in chosen]
    return [Computed(*row) for row in zip(actions, *columns, strict=True)], float(ends[-1] - begin) / 1e9


def _received(free: np.ndarray, starts: np.ndarray, one: RankSteps) -> np.ndarray:
    """When the last message came in each pause between two computations; its end if none did."""
    pieces = one.in_calls
    messages = np.isin(one.trace.calls.kind[pieces.what], MESSAGES)
    ended = pieces.end[messages]
    at = np.searchsorted(free, ended, side="right") - 1
    fits = (at >= 0) & (ended <= starts[at])
    out = np.full(len(starts), -1)
    np.maximum.at(out, at[fits], ended[fits])
    return np.where(out < 0, starts, out)


def _inside(starts: np.ndarray, ends: np.ndarray, begun: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Of each range (ascending, apart), the ns that pieces cover."""
    out = np.zeros(len(starts), dtype=np.int64)
    place = np.searchsorted(starts, begun, side="right") - 1
    for shift in (0, 1):  # a piece may begin right before its range
        at = place + shift
        fits = (at >= 0) & (at < len(starts))
        at, first, last = at[fits], begun[fits], ended[fits]
        covered = np.minimum(last, ends[at]) - np.maximum(first, starts[at])
        np.add.at(out, at, np.maximum(covered, 0))
    return out


def _messages(meetings: Meetings) -> dict[tuple[int, int], float]:
    """Median seconds of a message of each channel."""
    out: dict[tuple[int, int], float] = {}
    chosen = np.flatnonzero(np.isin(meetings.kind, (Call.SEND, Call.RECV)) & (meetings.key >= 0))
    order = chosen[np.argsort(meetings.key[chosen], kind="stable")]
    cuts = np.flatnonzero(np.diff(meetings.key[order])) + 1
    for rows in np.split(order, cuts) if len(order) else ():
        source, destination = meetings.keys[meetings.key[rows[0]]][1]
        out[source, destination] = float(np.median(meetings.transfer[rows])) / 1e9
    return out
