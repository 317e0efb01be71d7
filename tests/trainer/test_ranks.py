"""Starting and ending forked ranks: results, the right culprit, signals, and nothing left behind."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fourfold.trainer.ranks import ERROR_FILE, RankFailure, Stopped, end_rank, fork_ranks


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """A folder where each rank leaves its process id; afterwards none of those processes may be left."""
    folder = tmp_path / "pids"
    folder.mkdir()
    yield folder
    left = [int(file.name) for file in folder.iterdir() if is_alive(int(file.name))]
    assert not left


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def sign(folder: Path) -> None:
    (folder / str(os.getpid())).touch()


def wait_for_signs(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(list(folder.iterdir())) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def all_reduce(value: float = 1.0, size: int = 4) -> torch.Tensor:
    tensor = torch.full((size,), value)
    dist.all_reduce(tensor)
    return tensor


def collectives_for_ever() -> None:
    while True:
        all_reduce()


def test_results_come_back_by_rank_tensors_included(pids: Path) -> None:
    def work(rank: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        sign(pids)
        return rank, all_reduce(rank), torch.full((300_000,), float(rank))  # more than a pipe holds

    results = fork_ranks(4, work)
    assert [rank for rank, _, _ in results] == [0, 1, 2, 3]
    assert all(torch.equal(total, torch.full((4,), 6.0)) for _, total, _ in results)
    assert all(torch.equal(own, torch.full((300_000,), float(rank))) for rank, _, own in results)


def test_a_rank_may_run_backward_though_the_parent_did_before() -> None:
    def gradient() -> float:
        weight = torch.ones(256, 256, requires_grad=True)
        (weight @ weight).sum().backward()
        assert weight.grad is not None
        return weight.grad.sum().item()

    assert fork_ranks(2, lambda rank: gradient(), timeout=30) == [gradient()] * 2


def as_parent(work: Callable[[], Any]) -> BaseProcess:
    """A process of its own that runs ``work``, which may fork ranks, be killed, or write to another stdout."""
    process = get_context("fork").Process(target=work)
    process.start()
    return process


def test_what_the_parent_has_not_yet_written_is_written_once(tmp_path: Path) -> None:
    def work() -> None:
        sys.stdout = (tmp_path / "out").open("w")
        print("before", end=" ")
        fork_ranks(3, lambda rank: print(f"rank{rank}", end=" "))
        print("after", flush=True)

    as_parent(work).join()
    words = (tmp_path / "out").read_text().split()
    assert sorted(words) == ["after", "before", "rank0", "rank1", "rank2"]
    assert (words[0], words[-1]) == ("before", "after")


def failing_rank(pids: Path, rank: int, culprit: int, fail: Callable[[], Any]) -> None:
    faulthandler.disable()  # pytest's would write pages about an abort that is meant
    sign(pids)
    all_reduce()
    if rank == culprit:
        fail()
    all_reduce()  # in vain


def test_an_exception_ends_all_with_its_traceback_first(pids: Path) -> None:
    def fail() -> None:
        raise KeyError("the cause")

    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        fork_ranks(4, lambda rank: failing_rank(pids, rank, 2, fail))
    assert time.monotonic() - started < 10
    assert caught.value.rank == 2
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 2 failed"
    assert lines[1].startswith("Traceback")
    assert lines[-1] == "KeyError: 'the cause'"


@pytest.mark.parametrize("culprit", [0, 3])
@pytest.mark.parametrize(
    ("fail", "name"),
    [(lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"), (os.abort, "SIGABRT")],
)
def test_a_rank_killed_by_a_signal_is_named_before_its_peers(
    pids: Path, culprit: int, fail: Callable[[], Any], name: str
) -> None:
    with pytest.raises(RankFailure) as caught:
        fork_ranks(4, lambda rank: failing_rank(pids, rank, culprit, fail))
    assert caught.value.rank == culprit
    assert str(caught.value).startswith(f"rank {culprit} failed\nkilled by signal {name}")


def test_a_killed_rank_is_named_even_if_the_others_fail_long_before_it_is_noticed(pids: Path) -> None:
    # The dead rank leaves a child that keeps its end of the pipe open for a while, as a data loader might.
    def fail() -> None:
        if os.fork() == 0:
            time.sleep(0.4)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailure, match="rank 1 failed\nkilled by signal SIGKILL"):
        fork_ranks(3, lambda rank: failing_rank(pids, rank, 1, fail))


def test_disagreement_on_a_size_under_gloo_is_reported_as_an_abort(pids: Path) -> None:
    def work(rank: int) -> None:
        faulthandler.disable()
        sign(pids)
        all_reduce()
        all_reduce(size=4096 if rank == 1 else 4)

    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank \d failed\nkilled by signal SIGABRT, as gloo does when two ranks"):
        fork_ranks(2, work, timeout=30)
    assert time.monotonic() - started < 10


def test_a_rank_that_leaves_without_a_word(pids: Path) -> None:
    with pytest.raises(RankFailure, match="rank 1 failed\nended with exit code 7 and without a message"):
        fork_ranks(2, lambda rank: failing_rank(pids, rank, 1, lambda: os._exit(7)))


def test_a_result_that_cannot_be_sent_names_the_reason(pids: Path) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 0 failed\nTraceback.*pickle"):
        fork_ranks(1, lambda rank: lambda: None)


def test_timeout_ends_all(pids: Path) -> None:
    def work(rank: int) -> None:
        sign(pids)
        time.sleep(60)

    with pytest.raises(TimeoutError, match="2 ranks did not end within 1 s"):
        fork_ranks(2, work, timeout=1)


def send_when_ready(pids: Path, num_ranks: int, *signals: int, pause: float = 0.0) -> None:
    """From a thread of this process, to this process."""

    def send() -> None:
        wait_for_signs(pids, num_ranks)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(pause)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_parent_lets_the_ranks_end_their_work(pids: Path, number: int) -> None:
    def work(rank: int) -> str:
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
        sign(pids)
        while not all_reduce(float(bool(asked))).any():
            time.sleep(0.01)
        return f"result of {rank}"

    before = signal.getsignal(number)
    send_when_ready(pids, 2, number)
    with pytest.raises(Stopped) as caught:
        fork_ranks(2, work, timeout=30)
    assert caught.value.signal == number
    assert caught.value.results == ["result of 0", "result of 1"]
    assert not caught.value.killed
    assert signal.getsignal(number) is before


def test_a_signal_before_the_work_can_handle_it_ends_the_ranks_at_once(pids: Path) -> None:
    def work(rank: int) -> None:
        if rank == 0:  # one has begun to listen, the others die
            signal.signal(signal.SIGTERM, lambda *_: None)
        sign(pids)
        collectives_for_ever()

    send_when_ready(pids, 3, signal.SIGINT)
    with pytest.raises(Stopped) as caught:
        fork_ranks(3, work, timeout=30)
    assert caught.value.results == [None] * 3
    assert not caught.value.killed


def test_an_error_while_stopping_is_not_hidden(pids: Path) -> None:
    def work(rank: int) -> None:
        def fail(*_: object) -> None:
            raise ArithmeticError("while stopping")

        signal.signal(signal.SIGTERM, fail)
        sign(pids)
        collectives_for_ever()

    send_when_ready(pids, 2, signal.SIGTERM)
    with pytest.raises(RankFailure, match="while stopping"):
        fork_ranks(2, work, timeout=30)


def ignore_all(pids: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sign(pids)
    time.sleep(60)


def test_ranks_that_do_not_stop_are_killed_after_the_grace(pids: Path) -> None:
    send_when_ready(pids, 2, signal.SIGTERM)
    started = time.monotonic()
    with pytest.raises(Stopped) as caught:
        fork_ranks(2, lambda rank: ignore_all(pids), grace=0.5)
    assert caught.value.killed
    assert caught.value.results == [None, None]
    assert time.monotonic() - started < 8


def test_a_second_signal_kills_at_once_but_an_echo_of_the_first_does_not(pids: Path) -> None:
    send_when_ready(pids, 2, signal.SIGINT, signal.SIGTERM, pause=0.05)  # one request that comes twice
    with pytest.raises(Stopped) as caught:
        fork_ranks(2, lambda rank: ignore_all(pids), grace=1.5)
    assert caught.value.signal == signal.SIGINT
    for file in pids.iterdir():
        file.unlink()
    send_when_ready(pids, 2, signal.SIGINT, signal.SIGINT, pause=0.7)
    started = time.monotonic()
    with pytest.raises(Stopped) as caught:
        fork_ranks(2, lambda rank: ignore_all(pids), grace=30)
    assert caught.value.killed
    assert time.monotonic() - started < 8


def test_ranks_do_not_outlive_a_parent_that_is_killed(pids: Path) -> None:
    def sleep(rank: int) -> None:
        sign(pids)
        time.sleep(60)

    parent = as_parent(lambda: fork_ranks(2, sleep))
    wait_for_signs(pids, 2)
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 5
    while any(is_alive(int(file.name)) for file in pids.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_thread_may_end_a_rank_whose_main_thread_is_stuck_and_name_another(pids: Path) -> None:
    def work(rank: int) -> None:
        sign(pids)
        if rank == 1:
            threading.Thread(target=lambda: end_rank("rank 0 sleeps", culprit=0)).start()
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        fork_ranks(3, work, timeout=30)
    assert time.monotonic() - started < 10
    assert (caught.value.rank, str(caught.value)) == (0, "rank 0 failed\nrank 0 sleeps")


def test_a_rank_without_a_launcher_says_on_stderr_why_it_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    process = as_parent(lambda: end_rank("it sleeps", culprit=5))
    process.join()
    assert process.exitcode == 1
    assert capfd.readouterr().err == "rank 5 failed\nit sleeps\n"


def test_pytorchs_elastic_launcher_reads_why_a_rank_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    as_parent(lambda: end_rank("it sleeps", culprit=5)).join()
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert isinstance(failure.message, dict)
    assert failure.message["extraInfo"]["py_callstack"] == "it sleeps"
    assert failure.message["extraInfo"]["rank"] == 5
    assert abs(failure.timestamp - time.time()) < 60


def test_a_collective_is_given_up_after_its_time(pids: Path) -> None:
    def work(rank: int) -> None:
        sign(pids)
        if rank == 0:
            all_reduce()
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank 0 failed\nTraceback.*[Tt]imed out"):
        fork_ranks(2, work, timeout=30, collective_timeout=0.5)
    assert time.monotonic() - started < 10
