"""What became of a run: the file run.json in its folder, and a reader for all runs of a folder. No torch.

The process that answers for a run (the one that forked its ranks, or rank 0 under torchrun) writes run.json when it
begins and when it ends. One that is killed writes nothing; but its process is gone, and that can be seen.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fourfold.data.writer import write_atomically
from fourfold.recipe import RunPlan
from fourfold.recipe.places import local_folder, open_url

State = Literal["running", "finished", "stopped", "failed", "died", "unknown"]
FORMAT = 1
_FILE = "run.json"
_CHECKPOINT = re.compile(r"step-(\d+)(\.[^.]+)?$")
_INDEX = "index.json"  # makes a folder a checkpoint
_PATIENCE = 5.0  # seconds that all stores at URLs together may take to say what they hold
_TAIL = 1 << 16  # bytes at the end of metrics.jsonl in which the last whole line is looked for


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run as `fourfold runs` shows it. None: not known."""

    name: str
    folder: str
    state: State  # died: it was running, and its process is gone
    message: str | None  # why it failed, or what stopped it
    step: int | None  # the last one with metrics
    steps: int | None  # of the whole run
    loss: float | None  # of the last step; nan if it was not finite
    tokens_per_second: float | None
    layout: str | None  # tp2 cp1 pp2 dp1
    checkpoint: str | None  # name of the newest complete one, or the URL of a store that has not been asked
    last_write: float | None  # of its files, seconds since 1970
    host: str | None
    pid: int | None
    started: str | None  # ISO 8601, UTC
    ended: str | None


def begin(folder: Path, plan: RunPlan) -> None:
    """Writes that a run goes on, in this process. Of a run that is resumed it keeps when it was first started."""
    former = _read_object(folder / _FILE)
    grid = plan.grid
    _write(
        folder,
        {
            "format": FORMAT,
            "state": "running",
            "message": None,
            "started": former.get("started") or _now(),
            "resumed": _now() if former else None,
            "ended": None,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_started": _process_start(os.getpid()),
            "job_id": job_id(),
            "steps": plan.recipe.train.steps,
            "world": grid.size,
            "layout": {"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "dp": grid.dp},
        },
    )


def end(folder: Path, state: Literal["finished", "stopped", "failed"], message: str | None = None) -> None:
    """Writes how a run ended. A folder that is gone, as of a run that made no step, stays so."""
    if not folder.exists():
        return
    _write(folder, {**_read_object(folder / _FILE), "state": state, "message": message, "ended": _now()})


def job_id() -> str | None:
    """The job that this process belongs to, the same after each of its restarts; None if nobody says.

    torchrun calls every job "none" that is given no --rdzv-id. Its launcher outlives the restarts, so that stands for
    the job.
    """
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    if job == "none":
        return f"{socket.gethostname()}-{os.getppid()}-{_process_start(os.getppid())}"
    return job or os.environ.get("SLURM_JOB_ID")


def name_of_job(directory: Path, job: str) -> str | None:
    """The name of the run in a folder that was last begun by the job, or None if there is none."""
    found = [(folder.stat().st_mtime, folder.parent.name) for folder in directory.glob(f"*/{_FILE}")]
    mine = [(at, name) for at, name in found if _read_object(directory / name / _FILE).get("job_id") == job]
    return max(mine)[1] if mine else None


def belongs_to(folder: Path, job: str | None) -> bool:
    """Whether a run was last begun by the job, on whatever machine."""
    return job is not None and _read_object(folder / _FILE).get("job_id") == job


def list_runs(directory: Path) -> list[RunSummary]:
    """All runs in a folder, the one that was written to last first. What cannot be read is unknown, not an error.

    Raises:
        OSError: the folder itself cannot be read.
    """
    found = [summarize_run(folder) for folder in directory.iterdir() if _is_run(folder)]
    newest = _ask_stores({run.checkpoint for run in found if run.checkpoint and local_folder(run.checkpoint) is None})
    runs = [replace(run, checkpoint=newest.get(run.checkpoint or "", run.checkpoint)) for run in found]
    return sorted(runs, key=lambda run: (-(run.last_write or 0.0), run.name))


def summarize_run(folder: Path) -> RunSummary:
    """One run, from its files on this machine."""
    told, recipe, last = _read_object(folder / _FILE), _read_recipe(folder), _last_line(folder / "metrics.jsonl")
    step = _number(last, "step", int)
    return RunSummary(
        name=folder.name,
        folder=str(folder),
        state=_state(told),
        message=_text(told, "message"),
        step=step,
        steps=_number(told, "steps", int) or _number(_table(recipe, "train"), "steps", int),
        loss=math.nan if "loss" in last and last["loss"] is None else _number(last, "loss", float),
        tokens_per_second=_number(last, "tokens_per_second", float),
        layout=_layout(_table(told, "layout") or _table(recipe, "layout")),
        checkpoint=_newest_checkpoint(folder, _text(_table(recipe, "checkpoint"), "dir")),
        last_write=_last_write(folder),
        host=_text(told, "host"),
        pid=_number(told, "pid", int),
        started=_text(told, "started"),
        ended=_text(told, "ended"),
    )


def summary_json(run: RunSummary) -> dict[str, Any]:
    """A summary as one JSON object. JSON has no nan: a loss that is not finite is the string "nan"."""
    values = asdict(run)
    return values | ({"loss": "nan"} if run.loss is not None and math.isnan(run.loss) else {})


def move_aside(folder: Path) -> None:
    """Makes room for what this start of a run writes: what an earlier one has written becomes ``hangs-1`` ..."""
    if not folder.exists():
        return
    number = 1
    while folder.with_name(f"{folder.name}-{number}").exists():
        number += 1
    folder.rename(folder.with_name(f"{folder.name}-{number}"))


def _is_run(folder: Path) -> bool:
    return folder.is_dir() and any((folder / name).exists() for name in (_FILE, "recipe.toml", "metrics.jsonl"))


def _write(folder: Path, values: Mapping[str, Any]) -> None:
    """Replaces run.json in one go: a reader finds the former or the new one, whole."""
    write_atomically(folder / _FILE, (json.dumps(values, indent=1) + "\n").encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _state(told: Mapping[str, Any]) -> State:
    state = told.get("state")
    if state == "running":
        pid = _number(told, "pid", int)
        if pid is None or pid <= 0:
            return "unknown"
        # The processes of another machine cannot be asked for.
        gone = told.get("host") == socket.gethostname() and _is_gone(pid, told.get("pid_started"))
        return "died" if gone else "running"
    return state if state in ("finished", "stopped", "failed") else "unknown"


def _is_gone(pid: int, then: object) -> bool:
    """Whether the process of this number that started ``then`` has ended."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # another user's, but alive
        pass
    # The system gives a number to another process some day: that one has started at another time.
    now = _process_start(pid)
    return then is not None and now is not None and then != now


def _process_start(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None where the system does not say, as outside of Linux."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses, which may hold spaces; the start is field 22.
    return int(stat.rpartition(")")[2].split()[19])


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_recipe(folder: Path) -> dict[str, Any]:
    """recipe.toml as it is: one of an older or a newer version is no reason to show nothing."""
    try:
        return tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _last_line(path: Path) -> dict[str, Any]:
    """The last whole line of a file of JSON lines, read from its end."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def _newest_checkpoint(folder: Path, directory: str | None) -> str | None:
    """Name of the newest complete checkpoint; of a store that is not on a file system only where it is."""
    place = local_folder(folder / "checkpoints" if directory is None else directory)
    if place is None:
        return directory
    try:
        return _newest(os.listdir(place), lambda name: (place / name / _INDEX).exists())
    except OSError:
        return None


def _ask_stores(urls: Collection[str]) -> dict[str, str | None]:
    """Name of the newest complete checkpoint at each URL, None where there is none. Stores that do not answer, in time
    or at all, are left out."""
    answers: dict[str, str | None] = {}

    def ask(url: str) -> None:
        with suppress(Exception):  # of any kind: each store has its own
            answers[url] = _newest_at(url)

    threads = [threading.Thread(target=ask, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)


def _newest_at(url: str) -> str | None:
    files, path = open_url(url)

    def is_complete(name: str) -> bool:
        try:
            return files.info(f"{path}/{name}/{_INDEX}") is not None
        except FileNotFoundError:
            return False

    try:
        names = files.ls(path, detail=False)
    except FileNotFoundError:  # nothing has been saved yet
        return None
    return _newest((name.rstrip("/").rpartition("/")[2] for name in names), is_complete)


def _newest(names: Iterable[str], is_complete: Callable[[str], bool]) -> str | None:
    """The first complete one from the newest on: of one step, the last in order."""
    found = [(int(match[1]), name) for name in names if (match := _CHECKPOINT.match(name)) and match[2] != ".partial"]
    return next((name for _, name in sorted(found, reverse=True) if is_complete(name)), None)


def _last_write(folder: Path) -> float | None:
    times = []
    for name in ("metrics.jsonl", _FILE, "recipe.toml"):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _layout(table: Mapping[str, Any]) -> str | None:
    degrees = [(name, _number(table, name, int)) for name in ("tp", "cp", "pp", "dp")]
    return None if any(n is None for _, n in degrees) else " ".join(f"{name}{n}" for name, n in degrees)


def _table(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _text(values: Mapping[str, Any], key: str) -> str | None:
    found = values.get(key)
    return found if isinstance(found, str) else None


def _number(values: Mapping[str, Any], key: str, kind: type) -> Any:
    """The number under a key as ``kind``, or None if it is not one."""
    found = values.get(key)
    good = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    return kind(found) if good else None
