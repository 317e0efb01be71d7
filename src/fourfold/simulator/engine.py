"""Plays the graph of a step on every rank of a cluster.

One pass over the graph, each node for all replicas at once: arrays [dp, cp, tp] of its pipeline rank. What is played:

- a rank computes one thing after another, and every ordered pair of pipeline neighbours has a line of its own on which
  messages follow one another; FSDP's collectives of a rank follow one another on a third;
- inside a computation TP's ranks meet at each layer's collectives and CP's at each gather of keys and values: all go on
  when the last has come;
- FSDP's collectives begin when the last rank of dp x cp is ready. Layers do not wait for all of them: a stage's first
  layer computes once its own weights are there, and its last layer's gradients leave while the others are computed;
- what runs beside FSDP's collectives is slowed by `Work.contention`;
- the step ends for all when the last rank is done, with the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fourfold.layout import Grid, Kind
from fourfold.layout.actions import COMPUTE, SENDS
from fourfold.simulator.faults import Faults
from fourfold.simulator.graph import NONE, Graph, Node
from fourfold.simulator.played import CLASSES, Played
from fourfold.simulator.scenario import Scenario
from fourfold.simulator.work import Layer

_ORDER = tuple(Kind)

Lanes = np.ndarray | float
"""float64 [dp, cp, tp]: one number per replica of a pipeline rank. Where all are alike a plain number, which is many
times as fast."""


@dataclass(frozen=True)
class Spent:
    """What a computation did after it had begun."""

    end: Lanes
    parts: Mapping[str, Lanes]
    """Seconds by class (`played.CLASSES`), without `cp_wait`, which is the rest."""
    layer: Lanes
    """Seconds of one layer: what FSDP's collectives cannot be hidden by."""


@dataclass(frozen=True)
class Pieces:
    """What a computation consists of, in seconds of each replica."""

    number: int  # of layers
    layer: Layer  # on a healthy rank
    ends: float  # of embedding and head, on a healthy rank
    slower: Lanes  # all that a rank computes takes so many times as long
    attention: Lanes  # of one layer
    tp: Lanes  # of one layer
    cp: Lanes  # of one layer
    alone: bool = False  # products for the gradients of weights, in which no other rank takes part


class Costs(Protocol):
    """What nodes cost. Seconds."""

    lanes: Grid
    contention: float
    optimizer: float
    fixed: float

    def layers(self, stage: int) -> int:
        """Layers of a virtual stage, whose weights and gradients FSDP moves one after another."""
        ...

    def computation(self, node: Node, start: Lanes) -> Spent:
        """Of a computation that begins at `start`."""
        ...

    def host(self, node: Node) -> Lanes:
        """By how much a computation is launched late. In a graph whose collectives are in line: what else the rank does
        before it comes to this node, and begins to wait for others."""
        ...

    def message(self, node: Node) -> Lanes:
        """On the way."""
        ...

    def collective(self, node: Node) -> Lanes:
        """Of FSDP, once all are there."""
        ...


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


class Modelled:
    """Costs of the planner's time model, with documents and faults."""

    def __init__(self, scenario: Scenario) -> None:
        self.work, self.lanes, self.pp = scenario.work, scenario.lanes, scenario.grid.pp
        self.contention = self.work.contention
        self.optimizer, self.fixed = self.work.optimizer, self.work.fixed
        loads, lanes = scenario.loads, self.lanes
        # [micro-batch][dp, cp, 1]: attention relative to that of a row that is one document
        self._load: list[Lanes] = [1.0] * scenario.schedule.num_micro_batches
        if loads is not None:
            pairs = loads.pairs / self.work.pairs
            self._load = [_plain(np.ascontiguousarray(pairs[:, m, :, None])) for m in range(len(self._load))]
        faults = scenario.faults
        self._jitter = faults.jitter
        self._seed = faults.seed
        self._speed = [self._per_rank(faults.ranks, pp_rank, 1.0) for pp_rank in range(self.pp)]
        self._late = [self._per_rank(faults.cpus, pp_rank, 0.0) for pp_rank in range(self.pp)]
        self._links = _Links(faults, lanes)

    def _per_rank(self, values: Mapping[int, float], pp_rank: int, default: float) -> Lanes:
        """The values of one pipeline rank's replicas; a number if all have the default."""
        out = np.full((self.lanes.dp, self.lanes.cp, self.lanes.tp), default)
        for rank, value in values.items():
            at = self.lanes.coordinates(rank)
            if at.pp == pp_rank:
                out[at.dp, at.cp, at.tp] = value
        return _plain(out) if np.any(out != default) else default

    def layers(self, stage: int) -> int:
        return self.work.layers[stage]

    def host(self, node: Node) -> Lanes:
        return self._late[node.pp_rank]

    def message(self, node: Node) -> Lanes:
        return self.work.message * self._links.message(node.pp_rank, node.receiver)

    def collective(self, node: Node) -> Lanes:
        seconds = self.work.gather if node.kind is Kind.GATHER else self.work.reduce
        return seconds[node.stage] * self._links.group("fsdp", node.pp_rank)

    def _factor(self, node: Node) -> Lanes:
        """How many times as long this computation takes on each replica."""
        speed = self._speed[node.pp_rank]
        if not self._jitter:
            return speed
        shape = (self.lanes.dp, self.lanes.cp, self.lanes.tp)
        # Of each computation, whatever was asked for before it.
        random = np.random.default_rng((self._seed, _ORDER.index(node.kind), node.stage, node.micro_batch))
        varied = np.exp(self._jitter * random.standard_normal(shape) - 0.5 * self._jitter**2)
        return _plain(speed * varied)

    def pieces(self, node: Node) -> Pieces:
        """Of a computation, before it is known who waits for whom."""
        layer, slower = self.work.layer[node.kind], self._factor(node)
        return Pieces(
            number=self.work.layers[node.stage],
            layer=layer,
            ends=self.work.ends[node.kind][node.stage],
            slower=slower,
            attention=layer.attention * self._load[node.micro_batch] * slower,
            tp=layer.tp * self._links.group("tp", node.pp_rank),
            cp=layer.cp * self._links.group("cp", node.pp_rank),
            alone=node.kind is Kind.WEIGHT,
        )

    def computation(self, node: Node, start: Lanes) -> Spent:
        pieces = self.pieces(node)
        number, layer, ends, slower = pieces.number, pieces.layer, pieces.ends, pieces.slower
        attention, tp, cp = pieces.attention, pieces.tp, pieces.cp
        own = layer.compute * slower + attention
        if pieces.alone:
            busy = ends * slower + number * own
            return Spent(start + busy, {"compute": busy}, own if number else 0.0)
        # A head's product and loss have TP's collectives in them, too; a stage without layers meets nobody else.
        end = _latest(start, 2) + ends * _latest(slower, 2)
        one: Lanes = 0.0
        if number:
            one = _latest(own, 2) + tp + layer.dp  # of its TP group, which is as slow as its slowest in every half
            before = layer.before * slower
            if isinstance(slower, np.ndarray) and self.lanes.cp > 1:
                for _ in range(number):
                    met = _latest(end + before, 1) + cp
                    end = _latest(met + own - before, 2) + tp + layer.dp
            else:
                # CP's ranks meet in every layer; what comes before the first meeting and after the last is their own.
                slowest = _latest(cp, 2)  # of the meetings that a TP group's ranks have
                met = _latest(end + before, 1) + (number - 1) * (_latest(one, 1) + slowest)
                end = met + slowest + one - before
        busy = ends * slower + number * own
        parts = {
            "compute": (number * layer.compute + ends) * slower,
            "attention": number * attention,
            "tp": number * tp,
            "cp": number * cp,
            "dp": number * layer.dp,
            "tp_wait": _latest(start, 2) - start + _latest(busy, 2) - busy,
        }
        return Spent(end, parts, one + cp if number else 0.0)


class _Links:
    """By how many times collectives and messages are slower, for the links that are."""

    def __init__(self, faults: Faults, lanes: Grid) -> None:
        self._lanes = lanes
        self._messages: dict[tuple[int, int], np.ndarray] = {}
        self._groups: dict[tuple[str, int], np.ndarray] = {}
        for (one, other), factor in faults.links.items():
            a, b = lanes.coordinates(one), lanes.coordinates(other)
            if a.pp == b.pp:
                self._slow_groups(a, b, factor)
            elif (a.dp, a.cp, a.tp) == (b.dp, b.cp, b.tp):
                for pair in ((a.pp, b.pp), (b.pp, a.pp)):
                    self._array(self._messages, pair)[a.dp, a.cp, a.tp] *= factor

    def _slow_groups(self, a, b, factor: float) -> None:
        if (a.dp, a.cp) == (b.dp, b.cp):
            self._raise(self._array(self._groups, ("tp", a.pp))[a.dp, a.cp, :], factor)
        if (a.dp, a.tp) == (b.dp, b.tp):
            self._raise(self._array(self._groups, ("cp", a.pp))[a.dp, :, a.tp], factor)
        if a.tp == b.tp:
            self._raise(self._array(self._groups, ("fsdp", a.pp))[:, :, a.tp], factor)

    @staticmethod
    def _raise(slower: np.ndarray, factor: float) -> None:
        """A ring is as slow as its slowest link."""
        np.maximum(slower, factor, out=slower)

    def _array(self, known: dict, key: object) -> np.ndarray:
        if key not in known:
            known[key] = np.ones((self._lanes.dp, self._lanes.cp, self._lanes.tp))
        return known[key]

    def message(self, sender: int, receiver: int) -> Lanes:
        return self._messages.get((sender, receiver), 1.0)

    def group(self, dimension: str, pp_rank: int) -> Lanes:
        slower = self._groups.get((dimension, pp_rank))
        if slower is None:
            return 1.0
        # All of a TP group are as late as its slowest collective; likewise for those that CP's ranks are in.
        return _latest(slower, 2) if dimension == "tp" else _latest(slower, 1) if dimension == "cp" else slower


def _latest(lanes: Lanes, axis: int) -> Lanes:
    """The largest along one dimension, which stays as one of size 1."""
    if not isinstance(lanes, np.ndarray) or lanes.shape[axis] == 1:
        return lanes
    return lanes.max(axis=axis, keepdims=True)


def _plain(lanes: np.ndarray) -> Lanes:
    """A number, if there is one only."""
    return lanes.item() if lanes.size == 1 else lanes


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
            first = begun + (gate - begun) / max(self.costs.layers(node.stage), 1)
            waited = self.later(ready, first)
            rank.spent["dp"] += waited - ready
            ready = waited
        start = ready + late
        did = self.costs.computation(node, start)
        end = did.end + self.nothing
        rest = end - start
        for name, seconds in did.parts.items():
            rank.spent[name] += seconds
            rest = rest - seconds
        rank.spent["cp_wait"] += rest
        end = self._slowed(rank, start, end)
        if gate is not None:
            held = self.later(end, gate + did.layer)
            rank.spent["dp"] += held - end
            end = held
        self.start[i], self.end[i], rank.compute = start, end, end
        number = self.costs.layers(node.stage)
        if number > 1:
            self.layers_left[i] = (number - 1) * did.layer

    def _slowed(self, rank: _Rank, start: Lanes, end: Lanes) -> Lanes:
        """With what FSDP's collectives beside it cost."""
        if not rank.busy or not self.costs.contention:
            return end
        first = _low(start)
        rank.busy = [(begun, ended) for begun, ended in rank.busy if _high(ended) > first]
        beside = self.nothing
        for begun, ended in rank.busy:
            beside = beside + self.later(self.earlier(end, ended) - self.later(start, begun), 0.0)
        more = _latest(self.costs.contention * beside, 2)
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
        seconds = self.costs.collective(node)
        ready, made = rank.shards, None
        if node.needs != NONE:
            made = self._ends(node.needs)
            ready = self.later(ready, made - self.layers_left.get(node.needs, 0.0))
        start = _latest(_latest(ready, 0), 1) + self.nothing
        end = start + seconds
        if made is not None:  # the first layer's gradients come last
            alone = seconds / max(self.costs.layers(node.stage), 1)
            end = self.later(end, _latest(_latest(made, 0), 1) + alone)
        self.start[i], self.end[i], rank.shards, rank.last = start, end, end, seconds
        if self.costs.contention and np.any(seconds):
            rank.busy.append((start, end))

    def _hold_up(self, i: int, node: Node, rank: _Rank) -> None:
        """A collective of FSDP that its rank waits for."""
        late = self.costs.host(node)
        arrived = rank.compute + late
        start = _latest(_latest(arrived, 0), 1) + self.nothing
        end = start + self.costs.collective(node)
        for name, seconds in (("host", late), ("dp_wait", start - arrived), ("dp", end - start)):
            rank.spent[name] += seconds
        self.start[i], self.end[i], rank.compute = start, end, end

    def _finish(self) -> Played:
        over = max(_high(self.later(rank.compute, rank.shards)) for rank in self.ranks)
        for rank in self.ranks:
            done = self.later(rank.compute, rank.shards)
            shown = self.earlier(done - rank.compute, rank.last)
            rank.spent["dp"] += shown
            rank.spent["dp_wait"] += done - rank.compute - shown
            rank.spent["end_wait"] += over - done
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
