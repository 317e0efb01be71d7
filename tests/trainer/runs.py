"""Runs of the command line in processes of their own: a tiny recipe, and what came of it."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

import torch

import fourfold.trainer.launch
from fourfold import cli

RECIPE = """
[model]
dim = 32
num_layers = 4
num_heads = 4
num_kv_heads = 2
ffn_dim = 48
vocab_size = 261
vocab_multiple = 16

[batch]
sequences = 4
seq_len = 64

[data]
source = "text"

[optimizer]
lr = 1e-2

[train]
steps = 3
"""


def write_recipe(folder: Path) -> Path:
    """A recipe of a tiny model on a little text, with paths relative to ``folder``."""
    (folder / "text").mkdir()
    random = Random(5)
    for number in range(12):
        words = random.choices(["the", "cat", "sat", "on", "a", "mat", "and", "slept"], k=random.randint(20, 120))
        (folder / "text" / f"{number}.txt").write_text(" ".join(words))
    recipe = folder / "tiny.toml"
    recipe.write_text(RECIPE)
    return recipe


@dataclass(frozen=True)
class Ended:
    """A finished command: its exit code, what it wrote, and how long it took after the last signal, or in all."""

    code: int | None
    out: str
    err: str
    seconds: float


class Command:
    """``fourfold`` with arguments, in a process group of its own: a fork of this process, which has torch already.

    Args:
        folder: working directory.
        args: of the command.
        patch: called in the process before the command, to break something.
        env: added to the environment.
    """

    def __init__(
        self, folder: Path, *args: str, patch: Callable[[], Any] | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        number = len(list(folder.glob("stdout*")))
        self._files = [folder / f"{name}-{number}" for name in ("stdout", "stderr")]
        for file in self._files:
            file.touch()
        self.since = time.monotonic()

        def enter() -> None:
            os.setsid()
            os.chdir(folder)
            for descriptor, file in enumerate(self._files, 1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), descriptor)
            sys.stdout, sys.stderr = (os.fdopen(d, "w", closefd=False) for d in (1, 2))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            faulthandler.register(signal.SIGUSR1, file=2)  # forked ranks inherit it
            torch.set_num_threads(1)  # the threads of the parent are not here
            os.environ.update(env or {})
            sys.argv = ["fourfold", *args]
            if patch is not None:
                patch()
            cli.main()

        self.process: BaseProcess = get_context("fork").Process(target=enter)
        self.process.start()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Polls while the command runs."""
        wait_until(lambda: condition() or not self.process.is_alive())
        assert condition(), self.end()

    def signal(self, number: int, *, group: bool = False) -> None:
        """To the process, or as a terminal does it to all processes of its group."""
        assert self.process.pid is not None
        self.since = time.monotonic()
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self, timeout: float = 60) -> Ended:
        """Waits for the end. Of a command that hangs all processes write into its stderr where their threads stand."""
        self.process.join(timeout)
        seconds = time.monotonic() - self.since
        if self.process.is_alive():
            assert self.process.pid is not None
            os.killpg(self.process.pid, signal.SIGUSR1)
            time.sleep(1)
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()
        out, err = (file.read_text() for file in self._files)
        return Ended(self.process.exitcode, out, err, seconds)


def fourfold(folder: Path, *args: str, **options: Any) -> Ended:
    """Runs a command to its end."""
    return Command(folder, *args, **options).end()


def train(folder: Path, *overrides: str, resume: bool = False, **options: Any) -> Ended:
    """Trains the tiny recipe."""
    args = [*(["--resume"] if resume else []), *(arg for o in overrides for arg in ("--set", o))]
    return fourfold(folder, "train", "tiny.toml", *args, **options)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, all of which must be whole."""
    text = (run / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def refuse(name: str) -> None:
    """NaN and Infinity are no JSON."""
    raise ValueError(name)


def wait_until(condition: Callable[[], bool], timeout: float = 60) -> None:
    """Polls."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_steps(run: Path, count: int) -> Callable[[], bool]:
    """Whether a run has written so many steps."""
    file = run / "metrics.jsonl"
    return lambda: file.exists() and file.read_text().count("\n") >= count
