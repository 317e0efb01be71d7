"""What is taken for a snapshot, and what is asked at a path."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest

from fourfold.debugger.ask import ask
from fourfold.debugger.memory import Memory, Trouble, snapshot_files
from fourfold.debugger.slow import Diagnosis
from tests.debugger import jobs
from tests.debugger.memory.test_traces import Trace
from tests.debugger.memory.test_verdict import GRID, job

DUMPS = Path(__file__).parents[1] / "hangs" / "dumps"


def test_snapshots_of_a_folder_and_of_a_run(tmp_path: Path) -> None:
    profile = tmp_path / "run" / "profile"
    profile.mkdir(parents=True)
    files = job(profile)
    (profile / "memory-00009.pickle.partial").write_bytes(files[0].read_bytes())
    (profile / "rank-00000.json.gz").write_bytes(b"")
    (profile / "notes.txt").write_text("segments")
    assert snapshot_files(profile) == snapshot_files(tmp_path / "run") == files
    assert snapshot_files(files[2]) == [files[2]]
    assert snapshot_files(profile / "notes.txt") == []
    assert snapshot_files(tmp_path / "nothing") == []


def test_names_of_others(tmp_path: Path) -> None:
    file = job(tmp_path)[0].rename(tmp_path / "dump_snapshot.pickle")
    assert snapshot_files(file) == [file]
    assert ask(file).devices[0].rank == 0  # type: ignore[union-attr]
    (tmp_path / "list.pickle").write_bytes(pickle.dumps(["segments"]))
    assert snapshot_files(tmp_path / "list.pickle") == []


@pytest.mark.parametrize("dump", [file for file in sorted(DUMPS.rglob("*")) if file.is_file()][:4], ids=str)
def test_dumps_of_the_flight_recorder_are_none(dump: Path) -> None:
    assert snapshot_files(dump) == []


def test_the_layout_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    job(tmp_path / "profile", more={6: 9})
    layout = {"tp": 2, "cp": 1, "pp": 2, "dp": 2}
    (tmp_path / "run.json").write_text(json.dumps({"layout": layout, "state": "failed"}))
    found = ask(tmp_path, workers=1)
    assert isinstance(found, Memory)
    assert (found.trouble, found.grid) == (Trouble.UNEVEN, GRID)
    assert ask(tmp_path, layout="dp=8", workers=1).uneven[0].pp == 0  # type: ignore[union-attr]


def test_traces_and_snapshots(tmp_path: Path) -> None:
    """Who is slow is the answer, and memory is said besides."""
    traces = jobs.write(jobs.Job(tp=2, pp=2, dp=2, layers=2, slow={5: 1.5}), tmp_path / "traces", jobs.Style())
    job(traces, more={6: 9})
    found = ask(traces, workers=1)
    assert isinstance(found, Diagnosis)
    assert (found.verdict.answer, found.verdict.culprits[0].ranks) == ("slow rank", (5,))
    assert found.memory is not None
    assert (found.memory.trouble, found.memory.uneven[0].rank) == (Trouble.UNEVEN, 6)
    # Snapshots that cannot be read are a note.
    for file in snapshot_files(traces):
        file.write_bytes(b"\x80nothing")
    found = ask(traces, workers=1)
    assert isinstance(found, Diagnosis)
    assert found.memory is None
    assert "memory: " in found.notes[-1]


def test_traces_with_memory_in_them(tmp_path: Path) -> None:
    for rank in range(2):
        trace = Trace()
        for step in (1, 2):
            trace.range(f"ProfilerStep#{step}", 1000 * step, 1000 * step + 900)
            trace.range("aten::mm", 1000 * step + 10, 1000 * step + 500, cat="cpu_op")
            trace.memory(1000 * step + 20, 0xA, 4096 + rank)
            trace.memory(1000 * step + 600, 0xA, -4096 - rank)
        trace.write(tmp_path / f"rank-0000{rank}.json", rank)
    found = ask(tmp_path, workers=1, layout="dp=8")
    assert isinstance(found, Diagnosis)
    assert found.memory is not None
    assert [(one.device, one.peak.bytes) for one in found.memory.devices] == [("cpu", 4096), ("cpu", 4097)]
    one = ask(tmp_path / "rank-00001.json", workers=1, steps=(2, 2))
    assert isinstance(one, Diagnosis)
    assert one.memory is not None
    assert (one.memory.devices[0].rank, one.memory.devices[0].peak.step) == (1, 2)


def test_a_snapshot_counts_before_the_trace_of_its_rank(tmp_path: Path) -> None:
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 900)
    trace.range("aten::mm", 10, 500, cat="cpu_op")
    trace.memory(20, 0xA, 4096)
    trace.write(tmp_path / "rank-00000.json", 0)
    shutil.copy(job(tmp_path)[0], tmp_path / "keep")
    for file in snapshot_files(tmp_path)[1:]:
        file.unlink()
    found = ask(tmp_path, workers=1)
    assert isinstance(found, Diagnosis)
    assert found.memory is not None
    assert [(one.rank, one.source) for one in found.memory.devices] == [(0, "snapshot")]
