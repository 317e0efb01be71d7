"""What loading costs: a step of the demo, rows of a large set, and going on far into a run.

Three measurements, each the median of several blocks:

- a demo step: recipes/demo.toml is trained for a few steps, and the loading of the same steps is timed without
  prefetching, in one process, on an idle machine. On a machine with fewer cores than ranks, all ranks' loading shares
  them with the computation, so the share of a step counts the loading of all 16 ranks over the cores.
  Bar: under 2 % of the step.
- rows per second from a token file of 1 GB that is made on the spot, mapped into memory, in random order.
- the time from opened files to the first batch, at the beginning and after 10^12 tokens. Bar: at most 2 times as long.

    ./run bench loader [--steps 8] [--bytes 1000000000] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from fourfold.data.sidecar import TokenizerId
from fourfold.data.source import TokenSource
from fourfold.data.sources import prepare_sources
from fourfold.data.stream import Position, Stream
from fourfold.data.writer import TokenFileWriter
from fourfold.recipe import check, load
from fourfold.trainer.batches import Loader

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "demo.toml"
SHARE_BAR, RESUME_BAR = 0.02, 2.0
BLOCKS, FAR, SEQ_LEN = 5, 10**12, 4096


def demo_step(steps: int, folder: Path) -> float:
    """Seconds of a step of the demo: the median, after the first, in which everything is made."""
    settings = (f"train.steps={steps}", f"output.dir={folder}", "output.name=run", "checkpoint.every=0")
    command = [sys.executable, "-m", "fourfold.cli", "train", str(RECIPE)]
    subprocess.run([*command, *(x for s in settings for x in ("--set", s))], check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return median(json.loads(line)["step_seconds"] for line in lines[1:])


def demo_loading(folder: Path) -> float:
    """Seconds in which one rank loads a step of the demo."""
    plan = check(load(RECIPE, ["data.prefetch=0"]))
    prepared = prepare_sources(
        plan.recipe.data, folder, vocab_size=plan.config.vocab_size, seq_len=plan.phases[0].seq_len
    )
    stream, phase, position = prepared.open_stream(), plan.phases[0], Position()
    loader = Loader(stream, plan, dp_rank=0)
    seconds = []
    for _ in range(BLOCKS * 20):
        started = time.perf_counter()
        loader.micro_batches(position, phase)
        position = stream.advance(position, phase.seq_len, phase.sequences)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def make_set(prefix: Path, num_bytes: int) -> None:
    """A token file of uint16 with documents of about 1,000 tokens."""
    random, left = np.random.default_rng(0), num_bytes // 2
    with TokenFileWriter(prefix, TokenizerId(name="none", sha256=None, file=None), 2**16) as writer:
        while left > 0:
            block = random.integers(0, 2**16, min(left, 2**22), dtype=np.uint16)
            cuts = np.cumsum(random.geometric(1e-3, len(block) // 500))
            writer.write(np.split(block, cuts[cuts < len(block)]))
            left -= len(block)
        writer.finish()


def open_stream(prefix: Path) -> Stream:
    """As every rank does."""
    return Stream([TokenSource("set", [prefix], vocab_size=2**16)], [1.0], chunk=SEQ_LEN, seed=0)


def rows_per_second(prefix: Path) -> float:
    """In a random order of the set, one thread."""
    stream, rates = open_stream(prefix), []
    for block in range(BLOCKS):
        started = time.perf_counter()
        stream.rows(Position(), SEQ_LEN, block * 1000, (block + 1) * 1000)
        rates.append(1000 / (time.perf_counter() - started))
    return median(rates)


def first_batches(prefix: Path, samples: tuple[int, ...]) -> list[float]:
    """Seconds from opened files to the first 16 rows after so many samples, by turns."""
    seconds: list[list[float]] = [[] for _ in samples]
    for _ in range(10 * BLOCKS):
        for number, measured in zip(samples, seconds, strict=True):
            stream = open_stream(prefix)
            started = time.perf_counter()
            position = stream.advance(Position(), SEQ_LEN, number) if number else Position()
            stream.rows(position, SEQ_LEN, 0, 16)
            measured.append(time.perf_counter() - started)
    return [median(measured) for measured in seconds]


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps of the demo (default 8)")
    parser.add_argument("--bytes", type=int, default=10**9, help="size of the large set (default 1 GB)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loading, step = demo_loading(folder / "tokens"), demo_step(options.steps, folder / "runs")
        make_set(folder / "large", options.bytes)
        rate = rows_per_second(folder / "large")
        near, far = first_batches(folder / "large", (0, FAR // SEQ_LEN))
    ranks, cores = check(load(RECIPE)).grid.size, os.cpu_count() or 1
    share = loading * max(1.0, ranks / cores) / step
    if options.json:
        values = {
            "loading_seconds": loading, "step_seconds": step, "share": share, "share_bar": SHARE_BAR,
            "rows_per_second": rate, "tokens_per_second": rate * SEQ_LEN,
            "first_batch_seconds": near, "first_batch_far_seconds": far, "resume_bar": RESUME_BAR,
        }  # fmt: skip
        print(json.dumps(values))
    else:
        print(f"demo step {step * 1e3:,.0f} ms; a rank loads its part in {loading * 1e3:.2f} ms")
        print(f"  {ranks} ranks on {cores} cores: {share:.2%} of the step, bar {SHARE_BAR:.0%}")
        size = f"{options.bytes / 1e9:.2g} GB"
        print(f"rows of {SEQ_LEN:,} tokens from {size}: {rate:,.0f}/s, {rate * SEQ_LEN:,.0f} tokens/s")
        print(f"first batch: {near * 1e3:.2f} ms at the beginning, {far * 1e3:.2f} ms after 10^12 tokens")
        print(f"  ratio {far / near:.2f}, bar {RESUME_BAR:.0f}")
    return int(share > SHARE_BAR or far > RESUME_BAR * near)


if __name__ == "__main__":
    sys.exit(main())
