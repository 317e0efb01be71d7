"""What a run reports: numbers of every step and of every validation, a line to watch, and the action log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fourfold.parallel import LoggedAction, LoggedDoing
from fourfold.trainer.sinks import Guarded, JsonLines, cut_after

SILENCE = 60.0  # seconds


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl, with the keys of docs/formats.md. All ranks know the same.

    None: unknown. A number that is not finite is null in the file as well.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    samples: int
    valid_tokens: int
    skipped: int
    tokens_per_second: float
    step_seconds: float
    data_seconds: float
    forward_backward_seconds: float
    optimizer_seconds: float
    checkpoint_seconds: float
    garbage_seconds: float
    other_seconds: float
    idle_share: float | None
    idle_share_max: float | None
    attention_pairs: int
    model_flops_per_second: float
    mfu_6p: float | None
    mfu_attention: float | None
    peak_memory_bytes: int


@dataclass(frozen=True)
class ValidationMetrics:
    """One line of validation.jsonl: the loss on a held-out set after a step."""

    step: int
    set: str
    loss: float
    valid_tokens: int
    seconds: float


class _PatientConsole(Console):
    """When its reader goes away, as `head` does, it falls silent: training goes on."""

    def on_broken_pipe(self) -> None:
        """Called by rich, which would end the process."""
        self.quiet = True


class Reporter:
    """Writes what rank 0 reports. On other ranks (``folder`` None) it does nothing.

    On a terminal there is one line that moves; elsewhere about forty lines in all, or one in ``SILENCE`` seconds.

    Args:
        folder: of the run.
        num_steps: of the whole run.
        resume_step: the last step that an earlier part of the run has made and that is kept. What the files hold of
            later ones is removed: those steps come again.
        sinks: where else numbers go. They are closed with this.
    """

    def __init__(
        self, folder: Path | None, num_steps: int, *, resume_step: int = 0, sinks: Sequence[Guarded] = ()
    ) -> None:
        self._num_steps = num_steps
        self._resume_step = resume_step
        self._sinks = sinks
        self._files: dict[str, JsonLines] = {}
        self._progress: Progress | None = None
        self._console = _PatientConsole(soft_wrap=True, highlight=False)
        self._printed = time.monotonic()
        self._every = max(1, num_steps // 40)
        self._peak_doubted = False
        if folder is None:
            return
        for name in ("metrics", "validation"):
            self._files[name] = JsonLines(folder / f"{name}.jsonl", resume_step=resume_step)
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[rest]}"),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console, auto_refresh=False)
            self._task = self._progress.add_task("starting", total=num_steps, completed=resume_step, rest="")

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
        for file in self._files.values():
            file.close()
        for sink in self._sinks:
            sink.close()

    def sync(self) -> None:
        """Returns when what was reported is on the disk."""
        for file in self._files.values():
            file.sync()

    def report(self, metrics: StepMetrics) -> None:
        """Writes the numbers of one step."""
        if not self._files:
            return
        values = asdict(metrics)
        self._files["metrics"].write(values)
        step = values.pop("step")
        for sink in self._sinks:
            sink.write(step, {f"train/{name}": value for name, value in values.items()})
        self._doubt_peak(metrics)
        head = f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"
        rest = f"loss {metrics.loss:7.4f}  norm {metrics.grad_norm:6.2f}  {metrics.tokens_per_second:8,.0f} tokens/s"
        if metrics.mfu_attention is not None:
            rest += f"  MFU {metrics.mfu_attention:.1%}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=head, rest=rest)
            self._progress.refresh()
        elif (
            step % self._every == 0
            or step in (self._resume_step + 1, self._num_steps)
            or time.monotonic() - self._printed > SILENCE
        ):
            self._printed = time.monotonic()
            passed = time.monotonic() - self._started
            left = passed / (step - self._resume_step) * (self._num_steps - step)
            self._console.print(f"{head}  {rest}  {_clock(left)} left")

    def report_validation(self, metrics: ValidationMetrics) -> None:
        """Writes the loss on a held-out set."""
        if not self._files:
            return
        self._files["validation"].write(asdict(metrics))
        for sink in self._sinks:
            sink.write(metrics.step, {f"validation/{metrics.set}": metrics.loss})
        labels, seconds = f"{metrics.valid_tokens:,} labels", f"{metrics.seconds:.1f} s"
        text = f"step {metrics.step:>{len(str(self._num_steps))}}: validation loss {metrics.loss:.4f} on {metrics.set}"
        self._console.print(f"{text} ({labels}, {seconds})", markup=False)

    def _doubt_peak(self, metrics: StepMetrics) -> None:
        """No computation is faster than its hardware. (6P may be: it counts an embedding that is not multiplied.)"""
        if self._peak_doubted or metrics.mfu_attention is None or metrics.mfu_attention <= 1:
            return
        self._peak_doubted = True
        self._console.print(
            f"MFU is {metrics.mfu_attention:.2f}, which cannot be: "
            "the peak of this GPU in fourfold/planner/machines/hardware.py is wrong"
        )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def write_action_log(folder: Path, rank: int, step: int, log: Iterable[LoggedAction | LoggedDoing]) -> None:
    """Appends one step of one rank to ``actions/rank-NNNNN.jsonl``; the form is that of docs/formats.md."""
    path = _action_log(folder, rank)
    path.parent.mkdir(exist_ok=True)
    lines = []
    for entry in sorted(log, key=attrgetter("start")):
        what, start, end, wait, *_ = entry
        more = {name: value for name in ("tp", "cp", "fsdp", "cpu") if (value := getattr(entry, name, 0))}
        lines.append(json.dumps({"step": step, "action": str(what), "start": start, "end": end, "wait": wait, **more}))
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))


def cut_action_log(folder: Path, rank: int, num_ranks: int, step: int) -> None:
    """Removes from one rank's action log what it holds of steps after ``step``: after a resume they come again.

    Logs of ranks that an earlier layout had, beyond the ``num_ranks`` of today, are cut by one of these.
    """
    for log in sorted((folder / "actions").glob("rank-*.jsonl")):
        if int(log.stem.removeprefix("rank-")) % num_ranks == rank:
            cut_after(log, step)


def _action_log(folder: Path, rank: int) -> Path:
    return folder / "actions" / f"rank-{rank:05d}.jsonl"
