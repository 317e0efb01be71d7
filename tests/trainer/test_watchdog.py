"""Hangs of every kind, made on purpose: the right rank is named, with what it does instead, by all ranks together."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.layout import Grid
from fourfold.parallel import Groups, ParallelModel, connect
from fourfold.recipe import Timeouts
from fourfold.trainer import watchdog
from fourfold.trainer.ranks import RankFailure, fork_ranks
from fourfold.trainer.watchdog import Watchdog
from tests.parallel import harness
from tests.trainer import runs
from tests.trainer.runs import wait_until

NEVER = 1000.0
QUICK = Timeouts(step_factor=2.0, step_minimum=0.4, startup=NEVER, abort=NEVER)
ENDING = Timeouts(step_factor=2.0, step_minimum=0.4, startup=NEVER, abort=1.5)
SETTLE = 1.0

Step = Callable[[Groups, int], None]


def watched(folder: Path, grid: Grid, step: Step, *, steps: int = 2, settings: Timeouts = QUICK) -> None:
    """Runs a few watched steps on forked ranks, the first one quick on all."""

    def work(rank: int) -> None:
        groups = connect(grid, "cpu")
        with Watchdog(folder, groups, settings, settle=SETTLE) as dog:
            for number in range(1, steps + 1):
                dog.step_begins(number)
                if number > 1:
                    step(groups, rank)
                groups.world.total([1.0])
                dog.step_ended()

    fork_ranks(grid.size, work, timeout=60)


def reports(folder: Path) -> dict[int, dict[str, Any]]:
    """The files of the only hang."""
    (hang,) = (folder / "hangs").iterdir()
    return {int(file.stem[5:]): json.loads(file.read_text()) for file in hang.glob("rank-*.json")}


def nap(folder: Path) -> None:
    """Sleeps until the hang that it makes has been explained."""
    wait_until(lambda: any(folder.glob("hangs/*/hang.json")))


# The innermost frame that is not Python's own.
NAP = rf"{re.escape(runs.__file__)}:\d+ wait_until"


def test_a_rank_that_sleeps_before_a_collective_is_named_with_its_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """T102."""

    def step(groups: Groups, rank: int) -> None:
        if rank == 2:
            nap(tmp_path)
        groups.dp.all_reduce(torch.ones(3))

    watched(tmp_path, Grid(dp=4), step)
    err = capfd.readouterr().err
    lines = [line for line in err.splitlines() if line]
    assert lines[0].startswith("HANG: step 2 has taken ")
    assert lines[0].endswith(f"Reports: {tmp_path / 'hangs' / 'step-00000002'}")
    assert re.fullmatch(rf"cause: rank 2 \(tp0 cp0 pp0 dp2\): {NAP}; 3 wait for it", lines[1])
    (row,) = [line for line in lines if line.startswith("dp 0-3")]
    assert "all_gather [1, 3] float32" in row
    assert "  0-1, 3 (" in row
    assert re.search(rf"  2: {NAP}$", row)
    assert re.fullmatch(rf"step 2 went on; it had waited for rank 2: {NAP}", lines[-1])
    assert err.count("HANG") == 1
    found = reports(tmp_path)
    assert set(found) == {0, 1, 2, 3}
    assert next(iter(found[2]["stacks"])) == "MainThread"
    assert found[2]["where"] in found[2]["stacks"]["MainThread"]
    assert re.fullmatch(NAP, found[2]["where"])
    assert found[2]["waits"] == []
    (wait,) = found[0]["waits"]
    assert (wait["dimension"], wait["ranks"], wait["kind"], wait["number"]) == ("dp", [0, 3], "all_gather", 0)
    assert 0.3 < wait["seconds"] < found[0]["seconds"] + 0.1  # the step's time was taken a moment earlier
    assert found[0]["flight_recorder"][-1]["profiling_name"].startswith("gloo:")
    assert len(found[0]["flight_recorder"]) == len(found[2]["flight_recorder"]) + 1


def test_the_waits_are_followed_through_the_pipeline_to_their_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """P74: ranks 0 and 1 wait for the second stage, where rank 3 waits for rank 2 in tp."""
    case = harness.Case(tp=2, pp=2, nmb=3)

    def sleep_once(model: ParallelModel) -> None:
        (stage,) = model.stages.values()

        def hook(*_: object) -> None:
            handle.remove()
            nap(tmp_path)

        handle = stage.module.layers["3"].register_forward_hook(hook)

    def work(rank: int) -> None:
        model = harness.make_model(case)
        with Watchdog(tmp_path, model.groups, QUICK, settle=SETTLE) as dog:
            for number in (1, 2):
                if (number, rank) == (2, 2):
                    sleep_once(model)
                dog.step_begins(number)
                model.forward_backward(harness.micro_batches(case, 0, 0))
                dog.step_ended()

    fork_ranks(4, work, timeout=60)
    lines = [line for line in capfd.readouterr().err.splitlines() if line]
    assert re.fullmatch(rf"cause: rank 2 \(tp0 cp0 pp1 dp0\): {NAP}; 3 wait for it", lines[1])
    rows = [line for line in lines if line.startswith(("tp", "pp"))]
    assert any(row.startswith("tp 2-3") and re.search(f"  2: {NAP}$", row) for row in rows)
    assert any(row.startswith("pp 3 > 1") and "3: waits in " in row for row in rows)
    found = reports(tmp_path)
    assert found[2]["actions"][-1]["action"] == "1F0"
    (wait,) = found[0]["waits"]
    assert (wait["kind"], wait["ranks"], wait["way"]) == ("receive", [2, 0], "receive")


def spin() -> None:
    while True:
        pass


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(("stop", "what"), [(spin, f"{__file__}:"), (freeze, "no report: dead or frozen")])
def test_a_step_that_takes_for_ever_ends_the_run_by_the_rank_to_blame(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], stop: Callable[[], None], what: str
) -> None:
    def step(groups: Groups, rank: int) -> None:
        if rank == 1:
            stop()

    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        watched(tmp_path, Grid(dp=3), step, settings=ENDING)
    assert time.monotonic() - started < 8
    assert caught.value.rank == 1
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["rank 1 failed", "RuntimeError: step 2 took longer than timeouts.abort = 1.5 s"]
    assert lines[4].startswith(f"cause: rank 1 (tp0 cp0 pp0 dp1): {what}")
    assert capfd.readouterr().err.count("HANG") == 2  # when it is late, and when it ends


def test_ranks_that_call_different_collectives_are_both_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def step(groups: Groups, rank: int) -> None:
        if rank == 1:
            groups.world.total([1.0, 2.0])
        else:
            groups.world.all_gather(torch.ones(3))

    with pytest.raises(RankFailure):
        watched(tmp_path, Grid(dp=3), step, settings=ENDING)
    lines = [line for line in capfd.readouterr().err.splitlines() if line]
    assert lines[1].startswith("cause: rank 1 (tp0 cp0 pp0 dp1): calls all_reduce [2] float64 at ")
    assert [line[: len("cause: rank 0")] for line in lines[2:4]] == ["cause: rank 0", "cause: rank 2"]
    assert "all_gather [3] float32 by 0, 2 but all_reduce [2] float64 by 1" in "\n".join(lines)


def test_a_rank_that_stands_between_two_steps_reports_when_others_wait(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(rank: int) -> None:
        groups = connect(Grid(dp=2), "cpu")
        with Watchdog(tmp_path, groups, QUICK, settle=SETTLE) as dog:
            for number in (1, 2):
                if (rank, number) == (1, 2):
                    nap(tmp_path)
                dog.step_begins(number)
                groups.world.total([1.0])
                dog.step_ended()

    fork_ranks(2, work, timeout=60)
    assert re.search(rf"rank 1 \(tp0 cp0 pp0 dp1\): {NAP} \(what follows step 1\); 1 wait", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("lengths", "startup"),
    [
        ([0.1, 0.1, 0.1, 0.5, 0.1, 1.2], NEVER),  # one of 0.5 s is well, one of 1.2 s is reported after 0.8 s
        ([0.7, 1.2], 0.8),  # a slow first step is no measure for the second one
    ],
)
def test_a_step_is_late_by_the_median_of_the_last_ones(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], lengths: list[float], startup: float
) -> None:
    def work(rank: int) -> None:
        settings = Timeouts(step_factor=8, step_minimum=0.2, startup=startup, abort=NEVER)
        with Watchdog(tmp_path, connect(Grid(), "cpu"), settings, settle=SETTLE) as dog:
            for number, seconds in enumerate(lengths, 1):
                dog.step_begins(number)
                time.sleep(seconds)
                dog.step_ended()

    fork_ranks(1, work, timeout=60)
    (report,) = reports(tmp_path).values()
    assert report["doing"] == f"step {len(lengths)}"
    assert 0.8 < report["seconds"] < 1.3
    lines = [line for line in capfd.readouterr().err.splitlines() if line]
    assert len(lines) == 3
    assert lines[1].startswith("cause: rank 0 (tp0 cp0 pp0 dp0): ")


def test_hangs_of_the_process_that_is_resumed_are_kept(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        Watchdog(tmp_path, connect(Grid(dp=2), "cpu"), QUICK)

    for kept in range(3):
        fork_ranks(2, work, timeout=60)
        assert len(list(tmp_path.glob("hangs*"))) == kept
        (tmp_path / "hangs").mkdir()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def work(rank: int) -> None:
        with Watchdog(tmp_path, connect(Grid(), "cpu"), QUICK, settle=SETTLE) as dog:
            (tmp_path / "hangs").touch()
            for seconds in (0.0, 0.8):
                dog.step_begins(1)
                time.sleep(seconds)
                dog.step_ended()

    fork_ranks(1, work, timeout=60)
    assert "rank 0 hangs and cannot write its report: " in capfd.readouterr().err


def test_the_thread_ends_with_the_watchdog(tmp_path: Path) -> None:
    def work(rank: int) -> set[str]:
        with Watchdog(tmp_path, connect(Grid(), "cpu"), QUICK):
            names = {thread.name for thread in threading.enumerate()}
        return names - {thread.name for thread in threading.enumerate()}

    assert fork_ranks(1, work, timeout=60) == [{"fourfold-watchdog"}]
    assert Timeouts().step_minimum > watchdog.SETTLE
