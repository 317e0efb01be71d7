"""One rank of eight is really slowed; its own traces and logs must say which, and by what.

Real processes, tp2 x pp2 x dp2, train a small Llama on this machine's CPUs. Three faults on three ranks each, which
differ in every dimension:

- stopped: SIGSTOP and SIGCONT in turns, from outside;
- layer: more work in one layer of the rank, as if its device multiplied slowly there;
- loader: its loader sleeps before it gives a step's batch.

Every run is diagnosed twice, once from its profiler traces and once from its action logs, and so is a run without a
fault. Exits with 1 unless each names the one culprit, with the right kind, and the healthy run has none. The faults are
made here, by replacing objects in the one process: the trainer knows of none.

Eight ranks on few cores are without one for most of the time, and what else the machine does slows some of them more
than others. So faults are large: they add 0.5 to 1.5 seconds to the 1.5 that a rank spends on its own in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.debugger.ask import ask
from fourfold.debugger.slow.diagnosis import Diagnosis
from fourfold.model.llama import Layer
from fourfold.recipe import RunPlan, check, from_table
from fourfold.trainer.batches import Loader
from fourfold.trainer.join import train_rank
from fourfold.trainer.prepare import prepare
from fourfold.trainer.ranks import fork_ranks
from fourfold.trainer.weights import describe_weights, initial_weights

RANKS = (1, 4, 6)  # (dp, pp, tp) = (0, 0, 1), (1, 0, 0), (1, 1, 0)
KINDS = {"stopped": "cpu", "layer": "compute", "loader": "cpu"}  # as `fourfold diagnose` calls them
STEPS, PROFILED = 9, "5-8"
BURST = 0.06, 0.04  # seconds that a rank is stopped, and runs
EXTRA = 16  # products beside those of the layer
SLEEP = 0.8  # seconds per step

RECIPE = {
    "model": {"dim": 384, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 1024, "vocab_size": 261},
    "layout": {"tp": 2, "pp": 2, "dp": 2},
    "pipeline": {"micro_batch": 2},
    "batch": {"sequences": 16, "seq_len": 256},
    "data": {"prefetch": 0},
    "train": {"steps": STEPS, "sanity_steps": 0},
    "output": {"action_log_every": 1, "tensorboard": False},
    "profile": {"steps": PROFILED},
}


class Case(NamedTuple):
    """A fault and the rank that has it; no fault: the rank means nothing."""

    fault: str
    rank: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.fault}-{self.rank}" if self.fault else "healthy"


CASES = (Case("", -1), *(Case(fault, rank) for fault, rank in product(KINDS, RANKS)))


def train(case: Case, parent: Path) -> Path:
    """Trains with the fault. Returns the folder of the run."""
    plan = plan_in(parent, case.name)
    with (parent / f"{case.name}.log").open("w", encoding="utf-8") as log, redirect_stdout(log):
        prepared = prepare(plan, weights_from=describe_weights(plan), resume=False)
        weights = initial_weights(plan)

        def work(rank: int) -> None:
            if rank == case.rank:
                (prepared.folder / "slow.pid").write_text(str(os.getpid()))
                FAULTS[case.fault]()
            train_rank(prepared, weights, torch.device("cpu"))

        with stopper(prepared.folder) if case.fault == "stopped" else nullcontext():
            fork_ranks(plan.grid.size, work, timeout=300)
    return prepared.folder


def plan_in(parent: Path, name: str) -> RunPlan:
    """The run of this name, on text that is made if it is not there."""
    text = parent / "text" / "words.txt"
    if not text.exists():
        text.parent.mkdir(parents=True)
        chance = random.Random(1)
        text.write_text(" ".join(chance.choices(["the", "ranks", "wait", "for", "one", "of", "them"], k=100_000)))
    output = {**RECIPE["output"], "dir": str(parent), "name": name}
    return check(from_table({**RECIPE, "data": {**RECIPE["data"], "source": str(text.parent)}, "output": output}))


def make_layer_slow() -> None:
    """From now on the first layer of this process multiplies more than it needs to, forward and backward."""
    forward, slow = Layer.forward, []

    def multiply(x: Tensor) -> None:
        with torch.no_grad():
            square = x.new_ones(x.shape[-1], 3 * x.shape[-1])
            for _ in range(EXTRA):
                torch.matmul(x, square)

    def with_more(layer: Layer, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        slow.append(layer)
        out = forward(layer, x, *args, **kwargs)
        if layer is slow[0]:
            multiply(out)
            out.register_hook(multiply)
        return out

    Layer.forward = with_more  # type: ignore[method-assign]


def make_loader_slow() -> None:
    """From now on every step of this process waits for its batch."""
    load = Loader.micro_batches

    def late(loader: Loader, *args: Any) -> Any:
        time.sleep(SLEEP)
        return load(loader, *args)

    Loader.micro_batches = late  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {"stopped": lambda: None, "layer": make_layer_slow, "loader": make_loader_slow}


@contextmanager
def stopper(folder: Path) -> Generator[None]:
    """Another process, which stops and continues the one whose number is in the folder until that ends."""

    def work() -> None:
        while not (folder / "slow.pid").exists() or not (folder / "metrics.jsonl").exists():
            time.sleep(0.05)
        process = int((folder / "slow.pid").read_text())
        while True:
            for number, seconds in zip((signal.SIGSTOP, signal.SIGCONT), BURST, strict=True):
                try:
                    os.kill(process, number)
                except ProcessLookupError:
                    return
                time.sleep(seconds)

    process = get_context("fork").Process(target=work)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


class Judged(NamedTuple):
    """What the debugger says of a run, and whether that is right."""

    case: str
    source: str
    answer: str
    culprits: list[dict[str, Any]]
    right: bool


def judge(case: Case, folder: Path) -> Iterator[Judged]:
    """From the run's traces and from its action logs."""
    for source in ("profile", "actions"):
        found = ask(folder / source, layout="tp=2,cp=1,pp=2,dp=2")
        assert isinstance(found, Diagnosis)
        culprits = [
            {"ranks": one.ranks, "kind": one.kind, "cause": one.cause, "factor": one.factor, "excess": one.excess}
            for one in found.verdict.culprits
        ]
        named = [(one["ranks"], one["kind"]) for one in culprits]
        wanted = [((case.rank,), KINDS[case.fault])] if case.fault else []
        yield Judged(case.name, source, found.verdict.answer, culprits, named == wanted)


def show(judged: Judged) -> None:
    """Prints a line for people."""
    said = "; ".join(
        "rank {} {}: {} ({:.2f} times, {:.2f} s)".format(
            "-".join(map(str, one["ranks"])), one["kind"], one["cause"], one["factor"], one["excess"]
        )
        for one in judged.culprits
    )
    words = f"{judged.answer}{': ' if said else ''}{said}"
    print(f"{judged.case:10} {judged.source:8} {'right' if judged.right else 'WRONG'}  {words}", flush=True)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in this folder; those there are taken")
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=[case.name for case in CASES], help="some of them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    answers = []
    with nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if options.only and case.name not in options.only:
                continue
            run = Path(folder) / case.name
            if not (run / "profile").is_dir():
                run = train(case, Path(folder))
            for judged in judge(case, run):
                answers.append(judged)
                if not options.json:
                    show(judged)
    right = sum(judged.right for judged in answers)
    if options.json:
        print(json.dumps({"right": right, "of": len(answers), "answers": [judged._asdict() for judged in answers]}))
    else:
        print(f"{right} of {len(answers)} right")
    return 0 if right == len(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
