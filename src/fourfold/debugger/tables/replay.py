"""Steps of an operation table played again, with measured or with ideal durations.

What-if analysis as in the study of stragglers (Lin et al., OSDI'25): an operation's ideal duration is that of its
peers, one number for all operations of a name in the job. For what a worker computes that is their mean, as a job in
which work is spread evenly would have it; for communication the median of the transfer itself, since single transfers
can take arbitrarily long. T is a step's time when only waits are left out of the measured durations, T_ideal when all
durations are ideal; T / T_ideal is the slow-down, and with only some of the durations measured, what those cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.tables.kinds import COMPUTED, role
from fourfold.debugger.tables.program import Program
from fourfold.debugger.tables.table import Seconds

_BLOCK = 16_000_000
"""Ends of operations that are kept at a time: 128 MB."""

Durations = Callable[[int], Seconds]
"""Of an operation, by its place: [scenario, replica, step]."""


def play(program: Program, durations: Durations) -> Seconds:
    """Step times, [scenario, step]: every meeting begins once all that its members need has ended."""
    ends: list[Seconds | None] = [None] * len(program.operations)
    over: Seconds | None = None
    for meeting in program.meetings:
        begin: Seconds | None = None
        for i in meeting.needs:
            ended = ends[i]
            assert ended is not None
            begin = ended if begin is None else np.maximum(begin, ended)
        if begin is not None and meeting.over_replicas:
            begin = begin.max(axis=1, keepdims=True)
        for i in meeting.members:
            end = ends[i] = durations(i) if begin is None else begin + durations(i)
            if i in program.last:
                over = end.max(axis=1) if over is None else np.maximum(over, end.max(axis=1))
    assert over is not None
    return over


def ideals(program: Program, own: Seconds) -> Seconds:
    """The ideal duration of each operation, one for all of its name."""
    names = np.array([o.name for o in program.operations])
    out = np.empty(len(names))
    for name in np.unique(names):
        peers = names == name
        out[peers] = own[peers].mean() if role(str(name)) in COMPUTED else np.median(own[peers])
    return out


@dataclass(frozen=True)
class Kept:
    """Which durations of a scenario are as measured; all others are ideal."""

    operations: NDArray[np.bool_]
    """[operation]."""
    workers: NDArray[np.bool_]
    """[stage, replica, step], where 1 stands for all."""
    inverse: bool = False
    """Whether just those are ideal, and all others measured."""


@dataclass(frozen=True)
class Replayer:
    """A table's program with its durations."""

    program: Program
    pp: int
    own: Seconds
    """[operation, replica, step]: without waits."""
    ideal: Seconds
    """[operation]."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of replicas and steps."""
        return self.own.shape[1], self.own.shape[2]

    def everything(self, *, own: Seconds | None = None) -> Seconds:
        """Step times with all durations as measured, or with other ones."""
        taken = self.own if own is None else own
        return play(self.program, lambda i: taken[i][None])[0]

    def ideal_seconds(self) -> float:
        """The time of a step in which all durations are ideal."""
        return float(play(self.program, lambda i: self.ideal[i].reshape(1, 1, 1))[0, 0])

    def scenarios(self, kept: list[Kept]) -> Seconds:
        """Step times, [scenario, step]."""
        out = [np.zeros((0, self.shape[1]))]
        for part in self._blocks(len(kept), self.shape[0]):
            out.append(self._scenarios(kept[part]))
        return np.concatenate(out)

    def _scenarios(self, kept: list[Kept]) -> Seconds:
        stage = [o.stage for o in self.program.operations]
        full = (self.pp, *self.shape)
        workers = np.stack([np.broadcast_to(k.workers, full) for k in kept])
        operations = np.stack([k.operations for k in kept])
        inverse = np.array([k.inverse for k in kept])

        def durations(i: int) -> Seconds:
            measured = (workers[:, stage[i]] & operations[:, i, None, None]) != inverse[:, None, None]
            return np.where(measured, self.own[i], self.ideal[i])

        return play(self.program, durations)

    def alone(self, replicas: NDArray[np.int64], stages: NDArray[np.int64] | None = None) -> Seconds:
        """Step times, [scenario, step], in each of which one replica, or one stage of it, is as measured.

        All other replicas are alike then: one of them stands for all.
        """
        out = [np.zeros((0, self.shape[1]))]
        for part in self._blocks(len(replicas), 2):
            out.append(self._alone(replicas[part], None if stages is None else stages[part]))
        return np.concatenate(out)

    def _alone(self, replicas: NDArray[np.int64], stages: NDArray[np.int64] | None) -> Seconds:
        lanes = min(self.shape[0], 2)
        everywhere = np.arange(len(replicas))
        chosen = [everywhere if stages is None else np.flatnonzero(stages == stage) for stage in range(self.pp)]

        def durations(i: int) -> Seconds:
            at = chosen[self.program.operations[i].stage]
            seconds = np.full((len(replicas), lanes, self.shape[1]), self.ideal[i])
            seconds[at, 0] = self.own[i, replicas[at]]
            return seconds

        return play(self.program, durations)

    def _blocks(self, scenarios: int, lanes: int) -> Iterator[slice]:
        """Scenarios that are played together."""
        each = len(self.program.operations) * lanes * self.shape[1]
        size = max(1, _BLOCK // each)
        for start in range(0, scenarios, size):
            yield slice(start, start + size)
