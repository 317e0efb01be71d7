"""Kills a run thirty times with SIGKILL, resumes it each time, and compares its end with a run that was left alone.

    ./run bench resume [--kills 30]

The kills hit a whole run (as a machine that loses power) or one of its processes (as the system does when memory runs
out), at random moments, and in a third of the cases while a checkpoint is being written. Two ranks, shuffled mixture of
two texts, a change of batch size and row length on the way. Final weights, and the loss of every step, must be bitwise
those of the run that was left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

STEPS = 400
RECIPE = f"""
[model]
dim = 256
num_layers = 4
num_heads = 4
num_kv_heads = 2
ffn_dim = 512
vocab_size = 256
vocab_multiple = 16

[layout]
pp = 2

[batch]
sequences = 4
seq_len = 32
phases = [{{after_tokens = 12800, sequences = 6, seq_len = 48}}]

[data]
mix = [{{source = "one.txt", weight = 0.7}}, {{source = "two.txt", weight = 0.3}}]
validation = [{{name = "held-out", source = "three.txt", every = 50}}]

[optimizer]
lr = 1e-3
schedule = "wsd"
warmup_steps = 10

[train]
steps = {STEPS}

[checkpoint]
every = 5
keep = 2
"""


def write_job(folder: Path) -> Path:
    """The recipe and its texts."""
    rng = random.Random(3)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "slept", "long"]
    for name in ("one", "two", "three"):
        (folder / f"{name}.txt").write_text(" ".join(rng.choices(words, k=6000)))
    recipe = folder / "job.toml"
    recipe.write_text(RECIPE)
    return recipe


class Job:
    """One start of the run, in a process group of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        command = [
            sys.executable,
            "-m",
            "fourfold.cli",
            "train",
            "job.toml",
            "--resume",
            "--set",
            f"output.name={name}",
        ]
        self.run = folder / "runs" / name
        self.log = (folder / f"{name}.log").open("a")
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def steps_done(self) -> int:
        """Lines of metrics.jsonl."""
        file = self.run / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def ranks(self) -> list[int]:
        """Process ids of the forked ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()] if children.exists() else []

    def wait_for_save(self) -> None:
        """Returns when a checkpoint is being written, or the run has ended."""
        while self.process.poll() is None and not list(self.run.glob("checkpoints/*.partial")):
            time.sleep(0.0005)

    def wait_for_steps(self, number: int) -> None:
        """Returns when so many steps were made here, or the run has ended."""
        before = self.steps_done()
        while self.process.poll() is None and self.steps_done() < before + number:
            time.sleep(0.002)

    def kill(self, *, rank: int | None) -> None:
        """SIGKILL for the whole run, or for one rank of it."""
        ranks = self.ranks()
        if rank is None or rank >= len(ranks):
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            os.kill(ranks[rank], signal.SIGKILL)
        self.process.wait(60)
        self.log.close()


def run_killed(folder: Path, kills: int, rng: random.Random) -> tuple[int, int, int]:
    """(Kills, of them during a save, starts that could not go on from a checkpoint) until the run ended by itself."""
    done = during = fresh = 0
    while True:
        job = Job(folder, "killed")
        if done < kills:
            # A kill in the first moments is one, too; but now and then a run must get on.
            if rng.random() < 1 / 3:
                job.wait_for_steps(1)
                job.wait_for_save()
                time.sleep(rng.uniform(0, 0.02))
                during += bool(list(job.run.glob("checkpoints/*.partial")))
            elif rng.random() < 0.2:
                time.sleep(rng.uniform(0, 3))
            else:
                job.wait_for_steps(rng.randint(1, 2 * STEPS // kills))
                time.sleep(rng.uniform(0, 0.05))
            if job.process.poll() is None:
                job.kill(rank=rng.choice([None, 0, 1]))
                done += 1
                continue
        if job.process.wait(600) != 0:
            sys.exit(f"a start did not go on:\n{(folder / 'killed.log').read_text()[-3000:]}")
        text = (folder / "killed.log").read_text()
        fresh = text.count("Weights: random") - 1
        return done, during, fresh


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fourfold-resume-") as path:
        folder = Path(path)
        write_job(folder)
        started = time.monotonic()
        alone = Job(folder, "alone")
        if alone.process.wait(900) != 0:
            sys.exit((folder / "alone.log").read_text()[-3000:])
        print(f"left alone: {STEPS} steps in {time.monotonic() - started:.0f} s")
        done, during, fresh = run_killed(folder, arguments.kills, random.Random(arguments.seed))
        print(
            f"killed {done} times, {during} of them while a checkpoint was being written; "
            f"{fresh} of {done} later starts found no checkpoint yet"
        )
        compare(folder / "runs" / "alone", folder / "runs" / "killed")
        print(f"in all {time.monotonic() - started:.0f} s")


def compare(alone: Path, killed: Path) -> None:
    """Prints whether both are the same to the bit, and exits with 1 if they are not."""
    different = []
    for name in ("metrics.jsonl", "validation.jsonl"):
        one, other = ([json.loads(line) for line in (run / name).read_text().splitlines()] for run in (alone, killed))
        keys = ("step", "loss", "grad_norm", "lr", "tokens", "samples", "set")
        pick = [[{k: line[k] for k in keys if k in line} for line in lines] for lines in (one, other)]
        if pick[0] != pick[1]:
            different.append(name)
        print(f"{name}: {len(one)} lines, {'bitwise equal' if pick[0] == pick[1] else 'DIFFERENT'}")
    for file in sorted((alone / "model").glob("*.safetensors")):
        one, other = load_file(file), load_file(killed / "model" / file.name)
        wrong = [name for name in one if not (one[name] == other[name]).all()] + sorted(one.keys() ^ other.keys())
        different += wrong
        print(f"{file.name}: {len(one)} tensors, {'bitwise equal' if not wrong else f'DIFFERENT: {wrong[:5]}'}")
    if different:
        sys.exit(1)


if __name__ == "__main__":
    main()
