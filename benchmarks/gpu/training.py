"""A training step of layers as large as those of Llama 3 8B on one GPU: every recompute kind, eager and compiled.

All variants do the same step in the same run: same weights, same rows, the same count of model FLOPs, whatever is
computed again. The first loss and gradient norm of each must agree with those of the plain PyTorch Llama. The most
memory that the allocator ever gave is for :mod:`gpu.memory`'s predictions to be compared with.
"""

from __future__ import annotations

import gc
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from fourfold.parallel import Groups, connect
from fourfold.planner import causal_pairs, model_flops
from fourfold.planner.flops import mfu
from fourfold.recipe import RunPlan
from gpu.clock import synchronize
from gpu.machine import peak_of
from gpu.part import Figures, Part
from gpu.sizes import Sizes
from gpu.steps import Fourfold, Plain, Stack, time_steps
from gpu.variants import FOURFOLD, PYTORCH, VARIANTS, Variant, layers_that_fit, plan_of

WARM_UP = 2  # steps; compilers work in the first
SAME_LOSS, SAME_NORM = 5e-3, 3e-2  # relative: two bf16 runs differ by roundings of other sums


def measure_training(part: Part, sizes: Sizes, device: torch.device, *, peak: float | None) -> None:
    """The part: an item per variant. ``peak``: dense bf16 FLOP/s of the device, if it is not that of the table."""
    num_layers = layers_that_fit(sizes, device)
    plan = plan_of(sizes, num_layers, Variant(FOURFOLD), device)
    batch = plan.recipe.batch
    flops, tokens = model_flops(plan.config), batch.sequences * batch.seq_len
    part.facts |= {
        "model": {**sizes.model, "num_layers": num_layers, "vocab_size": plan.config.vocab_size},
        "seq_len": batch.seq_len,
        "micro_batches": batch.sequences,
        "tokens": tokens,
        "flops_attention": flops.of(tokens, batch.sequences * causal_pairs([batch.seq_len])),
        "flops_6p": flops.of_6p(tokens),
        "peak": peak_of(device, peak),
    }
    with tempfile.TemporaryDirectory() as folder:
        groups = connect_alone(plan, device, Path(folder))
        for variant in VARIANTS:
            expected = max((item["seconds"] for item in part.items if item["compiled"] == variant.compiled), default=0)
            part.item(variant.name, partial(_measure, variant, part, sizes, groups, device), expected=expected)
        dist.destroy_process_group()


def connect_alone(plan: RunPlan, device: torch.device, folder: Path) -> Groups:
    """The groups of a job of one rank; ``folder`` is an empty one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=0,
        world_size=1,
        device_id=device if device.type == "cuda" else None,
    )
    return connect(plan.grid, device.type)


def _measure(variant: Variant, part: Part, sizes: Sizes, groups: Groups, device: torch.device) -> Figures:
    facts = part.facts
    plan = plan_of(sizes, facts["model"]["num_layers"], variant, device)
    torch.compiler.reset()  # or the variants would count as recompilations of each other
    gc.collect()  # what failed before this may still hold its model
    torch.cuda.empty_cache()
    stack: Stack
    if variant.stack == PYTORCH:
        stack = Plain(plan, device, compiled=variant.compiled)
    else:
        stack = Fourfold(plan, groups, device)
    loss, norm = stack.forward_backward()
    stack.update()
    time_steps(stack, WARM_UP - 1, wait=partial(synchronize, device), between=lambda _: None)
    peaks = PeakMemory(device)
    times = time_steps(stack, sizes.steps, wait=partial(synchronize, device), between=peaks.note)
    seconds = median(sum(step) for step in times)
    return {
        "stack": variant.stack,
        "recompute": variant.recompute,
        "compiled": variant.compiled,
        "loss": loss,
        "norm": norm,
        "same_work": _same_work(part, loss, norm),
        "steps": [{"forward_backward": first, "update": second} for first, second in times],
        "step_seconds": seconds,
        "tokens_per_second": facts["tokens"] / seconds,
        "mfu_attention": _mfu(facts["flops_attention"], seconds, facts["peak"]),
        "mfu_6p": _mfu(facts["flops_6p"], seconds, facts["peak"]),
        "memory": peaks.found,
    }


def _mfu(flops: int, seconds: float, peak: float | None) -> float | None:
    return None if peak is None else float(mfu(flops, seconds, 1, peak))


def _same_work(part: Part, loss: float, norm: float) -> bool:
    """Whether loss and norm are those of the first variant; also for that itself."""
    first = part.items[0] if part.items else {"loss": loss, "norm": norm}
    return (
        abs(loss - first["loss"]) <= SAME_LOSS * abs(first["loss"])
        and abs(norm - first["norm"]) <= SAME_NORM * first["norm"]
    )


class PeakMemory:
    """The most bytes that PyTorch's allocator had given at a time, in each half of a step; none on a CPU.

    Attributes:
        found: by half, the largest over steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.found: dict[str, int | None] = {"forward_backward": None, "update": None}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def note(self, half: str) -> None:
        """A half of a step is over."""
        if self._device.type == "cuda":
            self.found[half] = max(self.found[half] or 0, torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
