"""What recording the numbers of a step costs, on the 16 ranks of recipes/demo.toml.

Steps that are not recorded, of which gradients and weights are recorded, and of which everything is, take turns in one
run, so that whatever else the machine does meets all three. What is measured is a whole step of the training loop with
the writing of its file: on the slowest rank by the clock on the wall, and the processor time of all ranks together,
which on a busy machine is the steadier number. A ratio is that of two neighbouring steps; the median is reported.

Exits with 1 if recording gradients and weights takes more than the bar of a step's processor time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from fourfold.data import sources
from fourfold.debugger.numerics.records import step_folder, write
from fourfold.parallel import WeightSource, connect
from fourfold.recipe import Checkpoint, Output, check, load
from fourfold.trainer.loop import Trainer
from fourfold.trainer.numerics import StepRecorder
from fourfold.trainer.prepare import Prepared
from fourfold.trainer.ranks import fork_ranks
from fourfold.trainer.weights import initial_weights

RECIPE = Path(__file__).parent.parent / "recipes" / "demo.toml"
BAR = 0.05
WARM_UP = 3
WAYS = ("none", "weights", "all")


class Times(NamedTuple):
    """Seconds of one step on one rank, by the clock on the wall and of the processors."""

    wall: float
    processor: float


def work(run: Prepared, weights: WeightSource, rounds: int) -> list[list[Times]]:
    """One rank: the times of its steps, by round and way."""
    groups = connect(run.plan.grid, "cpu")
    trainer = Trainer(run, groups=groups, weights=weights, device=torch.device("cpu"))
    recorders = {way: StepRecorder(trainer.model, everything=way == "all") for way in WAYS[1:]}
    trainer.meter.begin()
    for _ in range(WARM_UP):
        trainer.step()
    return [[_step(trainer, recorders.get(way), run.folder / way) for way in WAYS] for _ in range(rounds)]


def _step(trainer: Trainer, recorder: StepRecorder | None, folder: Path) -> Times:
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    with recorder.step(trainer.state.step + 1) if recorder else nullcontext() as record:
        trainer.step()
    if record is not None:
        write(record, folder)
    return Times(time.perf_counter() - wall, time.process_time() - processor)


def measure(rounds: int, dtype: str) -> dict[str, Any]:
    """Everything that is reported."""
    recipe = load(RECIPE)
    steps = WARM_UP + rounds * len(WAYS)
    train = msgspec.structs.replace(recipe.train, steps=max(steps, 20), sanity_steps=0, dtype=dtype)
    output = Output(tensorboard=False)
    plan = check(msgspec.structs.replace(recipe, train=train, output=output, checkpoint=Checkpoint(every=0)))
    with tempfile.TemporaryDirectory(prefix="fourfold-") as name:
        folder = Path(name)
        data = sources.prepare_sources(
            recipe.data, folder, vocab_size=plan.config.vocab_size, seq_len=recipe.batch.seq_len
        )
        run, weights = Prepared(plan, data, folder, new=True, resumes=False), initial_weights(plan)
        reports = fork_ranks(plan.grid.size, lambda rank: work(run, weights, rounds))
        sizes = {
            way: [file.stat().st_size for file in step_folder(folder / way, steps - len(WAYS) + place + 1).iterdir()]
            for place, way in enumerate(WAYS)
            if place
        }
    return {"ranks": plan.grid.size, "rounds": rounds, "dtype": dtype, "bar": BAR} | _ways(reports, sizes)


def _ways(reports: list[list[list[Times]]], sizes: dict[str, list[int]]) -> dict[str, Any]:
    """By way: median seconds, extra share of a step by both clocks, and bytes of a step's files."""
    rounds = [
        [Times(max(t.wall for t in ranks), sum(t.processor for t in ranks)) for ranks in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*reports, strict=True)
    ]
    found = {}
    for place, way in enumerate(WAYS):
        times = [of_round[place] for of_round in rounds]
        base = [of_round[0] for of_round in rounds]
        found[way] = {
            "wall_seconds": median(t.wall for t in times),
            "processor_seconds": median(t.processor for t in times),
            "extra_wall": median(t.wall / b.wall for t, b in zip(times, base, strict=True)) - 1,
            "extra_processor": median(t.processor / b.processor for t, b in zip(times, base, strict=True)) - 1,
            "bytes": sum(sizes.get(way, ())),
        }
    return found


def show(numbers: dict[str, Any]) -> None:
    """Prints a result for people."""
    print(f"{numbers['ranks']} ranks, {numbers['dtype']}, {numbers['rounds']} steps of each kind")
    print("recorded   wall s   more   processor s   more   MB a step")
    for way in WAYS:
        n = numbers[way]
        print(
            f"{way:8}  {n['wall_seconds']:7.3f}  {n['extra_wall']:+5.1%}  {n['processor_seconds']:12.3f}  "
            f"{n['extra_processor']:+5.1%}  {n['bytes'] / 1e6:9.2f}"
        )
    print(f"bar: weights at most {BAR:+.0%} of processor time")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each kind (default 20)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of computation")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    numbers = measure(options.rounds, options.dtype)
    print(json.dumps(numbers)) if options.json else show(numbers)
    return 0 if numbers["weights"]["extra_processor"] <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
