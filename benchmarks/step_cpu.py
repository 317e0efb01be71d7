"""Tokens per second of Fourfold against the same model built from PyTorch's own parts, on this machine's CPUs.

Eight ranks, tp2 x pp2 x dp2, two virtual stages per pipeline rank, fp32, AdamW: a Llama of 8 layers, width 256, 4096
vocabulary entries, rows of 256 tokens with one document each, 8 micro-batches of one row. Both stacks live in the same
processes and take turns, block by block, so that whatever else the machine does meets both. Before anything is timed,
both must start from the same weights and agree on loss and gradient norm; the first steps are a warm-up.

A step is forward, backward and the optimizer. Ours also sums loss and token count over all ranks, as its loop does;
PyTorch's is spared that. A step is as long as on its slowest rank. The processor time that it takes on all ranks
together is shown too: on a busy machine it is the steadier number.

Exits with 1 if the ratio of the median rates is below the bar, or if the two did not compute the same.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _torch_stack import TorchStack, whole
from torch import Tensor

from fourfold.model import Batch, fill
from fourfold.parallel import ParallelModel, connect
from fourfold.recipe import RunPlan, check, from_table
from fourfold.trainer.optimizer import make_optimizer
from fourfold.trainer.ranks import fork_ranks

BAR = 1.1
TOLERANCE = 1e-4  # of loss and gradient norm, relative
WARM_UP = 2
SEED = 1

RECIPE = {
    "model": {"dim": 256, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 688, "vocab_size": 4096},
    "layout": {"tp": 2, "pp": 2, "dp": 2, "zero": 1},
    "pipeline": {"schedule": "interleaved", "virtual_stages": 2},
    "batch": {"sequences": 16, "seq_len": 256},
    "optimizer": {"name": "adamw", "lr": 1e-3},
}


class Times(NamedTuple):
    """Seconds of one step on one rank, by the clock on the wall and of the processors."""

    wall: float
    processor: float


@dataclass(frozen=True)
class RankReport:
    """What one rank saw; of each pair the first is ours. ``blocks``: by block, and in it by stack and step."""

    same_weights: bool
    losses: tuple[float, float]
    norms: tuple[float, float]
    blocks: list[tuple[list[Times], list[Times]]]


def run_rank(plan: RunPlan, num_blocks: int, num_steps: int, per_layer: bool) -> RankReport:
    """Builds both stacks, checks that they do the same, and times them in turns."""

    def initial(name: str, shape: tuple[int, ...], slices: tuple[slice, ...] = ()) -> Tensor:
        rows, columns = (*slices, slice(None), slice(None))[:2]
        return fill(name, shape, SEED, plan.config, rows=rows, columns=columns)

    batch, grid, settings = plan.recipe.batch, plan.grid, plan.recipe.optimizer
    ours = ParallelModel(plan, connect(grid, "cpu"), weights=initial, device=torch.device("cpu"))
    theirs = TorchStack(
        plan.config,
        tp=grid.tp,
        pp=grid.pp,
        dp=grid.dp,
        num_micro_batches=plan.num_micro_batches,
        seq_len=batch.seq_len,
        num_tokens=batch.sequences * batch.seq_len,
        per_layer=per_layer,
        initial=initial,
    )
    our_optimizer = make_optimizer(ours.gradients.weights, settings, tied=False)
    their_optimizer = torch.optim.AdamW(theirs.parameters.values(), lr=settings.lr, betas=settings.betas)

    generator = torch.Generator().manual_seed(SEED + grid.coordinates(dist.get_rank()).dp)
    text = torch.randint(plan.config.vocab_size, (plan.num_micro_batches, batch.seq_len + 1), generator=generator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    one_document = [[batch.seq_len]]
    micro_batches = [
        (Batch.from_rows(row, one_document, labels=following), one_document)
        for row, following in zip(tokens, labels, strict=True)
    ]

    def our_step() -> None:
        ours.forward_backward(micro_batches)
        ours.gradients.hand_over()
        our_optimizer.step()
        ours.zero_grad()

    def their_step() -> None:
        theirs.forward_backward(tokens, labels)
        their_optimizer.step()
        their_optimizer.zero_grad()

    pairs = [(weight, whole(theirs.parameters[name])) for name, weight in ours.whole_weights()]
    same_weights = all(a is None or torch.equal(a, b) for a, b in pairs)  # one rank of eight has ours whole
    losses = ours.forward_backward(micro_batches).loss, theirs.global_loss(theirs.forward_backward(tokens, labels))
    norms = ours.gradients.norm(), theirs.gradient_norm()
    ours.zero_grad()
    their_optimizer.zero_grad()

    for step in (our_step, their_step):
        timed(step, WARM_UP)
    blocks = [(timed(our_step, num_steps), timed(their_step, num_steps)) for _ in range(num_blocks)]
    return RankReport(same_weights, losses, norms, blocks)


def timed(step: Callable[[], None], num_steps: int) -> list[Times]:
    """Times each of some steps on this rank; all ranks begin a step together."""
    times = []
    for _ in range(num_steps):
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        step()
        times.append(Times(time.perf_counter() - wall, time.process_time() - processor))
    return times


def of_all_ranks(reports: list[RankReport], block: int, stack: int) -> list[Times]:
    """The times of a block's steps: each is as long as on its slowest rank, and uses the processors of all."""
    by_step = zip(*(report.blocks[block][stack] for report in reports), strict=True)
    return [Times(max(t.wall for t in step), sum(t.processor for t in step)) for step in by_step]


def result(reports: list[RankReport], num_tokens: int) -> dict[str, Any]:
    """Everything that is reported. Rates are tokens of the global batch per second, of the median step."""
    blocks = [[of_all_ranks(reports, block, stack) for stack in (0, 1)] for block in range(len(reports[0].blocks))]
    ours, theirs = (num_tokens / median(t.wall for block in blocks for t in block[stack]) for stack in (0, 1))
    processor = [median(t.processor for block in blocks for t in block[stack]) for stack in (0, 1)]
    (our_loss, their_loss), (our_norm, their_norm) = reports[0].losses, reports[0].norms
    same_work = (
        all(report.same_weights for report in reports)
        and abs(our_loss - their_loss) <= TOLERANCE * abs(their_loss)
        and abs(our_norm - their_norm) <= TOLERANCE * their_norm
    )
    return {
        "ours_tokens_per_second": ours,
        "torch_tokens_per_second": theirs,
        "ratio": ours / theirs,
        "bar": BAR,
        "blocks": [[num_tokens / median(t.wall for t in times) for times in block] for block in blocks],
        "processor_seconds_per_step": processor,
        "same_work": same_work,
        "same_weights": all(report.same_weights for report in reports),
        "first_loss": [our_loss, their_loss],
        "first_gradient_norm": [our_norm, their_norm],
    }


def show(numbers: dict[str, Any]) -> None:
    """Prints a result for people."""
    print("first step         Fourfold    PyTorch")
    print("  loss           {:10.6f} {:10.6f}".format(*numbers["first_loss"]))
    print("  gradient norm  {:10.6f} {:10.6f}".format(*numbers["first_gradient_norm"]))
    print(f"  the same weights and the same work: {'yes' if numbers['same_work'] else 'NO'}")
    print("tokens/s           Fourfold    PyTorch   ratio")
    for i, (ours, theirs) in enumerate(numbers["blocks"]):
        print(f"  block {i}        {ours:10.0f} {theirs:10.0f} {ours / theirs:7.2f}")
    ours, theirs = numbers["ours_tokens_per_second"], numbers["torch_tokens_per_second"]
    print(f"  all steps      {ours:10.0f} {theirs:10.0f} {numbers['ratio']:7.2f}   (bar: at least {BAR})")
    ours, theirs = numbers["processor_seconds_per_step"]
    print(f"processor s/step {ours:10.2f} {theirs:10.2f} {theirs / ours:7.2f}")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="per block (default 3)")
    parser.add_argument("--blocks", type=int, default=8, help="of each stack (default 8)")
    parser.add_argument("--fsdp", choices=("layer", "stage"), default="layer", help="PyTorch's FSDP groups")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    # PyTorch's gradient norm sums over two dimensions one after the other and says so on every rank.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    plan = check(from_table(RECIPE))
    reports = fork_ranks(
        plan.grid.size, lambda rank: run_rank(plan, options.blocks, options.steps, options.fsdp == "layer")
    )
    numbers = result(reports, plan.recipe.batch.sequences * plan.recipe.batch.seq_len)
    print(json.dumps(numbers)) if options.json else show(numbers)
    return 0 if numbers["same_work"] and numbers["ratio"] >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
