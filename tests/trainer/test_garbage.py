"""Python's garbage collector runs when it is told to, and at no other time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
from torch.profiler import ProfilerActivity, profile

from fourfold.layout import Doing, parse_label
from fourfold.parallel import Recorder
from fourfold.trainer.garbage import Garbage


class Node:
    """Refers to itself: only the collector can free it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _collector_as_it_was() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def cycle() -> Callable[[], object]:
    """Asks whether a piece of garbage, made now, is still there."""
    return weakref.ref(Node())


def test_garbage_is_collected_in_the_steps_that_it_should() -> None:
    with Garbage(3, Recorder(None)) as garbage:
        assert not gc.isenabled()
        alive = []
        for step in range(1, 7):
            node = cycle()
            garbage.step_ended(step)
            alive.append(node() is not None)
        assert alive == [True, True, False, True, True, False]
    assert gc.isenabled()


def test_no_amount_of_objects_starts_the_collector() -> None:
    with Garbage(10, Recorder(None)):
        node = cycle()
        keep = [[n] for n in range(200_000)]
        assert node() is not None
        assert len(keep) == 200_000


def test_what_was_built_before_is_not_looked_at_again() -> None:
    kept = Node()
    with Garbage(1, Recorder(None)) as garbage:
        assert gc.get_freeze_count() > 1000
        garbage.step_ended(1)
        assert not any(x is kept for x in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert any(x is kept for x in gc.get_objects())


def test_an_error_gives_the_collector_back() -> None:
    with pytest.raises(ZeroDivisionError), Garbage(1, Recorder(None)):
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_trace_shows_it_and_takes_it_for_no_collective() -> None:
    """T105."""
    with Garbage(2, recorder := Recorder(None)) as garbage, profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in range(1, 5):
            garbage.step_ended(step)
    assert [event.name for event in profiler.events() or ()].count(Doing.GC.range) == 2
    assert parse_label(Doing.GC.range) is None
    assert [entry.doing for entry in recorder.take_doings()] == [Doing.GC, Doing.GC]
