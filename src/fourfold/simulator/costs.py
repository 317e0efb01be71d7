"""What every node of a step costs on every replica: the planner's time model, with documents, slow things and chance.

Inside a computation TP's ranks meet at each layer's collectives and CP's at each gather of keys and values: all go on
when the last has come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from fourfold.layout import Grid, Kind
from fourfold.layout.grid import Coordinates
from fourfold.simulator.faults import Faults
from fourfold.simulator.graph import Node
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

    @cached_property
    def own(self) -> Lanes:
        """What each rank computes of one layer."""
        return self.layer.compute * self.slower + self.attention

    @cached_property
    def of_tp_group(self) -> Lanes:
        """One layer without CP's collectives: of its TP group, which is as slow as its slowest in every half."""
        return latest(self.own, 2) + self.tp + self.layer.dp

    @property
    def one_layer(self) -> Lanes:
        """One layer with its collectives, nobody late."""
        if not self.number:
            return 0.0
        return self.own if self.alone else self.of_tp_group + self.cp


class Costs(Protocol):
    """What nodes cost. Seconds."""

    lanes: Grid
    contention: float
    hidden: float
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


class Modelled:
    """Costs of the planner's time model, with documents and faults."""

    def __init__(self, scenario: Scenario) -> None:
        self.work, self.lanes, self.pp = scenario.work, scenario.lanes, scenario.grid.pp
        self.contention, self.hidden = self.work.contention, self.work.hidden
        self.optimizer, self.fixed = self.work.optimizer, self.work.fixed
        loads, lanes = scenario.loads, self.lanes
        # [micro-batch][dp, cp, 1]: attention relative to that of a row that is one document
        self._load: list[Lanes] = [1.0] * scenario.schedule.num_micro_batches
        if loads is not None:
            pairs = loads.pairs / self.work.pairs
            self._load = [plain(np.ascontiguousarray(pairs[:, m, :, None])) for m in range(len(self._load))]
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
        return plain(out) if np.any(out != default) else default

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
        sigma = np.sqrt(np.log1p(self._jitter**2))  # of the logarithm
        varied = np.exp(sigma * random.standard_normal(shape) - 0.5 * sigma**2)
        return plain(speed * varied)

    def _left_open(self, dimension: str, node: Node) -> Lanes:
        """Seconds of a layer's TP or CP collectives that nothing hides, on healthy links or slow ones."""
        healthy = getattr(self.work.layer[node.kind], dimension)
        factors = self._links.group(dimension, node.pp_rank)
        if not isinstance(factors, np.ndarray):
            return healthy
        seconds = np.full_like(factors, healthy)
        for factor in np.unique(factors[factors != 1.0]).tolist():
            seconds[factors == factor] = getattr(self.work.behind(factor, node.kind), dimension)
        return seconds

    def _shards_left_open(self, node: Node) -> float:
        """The same of FSDP's, where layers have them: all that share weights are slow together, and TP peers wait."""
        factors = self._links.group("fsdp", node.pp_rank)
        worst = float(factors.max()) if isinstance(factors, np.ndarray) else 1.0
        return self.work.layer[node.kind].dp if worst == 1.0 else self.work.behind(worst, node.kind).dp

    def pieces(self, node: Node) -> Pieces:
        """Of a computation, before it is known who waits for whom."""
        layer, slower = self.work.layer[node.kind], self._factor(node)
        shards = self._shards_left_open(node)
        return Pieces(
            number=self.work.layers[node.stage],
            layer=layer if shards == layer.dp else dataclasses.replace(layer, dp=shards),
            ends=self.work.ends[node.kind][node.stage],
            slower=slower,
            attention=layer.attention * self._load[node.micro_batch] * slower,
            tp=self._left_open("tp", node),
            cp=self._left_open("cp", node),
            alone=node.kind is Kind.WEIGHT,
        )

    def computation(self, node: Node, start: Lanes) -> Spent:
        pieces = self.pieces(node)
        number, layer, ends, slower = pieces.number, pieces.layer, pieces.ends, pieces.slower
        attention, tp, cp, own = pieces.attention, pieces.tp, pieces.cp, pieces.own
        if pieces.alone:
            busy = ends * slower + number * own
            return Spent(start + busy, {"compute": busy}, pieces.one_layer)
        # A head's product and loss have TP's collectives in them, too; a stage without layers meets nobody else.
        end = latest(start, 2) + ends * latest(slower, 2)
        if number:
            before = layer.before * slower
            if isinstance(slower, np.ndarray) and self.lanes.cp > 1:
                for _ in range(number):
                    met = latest(end + before, 1) + cp
                    end = latest(met + own - before, 2) + tp + layer.dp
            else:
                # CP's ranks meet in every layer; what comes before the first meeting and after the last is their own.
                slowest = latest(cp, 2)  # of the meetings that a TP group's ranks have
                met = latest(end + before, 1) + (number - 1) * (latest(pieces.of_tp_group, 1) + slowest)
                end = met + slowest + pieces.of_tp_group - before
        busy = ends * slower + number * own
        parts = {
            "compute": (number * layer.compute + ends) * slower,
            "attention": number * attention,
            "tp": number * tp,
            "cp": number * cp,
            "dp": number * layer.dp,
            "tp_wait": latest(start, 2) - start + latest(busy, 2) - busy,
        }
        return Spent(end, parts, pieces.one_layer)


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

    def _slow_groups(self, a: Coordinates, b: Coordinates, factor: float) -> None:
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
        return latest(slower, 2) if dimension == "tp" else latest(slower, 1) if dimension == "cp" else slower


def latest(lanes: Lanes, axis: int) -> Lanes:
    """The largest along one dimension, which stays as one of size 1."""
    if not isinstance(lanes, np.ndarray) or lanes.shape[axis] == 1:
        return lanes
    return lanes.max(axis=axis, keepdims=True)


def plain(lanes: np.ndarray) -> Lanes:
    """A number, if there is one only."""
    return lanes.item() if lanes.size == 1 else lanes
