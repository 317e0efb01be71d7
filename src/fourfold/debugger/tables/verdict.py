"""What is wrong with the job of an operation table, from its analysis."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from fourfold.debugger.tables.analysis import Removal, TableAnalysis, Worker
from fourfold.debugger.tables.kinds import COMPUTED, role

HEALTHY_BELOW = 1.05
"""Slow-down that jitter alone gives: with 1 % per operation about 1.02, since replicas wait for the slowest."""
EXPLAINED = 0.5
"""The share of the excess that a cause must explain to be called one (M_W >= 0.5 in the study)."""
MOSTLY = 0.7
"""The share of steps in which a culprit must be slow."""
ONE_MORE = 0.1
"""The share that one more culprit must explain in addition."""
TOGETHER = 0.9
"""The correlation of forward and backward from which durations follow sequences (the study's)."""
UNEVEN = 0.25
"""The share that uneven sequences must explain, besides: with several micro-batches they cost less by themselves than
along with a stage that is longest anyway."""


class Cause(Enum):
    """What holds back a job."""

    HEALTHY = "healthy"
    WORKERS = "workers"
    """One or a few are slow."""
    SEQUENCES = "sequences"
    """Micro-batches take unequally long, forward and backward alike."""
    STAGE = "stage"
    """A stage is longer than the others, on all replicas."""
    ROTATING = "rotating"
    """One worker, but a different one from step to step."""
    COMMUNICATION = "communication"
    """Transfers of a kind took unusually long."""
    NOBODY = "nobody"
    """No single culprit."""


@dataclass(frozen=True)
class Finding:
    """A cause that explains a good part of the excess."""

    cause: Cause
    removal: Removal | None = None
    """What the job would be without it."""
    workers: tuple[Worker, ...] = ()
    stage: int | None = None
    kind: str = ""
    """Of communication: which operation."""


@dataclass(frozen=True)
class TableVerdict:
    """The findings, the main one first; never none."""

    analysis: TableAnalysis
    findings: tuple[Finding, ...]

    @property
    def cause(self) -> Cause:
        """The main one."""
        return self.findings[0].cause

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The culprits, slowest first; none if no worker is one."""
        return self.findings[0].workers

    @property
    def gain_seconds(self) -> float:
        """What a step would be shorter without the main cause."""
        removal = self.findings[0].removal
        return float(self.analysis.replayed_seconds.mean()) - removal.seconds if removal else 0.0

    @property
    def sentence(self) -> str:
        """What to know first."""
        a, finding = self.analysis, self.findings[0]
        slow = f"Steps take {a.replayed_seconds.mean():.3g} s, {a.slowdown:.2f} times the ideal {a.ideal_seconds:.3g} s"
        if finding.cause is Cause.HEALTHY:
            return f"Healthy: {slow[0].lower()}{slow[1:]}."
        if finding.removal is None:
            return f"No single culprit: {slow[0].lower()}{slow[1:]}, and nothing explains half of that by itself."
        gain = f"without it a step would take {finding.removal.seconds:.3g} s"
        return f"{self._what(finding)}. {slow}; {gain} ({finding.removal.share:.0%} of the excess)."

    def _what(self, finding: Finding) -> str:
        match finding.cause:
            case Cause.WORKERS:
                who = " and ".join(self._worker(worker) for worker in finding.workers)
                return f"Workers {who} hold back the job" if finding.workers[1:] else f"Worker {who} holds back the job"
            case Cause.STAGE:
                last = " (the last)" if finding.stage == self.analysis.table.pp - 1 else ""
                return f"Stage {finding.stage}{last} takes longer than the others, on every replica; no worker is slow"
            case Cause.SEQUENCES:
                return (
                    "Micro-batches take unequally long, forward and backward alike "
                    f"(r = {self.analysis.correlation:.2f}): their sequences differ; no worker is slow"
                )
            case Cause.ROTATING:
                return "In each step another worker holds back the job"
            case _:
                lost = ", ".join(map(str, self.analysis.table.left_out))
                waits = (
                    f", unless these are waits for dp_rank {lost}, which the table does not have whole" if lost else ""
                )
                return f"{finding.kind} takes unusually long in some transfers{waits}"

    def _worker(self, worker: Worker) -> str:
        ratios = ", ".join(f"{name} x {ratio:.2f}" for name, ratio in self.analysis.ratios[worker].items())
        return f"(dp {worker.dp_rank}, stage {worker.stage}{'; ' + ratios if ratios else ''})"


def judge(analysis: TableAnalysis) -> TableVerdict:
    """What holds back a job, if anything does."""
    if analysis.slowdown < HEALTHY_BELOW:
        return TableVerdict(analysis, (Finding(Cause.HEALTHY),))
    sequences, workers = _sequences(analysis), _workers(analysis)
    main = _share(sequences) >= UNEVEN
    candidates = [
        sequences if main and _share(sequences) > _share(workers) else None,
        workers,
        sequences if main and _share(sequences) <= _share(workers) else None,
        _stage(analysis, workers),
        _rotating(analysis) if workers is None else None,
        _communication(analysis),
        None if main else sequences,
    ]
    found = [finding for finding in candidates if finding is not None]
    if not found or (len(found) == 1 and found[0] is sequences and not main):
        found.insert(0, Finding(Cause.NOBODY))
    return TableVerdict(analysis, tuple(found))


def _share(finding: Finding | None) -> float:
    return finding.removal.share if finding is not None and finding.removal is not None else 0.0


def _steady(analysis: TableAnalysis, worker: Worker) -> bool:
    """Whether a worker is slow in most steps, by half of what it is on average."""
    slow = analysis.by_worker_per_step[worker]
    return float((slow - 1 >= (slow.mean() - 1) / 2).mean()) >= MOSTLY


def _workers(analysis: TableAnalysis) -> Finding | None:
    """The fewest workers that explain the excess, if these are few, always the same, and no stage."""
    most = max(2, len(analysis.worst_workers))
    shares = [removal.share for removal in analysis.without_suspects[:most]]
    number = next((n for n, share in enumerate(shares, 1) if share >= EXPLAINED), None)
    if number is None:
        return None
    while number < len(shares) and shares[number] - shares[number - 1] >= ONE_MORE:
        number += 1
    culprits = analysis.suspects[:number]
    if not all(_steady(analysis, worker) for worker in culprits):
        return None
    replicas = len(analysis.table.replicas)
    if any(2 * sum(w.stage == stage for w in culprits) > replicas for stage in range(analysis.table.pp)):
        return None  # most replicas of the stage are slow: it is the stage that is
    return Finding(Cause.WORKERS, analysis.without_suspects[number - 1], workers=culprits)


def _sequences(analysis: TableAnalysis) -> Finding | None:
    if not analysis.correlation >= TOGETHER or analysis.even_sequences.share < ONE_MORE:
        return None
    return Finding(Cause.SEQUENCES, analysis.even_sequences)


def _stage(analysis: TableAnalysis, workers: Finding | None) -> Finding | None:
    stage = max(analysis.without_stage, key=lambda stage: analysis.without_stage[stage].share)
    removal = analysis.without_stage[stage]
    known = workers is not None and any(worker.stage == stage for worker in workers.workers)
    if analysis.table.pp == 1 or known or removal.share < EXPLAINED:
        return None
    return Finding(Cause.STAGE, removal, stage=stage)


def _rotating(analysis: TableAnalysis) -> Finding | None:
    removal = analysis.without_worst_of_step
    worst = np.stack([*analysis.by_worker_per_step.values()]).argmax(axis=0)
    if removal.share < EXPLAINED or np.bincount(worst).max() >= MOSTLY * len(worst):
        return None
    return Finding(Cause.ROTATING, removal)


def _communication(analysis: TableAnalysis) -> Finding | None:
    computed = {o.name for o in analysis.table.operations if role(o.name) in COMPUTED}
    kinds = {name: removal for name, removal in analysis.without_kind.items() if name not in computed}
    name = max(kinds, key=lambda name: kinds[name].share, default="")
    if not name or kinds[name].share < EXPLAINED:
        return None
    return Finding(Cause.COMMUNICATION, kinds[name], kind=name)
