"""A run that is interrupted and goes on is the run that was not: whatever the layout, the batch, and what broke."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.runs import Command, fourfold, has_steps, metrics, train, wait_until, write_recipe

# The learning rate must not depend on how far a part of the run goes.
STEADY = ("optimizer.schedule=constant", "data.seed=3", "train.sanity_steps=1", "output.tensorboard=false")
PP2 = (*STEADY, "layout.pp=2", "checkpoint.every=2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the tiny recipe in it."""
    write_recipe(tmp_path)
    return tmp_path


def go(folder: Path, *overrides: str, resume: bool = True) -> str:
    """Trains, with success, and returns what was printed."""
    args = [arg for o in overrides for arg in ("--set", o)]
    done = fourfold(folder, "train", "tiny.toml", *(["--resume"] if resume else []), *args)
    assert done.code == 0, done.out + done.err
    assert done.err == ""
    return done.out


def losses(folder: Path, name: str = "tiny") -> list[Any]:
    """Of all steps, which must be there once each."""
    lines = metrics(folder / "runs" / name)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def weights(folder: Path, name: str = "tiny") -> dict[str, torch.Tensor]:
    """Of the finished model."""
    return load_file(folder / "runs" / name / "model" / "model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """To the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_three_interruptions_change_no_bit(folder: Path) -> None:
    # pains.md T72, T73, T76: within an epoch (12 steps) and beyond it, shuffled, with moments.
    go(folder, *PP2, "train.steps=14", "output.name=whole", resume=False)
    for steps in (3, 4, 13, 14):
        go(folder, *PP2, f"train.steps={steps}")
    assert losses(folder) == losses(folder, "whole")
    assert equal(weights(folder), weights(folder, "whole"))


def test_weights_alone_are_not_enough(folder: Path) -> None:
    # pains.md T72: if the moments were not loaded, nobody would see it but in a comparison like this.
    go(folder, *PP2, "train.steps=2")
    go(folder, *PP2, "train.steps=4")
    begun = ("model.path=runs/tiny/checkpoints/step-00000002", "model.vocab_multiple=16", "output.name=weights")
    go(folder, *PP2, "train.steps=2", *begun, resume=False)
    moments, bare = losses(folder)[2:], losses(folder, "weights")
    assert bare[0] != moments[0]  # other data, too: this one begins at the beginning
    assert not equal(weights(folder), weights(folder, "weights"))
    assert bare[0] == pytest.approx(losses(folder)[0], rel=0.2)
    assert bare[0] < losses(folder)[0]  # but it begins with what was learned


@pytest.mark.parametrize("layout", [("layout.dp=2", "layout.tp=2"), ("layout.cp=2", "layout.zero=3")])
def test_another_layout_goes_on_with_the_same_samples(folder: Path, layout: tuple[str, ...]) -> None:
    # pains.md T69, T70
    go(folder, *PP2, "train.steps=6", "output.name=whole", resume=False)
    go(folder, *PP2, "train.steps=3")
    said = go(folder, *STEADY, *layout, "train.steps=6")
    assert "Changed since it last ran: layout.pp: 2 -> 1" in said
    assert losses(folder)[:3] == losses(folder, "whole")[:3]
    assert losses(folder)[3:] == pytest.approx(losses(folder, "whole")[3:], rel=1e-5)


def test_another_batch_size_goes_on_where_the_data_stood(folder: Path) -> None:
    go(folder, *PP2, "train.steps=2")
    go(folder, *PP2, "train.steps=4", "batch.sequences=6")
    assert [line["samples"] for line in metrics(folder / "runs" / "tiny")] == [4, 8, 14, 20]
    assert [line["tokens"] for line in metrics(folder / "runs" / "tiny")] == [256, 512, 896, 1280]


RAMP = "batch.phases=[{after_tokens=768, sequences=8}, {after_tokens=2304, sequences=12, seq_len=48}]"


def test_a_batch_ramp_interrupted_at_each_change(folder: Path) -> None:
    # pains.md T84: 4 -> 8 -> 12 sequences at steps 3 and 6, the last ones shorter, stopped at both and in between.
    go(folder, *PP2, RAMP, "train.steps=9", "output.name=whole", resume=False)
    lines = metrics(folder / "runs" / "whole")
    sizes = [256] * 3 + [512] * 3 + [576] * 3
    assert [line["tokens"] for line in lines] == [sum(sizes[: i + 1]) for i in range(9)]
    for steps in (3, 5, 6, 9):
        go(folder, *PP2, RAMP, f"train.steps={steps}")
    assert losses(folder) == losses(folder, "whole")
    assert equal(weights(folder), weights(folder, "whole"))


def test_settings_come_from_the_recipe(folder: Path) -> None:
    # pains.md T77
    go(folder, *PP2, "train.steps=2")
    said = go(folder, *PP2, "train.steps=3", "optimizer.lr=5e-4", "optimizer.weight_decay=0.3")
    assert "Changed since it last ran: optimizer.lr: 0.01 -> 0.0005" in said
    assert [line["lr"] for line in metrics(folder / "runs" / "tiny")] == [1e-2, 1e-2, 5e-4]


def test_resume_of_what_is_not_there_starts_it(folder: Path) -> None:
    said = go(folder, *STEADY, "train.steps=1")
    assert "Weights: random" in said
    assert losses(folder) != []


def test_a_finished_run_has_nothing_left_to_do(folder: Path) -> None:
    go(folder, *STEADY, "train.steps=2")
    before = weights(folder)
    assert "there was nothing left to do" in go(folder, *STEADY, "train.steps=2")
    assert equal(weights(folder), before)


class TestDamage:
    def flip(self, file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[-5] ^= 16
        file.write_bytes(content)

    def test_the_newest_good_one_is_named_and_used(self, folder: Path) -> None:
        go(folder, *PP2, "train.steps=4")
        checkpoints = folder / "runs" / "tiny" / "checkpoints"
        self.flip(checkpoints / "step-00000004" / "rank-00001.safetensors")
        said = go(folder, *PP2, "train.steps=3")
        assert re.search(r"step-00000004 is damaged: rank-00001.safetensors .*passed over", said)
        assert "Going on from runs/tiny/checkpoints/step-00000002" in said
        assert len(losses(folder)) == 3
        assert "checkpoints/step-00000003" in said  # which the model is of, and not the later, damaged one
        assert (folder / "runs" / "tiny" / "model" / "model.safetensors").exists()

    def test_without_a_good_one_nothing_begins_anew(self, folder: Path) -> None:
        go(folder, *PP2, "train.steps=2")
        self.flip(folder / "runs" / "tiny" / "checkpoints" / "step-00000002" / "rank-00000.safetensors")
        done = train(folder, *PP2, "train.steps=4", resume=True)
        assert done.code == 1
        assert "no checkpoint in runs/tiny/checkpoints is whole" in done.err
        assert len(metrics(folder / "runs" / "tiny")) == 2

    def test_another_model_is_refused_by_key(self, folder: Path) -> None:
        go(folder, *PP2, "train.steps=2")
        done = train(folder, *PP2, "model.ffn_dim=64", resume=True)
        assert done.code == 2
        assert "model.ffn_dim = 64" in done.err

    def test_a_start_that_fails_removes_nothing_that_was_there(self, folder: Path) -> None:
        # Without metrics, as after a power cut, it looks like a run that has made no step.
        go(folder, *PP2, "train.steps=2")
        run = folder / "runs" / "tiny"
        (run / "metrics.jsonl").unlink()
        assert train(folder, *PP2, "model.ffn_dim=64", resume=True).code == 2
        self.flip(run / "checkpoints" / "step-00000002" / "rank-00000.safetensors")
        assert train(folder, *PP2, resume=True).code == 1
        assert (run / "checkpoints" / "step-00000002" / "index.json").exists()


class TestNoCheckpoint:
    """A run that has saved does not begin anew because of a wrong path or a disk that is not there."""

    def test_what_was_saved_must_be_found(self, folder: Path) -> None:
        go(folder, *PP2, "train.steps=2")
        done = train(folder, *PP2, "train.steps=4", "checkpoint.dir=typo", resume=True)
        assert done.code == 2
        assert 'output.name = "tiny": has made 2 steps and saved them, but there is no checkpoint in typo' in done.err
        assert len(losses(folder)) == 2
        assert json.loads((folder / "runs" / "tiny" / "run.json").read_text())["state"] == "finished"

    def test_what_was_not_saved_is_kept_aside(self, folder: Path) -> None:
        command = Command(folder, "train", "tiny.toml", *(a for o in (*PP2, "train.steps=90") for a in ("--set", o)))
        command.wait_until(has_steps(folder / "runs" / "tiny", 1))
        command.signal(signal.SIGKILL, group=True)
        command.end()
        made = len(metrics(folder / "runs" / "tiny"))
        shutil.rmtree(folder / "runs" / "tiny" / "checkpoints", ignore_errors=True)
        recipe = folder / "runs" / "tiny" / "recipe.toml"
        recipe.write_text(recipe.read_text().replace("every = 2", "every = 500"))
        said = go(folder, *PP2, "train.steps=1")
        assert f"It had made {made} steps, but no checkpoint, and begins anew; see metrics-1.jsonl" in said
        assert len((folder / "runs" / "tiny" / "metrics-1.jsonl").read_text().splitlines()) == made

    def test_memory_is_no_place_for_several_processes(self, folder: Path) -> None:
        done = train(folder, *STEADY, "checkpoint.dir=memory://x")
        assert done.code == 2
        assert 'checkpoint.dir = "memory://x": is in the memory of one process' in done.err


class TestStopped:
    ENDLESS = ("train.steps=100000",)

    def test_sigterm_saves_and_exits_0(self, folder: Path) -> None:
        command = Command(folder, *self.args("checkpoint.every=0", *self.ENDLESS))
        command.wait_until(has_steps(folder / "runs" / "tiny", 3))
        command.signal(signal.SIGTERM)
        done = command.end()
        assert done.code == 0, done.err
        assert done.seconds < 10
        stopped_at = len(losses(folder))
        assert f"checkpoints/step-{stopped_at:08d}" in done.out
        assert json.loads((folder / "runs" / "tiny" / "run.json").read_text())["state"] == "stopped"
        go(folder, *PP2, f"train.steps={stopped_at + 2}")
        go(folder, *PP2, f"train.steps={stopped_at + 2}", "output.name=whole", resume=False)
        assert losses(folder) == losses(folder, "whole")

    def test_a_run_that_runs_is_not_resumed(self, folder: Path) -> None:
        command = Command(folder, *self.args(*self.ENDLESS))
        command.wait_until(has_steps(folder / "runs" / "tiny", 1))
        done = train(folder, *PP2, resume=True)
        command.signal(signal.SIGTERM)
        command.end()
        assert done.code == 2
        assert 'output.name = "tiny": is running already, as process' in done.err

    def test_a_job_that_is_started_again_on_another_machine(self, folder: Path) -> None:
        go(folder, *PP2, "train.steps=2")
        file = folder / "runs" / "tiny" / "run.json"
        lost = {**json.loads(file.read_text()), "state": "running", "host": "another", "job_id": "7"}
        file.write_text(json.dumps(lost))
        done = train(folder, *PP2, "train.steps=3", resume=True)
        assert done.code == 2
        assert "on another; two would overwrite each other's files. If that machine has failed, remove" in done.err
        done = train(folder, *PP2, "train.steps=3", resume=True, env={"SLURM_JOB_ID": "7"})
        assert done.code == 0
        assert len(losses(folder)) == 3

    def test_killed_and_resumed(self, folder: Path) -> None:
        command = Command(folder, *self.args("checkpoint.every=1", *self.ENDLESS))
        command.wait_until(has_steps(folder / "runs" / "tiny", 5))
        command.signal(signal.SIGKILL, group=True)
        command.end()
        listed = fourfold(folder, "runs").out
        assert re.search(r"tiny\s+died", listed)
        done = len(metrics(folder / "runs" / "tiny"))
        go(folder, *PP2, f"train.steps={done + 2}")
        go(folder, *PP2, f"train.steps={done + 2}", "output.name=whole", resume=False)
        assert losses(folder) == losses(folder, "whole")

    def args(self, *overrides: str) -> list[str]:
        return ["train", "tiny.toml", *(arg for o in (*PP2, *overrides) for arg in ("--set", o))]


def test_checkpoints_of_another_run_are_left_alone(folder: Path) -> None:
    go(folder, *STEADY, "train.steps=1", "checkpoint.dir=shared", resume=False)
    done = train(folder, *STEADY, "train.steps=1", "checkpoint.dir=shared", "output.name=other")
    assert done.code == 2
    assert 'checkpoint.dir = "shared": holds checkpoints of another run, up to step 1' in done.err
    assert not (folder / "runs" / "other").exists()


def test_validation_weighs_every_label_and_waits_for_nobody(folder: Path) -> None:
    # pains.md T83, T40: 7 rows on two groups, the last one short; the same loss under another layout.
    (folder / "held-out.txt").write_text("the cat slept on the mat " * 17)
    sets = 'data.validation=[{name="held-out", source="held-out.txt", every=2}]'
    go(folder, *STEADY, sets, "layout.dp=2", "layout.pp=2", "train.steps=3", resume=False)
    go(folder, *STEADY, sets, "train.steps=3", "output.name=one", "pipeline.micro_batch=2", resume=False)
    found = [
        [json.loads(line) for line in (folder / "runs" / name / "validation.jsonl").read_text().splitlines()]
        for name in ("tiny", "one")
    ]
    for lines in found:
        assert [(line["step"], line["set"], line["valid_tokens"]) for line in lines] == [
            (2, "held-out", 424),
            (3, "held-out", 424),
        ]
    assert [line["loss"] for line in found[0]] == pytest.approx([line["loss"] for line in found[1]], rel=1e-5)


def test_ranges_of_samples_are_left_out(folder: Path) -> None:
    go(folder, *STEADY, "train.steps=2", "data.skip=[[4, 9]]", resume=False)
    go(folder, *STEADY, "train.steps=1", "output.name=first", resume=False)
    assert [line["samples"] for line in metrics(folder / "runs" / "tiny")] == [4, 13]
    assert losses(folder)[0] == losses(folder, "first")[0]


class TestNotFinite:
    """The first step throws the weights out of the range of float32."""

    BROKEN = ("optimizer.name=sgd", "optimizer.lr=1e38", "optimizer.clip_norm=0", "train.sanity_steps=0")

    def test_stop_names_the_first_value(self, folder: Path) -> None:
        done = train(folder, *STEADY, *self.BROKEN, "layout.pp=2")
        assert done.code == 1
        assert re.search(r"^error: step [23]: loss .*: first on rank \d \(tp 0, .*\): .* of micro-", done.err)
        assert "Traceback" not in done.err
        lines = metrics(folder / "runs" / "tiny")
        assert all(line["loss"] is not None for line in lines)

    def test_skip_goes_on_until_it_is_too_much(self, folder: Path) -> None:
        done = train(
            folder, *STEADY, *self.BROKEN, "layout.dp=2", "train.non_finite=skip", "train.max_skipped=2",
            "train.steps=9",
        )  # fmt: skip
        assert done.code == 1
        assert done.out.count("; the step is left out") == 2
        assert "3 steps in a row were not finite" in done.err
        assert [line["skipped"] for line in metrics(folder / "runs" / "tiny")][-1] == 2


def test_elastic_restart_goes_on(folder: Path) -> None:
    """torchrun starts all ranks again when one is killed, and the run goes on in its folder, under any name."""
    go(folder, *PP2, "train.steps=30", resume=False)  # takes the name "tiny"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    overrides = [arg for o in (*PP2, "train.steps=30", "checkpoint.every=1") for arg in ("--set", o)]
    job = subprocess.Popen(
        [*torchrun, "--max-restarts", "1", "-m", "fourfold.cli", "train", "tiny.toml", *overrides],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        run = folder / "runs" / "tiny-2"
        wait_until(lambda: has_steps(run, 8)() or job.poll() is not None, 100)
        victim = json.loads((run / "run.json").read_text())["pid"]
        os.kill(victim, signal.SIGKILL)
        out, _ = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 0, out
    assert "Going on from runs/tiny-2/checkpoints/step-" in out
    assert losses(folder, "tiny-2") == losses(folder)
    assert equal(weights(folder, "tiny-2"), weights(folder))
