"""Starts the ranks of a run on this machine and ends them together.

On CPU the ranks are forked from one process that has imported torch: sixteen of them are ready in a tenth of a second
and take 7 MB each, where sixteen interpreters would take nine seconds.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fourfold.data.indexed import TokenFileError
from fourfold.recipe import RecipeError
from fourfold.trainer.checkpoint import CheckpointError
from fourfold.trainer.nonfinite import NonFiniteError

# A rank that dies takes its neighbours with it: their messages break. So after the first failure others are awaited
# this long, in seconds, and then the cause is picked from all of them.
SETTLE = 1.0
# How long ranks that were asked to stop may take, in seconds, before they are killed.
GRACE = 30.0
# Signals that come closer together, in seconds, are one request: a wrapper may pass on what the terminal sends as well.
ONE_REQUEST = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Names the file in which a process says why it ends; PyTorch's elastic launcher sets it and reads the file, as we do.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


EXPLAIN_THEMSELVES = (CheckpointError, NonFiniteError, RecipeError, TokenFileError)
CONCERN_ALL = (NonFiniteError, RecipeError)  # raised on all ranks, whichever is heard first


class RankFailure(RuntimeError):  # noqa: N818 - it reports an error of another process
    """A rank failed, and with it the run. ``rank`` is the one that failed first; the message starts with it."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Stopped(Exception):  # noqa: N818 - not an error: the ranks were asked to end, and did
    """The ranks ended after a signal.

    Attributes:
        signal: its number.
        results: what the ranks returned; None of a rank that ended before its work was done.
        killed: whether ranks had to be killed, since they did not end by themselves or the user would not wait.
    """

    def __init__(self, number: int, results: list[Any], *, killed: bool) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number
        self.results = results
        self.killed = killed


@dataclass(frozen=True)
class _Report:
    """How a rank ended: with a result, or with the text of its error and the time of it."""

    result: Any = None
    error: str | None = None
    time: float = 0.0
    secondary: bool = False  # an error of a broken connection, most likely the echo of another rank's end
    culprit: int | None = None  # another rank that is to blame
    concerns_all: bool = False  # the same error on every rank
    terminated: bool = False  # died by SIGTERM, as it should if that came before the work could handle it


def fork_ranks(
    num_ranks: int,
    work: Callable[[int], Any],
    *,
    timeout: float | None = None,
    grace: float = GRACE,
    collective_timeout: float = 1800.0,
) -> list[Any]:
    """Runs ``work(rank)`` in ``num_ranks`` forked processes joined in a gloo group, and returns what each returned.

    The first SIGINT or SIGTERM is passed on to the ranks as SIGTERM; those that have not ended ``grace`` seconds later,
    or when a second one comes, are killed. Ranks do not outlive this process, however it ends.

    Args:
        num_ranks: processes to start.
        work: called in each; what it returns must be picklable.
        timeout: seconds for all of it; None for no limit.
        grace: seconds that ranks may take to stop.
        collective_timeout: seconds after which PyTorch gives up a collective.

    Raises:
        RankFailure: a rank raised, or died by a signal; all others have been ended. The culprit's message comes first.
        Stopped: a signal was passed on, and the ranks ended.
        TimeoutError: the time is over.
        OSError: the system starts no more processes.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what is in the buffer would be written once by every child
    ranks = _Ranks()
    with tempfile.TemporaryDirectory(prefix="fourfold-") as folder, _Handlers(ranks.stop):
        try:
            ranks.start(num_ranks, work, Path(folder), collective_timeout)
            ranks.supervise(timeout, grace)
        finally:
            ranks.end()
    return ranks.results()


class _Ranks:
    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self.error_files: list[Path] = []
        self.reports: dict[int, _Report] = {}
        self.stopped_by: int | None = None
        self.stopping_since = 0.0
        self.impatient = False
        self.killed = False
        self.lifeline = os.pipe()  # nothing is ever written: it breaks when this process ends

    def start(self, num_ranks: int, work: Callable[[int], Any], folder: Path, collective_timeout: float) -> None:
        context = get_context("fork")
        # What exists now is left alone by the ranks' garbage collectors: looking at it would copy it into each.
        gc.freeze()
        # A signal must not find a process that is no longer the parent and not yet a rank.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            for rank in range(num_ranks):
                receiving, sending = context.Pipe(duplex=False)
                place = _Place(rank, num_ranks, folder, sending, self.lifeline, collective_timeout)
                process = context.Process(target=_child, args=(place, work), name=f"rank{rank}")
                process.start()
                sending.close()
                self.processes.append(process)
                self.pipes.append(receiving)
                self.error_files.append(place.error_file)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            gc.unfreeze()

    def supervise(self, timeout: float | None, grace: float) -> None:
        """Returns when all ranks have ended, or should be ended."""
        start, failed_at = time.monotonic(), None
        while len(self.reports) < len(self.processes):
            self._collect(0.2)
            now = time.monotonic()
            if failed_at is None and any(r.error is not None for r in self.reports.values()):
                failed_at = now
            if failed_at is not None and now - failed_at > SETTLE:
                return
            if timeout is not None and now - start > timeout:
                raise TimeoutError(f"{len(self.processes)} ranks did not end within {timeout:.0f} s")
            if self.impatient or (self.stopped_by is not None and now - self.stopping_since > grace):
                self.killed = True
                return

    def results(self) -> list[Any]:
        """What the ranks returned, or one exception for all of them."""
        failures = {rank: report for rank, report in self.reports.items() if report.error is not None}
        if self.stopped_by is not None:  # then these are ways to stop
            failures = {rank: r for rank, r in failures.items() if not (r.secondary or r.terminated)}
        if failures:
            first = failures[min(failures, key=lambda r: (failures[r].secondary, failures[r].time))]
            rank = (
                next(rank for rank in failures if failures[rank] is first) if first.culprit is None else first.culprit
            )
            assert first.error is not None
            raise RankFailure(rank, first.error if first.concerns_all else f"rank {rank} failed\n{first.error}")
        results = [self.reports.get(rank, _Report()).result for rank in range(len(self.processes))]
        if self.stopped_by is not None:
            raise Stopped(self.stopped_by, results, killed=self.killed)
        return results

    def stop(self, number: int, frame: object) -> None:
        """Handles a signal: asks the ranks to stop."""
        now = time.monotonic()
        if self.stopped_by is not None:
            self.impatient = self.impatient or now - self.stopping_since > ONE_REQUEST
            return
        self.stopped_by, self.stopping_since = number, now
        # Not through sys.stderr, which this handler may have interrupted.
        name = signal.Signals(number).name
        os.write(2, f"\n{name}: stopping all ranks after this step; a second one kills them\n".encode())
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGTERM)

    def _collect(self, seconds: float) -> None:
        open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in self.reports}
        for pipe in wait(list(open_pipes), seconds):
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                self.reports[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):  # it ended without a report, or within it
                self.processes[rank].join()
                self.reports[rank] = _left_behind(self.error_files[rank]) or _death(self.processes[rank].exitcode)

    def end(self) -> None:
        """Kills what still runs. Afterwards no process is left."""
        for process in self.processes:
            process.join(0.5 if len(self.reports) == len(self.processes) else 0)
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()

        for end in self.lifeline:
            os.close(end)


def end_rank(message: str, *, culprit: int) -> NoReturn:
    """Ends this process with exit code 1, from any thread: the main one may be stuck for ever.

    The launcher, ours or PyTorch's elastic one, reads why in the file that the environment names; without a launcher it
    goes to stderr. ``culprit`` is the rank to blame.
    """
    # The form is that of torch.distributed.elastic.multiprocessing.errors.
    details = {"py_callstack": message, "timestamp": str(int(time.time())), "rank": culprit}
    file = os.environ.get(ERROR_FILE)
    if file is None:
        os.write(2, f"rank {culprit} failed\n{message}\n".encode())
    else:
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}), encoding="utf-8")
    os._exit(1)


def _left_behind(error_file: Path) -> _Report | None:
    """The report of a rank that :func:`end_rank` has ended."""
    try:
        message = json.loads(error_file.read_text(encoding="utf-8"))["message"]
        return _Report(error=message["message"], time=time.monotonic(), culprit=message["extraInfo"]["rank"])
    except (OSError, ValueError, KeyError):
        return None


def _death(exit_code: int | None) -> _Report:
    """The report of a rank that left none."""
    if exit_code is None or exit_code >= 0:
        return _Report(error=f"ended with exit code {exit_code} and without a message")
    name = {number.value: number.name for number in signal.Signals}.get(-exit_code, str(-exit_code))
    hints = {
        "SIGABRT": ", as gloo does when two ranks disagree on the size of a message; what it said is above",
        "SIGBUS": ", as when a token file is cut short while it is read, or its disk fails",
        "SIGKILL": ", as the system does when memory runs out",
    }
    # Its time is before any traceback's: those are its echo.
    error = f"killed by signal {name}{hints.get(name, '')}"
    return _Report(error=error, time=-1.0, terminated=name == "SIGTERM")


class _Handlers:
    """Sets a handler for SIGINT and SIGTERM, and restores the former ones."""

    def __init__(self, handler: Callable[[int, Any], None]) -> None:
        self._handler = handler
        self._former: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in SIGNALS:
            self._former[number] = signal.signal(number, self._handler)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class _Place:
    """What a forked process is told about itself: its rank, and how to reach the others and the parent."""

    rank: int
    num_ranks: int
    folder: Path
    pipe: Connection
    lifeline: tuple[int, int]
    collective_timeout: float

    @property
    def error_file(self) -> Path:
        return self.folder / f"error-{self.rank}.json"


def _child(place: _Place, work: Callable[[int], Any]) -> None:
    # A thread pool of the parent does not survive a fork: the first parallel operation would wait for it for ever.
    torch.set_num_threads(1)
    # A terminal sends Ctrl-C to all processes of the group, but who stops, and when, is for the parent to say. Until
    # the work sets its own handler, SIGTERM ends a rank at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.close(place.lifeline[1])
    threading.Thread(target=_end_with_parent, args=(place.lifeline[0],), daemon=True).start()
    os.environ[ERROR_FILE] = str(place.error_file)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place.folder / 'rendezvous'}",
            rank=place.rank,
            world_size=place.num_ranks,
            timeout=timedelta(seconds=place.collective_timeout),
        )
        report = _Report(result=work(place.rank))
        dist.barrier()
        dist.destroy_process_group()
        # Plain pickling: multiprocessing's own would hand over tensors through file descriptors that die with us.
        message = pickle.dumps(report)
    except BaseException as error:
        report = _Report(error=describe(error), time=time.monotonic(), secondary=is_echo(error))
        report = replace(report, concerns_all=isinstance(error, CONCERN_ALL))
        message = pickle.dumps(report)
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # the reader went away, as in `| head`
            stream.flush()
    place.pipe.send_bytes(message)
    # Not through the interpreter's exit, where a process group that is still referenced can abort the process.
    os._exit(0 if report.error is None else 1)


def describe(error: BaseException) -> str:
    """An error for the user: one that explains itself by its message, any other, which is a fault of ours, with its
    traceback."""
    if isinstance(error, EXPLAIN_THEMSELVES):
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "".join(traceback.format_exception(error)).rstrip()


def _end_with_parent(lifeline: int) -> None:
    """Ends this rank when its parent is gone, be it by SIGKILL: nobody would stop it, or hear of it, any more."""
    os.read(lifeline, 1)
    os._exit(1)


def is_echo(error: BaseException) -> bool:
    """Whether an error is what gloo says when the other end is gone."""
    words = (
        "connection closed by peer",
        "connection reset by peer",
        "broken pipe",
        "connection refused",
        "socket closed",
    )
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
