"""Saves that fail, or meet others: the run goes on, nothing half remains, and what is published stays."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from fourfold.trainer.checkpoint import CheckpointStore, TrainState
from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import Case
from tests.trainer.runs import wait_until
from tests.trainer.saves import build

SMALL = Case(nmb=2, layers=2)
PAIR = Case(tp=2, nmb=2, layers=2)


def at(step: int) -> TrainState:
    return TrainState(step, 100 * step, {"samples": step}, step, 0)


def test_a_full_disk_on_one_rank_does_not_end_the_run(tmp_path: Path) -> None:
    def work(rank: int) -> tuple[list[str | None], list[int]]:
        own = build(PAIR)
        own.train(0, 1)
        saver = own.saver(CheckpointStore(tmp_path), keep=1)
        failures = []
        for step in range(1, 4):
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            if rank == 1 and step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
            saver.save(at(step))
            saver.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            failures += [saver.failure(), saver.failure()]
            own.groups.barrier()
        return failures, [c.step for c in CheckpointStore(tmp_path).complete()]

    (first, steps), (second, _) = fork_ranks(2, work, timeout=60)
    assert steps == [3]
    assert second[2] is not None
    assert "the checkpoint of step 2 was not saved: [Errno 27] File too large" in second[2]
    assert first[2] is not None
    assert "the checkpoint of step 2 was not saved: rank 1: [Errno 27] File too large" in first[2]
    assert [failures[i] for failures in (first, second) for i in (0, 1, 3, 4, 5)] == [None] * 10
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003"]


def test_a_rank_that_never_writes_is_waited_for_only_so_long(tmp_path: Path) -> None:
    def work(rank: int) -> str | None:
        own = build(PAIR)
        saver = own.saver(CheckpointStore(tmp_path), patience=0.2)
        if rank == 0:
            saver.save(at(1))
            saver.wait()
        return saver.failure()

    failure = fork_ranks(2, work, timeout=60)[0]
    assert failure is not None
    assert "after 0 s there is nothing of 1 ranks, rank 1 first" in failure
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_published_stays_whatever_happens_to_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: CheckpointStore, newest: object, keep: int) -> None:
        raise OSError(5, "Input/output error")

    def work(rank: int) -> str | None:
        own = build(SMALL)
        saver = own.saver(CheckpointStore(f"local://{tmp_path}"), keep=1)
        monkeypatch.setattr(CheckpointStore, "retain", refuse)
        saver.save(at(1))
        saver.wait()
        return saver.failure()

    (failure,) = fork_ranks(1, work, timeout=60)
    assert failure == "the checkpoint of step 1 was saved, but old ones stay: [Errno 5] Input/output error"
    assert [c.step for c in CheckpointStore(tmp_path).complete()] == [1]


def test_ranks_may_be_a_save_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 writes the next save while rank 0 publishes, and rank 0 renames as soon as rank 1's word is there."""
    publish, replace = CheckpointStore.publish, os.replace

    def slow_publish(self: CheckpointStore, folder: str, index: bytes) -> Any:
        if "step-00000001" in folder:  # until rank 1 has written all of step 2
            wait_until(lambda: len(list(tmp_path.glob("step-00000002*/rank-00001.json"))) == 1)
        return publish(self, folder, index)

    def slow_replace(old: Any, new: Any) -> None:
        replace(old, new)
        if str(new).endswith("rank-00001.json") and "step-00000002" in str(new):
            wait_until((tmp_path / "step-00000002").exists)  # renamed by rank 0, which found the file

    def work(rank: int) -> None:
        monkeypatch.setattr(CheckpointStore, "publish", slow_publish)
        monkeypatch.setattr(os, "replace", slow_replace)
        own = build(PAIR)
        saver = own.saver(CheckpointStore(tmp_path), keep=1)
        for step in (1, 2):
            saver.save(at(step))
        saver.wait()
        assert saver.failure() is None

    fork_ranks(2, work, timeout=60)
    newest, damaged = CheckpointStore(tmp_path).newest_good()
    assert newest is not None
    assert (newest.step, damaged) == (2, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000002"]
