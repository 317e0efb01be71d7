"""Watches the steps of one rank: what takes too long is reported by all ranks together, and ended at last.

A thread per rank looks at the clock. When a step exceeds its limit each rank writes what it does, what it waits for and
what it last did into a file; the lowest rank that lives reads them all, follows the waits to the rank for which all the
others wait, and prints that first. They speak through files in the run's folder: in a hang messages do not arrive.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from fourfold.debugger.hangs import diagnose, read_reports, report_file
from fourfold.parallel import Groups, flight_recorder
from fourfold.recipe import Timeouts
from fourfold.report.hangs import hang_text
from fourfold.trainer.ranks import end_rank
from fourfold.trainer.runs import move_aside
from fourfold.trainer.stacks import stacks, where

REMEMBERED = 50  # steps whose median is the measure
FLIGHTS = 100  # entries of PyTorch's flight recorder in a report
SETTLE = 5.0  # seconds that ranks have to write their reports, from the first one on


class Watchdog:
    """The watchdog of one rank, which works while it is entered. All ranks make one at the same time.

    The loop says when a step begins and ends. A step may take ``step_factor`` times the median of the last ones, at
    least ``step_minimum`` seconds and at most ``startup``, which is the limit of the first step of this process and of
    what lies between steps. After ``abort`` seconds of one step every rank ends itself, with the cause.

    Args:
        folder: of the run. All ranks must see the same one; who does not is taken for dead.
        groups: of this rank.
        settings: [timeouts] of the recipe.
        settle: seconds that ranks have to write their reports.
    """

    def __init__(self, folder: Path, groups: Groups, settings: Timeouts, *, settle: float = SETTLE) -> None:
        self._folder = folder / "hangs"
        self._groups = groups
        self._settings = settings
        self._settle = settle
        self._durations: deque[float] = deque(maxlen=REMEMBERED)
        self._step = 0
        self._in_step = False
        self._since = self._former_since = time.monotonic()  # of this step or pause, and of the step before
        self._reported: set[str] = set()  # folders that hold this rank's report
        self._spoke_of: tuple[int, str] | None = None  # the step whose hang this rank has printed, and its cause
        if groups.rank == 0:
            move_aside(self._folder)
        groups.barrier()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="fourfold-watchdog")

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops watching. What this rank raises is for the launcher to report."""
        self._closed.set()
        self._thread.join()
        if error is None:
            self._say_that_it_went_on(self._step, self._in_step)

    def step_begins(self, step: int) -> None:
        """``step`` is counted from 1."""
        self._former_since, self._since = self._since, time.monotonic()
        self._step, self._in_step = step, True

    def step_ended(self) -> None:
        """The step that began last is done."""
        now = time.monotonic()
        self._durations.append(now - self._since)
        self._former_since, self._since, self._in_step = self._since, now, False

    def _step_limit(self) -> float:
        """Seconds that a step may take before it is reported."""
        settings = self._settings
        if not settings.step_factor:
            return float("inf")
        if not self._durations:
            return settings.startup
        usual = settings.step_factor * statistics.median(self._durations)
        return min(max(settings.step_minimum, usual), settings.startup)  # a slow first step is no measure

    def _watch(self) -> None:
        settings = self._settings
        shortest = min(settings.step_minimum, settings.startup, settings.abort)
        while not self._closed.wait(min(1.0, shortest / 50)):
            now, step, in_step = time.monotonic(), self._step, self._in_step
            self._say_that_it_went_on(step, in_step)
            seconds, step_limit = now - self._since, self._step_limit()
            limit = step_limit if in_step or not settings.step_factor else settings.startup
            name = f"step-{step:08d}{'' if in_step else '-after'}"
            if in_step and seconds > settings.abort:
                self._abort(step)
            if seconds > limit and name not in self._reported:
                self._report(name)
            elif now - self._former_since > min(step_limit, settings.abort) / 2:
                self._join_others()

    def _join_others(self) -> None:
        """Reports where another rank has found that it waits too long: this one may be what it waits for.

        Nobody looks into the folder while steps are as long as they should be.
        """
        for name in sorted({path.name for path in self._folder.glob("step-*")} - self._reported):
            self._report(name)

    def _report(self, name: str) -> None:
        """Writes this rank's report, and prints the diagnosis unless a lower rank is there to do it."""
        self._reported.add(name)
        folder, rank = self._folder / name, self._groups.rank
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(report_file(folder, rank), self._what_this_rank_does())
            everybody = [report_file(folder, other) for other in range(self._groups.grid.size)]
            self._wait_until_there(everybody)
            if not any(file.exists() for file in everybody[:rank]):
                (folder / "speaker").touch(exist_ok=False)  # a rank that comes late must not print it all again
                self._speak(folder)
        except FileExistsError:
            return
        except OSError as error:
            _print(f"rank {rank} hangs and cannot write its report: {error}")

    def _wait_until_there(self, files: list[Path]) -> None:
        deadline = time.monotonic() + self._settle
        missing = files
        while missing and time.monotonic() < deadline:
            missing = [file for file in missing if not file.exists()]
            time.sleep(min(0.2, self._settle / 50))

    def _speak(self, folder: Path) -> None:
        reports = read_reports(folder, self._groups.grid.size)
        own, hang = reports[self._groups.rank], diagnose(reports, self._groups.grid)
        text = hang_text(hang, head=f"HANG: {own.doing} has taken {own.seconds:.1f} s. Reports: {folder}")
        culprit, cause = own.rank, "a link or a device"
        if hang.causes:
            culprit, cause = hang.causes[0].rank, f"rank {hang.causes[0].rank}: {hang.causes[0].what}"
        _write(folder / "hang.json", {"culprit": culprit, "text": text})
        self._spoke_of = self._step, cause
        _print(text)

    def _say_that_it_went_on(self, step: int, in_step: bool) -> None:
        if self._spoke_of is not None and (step != self._spoke_of[0] or not in_step):
            (former, cause), self._spoke_of = self._spoke_of, None
            _print(f"step {former} went on; it had waited for {cause}")

    def _abort(self, step: int) -> NoReturn:
        """Ends this process. The main thread cannot be asked to: it may be inside of a collective for ever."""
        name = f"step-{step:08d}-abort"
        if name not in self._reported:
            self._report(name)
        file = self._folder / name / "hang.json"
        self._wait_until_there([file])
        culprit, text = self._groups.rank, "no rank could say why"
        if file.exists():
            hang = json.loads(file.read_text(encoding="utf-8"))
            culprit, text = hang["culprit"], hang["text"]
        end_rank(
            f"RuntimeError: step {step} took longer than timeouts.abort = {self._settings.abort:g} s\n{text}",
            culprit=culprit,
        )

    def _what_this_rank_does(self) -> dict[str, Any]:
        """The report of docs/formats.md."""
        return {
            "rank": self._groups.rank,
            **self._groups.coordinates._asdict(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "doing": f"step {self._step}" if self._in_step else f"what follows step {self._step}",
            "seconds": time.monotonic() - self._since,
            "where": where(),
            **self._groups.recorder.as_json(),
            "stacks": stacks(),
            "flight_recorder": flight_recorder(FLIGHTS),
        }


def _write(file: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: others read it as soon as it is there."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(file)


def _print(text: str) -> None:
    print(f"\n{text}\n", file=sys.stderr, flush=True)
