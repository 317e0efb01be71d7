"""What a history says: when something leaks and when it only varies, and curves that keep their maxima."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fourfold.debugger.memory.peaks import DeviceMemory, summarise
from fourfold.debugger.memory.snapshots import read_snapshot
from tests.debugger.memory.allocator import Allocator

MIB = 1 << 20
LEAK = "/a/b/job/leak.py:7:keep"
CACHE = "/a/b/job/cache.py:8:fill"


def steps(folder: Path, *kept: list[tuple[int, str]]) -> DeviceMemory:
    """One step after the other, each of which keeps blocks and makes and frees others."""
    allocator = Allocator()
    allocator.record()
    for number, blocks in enumerate(kept, start=1):
        allocator.annotate("START", f"ProfilerStep#{number}")
        work = [allocator.alloc(size * MIB, "/a/b/job/work.py:1:f") for size in (8, 3, 5)]
        for size, place in blocks:
            allocator.alloc(size, place)
        for address in work:
            allocator.free(address)
        allocator.annotate("END", f"ProfilerStep#{number}")
    return summarise(read_snapshot(allocator.write(folder / "memory-00000.pickle"), 0)[0])


def test_a_leak_and_where(tmp_path: Path) -> None:
    found = steps(tmp_path, *[[(MIB, LEAK), (MIB, LEAK), (3 * MIB, CACHE)]] + [[(MIB, LEAK), (MIB, LEAK)]] * 3)
    assert found.growth.steps == (1, 2, 3, 4)
    assert found.growth.bytes == tuple(n * MIB for n in (5, 7, 9, 11))
    assert found.growth.leaks == 2 * MIB
    (holder,) = found.growth.holders
    assert (holder.what, holder.bytes, holder.blocks, holder.since) == ("b/job/leak.py:7 keep", 2 * MIB, 2, 1)
    assert found.peak.bytes == (16 + 11) * MIB


def test_the_last_step_may_leave_what_the_next_would_free(tmp_path: Path) -> None:
    found = steps(tmp_path, *[[(MIB, LEAK)]] * 3, [(MIB, LEAK), (MIB // 2, LEAK)])
    assert found.growth.leaks == MIB


@pytest.mark.parametrize(
    "kept",
    [
        [[(MIB, LEAK)]] * 2,  # two steps are not enough
        [[(MIB, LEAK)], [], [(MIB, LEAK)], [(MIB, LEAK)]],  # not in every step
        [[(100, LEAK)]] * 5,  # not worth a word
        [[(MIB, LEAK)], [(9 * MIB, CACHE)], [(MIB, LEAK)], [(MIB, LEAK)]],  # another amount each time
        [[(MIB, f"/a/b/job/x.py:{n}:f")] for n in range(5)],  # never from the same place
    ],
)
def test_no_leak(tmp_path: Path, kept: list[list[tuple[int, str]]]) -> None:
    assert steps(tmp_path, *kept).growth.leaks == 0


def test_a_curve_is_thinned_out_but_not_its_peak(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.record()
    for n in range(3000):
        allocator.free(allocator.alloc(1000 + (777 if n == 1234 else n % 7)))
    found = summarise(read_snapshot(allocator.write(tmp_path / "memory-00000.pickle"), 0)[0])
    assert len(found.curve) <= 400
    assert found.curve.max() == found.peak.bytes == 1777
    assert np.all(np.diff(found.seconds) >= 0)
    assert found.peak.seconds == pytest.approx(7e-6 * (len(allocator.events) * 1234 // 3000), abs=50e-6)


def test_blocks_that_other_streams_still_use(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.record()
    first = allocator.alloc(3 * MIB, LEAK)
    allocator.free(first, wait=True)
    allocator.alloc(2 * MIB, LEAK)
    found = summarise(read_snapshot(allocator.write(tmp_path / "memory-00000.pickle"), 0)[0])
    assert (found.peak.bytes, found.peak.waiting) == (5 * MIB, 3 * MIB)
