"""The verdict over ranks: who is short, leaks, holds more than its peers, or has its memory in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.debugger.memory import Memory, Trouble, find_memory
from fourfold.layout import Grid
from tests.debugger.memory.allocator import Allocator

MIB = 1 << 20
GRID = Grid(tp=2, cp=1, pp=2, dp=2)
WORK, CACHE = "/a/b/job/work.py:1:f", "/a/b/job/cache.py:2:g"


def job(folder: Path, *, stages: tuple[int, ...] = (20, 30), more: dict[int, int] | None = None) -> list[Path]:
    """Snapshots of the ranks of `GRID`; a pipeline rank holds so many MiB, some ranks more in their cache."""
    files = []
    for rank in range(GRID.size):
        allocator = Allocator()
        allocator.record()
        allocator.alloc(stages[GRID.coordinates(rank).pp] * MIB, WORK)
        allocator.alloc(((more or {}).get(rank, 0) + 1) * MIB, CACHE)
        files.append(allocator.write(folder / f"memory-{rank:05d}.pickle"))
    return files


def ask(files: list[Path], grid: Grid | None = GRID) -> Memory:
    return find_memory(files, path=files[0].parent, grid=grid, workers=1)


def test_stages_differ_and_nothing_is_wrong(tmp_path: Path) -> None:
    found = ask(job(tmp_path))
    assert (found.trouble, found.uneven, found.notes) == (Trouble.NONE, (), ())
    assert found.devices[found.worst].rank == 2
    assert [one.peak.bytes // MIB for one in found.devices] == [21, 21, 31, 31, 21, 21, 31, 31]


def test_a_rank_holds_more_than_its_peers(tmp_path: Path) -> None:
    found = ask(job(tmp_path, more={5: 4, 6: 9}))
    assert (found.trouble, found.devices[found.worst].rank) == (Trouble.UNEVEN, 6)
    cache = "b/job/cache.py:2 g"
    assert [(one.rank, one.pp, one.what) for one in found.uneven] == [(6, 1, cache), (5, 0, cache)]
    sizes = [(one.peak // MIB, one.usual // MIB, one.more // MIB) for one in found.uneven]
    assert sizes == [(40, 31, 9), (25, 21, 4)]


def test_two_that_hold_more_do_not_hide_each_other(tmp_path: Path) -> None:
    assert [one.rank for one in ask(job(tmp_path, more={2: 9, 6: 9})).uneven] == [2, 6]


def test_a_little_more_is_none(tmp_path: Path) -> None:
    assert ask(job(tmp_path, more={5: 2})).uneven == ()  # 23 of 21 MiB


def test_without_a_layout_nobody_is_compared(tmp_path: Path) -> None:
    found = ask(job(tmp_path, more={5: 9}), grid=None)
    assert (found.trouble, found.uneven) == (Trouble.NONE, ())
    assert "give it with --layout" in found.notes[-1]


def test_a_layout_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory of rank 7, but the layout tp=2,cp=1,pp=2,dp=1 has 4 ranks"):
        ask(job(tmp_path), Grid(tp=2, cp=1, pp=2, dp=1))


def test_out_of_memory_comes_first(tmp_path: Path) -> None:
    files = job(tmp_path, more={1: 30})
    allocator = Allocator()
    allocator.record()
    allocator.alloc(7 * MIB, WORK)
    allocator.fail(64 * MIB, MIB, CACHE)
    allocator.write(files[3])
    found = ask(files)
    assert (found.trouble, found.devices[found.worst].rank) == (Trouble.OUT_OF_MEMORY, 3)


def test_a_leak_comes_before_what_is_uneven(tmp_path: Path) -> None:
    files = job(tmp_path, more={1: 30})
    allocator = Allocator()
    allocator.record()
    for step in range(1, 4):
        allocator.annotate("START", f"ProfilerStep#{step}")
        allocator.alloc(2 * MIB, WORK)
        allocator.annotate("END", f"ProfilerStep#{step}")
    allocator.write(files[4])
    found = ask(files)
    assert (found.trouble, found.devices[found.worst].rank) == (Trouble.LEAK, 4)


def test_fragmented(tmp_path: Path) -> None:
    """Every other of 44 blocks is freed, and then another stream needs memory of its own."""
    allocator = Allocator()
    allocator.record()
    blocks = [allocator.alloc(50 * MIB, WORK) for _ in range(44)]
    for address in blocks[::2]:
        allocator.free(address)
    allocator.alloc(1200 * MIB, CACHE, stream=9)
    found = ask([allocator.write(tmp_path / "memory-00000.pickle")], None)
    device = found.devices[0]
    assert found.trouble is Trouble.FRAGMENTED
    assert (device.peak.bytes, device.peak.reserved) == (2300 * MIB, 3400 * MIB)


def test_damaged_files_are_named_and_worked_around(tmp_path: Path) -> None:
    files = job(tmp_path)
    files[2].write_bytes(b"\x80\x04garbage")
    found = ask(files)
    assert [one.rank for one in found.devices] == [0, 1, 3, 4, 5, 6, 7]
    assert f"{files[2]} is damaged" in found.notes[0]
    for file in files:
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="is damaged: it is empty"):
        ask(files)


def test_two_of_one_rank(tmp_path: Path) -> None:
    files = job(tmp_path)
    other = files[3].rename(tmp_path / "other-1.pickle")
    with pytest.raises(ValueError, match=r"memory-00001.pickle and .*other-1.pickle are both of rank 1"):
        ask([*files[:3], other])


def test_in_other_processes(tmp_path: Path) -> None:
    files = job(tmp_path, more={6: 9})
    done: list[tuple[int, int]] = []
    found = find_memory(files, path=tmp_path, grid=GRID, workers=2, progress=lambda *at: done.append(at))
    assert found.uneven == ask(files).uneven
    assert done == [(n, 8) for n in range(1, 9)]
