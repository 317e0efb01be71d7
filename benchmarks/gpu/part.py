"""Parts of the script: what each has found, how much time it has, and the process that it runs in.

A part is a list of items, the most important first. What there is no time for is left out, and what fails is noted;
both are said at the end, and the next item goes on. After every item all that is known is on disk: a part that hangs,
or that takes its process with it, loses the item in hand and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]
"""Whatever an item has found, as JSON has it."""

OVERTIME = 0.15  # of the whole time: so much longer a part may take for the item in hand before it is killed


@dataclass
class Part:
    """What one part has found, and until when it may go on.

    Attributes:
        name: of the part.
        file: where it is kept, as JSON.
        deadline: no item begins that would not be done by then, on this machine's monotonic clock.
        facts: about the part as a whole.
        items: in order, each with its ``name`` and ``seconds``.
        left_out: names of items for which there was no time.
        failures: items that failed, and why.
    """

    name: str
    file: Path
    deadline: float
    facts: Figures = field(default_factory=dict)
    items: list[Figures] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failures: list[Figures] = field(default_factory=list)

    def item(self, name: str, work: Callable[[], Figures], *, expected: float = 0.0) -> Figures | None:
        """Runs an item that should take so many seconds. None if there is no time for it, or if it fails."""
        started = time.monotonic()
        if started + expected > self.deadline:
            self.left_out.append(name)
            self.save()
            return None
        try:
            found = work()
        except Exception as error:  # the rest is worth having, whatever this is
            why = str(error).strip() or type(error).__name__
            self.failures.append({"name": name, "why": why, "traceback": traceback.format_exc()})
            self.save()
            return None
        found = {"name": name, **found, "seconds": time.monotonic() - started}
        self.items.append(found)
        self.save()
        return found

    def save(self) -> None:
        """Writes all that is known, in one piece."""
        unfinished = self.file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.to_json()), encoding="utf-8")
        unfinished.replace(self.file)

    def to_json(self) -> Figures:
        """Everything but where and until when."""
        return {key: getattr(self, key) for key in ("facts", "items", "left_out", "failures")}


Work = Callable[[Part], None]


def run_parts(
    parts: Sequence[tuple[str, float, Work]], *, seconds: float, folder: Path
) -> Generator[tuple[str, Figures]]:
    """Runs parts, one after the other, each in a process of its own, within so many seconds.

    Every part gets a share of the time that is left, by its weight, so that what one does not use is the others'. The
    processes are forked: this one must not have used CUDA.

    Args:
        parts: name, weight and work of each.
        seconds: for all of them, give or take `OVERTIME`.
        folder: an empty one, for their files.

    Yields:
        The name of each, and what it found.
    """
    end = time.monotonic() + seconds
    for number, (name, weight, work) in enumerate(parts):
        started = time.monotonic()
        share = max(0.0, end - started) * weight / sum(weight for _, weight, _ in parts[number:])
        part = Part(name, folder / f"{name}.json", started + share)
        part.save()
        said = _run_in_a_process(part, work, patience=share + OVERTIME * seconds)
        found = json.loads(part.file.read_text(encoding="utf-8"))
        found["seconds"] = time.monotonic() - started
        if said is not None:
            found["failures"].append({"name": name, "why": said})
        yield name, found


def _run_in_a_process(part: Part, work: Work, *, patience: float) -> str | None:
    """Why the process ended before its time, or None."""
    process = get_context("fork").Process(target=_child, args=(part, work))
    process.start()
    try:
        process.join(patience)
    finally:
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
    if late:
        return f"was stopped after {patience:.0f} s, in the middle of an item"
    code = process.exitcode or 0
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}; its traceback is above" if code else None


def _child(part: Part, work: Work) -> None:
    # Ctrl-C goes to the whole group of processes; who ends, and when, is for the parent to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # a pool of threads would not have survived the fork
    code = 0
    try:
        work(part)
        part.save()
    except BaseException:
        traceback.print_exc()
        code = 1
    # Not through the interpreter's exit: process groups and pools of compilers would be waited for.
    os._exit(code)
