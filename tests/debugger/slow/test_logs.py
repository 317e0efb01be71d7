"""Action logs to an answer: logs of a small player, whose every millisecond is known, and logs of real runs.

`data/real_logs.json.gz` holds two steps of four runs of benchmarks/slow_rank.py: tp2 pp2 dp2 on two cores.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.debugger.ask import ask
from fourfold.debugger.reading.trace import Work
from fourfold.debugger.slow import Culprit, Diagnosis, diagnose_logs, is_logs
from fourfold.debugger.slow.accounts import AWAITED, HOST
from fourfold.layout import Grid

DATA = Path(__file__).parent / "data" / "real_logs.json.gz"
MS = 1_000_000
LOAD, FORWARD, BACKWARD, MEETING, REDUCTION, OPTIMIZER = 2, 10, 20, 1, 3, 5  # milliseconds


@dataclass
class Run:
    """All forwards, then all backwards; TP's ranks end each together; gradients are reduced over dp."""

    grid: Grid
    steps: int = 3
    micro_batches: int = 3
    slow: Mapping[int, float] = field(default_factory=dict)
    """Rank -> factor of its forwards and backwards."""
    stopped: Mapping[int, int] = field(default_factory=dict)
    """Rank -> milliseconds for which it does not run, in its first forward."""
    loading: Mapping[int, int] = field(default_factory=dict)
    optimizing: Mapping[int, int] = field(default_factory=dict)
    collecting: Mapping[int, int] = field(default_factory=dict)
    """Rank -> milliseconds that garbage takes after each step."""

    def play(self) -> tuple[list[list[dict[str, Any]]], float]:
        """The lines of every rank, and milliseconds of a step."""
        grid = self.grid
        self.now = [0] * grid.size
        self.lines: list[list[dict[str, Any]]] = [[] for _ in range(grid.size)]
        begins = [0]
        for step in range(1, self.steps + 1):
            self.step, self.sent = step, {}
            for rank in range(grid.size):
                took = self.loading.get(rank, LOAD)
                self.line(rank, "LOAD", took, cpu=took)
            for m in range(self.micro_batches):
                for pp in range(grid.pp):
                    self.compute("F", pp, m)
            for m in range(self.micro_batches):
                for pp in reversed(range(grid.pp)):
                    self.compute("B", pp, m)
            for group in grid.groups("dp"):
                came = max(self.now[rank] for rank in group)
                stage = grid.coordinates(group[0]).pp
                for rank in group:
                    took = came + REDUCTION - self.now[rank]
                    self.line(rank, f"{stage}REDUCE", took, fsdp=took if grid.dp > 1 else 0)
            for rank in range(grid.size):
                took = self.optimizing.get(rank, OPTIMIZER)
                self.line(rank, "STEP", took, cpu=took)
            last = max(self.now)
            for rank in range(grid.size):
                self.line(rank, "MEET", last - self.now[rank], wait=last - self.now[rank])
                if rank in self.collecting:
                    self.line(rank, "GC", self.collecting[rank], cpu=self.collecting[rank])
            begins.append(last)
        return self.lines, float(np.mean(np.diff(begins)))

    def compute(self, kind: str, pp: int, micro_batch: int) -> None:
        for dp in range(self.grid.dp):
            team = [self.grid.rank(tp=tp, pp=pp, dp=dp) for tp in range(self.grid.tp)]
            waits, own, came, ran = {}, {}, {}, {}
            for rank in team:
                message = self.sent.get((kind, pp - 1 if kind == "F" else pp + 1, micro_batch, dp, rank % self.grid.tp))
                waits[rank] = max((message or 0) - self.now[rank], 0)
                ran[rank] = round((FORWARD if kind == "F" else BACKWARD) * self.slow.get(rank, 1.0))
                stopped = self.stopped.get(rank, 0) if (kind, micro_batch) == ("F", 0) else 0
                own[rank] = ran[rank] + stopped
                came[rank] = self.now[rank] + waits[rank] + own[rank]
            end = max(came.values()) + (MEETING if self.grid.tp > 1 else 0)
            for rank in team:
                tied = end - came[rank]
                self.line(
                    rank, f"{pp}{kind}{micro_batch}", end - self.now[rank], wait=waits[rank], tp=tied, cpu=ran[rank]
                )
                to = pp + 1 if kind == "F" else pp - 1
                if 0 <= to < self.grid.pp:
                    self.line(rank, f"{pp}SEND_{kind}{micro_batch}", 0)
                    self.sent[kind, pp, micro_batch, dp, rank % self.grid.tp] = self.now[rank]

    def line(self, rank: int, action: str, took: int, **parts: int) -> None:
        start = self.now[rank]
        self.now[rank] = start + took
        told = {"step": self.step, "action": action, "start": start * MS, "end": (start + took) * MS}
        told |= {"wait": parts.pop("wait", 0) * MS, "cpu": parts.pop("cpu", 0) * MS}
        self.lines[rank].append(told | {name: ms * MS for name, ms in parts.items() if ms})

    def write(self, folder: Path, *, without: tuple[str, ...] = (), run: bool = True) -> Path:
        lines, _ = self.play()
        return write(folder, lines, self.grid if run else None, without)


def write(folder: Path, lines: list[list[dict[str, Any]]], grid: Grid | None, without: tuple[str, ...] = ()) -> Path:
    """The folder of a run. `without`: keys that older logs have not got."""
    (folder / "actions").mkdir(parents=True)
    for rank, rows in enumerate(lines):
        kept = [{key: value for key, value in row.items() if key not in without} for row in rows]
        (folder / "actions" / f"rank-{rank:05d}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    if grid is not None:
        layout = {name: getattr(grid, name) for name in ("tp", "cp", "pp", "dp")}
        (folder / "run.json").write_text(json.dumps({"format": 1, "state": "finished", "layout": layout}))
    return folder


GRID = Grid(tp=2, pp=2, dp=2)
COMPUTING = 3 * (FORWARD + BACKWARD)  # ms of a rank in a step


def only(found: Diagnosis) -> Culprit:
    assert found.verdict.answer == "slow rank"
    (culprit,) = found.verdict.culprits
    return culprit


def test_accounts_are_what_was_played(tmp_path: Path) -> None:
    run = Run(GRID, slow={5: 1.5})
    lines, seconds = run.play()
    accounts = diagnose_logs(run.write(tmp_path / "run")).accounts
    assert accounts.steps == (1, 2, 3)
    for rank in range(8):
        own = [row for row in lines[rank] if row["step"] == 2]
        assert accounts.work[1, rank, Work.GEMM] * 1e3 == pytest.approx(COMPUTING * (1.5 if rank == 5 else 1.0))
        host = dict(zip(HOST, (accounts.host[1, rank] * 1e3).tolist(), strict=True))
        assert host == pytest.approx({"garbage": 0, "loader": LOAD, "optimizer": OPTIMIZER, "launch": 0})
        transfer = dict(zip(AWAITED, (accounts.transfer[1, rank] * 1e3).tolist(), strict=True))
        assert transfer == pytest.approx({"tp": 6 * MEETING, "dp": REDUCTION, "cp": 0, "pp": 0, "end": 0, "other": 0})
        waited: dict[str, float] = defaultdict(float)
        for row in own:
            where = "end" if row["action"] == "MEET" else "pp"
            waited[where] += row["wait"] / MS
            waited["tp"] += row.get("tp", 0) / MS
            waited["dp"] += row.get("fsdp", 0) / MS
        waited["tp"] -= 6 * MEETING
        waited["dp"] -= REDUCTION
        wait = dict(zip(AWAITED, (accounts.wait[1, rank] * 1e3).tolist(), strict=True))
        assert wait == pytest.approx(dict.fromkeys(AWAITED, 0.0) | waited)
    np.testing.assert_allclose(accounts.step_seconds * 1e3, seconds)


@pytest.mark.parametrize("rank", range(8))
def test_a_slow_rank(rank: int, tmp_path: Path) -> None:
    run = Run(GRID, slow={rank: 1.5})
    culprit = only(diagnose_logs(run.write(tmp_path / "run")))
    assert (culprit.kind, culprit.ranks, culprit.cause) == ("compute", (rank,), "all work")
    assert culprit.factor == pytest.approx(1.5)
    assert culprit.excess == pytest.approx(0.5 * COMPUTING / 1e3)
    cost = run.play()[1] - Run(GRID).play()[1]
    assert culprit.gain == pytest.approx(cost / 1e3, rel=0.05)


@pytest.mark.parametrize(
    ("fault", "cause", "usual"),
    [
        ({"loading": {3: 40}}, "data loader", LOAD),
        ({"stopped": {3: 40}}, "launches", 0),
        ({"optimizing": {3: 40}}, "optimizer", OPTIMIZER),
        ({"collecting": {3: 40}}, "garbage collection", 0),
    ],
)
def test_a_host_that_is_late(fault: dict[str, Any], cause: str, usual: int, tmp_path: Path) -> None:
    culprit = only(diagnose_logs(Run(GRID, **fault).write(tmp_path / "run")))
    assert (culprit.kind, culprit.ranks, culprit.cause) == ("cpu", (3,), cause)
    assert culprit.excess == pytest.approx((40 - usual) / 1e3)


@pytest.mark.parametrize("grid", [GRID, Grid(dp=4), Grid(pp=4), Grid(tp=4, pp=2)])
def test_nothing_is_slow(grid: Grid, tmp_path: Path) -> None:
    found = diagnose_logs(Run(grid).write(tmp_path / "run"))
    assert not found.verdict.culprits
    assert found.verdict.answer in ("healthy", "no single culprit")
    assert (found.verdict.answer == "healthy") == (grid.dp * grid.tp > 1)


def test_only_some_steps(tmp_path: Path) -> None:
    run = Run(GRID, slow={2: 1.5}, steps=5).write(tmp_path / "run")
    assert diagnose_logs(run, steps=(2, 3)).steps == (2, 3)
    assert diagnose_logs(run, steps=(5, 9)).steps == (5,)
    with pytest.raises(ValueError, match="--steps: no whole step of the logs is among them; there are 1 to 5"):
        diagnose_logs(run, steps=(6, 9))


class TestOlder:
    """Logs of before they said more than `wait`."""

    NEWER = ("tp", "cp", "fsdp", "cpu")

    def test_without_replicas_or_tp(self, tmp_path: Path) -> None:
        found = diagnose_logs(Run(Grid(pp=4)).write(tmp_path / "run", without=self.NEWER))
        assert found.verdict.answer == "no single culprit"

    @pytest.mark.parametrize("grid", [Grid(dp=4), Grid(pp=2, dp=2), Grid(pp=3, dp=4)])
    def test_waits_for_replicas_are_no_computing(self, grid: Grid, tmp_path: Path) -> None:
        found = diagnose_logs(Run(grid, slow={1: 1.5}).write(tmp_path / "run", without=self.NEWER))
        culprit = only(found)
        assert (culprit.kind, culprit.ranks) == ("compute", (1,))
        assert culprit.excess == pytest.approx(0.5 * COMPUTING / 1e3)

    def test_of_tp_ranks_nobody_knows_which_is_slow(self, tmp_path: Path) -> None:
        """All that is no wait for a message counts as computing, and they end each action together."""
        found = diagnose_logs(Run(GRID, slow={5: 1.5}).write(tmp_path / "run", without=self.NEWER))
        assert sorted(culprit.ranks for culprit in found.verdict.culprits) == [(4,), (5,)]

    def test_processor_time_alone_is_missing(self, tmp_path: Path) -> None:
        culprit = only(diagnose_logs(Run(GRID, slow={5: 1.5}).write(tmp_path / "run", without=("cpu",))))
        assert (culprit.kind, culprit.ranks) == ("compute", (5,))


class TestLayout:
    def test_of_the_run(self, tmp_path: Path) -> None:
        run = Run(GRID).write(tmp_path / "run")
        for path in (run, run / "actions"):
            found = diagnose_logs(path)
            assert (found.layout.grid, found.layout.source) == (GRID, "run.json")

    def test_given(self, tmp_path: Path) -> None:
        run = Run(GRID, slow={5: 1.5}).write(tmp_path / "run", run=False)
        with pytest.raises(ValueError, match="the logs do not say the layout; give --layout"):
            diagnose_logs(run)
        found = diagnose_logs(run, layout=GRID)
        assert found.layout.source == "given"
        assert only(found).ranks == (5,)

    def test_of_more_ranks_than_there_are(self, tmp_path: Path) -> None:
        run = Run(Grid(dp=2)).write(tmp_path / "run")
        with pytest.raises(ValueError, match="of 4 ranks, the log of rank 2, 3 is missing"):
            diagnose_logs(run, layout=Grid(dp=4))


class TestDamaged:
    def test_a_torn_line(self, tmp_path: Path) -> None:
        run = Run(GRID, slow={5: 1.5}).write(tmp_path / "run")
        path = run / "actions" / "rank-00003.jsonl"
        path.write_bytes(path.read_bytes()[:-20])
        found = diagnose_logs(run)
        assert found.steps == (1, 2)
        assert only(found).ranks == (5,)
        assert any("rank-00003.jsonl is torn" in note for note in found.notes)

    def test_a_line_that_is_none(self, tmp_path: Path) -> None:
        run = Run(GRID).write(tmp_path / "run")
        path = run / "actions" / "rank-00003.jsonl"
        path.write_text(path.read_text().replace('"wait": 0', '"wait": "a"', 1))
        with pytest.raises(ValueError, match=r"rank-00003.jsonl, line \d+: no entry of an action log"):
            diagnose_logs(run)

    def test_times_that_are_not_in_order(self, tmp_path: Path) -> None:
        run = Run(GRID).write(tmp_path / "run")
        path = run / "actions" / "rank-00002.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[1]["end"] = lines[1]["start"] - 1
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        with pytest.raises(ValueError, match="its times are not in order"):
            diagnose_logs(run)


def test_what_logs_are(tmp_path: Path) -> None:
    run = Run(Grid(dp=2)).write(tmp_path / "run")
    assert is_logs(run)
    assert is_logs(run / "actions")
    assert not is_logs(tmp_path)
    assert not is_logs(run / "actions" / "rank-00000.jsonl")
    assert not is_logs(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "culprits"),
    [
        ("healthy", []),
        ("layer-4", [("compute", (4,), "all work")]),
        ("loader-1", [("cpu", (1,), "data loader")]),
        ("stopped-6", [("cpu", (6,), "launches")]),
    ],
)
def test_real_runs(name: str, culprits: list[tuple[str, tuple[int, ...], str]], tmp_path: Path) -> None:
    run = json.loads(gzip.decompress(DATA.read_bytes()))[name]
    found = ask(write(tmp_path / "run", run["ranks"], Grid(**run["layout"])))
    assert isinstance(found, Diagnosis)
    assert [(c.kind, c.ranks, c.cause) for c in found.verdict.culprits] == culprits
    assert found.steps == (6, 7)
    for culprit in found.verdict.culprits:
        assert culprit.gain is not None
        assert 0.1 < culprit.gain < 2
