"""Where ranks stand: the layout of a job, as far as its files tell it, and which dimension a group is of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fourfold.debugger.reading.trace import MESSAGES, Group, RankTrace
from fourfold.layout import Grid
from fourfold.layout.grid import DIMENSIONS

_SPANS: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "fsdp": ("cp", "dp"),
    "dp": ("dp",),
    "world": ("tp", "cp", "pp", "dp"),
}
"""Dimensions that groups run along, the most specific first: of a group that is alike in two, the first counts."""


@dataclass(frozen=True)
class Layout:
    """The layout of a job.

    Attributes:
        grid: sizes.
        source: where they come from: "given", "traces" (written there), "groups" (inferred), "run.json" or "none".
        note: what a reader should know of it; empty if nothing.
    """

    grid: Grid
    source: str
    note: str = ""


def parse_layout(text: str) -> Grid:
    """tp=2,cp=2,pp=2,dp=2 as a person writes it; what is left out is 1. ValueError with the rule."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if name not in DIMENSIONS or not sign or not value.isdecimal() or int(value) < 1:
            raise ValueError(
                f"--layout {text}: {part.strip()!r} must be tp, cp, pp or dp and its size, as in tp=2,pp=4"
            )
        if name in sizes:
            raise ValueError(f"--layout {text}: {name} is given twice")
        sizes[name] = int(value)
    return Grid(**sizes)


def layout_of(traces: Sequence[RankTrace], given: Grid | None) -> Layout:
    """The layout of the job that these ranks are of.

    Raises:
        ValueError: the layout that is given has fewer ranks than the traces, or not as many as they say.
    """
    world = max(*(trace.world_size for trace in traces), *(trace.rank + 1 for trace in traces), 1)
    sizes = sorted({trace.world_size for trace in traces if trace.world_size})
    if len(sizes) > 1:
        raise ValueError(f"these traces are of jobs with {sizes[0]} and with {sizes[-1]} ranks; give one job's")
    written = {trace.grid for trace in traces if trace.grid is not None}
    if given is not None:
        if given.size != world:
            told = any(trace.world_size for trace in traces)
            seen = f"the traces are of {world} ranks" if told else f"there is a trace of rank {world - 1}"
            if told or given.size < world:
                raise ValueError(f"--layout: {_named(given)} are {given.size} ranks, but {seen}")
        contradicted = [grid for grid in written if grid != given]
        note = f"--layout counts, though the traces say {_named(contradicted[0])}" if contradicted else ""
        return Layout(given, "given", note)
    if len(written) > 1:
        a, b = sorted(map(_named, written))[:2]
        raise ValueError(f"these traces are of runs with different layouts: {a}; {b}. Give one run's")
    if written:
        grid = written.pop()
        if grid.size < world:
            raise ValueError(f"the traces say {_named(grid)}, {grid.size} ranks, but there is a rank {world - 1}")
        return Layout(grid, "traces")
    groups = {group.ranks: group for trace in traces for group in trace.groups if group.ranks and len(group.ranks) > 1}
    if not groups:
        note = "groups are not in the traces: all ranks count as replicas; --layout helps"
        return Layout(Grid(dp=world), "none", note if world > 1 else "")
    return _inferred(groups, _channels(traces), world)


def _named(grid: Grid) -> str:
    return f"tp={grid.tp} cp={grid.cp} pp={grid.pp} dp={grid.dp}"


def _channels(traces: Iterable[RankTrace]) -> set[tuple[int, int]]:
    """Pairs of ranks between which messages go, the smaller first."""
    pairs: set[tuple[int, int]] = set()
    for trace in traces:
        calls = trace.calls
        messages = np.isin(calls.kind, MESSAGES)
        ends = np.unique(np.stack([calls.peer[messages], calls.group[messages]], axis=1), axis=0)
        for peer, group in ends.tolist():
            ranks = trace.groups[group].ranks if group >= 0 else None
            if peer < 0 and ranks is not None and len(ranks) == 2:
                peer = ranks[0] + ranks[1] - trace.rank
            if peer >= 0:
                pairs.add((min(peer, trace.rank), max(peer, trace.rank)))
    return pairs


def _inferred(groups: Mapping[tuple[int, ...], Group], channels: set[tuple[int, int]], world: int) -> Layout:
    """From what groups are called where that names a dimension, else from the strides of their ranks.

    Messages go to the next stage, so their smallest stride is the number of ranks inside of a stage.
    """
    shapes: dict[tuple[int, int], str] = {}  # (stride, size) -> description
    for ranks, group in groups.items():
        stride = ranks[1] - ranks[0]
        if len(ranks) < world and all(b - a == stride for a, b in pairwise(ranks)):
            shapes.setdefault((stride, len(ranks)), group.description)
    named = {name: shape for shape, description in sorted(shapes.items()) if (name := _name(description))}
    nameless = [shape for shape, description in shapes.items() if _name(description) is None]
    strides = {high - low for low, high in channels}
    inside = min(strides, default=0) or named.get("pp", (0, 0))[0]  # ranks of a stage, of one replica
    tp = named["tp"][1] if "tp" in named else _innermost(nameless, strides, inside)
    cp = named["cp"][1] if "cp" in named else 1
    if inside:
        pp = _stages(channels, inside) if channels else named["pp"][1]
        cp = inside // tp
    else:
        pp = 1
        next_out = [size for stride, size in nameless if stride == tp and tp * size < world]
        if "cp" not in named and len(next_out) > 1:
            cp = min(next_out)
    if tp * cp * pp == 0 or world % (tp * cp * pp) or (inside and inside % tp):
        return Layout(Grid(dp=world), "none", "the groups in the traces make no layout; --layout helps")
    grid = Grid(tp=tp, cp=cp, pp=pp, dp=world // (tp * cp * pp))
    note = f"the layout was inferred from the groups: {_named(grid)}"
    if cp > 1 and _name(shapes.get((tp, cp), "")) == "dp":
        note += "; what is called cp is data parallel, which lies inside of the pipeline here"
    return Layout(grid, "groups", note)


def _name(description: str) -> str | None:
    """The dimension that a description names, as in mesh_tp or TENSOR_MODEL_PARALLEL_GROUP."""
    words = {*description.lower().replace("-", "_").split("_")}
    named = (
        ("dp", {"dp", "data", "fsdp"}),
        ("tp", {"tp", "tensor"}),
        ("cp", {"cp", "context"}),
        ("pp", {"pp", "pipeline"}),
    )
    return next((name for name, any_of in named if words & any_of), None)


def _innermost(shapes: Iterable[tuple[int, int]], strides: set[int], inside: int) -> int:
    """The size of the groups of neighbouring ranks, which are TP's; 1 if there are none.

    Two neighbours between which messages go may be the ends of a channel.
    """
    sizes = [size for stride, size in shapes if stride == 1 and not (size == 2 and 1 in strides)]
    return min((size for size in sizes if not inside or inside % size == 0), default=1)


def _stages(channels: set[tuple[int, int]], stride: int) -> int:
    """Ranks on one chain of channels."""
    start = min(low for low, _ in channels)
    low, number = start, 1
    while (low, low + stride) in channels:
        low, number = low + stride, number + 1
    return number


class Places:
    """Which dimension each group of ranks is of."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._known: dict[tuple[int, ...], str] = {}

    def dimension(self, ranks: tuple[int, ...]) -> str:
        """tp, cp, pp, dp, fsdp (dp x cp), world; "other" if the layout has no such group."""
        if ranks not in self._known:
            self._known[ranks] = self._find(ranks)
        return self._known[ranks]

    def _find(self, ranks: tuple[int, ...]) -> str:
        if len(ranks) == self.grid.size:
            along = [d for d in ("tp", "cp", "pp", "dp") if getattr(self.grid, d) == self.grid.size]
            return along[0] if along else "world"
        if ranks[-1] < self.grid.size:
            for name, dims in _SPANS.items():
                if self.grid.group_of(ranks[0], *dims) == ranks:
                    return name
        return "other"

    def complete(self, group: Group, rank: int) -> tuple[int, ...] | None:
        """All ranks of a group of which a trace has but the first, or no more than a description."""
        if group.ranks is not None:
            return group.ranks
        words = group.description.lower().replace("-", "_").split("_")
        for name, dims in sorted(_SPANS.items(), key=lambda item: item[0] not in words):
            ranks = self.grid.group_of(rank, *dims)
            told = name in words or (name == "world" and group.description == "default_pg")
            if group.first and ranks[: len(group.first)] == group.first and group.size in (0, len(ranks)):
                return ranks
            if not group.first and told and group.size in (0, len(ranks)):
                return ranks
        return None
