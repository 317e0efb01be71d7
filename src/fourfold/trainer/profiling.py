"""Traces of a few steps: PyTorch's profiler on the ranks and in the steps that [profile] names.

What is recorded is what `fourfold diagnose` reads: every operator, kernel and collective, the labels of
docs/formats.md, and as `fourfold` the layout, how the work should be shared among pipeline ranks, and the host. With
[profile] memory also every block of memory: on a CPU in the trace, on a GPU as a snapshot of PyTorch's allocator.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fourfold.parallel import Groups
from fourfold.parallel.torch_private import forget_memory, record_memory, write_memory
from fourfold.planner import stage_flops
from fourfold.recipe import RunPlan
from fourfold.trainer.runs import move_aside

# PyTorch's profiler library says on stderr that it starts and stops, on every rank, unless this is in the environment
# when it is first used. On a GPU its errors, which the same number hides, are worth the noise.
SILENT = ("KINETO_LOG_LEVEL", "6")
LEVEL = 3  # of compression: traces repeat themselves, and all ranks wait for the slowest that writes


class Profiling:
    """The profiler of one rank, which works while it is entered. All ranks make one, and tell it of every step.

    A run that is resumed inside of the range records what is left of it. What an earlier start has written stays, in
    ``profile-1``, ``profile-2`` ..., for its steps are made again, on other clocks.

    Args:
        plan: of the run.
        folder: of the run; traces go to ``profile`` in it. All ranks must see the same one.
        groups: of this rank.
        device: of this rank.
        after_step: the last step that an earlier start has made.
    """

    def __init__(self, plan: RunPlan, folder: Path, groups: Groups, device: torch.device, *, after_step: int) -> None:
        self._plan = plan
        self._folder = folder / "profile"
        self._groups = groups
        self._steps = [number for number in plan.profiled_steps if number > after_step]
        self._chosen = groups.rank in plan.profiled_ranks
        on_gpu = device.type == "cuda"
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        self._memory_in_trace = plan.recipe.profile.memory and not on_gpu
        self._snapshot = plan.recipe.profile.memory and on_gpu
        self._profiler: profile | None = None
        self._mark = ExitStack()
        self._processor: dict[int, int] = {}  # of each step, nanoseconds of this thread
        self._processor_began = 0

    def __enter__(self) -> Profiling:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes what there is of a run that was stopped inside of the range. Of one that failed nothing is written,
        but for the memory of one that had too little of it."""
        if self._profiler is None:
            return
        if error is None:
            self._finish()
        elif self._snapshot and isinstance(error, torch.OutOfMemoryError):
            self._write_snapshot()

    def step_begins(self, step: int) -> None:
        """``step`` is counted from 1."""
        if step not in self._steps:
            return
        if step == self._steps[0]:
            self._start()
        if self._profiler is not None:
            self._mark.enter_context(record_function(f"ProfilerStep#{step}"))
            self._processor_began = time.thread_time_ns()

    def step_ended(self, step: int) -> None:
        """With all that follows it: validation, a checkpoint, garbage."""
        if self._profiler is None:
            return
        self._processor[step] = time.thread_time_ns() - self._processor_began
        self._mark.close()
        if step == self._steps[-1]:
            self._finish()

    def _start(self) -> None:
        if self._groups.rank == 0:
            move_aside(self._folder)
        self._groups.barrier()
        if self._chosen:
            if ProfilerActivity.CUDA not in self._activities:
                os.environ.setdefault(*SILENT)
            self._folder.mkdir(exist_ok=True)
            self._profiler = profile(activities=self._activities, profile_memory=self._memory_in_trace)
            self._profiler.start()
            if self._snapshot:
                record_memory()
        # It takes as long as it likes to start: nobody should seem late in the first step.
        self._groups.barrier()

    def _finish(self) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        if self._snapshot:
            self._write_snapshot()
        profiler.add_metadata_json("fourfold", json.dumps(self._what_the_trace_does_not_know()))
        profiler.stop()
        path = trace_file(self._folder, self._groups.rank)
        plain, packed = (path.with_name(f"{path.stem}{ending}.partial") for ending in ("", ".gz"))
        try:
            profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as trace, gzip.open(packed, "wb", compresslevel=LEVEL) as file:
                while block := trace.read(1 << 20):
                    file.write(block)
            packed.replace(path)
        except OSError as error:  # a full disk is no reason to stop training
            print(f"rank {self._groups.rank}: its trace could not be written: {error}", flush=True)
        finally:
            for partial in (plain, packed):
                partial.unlink(missing_ok=True)

    def _write_snapshot(self) -> None:
        """What the allocator has done since the first step that is recorded, and what it holds."""
        path = snapshot_file(self._folder, self._groups.rank)
        partial = path.with_name(f"{path.name}.partial")
        try:
            write_memory(partial)
            partial.replace(path)
        except OSError as error:
            print(f"rank {self._groups.rank}: its memory snapshot could not be written: {error}", flush=True)
        finally:
            partial.unlink(missing_ok=True)
            forget_memory()

    def _what_the_trace_does_not_know(self) -> dict[str, object]:
        """The key `fourfold` of docs/formats.md."""
        return {
            "format": 1,
            "grid": asdict(self._plan.grid),
            "shares": shares(self._plan),
            "host": socket.gethostname(),
            "processor_ns": self._processor,
        }


def trace_file(folder: Path, rank: int) -> Path:
    """The trace of a global rank in the folder of traces."""
    return folder / f"rank-{rank:05d}.json.gz"


def snapshot_file(folder: Path, rank: int) -> Path:
    """The memory snapshot of a global rank in the folder of traces."""
    return folder / f"memory-{rank:05d}.pickle"


def shares(plan: RunPlan) -> Sequence[float]:
    """Of the FLOPs of all pipeline ranks, the share that each should have; rows of one document each."""
    pairs = (plan.recipe.batch.seq_len + 1) / 2  # that a token sees
    stages, pp = stage_flops(plan.config, plan.stages, plan.recipe.train.freeze), plan.grid.pp
    flops = [stage.per_token + stage.per_pair * pairs for stage in stages]
    return [sum(flops[rank::pp]) / sum(flops) for rank in range(pp)]
