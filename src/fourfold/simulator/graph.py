"""The step of a schedule as a graph: what is computed, sent, gathered and reduced, and what each of these waits for.

Which node waits for which does not depend on durations, nor on the replica: so the graph of one pipeline is made once,
its nodes in an order in which everything that a node waits for comes before it, and every replica and every question is
one pass over that order.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from fourfold.layout import Action, Kind, Schedule, play, validate
from fourfold.layout.actions import COMPUTE, MESSAGES, SENDS

Receives = Literal["asynchronous", "in-order", "as-posted"]
RECEIVES = ("asynchronous", "in-order", "as-posted")

NONE = -1
_EVENTS = (Kind.GATHER, Kind.REDUCE)


class Node(NamedTuple):
    """One thing that takes time on a pipeline rank. Other nodes are given by their place in the graph; NONE: none.

    A computation starts once `before`, `needs` and `gate` have ended; a message once `needs` and `after` have; FSDP's
    collectives once `needs` and `after` have, on all ranks that share the weights.
    """

    kind: Kind
    pp_rank: int  # of a message: the sender
    stage: int
    micro_batch: int
    before: int = NONE  # the computation before it on its rank; in line also the collective
    needs: int = NONE  # the message or the computation whose result it needs
    gate: int = NONE  # GATHER of its weights, if no computation has waited for that already
    after: tuple[int, ...] = ()  # what is ahead of it in the queues that it goes through
    receiver: int = NONE  # of a message: a pipeline rank

    @property
    def action(self) -> Action:
        """As a schedule writes it."""
        return Action(self.kind, self.stage, self.micro_batch)

    @property
    def awaited(self) -> set[int]:
        """All that it waits for."""
        return {other for other in (self.before, self.needs, self.gate, *self.after) if other != NONE}


@dataclass(frozen=True)
class Graph:
    """The nodes of one step, each after all that it waits for."""

    schedule: Schedule
    receives: Receives
    nodes: tuple[Node, ...]
    in_line: bool = False
    """FSDP's collectives hold up their rank, as in Fourfold's trainer on a CPU, which does one entry of its list after
    the other; else they run beside its computations."""

    @cached_property
    def where(self) -> dict[Action, int]:
        """The place of each computation and message."""
        return {node.action: i for i, node in enumerate(self.nodes) if node.kind not in _EVENTS}

    @cached_property
    def on_rank(self) -> tuple[tuple[int, ...], ...]:
        """Per pipeline rank, its computations in order."""
        out: list[list[int]] = [[] for _ in range(self.schedule.pp)]
        for i, node in enumerate(self.nodes):
            if node.kind in COMPUTE:
                out[node.pp_rank].append(i)
        return tuple(map(tuple, out))

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """Per node, the last node that waits for it, or itself."""
        last = list(range(len(self.nodes)))
        for i, node in enumerate(self.nodes):
            for other in node.awaited:
                last[other] = max(last[other], i)
        return tuple(last)


def compile_graph(schedule: Schedule, *, receives: Receives = "asynchronous", in_line: bool = False) -> Graph:
    """The graph of a schedule.

    Args:
        schedule: what runs.
        receives: how messages queue.
            "asynchronous": every ordered pair of ranks is a channel of its own, whose messages travel one after
            another, as in Fourfold's trainer.
            "in-order": all sends and receives of a rank go through one queue, as in one NCCL communicator, in the order
            in which senders begin to compute them: a receive that waits at its head holds up sends that could go
            (PyTorch's schedules, issue 188833).
            "as-posted": one queue per rank in the order of the schedule's own list, which is made for channels.
        in_line: see `Graph`.

    Raises:
        ValueError: a deadlock, naming who waits for whom; a computation whose input nobody makes.
    """
    if receives not in RECEIVES:
        raise ValueError(f"receives = {receives!r}: must be one of {', '.join(RECEIVES)}")
    if receives == "as-posted" and schedule.pp > 1 and not any(a.kind in MESSAGES for a in schedule.actions[0]):
        raise ValueError("receives = 'as-posted': the schedule has no messages; generate it with messages=True")
    if receives == "as-posted":
        validate(schedule)  # that each send has its receive
    unordered = _Nodes(schedule, in_line=in_line)
    unordered.queue(receives)
    return Graph(schedule, receives, unordered.sorted(), in_line)


class _Nodes:
    """Nodes in the order of the ranks' lists, and what each waits for."""

    def __init__(self, schedule: Schedule, *, in_line: bool) -> None:
        self.schedule, self.in_line = schedule, in_line
        self.nodes: list[Node] = []
        self.place: dict[Action, int] = {}
        for pp_rank, actions in enumerate(schedule.actions):
            self._add_rank(pp_rank, [a for a in actions if a.kind in COMPUTE or a.kind in _EVENTS])
        self.nodes = [self._with_need(node) for node in self.nodes]
        for i in range(len(self.nodes)):
            self._add_message(i)

    def _add_rank(self, pp_rank: int, actions: list[Action]) -> None:
        before, event, gates = NONE, NONE, {}
        for kind, stage, micro_batch in actions:
            i = len(self.nodes)
            if kind in COMPUTE:
                self.place[Action(kind, stage, micro_batch)] = i
                gate = gates.pop(stage, NONE)
                self.nodes.append(Node(kind, pp_rank, stage, micro_batch, before=before, gate=gate))
                before = i
                continue
            if self.in_line:
                self.nodes.append(Node(kind, pp_rank, stage, micro_batch, before=before))
                before = i
                continue
            if self.schedule.zero == 3:
                # Its collectives are part of the computations, but replicas meet in them: each computation begins when
                # the last of dp x cp has come to it.
                if kind is Kind.GATHER:
                    gates[stage] = i
                    self.nodes.append(Node(kind, pp_rank, stage, micro_batch, needs=before))
                continue
            # All weights are asked for at the start of the step, in the order in which they are needed; gradients leave
            # as soon as they are whole. Both go through one queue.
            after = (event,) if event != NONE else ()
            needs = before if kind is Kind.REDUCE else NONE
            self.nodes.append(Node(kind, pp_rank, stage, micro_batch, needs=needs, after=after))
            event = i
            if kind is Kind.GATHER:
                gates[stage] = i

    def _with_need(self, node: Node) -> Node:
        if node.kind not in COMPUTE or node.kind is Kind.WEIGHT:
            return node
        if node.kind is Kind.FORWARD:
            neighbour, kinds = node.stage - 1, (Kind.FORWARD,)
        else:
            neighbour, kinds = node.stage + 1, (Kind.BACKWARD, Kind.INPUT)
        if not 0 <= neighbour < self.schedule.num_stages:
            return node
        for kind in kinds:
            made = Action(kind, neighbour, node.micro_batch)
            if made in self.place:
                return node._replace(needs=self.place[made])
        raise ValueError(f"{node.action} waits for ever: nobody runs {Action(kinds[0], neighbour, node.micro_batch)}")

    def _add_message(self, consumer: int) -> None:
        """Puts a message between a computation and the one that it needs, where these are on different ranks."""
        node = self.nodes[consumer]
        if node.kind not in COMPUTE or node.needs == NONE or self.nodes[node.needs].pp_rank == node.pp_rank:
            return
        producer = self.nodes[node.needs]
        kind = Kind.SEND_FORWARD if producer.kind is Kind.FORWARD else Kind.SEND_BACKWARD
        message = Node(
            kind, producer.pp_rank, producer.stage, producer.micro_batch, needs=node.needs, receiver=node.pp_rank
        )
        self.place[message.action] = len(self.nodes)
        self.nodes[consumer] = node._replace(needs=len(self.nodes))
        self.nodes.append(message)

    def queue(self, receives: Receives) -> None:
        """Says what is ahead of each message."""
        queues: dict[tuple[int, ...], list[int]] = defaultdict(list)
        messages = [i for i, node in enumerate(self.nodes) if node.kind in SENDS]
        if receives == "asynchronous":  # as they are made
            for i in sorted(messages, key=lambda i: self.nodes[i].needs):
                queues[self.nodes[i].pp_rank, self.nodes[i].receiver].append(i)
        elif receives == "in-order":
            begins = self._ticks()
            for i in sorted(messages, key=lambda i: (begins[self.nodes[i].needs], self.nodes[i].pp_rank)):
                queues[(self.nodes[i].pp_rank,)].append(i)
                queues[(self.nodes[i].receiver,)].append(i)
        else:
            for pp_rank, actions in enumerate(self.schedule.actions):
                for action in actions:
                    if action.kind in MESSAGES:
                        queues[(pp_rank,)].append(self.place[action.send])
        for queue in queues.values():
            for ahead, i in itertools.pairwise(queue):
                self.nodes[i] = self.nodes[i]._replace(after=(*self.nodes[i].after, ahead))

    def _ticks(self) -> dict[int, float]:
        """When each computation begins if every one takes a tick."""
        timeline = play(self.schedule, forward=1.0, backward=1.0)
        found = zip(timeline.program.actions, timeline.start.tolist(), strict=True)
        return {self.place[action]: start for action, start in found if action in self.place}

    def sorted(self) -> tuple[Node, ...]:
        """Each node after what it waits for. ValueError if some wait for each other."""
        waiting_for = [node.awaited for node in self.nodes]
        missing = list(map(len, waiting_for))
        followers: list[list[int]] = [[] for _ in self.nodes]
        for i, awaited in enumerate(waiting_for):
            for other in awaited:
                followers[other].append(i)
        ready: deque[int] = deque()

        def add(i: int) -> None:
            # Collectives first: what runs beside a computation must be known before it.
            (ready.appendleft if self.nodes[i].kind in _EVENTS else ready.append)(i)

        for i, number in enumerate(missing):
            if number == 0:
                add(i)
        order = []
        while ready:
            i = ready.popleft()
            order.append(i)
            for follower in followers[i]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    add(follower)
        if len(order) < len(self.nodes):
            raise ValueError(self._deadlock(waiting_for, {*order}))
        new = {old: i for i, old in enumerate(order)} | {NONE: NONE}
        return tuple(
            node._replace(
                before=new[node.before],
                needs=new[node.needs],
                gate=new[node.gate],
                after=tuple(new[other] for other in node.after),
            )
            for node in (self.nodes[i] for i in order)
        )

    def _deadlock(self, waiting_for: list[set[int]], done: set[int]) -> str:
        """Follows who waits for whom until it comes round."""
        at = next(i for i in range(len(self.nodes)) if i not in done)
        path: list[int] = []
        while at not in path:
            path.append(at)
            at = min(other for other in waiting_for[at] if other not in done)
        circle = path[path.index(at) :]
        ranks = sorted({self.nodes[i].pp_rank for i in circle})
        waits = "; ".join(
            f"{self._name(i)} waits for {self._name(j)}" for i, j in zip(circle, [*circle[1:], circle[0]], strict=True)
        )
        pair = (
            f"pipeline ranks {ranks[0]} and {ranks[-1]} wait" if len(ranks) > 1 else f"pipeline rank {ranks[0]} waits"
        )
        return f"deadlock: {pair} for each other: {waits}"

    def _name(self, i: int) -> str:
        node = self.nodes[i]
        if node.kind in SENDS:
            return f"{node.action} (rank {node.pp_rank} to {node.receiver})"
        return f"{node.action} (rank {node.pp_rank})"
