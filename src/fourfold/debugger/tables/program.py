"""What waits for what in the steps of an operation table.

The graph is the one of the table's own operations, not the simulator's: that one is made from a schedule of Fourfold's
executor, and has no node for what these tables hold and their published analysis replays: receives that are posted one
by one, the collectives and optimizer steps behind the pipeline, meetings of first and last stage, and the order in
which a foreign program did things. The rules:

- a worker does its computations, and all else that is no message and no FSDP collective, one after another;
- each of its four kinds of message has a line of its own. A send waits for the computation that made its data, a
  receive for the computation that consumed the receive before it (there is one buffer), a computation for its receive;
- FSDP's collectives follow one another on a line beside. What began after another thing had ended, on the same worker,
  waits for it;
- what several workers do together begins when the last of them has come.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fourfold.debugger.tables.kinds import COMPUTATIONS, MESSAGES, OVER_REPLICAS, RECVS, SENDS, Role, role
from fourfold.debugger.tables.table import Operation, Seconds, Table

_TOLERANCE = 2e-6  # of a step: 32-bit floats give times as exactly as that


class Meeting(NamedTuple):
    """Operations that begin together, by their place in the table: the two ends of a message, or a single one."""

    members: tuple[int, ...]
    needs: tuple[int, ...]
    """What must have ended before, for any of the members."""
    over_replicas: bool
    """Whether all replicas meet in it."""


@dataclass(frozen=True)
class Program:
    """The meetings of a step, each after those that it needs."""

    operations: tuple[Operation, ...]
    meetings: tuple[Meeting, ...]
    notes: tuple[str, ...] = ()
    unpaired: frozenset[int] = field(default=frozenset(), repr=False)
    """Messages whose other end is not in the table: how long they took cannot be known."""

    @cached_property
    def last(self) -> frozenset[int]:
        """Operations for which no other waits."""
        awaited = {i for meeting in self.meetings for i in meeting.needs}
        return frozenset(range(len(self.operations))) - awaited


def compile_program(table: Table) -> Program:
    """The program of a table.

    Raises:
        ValueError: operations wait for each other; an interleaved pipeline whose chunks the table does not tell.
    """
    build = _Builder(table)
    build.lines()
    build.beside()
    build.messages()
    build.collectives()
    return Program(table.operations, build.sorted(), tuple(build.notes), frozenset(build.unpaired))


class _Builder:
    """Collects who needs whom."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.operations = table.operations
        self.roles = [role(o.name) for o in self.operations]
        self.needs: list[set[int]] = [set() for _ in self.operations]
        self.partners: dict[int, tuple[int, ...]] = {}
        self.notes: list[str] = []
        self.unpaired: set[int] = set()
        self.of: dict[tuple[int, Role], list[int]] = defaultdict(list)
        for i, o in enumerate(self.operations):
            self.of[o.stage, self.roles[i]].append(i)
        self.computation = {(self.roles[i], o.virtual_stage, o.micro_batch): i for i, o in enumerate(self.operations)}

    def lines(self) -> None:
        """One thing after another."""
        for stage in range(self.table.pp):
            on_stage = [i for i, o in enumerate(self.operations) if o.stage == stage]
            own = [i for i in on_stage if self.roles[i] not in MESSAGES and self.roles[i] not in OVER_REPLICAS]
            beside = [i for i in on_stage if self.roles[i] in OVER_REPLICAS]
            for line in (own, beside, *(self.of[stage, r] for r in MESSAGES)):
                for before, after in itertools.pairwise(line):
                    self.needs[after].add(before)

    def beside(self) -> None:
        """What had ended when an FSDP collective began, and which of these had when something else did."""
        start, end = (times.mean(axis=(1, 2)) for times in (self.table.start, self.table.end))
        close = _TOLERANCE * float(end.max(initial=0.0))
        for stage in range(self.table.pp):
            own: list[int] = []
            collectives: list[int] = []
            for i, o in enumerate(self.operations):
                if o.stage == stage and self.roles[i] not in MESSAGES:
                    (collectives if self.roles[i] in OVER_REPLICAS else own).append(i)
            for line, other in ((own, collectives), (collectives, own)):
                ended = np.array([end[i] for i in other])
                for i in line:
                    before = np.flatnonzero(ended <= start[i] + close)
                    if len(before):
                        self.needs[i].add(other[int(before[-1])])

    def messages(self) -> None:
        """Who sends what to whom, or, where the table has not all messages, whose result is needed."""
        pp = self.table.pp
        for compute, send, recv, step in zip(COMPUTATIONS, SENDS, RECVS, (1, -1), strict=True):
            made = [self._made(stage, compute, step) for stage in range(pp)]
            sent = [self.of[stage, send] for stage in range(pp)]
            received = [self.of[(stage + step) % pp, recv] for stage in range(pp)]
            for stage in range(pp):
                if len(sent[stage]) > len(made[stage]):
                    raise ValueError(
                        f"{self.table.path}: stage {stage} does {send.value} {len(sent[stage])} times, but has only "
                        f"{len(made[stage])} results for other stages: an interleaved pipeline needs column mc or gmc"
                    )
                for producer, consumer in made[stage]:
                    self.needs[consumer].add(producer)
            if [*map(len, made)] == [*map(len, sent)] == [*map(len, received)]:
                for channel in zip(made, sent, received, strict=True):
                    self._pair(*channel)
                continue
            self.unpaired.update(i for line in (*sent, *received) for i in line)
            direction = "forward" if step == 1 else "backward"
            self.notes.append(f"not every {direction} message is in the table: such messages are taken to cost nothing")

    def _made(self, stage: int, compute: Role, step: int) -> list[tuple[int, int]]:
        """The computations of a stage whose result another needs, in order, each with the one that needs it."""
        found = []
        for i in self.of[stage, compute]:
            o = self.operations[i]
            consumer = self.computation.get((compute, o.virtual_stage + step, o.micro_batch))
            if consumer is None:
                continue
            if self.table.pp == 1:  # no message: another chunk of the same rank
                self.needs[consumer].add(i)
            else:
                found.append((i, consumer))
        return found

    def _pair(self, made: list[tuple[int, int]], sent: list[int], received: list[int]) -> None:
        """The sends of a stage with the receives of its neighbour: a channel keeps its order."""
        before: int | None = None
        for (producer, consumer), s, r in zip(made, sent, received, strict=True):
            self.needs[s].add(producer)
            self.needs[consumer].add(r)
            self.partners[s] = self.partners[r] = (s, r)
            if before is not None:
                self.needs[r].add(before)
            before = consumer

    def collectives(self) -> None:
        """Stages that meet: those with the embedding, and all for the global norm. The n-th with the n-th."""
        for kind in (Role.EMBEDDING, Role.NORM):
            stages = [self.of[stage, kind] for stage in range(self.table.pp) if self.of[stage, kind]]
            for group in zip(*stages, strict=False):
                self.partners.update(dict.fromkeys(group, group))

    def sorted(self) -> tuple[Meeting, ...]:
        """Each meeting after what it needs. ValueError if some wait for each other."""
        groups = sorted({self.partners.get(i, (i,)) for i in range(len(self.operations))})
        of = {i: g for g, group in enumerate(groups) for i in group}
        needs = [sorted({j for i in group for j in self.needs[i]}) for group in groups]
        waits = [{of[j] for j in needed} for needed in needs]
        followers: list[list[int]] = [[] for _ in groups]
        for g, awaited in enumerate(waits):
            for other in awaited:
                followers[other].append(g)
        missing = list(map(len, waits))
        ready = deque(g for g, number in enumerate(missing) if number == 0)
        order = []
        while ready:
            order.append(ready.popleft())
            for follower in followers[order[-1]]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    ready.append(follower)
        if len(order) < len(groups):
            raise ValueError(self._circle(groups, waits, {*order}))
        return tuple(
            Meeting(groups[g], tuple(needs[g]), self.roles[groups[g][0]] in (*OVER_REPLICAS, Role.NORM)) for g in order
        )

    def _circle(self, groups: list[tuple[int, ...]], waits: list[set[int]], done: set[int]) -> str:
        at = next(g for g in range(len(groups)) if g not in done)
        path: list[int] = []
        while at not in path:
            path.append(at)
            at = min(other for other in waits[at] if other not in done)
        circle = [self.operations[groups[g][0]] for g in path[path.index(at) :]]
        names = " waits for ".join(f"{o.name} {o.index} of stage {o.stage}" for o in (*circle, circle[0]))
        return f"{self.table.path}: the order of operations in the table cannot be: {names}"


def transfers(table: Table, program: Program) -> Seconds:
    """What each operation took by itself, [operation, replica, step]: from when the last of its meeting had come.

    A wait is no work: of a collective or a message only this is left, that which a faster peer would not change.
    """
    own = table.end - table.start
    for meeting in program.meetings:
        if len(meeting.members) == 1 and not meeting.over_replicas:
            continue
        members = list(meeting.members)
        begun = table.start[members].max(axis=0)
        if meeting.over_replicas:
            begun = begun.max(axis=0, keepdims=True)
        # Clocks that differ could make it negative.
        own[members] = np.maximum(table.end[members] - begun, 0.0)
    own[list(program.unpaired)] = 0.0
    return own
