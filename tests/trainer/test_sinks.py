"""Where metrics go, read back by the packages they were written for; and that nothing there ends a run."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fourfold.recipe import Recipe, RecipeError, from_table
from fourfold.trainer.sinks import Guarded, JsonLines, check_sinks, cut_after, open_sinks
from tests.trainer.runs import wait_until


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def recipe(**output: object) -> Recipe:
    return from_table({"output": {"tensorboard": False, **output}})


class TestJsonLines:
    def test_a_line_is_on_disk_at_once(self, tmp_path: Path) -> None:
        """pains T116: a run that is killed has lost nothing."""
        file = JsonLines(tmp_path / "metrics.jsonl")
        file.write({"step": 1, "loss": 2.5, "mfu": None, "bad": float("nan"), "worse": float("-inf"), "name": "a"})
        assert lines(tmp_path / "metrics.jsonl") == [
            {"step": 1, "loss": 2.5, "mfu": None, "bad": None, "worse": None, "name": "a"}
        ]
        file.close()

    def test_a_resume_cuts_and_appends(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        whole = "".join(f'{{"step": {step}}}\n' for step in range(1, 8))
        path.write_text(whole + '{"step": 8, "lo')  # killed in the middle of a line
        file = JsonLines(path, resume_step=5)
        assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5]
        file.write({"step": 6})
        file.close()
        assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5, 6]
        assert os.listdir(tmp_path) == ["metrics.jsonl"]

    @pytest.mark.parametrize("torn", ["", '{"step": 3', "\0\0\0\n", "[]\n", '{"loss": 1}\n'])
    def test_what_is_no_line_is_cut(self, tmp_path: Path, torn: str) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text(f'{{"step": 1}}\n{torn}{{"step": 2}}\n' if torn.endswith("\n") else f'{{"step": 1}}\n{torn}')
        cut_after(path, 1)
        assert path.read_text() == '{"step": 1}\n'

    def test_a_file_with_nothing_to_cut_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        cut_after(path, 3)
        assert not path.exists()
        path.write_text('{"step": 3}\n')
        before = path.stat()
        cut_after(path, 3)
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert os.listdir(tmp_path) == ["metrics.jsonl"]

    def test_a_full_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Half a line is taken back, it is said once, and lines go on as soon as there is room."""
        path, write = tmp_path / "metrics.jsonl", os.write
        file = JsonLines(path)
        file.write({"step": 1})
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
        file.write({"step": 2})
        file.write({"step": 3})
        monkeypatch.setattr(os, "write", write)
        file.write({"step": 4})
        file.close()
        assert [line["step"] for line in lines(path)] == [1, 4]
        said = capsys.readouterr().err
        assert said.count("warning: ") == 1
        assert os.strerror(errno.ENOSPC) in said
        assert str(path) in said


class Failing:
    def __init__(self) -> None:
        self.calls = 0

    def write(self, step: int, values: object) -> None:
        self.calls += 1
        raise ConnectionError("no route\nto the host")

    def close(self) -> None:
        self.calls += 1


class TestGuarded:
    def test_a_failure_is_said_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        failing = Failing()
        sink = Guarded("Somewhere", lambda: failing)
        for step in range(3):
            sink.write(step, {"loss": 1.0})
        sink.close()
        assert failing.calls == 1
        said = capsys.readouterr().err.strip()
        assert said == "warning: Somewhere: ConnectionError: no route to the host; the run goes on without it"

    def test_one_that_cannot_be_opened(self, capsys: pytest.CaptureFixture[str]) -> None:
        def opening() -> Failing:
            raise RuntimeError("no key")

        sink = Guarded("Somewhere", opening)
        sink.write(1, {"loss": 1.0})
        sink.close()
        assert capsys.readouterr().err.count("no key") == 1

    def test_only_numbers_are_passed_on(self) -> None:
        taken: list[object] = []
        sink = Guarded("Here", lambda: SimpleNamespace(write=lambda step, values: taken.append((step, values))))  # type: ignore[arg-type]
        sink.write(4, {"loss": 1.5, "mfu": None, "set": "held-out", "labels": 7})
        assert taken == [(4, {"loss": 1.5, "labels": 7})]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """As TensorBoard shows them."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_shows_a_resumed_run_once(tmp_path: Path) -> None:
    for resume_step, steps in ((0, (1, 2, 3, 4)), (2, (3,))):
        (sink,) = open_sinks(tmp_path, recipe(tensorboard=True), resume_step=resume_step)
        for step in steps:
            sink.write(step, {"train/loss": step + resume_step / 2, "train/mfu": None})
        if resume_step == 0:  # killed: what was written is there all the same
            assert scalars(tmp_path / "tensorboard", "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
        sink.close()
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(1, 1.0), (2, 2.0), (3, 4.0)]
    assert os.listdir(tmp_path) == ["tensorboard"]


def test_tensorboard_is_left_out_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert open_sinks(tmp_path, recipe(tensorboard=True)) == []


def test_weights_and_biases_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    (sink,) = open_sinks(tmp_path, recipe(wandb="plays"))
    sink.write(7, {"train/loss": 2.5})
    sink.close()
    assert capsys.readouterr() == ("", "")
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = run.glob("run-*.wandb")  # what is kept for the server: records of its protocol, uncompressed
    parts = ["plays", tmp_path.name, (tmp_path / "wandb" / "run-id.txt").read_text(), "train/loss", "2.5", "step"]
    # Its own process writes the file, and may still be at it.
    wait_until(lambda: all(part.encode() in file.read_bytes() for part in parts), 30)


def test_a_service_whose_package_is_missing_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    check_sinks(recipe())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError) as refused:
        check_sinks(recipe(wandb="a", trackio="b"))
    assert [(p.key, p.value) for p in refused.value.problems] == [("output.wandb", "a"), ("output.trackio", "b")]
    assert "pip install wandb" in str(refused.value)


def test_trackio_is_told_by_its_own_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is not installed here. Its functions are written down as its version 0.43 has them."""
    told: list[tuple[object, ...]] = []

    def init(
        project: str,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str = "never",
        embed: bool = True,
        auto_log_gpu: bool | None = None,
        auto_log_cpu: bool | None = None,
    ) -> object:
        told.append((project, name, resume))
        return SimpleNamespace(
            log=lambda metrics, step=None: told.append((metrics, step)), finish=lambda: told.append(("finished",))
        )

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))  # type: ignore[arg-type]
    for resume_step in (0, 5):
        (sink,) = open_sinks(tmp_path, recipe(trackio="plays"), resume_step=resume_step)
        sink.write(resume_step + 1, {"train/loss": 2.0, "train/mfu": None})
        sink.close()
    name = tmp_path.name
    assert told == [
        ("plays", name, "never"), ({"train/loss": 2.0}, 1), ("finished",),
        ("plays", name, "allow"), ({"train/loss": 2.0}, 6), ("finished",),
    ]  # fmt: skip
