"""What a rank does inside of one computation, layer by layer: kernels, and the collectives in which TP's and CP's ranks
meet, as the engine assumes them.

A layer is: TP's all-gather, what lies before CP's collective, that collective, attention, TP's reduce-scatter after the
layer's first half and its all-gather before the second, the rest of the layer, and TP's reduce-scatter. A collective of
a rank begins when the rank has come to it and ends for all of its group together. Backward has the same order with CP's
reduce-scatter: the engine knows what lies before it, not in which half.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fourfold.layout import Grid, Kind
from fourfold.simulator.costs import Lanes, Modelled, Pieces, latest
from fourfold.simulator.graph import NONE
from fourfold.simulator.played import Played

_CLOSE = 1e-12  # relative: the rounding of a few additions


class Segment(NamedTuple):
    """A stretch of one computation. Seconds of each replica."""

    what: str
    """ "matmul" or "attention"; or of a collective the dimension, "tp" or "cp"."""
    kind: str
    """Of a collective: "all_gather" or "reduce_scatter"."""
    start: Lanes
    end: Lanes


def segments(costs: Modelled, grid: Grid, played: Played, i: int) -> list[Segment]:
    """The computation at place `i` of the graph, in order.

    Between its start and its end there is no other gap than where layers wait for ZeRO's weights.
    """
    return _Layers(costs, grid, played, i).run()


class _Layers:
    """Walks through the layers of one computation."""

    def __init__(self, costs: Modelled, grid: Grid, played: Played, i: int) -> None:
        node = played.graph.nodes[i]
        self.start, self.end = played.start[i], played.end[i]
        self.pieces: Pieces = costs.pieces(node)
        self.tp, self.cp = (extent > 1 and not self.pieces.alone for extent in (grid.tp, grid.cp))
        self.cp_kind = "all_gather" if node.kind is Kind.FORWARD else "reduce_scatter"
        self.out: list[Segment] = []
        did = costs.computation(node, self.start)
        self.extra = np.maximum(self.end - did.end, 0.0)  # which FSDP's collectives cost
        self.held = node.gate != NONE and bool(
            np.all(played.end[node.gate] + did.layer >= self.end * (1 - _CLOSE))
        )  # the last layer waited for its weights; else all were slowed

    def run(self) -> list[Segment]:
        pieces, number = self.pieces, self.pieces.number
        at = self.start + pieces.ends * pieces.slower
        self._add("matmul", "", self.start, at, healthy=pieces.ends)
        if not number:
            if self.tp:
                self._add("tp", "all_gather", at, self.end)
            elif self.out:
                self.out[-1] = self.out[-1]._replace(end=at + self.extra)
            return self.out
        # The engine has all of a layer's transfers after its meeting of CP's ranks. The first all-gather comes before
        # that: it takes what the fastest of CP's ranks needs for it, and the last layer's three that much less.
        first: Lanes = 0.0
        if self.tp:
            joined = latest(self.start, 2) + pieces.ends * latest(pieces.slower, 2)
            first = _earliest(pieces.tp, 1) / 4
            self._add("tp", "all_gather", at, joined + first)
            at = joined + first
        common = self.extra.min(axis=2, keepdims=True)  # TP's ranks end together
        each = 0.0 if self.held else common.min(axis=1, keepdims=True) / number
        for _ in range(number - 1):
            at = self._layer(at, each, 0.0, pieces.tp / 4, is_last=False)
        rest = common - number * each
        last = (pieces.tp - first) / 3
        self._layer(at, each + (0.0 if self.held else rest), rest if self.held else 0.0, last, is_last=True)
        return self.out

    def _layer(self, at: Lanes, slowed: Lanes, held: Lanes, transfer: Lanes, *, is_last: bool) -> Lanes:
        """One layer from when its TP ranks have gathered. When they will have gathered for the next.

        `slowed` lengthens its products, `held` is waited before its second half, `transfer` is of one TP collective.
        """
        pieces, layer = self.pieces, self.pieces.layer
        met = arrived = at + layer.before * pieces.slower
        self._add("matmul", "", at, arrived, healthy=layer.before)
        if self.cp:
            met = latest(arrived, 1) + pieces.cp
            self._add("cp", self.cp_kind, arrived, met)
        seen = met + pieces.attention
        self._add("attention", "", met, seen, healthy=layer.attention)
        rest = (layer.compute - layer.before) * pieces.slower
        out = min(layer.before, 0.5 * (layer.compute - layer.before))  # the product out of attention
        first = out * pieces.slower
        if not self.tp:
            finish = seen + rest + held + slowed
            halfway = seen + first
            self._add("matmul", "", seen, halfway, healthy=out)
            self._add("matmul", "", halfway + held, np.minimum(finish, self._last_end()), healthy=layer.compute)
            return finish + layer.dp
        done = latest(seen + rest, 2)
        # The engine lets TP's ranks meet at the end of the layer. Where one is late and another slow, the meeting
        # halfway is put where all can be in time for that.
        halfway = np.minimum(latest(seen + first, 2), done - latest(rest - first, 2))
        halfway = np.maximum(halfway, latest(seen, 2))
        first = np.clip(first, rest - (done - halfway), halfway - seen)
        self._add("matmul", "", seen, seen + first, healthy=layer.compute)
        self._add("tp", "reduce_scatter", seen + first, halfway + transfer)
        self._add("tp", "all_gather", halfway + transfer, halfway + 2 * transfer)
        second = halfway + 2 * transfer + held
        computed = second + (rest - first) + slowed
        done = done + 2 * transfer + held + slowed
        self._add("matmul", "", second, computed, healthy=layer.compute)
        if is_last:
            self._add("tp", "reduce_scatter", computed, self._last_end())
            return self.end
        self._add("tp", "reduce_scatter", computed, done + transfer)
        gathers = done + transfer + layer.dp
        self._add("tp", "all_gather", gathers, gathers + transfer)
        return gathers + transfer

    def _last_end(self) -> Lanes:
        """When the last layer has done all but to wait for ZeRO's weights: the end, without an error of rounding."""
        common = self.extra.min(axis=2, keepdims=True)
        return self.end - (self.extra - common) - self.pieces.layer.dp

    def _add(self, what: str, kind: str, start: Lanes, end: Lanes, *, healthy: float = 1.0) -> None:
        """`healthy`: seconds on a healthy rank; there is no kernel of nothing."""
        if healthy > 0:
            self.out.append(Segment(what, kind, start, end))


def _earliest(lanes: Lanes, axis: int) -> Lanes:
    return lanes.min(axis=axis, keepdims=True) if isinstance(lanes, np.ndarray) else lanes
