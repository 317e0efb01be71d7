"""What slow workers, stages, operations and uneven sequences cost a job, by replays of its operation table.

Every number is a comparison of two replays (`replay.py`): the slow-down that some durations cause is T / T_ideal with
only these as measured, and the share that they explain is the part of T - T_ideal that goes away when only these are
ideal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.tables.kinds import COMPUTATIONS, Role, kind, role
from fourfold.debugger.tables.program import compile_program, transfers
from fourfold.debugger.tables.replay import Kept, Replayer, ideals
from fourfold.debugger.tables.table import Operation, Seconds, Table

Key = TypeVar("Key", int, str)

WORST = 0.03
"""The part of all workers that `worst_workers_share` is about."""
SUSPECTS = 8
"""At most so many workers are tried as culprits."""


class Worker(NamedTuple):
    """A TP x CP group of ranks, one row of a table's grid."""

    dp_rank: int
    stage: int


@dataclass(frozen=True)
class Removal:
    """What becomes of the job when some durations are made ideal."""

    seconds: float
    """A step's, on average."""
    share: float
    """Of the excess T - T_ideal, how much goes away. More than 1, or less than 0: ideal is not fastest for them."""


@dataclass(frozen=True)
class TableAnalysis:
    """The answers of the study to a job. Slow-downs are ratios to the ideal step; seconds are means over steps."""

    table: Table
    step_seconds: Seconds = field(repr=False)
    """Measured, per step."""
    replayed_seconds: Seconds = field(repr=False)
    """T per step: without the gaps in which no operation of the table was at work."""
    ideal_seconds: float
    """T_ideal of a step."""
    slowdown: float
    """S = T / T_ideal."""
    launch_slowdown: float
    """The measured time over T: what gaps cost."""
    by_replica: Mapping[int, float]
    """S with only one `dp_rank` as measured."""
    by_stage: Mapping[int, float]
    by_kind: Mapping[str, float]
    """By operation type; both ends of a message are one."""
    by_replica_per_step: Mapping[int, Seconds] = field(repr=False)
    by_stage_per_step: Mapping[int, Seconds] = field(repr=False)
    by_kind_per_step: Mapping[str, Seconds] = field(repr=False)
    by_worker: Mapping[Worker, float]
    by_worker_per_step: Mapping[Worker, Seconds] = field(repr=False)
    worst_workers: tuple[Worker, ...]
    """The `WORST` part of workers, at least one."""
    without_worst_workers: Removal
    """M_W is its share."""
    without_last_stage: Removal
    """M_S is its share."""
    without_stage: Mapping[int, Removal]
    without_kind: Mapping[str, Removal]
    suspects: tuple[Worker, ...]
    """Workers by their own slow-down, largest first."""
    without_suspects: tuple[Removal, ...]
    """Without the first of them, the first two, ..."""
    without_worst_of_step: Removal
    """Without another worker in each step, the one that was slowest in it."""
    even_sequences: Removal
    """If a worker took the same time for all its micro-batches."""
    correlation: float
    """Of forward and backward durations of a micro-batch on a worker, each against the worker's mean; NaN if there is
    nothing to compare. Sequences change both, other troubles do not."""
    ratios: Mapping[Worker, Mapping[str, float]]
    """Of the suspects: their computations' durations over their peers' in other replicas, or, where dp is 1, in other
    stages."""
    notes: tuple[str, ...] = ()

    @property
    def excess_seconds(self) -> float:
        """T - T_ideal of a step."""
        return float(self.replayed_seconds.mean()) - self.ideal_seconds

    @property
    def worst_workers_share(self) -> float:
        """M_W."""
        return self.without_worst_workers.share

    @property
    def last_stage_share(self) -> float:
        """M_S."""
        return self.without_last_stage.share


def analyse(table: Table, *, steps: Sequence[int] | None = None) -> TableAnalysis:
    """Analyses a job.

    Args:
        table: what it did.
        steps: only these; by default all.

    Raises:
        ValueError: none of the steps is in the table, or its operations are in an order that cannot be.
    """
    return _Analysis(table if steps is None else table.only(steps)).run()


class _Analysis:
    """The replays of one table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.program = compile_program(table)
        own = transfers(table, self.program)
        self.replayer = Replayer(self.program, table.pp, own, ideals(self.program, own))
        self.names = [kind(o.name) for o in table.operations]
        self.dp, self.pp = len(table.replicas), table.pp
        self.all_operations = np.ones(len(self.names), dtype=bool)
        self.all_workers = np.ones((1, 1, 1), dtype=bool)
        self.ideal = self.replayer.ideal_seconds()
        if self.ideal <= 0:
            raise ValueError(f"{table.path}: all operations of the table have a duration of 0")
        self.replayed = self.replayer.everything()

    def run(self) -> TableAnalysis:
        table = self.table
        replicas = self.replayer.alone(np.arange(self.dp)) / self.ideal
        stages = self._only(self._of_stages()) / self.ideal
        kinds = list(dict.fromkeys(self.names))
        by_kind = self._only([Kept(self._named(name), self.all_workers) for name in kinds]) / self.ideal
        stage, replica = (index.ravel() for index in np.indices((self.pp, self.dp)))
        workers = self.replayer.alone(replica, stage) / self.ideal
        slow, everyone = workers.mean(axis=1), np.arange(len(workers))
        worst = self._worst(replicas.mean(axis=1), stages.mean(axis=1))
        suspects = np.argsort(-slow, kind="stable")[: min(SUSPECTS, max(1, slow.size // 2))]
        removed = self._without(
            [
                Kept(self.all_operations, self._at(worst), inverse=True),
                Kept(self.all_operations, self._rotating(workers), inverse=True),
                *(Kept(self.all_operations, self._at(suspects[: n + 1]), inverse=True) for n in range(len(suspects))),
                *(Kept(k.operations, k.workers, inverse=True) for k in self._of_stages()),
                *(Kept(self._named(name), self.all_workers, inverse=True) for name in kinds),
            ]
        )
        after_suspects = 2 + len(suspects)
        without_stage = removed[after_suspects : after_suspects + self.pp]
        measured = table.step_seconds
        return TableAnalysis(
            table=table,
            step_seconds=measured,
            replayed_seconds=self.replayed,
            ideal_seconds=self.ideal,
            slowdown=float(self.replayed.mean() / self.ideal),
            launch_slowdown=float(measured.mean() / self.replayed.mean()),
            by_replica=_means(table.replicas, replicas),
            by_stage=_means(range(self.pp), stages),
            by_kind=_means(kinds, by_kind),
            by_replica_per_step=dict(zip(table.replicas, replicas, strict=True)),
            by_stage_per_step=dict(enumerate(stages)),
            by_kind_per_step=dict(zip(kinds, by_kind, strict=True)),
            by_worker=dict(zip(self._workers(everyone), slow.ravel().tolist(), strict=True)),
            by_worker_per_step=dict(zip(self._workers(everyone), workers, strict=True)),
            worst_workers=self._workers(worst),
            without_worst_workers=removed[0],
            without_last_stage=without_stage[-1],
            without_stage=dict(enumerate(without_stage)),
            without_kind=dict(zip(kinds, removed[after_suspects + self.pp :], strict=True)),
            suspects=self._workers(suspects),
            without_suspects=tuple(removed[2:after_suspects]),
            without_worst_of_step=removed[1],
            even_sequences=self._even(),
            correlation=correlation(table.operations, self.replayer.own),
            ratios={w: self._ratios(w) for w in self._workers(suspects)},
            notes=(*table.notes, *self.program.notes),
        )

    def _only(self, kept: list[Kept]) -> Seconds:
        return self.replayer.scenarios(kept)

    def _without(self, kept: list[Kept]) -> list[Removal]:
        return [self._removal(steps) for steps in self.replayer.scenarios(kept)]

    def _removal(self, steps: Seconds) -> Removal:
        """Step times in which something was made ideal, against those with all as measured."""
        seconds, before = float(steps.mean()), float(self.replayed.mean())
        excess = before - self.ideal
        return Removal(seconds, (before - seconds) / excess if abs(excess) > 1e-9 * self.ideal else 0.0)

    def _named(self, name: str) -> NDArray[np.bool_]:
        return np.array([other == name for other in self.names])

    def _of_stages(self) -> list[Kept]:
        stages = np.arange(self.pp)[:, None, None]
        return [Kept(self.all_operations, stages == stage) for stage in range(self.pp)]

    def _at(self, workers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """A mask of workers, which are given by stage * dp + replica."""
        mask = np.zeros((self.pp * self.dp, 1), dtype=bool)
        mask[workers] = True
        return mask.reshape(self.pp, self.dp, 1)

    def _rotating(self, workers: Seconds) -> NDArray[np.bool_]:
        """A mask of the worker that is slowest in each step."""
        mask = np.zeros(workers.shape, dtype=bool)
        mask[workers.argmax(axis=0), np.arange(workers.shape[1])] = True
        return mask.reshape(self.pp, self.dp, -1)

    def _worst(self, replicas: Seconds, stages: Seconds) -> NDArray[np.int64]:
        """The `WORST` part of workers, rounded up, by the study's estimate of a worker's slow-down: the lesser of its
        replica's and its stage's. Of equal ones those of earlier stages and replicas."""
        estimate = np.minimum(stages[:, None], replicas[None, :]).ravel()
        number = math.ceil(round(WORST * len(estimate), 9))
        return np.argsort(-estimate, kind="stable")[:number]

    def _worker(self, index: int) -> Worker:
        return Worker(self.table.replicas[index % self.dp], index // self.dp)

    def _workers(self, indices: NDArray[np.int64]) -> tuple[Worker, ...]:
        return tuple(self._worker(int(i)) for i in indices)

    def _even(self) -> Removal:
        """With each worker's computations of a virtual stage all as long as they are on average."""
        own = self.replayer.own.copy()
        for group in _alike(self.table.operations).values():
            own[group] = own[group].mean(axis=(0, 2), keepdims=True)
        return self._removal(self.replayer.everything(own=own))

    def _ratios(self, worker: Worker) -> dict[str, float]:
        """How much longer than its peers a worker computes, by name."""
        replica = self.table.replicas.index(worker.dp_rank)
        out: dict[str, float] = {}
        for part in COMPUTATIONS:
            taken = np.full((self.pp, self.dp), np.nan)
            for stage in range(self.pp):
                group = [i for i, o in enumerate(self.table.operations) if (o.stage, o.name) == (stage, part.value)]
                if group:
                    taken[stage] = self.replayer.own[group].mean(axis=(0, 2))
            mine = float(taken[worker.stage, replica])
            taken[worker.stage, replica] = np.nan
            peers = taken[worker.stage] if self.dp > 1 else taken[:, 0]
            peers = peers[~np.isnan(peers)]
            if len(peers) and np.median(peers) > 0 and not math.isnan(mine):
                out[part.value] = mine / float(np.median(peers))
        return out


def _means(keys: Sequence[Key], steps: Seconds) -> dict[Key, float]:
    """Means over steps."""
    return dict(zip(keys, steps.mean(axis=1).tolist(), strict=True))


def _alike(operations: Sequence[Operation]) -> dict[tuple[Role, int], list[int]]:
    """The computations that differ in nothing but their micro-batch, in the order of micro-batches."""
    groups: dict[tuple[Role, int], list[int]] = {}
    for i in sorted(range(len(operations)), key=lambda i: operations[i].micro_batch):
        if role(operations[i].name) in COMPUTATIONS:
            groups.setdefault((role(operations[i].name), operations[i].virtual_stage), []).append(i)
    return groups


def correlation(operations: Sequence[Operation], own: Seconds) -> float:
    """Pearson's r of forward and backward durations of the same micro-batch on the same worker and step.

    Both as deviations, in parts, from their mean over the micro-batches of the worker's virtual stage and step (over
    steps, where there is only one micro-batch): that a worker or a stage is slow all the time has other reasons.
    """
    groups = _alike(operations)
    pairs: list[tuple[Seconds, Seconds]] = []
    for (part, virtual_stage), forward in groups.items():
        backward = groups.get((Role.BACKWARD, virtual_stage), [])
        if part is not Role.FORWARD or len(backward) != len(forward):
            continue
        x, y = own[forward], own[backward]
        axis = 0 if len(forward) > 1 else 2
        means = x.mean(axis=axis, keepdims=True), y.mean(axis=axis, keepdims=True)
        if x.shape[axis] > 1 and means[0].min() > 0 and means[1].min() > 0:
            pairs.append(((x / means[0] - 1).ravel(), (y / means[1] - 1).ravel()))
    if not pairs:
        return math.nan
    x, y = (np.concatenate(side) for side in zip(*pairs, strict=True))
    spread = float(np.sqrt((x * x).mean() * (y * y).mean()))
    return float((x * y).mean()) / spread if spread > 0 else math.nan
