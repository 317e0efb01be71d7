"""What a path is taken for, and that everything that hangs are read from leads to the rank to blame."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fourfold.debugger.hangs import Source, find_hang, hang_source, is_hang_source
from fourfold.layout import Grid

DUMPS = Path(__file__).parent / "dumps"


def write_reports(folder: Path, *, late: int, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> Path:
    """Reports of a job with tp2 dp2: all wait for one in a collective of the world."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        started = 3 if rank == late else 4
        entry = {"kind": "all_reduce", "number": 3, "stage": -1, "micro_batch": -1, "tensor": "[1] float32",
                 "seconds": 5.0, "ended": False}  # fmt: skip
        line = {"dimension": "world", "ranks": [0, 3], "way": ""}
        report: dict[str, Any] = {
            "rank": rank, "tp": rank % 2, "cp": 0, "pp": 0, "dp": rank // 2, "host": "h", "pid": 7, "doing": "step 4",
            "seconds": 5.0, "where": f"loop.py:{rank} step", "waits": [] if rank == late else [{**entry, **line}],
            "lines": [{**line, "started": started, "recent": [] if rank == late else [entry]}],
            "stacks": {"worker": ["other.py:1 f"], "MainThread": ["a.py:1 f", f"loop.py:{rank} step"]},
        }  # fmt: skip
        (folder / f"rank-{rank:05d}.json").write_text(json.dumps(report))
    return folder


def write_run(folder: Path, **layout: int) -> None:
    sizes = {"tp": 1, "cp": 1, "pp": 1, "dp": 1, **layout}
    (folder / "run.json").write_text(json.dumps({"format": 1, "state": "failed", "layout": sizes}))


def write_logs(folder: Path, counts: dict[int, int]) -> None:
    """A step of four actions, and so many of the next."""
    (folder / "actions").mkdir(parents=True)
    for rank, count in counts.items():
        lines = [(1, action) for action in ("0F0", "0F1", "0B0", "0B1")]
        lines += [(2, action) for _, action in lines[:count]]
        text = "".join(json.dumps({"step": step, "action": action}) + "\n" for step, action in lines)
        (folder / "actions" / f"rank-{rank:05d}.jsonl").write_text(text)


def test_the_last_hang_of_a_run_is_followed(tmp_path: Path) -> None:
    write_run(tmp_path, tp=2, dp=2)
    write_reports(tmp_path / "hangs" / "step-00000002", late=0)
    last = write_reports(tmp_path / "hangs" / "step-00000004", late=1)
    write_reports(tmp_path / "hangs" / "step-00000004-abort", late=2, ranks=(0, 1, 3))
    write_logs(tmp_path, {0: 4, 1: 4, 2: 4, 3: 4})
    for path in (tmp_path, tmp_path / "hangs", tmp_path / "hangs" / "step-00000004-abort"):
        assert hang_source(path) is Source.REPORTS
        assert is_hang_source(path)
        (cause,) = find_hang(path).causes
        assert (cause.rank, cause.what) == (2, "no report: dead or frozen")
    (cause,) = find_hang(last / "rank-00003.json").causes
    assert (cause.rank, cause.what, cause.num_waiting) == (1, "loop.py:1 step", 3)
    assert cause.stack == ("MainThread", ("a.py:1 f", "loop.py:1 step"))


def test_reports_alone_say_which_layout_they_are_of(tmp_path: Path) -> None:
    write_reports(tmp_path, late=1)
    (cause,) = find_hang(tmp_path).causes
    assert cause.place == Grid(tp=2, dp=2).coordinates(1)
    with pytest.raises(ValueError, match="a report of rank 3, but the layout tp=2,cp=1,pp=1,dp=1 has 2 ranks"):
        find_hang(tmp_path, Grid(tp=2))
    (tmp_path / "rank-00001.json").write_text('{"rank": 1, "doing": "step 4", "where": "x", ')
    hang = find_hang(tmp_path, Grid(tp=2, dp=2))
    assert hang.notes == ("the report of rank 1 is damaged, and was left out",)
    assert [cause.rank for cause in hang.causes] == [1]


def test_dumps_are_found_by_what_they_hold(tmp_path: Path) -> None:
    shutil.copytree(DUMPS / "skips", tmp_path, dirs_exist_ok=True)
    (tmp_path / "rank0.json").write_text('{"traceEvents": []}')
    (tmp_path / "notes.txt").write_text("entries")
    (tmp_path / "nccl_trace_rank_0").write_bytes(b"")
    assert hang_source(tmp_path) is Source.DUMPS
    assert is_hang_source(tmp_path)
    hang = find_hang(tmp_path, Grid(tp=2, dp=2))
    assert any("nccl_trace_rank_0 is empty" in note for note in hang.notes)
    assert hang_source(tmp_path / "nccl_trace_rank_2") is Source.DUMPS


def test_one_dump_alone_says_whom_its_rank_waits_for() -> None:
    hang = find_hang(DUMPS / "skips" / "nccl_trace_rank_2", Grid(tp=2, dp=2))
    assert [cause.rank for cause in hang.causes] == [3]


def test_logs_count_where_they_end_within_a_step(tmp_path: Path) -> None:
    write_run(tmp_path, dp=2)
    write_logs(tmp_path, {0: 4, 1: 4})
    assert hang_source(tmp_path) is Source.LOGS
    assert not is_hang_source(tmp_path)
    shutil.rmtree(tmp_path / "actions")
    write_logs(tmp_path, {0: 4, 1: 2})
    assert is_hang_source(tmp_path)
    (cause,) = find_hang(tmp_path).causes
    assert (cause.rank, cause.what) == (1, "stands before 0B0, action 3 of 4, of step 2")
    assert find_hang(tmp_path / "actions").causes == (cause,)


def test_where_nothing_is_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "hangs").mkdir()
    (tmp_path / "rank-00000.json").write_text('{"traceEvents": []}')
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "rank-00000.json"):
        assert hang_source(path) is None
        assert not is_hang_source(path)
        with pytest.raises(ValueError, match="nothing to find a hang in"):
            find_hang(path)


def test_a_run_that_went_on_to_its_end_is_asked_for_slow_ranks(tmp_path: Path) -> None:
    reports = tmp_path / "hangs" / "step-00000003"
    reports.mkdir(parents=True)
    (reports / "rank-00000.json").write_text('{"rank": 0, "doing": "step 3", "where": "loop.py:1"}')
    assert is_hang_source(tmp_path)
    for state, tells in (("running", True), ("failed", True), ("finished", False)):
        (tmp_path / "run.json").write_text(f'{{"state": "{state}", "layout": {{"tp": 1, "cp": 1, "pp": 1, "dp": 1}}}}')
        assert is_hang_source(tmp_path) is tells
    assert is_hang_source(reports)  # who asks for the hang itself gets it
