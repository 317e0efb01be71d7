"""Measures a step: where its time went, how long ranks waited for each other, and what share of the GPUs' peak it used.

Every step begins at the moment in which all ranks know that the step before has ended, so that nothing is lost between
two steps: what a checkpoint or a validation took belongs to the step that it delayed.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
import torch.distributed as dist

from fourfold.layout import Doing
from fourfold.parallel import Groups, LoggedAction, MicroBatch, StepTotals
from fourfold.planner import Gpu, causal_pairs, find_gpu, model_flops
from fourfold.recipe import RunPlan
from fourfold.trainer.metrics import StepMetrics

Part = Literal["data", "forward_backward", "optimizer", "checkpoint", "garbage"]
PARTS: tuple[Part, ...] = ("data", "forward_backward", "optimizer", "checkpoint", "garbage")


class Meter:
    """The stop watch of one rank, and what all ranks make of theirs. All call the same methods in the same order.

    Args:
        plan: of the run.
        groups: of the rank.
        device: of the rank. Its kind says which peak MFU refers to; a CPU, or a GPU that is not known, has none.
    """

    def __init__(self, plan: RunPlan, groups: Groups, device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self._flops = model_flops(plan.config, plan.recipe.train.freeze)
        self._peak = None if (gpu := gpu_of(device)) is None else _peak(gpu, plan) * plan.grid.size
        self._began = 0
        self._seconds: dict[Part, float] = {}

    def begin(self) -> None:
        """Starts the first step, as soon as all ranks are here."""
        self._groups.barrier()
        self._restart()

    @contextmanager
    def part(self, name: Part) -> Generator[None]:
        """Counts the time of a block towards a part of the step. Work that a GPU was given is waited for."""
        start = time.monotonic()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds[name] += time.monotonic() - start

    def end(
        self,
        totals: StepTotals,
        micro_batches: Sequence[MicroBatch],
        *,
        step: int,
        num_tokens: int,
        tokens: int,
        samples: int,
        grad_norm: float,
        lr: float,
        skipped: int,
    ) -> StepMetrics:
        """Ends the step on all ranks, and starts the next.

        Args:
            totals: of this step's forward-backward pass.
            micro_batches: those of this rank's data-parallel group.
            step: counted from 1.
            num_tokens: of this step, over all ranks.
            tokens, samples, skipped, grad_norm, lr: see :class:`StepMetrics`.
        """
        job = self._share(totals.log, micro_batches)
        self._restart()
        flops, flops_6p = self._flops.of(num_tokens, job.pairs), self._flops.of_6p(num_tokens)
        return StepMetrics(
            step=step,
            loss=totals.loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=tokens,
            samples=samples,
            valid_tokens=totals.valid_tokens,
            skipped=skipped,
            tokens_per_second=num_tokens / job.seconds,
            step_seconds=job.seconds,
            data_seconds=job.parts["data"],
            forward_backward_seconds=job.parts["forward_backward"],
            optimizer_seconds=job.parts["optimizer"],
            checkpoint_seconds=job.parts["checkpoint"],
            garbage_seconds=job.parts["garbage"],
            other_seconds=job.seconds - sum(job.parts.values()),
            idle_share=job.idle_share,
            idle_share_max=job.idle_share_max,
            attention_pairs=job.pairs,
            model_flops_per_second=flops / job.seconds,
            mfu_6p=None if self._peak is None else flops_6p / job.seconds / self._peak,
            mfu_attention=None if self._peak is None else flops / job.seconds / self._peak,
            peak_memory_bytes=job.peak_memory,
        )

    def _share(self, log: Sequence[LoggedAction], micro_batches: Sequence[MicroBatch]) -> _Job:
        """What all ranks together know of a step that ends now."""
        seconds = (time.monotonic_ns() - self._began) / 1e9
        world, size, place = self._groups.world, self._groups.grid.size, self._groups.coordinates
        waited, finished = pipeline_times(log, self._began)
        pairs = 0
        if place.tp == place.cp == place.pp == 0:  # a data-parallel group counts its tokens once
            pairs = causal_pairs(chain.from_iterable(chain.from_iterable(rows for _, rows in micro_batches)))
        # Two collectives of a few numbers: on gloo they take less time than one that gathers what every rank saw.
        with self._groups.recorder.doing(Doing.MEET):
            longest, latest, most_idle, memory = world.total(
                [seconds, finished, waited - finished, float(peak_memory(self._device))], dist.ReduceOp.MAX
            )
            *parts, idle, all_pairs = world.total([*self._seconds.values(), waited - finished, float(pairs)])
        on_host = self._device.type == "cpu"  # on a GPU the host only launches, and does not wait for messages itself
        return _Job(
            seconds=longest,
            parts={part: total / size for part, total in zip(self._seconds, parts, strict=True)},
            idle_share=(idle / size + latest) / longest if on_host else None,
            idle_share_max=(most_idle + latest) / longest if on_host else None,
            pairs=int(all_pairs),
            peak_memory=int(memory),
        )

    def _restart(self) -> None:
        # Ranks leave a collective of all ranks within moments of each other: from here their clocks can be compared.
        self._began = time.monotonic_ns()
        self._seconds = dict.fromkeys(PARTS, 0.0)


@dataclass(frozen=True)
class _Job:
    """A step as all ranks together saw it. Parts are means over the ranks, which is why they fit into the seconds."""

    seconds: float
    parts: dict[Part, float]
    idle_share: float | None
    idle_share_max: float | None
    pairs: int
    peak_memory: int


def pipeline_times(log: Sequence[LoggedAction], began: int) -> tuple[float, float]:
    """(Seconds spent waiting for messages, seconds from ``began`` to the end of the last action) of one rank's log.

    A rank idles while it waits, and once more at the end: when it has done all its actions and another has not. So its
    idle time is the first number plus the latest rank's second less its own. Only differences of one clock are used:
    clocks of two machines cannot be compared.
    """
    if not log:
        return 0.0, 0.0
    return sum(entry.wait for entry in log) / 1e9, (log[-1].end - began) / 1e9


def gpu_of(device: torch.device) -> Gpu | None:
    """What the table of peaks knows of a device, or None."""
    return find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _peak(gpu: Gpu, plan: RunPlan) -> float:
    return gpu.peak(plan.recipe.train.dtype, tf32=torch.get_float32_matmul_precision() != "highest")


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that PyTorch allocated on a GPU, or the largest resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
