"""What a run costs: days, GPU-hours, dollars, checkpoints, and what failures take of it.

Money depends on GPU-hours alone, and these on MFU alone: twice the GPUs at the same MFU cost the same. Failures and
checkpoints come on top, as goodput. Failure rates are those that Llama 3's cluster had (2407.21783, 3.3.4: 419
unexpected interruptions in 54 days on 16,384 GPUs), nine times what "2 % per GPU and year" would give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fourfold.planner.arithmetic import count_parameters
from fourfold.planner.machines.chips import GIB

if TYPE_CHECKING:
    from fourfold.planner.machines.cluster import Cluster
    from fourfold.recipe import ModelConfig

DAY = 86_400.0  # seconds
HOUR = 3_600.0

FAILURES_PER_GPU_DAY = 419 / 54 / 16_384
"""4.7e-4: one GPU stops a job every 5.8 years, so that 16,384 of them do every 3.1 hours."""

STORAGE_PER_GPU = 2e12 / 24_576
"""Bytes/s a GPU that storage takes, 81 MB/s: Tectonic's sustained 2 TB/s over 24,576 GPUs (2407.21783, 3.3.1)."""

LEAST_STALL = 5.0
"""Seconds that a save takes however small it is: ranks meet, files are made and synced."""

RESTART = 600.0
"""Seconds from a failure to the first new step: found, replaced, started, read, warmed up."""

CHECKPOINT_BYTES = 12
"""Per parameter: float32 weights and both moments. 14 with a 16-bit copy for whoever runs the model. 16 to 18 bytes,
which are also quoted, are what training holds, gradients included, and no checkpoint."""


HOST_BYTES = 2 << 40
"""Main memory of a node, as of a DGX H100."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run takes in all."""

    days: float
    gpu_hours: float
    dollars: float


def run_cost(*, seconds: float, gpus: int, goodput: float = 1.0, dollars_per_gpu_hour: float = 2.0) -> Cost:
    """A run of so many seconds of steps; `goodput`, above 0 to 1, is the share of time that steps get.

    ValueError if goodput is none.
    """
    if not 0 < goodput <= 1:
        raise ValueError(f"goodput = {goodput}: must be above 0 and at most 1; nearest legal: 1")
    wall = seconds / goodput
    gpu_hours = gpus * wall / HOUR
    return Cost(days=wall / DAY, gpu_hours=gpu_hours, dollars=gpu_hours * dollars_per_gpu_hour)


# --- Checkpoints and failures ---


def checkpoint_bytes(parameters: int, *, copy_16_bit: bool = False) -> int:
    """Bytes of one checkpoint of all ranks: 12 per parameter, 14 with a 16-bit copy of the weights."""
    return parameters * (CHECKPOINT_BYTES + 2 * copy_16_bit)


def mean_time_between_failures(gpus: int, *, failures_per_gpu_day: float = FAILURES_PER_GPU_DAY) -> float:
    """Seconds between two failures of a job on so many GPUs, each of which stops all of them."""
    return DAY / (gpus * failures_per_gpu_day)


def young(stall: float, between_failures: float) -> float:
    """Seconds between two saves of `stall` seconds each that lose least (Young 1974): sqrt(2 stall MTBF)."""
    return math.sqrt(2 * stall * between_failures)


def daly(stall: float, between_failures: float) -> float:
    """Young's interval to higher order (Daly 2006), without the save itself; the MTBF where saves take twice that."""
    if stall >= 2 * between_failures:
        return between_failures
    ratio = stall / (2 * between_failures)
    return young(stall, between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def goodput(
    *, interval: float, stall: float, between_failures: float, restart: float = 0.0, persist: float = 0.0
) -> float:
    """Share of time that steps get: 1 - stall / interval - (interval / 2 + persist + restart) / MTBF, at least 0.

    `persist`: seconds in which an asynchronous save is written in the background. Until then it is no help.
    """
    return max(0.0, 1 - stall / interval - (interval / 2 + persist + restart) / between_failures)


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Saves of a run, and what they and failures cost."""

    bytes: int
    """Of one checkpoint, all ranks."""
    bytes_per_gpu: float
    host_bytes_per_node: float
    """Main memory that a save takes if every rank copies its part there first."""
    stall_seconds: float
    """In which a synchronous save holds up the run."""
    between_failures: float
    """Mean time in seconds."""
    interval_seconds: float
    """Between two saves, by Daly."""
    interval_steps: int
    lost_to_saves: float
    """Share of time."""
    lost_to_failures: float
    """Share of time: half an interval done again, and the restart, per failure."""
    goodput: float
    """Share of time that steps get."""

    def host_line(self, host_bytes: float = HOST_BYTES) -> str:
        """Whether a save fits the main memory of a node, in a sentence. A save that did not has killed runs."""
        needed, there = self.host_bytes_per_node / GIB, host_bytes / GIB
        verdict = "fits" if self.host_bytes_per_node <= 0.5 * host_bytes else "does not fit: half is for the run itself"
        return f"A save staged in main memory takes {needed:,.0f} GiB on each node; in {there:,.0f} GiB that {verdict}."


def checkpointing(
    config: ModelConfig,
    cluster: Cluster,
    *,
    step_seconds: float,
    stall: float | None = None,
    restart: float = RESTART,
    failures_per_gpu_day: float = FAILURES_PER_GPU_DAY,
) -> Checkpointing:
    """How often to save on this cluster. `stall` in seconds, if it is known; else at the pace of Llama 3's storage."""
    total = checkpoint_bytes(count_parameters(config).total)
    gpus, per_node = cluster.gpus, min(cluster.gpus, cluster.gpus_per_node)
    if stall is None:
        stall = max(LEAST_STALL, total / (gpus * STORAGE_PER_GPU))
    between_failures = mean_time_between_failures(gpus, failures_per_gpu_day=failures_per_gpu_day)
    steps = max(1, round(daly(stall, between_failures) / step_seconds))
    interval = steps * step_seconds
    return Checkpointing(
        bytes=total,
        bytes_per_gpu=total / gpus,
        host_bytes_per_node=total * per_node / gpus,
        stall_seconds=stall,
        between_failures=between_failures,
        interval_seconds=interval,
        interval_steps=steps,
        lost_to_saves=stall / interval,
        lost_to_failures=(interval / 2 + restart) / between_failures,
        goodput=goodput(interval=interval, stall=stall, between_failures=between_failures, restart=restart),
    )


# --- How many GPUs at least ---


@dataclass(frozen=True, slots=True)
class MinimumGpus:
    """The Scaling Book's first question, as it asks it. Bytes of all GPUs together.

    No lower bound: it has the activations of the whole batch at once, where micro-batches and pipelines hold a few; and
    no gradients. A figure to think with.
    """

    weights: int
    optimizer: int
    activations: int
    gpus: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.optimizer + self.activations


def minimum_gpus(config: ModelConfig, *, batch_tokens: int, hbm_bytes: float, saved_per_layer: int = 4) -> MinimumGpus:
    """16-bit weights, 8 bytes of moments, and `saved_per_layer` 16-bit activations of width dim per token and layer.

    The book prints 20.9 TB for 70B and 4M tokens, which is 4 per layer; its text says 3.
    """
    parameters = count_parameters(config).total
    activations = 2 * saved_per_layer * config.num_layers * config.dim * batch_tokens
    total = 10 * parameters + activations
    return MinimumGpus(
        weights=2 * parameters, optimizer=8 * parameters, activations=activations, gpus=math.ceil(total / hbm_bytes)
    )


def gpus_for_state(parameters: int, *, hbm_bytes: float, bytes_per_parameter: int = 18) -> int:
    """GPUs that hold what training keeps per parameter, if all of it is sharded, and nothing else.

    18 bytes: 16-bit weights, float32 gradients, master weights and moments. The book's 10 leave out gradients and
    master weights.
    """
    return math.ceil(parameters * bytes_per_parameter / hbm_bytes)
