"""What recomputation and compilation cost and save on this machine: time of a step, and bytes kept per micro-batch.

All kinds run in one process and in turn, so that what else the machine does meets all of them: step after step of each,
and of every kind the median. One rank on CPU, a few layers of width 256.

On a CPU most of the time goes into matrix products: "full" costs near what its second forward does, and what the nearly
free kinds and compilation change is small. What a GPU says is for benchmarks/gpu.sh.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor

from fourfold.model import Batch, fill
from fourfold.parallel import Groups, LocalBatch, MicroBatch, ParallelModel, connect, missing_compiler
from fourfold.recipe import RunPlan, check, from_table
from fourfold.trainer.ranks import fork_ranks

KINDS = ("none", "norms", "swiglu", "selective", "full")
COMPILED = ("none", "full")
MICRO_BATCHES = 2


def plan_of(options: argparse.Namespace, recompute: str, *, compiled: bool) -> RunPlan:
    """One rank, one stage."""
    model = {"dim": options.dim, "num_layers": options.layers, "num_heads": options.dim // 32, "vocab_size": 512}
    return check(
        from_table(
            {
                "model": model | {"num_kv_heads": options.dim // 64, "ffn_dim": 3 * options.dim},
                "batch": {"sequences": MICRO_BATCHES, "seq_len": options.tokens},
                "train": {"recompute": recompute, "compile": compiled, "dtype": options.dtype},
            }
        )
    )


def make(plan: RunPlan, groups: Groups) -> ParallelModel:
    """The model of a plan, with the weights that all have."""

    def weights(name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
        rows, columns = (*slices, slice(None))[:2]
        return fill(name, shape, 0, plan.config, rows=rows, columns=columns)

    return ParallelModel(plan, groups, weights=weights, device=torch.device("cpu"))


def kept_bytes(model: ParallelModel, micro_batch: MicroBatch) -> int:
    """Bytes of the distinct tensors that the forward of a micro-batch keeps for its backward, without weights."""
    batch, rows = micro_batch
    local = LocalBatch.of(batch, rows, cp=1, cp_rank=0, tp=1, cp_split="head_tail")
    (stage,) = model.stages.values()
    stage.gather()
    weights = {weight.untyped_storage().data_ptr() for weight in stage.gathered().values()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = stage.module(local.tokens, local)
    loss.backward()
    stage.reduce()
    stage.free()
    model.zero_grad()
    return sum(size for pointer, size in kept.items() if pointer not in weights)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per kind; on the rank."""
    compiler = missing_compiler("cpu") is None
    wanted = [(kind, False) for kind in KINDS] + [(kind, True) for kind in COMPILED if compiler]
    plans = [plan_of(options, kind, compiled=compiled) for kind, compiled in wanted]
    groups = connect(plans[0].grid, "cpu")
    models = [make(plan, groups) for plan in plans]
    tokens = torch.randint(512, (options.tokens,), generator=torch.Generator().manual_seed(0))
    batches = [(Batch.from_rows(tokens, [[options.tokens]]), [[options.tokens]])] * MICRO_BATCHES
    kept = [kept_bytes(model, batches[0]) for model in models]
    seconds: list[list[float]] = [[] for _ in models]
    losses = []
    for step in range(options.steps + 1):
        for model, times in zip(models, seconds, strict=True):
            start = time.perf_counter()
            totals = model.forward_backward(batches)
            if step:  # the first warms up, and compiles
                times.append(time.perf_counter() - start)
            else:
                losses.append(totals.loss)
            model.zero_grad()
    eager = {loss for loss, (_, compiled) in zip(losses, wanted, strict=True) if not compiled}
    assert len(eager) == 1, "what is made again is not what it was"
    medians = [statistics.median(times) for times in seconds]
    return [
        {
            "recompute": kind,
            "compile": compiled,
            "step_seconds": median,
            "step_ratio": statistics.median(a / b for a, b in zip(times, seconds[0], strict=True)),
            "kept_bytes": size,
            "kept_ratio": size / kept[0],
            "loss": loss,
        }
        for (kind, compiled), median, times, size, loss in zip(wanted, medians, seconds, kept, losses, strict=True)
    ]


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--tokens", type=int, default=1024, help="of each micro-batch, one document")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    (rows,) = fork_ranks(1, lambda rank: measure(options))
    if options.json:
        print(json.dumps(rows))
        return 0
    print(f"{options.layers} layers of width {options.dim}, {MICRO_BATCHES} x {options.tokens} tokens, {options.dtype}")
    print(f"{'recompute':10} {'compile':8} {'ms/step':>8} {'beside none':>11} {'kept MiB':>9} {'of none':>8}")
    for row in rows:
        print(
            f"{row['recompute']:10} {'yes' if row['compile'] else 'no':8} {1e3 * row['step_seconds']:8.1f} "
            f"{row['step_ratio']:11.3f} {row['kept_bytes'] / 2**20:9.2f} {row['kept_ratio']:8.1%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
