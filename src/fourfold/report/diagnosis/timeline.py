"""The timelines of the ranks around the culprit in one step, with their clocks aligned."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from fourfold.debugger.reading.trace import MESSAGES, Call
from fourfold.debugger.slow.chain import Chains
from fourfold.debugger.slow.diagnosis import Diagnosis
from fourfold.debugger.slow.idle import RankSteps
from fourfold.layout.actions import COMPUTE
from fourfold.report import drawing
from fourfold.report.diagnosis.around import around, centre, culprit_ranks
from fourfold.report.diagnosis.rows import Box, Gap, Rows
from fourfold.report.diagnosis.waits import call_words, rank_words, way_sentence, why_words

_MOST_BOXES = 40_000  # of all rows: of more, the shortest waits and calls are not shown
_KINDS = {"tp": "TP", "cp": "CP", "pp": "PP"}
_ACTIONS = frozenset(kind.value for kind in COMPUTE)


def trace_timeline(found: Diagnosis, chains: Chains, step: int) -> drawing.Timeline | None:
    """A row per rank; None if no rank has the step."""
    grid = found.accounts.grid
    shown = around(grid, centre(found), chains.ranks)
    if not shown:
        return None
    culprits = culprit_ranks(found)
    windows = {rank: chains.window(rank) for rank, _ in shown}
    zero = min(begin for begin, _ in windows.values())
    traces = {one.trace.rank: one for one in found.traces}
    least = _shortest_shown([chains.stretches(rank).end - chains.stretches(rank).start for rank, _ in shown])
    clock = dict(zip(found.ranks, found.clocks.offset.tolist(), strict=True)) if found.clocks is not None else {}
    rows, labels = Rows(), []
    for row, (rank, relation) in enumerate(shown):
        lane = _Lane(traces[rank], chains, found.device, clock.get(rank, 0), zero, least)
        rows.add(row, lane.boxes(), lane.gaps(), begin=(windows[rank][0] - zero) / 1e9)
        rows.add_lanes(row, lane.calls())
        what = "culprit" if rank in culprits else relation
        labels.append(drawing.rank_label(grid, rank) + (f", {what}" if what else ""))
    span = (max(end for _, end in windows.values()) - zero) / 1e9
    return rows.timeline(f"Step {step}: {_title(found, len(shown))}", labels, pp=grid.pp, span=span)


def _title(found: Diagnosis, shown: int) -> str:
    ranks = centre(found)
    if shown >= len(found.ranks):
        return "all ranks"
    return f"rank {ranks[0]} and those around it" if len(ranks) == 1 else "the ranks to blame and those around them"


def _shortest_shown(lengths: Sequence[np.ndarray]) -> int:
    """Nanoseconds below which a stretch is left out, so that no more boxes are drawn than a page can hold."""
    together = np.concatenate([*lengths, np.zeros(0, dtype=np.int64)])
    if len(together) <= _MOST_BOXES:
        return 0
    return int(np.partition(together, -_MOST_BOXES)[-_MOST_BOXES])


class _Lane:
    """One rank."""

    def __init__(self, one: RankSteps, chains: Chains, device: str, offset: int, zero: int, least: int) -> None:
        self._one, self._chains, self._device, self._least = one, chains, device, least
        self._rank = one.trace.rank
        self._shift = offset - zero  # from the rank's clock to the page's
        self._zero = zero
        self._begin, self._end = chains.window(self._rank)
        self._what = chains.stretches(self._rank)

    def _seconds(self, aligned: int) -> float:
        return (aligned - self._zero) / 1e9

    def gaps(self) -> list[Gap]:
        """What it waits for, and pauses of its host."""
        out = []
        waits, moves = self._what.waits, self._what.moves
        for i, (start, end) in enumerate(zip(self._what.start.tolist(), self._what.end.tolist(), strict=True)):
            if moves[i] or end - start < self._least:
                continue
            if waits[i]:
                kind = Call(int(self._one.trace.calls.kind[self._what.call[i]]))
                cause = way_sentence(self._chains.way(self._rank, i), kind, self._device)
            else:
                why = why_words(self._what.pause(i), self._device)
                cause = f"Nothing runs: the rank {why}." if self._device == "gpu" else f"The rank {why}."
            out.append(Gap(self._seconds(start), self._seconds(end), cause))
        return out

    def boxes(self) -> Iterator[Box]:
        """What it does: computations as far as labels tell, and transfers outside of them."""
        labels = self._labels()
        starts = [label[3] for label in labels]
        edges = sorted({edge for label in labels for edge in label[3:]})
        for begin, end in self._busy():
            at = begin
            for until in (*edges[bisect_right(edges, begin) : bisect_left(edges, end)], end):
                place = bisect_right(starts, at) - 1
                yield from self._between(at, until, labels[place] if place >= 0 else None)
                at = until

    def _between(self, begin: int, end: int, label: tuple[str, int, int, int, int] | None) -> Iterator[Box]:
        """A stretch without waiting, and without the edge of a label inside. `label`: the last that has begun."""
        if label is not None and end <= label[4]:
            yield Box(*label[:3], self._seconds(begin), self._seconds(end))
            return
        at = begin
        for first, last, kind in self._moving(begin, end):
            if first > at:
                yield Box("WORK", -1, -1, self._seconds(at), self._seconds(first))
            yield Box(kind, -1, -1, self._seconds(first), self._seconds(last))
            at = last
        if end > at:
            yield Box("WORK", -1, -1, self._seconds(at), self._seconds(end))

    def _busy(self) -> Iterator[tuple[int, int]]:
        """Where it neither waits nor is kept by its host."""
        at = self._begin
        moves = self._what.moves
        for i, (start, end) in enumerate(zip(self._what.start.tolist(), self._what.end.tolist(), strict=True)):
            if moves[i] or end - start < self._least:
                continue
            if start > at:
                yield at, start
            at = max(at, end)
        if self._end > at:
            yield at, self._end

    def _moving(self, begin: int, end: int) -> Iterator[tuple[int, int, str]]:
        """Transfers between two moments, with their kinds."""
        what = self._what
        first = int(np.searchsorted(what.end, begin, side="right"))
        for i in range(first, int(np.searchsorted(what.start, end, side="left"))):
            if what.moves[i]:
                kind = _KINDS.get(self._chains.dimension(self._rank, int(what.call[i])), "DP")
                yield max(int(what.start[i]), begin), min(int(what.end[i]), end), kind

    def _labels(self) -> list[tuple[str, int, int, int, int]]:
        """Kind, stage, micro-batch, start and end of the computations of the step."""
        labels = self._one.trace.labels
        start, end = labels.start + (self._shift + self._zero), labels.end + (self._shift + self._zero)
        on_device = bool(labels.on_device.any())
        inside = (labels.on_device == on_device) & (start >= self._begin) & (end <= self._end)
        found = [
            (labels.kind[i], int(labels.stage[i]), int(labels.micro_batch[i]), int(start[i]), int(end[i]))
            for i in np.flatnonzero(inside).tolist()
            if labels.kind[i] in _ACTIONS and labels.micro_batch[i] >= 0
        ]
        return sorted(found, key=lambda label: label[3])

    def calls(self) -> Iterator[Box]:
        """Its collectives, from when it comes to each; messages where they arrive, as long as they are on their way."""
        calls = self._one.trace.calls
        start, end = calls.start + self._shift, calls.end + self._shift
        begin, until = self._begin - self._zero, self._end - self._zero
        for i in np.flatnonzero((end > begin) & (start < until) & (end - start >= self._least)).tolist():
            kind, dimension = Call(int(calls.kind[i])), self._chains.dimension(self._rank, i)
            if kind == Call.SEND:
                continue
            awaited = self._chains.awaited(self._rank, i)
            what = "A message" if kind in MESSAGES else call_words(dimension, (kind,))
            if kind in MESSAGES:
                cause = f"{what} from {rank_words(awaited)}."
            elif awaited < 0:
                cause = f"{what[0].upper()}{what[1:]}: this rank is the last to come."
            else:
                cause = f"{what[0].upper()}{what[1:]}: {rank_words(awaited)} is the last to come."
            came = int(end[i]) - self._chains.transfer(self._rank, i) if kind in MESSAGES else int(start[i])
            first, last = max(came, begin), min(int(end[i]), until)
            yield Box(_KINDS.get(dimension, "DP"), -1, -1, first / 1e9, last / 1e9, cause)
