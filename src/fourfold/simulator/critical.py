"""The critical path of a step: the chain of computations, messages and collectives that determined when it was over.

It is found from the end of the step backwards. When a computation ended was determined by the slowest rank of its TP
group and the CP rank that was waited for, and when a collective of FSDP did by the latest replica; and both began when
the last of what they need had ended: the computation before, a message, the weights. So the path goes over ranks of all
dimensions, never waits, and its seconds sum to the step's: only what is on it can make the step shorter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fourfold.layout import Grid, Kind
from fourfold.layout.actions import COMPUTE, SENDS
from fourfold.simulator.costs import Lanes, Modelled, Pieces
from fourfold.simulator.graph import NONE
from fourfold.simulator.played import Played
from fourfold.simulator.scenario import Scenario

PATH_CLASSES = ("compute", "attention", "tp", "cp", "pp", "dp", "host", "optimizer", "fixed")
"""What a critical path consists of. pp: messages on their way; the rest as in `played.CLASSES`."""

_CLOSE = 1e-12  # relative: the rounding of one addition, with some to spare

Replica = tuple[int, int, int]


class Step(NamedTuple):
    """A stretch of the path on one rank."""

    node: int
    """Its place in the graph; NONE: what follows the pipeline."""
    pp_rank: int  # of a message: the sender
    replica: Replica
    """(dp, cp, tp) of what was simulated."""
    seconds: Mapping[str, float]
    """By class, `PATH_CLASSES`."""

    @property
    def total(self) -> float:
        """Seconds."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class CriticalPath:
    """The steps of the path, first to last. Their seconds sum to the step's."""

    grid: Grid
    steps: tuple[Step, ...]

    @cached_property
    def seconds(self) -> float:
        """All of it."""
        return sum(step.total for step in self.steps)

    @cached_property
    def by_class(self) -> dict[str, float]:
        """Seconds of each class, in the order of `PATH_CLASSES`."""
        out = dict.fromkeys(PATH_CLASSES, 0.0)
        for step in self.steps:
            for name, seconds in step.seconds.items():
                out[name] += seconds
        return out

    @cached_property
    def by_pipeline_rank(self) -> tuple[float, ...]:
        """Share of the path that lies on each pipeline rank, messages on their sender. They sum to 1."""
        out = [0.0] * self.grid.pp
        for step in self.steps:
            out[step.pp_rank] += step.total
        return tuple(seconds / self.seconds for seconds in out)

    @cached_property
    def by_rank(self) -> dict[int, float]:
        """Share of the path that lies on each global rank that it touches, the largest first. They sum to 1."""
        out: dict[int, float] = defaultdict(float)
        for step in self.steps:
            out[self.rank_of(step)] += step.total
        return {rank: out[rank] / self.seconds for rank in sorted(out, key=lambda rank: (-out[rank], rank))}

    def rank_of(self, step: Step) -> int:
        """The global rank of a step. Of replicas that are alike, the first."""
        dp, cp, tp = step.replica
        return self.grid.rank(tp=tp, cp=cp, pp=step.pp_rank, dp=dp)


def critical_path(scenario: Scenario, played: Played) -> CriticalPath:
    """The path of a step that was simulated with `keep`."""
    if not played.end:
        raise ValueError("a critical path needs the start and end of every node; simulate with keep=True")
    return _Walk(scenario, played).run()


class _Walk:
    """From the last event backwards."""

    def __init__(self, scenario: Scenario, played: Played) -> None:
        self.grid, self.played, self.costs = scenario.grid, played, Modelled(scenario)
        self.nodes = played.graph.nodes
        self.steps: list[Step] = []  # last to first
        self.cut = 0.0  # seconds of what comes next that are not on the path: gradients left before it ended

    def run(self) -> CriticalPath:
        i, at = self._last()
        follows = {"optimizer": self.costs.optimizer, "fixed": self.costs.fixed}
        if any(follows.values()):
            self.steps.append(Step(NONE, 0 if i == NONE else self.nodes[i].pp_rank, at, follows))
        while i != NONE:
            kind = self.nodes[i].kind
            back = self._compute if kind in COMPUTE else self._send if kind in SENDS else self._collect
            i, at = back(i, at)
        return CriticalPath(self.grid, tuple(reversed(self.steps)))

    def _last(self) -> tuple[int, Replica]:
        """What ends last, and on which replica."""
        if not self.nodes:
            return NONE, (0, 0, 0)
        done = [i for i, node in enumerate(self.nodes) if node.kind not in SENDS]  # a message is awaited by something
        last = max(done, key=lambda i: float(self.played.end[i].max()))
        return last, _latest_at(self.played.end[last], (0, 0, 0), (0, 1, 2))

    def _emit(self, i: int, at: Replica, seconds: Mapping[str, float]) -> None:
        """Puts a stretch on the path, less what is to be cut."""
        total = sum(seconds.values())
        if total <= 0:
            return
        gone = min(self.cut, total)
        self.cut -= gone
        if gone == total:
            return
        kept = {name: value * (total - gone) / total for name, value in seconds.items() if value}
        last = self.steps[-1] if self.steps else None
        if last is not None and (last.node, last.replica) == (i, at):
            self.steps.pop()
            kept = {name: kept.get(name, 0.0) + last.seconds.get(name, 0.0) for name in {**last.seconds, **kept}}
        self.steps.append(Step(i, self.nodes[i].pp_rank, at, kept))

    def _compute(self, i: int, at: Replica) -> tuple[int, Replica]:
        """A computation: what its end was determined by, and what its start."""
        node, end = self.nodes[i], self._end(i, at)
        pieces = self.costs.pieces(node)
        if node.gate != NONE and self.played.graph.schedule.zero < 3:
            weights = self._end(node.gate, at)
            if weights + value(pieces.one_layer, at) >= end * (1 - _CLOSE):  # the last layer waited for its own
                self._last_layer(i, at, pieces)
                return node.gate, at
        stretches, begun = inside(pieces, self.played.start[i], at)
        slowed = end - self._start(i, begun) - sum(sum(seconds.values()) for _, seconds in stretches)
        if slowed > _CLOSE * end:
            self._emit(i, at, {"dp": slowed})
        for replica, seconds in stretches:
            self._emit(i, replica, seconds)
        self._emit(i, begun, {"host": value(self.costs.host(node), begun)})
        return self._before(i, begun)

    def _last_layer(self, i: int, at: Replica, pieces: Pieces) -> None:
        if not pieces.number:
            return
        slowest = _latest_at(_whole(pieces.own, self.played), at, (2,))
        compute, attention = pieces.layer.compute * value(pieces.slower, slowest), value(pieces.attention, slowest)
        self._emit(
            i,
            slowest,
            {"compute": compute, "attention": attention, "tp": value(pieces.tp, at), "dp": pieces.layer.dp}
            | {"cp": value(pieces.cp, at)},
        )

    def _before(self, i: int, at: Replica) -> tuple[int, Replica]:
        """What a computation began after."""
        node = self.nodes[i]
        ready = [(self._end(other, at), other) for other in (node.before, node.needs) if other != NONE]
        when, latest = max(ready, default=(0.0, NONE), key=lambda pair: pair[0])
        if node.gate == NONE:
            return latest, at
        begun = self._start(node.gate, at)
        alone = self.costs.hidden if node.before == NONE else 1.0
        first = alone * (self._end(node.gate, at) - begun) / max(self.costs.layers(node.stage), 1)
        if begun + first <= when:
            return latest, at
        self._emit(node.gate, at, {"dp": first})
        return self._joined(node.gate, at)

    def _send(self, i: int, at: Replica) -> tuple[int, Replica]:
        node = self.nodes[i]
        self._emit(i, at, {"pp": value(self.costs.message(node), at)})
        return max((node.needs, *node.after), key=lambda other: self._end(other, at)), at

    def _collect(self, i: int, at: Replica) -> tuple[int, Replica]:
        node = self.nodes[i]
        seconds = value(self.costs.collective(node), at) / self.costs.hidden
        if node.kind is Kind.REDUCE and self._end(i, at) > (self._start(i, at) + seconds) * (1 + _CLOSE):
            # The gradients of the first layer leave last, alone, after a backward that the others' have slowed.
            latest = _latest_at(self.played.end[node.needs], at, (0, 1))
            self._emit(i, at, {"dp": self._end(i, at) - self._end(node.needs, latest)})
            return node.needs, latest
        self._emit(i, at, {"dp": self._end(i, at) - self._start(i, at)})
        return self._joined(i, at)

    def _joined(self, i: int, at: Replica) -> tuple[int, Replica]:
        """What a collective of FSDP began after, on the last of the ranks that share the weights."""
        node = self.nodes[i]
        line, on_line, when = NONE, at, 0.0
        if node.after:
            line = node.after[0]
            on_line = _latest_at(self.played.end[line], at, (0, 1))
            when = self._end(line, on_line)
        if node.needs != NONE:
            pieces = self.costs.pieces(self.nodes[node.needs])
            early = pieces.number - 1 if node.kind is Kind.REDUCE else 0
            left = max(early, 0) * pieces.one_layer
            leaves = self.played.end[node.needs] - left
            latest = _latest_at(leaves, at, (0, 1))
            if float(leaves[latest]) > when:
                self.cut += value(left, latest)
                return node.needs, latest
        return line, on_line

    def _end(self, i: int, at: Replica) -> float:
        return float(self.played.end[i][at])

    def _start(self, i: int, at: Replica) -> float:
        return float(self.played.start[i][at])


def inside(pieces: Pieces, start: np.ndarray, at: Replica) -> tuple[list[tuple[Replica, dict[str, float]]], Replica]:
    """What determined the end of a computation on one replica, from its end back to its start.

    Layer by layer: CP's ranks go on when the last has come, and so do TP's at the layer's end.

    Returns:
        Stretches (replica, seconds by class), last to first, and the replica whose start counted.
    """
    if pieces.alone:
        busy = pieces.ends * value(pieces.slower, at) + pieces.number * value(pieces.own, at)
        return [(at, {"compute": busy})], at
    dp, cp, _ = at
    shape, layer = start.shape, pieces.layer

    def of_group(lanes: Lanes) -> np.ndarray:
        return np.broadcast_to(lanes, shape)[dp]  # [cp, tp]

    slower, attention, wire, meeting = map(of_group, (pieces.slower, pieces.attention, pieces.tp, pieces.cp))
    before = layer.before * slower
    rest = (layer.compute - layer.before) * slower + attention
    reached = (start[dp].max(axis=1) + pieces.ends * slower.max(axis=1))[:, None]
    passed = []  # per layer: when each rank has come to CP's meeting, and when it has done what follows
    for _ in range(pieces.number):
        arrived = reached + before
        done = arrived.max(axis=0) + meeting + rest
        passed.append((arrived, done))
        reached = done.max(axis=1)[:, None] + wire + layer.dp
    stretches: list[tuple[Replica, dict[str, float]]] = []
    for arrived, done in reversed(passed):
        tp = int(done[cp].argmax())
        stretches += [
            (
                (dp, cp, tp),
                {
                    "compute": float((layer.compute - layer.before) * slower[cp, tp]),
                    "attention": float(attention[cp, tp]),
                    "tp": float(wire[cp, tp]),
                    "dp": layer.dp,
                },
            ),
            ((dp, cp, tp), {"cp": float(meeting[cp, tp])}),
        ]
        cp = int(arrived[:, tp].argmax())
        stretches.append(((dp, cp, tp), {"compute": float(before[cp, tp])}))
    tp = int(slower[cp].argmax())
    if pieces.ends:
        stretches.append(((dp, cp, tp), {"compute": float(pieces.ends * slower[cp, tp])}))
    return stretches, (dp, cp, int(start[dp, cp].argmax()))


def _whole(lanes: Lanes, played: Played) -> np.ndarray:
    return np.broadcast_to(lanes, (played.lanes.dp, played.lanes.cp, played.lanes.tp))


def value(lanes: Lanes, at: Replica) -> float:
    """Of one replica; along a dimension in which all are alike, there may be but one."""
    if not isinstance(lanes, np.ndarray) or not lanes.ndim:
        return float(lanes)
    return float(lanes[tuple(i if size > 1 else 0 for i, size in zip(at, lanes.shape, strict=True))])


def _latest_at(lanes: np.ndarray, at: Replica, axes: tuple[int, ...]) -> Replica:
    """Where the largest is, along some dimensions from one replica on."""
    view = lanes[tuple(slice(None) if axis in axes else i for axis, i in enumerate(at))]
    found = iter(np.unravel_index(int(view.argmax()), view.shape))
    dp, cp, tp = (int(next(found)) if axis in axes else i for axis, i in enumerate(at))
    return dp, cp, tp
