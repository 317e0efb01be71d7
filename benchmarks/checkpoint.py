"""How long training waits for a checkpoint, against PyTorch's own synchronous save of the same state.

Two data-parallel ranks hold a Llama with its AdamW moments, 600 MB in all. Both ways of saving live in the same
processes and take turns, block by block. Each save begins when everything before it is on the disk:

- ours: the seconds that ``Saver.save`` keeps the training waiting. A thread then writes what was copied; the time until
  it is published is shown, too.
- PyTorch's: ``torch.distributed.checkpoint.save`` with its FileSystemWriter, which returns when all is on the disk.

A save is as long as on its slowest rank. The first saves are a warm-up; the first of ours, which allocates the memory
for the copy, is shown by itself. At the end both are loaded, ours with every byte verified, and must give what was
saved.

    ./run bench checkpoint [--blocks 5] [--dir DIR] [--json]

Exits with 1 if the ratio of the medians is above the bar, or if not all was loaded as it was saved.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.model import fill
from fourfold.parallel import ParallelModel, connect
from fourfold.recipe import RunPlan, check, from_table
from fourfold.trainer.checkpoint import CheckpointStore, Saver, TrainState, load_newest
from fourfold.trainer.optimizer import make_optimizer
from fourfold.trainer.ranks import fork_ranks

BAR = 0.25
STATE = TrainState(step=1, tokens=0, position={}, optimizer_steps=1, skipped=0)
RECIPE = {
    "model": {"dim": 512, "num_layers": 10, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 1792, "vocab_size": 16_384},
    "layout": {"dp": 2},
    "batch": {"sequences": 2, "seq_len": 64},
}


@dataclass(frozen=True)
class RankReport:
    """Seconds on one rank: of the stall, of the whole of our save, and of PyTorch's, by block; and of loading each."""

    num_bytes: int
    first_stall: float
    stalls: list[float]
    whole: list[float]
    synchronous: list[float]
    load: float
    torch_load: float
    same: bool


def run_rank(plan: RunPlan, num_blocks: int, folder: Path) -> RankReport:
    """Builds the state, saves it in turns, and loads it."""

    def initial(name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
        rows, columns = (*slices, slice(None))[:2]
        return fill(name, shape, 1, plan.config, rows=rows, columns=columns)

    groups = connect(plan.grid, "cpu")
    model = ParallelModel(plan, groups, weights=initial, device=torch.device("cpu"))
    optimizer = make_optimizer(model.gradients.weights, plan.recipe.optimizer, tied=plan.config.tied)
    generator = torch.Generator().manual_seed(groups.rank)
    for weight in model.gradients.weights:  # moments as after a step, without the step
        weight.local.grad = torch.randn(weight.local.shape, generator=generator)
    optimizer.step()
    model.zero_grad()
    state = dtensors(model, optimizer)
    saver = Saver(model, optimizer, CheckpointStore(folder / "ours"), plan, keep=1, asynchronous=True)

    def our_save() -> tuple[float, float]:
        stall = 0.0

        def save() -> None:
            nonlocal stall
            stall = saver.save(STATE)
            saver.wait()

        whole = timed(save)
        failure = saver.failure()
        assert failure is None, failure
        return stall, whole

    def torch_save() -> float:
        writer = dcp.FileSystemWriter(folder / "torch")
        seconds = timed(lambda: dcp.save(state, storage_writer=writer))
        dist.barrier()
        if groups.rank == 0:
            shutil.rmtree(folder / "torch")
        dist.barrier()
        return seconds

    first_stall, _ = our_save()
    torch_save()
    blocks = [(our_save(), torch_save()) for _ in range(num_blocks)]
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "torch"))
    saved = {name: value.to_local().clone() for name, value in state.items()}
    load = timed(lambda: load_newest(model, optimizer, CheckpointStore(folder / "ours"), groups, say=lambda line: None))
    loaded = {name: value.to_local() for name, value in dtensors(model, optimizer).items()}
    return RankReport(
        num_bytes=sum(value.nbytes for value in saved.values()),
        first_stall=first_stall,
        stalls=[stall for (stall, _), _ in blocks],
        whole=[whole for (_, whole), _ in blocks],
        synchronous=[seconds for _, seconds in blocks],
        load=load,
        torch_load=timed(lambda: dcp.load(state, checkpoint_id=folder / "torch")),
        same=all(torch.equal(loaded[name], value) for name, value in saved.items()),
    )


def dtensors(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, DTensor]:
    """The state as PyTorch's own save takes it."""
    state = {}
    for weight in model.gradients.weights:
        sharded = weight.sharded
        assert isinstance(sharded, DTensor)
        parts = {"model": weight.local.detach()}
        parts |= {key: value for key, value in optimizer.state[weight.local].items() if key != "step"}
        for key, part in parts.items():
            state[f"{key}.{weight.name}"] = DTensor.from_local(
                part,
                sharded.device_mesh,
                sharded.placements,
                run_check=False,
                shape=sharded.shape,
                stride=sharded.stride(),
            )
    return state


def timed(work: Callable[[], Any]) -> float:
    """Seconds of some work on this rank; all ranks begin together, when all that was written is on the disk."""
    os.sync()
    dist.barrier()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def result(reports: list[RankReport]) -> dict[str, Any]:
    """Everything that is reported, in seconds of the slowest rank."""

    def slowest(which: Callable[[RankReport], list[float]]) -> list[float]:
        return [max(times) for times in zip(*map(which, reports), strict=True)]

    stalls, synchronous = slowest(lambda r: r.stalls), slowest(lambda r: r.synchronous)
    return {
        "bytes": sum(report.num_bytes for report in reports),
        "first_stall": max(report.first_stall for report in reports),
        "stalls": stalls,
        "saves": slowest(lambda r: r.whole),
        "synchronous_saves": synchronous,
        "stall": median(stalls),
        "synchronous_save": median(synchronous),
        "ratio": median(stalls) / median(synchronous),
        "bar": BAR,
        "load": max(report.load for report in reports),
        "torch_load": max(report.torch_load for report in reports),
        "same": all(report.same for report in reports),
    }


def show(numbers: dict[str, Any]) -> None:
    """Prints a result for people."""
    print(f"state of {numbers['bytes'] / 1e6:.0f} MB on 2 ranks; seconds")
    print("           stall  to publication  PyTorch's save   ratio")
    rows = zip(numbers["stalls"], numbers["saves"], numbers["synchronous_saves"], strict=True)
    for i, (stall, whole, synchronous) in enumerate(rows):
        print(f"  block {i}  {stall:6.3f} {whole:15.3f} {synchronous:15.3f} {stall / synchronous:7.3f}")
    stall, synchronous = numbers["stall"], numbers["synchronous_save"]
    print(
        f"  median   {stall:6.3f} {median(numbers['saves']):15.3f} {synchronous:15.3f} {numbers['ratio']:7.3f}"
        f"   (bar: at most {BAR})"
    )
    print(f"first stall {numbers['first_stall']:.3f} (allocates the memory for the copy)")
    print(f"load {numbers['load']:.3f}, every byte verified; PyTorch's load {numbers['torch_load']:.3f}")
    print(f"loaded as saved: {'yes' if numbers['same'] else 'NO'}")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5, help="of each way of saving (default 5)")
    parser.add_argument("--dir", type=Path, help="where to save; default: the system's folder for temporary files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    plan = check(from_table(RECIPE))
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        reports = fork_ranks(plan.grid.size, lambda rank: run_rank(plan, options.blocks, Path(folder)))
    numbers = result(reports)
    print(json.dumps(numbers)) if options.json else show(numbers)
    return 0 if numbers["same"] and numbers["ratio"] <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
