"""What every rank did, from the trainer's action logs: each entry's time, and how much of it was waiting.

A log knows no kernels. But it knows how long the processor worked for an entry. What an entry took beyond that and
its waits, the rank did not run: others had its processor, or it was stopped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fourfold.debugger.reading.trace import Work
from fourfold.debugger.runs import layout_of_run
from fourfold.debugger.slow.accounts import AWAITED, HOST, Accounts, sharing_processors
from fourfold.debugger.slow.diagnosis import Diagnosis, some
from fourfold.debugger.slow.places import Layout
from fourfold.debugger.slow.verdict import judge
from fourfold.debugger.slow.whatif import Computed, Replay, make_replay
from fourfold.layout import Doing, Grid, Kind
from fourfold.layout.actions import COMPUTE
from fourfold.simulator.replay import ActionLogs, Logs, RankLog, message_seconds

_HOST = {Doing.LOAD: "loader", Doing.GC: "garbage", Doing.STEP: "optimizer"}
_MEETS = {Doing.COUNT: "dp", Doing.SUM: "dp", Doing.FLUSH: "pp", Doing.NORM: "end", Doing.MEET: "end"}
"""For whom a rank waits in these."""


def _completed(logs: Logs) -> Logs:
    """Older logs do not say how long FSDP's collectives took: there gathers and reductions are nothing else."""
    ranks = []
    for log in logs.ranks:
        sharing = np.array([action.kind in (Kind.GATHER, Kind.REDUCE) for action in log.actions])
        untold = sharing & (log.cpu < 0) & (log.fsdp == 0)
        ranks.append(dataclasses.replace(log, fsdp=np.where(untold, log.own - log.tied, log.fsdp)))
    return dataclasses.replace(logs, ranks=tuple(ranks))


def accounts_of_logs(steps: Sequence[Logs], grid: Grid) -> Accounts:
    """Adds up some steps."""
    shape = (len(steps), grid.size)
    work, host = np.zeros((*shape, len(Work))), np.zeros((*shape, len(HOST)))
    transfer, wait = np.zeros((*shape, len(AWAITED))), np.zeros((*shape, len(AWAITED)))
    inner, dp = AWAITED.index("tp" if grid.tp > 1 else "cp"), AWAITED.index("dp")
    for i, step in enumerate(steps):
        met = _transfers(step, grid)
        for rank, log in enumerate(step.ranks):
            computing, stalled = _own(log)
            work[i, rank, Work.GEMM] = computing.sum() / 1e9
            host[i, rank, HOST.index("launch")] = (stalled.sum() + log.gap.sum()) / 1e9
            wait[i, rank, AWAITED.index("pp")] = log.wait.sum() / 1e9
            for place, column, shortest in ((inner, log.tied, met[rank][0]), (dp, log.fsdp, met[rank][1])):
                transfer[i, rank, place] += shortest.sum() / 1e9
                wait[i, rank, place] += (column - shortest).sum() / 1e9
            for extra in log.extra:
                own = (extra.end - extra.start - extra.wait) / 1e9
                if extra.doing in _HOST:
                    host[i, rank, HOST.index(_HOST[extra.doing])] += own
                if extra.doing in _MEETS:
                    wait[i, rank, AWAITED.index(_MEETS[extra.doing])] += extra.wait / 1e9
    numbers = tuple(step.step for step in steps)
    return sharing_processors(Accounts(grid, numbers, work, host, transfer, wait, attention_known=False))


def _transfers(step: Logs, grid: Grid) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each rank, by action: ns in TP's and CP's collectives, and in FSDP's, that are no waiting.

    The last to come is in them shortest.
    """
    columns: list[list[np.ndarray]] = []
    for name, dims in (("tied", ("tp", "cp")), ("fsdp", ("dp", "cp"))):
        shortest = [getattr(log, name) for log in step.ranks]
        for group in grid.groups(*dims):
            logs = [step.ranks[rank] for rank in group]
            if all(log.actions == logs[0].actions for log in logs):
                least = np.min([getattr(log, name) for log in logs], axis=0)
                for rank in group:
                    shortest[rank] = least
        columns.append(shortest)
    return [*zip(*columns, strict=True)]


def _own(log: RankLog) -> tuple[np.ndarray, np.ndarray]:
    """Nanoseconds of each action in which the rank computed, and in which it neither did nor waited."""
    own = np.maximum(log.own - log.tied - log.fsdp, 0)
    known = log.cpu >= 0
    computing = np.where(known, np.minimum(log.cpu, own), own)
    return computing, own - computing


def replay_of_logs(logs: Logs, grid: Grid) -> Replay | None:
    """A step that can be played again."""
    met = _transfers(logs, grid)
    computed = {rank: _computations(log, met[rank][0]) for rank, log in enumerate(logs.ranks)}
    seconds = message_seconds(logs, grid)
    message = {}
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        for pp in (at.pp - 1, at.pp + 1):
            peer = grid.rank(tp=at.tp, cp=at.cp, pp=pp % grid.pp, dp=at.dp)
            if peer != rank:
                message[rank, peer] = seconds
    return make_replay(grid, logs.step, logs.step_seconds, computed, message)


def _computations(log: RankLog, met: np.ndarray) -> list[Computed]:
    """What a rank computed, in order."""
    computing, stalled = (column / 1e9 for column in _own(log))
    late = sum(e.end - e.start - e.wait for e in log.extra if e.doing is Doing.LOAD) / 1e9
    rows = []
    for i, action in enumerate(log.actions):
        late += log.gap[i] / 1e9
        if action.kind in COMPUTE:
            rows.append(Computed(action, float(computing[i] + met[i] / 1e9), float(late), float(stalled[i])))
            late = 0.0
        else:
            late += float(computing[i] + stalled[i])
    return rows


def diagnose_logs(folder: Path, *, layout: Grid | None = None, steps: tuple[int, int] | None = None) -> Diagnosis:
    """Diagnoses action logs of our trainer. ValueError: they are damaged, or of another layout."""
    grid = layout or layout_of_run(folder)
    if grid is None:
        raise ValueError(f"{folder}: the logs do not say the layout; give --layout tp=...,cp=...,pp=...,dp=...")
    read = ActionLogs(folder, num_ranks=grid.size)
    read.step()  # or it says why there is none
    chosen = tuple(step for step in read.steps if steps is None or steps[0] <= step <= steps[1])
    if not chosen:
        raise ValueError(
            f"--steps: no whole step of the logs is among them; there are {read.steps[0]} to {read.steps[-1]}"
        )
    logs = [_completed(read.step(step)) for step in chosen]
    accounts = accounts_of_logs(logs, grid)
    again = [replay_of_logs(one, grid) for one in logs if one.step in some(chosen)]
    replays = tuple(replay for replay in again if replay is not None)
    verdict, suspects = judge(accounts, replays=replays)
    return Diagnosis(
        source="action logs",
        path=folder,
        layout=Layout(grid, "given" if layout is not None else "run.json"),
        ranks=tuple(range(grid.size)),
        verdict=verdict,
        suspects=suspects,
        accounts=accounts,
        steps=chosen,
        replays=replays,
        device="cpu",
        notes=read.notes,
    )


def is_logs(path: Path) -> bool:
    """Whether a folder has action logs."""
    folder = path / "actions" if (path / "actions").is_dir() else path
    return folder.is_dir() and any(folder.glob("rank-*.jsonl"))
