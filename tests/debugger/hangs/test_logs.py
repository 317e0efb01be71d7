"""Action logs of stopped runs: a player that stops one rank before one action, and logs that are damaged or whole."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from fourfold.debugger.hangs import Hang
from fourfold.debugger.hangs.logs import NO_LOG, from_logs, is_cut_off, log_files, read_tail
from fourfold.layout import Action, Grid, Kind, Schedule, generate
from fourfold.layout.actions import BACKS, COMPUTE, SENDS

CASES = [
    (Grid(tp=2, cp=2, pp=2, dp=2), {"v": 2, "num_micro_batches": 4, "nc": 2}),
    (Grid(pp=3, dp=2), {"v": 2, "num_micro_batches": 6, "nc": 3}),
    (Grid(tp=2, pp=2, dp=2), {"v": 2, "num_micro_batches": 4, "kind": "afab", "zero": 3}),
    (Grid(pp=3, tp=2), {"num_micro_batches": 5, "kind": "zb-h1"}),
    (Grid(tp=2, dp=2), {"num_micro_batches": 2, "kind": "afab"}),
]


def schedule_of(grid: Grid, options: dict[str, object]) -> Schedule:
    return generate(pp=grid.pp, **options)  # type: ignore[arg-type]


def met_in(action: Action, rank: int, grid: Grid) -> tuple[int, ...]:
    """The ranks that do an action together with this one."""
    together = {Kind.GATHER: ("dp", "cp"), Kind.REDUCE: ("dp", "cp")} | dict.fromkeys(COMPUTE, ("tp", "cp"))
    return grid.group_of(rank, *together.get(action.kind, ()))


def play(schedule: Schedule, grid: Grid, culprit: int, stop: int) -> list[int]:
    """How many of its actions each rank has done when nothing moves any more, if one stops before one.

    Ranks of a TP or CP group do a computation together, those of an FSDP group a GATHER or REDUCE.
    """
    lists = [schedule.actions[grid.coordinates(rank).pp] for rank in range(grid.size)]
    done = [0] * grid.size

    def at(rank: int) -> bool:
        """Whether a rank can begin its next action."""
        if done[rank] == len(lists[rank]) or (rank == culprit and done[rank] == stop):
            return False
        action, here = lists[rank][done[rank]], grid.coordinates(rank)
        if action.kind is not Kind.FORWARD and action.kind not in BACKS:
            return True
        step = -1 if action.kind is Kind.FORWARD else 1
        stage = action.stage + step
        if not 0 <= stage < schedule.num_stages or schedule.rank_of(stage) == here.pp:
            return True
        send = Action(Kind.SEND_FORWARD if step < 0 else Kind.SEND_BACKWARD, stage, action.micro_batch)
        sender = grid.rank(**{**here._asdict(), "pp": schedule.rank_of(stage)})
        return send in lists[sender][: done[sender]]

    moved = True
    while moved:
        moved = False
        for rank in range(grid.size):
            if not at(rank):
                continue
            group = met_in(lists[rank][done[rank]], rank, grid)
            if all(done[other] == done[rank] and at(other) for other in group):
                for other in group:
                    done[other] += 1
                moved = True
    return done


def write(folder: Path, schedule: Schedule, grid: Grid, *steps: list[int] | None, first: int = 6) -> Path:
    """As the trainer writes logs; ``steps`` say how many actions of each rank are there, None all."""
    (folder / "actions").mkdir(parents=True, exist_ok=True)
    for rank in range(grid.size):
        lines = []
        for step, done in enumerate(steps, start=first):
            actions = schedule.actions[grid.coordinates(rank).pp]
            if done is None or done[rank]:
                lines.append({"step": step, "action": "LOAD", "start": 1, "end": 2, "wait": 0})
            for action in actions if done is None else actions[: done[rank]]:
                lines.append({"step": step, "action": str(action), "start": 5, "end": 6, "wait": 0})
            if done is None:
                lines.append({"step": step, "action": "NORM", "start": 7, "end": 8, "wait": 0})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "actions" / f"rank-{rank:05d}.jsonl").write_text(text)
    return folder


def hang_of(folder: Path, grid: Grid | None = None) -> Hang:
    return from_logs(log_files(folder), grid)


@pytest.mark.parametrize(("grid", "options"), CASES)
def test_the_rank_that_stands_still_is_found_wherever_it_does(
    tmp_path: Path, grid: Grid, options: dict[str, object]
) -> None:
    schedule = schedule_of(grid, options)
    for seed in range(12):
        chance = random.Random(seed)
        culprit = chance.randrange(grid.size)
        actions = schedule.actions[grid.coordinates(culprit).pp]
        stop = chance.randrange(1, len(actions))
        write(tmp_path, schedule, grid, None, play(schedule, grid, culprit, stop))
        assert is_cut_off(log_files(tmp_path))
        hang = hang_of(tmp_path, grid)
        # Whoever meets it inside of that action stands before the same, and the logs cannot tell them apart.
        mates = met_in(actions[stop], culprit, grid)
        assert {cause.rank for cause in hang.causes} == {*mates}
        assert any("do not tell which" in note for note in hang.notes) == (len(mates) > 1)
        for cause in hang.causes:
            assert cause.what == f"stands before {actions[stop]}, action {stop + 1} of {len(actions)}, of step 7"
            assert cause.place == grid.coordinates(cause.rank)


def test_what_is_waited_for_is_said(tmp_path: Path) -> None:
    grid = Grid(tp=2, pp=2, dp=2)
    schedule = schedule_of(grid, {"num_micro_batches": 4, "kind": "1f1b"})
    actions = schedule.actions[1]
    stop = next(i for i, action in enumerate(actions) if action == Action.parse("1F2"))
    write(tmp_path, schedule, grid, None, play(schedule, grid, 3, stop))
    hang = hang_of(tmp_path, grid)
    assert hang.doing[2].startswith("stands before 1F2")
    assert hang.doing[0].startswith("waits in receive of pp 2 > 0")
    assert hang.doing[5] == "waits in 0REDUCE of fsdp 1, 5"
    assert any(stuck.group == "pp 3 > 1" and stuck.missing == (3,) for stuck in hang.stuck)


@pytest.mark.parametrize(("grid", "options"), CASES[:3])
def test_without_a_layout_it_is_guessed(tmp_path: Path, grid: Grid, options: dict[str, object]) -> None:
    """TP and CP cannot be told apart, which does not matter here."""
    schedule = schedule_of(grid, options)
    for culprit in range(grid.size):
        stop = len(schedule.actions[grid.coordinates(culprit).pp]) // 2
        write(tmp_path, schedule, grid, None, play(schedule, grid, culprit, stop))
        hang = hang_of(tmp_path)
        assert culprit in {cause.rank for cause in hang.causes}
        assert any("layout was guessed" in note for note in hang.notes)


def test_a_rank_without_a_log_and_one_that_logged_nothing_of_the_step(tmp_path: Path) -> None:
    grid = Grid(tp=2, pp=2)
    schedule = schedule_of(grid, {"num_micro_batches": 3, "kind": "1f1b"})
    write(tmp_path, schedule, grid, None, play(schedule, grid, 3, 0))
    (cause,) = hang_of(tmp_path, grid).causes
    assert (cause.rank, cause.what) == (3, "has logged nothing of step 7")
    (tmp_path / "actions" / "rank-00003.jsonl").unlink()
    hang = hang_of(tmp_path, grid)
    assert [(cause.rank, cause.what) for cause in hang.causes] == [(3, NO_LOG)]
    assert any("no log of rank 3" in note for note in hang.notes)


def test_who_has_not_ended_the_step_keeps_the_others_from_the_next(tmp_path: Path) -> None:
    grid = Grid(dp=4)
    schedule = schedule_of(grid, {"num_micro_batches": 2, "kind": "afab"})
    length = len(schedule.actions[0])
    write(tmp_path, schedule, grid, None, [length, length, 0, length])
    hang = hang_of(tmp_path, grid)
    assert [(cause.rank, cause.num_waiting) for cause in hang.causes] == [(2, 3)]
    assert hang.stuck[0].wait.kind == "the end of the step"


def test_no_hang_is_an_answer(tmp_path: Path) -> None:
    grid, options = CASES[0]
    write(tmp_path, schedule_of(grid, options), grid, None, None)
    hang = hang_of(tmp_path, grid)
    assert (hang.causes, hang.stuck) == ((), ())
    assert hang.notes == ("rank 0-15: has ended step 7",)
    assert not is_cut_off(log_files(tmp_path))


def test_a_torn_line_is_left_out_and_named(tmp_path: Path) -> None:
    grid = Grid(tp=2)
    schedule = schedule_of(grid, {"num_micro_batches": 2, "kind": "afab"})
    write(tmp_path, schedule, grid, None, [3, 3])
    file = log_files(tmp_path)[1]
    file.write_bytes(file.read_bytes()[:-9])
    hang = hang_of(tmp_path, grid)
    assert [cause.rank for cause in hang.causes] == [1]
    assert "the last line of rank-00001.jsonl is torn, and was left out" in hang.notes


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    grid = Grid(tp=2, pp=2)
    schedule = schedule_of(grid, {"num_micro_batches": 3, "kind": "1f1b"})
    write(tmp_path, schedule, grid, *([None] * 200), play(schedule, grid, 2, 4), first=1)
    tail = read_tail(log_files(tmp_path)[2])
    assert 2 < len(tail.steps) < 150
    assert tail.last == 201
    assert all(len(actions) == len(schedule.actions[1]) for step, actions in tail.steps.items() if step < 201)
    assert [cause.rank for cause in hang_of(tmp_path, grid).causes] == [*met_in(schedule.actions[1][4], 2, grid)]


def test_damaged_logs_never_give_a_traceback(tmp_path: Path) -> None:
    grid, options = CASES[1]
    schedule = schedule_of(grid, options)
    for seed in range(20):
        write(tmp_path, schedule, grid, None, play(schedule, grid, 2, 9))
        chance = random.Random(seed)
        for file in log_files(tmp_path).values():
            data = bytearray(file.read_bytes())
            for _ in range(5):
                data[chance.randrange(len(data))] = chance.randrange(256)
            file.write_bytes(data[: chance.randrange(len(data))])
        try:
            hang_of(tmp_path, grid)
        except ValueError as error:
            assert str(error)  # noqa: PT017


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    grid, options = CASES[1]
    write(tmp_path, schedule_of(grid, options), grid, None)
    with pytest.raises(ValueError, match="a log of rank 5, but the layout tp=2,cp=1,pp=1,dp=1 has 2 ranks"):
        hang_of(tmp_path, Grid(tp=2))
    for file in log_files(tmp_path).values():
        file.write_text("")
    with pytest.raises(ValueError, match="hold no action; their files are empty"):
        hang_of(tmp_path, grid)


def test_sends_are_those_of_the_schedule() -> None:
    """The player above rests on it."""
    schedule = schedule_of(*CASES[0])
    assert sum(action.kind in SENDS for actions in schedule.actions for action in actions) == 2 * 3 * 4
