"""Where metrics go: files of JSON lines always; TensorBoard, Weights & Biases and Trackio as the recipe says.

None of them may end a run. What fails is said once, and the run goes on without it; the files of JSON lines are tried
again with every line. After a resume a sink forgets what it was told of later steps.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol
from uuid import uuid4

import msgspec

from fourfold.recipe import Problem, Recipe, RecipeError, to_table

Values = Mapping[str, float | int | str | None]
_CUT = ".cut"  # of a file that is being rewritten; a killed process leaves at most this


class Sink(Protocol):
    """One place where numbers go. Any method may raise; :class:`Guarded` deals with it."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of a step, counted from 1, by their names."""

    def close(self) -> None:
        """Writes what is not yet written."""


def check_sinks(recipe: Recipe) -> None:
    """Raises RecipeError if the recipe asks for a service whose package is not here. TensorBoard is left out then."""
    asked = {"output.wandb": recipe.output.wandb, "output.trackio": recipe.output.trackio}
    problems = []
    for key, project in asked.items():
        package = key.removeprefix("output.")
        if project is not None and importlib.util.find_spec(package) is None:
            problems.append(Problem(key, project, f"the package {package} is not installed: pip install {package}"))
    if problems:
        raise RecipeError(problems)


def open_sinks(folder: Path, recipe: Recipe, *, resume_step: int = 0) -> list[Guarded]:
    """The sinks that a recipe asks for, besides the files of JSON lines.

    Args:
        folder: of the run.
        recipe: of the run; services are told all of it.
        resume_step: the last step that is kept of an earlier part of this run; 0: none, or a new run.
    """
    output = recipe.output
    sinks = []
    if output.tensorboard and importlib.util.find_spec("tensorboard") is not None:
        sinks.append(Guarded("TensorBoard", lambda: TensorBoard(folder / "tensorboard", resume_step)))
    if (project := output.wandb) is not None:
        sinks.append(Guarded("Weights & Biases", lambda: WeightsAndBiases(folder, project, recipe)))
    if (trackio := output.trackio) is not None:
        sinks.append(Guarded("Trackio", lambda: Trackio(folder, trackio, recipe, resume_step)))
    return sinks


class Guarded:
    """A sink that cannot fail: the first error is written to stderr, and from then on it takes nothing.

    Args:
        name: for the message.
        opening: makes the sink. It is called here.
    """

    def __init__(self, name: str, opening: Callable[[], Sink]) -> None:
        self._name = name
        self._sink: Sink | None = None
        self._sink = self._attempt(opening)

    def write(self, step: int, values: Values) -> None:
        """Passes on what is a number; None is left out."""
        numbers = {name: value for name, value in values.items() if isinstance(value, float | int)}
        if (sink := self._sink) is not None:
            self._attempt(lambda: sink.write(step, numbers))

    def close(self) -> None:
        """Ends it."""
        if (sink := self._sink) is not None:
            self._attempt(sink.close)
        self._sink = None

    def _attempt(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # whatever a service's package raises
            self._sink = None
            complain(self._name, error, "the run goes on without it")
            return None


def complain(name: str, error: BaseException, consequence: str) -> None:
    """Says on stderr, in one line, what is wrong with a sink."""
    said = " ".join(str(error).split())
    print(f"\nwarning: {name}: {type(error).__name__}: {said}; {consequence}", file=sys.stderr, flush=True)


class JsonLines:
    """A file with one JSON object per line, the first key of which is ``step``. A line is in the file at once.

    A line that cannot be written, as on a full disk, is lost; the file stays one of whole lines, and later lines are
    tried again.
    """

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        self._path = path
        self._complained = False
        cut_after(path, resume_step)
        self._file: IO[bytes] | None = None  # made by the first line

    def write(self, values: Values) -> None:
        """Appends one line. A number that is not finite becomes null, as JSON has none."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        try:
            self._append(json.dumps(finite).encode() + b"\n")
        except OSError as error:
            if not self._complained:
                complain(str(self._path), error, "lines are missing until it can be written again")
            self._complained = True

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
        file = self._file.fileno()
        end = os.fstat(file).st_size
        try:
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(file, end)
            raise

    def sync(self) -> None:
        """Returns when the lines are on the disk, as far as it takes them."""
        if self._file is not None:
            with suppress(OSError):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


class _Line(msgspec.Struct):
    step: int


def cut_after(path: Path, step: int) -> None:
    """Removes from a file of JSON lines those of later steps, and any line that is not whole. The file may be missing.

    The file is replaced in one go; one that has nothing to remove is not touched.
    """
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(_Line)
    new, removed = path.with_name(path.name + _CUT), False
    with path.open("rb") as old, new.open("wb") as kept:
        for line in old:
            if line.endswith(b"\n") and _step_of(line, decoder) <= step:
                kept.write(line)
            else:
                removed = True
        kept.flush()
        os.fsync(kept.fileno())
    if removed:
        os.replace(new, path)
    else:
        new.unlink()


def _step_of(line: bytes, decoder: msgspec.json.Decoder[_Line]) -> float:
    try:
        return decoder.decode(line).step
    except msgspec.DecodeError:
        return math.inf


class TensorBoard:
    """Event files in a folder. TensorBoard itself hides what earlier files hold of steps after ``resume_step``."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes 0.4 s to import

        purge = resume_step + 1 if folder.exists() else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a killed run must not have less than its metrics.jsonl

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a Weights & Biases project. Its files lie in the folder of the run, in ``wandb``.

    Whether it goes to a server is for W&B's own settings to say, such as ``wandb offline``; nobody is asked for a key,
    since a question would hold up all ranks. After a resume it is the same run there. What the service was told of
    later steps before, it cannot forget: the axis is our step, and those steps are drawn twice.
    """

    def __init__(self, folder: Path, project: str, recipe: Recipe) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=_kept_id(folder / "wandb" / "run-id.txt"),
            dir=str(folder),
            config=to_table(recipe),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


def _kept_id(path: Path) -> str:
    """A random name that is the same after every resume of a run."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        path.write_text(uuid4().hex, encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


class Trackio:
    """A run of a Trackio project, in Trackio's own folder on this machine. After a resume it is the same run."""

    def __init__(self, folder: Path, project: str, recipe: Recipe, resume_step: int) -> None:
        trackio = importlib.import_module("trackio")

        self._run = trackio.init(
            project=project,
            name=folder.name,
            config=to_table(recipe),
            resume="allow" if resume_step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
