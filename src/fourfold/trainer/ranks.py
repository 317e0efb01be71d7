"""Starts the ranks of a run on this machine and ends them together.

On CPU the ranks are forked from one process that has imported torch: sixteen of them are ready in a tenth of a second
and take 7 MB each, where sixteen interpreters would take nine seconds.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A rank that dies takes its neighbours with it: their messages break. So after the first failure others are awaited
# this long, in seconds, and then the cause is picked from all of them.
SETTLE = 1.0
# How long ranks that were asked to stop may take, in seconds, before they are killed.
GRACE = 8.0


class RankFailure(RuntimeError):
    """A rank failed, and with it the run. ``rank`` is the one that failed first; the message starts with it."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Stopped(Exception):  # noqa: N818 - not an error: the ranks were asked to end, and did
    """All ranks ended well after a signal. ``signal`` is its number, ``results`` what the ranks returned."""

    def __init__(self, number: int, results: list[Any]) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number
        self.results = results


@dataclass(frozen=True)
class _Report:
    """How a rank ended: with a result, or with the text of its error and the time of it."""

    result: Any = None
    error: str | None = None
    time: float = 0.0
    secondary: bool = False  # an error of a broken connection, most likely the echo of another rank's end


def fork_ranks(num_ranks: int, work: Callable[[int], Any], *, timeout: float | None = None) -> list[Any]:
    """Runs ``work(rank)`` in ``num_ranks`` forked processes joined in a gloo group, and returns what each returned.

    SIGINT and SIGTERM are passed on to the ranks as SIGTERM, once; those that have not ended :data:`GRACE` seconds
    later are killed.

    Args:
        num_ranks: processes to start.
        work: called in each; what it returns must be picklable.
        timeout: seconds for all of it; None for no limit.

    Raises:
        RankFailure: a rank raised, or died by a signal; all others have been ended. The culprit's message comes first.
        Stopped: a signal was passed on, and all ranks ended well.
        TimeoutError: the time is over.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what is in the buffer would be written once by every child
    with tempfile.TemporaryDirectory(prefix="fourfold-") as folder:
        ranks = _Ranks(num_ranks, work, Path(folder) / "rendezvous")
        with ranks.passing_on_signals():
            return ranks.supervise(timeout)


class _Ranks:
    def __init__(self, num_ranks: int, work: Callable[[int], Any], rendezvous: Path) -> None:
        context = get_context("fork")
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self.reports: dict[int, _Report] = {}
        self.stopped_by: int | None = None
        self.stopping_since = 0.0
        for rank in range(num_ranks):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=(rank, num_ranks, work, rendezvous, sending), name=f"rank{rank}"
            )
            process.start()
            sending.close()
            self.processes.append(process)
            self.pipes.append(receiving)

    def supervise(self, timeout: float | None) -> list[Any]:
        start, failed_at = time.monotonic(), None
        try:
            while len(self.reports) < len(self.processes):
                now = time.monotonic()
                self._collect(0.2)
                if failed_at is None and any(r.error is not None for r in self.reports.values()):
                    failed_at = now
                if failed_at is not None and now - failed_at > SETTLE:
                    break
                if timeout is not None and now - start > timeout:
                    raise TimeoutError(f"{len(self.processes)} ranks did not end within {timeout:.0f} s")
                if self.stopped_by is not None and now - self.stopping_since > GRACE:
                    raise TimeoutError(f"the ranks were asked to stop, did not within {GRACE:.0f} s, and were killed")
        finally:
            self._end_all()
        failures = {rank: report for rank, report in self.reports.items() if report.error is not None}
        if failures:
            rank = min(failures, key=lambda r: (failures[r].secondary, failures[r].time))
            raise RankFailure(rank, f"rank {rank} failed\n{failures[rank].error}")
        results = [self.reports[rank].result for rank in range(len(self.processes))]
        if self.stopped_by is not None:
            raise Stopped(self.stopped_by, results)
        return results

    def _collect(self, seconds: float) -> None:
        open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in self.reports}
        for pipe in wait(list(open_pipes), seconds):
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                self.reports[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:  # it ended without a report
                self.processes[rank].join()
                self.reports[rank] = _death(self.processes[rank].exitcode)

    def _end_all(self) -> None:
        for process in self.processes:
            process.join(0.5 if len(self.reports) == len(self.processes) else 0)
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()

    def passing_on_signals(self) -> _Handlers:
        def stop(number: int, frame: object) -> None:
            if self.stopped_by is not None:
                return
            self.stopped_by, self.stopping_since = number, time.monotonic()
            for process in self.processes:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGTERM)

        return _Handlers(stop)


def _death(exit_code: int | None) -> _Report:
    """The report of a rank that left none: gloo, for one, aborts the process when two ranks disagree on a size."""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        return _Report(error=f"killed by signal {name}", time=-1.0)  # before any traceback: those are its echo
    return _Report(error=f"ended with exit code {exit_code} and without a message", time=0.0)


class _Handlers:
    """Sets a handler for SIGINT and SIGTERM, and restores the former ones."""

    def __init__(self, handler: Callable[[int, Any], None]) -> None:
        self._handler = handler
        self._former: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._handler)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)


def _child(rank: int, num_ranks: int, work: Callable[[int], Any], rendezvous: Path, pipe: Connection) -> None:
    # A thread pool of the parent does not survive a fork: the first parallel operation would wait for it for ever.
    torch.set_num_threads(1)
    # A terminal sends Ctrl-C to all processes of the group, but who stops, and when, is for the parent to say. Until
    # the work sets its own handler, SIGTERM ends a rank at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks, timeout=timedelta(minutes=30)
        )
        report = _Report(result=work(rank))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        text = traceback.format_exc().rstrip()
        report = _Report(error=text, time=time.monotonic(), secondary=_is_echo(error))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Plain pickling: multiprocessing's own would hand over tensors through file descriptors that die with this process.
    pipe.send_bytes(pickle.dumps(report))
    # Not through the interpreter's exit, where a process group that is still referenced can abort the process.
    os._exit(0 if report.error is None else 1)


def _is_echo(error: BaseException) -> bool:
    """Whether an error is what gloo says when the other end is gone."""
    words = (
        "connection closed by peer",
        "connection reset by peer",
        "broken pipe",
        "connection refused",
        "socket closed",
    )
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
