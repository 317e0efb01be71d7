"""Real steps played again: the action logs of a run, with their measured durations, through the simulator's graph.

What a rank did by itself is taken from its log: how long each computation took, without the wait for its message, and
how long everything between two computations. When anything began is not: that the graph must find out, from who waits
for whom. So the replayed time of a step is a prediction that the measured one can be held against, and what the step
would have taken with other durations is one more replay.

The ranks of a TP or CP group wait for each other inside their computations. Those waits stay as measured here. How long
they were, and what a rank did besides its actions, newer logs tell, and `RankLog` hands it on.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fourfold.layout import Action, Doing, Grid, Kind, Schedule
from fourfold.layout.actions import COMPUTE, SENDS
from fourfold.simulator.costs import Lanes, Spent
from fourfold.simulator.engine import play
from fourfold.simulator.graph import Graph, Node, compile_graph
from fourfold.simulator.played import Played

Nanoseconds = NDArray[np.int64]

_FILE = re.compile(r"rank-(\d+)\.jsonl")
_DOINGS = frozenset(Doing)
_NODES = COMPUTE | {Kind.GATHER, Kind.REDUCE}
UNKNOWN = -1
WAITED = 200_000  # ns: a receive that has waited for less may have found its message there


class _Line(msgspec.Struct, frozen=True, gc=False):
    """One line of a log, as docs/formats.md has it."""

    step: int
    action: str
    start: int
    end: int
    wait: int
    tp: int = 0
    cp: int = 0
    fsdp: int = 0
    cpu: int = UNKNOWN


class Extra(NamedTuple):
    """Something that is no action. Nanoseconds of the host's monotonic clock, and of waiting for other ranks."""

    doing: Doing
    start: int
    end: int
    wait: int
    cpu: int
    """Of the main thread; UNKNOWN."""


@dataclass(frozen=True)
class RankLog:
    """What one rank did in one step, in order. Nanoseconds of its host's monotonic clock."""

    actions: tuple[Action, ...]
    start: Nanoseconds = field(repr=False)
    end: Nanoseconds = field(repr=False)
    wait: Nanoseconds = field(repr=False)
    """The part of start to end spent waiting for a message."""
    tied: Nanoseconds = field(repr=False)
    """The part spent in collectives of TP and CP groups; 0 in logs of before they said so."""
    fsdp: Nanoseconds = field(repr=False)
    """The same of FSDP's."""
    cpu: Nanoseconds = field(repr=False)
    """Processor time of the main thread; UNKNOWN in logs of before they said so."""
    extra: tuple[Extra, ...] = field(default=(), repr=False)
    """What else the rank did, by start."""

    @cached_property
    def own(self) -> Nanoseconds:
        """Of each action, without waiting for a message."""
        return self.end - self.start - self.wait

    @cached_property
    def gap(self) -> Nanoseconds:
        """From the end of the action before to the start of each; 0 for the first."""
        return np.concatenate(([0], self.start[1:] - self.end[:-1]))

    def with_durations(self, own: Nanoseconds, gap: Nanoseconds) -> RankLog:
        """The same actions, each taking as long as given, and as far from the one before."""
        took = own + self.wait
        end = self.start[0] + np.cumsum(took + gap)
        return dataclasses.replace(self, start=end - took, end=end)


@dataclass(frozen=True)
class Logs:
    """One step of a run, on all ranks."""

    step: int
    ranks: tuple[RankLog, ...] = field(repr=False)
    """By global rank."""
    steps: tuple[int, ...] = ()
    """All steps that every rank has logged."""
    notes: tuple[str, ...] = ()
    """What is wrong with the files without making this step useless, a sentence each."""
    message: float | None = None
    """Seconds that a message is on its way, if that is known otherwise than from these times."""

    @cached_property
    def step_seconds(self) -> float:
        """From the start of the first action to the end of the last, over all ranks. They must have one clock."""
        return float(max(log.end[-1] for log in self.ranks) - min(log.start[0] for log in self.ranks)) / 1e9

    def waits(self) -> NDArray[np.float64]:
        """Of each rank, seconds spent waiting for messages."""
        return np.array([log.wait.sum() for log in self.ranks]) / 1e9


class ActionLogs:
    """The action logs of a run, read once.

    Attributes:
        steps: all that every rank has whole.
        notes: what is wrong with the files without making them useless, a sentence each.
    """

    def __init__(self, folder: Path, *, num_ranks: int | None = None) -> None:
        """Reads them.

        Args:
            folder: of the run, or its subfolder `actions`.
            num_ranks: of the layout; None: as many as there are files. A run that went on with fewer ranks has more
                files.

        Raises:
            ValueError: there are no logs, a rank's is missing, or a line is no entry.
        """
        self._files = files = _files(folder)
        self._num_ranks = num_ranks = num_ranks or max(files) + 1
        missing = sorted({*range(num_ranks)} - {*files})
        if missing:
            raise ValueError(f"{folder}: of {num_ranks} ranks, the log of rank {_named(missing)} is missing")
        self._found: dict[int, dict[int, list[_Line]]] = {}  # step, rank
        torn: dict[int, int] = {}  # rank, step
        for rank, path in files.items():
            lines, is_torn = _lines(path)
            for line in lines:
                self._found.setdefault(line.step, {}).setdefault(rank, []).append(line)
            if is_torn:
                torn[rank] = lines[-1].step if lines else 0
        self.notes = tuple(f"the last line of {files[rank].name} is torn: its step {step} counts as not whole"
                           for rank, step in torn.items())  # fmt: skip
        self._whole = {number: {*by_rank} - {rank for rank, at in torn.items() if at == number}
                       for number, by_rank in sorted(self._found.items())}  # fmt: skip
        self.steps = tuple(number for number, ranks in self._whole.items() if ranks == {*range(num_ranks)})

    def step(self, number: int | None = None) -> Logs:
        """One step; None: the last that all ranks have.

        ValueError: it is not whole on all ranks, or other ranks than these have it.
        """
        if number is None:
            number = self.steps[-1] if self.steps else max(self._whole, default=0)
        if number not in self.steps:
            raise ValueError(self._lacks(number))
        ranks = tuple(_rank_log(self._files[rank], self._found[number][rank]) for rank in range(self._num_ranks))
        return Logs(number, ranks, self.steps, self.notes)

    def _lacks(self, step: int) -> str:
        """Why a step cannot be had."""
        there = f"whole steps: {_named(self.steps)}" if self.steps else "there is no whole step"
        if step not in self._whole:
            return f"step {step} is not in the action logs; {there}"
        everyone = {*range(self._num_ranks)}
        others = sorted(self._whole[step] - everyone)
        if others:
            return (
                f"step {step} was also logged by rank {_named(others)}, but the layout has {self._num_ranks} ranks: "
                f"the run had another layout then; {there}"
            )
        why = f" ({'; '.join(self.notes)})" if self.notes else ""
        return f"step {step} is not whole on rank {_named(sorted(everyone - self._whole[step]))}{why}; {there}"


def read_action_logs(folder: Path, step: int | None = None, *, num_ranks: int | None = None) -> Logs:
    """Reads one step of the action logs of a run. See `ActionLogs`."""
    return ActionLogs(folder, num_ranks=num_ranks).step(step)


def _files(folder: Path) -> dict[int, Path]:
    """The log of each rank, in the order of ranks."""
    if (folder / "actions").is_dir():
        folder /= "actions"
    found = {int(match[1]): path for path in folder.glob("rank-*.jsonl") if (match := _FILE.fullmatch(path.name))}
    if not found:
        raise ValueError(f"{folder}: no action logs; a run writes them with output.action_log_every = 1 in its recipe")
    return dict(sorted(found.items()))


def _lines(path: Path) -> tuple[list[_Line], bool]:
    """The entries of one file, and whether its last line is torn."""
    text = path.read_bytes()
    end = text.rfind(b"\n") + 1
    decoder = msgspec.json.Decoder(_Line)
    try:
        return decoder.decode_lines(text[:end]), end < len(text)
    except msgspec.MsgspecError:
        for number, line in enumerate(text[:end].splitlines(), start=1):
            try:
                decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}, line {number}: no entry of an action log: {error}") from None
        raise


def _rank_log(path: Path, lines: Sequence[_Line]) -> RankLog:
    extra = tuple(
        Extra(Doing(line.action), line.start, line.end, line.wait, line.cpu) for line in lines if line.action in _DOINGS
    )
    lines = [line for line in lines if line.action not in _DOINGS]
    try:
        actions = tuple(Action.parse(line.action) for line in lines)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not lines:
        raise ValueError(f"{path}: a step without an action of the schedule")
    rows = [(line.start, line.end, line.wait, line.tp + line.cp, line.fsdp, line.cpu) for line in lines]
    start, end, wait, tied, fsdp, cpu = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    log = RankLog(actions, start, end, wait, tied, fsdp, cpu, extra)
    wrong = (log.own < tied + fsdp) | (log.gap < 0)
    if np.any(wrong):
        worst = int(np.argmax(wrong))
        raise ValueError(f"{path}, step {lines[0].step}, {actions[worst]}: its times are not in order")
    return log


def _named(numbers: Sequence[int], most: int = 8) -> str:
    """1, 2, 3; of many, the first few."""
    rest = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + rest


def replay(logs: Logs, graph: Graph, grid: Grid, *, staggered: bool = False) -> Played:
    """Plays one step from its measured durations.

    Args:
        logs: of the step.
        graph: of the schedule that its ranks ran, in line, as `graph_of` makes it.
        grid: the run's layout.
        staggered: each rank begins when it began, by clocks that agree; else all begin at once, which takes nothing but
            durations, and a step is as much shorter as its late starters were waited for.

    Returns:
        Its classes of time are compute (all of a computation, with the waiting for TP and CP ranks inside of it),
        pp_wait, dp, dp_wait, host and end_wait.
    """
    return play(graph, Measured(logs, graph, grid, staggered=staggered))


def graph_of(logs: Logs, schedule: Schedule, grid: Grid) -> Graph:
    """What a logged step waits for. `schedule`, with its messages, and `grid` are the run's.

    Raises:
        ValueError: the logs are of another layout or another schedule.
    """
    _check_layout(logs, schedule, grid)
    return compile_graph(schedule, in_line=True)


def _check_layout(logs: Logs, schedule: Schedule, grid: Grid) -> None:
    """ValueError if the logs are not those of this schedule on this grid."""
    if len(logs.ranks) != grid.size:
        raise ValueError(
            f"step {logs.step} was logged by {len(logs.ranks)} ranks, but tp {grid.tp} x cp {grid.cp} x pp {grid.pp} "
            f"x dp {grid.dp} are {grid.size}"
        )
    for rank, log in enumerate(logs.ranks):
        wanted = schedule.actions[grid.coordinates(rank).pp]
        if log.actions == wanted:
            continue
        at = next((i for i, pair in enumerate(zip(log.actions, wanted)) if pair[0] != pair[1]), None)  # noqa: B905
        if at is not None:
            said = f"its action {at + 1} is {log.actions[at]}, in the schedule it is {wanted[at]}"
        else:
            said = f"it has {len(log.actions)} actions, the schedule {len(wanted)}"
        raise ValueError(f"rank {rank}, step {logs.step}: the log is of another schedule or layout: {said}")


def message_seconds(logs: Logs, grid: Grid) -> float:
    """Seconds from the posting of a send to the arrival of the message: the median of those that were waited for.

    Of a receive that did not wait nobody knows when its message came. Sender and receiver must have one clock, or
    clocks that were aligned.
    """
    if logs.message is not None:
        return logs.message
    sent: dict[tuple[object, ...], int] = {}
    for at, log in _replicas(logs, grid):
        for i, action in enumerate(log.actions):
            if action.kind in SENDS:
                sent[at, action.message] = int(log.start[i])
    took = []
    for at, log in _replicas(logs, grid):
        for i in np.flatnonzero(log.wait > WAITED):
            kind, stage, micro_batch = log.actions[i]
            direction, source = (Kind.FORWARD, stage - 1) if kind is Kind.FORWARD else (Kind.BACKWARD, stage + 1)
            posted = sent.get((at, (direction, source, micro_batch)))
            if posted is not None:
                took.append(int(log.start[i] + log.wait[i]) - posted)
    return max(float(np.median(took)), 0.0) / 1e9 if took else 0.0


def _replicas(logs: Logs, grid: Grid) -> Iterator[tuple[tuple[int, int, int], RankLog]]:
    """Each rank's log, and which replica of its pipeline rank it is."""
    for rank, log in enumerate(logs.ranks):
        at = grid.coordinates(rank)
        yield (at.dp, at.cp, at.tp), log


class Measured:
    """Costs of a logged step, for a graph whose collectives are in line."""

    contention = optimizer = fixed = 0.0
    hidden = 1.0

    def __init__(self, logs: Logs, graph: Graph, grid: Grid, *, staggered: bool = False) -> None:
        self.lanes = grid
        self._message = message_seconds(logs, grid)
        # Seconds [dp, cp, tp]
        self._own: dict[Node, np.ndarray] = {}
        self._host: dict[Node, np.ndarray] = {}
        self._posted: dict[Action, np.ndarray] = {}  # from the end of a computation to the posting of its send
        self._left: dict[Node, np.ndarray] = {}  # after the collective that is the last of its list
        for pp_rank, actions in enumerate(graph.schedule.actions):
            nodes = [node for node in graph.nodes if node.pp_rank == pp_rank and node.kind not in SENDS]
            own, gap, begun = _seconds(logs, grid, pp_rank)
            if staggered:
                gap[0] = begun
            self._read(actions, nodes, own, gap)

    def _read(self, actions: Sequence[Action], nodes: Sequence[Node], own: np.ndarray, gap: np.ndarray) -> None:
        """The costs of one pipeline rank. What it does between two nodes of its list comes before the later one."""
        in_list = iter(nodes)
        between = np.zeros(own.shape[1:])
        for i, action in enumerate(actions):
            between = between + gap[i]
            if action.kind in _NODES:
                node = next(in_list)
                self._host[node], self._own[node] = between, own[i]
                between = np.zeros_like(between)
                continue
            if action.kind in SENDS:
                self._posted[action] = between
            between = between + own[i]
        if nodes and nodes[-1].kind not in COMPUTE:
            self._left[nodes[-1]] = between

    def layers(self, stage: int) -> int:
        return 1

    def host(self, node: Node) -> Lanes:
        return self._host[node]

    def computation(self, node: Node, start: Lanes) -> Spent:
        own = self._own[node]
        return Spent(start + own, {"compute": own}, 0.0)

    def message(self, node: Node) -> Lanes:
        return self._posted[node.action] + self._message

    def collective(self, node: Node) -> Lanes:
        # The last to come waits for nobody: what it takes is what remains when all are there.
        remains = self._own[node].min(axis=(0, 1), keepdims=True)
        return remains + self._left.get(node, 0.0)


def _seconds(logs: Logs, grid: Grid, pp_rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of one pipeline rank, (own, gap) [actions, dp, cp, tp] and how long after the first rank each began [dp, cp, tp].

    All in seconds."""
    shape = (grid.dp, grid.cp, grid.tp)
    places = product(range(grid.dp), range(grid.cp), range(grid.tp))
    ranks = [logs.ranks[grid.rank(tp=tp, cp=cp, pp=pp_rank, dp=dp)] for dp, cp, tp in places]
    own, gap = (np.stack([getattr(log, name) for log in ranks], axis=1) / 1e9 for name in ("own", "gap"))
    first = min(log.start[0] for log in logs.ranks)
    begun = np.array([log.start[0] - first for log in ranks]) / 1e9
    return own.reshape(-1, *shape), gap.reshape(-1, *shape), begun.reshape(shape)


def with_normal_rank(logs: Logs, rank: int, grid: Grid) -> Logs:
    """The logs as they would be if one rank were as fast as its peers.

    Its durations are replaced by the median of the same action in the other replicas of dp. The ranks of its TP and CP
    groups waited for it inside of their computations, which the logs do not show apart: so theirs are replaced as well.
    In a layout without replicas only the rank's own can be, by the median of its TP and CP ranks.

    Raises:
        ValueError: there is no such rank, or it has no peers.
    """
    if not 0 <= rank < grid.size:
        raise ValueError(f"rank {rank}: there are ranks 0 to {grid.size - 1}")
    at = grid.coordinates(rank)
    alike = [other for other in range(grid.size) if grid.coordinates(other).pp == at.pp]
    together = [other for other in alike if grid.coordinates(other).dp == at.dp]
    peers = [other for other in alike if other not in together]
    if not peers:
        together, peers = [rank], [other for other in together if other != rank]
    if not peers:
        raise ValueError(f"rank {rank} has no peers: no other rank does what it does (tp, cp and dp are 1)")
    own, gap = (
        np.median([getattr(logs.ranks[peer], name) for peer in peers], axis=0).astype(np.int64)
        for name in ("own", "gap")
    )
    waits = np.array([action.kind in (Kind.GATHER, Kind.REDUCE) for action in logs.ranks[rank].actions])
    changed = {}
    for other in together:
        # Of a collective its peers know how long they waited, and the last to come how long it takes.
        kept = np.where(waits, logs.ranks[other].own, own)
        changed[other] = logs.ranks[other].with_durations(kept, gap)
    ranks = tuple(changed.get(other, log) for other, log in enumerate(logs.ranks))
    return dataclasses.replace(logs, ranks=ranks, message=message_seconds(logs, grid))
