"""What `fourfold runs` finds in a folder: runs in every state, of every age, and damaged in every way."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fourfold.recipe import RunPlan, check, from_table, to_toml
from fourfold.trainer import runs
from fourfold.trainer.runs import begin, belongs_to, end, job_id, list_runs, name_of_job, summarize_run, summary_json


@pytest.fixture
def plan() -> RunPlan:
    return check(from_table({"layout": {"pp": 2, "dp": 2}, "train": {"steps": 80}, "output": {"name": "a"}}))


@pytest.fixture
def folder(tmp_path: Path, plan: RunPlan) -> Path:
    """Of a run that has made three steps."""
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "recipe.toml").write_text(to_toml(plan.recipe))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in (1, 2, 3):
            file.write(json.dumps({"step": step, "loss": 5.0 - step, "tokens_per_second": 1000.0 * step}) + "\n")
    return folder


def told(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def change(folder: Path, **values: object) -> None:
    (folder / "run.json").write_text(json.dumps({**told(folder), **values}))


def save_checkpoint(folder: Path, name: str, *, complete: bool = True) -> None:
    (folder / name).mkdir(parents=True)
    if complete:
        (folder / name / "index.json").write_text("{}")


def save_to(folder: Path, place: str) -> None:
    """Makes a run's recipe say where its checkpoints are."""
    (folder / "recipe.toml").write_text(to_toml(from_table({"checkpoint": {"dir": place}})))


def test_the_run_of_a_job(folder: Path, plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    # torchrun calls all jobs without an id "none"; the launcher, which is our parent, tells them apart.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    begin(folder, plan)
    mine = job_id()
    assert mine is not None
    assert str(os.getppid()) in mine
    assert name_of_job(folder.parent, mine) == "a"
    assert belongs_to(folder, mine)
    change(folder, job_id="none")
    assert name_of_job(folder.parent, mine) is None
    assert not belongs_to(folder, mine)
    change(folder, job_id=None)
    assert not belongs_to(folder, None)


class TestOneRun:
    def test_a_run_from_beginning_to_end(self, folder: Path, plan: RunPlan) -> None:
        begin(folder, plan)
        found = summarize_run(folder)
        assert (found.name, found.state, found.step, found.steps) == ("a", "running", 3, 80)
        assert (found.loss, found.tokens_per_second, found.layout) == (2.0, 3000.0, "tp1 cp1 pp2 dp2")
        assert (found.host, found.pid, found.ended, found.checkpoint) == (socket.gethostname(), os.getpid(), None, None)
        assert found.last_write == pytest.approx(time.time(), abs=60)
        end(folder, "finished")
        found = summarize_run(folder)
        assert found.state == "finished"
        assert found.started is not None
        assert found.ended is not None
        assert found.started <= found.ended
        assert told(folder)["world"] == 4
        assert sorted(os.listdir(folder)) == ["metrics.jsonl", "recipe.toml", "run.json"]

    def test_a_resume_runs_again_and_keeps_its_start(self, folder: Path, plan: RunPlan) -> None:
        begin(folder, plan)
        change(folder, started="2020-01-01T00:00:00+00:00")
        end(folder, "failed", "rank 3 failed\nValueError: x")
        assert (summarize_run(folder).state, summarize_run(folder).message) == (
            "failed",
            "rank 3 failed\nValueError: x",
        )
        begin(folder, plan)
        found = summarize_run(folder)
        assert (found.state, found.message, found.started) == ("running", None, "2020-01-01T00:00:00+00:00")
        assert told(folder)["resumed"] > "2026"

    def test_a_killed_process_has_died(self, folder: Path, plan: RunPlan) -> None:
        begin(folder, plan)
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        change(folder, pid=process.pid, pid_started=None)
        assert summarize_run(folder).state == "running"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert summarize_run(folder).state == "died"
        change(folder, host="elsewhere")  # whose processes cannot be asked for
        assert summarize_run(folder).state == "running"

    @pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the start of a process is known on Linux only")
    def test_a_process_that_got_the_number_later_is_another(self, folder: Path, plan: RunPlan) -> None:
        begin(folder, plan)
        change(folder, pid_started=told(folder)["pid_started"] - 1)
        assert summarize_run(folder).state == "died"

    def test_the_end_of_a_run_whose_folder_is_gone(self, tmp_path: Path) -> None:
        end(tmp_path / "gone", "failed", "no step was made")
        assert not (tmp_path / "gone").exists()

    def test_the_newest_complete_checkpoint(self, folder: Path) -> None:
        for name in ("step-00000040", "step-00000060", "step-00000060.18f3-2a", "step-00000020"):
            save_checkpoint(folder / "checkpoints", name)
        save_checkpoint(folder / "checkpoints", "step-00000080", complete=False)
        save_checkpoint(folder / "checkpoints", "step-00000090.partial")  # half removed
        save_checkpoint(folder / "checkpoints", "step-00000090.18f3-2b.partial")
        assert summarize_run(folder).checkpoint == "step-00000060.18f3-2a"

    @pytest.mark.parametrize(
        ("place", "shown"),
        [
            ("s3://bucket/a", "s3://bucket/a"),
            ("elsewhere", "step-00000007"),
            ("file://{}/elsewhere", "step-00000007"),
            ("file://{}/nowhere", None),
        ],
    )
    def test_checkpoints_in_another_place(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, shown: str | None
    ) -> None:
        monkeypatch.chdir(tmp_path)
        save_checkpoint(tmp_path / "elsewhere", "step-00000007")
        save_to(folder, place.format(tmp_path))
        assert summarize_run(folder).checkpoint == shown


class Frozen(fsspec.AbstractFileSystem):
    """A store that never answers."""

    protocol = "frozen"

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[str]:
        time.sleep(1000)
        return []


class TestStores:
    """Checkpoints at URLs: a store is asked for them when runs are listed, and not waited for."""

    def test_what_they_hold(self, folder: Path, tmp_path: Path) -> None:
        for name, complete in (("10.1a-2", True), ("9.1a-3", True), ("10.1a-1", True), ("11.1b-1", False)):
            save_checkpoint(tmp_path / "bucket", f"step-{name.partition('.')[0]:0>8}.{name[-4:]}", complete=complete)
        save_to(folder, f"local://{tmp_path}/bucket/")
        assert [run.checkpoint for run in list_runs(tmp_path)] == ["step-00000010.1a-2"]
        save_to(folder, f"local://{tmp_path}/nothing/yet")
        assert [run.checkpoint for run in list_runs(tmp_path)] == [None]

    def test_those_that_do_not_answer(
        self, folder: Path, plan: RunPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fsspec.register_implementation("frozen", Frozen, clobber=True)
        monkeypatch.setattr(runs, "_PATIENCE", 0.5)
        save_checkpoint(tmp_path / "bucket", "step-00000007.1a-1")
        places = {"b": "frozen://x/b", "c": "frozen://x/c", "d": "nowhere://x", "e": f"local://{tmp_path}/bucket"}
        for name, place in places.items():
            (tmp_path / name).mkdir()
            save_to(tmp_path / name, place)
        start = time.perf_counter()
        found = {run.name: run.checkpoint for run in list_runs(tmp_path)}
        assert time.perf_counter() - start < 5
        assert found == {"a": None, **places, "e": "step-00000007.1a-1"}


class TestDamage:
    def test_a_run_of_an_older_version_has_no_state(self, folder: Path) -> None:
        found = summarize_run(folder)
        assert (found.state, found.step, found.steps, found.layout) == ("unknown", 3, 80, "tp1 cp1 pp2 dp2")

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"state": 7, "pid": "x"}', b"{}"])
    @pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "recipe.toml"])
    def test_damaged_files_are_unknown(self, folder: Path, plan: RunPlan, name: str, content: bytes) -> None:
        begin(folder, plan)
        (folder / name).write_bytes(content)
        found = summarize_run(folder)
        assert found.state == ("unknown" if name == "run.json" else "running")
        assert found.step == (None if name == "metrics.jsonl" else 3)
        assert found.steps == 80
        json.dumps(summary_json(found), allow_nan=False)

    @pytest.mark.parametrize(
        ("values", "state"),
        [
            ({"pid": -1}, "unknown"),
            ({"pid": True}, "unknown"),
            ({"pid": 10**30}, "died"),
            ({"pid_started": "x"}, "died"),
            ({"layout": {"tp": "x"}}, "running"),
            ({"steps": [1], "message": {}}, "running"),
        ],
    )
    def test_odd_values(self, folder: Path, plan: RunPlan, values: dict[str, object], state: str) -> None:
        begin(folder, plan)
        change(folder, **values)
        assert summarize_run(folder).state == state

    def test_a_torn_last_line(self, folder: Path) -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "lo')
        assert summarize_run(folder).step == 3

    def test_a_loss_that_is_not_finite(self, folder: Path) -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "loss": null, "tokens_per_second": 5.0}\n')
        found = summarize_run(folder)
        assert found.loss is not None
        assert math.isnan(found.loss)
        assert summary_json(found)["loss"] == "nan"

    def test_a_long_file_is_read_from_its_end(self, folder: Path) -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(4, 20_000))
        start = time.perf_counter()
        assert summarize_run(folder).step == 19_999
        assert time.perf_counter() - start < 0.5


def test_a_folder_of_runs(tmp_path: Path, folder: Path, plan: RunPlan) -> None:
    """Newest first; what is no run is passed over, and a run that cannot be read stops nobody."""
    for name, age in (("b", 3000), ("c", -5000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{")
        os.utime(tmp_path / name / "run.json", (time.time() - age,) * 2)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "a-file").write_text("")
    assert [run.name for run in list_runs(tmp_path)] == ["c", "a", "b"]


class TestCommand:
    def test_table_and_json(self, tmp_path: Path, folder: Path, plan: RunPlan) -> None:
        begin(folder, plan)
        end(folder, "stopped", "SIGTERM")
        table = fourfold("runs", str(tmp_path))
        assert (table.returncode, table.stderr) == (0, "")
        assert table.stdout.splitlines()[1].split()[:5] == ["a", "stopped", "3/80", "2.0000", "3,000"]
        done = fourfold("runs", str(tmp_path), "--json")
        (found,) = json.loads(done.stdout)
        assert (found["name"], found["state"], found["step"], found["layout"]) == ("a", "stopped", 3, "tp1 cp1 pp2 dp2")

    def test_nothing_there(self, tmp_path: Path) -> None:
        assert fourfold("runs", str(tmp_path)).stdout == f"no runs in {tmp_path}\n"
        done = fourfold("runs", str(tmp_path / "gone"))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: {tmp_path / 'gone'}: No such file or directory\n"

    def test_without_torch(self, tmp_path: Path, folder: Path) -> None:
        save_to(folder, "memory://x")  # which is asked
        code = (
            "import sys\nfrom fourfold import cli\n"
            f"cli.app(['runs', {str(tmp_path)!r}], result_action='return_value')\n"
            "sys.exit('torch' in sys.modules)"
        )
        assert python("-c", code).returncode == 0


def fourfold(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "fourfold.cli", *arguments)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)
