"""kill -9 at every point of a save: what is found afterwards is always a whole checkpoint, the old one or the new."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fourfold.trainer.checkpoint import CheckpointStore, load_newest
from fourfold.trainer.checkpoint import tensors as tensors_module
from fourfold.trainer.ranks import RankFailure, fork_ranks
from tests.parallel.harness import Case
from tests.trainer.saves import Parts, TrainState, assert_same, build, merge, plan_of

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


def at(step: int) -> TrainState:
    return TrainState(step, 100 * step, {"samples": step}, step, 0)


def die_before(number: int, folder: Path) -> None:
    """Kills this process before it does a certain operation on files, counted from 1.

    That is whatever Python reports of its doings below ``folder``, and each sync and each tensor written.
    """
    done = count(1)

    def step() -> None:
        if next(done) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def heard(event: str, args: tuple[Any, ...]) -> None:
        if event in OPERATIONS and str(args[0]).startswith(str(folder)):
            step()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            step()
            return function(*args)

        return run

    sys.addaudithook(heard)
    os.fsync = counted(os.fsync)
    tensors_module.memory_of = counted(tensors_module.memory_of)  # each tensor, as it is written


def test_kill_at_every_point_of_a_save(tmp_path: Path) -> None:
    """One rank, whose process is copied for every point, and killed there. Step 2 replaces step 1: ``keep`` is 1."""
    place, before = tmp_path / "c", tmp_path / "before"

    def work(rank: int) -> list[int]:
        case = Case(nmb=1, layers=1)
        plan = plan_of(case, {"name": "sgd"})  # without moments: fewer tensors, but no fewer kinds of operations
        own, other = build(case, plan=plan), build(case, plan=plan, seed=99)
        wanted = {}
        for step in (1, 2):
            own.train(step - 1, step)
            wanted[step] = merge([own.parts()])
            if step == 1:
                own.save(place, at(1))
        shutil.copytree(place, before)
        saver = own.saver(CheckpointStore(place), keep=1)
        found = []
        for number in count(1):
            shutil.rmtree(place)
            shutil.copytree(before, place)
            child = os.fork()
            if child == 0:
                die_before(number, place)
                saver.save(at(2))
                saver.wait()
                os._exit(0 if saver.failure() is None else 1)
            _, status = os.waitpid(child, 0)
            state = load_newest(other.model, other.optimizer, CheckpointStore(place), other.groups, say=lambda _: None)
            assert state is not None
            assert state == at(state.step)
            assert_same(merge([other.parts()]), wanted[state.step])
            found.append(state.step)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
            CheckpointStore(place).remove_unfinished()  # as the next run does
            assert len(CheckpointStore(place).complete()) in (1, 2)
            assert not list(place.glob("*.partial/*"))
        return found

    (found,) = fork_ranks(1, work, timeout=100)
    assert found == sorted(found)  # from the moment of publication on it is the new one
    assert found.count(1) > 50
    assert found.count(2) > 5


@pytest.mark.parametrize(("victim", "point"), [(1, 12), (0, 40)])
def test_a_rank_killed_within_a_save_costs_that_save_only(tmp_path: Path, victim: int, point: int) -> None:
    case = Case(tp=2, nmb=1, layers=1)

    def broken_off(rank: int) -> None:
        own = build(case)
        own.train(0, 1)
        own.save(tmp_path, at(1))
        own.train(1, 2)
        saver = own.saver(CheckpointStore(tmp_path))
        if rank == victim:
            die_before(point, tmp_path)
        saver.save(at(2))
        own.train(2, 3)
        saver.wait()
        own.groups.barrier()

    def resumed(rank: int) -> tuple[Parts, Parts]:
        own = build(case, seed=99)
        state = load_newest(own.model, own.optimizer, CheckpointStore(tmp_path), own.groups, say=lambda _: None)
        assert state == at(1)
        own.train(1, 2)
        own.save(tmp_path, at(2))
        reference = build(case)
        reference.train(0, 2)
        return own.parts(), reference.parts()

    with pytest.raises(RankFailure, match=f"rank {victim} failed\nkilled by signal SIGKILL"):
        fork_ranks(2, broken_off, timeout=60)
    assert [c.step for c in CheckpointStore(tmp_path).complete()] == [1]
    own, reference = (merge(list(parts)) for parts in zip(*fork_ranks(2, resumed, timeout=60), strict=True))
    assert_same(own, reference)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]
