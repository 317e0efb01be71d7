"""Plays the graph of a step on every rank of a cluster.

One pass over the graph, each node for all replicas at once: arrays [dp, cp, tp] of its pipeline rank. What is played:

- a rank computes one thing after another, and every ordered pair of pipeline neighbours has a line of its own on which
  messages follow one another; FSDP's collectives of a rank follow one another on a third;
- inside a computation TP's ranks meet at each layer's collectives and CP's at each gather of keys and values: all go on
  when the last has come;
- FSDP's collectives begin when the last rank of dp x cp is ready. Layers do not wait for all of them: a stage's first
  layer computes once its own weights are there, and its last layer's gradients leave while the others are computed;
- what runs beside FSDP's collectives is slowed by `Work.contention`, and hides as much of them as `Work.hidden` says;
- the step ends for all when the last rank is done, with the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fourfold.layout import Kind
from fourfold.layout.actions import COMPUTE, SENDS
from fourfold.simulator.costs import Costs, Lanes, Modelled, latest
from fourfold.simulator.graph import NONE, Graph, Node
from fourfold.simulator.played import CLASSES, Played
from fourfold.simulator.scenario import Scenario


def simulate(scenario: Scenario, *, keep: bool = True) -> Played:
    """Plays one step.

    Args:
        scenario: what.
        keep: every node's start and end; without, what each rank spent in all only, which takes less memory.
    """
    return play(scenario.graph, Modelled(scenario), keep=keep)


def play(graph: Graph, costs: Costs, *, keep: bool = True) -> Played:
    """Plays a graph with any costs. See `simulate`."""
    return _Step(graph, costs, keep).run()


def _low(lanes: Lanes) -> float:
    return float(lanes.min()) if isinstance(lanes, np.ndarray) else lanes


def _high(lanes: Lanes) -> float:
    return float(lanes.max()) if isinstance(lanes, np.ndarray) else lanes


def _larger(one: float, other: float) -> float:
    return one if one > other else other


def _smaller(one: float, other: float) -> float:
    return one if one < other else other


@dataclass
class _Rank:
    """The state of one pipeline rank: seconds at which its lines are free, and what it has spent."""

    compute: Lanes
    shards: Lanes  # FSDP's line
    busy: list[tuple[Lanes, Lanes]] = field(default_factory=list)  # when that line was, as far as it still matters
    last: Lanes = 0.0  # seconds of the last collective on it
    owes: Lanes = 0.0  # by how much the last computation was slowed by its own gradients, which left meanwhile
    spent: dict[str, Lanes] = field(default_factory=dict)


class _Step:
    """One pass over the graph."""

    def __init__(self, graph: Graph, costs: Costs, keep: bool) -> None:
        self.graph, self.costs, self.keep = graph, costs, keep
        lanes = costs.lanes
        self.shape = (lanes.dp, lanes.cp, lanes.tp)
        several = self.shape != (1, 1, 1)
        self.nothing: Lanes = np.zeros(self.shape) if several else 0.0
        self.later: Callable[..., Lanes] = np.maximum if several else _larger
        self.earlier: Callable[..., Lanes] = np.minimum if several else _smaller
        self.start: list[Lanes | None] = [None] * len(graph.nodes)
        self.end: list[Lanes | None] = [None] * len(graph.nodes)
        self.ranks = [self._rank() for _ in range(graph.schedule.pp)]
        self.layers_left: dict[int, Lanes] = {}  # of computations: how early before their end gradients begin to leave

    def _rank(self) -> _Rank:
        return _Rank(self.nothing, self.nothing, spent={name: self._zero() for name in CLASSES})

    def _zero(self) -> Lanes:
        return self.nothing + 0.0  # a new array

    def run(self) -> Played:
        last_use = self.graph.last_use
        runs: dict[Kind, Callable[[int, Node], None]] = dict.fromkeys(COMPUTE, self._compute)
        runs |= dict.fromkeys(SENDS, self._send) | {Kind.GATHER: self._collect, Kind.REDUCE: self._collect}
        freed: dict[int, list[int]] = {}
        if not self.keep:
            for i, last in enumerate(last_use):
                freed.setdefault(last, []).append(i)
        for i, node in enumerate(self.graph.nodes):
            runs[node.kind](i, node)
            for done in freed.get(i, ()):
                self.start[done] = self.end[done] = None
                self.layers_left.pop(done, None)
        return self._finish()

    def _ends(self, i: int) -> Lanes:
        end = self.end[i]
        assert end is not None
        return end

    def _compute(self, i: int, node: Node) -> None:
        rank = self.ranks[node.pp_rank]
        late = self.costs.host(node)
        rank.spent["host"] += late
        free = ready = rank.compute
        if self.graph.in_line:
            free, late = free + late, 0.0
            ready = free
        if node.needs != NONE:
            ready = self.later(free, self._ends(node.needs))
            rank.spent["pp_wait"] += ready - free
        gate: Lanes | None = None
        if node.gate != NONE:
            gate = self._ends(node.gate)
            begun = self.start[node.gate]
            assert begun is not None
            # A layer's weights come one after another.
            alone = self.costs.hidden if node.before == NONE else 1.0  # nothing is beside the first
            first = begun + alone * (gate - begun) / max(self.costs.layers(node.stage), 1)
            met = self.later(ready, begun)
            waited = self.later(met, first)
            rank.spent["dp_wait"] += met - ready
            rank.spent["dp"] += waited - met
            ready = waited
        start = ready + late
        did = self.costs.computation(node, start)
        end = did.end + self.nothing
        rest = end - start
        for name, seconds in did.parts.items():
            rank.spent[name] += seconds
            rest = rest - seconds
        if self.costs.lanes.cp > 1:  # else it is the rounding of sums
            rank.spent["cp_wait"] += rest
        end = self._slowed(rank, start, end)
        if gate is not None and self.graph.schedule.zero < 3:
            held = self.later(end, gate + did.layer)
            rank.spent["dp"] += held - end
            end = held
        self.start[i], self.end[i], rank.compute = start, end, end
        number = self.costs.layers(node.stage)
        if number > 1:
            self.layers_left[i] = (number - 1) * did.layer

    def _slowed(self, rank: _Rank, start: Lanes, end: Lanes) -> Lanes:
        """With what FSDP's collectives beside it cost."""
        if not self.costs.contention:
            return end
        first = _low(start)
        rank.busy = [(begun, ended) for begun, ended in rank.busy if _high(ended) > first]
        beside = self.nothing
        for begun, ended in rank.busy:
            beside = beside + self.later(self.earlier(end, ended) - self.later(start, begun), 0.0)
        more = latest(self.costs.contention * self.costs.hidden * beside + rank.owes, 2)
        rank.owes = 0.0
        rank.spent["dp"] += more
        return end + more

    def _send(self, i: int, node: Node) -> None:
        start = self._ends(node.needs)
        for ahead in node.after:
            start = self.later(start, self._ends(ahead))
        self.start[i], self.end[i] = start, start + self.costs.message(node)

    def _collect(self, i: int, node: Node) -> None:
        """A collective of FSDP over dp x cp."""
        rank = self.ranks[node.pp_rank]
        if self.graph.in_line:
            self._hold_up(i, node, rank)
            return
        # Computation can hide so much as runs beside that share of it; `_finish` takes back what is beside nothing.
        seconds = self.costs.collective(node) / self.costs.hidden
        ready, made = rank.shards, None
        if node.needs != NONE:
            made = self._ends(node.needs)
            ready = self.later(ready, made)
        if node.kind is Kind.REDUCE and made is not None:
            ready = self.later(rank.shards, made - self.layers_left.get(node.needs, 0.0))
        start = latest(latest(ready, 0), 1) + self.nothing
        end = start + seconds
        begun = start
        if node.kind is Kind.REDUCE and made is not None:  # the first layer's gradients come last
            alone = seconds / max(self.costs.layers(node.stage), 1)
            beside = self.earlier(self.later(made - start, 0.0), seconds - alone)
            rank.owes = self.costs.contention * self.costs.hidden * beside
            end = self.later(end, latest(latest(made + rank.owes, 0), 1) + alone)
            begun = self.later(start, made)
        self.start[i], self.end[i], rank.shards, rank.last = start, end, end, seconds
        if self.costs.contention and np.any(seconds):
            rank.busy.append((begun, end))

    def _hold_up(self, i: int, node: Node, rank: _Rank) -> None:
        """A collective of FSDP that its rank waits for."""
        late = self.costs.host(node)
        arrived = rank.compute + late
        start = latest(latest(arrived, 0), 1) + self.nothing
        end = start + self.costs.collective(node)
        for name, seconds in (("host", late), ("dp_wait", start - arrived), ("dp", end - start)):
            rank.spent[name] += seconds
        self.start[i], self.end[i], rank.compute = start, end, end

    def _hasten(self) -> None:
        """Collectives that go on when their ranks have computed all are slowed by nothing any more."""
        done = [latest(latest(rank.compute, 0), 1) for rank in self.ranks]

        def sooner(pp_rank: int, at: Lanes) -> Lanes:
            return self.earlier(at, done[pp_rank] + self.costs.hidden * (at - done[pp_rank]))

        for pp_rank, rank in enumerate(self.ranks):
            rank.shards = sooner(pp_rank, rank.shards)
        for i, node in enumerate(self.graph.nodes):
            if node.kind in (Kind.GATHER, Kind.REDUCE):
                for times in (self.start, self.end):
                    at = times[i]
                    if at is not None:
                        times[i] = sooner(node.pp_rank, at)

    def _finish(self) -> Played:
        if self.costs.hidden < 1:
            self._hasten()
        over = max(_high(self.later(rank.compute, rank.shards)) for rank in self.ranks)
        for rank in self.ranks:
            done = self.later(rank.compute, rank.shards)
            shown = self.earlier(done - rank.compute, rank.last)
            together = latest(latest(done, 0), 1)  # replicas end a step together: they share the weights
            rank.spent["dp"] += shown
            rank.spent["dp_wait"] += together - rank.compute - shown
            rank.spent["end_wait"] += over - together
            rank.spent["optimizer"] += self.costs.optimizer
            rank.spent["fixed"] += self.costs.fixed
        return Played(
            graph=self.graph,
            lanes=self.costs.lanes,
            start=self._kept(self.start),
            end=self._kept(self.end),
            pipeline_seconds=over,
            step_seconds=over + self.costs.optimizer + self.costs.fixed,
            spent={name: np.stack([self._lanes(rank.spent[name]) for rank in self.ranks], axis=1) for name in CLASSES},
        )

    def _kept(self, times: list[Lanes | None]) -> tuple[np.ndarray, ...]:
        return tuple(self._lanes(lanes) for lanes in times if lanes is not None) if self.keep else ()

    def _lanes(self, lanes: Lanes) -> np.ndarray:
        return lanes if isinstance(lanes, np.ndarray) else np.full(self.shape, lanes)
