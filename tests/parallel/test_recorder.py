"""What a rank remembers of its collectives and messages: what its neighbours remember, too, and what it waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from fourfold.layout import Doing
from fourfold.parallel.recorder import KEPT, Recorder
from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import Case, make_model, micro_batches


def test_the_members_of_a_group_remember_the_same() -> None:
    case = Case(tp=2, cp=2, pp=2, nmb=3, tied=True, zero=2)

    def work(rank: int) -> dict[str, Any]:
        model = make_model(case)
        model.forward_backward(micro_batches(case, 0, 0))
        model.gradients.norm()
        model.groups.barrier()
        return model.groups.recorder.as_json()

    states = fork_ranks(case.world, work, timeout=60)
    schedule, grid = case.plan().schedule, case.plan().grid
    lines = {(r, x["dimension"], *x["ranks"], x["way"]): x for r, state in enumerate(states) for x in state["lines"]}
    assert {key[1] for key in lines} == {"tp", "cp", "pp", "dp", "fsdp", "world"}
    dimensions = {"fsdp": ("dp", "cp"), "world": ("tp", "cp", "pp", "dp")}
    for (rank, dimension, first, last, way), line in lines.items():
        ranks = (first, last) if way else grid.group_of(rank, *dimensions.get(dimension, (dimension,)))
        assert (first, last) == (ranks[0], ranks[-1])
        assert [entry["number"] for entry in line["recent"]] == [*range(line["started"])][-KEPT:]
        assert all(entry["ended"] for entry in line["recent"])
        for other in set(ranks) - {rank}:
            theirs = lines[other, dimension, first, last, {"send": "receive", "receive": "send"}.get(way, "")]
            assert theirs["started"] == line["started"]
            same = ("number", "tensor") if way else ("kind", "number", "tensor", "stage", "micro_batch")
            assert all(
                [a[k] for k in same] == [b[k] for k in same]
                for a, b in zip(line["recent"], theirs["recent"], strict=True)
            )
    for rank, state in enumerate(states):
        assert state["waits"] == []
        plan = [str(action) for action in schedule.actions[grid.coordinates(rank).pp]]
        done = [entry["action"] for entry in state["actions"] if not entry["action"].startswith("-1")]
        assert done == plan[-len(done) :]


class Started:
    """Something started that ends when it is told to."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self) -> None:
        self.done.wait()


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def waits(recorder: Recorder) -> list[tuple[str, int]]:
    """Kind and number of what is waited for, as soon as anything is."""
    deadline = time.monotonic() + 5
    while not (found := recorder.waits(time.monotonic_ns())) and time.monotonic() < deadline:
        time.sleep(0.001)
    return [(entry["kind"], entry["number"]) for entry in found]


def test_a_collective_is_waited_for_from_the_call_of_wait_to_its_end() -> None:
    recorder, work = Recorder(None), Started()
    line = recorder.line("tp", (0, 1))
    recorder.position.stage, recorder.position.micro_batch = 3, 5
    line.start("reduce_scatter")
    entry = line.start("all_gather")
    assert line.num_started() == 2
    assert recorder.waits(time.monotonic_ns()) == []  # nothing waits yet: it may compute meanwhile
    thread = in_thread(lambda: entry.wait(work))
    assert waits(recorder) == [("all_gather", 1)]
    (found,) = recorder.waits(entry.waits + 2_000_000_000)
    assert (found["seconds"], found["stage"], found["micro_batch"], found["ranks"]) == (2.0, 3, 5, [0, 1])
    work.done.set()
    thread.join()
    assert recorder.waits(time.monotonic_ns()) == []


def test_sends_are_waited_for_only_by_who_must_get_rid_of_them() -> None:
    """The thread of the outbox waits all the time, and holds nobody up; at the end of a step the rank waits for it."""
    recorder, work = Recorder(None), Started()
    line = recorder.line("pp", (0, 1), "send")
    first, _second = line.start("send"), line.start("send")
    thread = in_thread(lambda: first.wait(work))
    time.sleep(0.05)
    assert recorder.waits(time.monotonic_ns()) == []
    with recorder.flushing():
        assert waits(recorder) == [("send", 0), ("send", 1)]
    assert recorder.waits(time.monotonic_ns()) == []
    work.done.set()
    thread.join()


def test_what_is_no_action_is_logged_with_its_waiting() -> None:
    recorder = Recorder(None)
    line, other = recorder.line("tp", (0, 1)), recorder.line("dp", (0, 2))
    with recorder.doing(Doing.SUM):
        line.start("all_reduce").wait(Slept(0.05))
        with recorder.doing(Doing.COUNT):  # a part of the other
            other.start("all_reduce").wait(Slept(0.02))
        elsewhere = in_thread(lambda: other.start("all_reduce").wait(Slept(0.2)))  # the rank itself goes on
    elsewhere.join()
    with recorder.flushing():
        time.sleep(0.01)
    with pytest.raises(ZeroDivisionError), recorder.doing(Doing.NORM):
        raise ZeroDivisionError
    with recorder.doing(Doing.GC):
        sum(range(300_000))
    entries = recorder.take_doings()
    assert [entry.doing for entry in entries] == [Doing.SUM, Doing.FLUSH, Doing.GC]
    assert all(a.start <= a.end <= b.start for a, b in pairwise(entries))
    summed, flushed, collected = entries
    assert 0.07e9 <= summed.wait <= summed.end - summed.start < 0.2e9
    assert summed.cpu < 0.05e9
    assert 0.01e9 <= flushed.wait <= flushed.end - flushed.start
    assert collected.wait == 0
    assert 0 < collected.cpu <= collected.end - collected.start + 1e6
    assert recorder.waited == line.waited + other.waited + flushed.wait
    assert 0.05e9 <= line.waited < other.waited + 0.05e9
    assert recorder.take_doings() == []


class Slept:
    """Something that takes so many seconds once it is waited for."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def wait(self) -> None:
        time.sleep(self.seconds)


class Device:
    """A device that gets through its queue of work as far as it is told to."""

    def __init__(self) -> None:
        self.queued = self.reached = 0

    def mark(self) -> Callable[[], bool]:
        self.queued += 1
        place = self.queued
        return lambda: self.reached >= place


class Queued:
    """What a device has been told to wait for: the host does not."""

    def wait(self) -> None: ...


def test_on_a_device_it_counts_how_far_the_device_has_come() -> None:
    device = Device()
    recorder = Recorder(device.mark)
    line, other = recorder.line("tp", (0, 1)), recorder.line("fsdp", (0, 2))
    for _ in range(3):  # marks 1 to 6
        line.start("all_gather").wait(Queued())
    other.start("reduce_scatter").wait(Queued())  # 7 and 8
    seen = []
    for device.reached in range(9):
        found = [(x["kind"], x["number"]) for x in recorder.waits(time.monotonic_ns())]
        seen.append((line.num_started(), other.num_started(), found))
    tp, fsdp = "all_gather", "reduce_scatter"
    assert seen == [
        (0, 0, []),  # the device computes; the host is far ahead
        (1, 0, [(tp, 0)]), (1, 0, []), (2, 0, [(tp, 1)]), (2, 0, []), (3, 0, [(tp, 2)]), (3, 0, []),
        (3, 1, [(fsdp, 0)]), (3, 1, []),
    ]  # fmt: skip


def test_only_the_last_ones_are_kept() -> None:
    recorder = Recorder(None)
    line = recorder.line("tp", (0, 1))
    for _ in range(3 * KEPT):
        line.start("all_gather").wait(Queued())
        recorder.action("F")
    state = recorder.as_json()
    assert [entry["number"] for entry in state["lines"][0]["recent"]] == list(range(2 * KEPT, 3 * KEPT))
    assert len(state["actions"]) == 2 * KEPT
