"""What a run reports: lines of files, lines to watch, and the action log after a resume."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fourfold.layout import Action, Kind
from fourfold.parallel import LoggedAction
from fourfold.trainer.metrics import Reporter, StepMetrics, ValidationMetrics, cut_action_log, write_action_log
from fourfold.trainer.sinks import Guarded

STEP = StepMetrics(
    step=1, loss=5.25, grad_norm=1.5, lr=0.01, tokens=256, samples=16, valid_tokens=250, skipped=0,
    tokens_per_second=1000.0, step_seconds=0.256, data_seconds=0.01, forward_backward_seconds=0.2,
    optimizer_seconds=0.03, checkpoint_seconds=0.0, garbage_seconds=0.0, other_seconds=0.016,
    idle_share=0.2, idle_share_max=0.25,
    attention_pairs=2080,
    model_flops_per_second=1e9, mfu_6p=None, mfu_attention=None, peak_memory_bytes=1 << 30,
)  # fmt: skip


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def write(self, step: int, values: Any) -> None:
        self.told.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def report(folder: Path | None, steps: range, **options: Any) -> None:
    with Reporter(folder, 10, **options) as reporter:
        for step in steps:
            reporter.report(replace(STEP, step=step))


def test_every_step_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pains T116."""
    report(tmp_path, range(1, 4))
    found = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in found] == [1, 2, 3]
    assert list(found[0]) == [field.name for field in fields(StepMetrics)]
    assert (found[0]["loss"], found[0]["mfu_6p"]) == (5.25, None)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    assert said[0].startswith("step  1/10  loss  5.2500  norm   1.50     1,000 tokens/s  0:")
    assert "MFU" not in said[0]


def test_a_resumed_run_goes_on_in_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path, 10) as reporter:
        for step in range(1, 8):
            reporter.report(replace(STEP, step=step, loss=float(step)))
            reporter.report_validation(ValidationMetrics(step, "held-out", 3.0, 10, 0.5))
    with Reporter(tmp_path, 10, resume_step=4) as reporter:
        for step in range(5, 11):
            reporter.report(replace(STEP, step=step, loss=float(-step)))
    assert [(line["step"], line["loss"]) for line in lines(tmp_path / "metrics.jsonl")] == [
        *((step, float(step)) for step in range(1, 5)), *((step, float(-step)) for step in range(5, 11)),
    ]  # fmt: skip
    assert [line["step"] for line in lines(tmp_path / "validation.jsonl")] == [1, 2, 3, 4]


def test_validation_has_its_own_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = Kept()
    with Reporter(tmp_path, 10, sinks=[Guarded("kept", lambda: kept)]) as reporter:
        reporter.report_validation(ValidationMetrics(step=3, set="[red]", loss=2.5, valid_tokens=1234, seconds=0.75))
    expected = {"step": 3, "set": "[red]", "loss": 2.5, "valid_tokens": 1234, "seconds": 0.75}
    assert lines(tmp_path / "validation.jsonl") == [expected]
    assert capsys.readouterr().out == "step  3: validation loss 2.5000 on [red] (1,234 labels, 0.8 s)\n"
    assert kept.told == [(3, {"validation/[red]": 2.5})]
    assert kept.closed == 1


def test_sinks_get_the_same_numbers(tmp_path: Path) -> None:
    kept = Kept()
    report(tmp_path, range(1, 3), sinks=[Guarded("kept", lambda: kept)])
    assert [step for step, _ in kept.told] == [1, 2]
    values = kept.told[0][1]
    assert (values["train/loss"], values["train/samples"]) == (5.25, 16)
    assert "train/mfu_6p" not in values
    assert "train/step" not in values


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(None, 10) as reporter:
        reporter.report(STEP)
        reporter.report_validation(ValidationMetrics(1, "a", 1.0, 1, 1.0))
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_an_mfu_above_one_is_a_fault_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pains T91. 6P alone may be above 1: it counts the embedding, which is looked up."""
    with Reporter(tmp_path, 10) as reporter:
        reporter.report(replace(STEP, mfu_6p=1.1, mfu_attention=0.95))
        assert "cannot be" not in (said := capsys.readouterr().out)
        assert "MFU 95.0%" in said
        for step in (2, 3):
            reporter.report(replace(STEP, step=step, mfu_6p=1.1, mfu_attention=1.25))
    said = capsys.readouterr().out
    assert (
        said.count(
            "MFU is 1.25, which cannot be: the peak of this GPU in fourfold/planner/machines/hardware.py is wrong"
        )
        == 1
    )


def test_the_action_log_of_a_resumed_run(tmp_path: Path) -> None:
    log = [LoggedAction(Action(Kind.FORWARD, 0, 0), 5, 9, 1)] * 2
    for step in (2, 4, 6):
        write_action_log(tmp_path, 3, step, log)
    cut_action_log(tmp_path, 0, 2, 4)
    assert len(lines(tmp_path / "actions" / "rank-00003.jsonl")) > 3  # that of four ranks is another's to cut
    cut_action_log(tmp_path, 1, 2, 4)
    path = tmp_path / "actions" / "rank-00003.jsonl"
    assert [line["step"] for line in lines(path)] == [2, 2, 4, 4]
    assert lines(path)[0] == {"step": 2, "action": "0F0", "start": 5, "end": 9, "wait": 1}
