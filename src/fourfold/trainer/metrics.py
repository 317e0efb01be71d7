"""What a run reports: one JSON object per step in a file, a line to watch, and the action log."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fourfold.parallel import LoggedAction


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl, with the keys of docs/formats.md. A number that is not finite is null there."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    valid_tokens: int
    tokens_per_second: float
    step_seconds: float
    peak_memory_bytes: int


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that PyTorch allocated on a GPU, or the largest resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Reporter:
    """Writes what rank 0 reports. On other ranks (``folder`` None) it does nothing.

    On a terminal there is one line that moves; elsewhere about forty lines in all.
    """

    def __init__(self, folder: Path | None, num_steps: int) -> None:
        self._num_steps = num_steps
        self._file: IO[str] | None = None
        self._progress: Progress | None = None
        self._console = Console(soft_wrap=True, highlight=False)
        self._every = max(1, num_steps // 40)
        if folder is None:
            return
        self._file = (folder / "metrics.jsonl").open("w", encoding="utf-8", buffering=1)  # a line is on disk at once
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[rest]}"),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console, auto_refresh=False)
            self._task = self._progress.add_task("starting", total=num_steps, rest="")

    def __enter__(self) -> Reporter:
        if self._progress is not None:
            self._progress.start()
        self._started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._file is not None:
            self._file.close()

    def report(self, metrics: StepMetrics) -> None:
        """Writes the line of one step."""
        if self._file is None:
            return
        # JSON has no nan and no infinity.
        values = {k: v if math.isfinite(v) else None for k, v in asdict(metrics).items()}
        self._file.write(json.dumps(values) + "\n")
        head = f"step {metrics.step:>{len(str(self._num_steps))}}/{self._num_steps}"
        rest = f"loss {metrics.loss:7.4f}  norm {metrics.grad_norm:6.2f}  {metrics.tokens_per_second:8,.0f} tokens/s"
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step, description=head, rest=rest)
            self._progress.refresh()
        if metrics.step % self._every == 0 or metrics.step in (1, self._num_steps):
            passed = time.monotonic() - self._started
            left = passed / metrics.step * (self._num_steps - metrics.step)
            if self._progress is None:
                self._console.print(f"{head}  {rest}  {_clock(left)} left")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def write_action_log(folder: Path, rank: int, step: int, log: Sequence[LoggedAction]) -> None:
    """Appends one step of one rank to ``actions/rank-NNNNN.jsonl``; the form is that of docs/formats.md."""
    path = folder / "actions" / f"rank-{rank:05d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for entry in log:
            line = {
                "step": step,
                "action": str(entry.action),
                "start": entry.start,
                "end": entry.end,
                "wait": entry.wait,
            }
            file.write(json.dumps(line) + "\n")
