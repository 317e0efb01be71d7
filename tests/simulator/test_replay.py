"""Replays against a rank-by-rank oracle of the executor, a log of a real step, and damaged logs."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fourfold.layout import Action, Doing, Grid, Kind, Schedule, generate
from fourfold.layout.actions import COMPUTE, SENDS
from fourfold.simulator.played import Played
from fourfold.simulator.replay import (
    UNKNOWN,
    Extra,
    Logs,
    graph_of,
    message_seconds,
    read_action_logs,
    with_normal_rank,
)
from fourfold.simulator.replay import replay as replay_graph

LATENCY = 350_000  # ns
COLLECTIVE = 2_000_000
GAP = 7_000

Entry = tuple[Action, int, int, int]
Took = Callable[[int, Action], int]


def execute(
    schedule: Schedule, grid: Grid, took: Took, begins: Callable[[int], int] = lambda rank: 0
) -> list[list[Entry]]:
    """What the executor does, rank by rank: the next entry of each list as soon as it can be done. Nanoseconds."""
    places = [grid.coordinates(rank) for rank in range(grid.size)]
    lists = [schedule.actions[at.pp] for at in places]
    logs: list[list[Entry]] = [[] for _ in places]
    posted: dict[object, int] = {}
    arrived: dict[object, dict[int, int]] = defaultdict(dict)
    while any(len(log) < len(actions) for log, actions in zip(logs, lists, strict=True)):
        before = sum(map(len, logs))
        for rank, (at, actions, log) in enumerate(zip(places, lists, logs, strict=True)):
            while len(log) < len(actions):
                action = actions[len(log)]
                start = log[-1][2] + GAP if log else begins(rank)
                end, wait, replica = start + took(rank, action), 0, (at.dp, at.cp, at.tp)
                if action.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT):
                    step = -1 if action.kind is Kind.FORWARD else 1
                    stage = action.stage + step
                    crosses = 0 <= stage < schedule.num_stages and schedule.rank_of(stage) != at.pp
                    if crosses:
                        key = (replica, action.result[0], stage, action.micro_batch)
                        if key not in posted:
                            break
                        wait = max(posted[key] + LATENCY - start, 0)
                        end += wait
                elif action.kind in SENDS:
                    posted[replica, action.message[0], action.stage, action.micro_batch] = start
                elif action.kind in (Kind.GATHER, Kind.REDUCE):
                    number = sum(entry[0] == action for entry in log)
                    here = arrived[at.pp, at.tp, action, number]
                    here[rank] = start
                    if len(here) < grid.dp * grid.cp:
                        break
                    end = max(here.values()) + COLLECTIVE
                log.append((action, start, end, wait))
        assert sum(map(len, logs)) > before, "deadlock"
    return logs


def write(folder: Path, *steps: list[list[Entry]], first: int = 1) -> Path:
    """As the trainer writes its action logs."""
    (folder / "actions").mkdir(parents=True, exist_ok=True)
    for step, logs in enumerate(steps, start=first):
        for rank, log in enumerate(logs):
            with (folder / "actions" / f"rank-{rank:05d}.jsonl").open("a") as file:
                for action, start, end, wait in log:
                    line = {"step": step, "action": str(action), "start": start, "end": end, "wait": wait}
                    file.write(json.dumps(line) + "\n")
    return folder


def by_chance(seed: int, *, slow: dict[int, float] | None = None) -> Took:
    """Milliseconds for computations and microseconds for the rest, different everywhere."""

    def took(rank: int, action: Action) -> int:
        chance = random.Random(f"{seed} {rank} {action}")
        milliseconds = chance.uniform(2, 9) if action.kind in COMPUTE else chance.uniform(0.01, 0.3)
        return round(1e6 * milliseconds * (slow or {}).get(rank, 1.0))

    return took


def seconds(logs: list[list[Entry]]) -> float:
    return (max(log[-1][2] for log in logs) - min(log[0][1] for log in logs)) / 1e9


def replay(logs: Logs, schedule: Schedule, grid: Grid, *, staggered: bool = False) -> Played:
    return replay_graph(logs, graph_of(logs, schedule, grid), grid, staggered=staggered)


CASES = [
    (Grid(tp=2, cp=2, pp=2, dp=2), {"v": 2, "num_micro_batches": 5, "nc": 3}),
    (Grid(pp=3), {"v": 2, "num_micro_batches": 7, "nc": 3}),
    (Grid(pp=4, dp=2), {"num_micro_batches": 6, "kind": "1f1b", "zero": 2}),
    (Grid(pp=2, dp=3), {"v": 2, "num_micro_batches": 4, "kind": "afab", "zero": 3}),
    (Grid(pp=3, tp=2), {"num_micro_batches": 5, "kind": "zb-h1"}),
    (Grid(pp=2, dp=2), {"v": 2, "num_micro_batches": 3, "num_frozen_stages": 1}),
    (Grid(dp=2, cp=2), {"num_micro_batches": 2, "kind": "afab"}),
    (Grid(), {"num_micro_batches": 3, "kind": "afab"}),
]


@pytest.mark.parametrize(("grid", "layout"), CASES)
def test_durations_alone_give_the_step(tmp_path: Path, grid: Grid, layout: dict) -> None:
    schedule = generate(pp=grid.pp, **layout)
    real = execute(schedule, grid, by_chance(1))
    logs = read_action_logs(write(tmp_path, real))
    assert logs.step_seconds == seconds(real)
    played = replay(logs, schedule, grid)
    if any(entry[3] for log in real for entry in log):
        assert message_seconds(logs, grid) == pytest.approx(LATENCY / 1e9, rel=1e-9)
    assert played.step_seconds == pytest.approx(seconds(real), rel=1e-9)
    for rank, log in enumerate(real):
        at = grid.coordinates(rank)
        for action, start, end, wait in log:
            if action.kind in COMPUTE:
                i = played.graph.where[action]
                assert played.start[i][at.dp, at.cp, at.tp] == pytest.approx((start + wait) / 1e9, abs=1e-9)
                assert played.end[i][at.dp, at.cp, at.tp] == pytest.approx(end / 1e9, abs=1e-9)
        waited = played.spent["pp_wait"][at.dp, at.pp, at.cp, at.tp]
        assert waited == pytest.approx(sum(entry[3] for entry in log) / 1e9, abs=1e-9)
        assert logs.waits()[rank] == pytest.approx(waited, abs=1e-9)
    total = sum(played.spent.values())
    assert np.allclose(total, played.step_seconds)


def test_ranks_that_begin_late(tmp_path: Path) -> None:
    grid, schedule = Grid(pp=2, dp=2), generate(pp=2, v=2, num_micro_batches=4)
    real = execute(schedule, grid, by_chance(2), begins=lambda rank: 10**9 + 3_000_000 * rank)
    logs = read_action_logs(write(tmp_path, real))
    assert replay(logs, schedule, grid, staggered=True).step_seconds == pytest.approx(seconds(real), rel=1e-9)
    together = execute(schedule, grid, by_chance(2))
    assert replay(logs, schedule, grid).step_seconds == pytest.approx(seconds(together), rel=1e-9)


def real_step(folder: Path) -> Logs:
    """Of a run of recipes/demo.toml on four processes."""
    rows = json.loads((Path(__file__).parent / "action_log.json").read_text())["ranks"]
    entries = [[(Action.parse(a), start, start + took, wait) for a, start, took, wait in log] for log in rows]
    return read_action_logs(write(folder, entries, first=3))


def test_a_real_step(tmp_path: Path) -> None:
    logs = real_step(tmp_path)
    grid, schedule = Grid(tp=2, pp=2), generate(pp=2, v=2, num_micro_batches=5, nc=3)
    assert logs.step == 3
    played = replay(logs, schedule, grid)
    assert played.step_seconds == pytest.approx(logs.step_seconds, rel=0.05)
    assert played.spent["pp_wait"].mean() == pytest.approx(logs.waits().mean(), rel=0.25)
    assert replay(logs, schedule, grid, staggered=True).step_seconds == pytest.approx(logs.step_seconds, rel=0.01)
    assert 1e-5 < message_seconds(logs, grid) < 2e-3


class TestNormal:
    def test_a_slow_rank(self, tmp_path: Path) -> None:
        grid, schedule = Grid(pp=2, dp=4), generate(pp=2, v=2, num_micro_batches=4)

        def took(rank: int, action: Action) -> int:
            alike = by_chance(3)(grid.coordinates(rank).pp, action)
            return 2 * alike if rank == 5 else alike

        slow = read_action_logs(write(tmp_path / "slow", execute(schedule, grid, took)))
        healthy = execute(schedule, grid, lambda rank, action: by_chance(3)(grid.coordinates(rank).pp, action))
        normal = replay(with_normal_rank(slow, 5, grid), schedule, grid)
        assert normal.step_seconds == pytest.approx(seconds(healthy), rel=1e-9)
        assert replay(slow, schedule, grid).step_seconds > 1.3 * normal.step_seconds
        other = replay(with_normal_rank(slow, 2, grid), schedule, grid)
        assert other.step_seconds == pytest.approx(slow.step_seconds, rel=1e-9)

    def test_those_that_waited_for_it_inside_of_their_computations(self, tmp_path: Path) -> None:
        """All four of a TP x CP block are equally long in the logs."""
        grid, schedule = Grid(tp=2, cp=2, dp=2), generate(pp=1, num_micro_batches=2, kind="afab")
        real = execute(schedule, grid, lambda rank, action: 3_000_000 if rank < 4 else 1_000_000)
        logs = read_action_logs(write(tmp_path, real))
        healthy = execute(schedule, grid, lambda rank, action: 1_000_000)
        normal = replay(with_normal_rank(logs, 2, grid), schedule, grid)
        assert normal.step_seconds == pytest.approx(seconds(healthy), rel=1e-9)
        assert normal.step_seconds < replay(logs, schedule, grid).step_seconds - 8e-3

    def test_without_replicas(self, tmp_path: Path) -> None:
        grid, schedule = Grid(cp=3), generate(pp=1, num_micro_batches=2, kind="afab")
        real = execute(schedule, grid, by_chance(1, slow={1: 3.0}))
        logs = read_action_logs(write(tmp_path, real))
        assert with_normal_rank(logs, 1, grid).ranks[1].own[1] == pytest.approx(
            (logs.ranks[0].own[1] + logs.ranks[2].own[1]) / 2, abs=1
        )

    def test_without_peers(self, tmp_path: Path) -> None:
        grid, schedule = Grid(pp=2), generate(pp=2, num_micro_batches=2, kind="1f1b")
        logs = read_action_logs(write(tmp_path, execute(schedule, grid, by_chance(1))))
        with pytest.raises(ValueError, match="rank 1 has no peers"):
            with_normal_rank(logs, 1, grid)
        with pytest.raises(ValueError, match="rank 2: there are ranks 0 to 1"):
            with_normal_rank(logs, 2, grid)


class TestRead:
    GRID = Grid(pp=2, dp=2)
    SCHEDULE = generate(pp=2, num_micro_batches=2, kind="1f1b")

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        return write(tmp_path, *(execute(self.SCHEDULE, self.GRID, by_chance(seed)) for seed in (1, 2, 3)))

    def log(self, run: Path, rank: int) -> Path:
        return run / "actions" / f"rank-{rank:05d}.jsonl"

    def test_the_last_step_or_any(self, run: Path) -> None:
        assert read_action_logs(run).step == 3
        assert read_action_logs(run / "actions", 2).step == 2
        assert read_action_logs(run).steps == (1, 2, 3)
        assert read_action_logs(run, 1).notes == ()

    def test_a_torn_line(self, run: Path) -> None:
        path = self.log(run, 2)
        path.write_bytes(path.read_bytes()[:-20])
        logs = read_action_logs(run)
        assert (logs.step, logs.steps) == (2, (1, 2))
        assert logs.notes == ("the last line of rank-00002.jsonl is torn: its step 3 counts as not whole",)
        with pytest.raises(
            ValueError, match=r"step 3 is not whole on rank 2 \(the last line .* is torn.*\); whole steps: 1, 2"
        ):
            read_action_logs(run, 3)

    def test_a_line_that_is_none(self, run: Path) -> None:
        path = self.log(run, 1)
        lines = path.read_text().splitlines()
        lines[4] = lines[4].replace('"end": ', '"end": "')
        path.write_text("\n".join(lines) + "\n")
        with pytest.raises(ValueError, match=r"rank-00001\.jsonl, line 5: no entry of an action log"):
            read_action_logs(run)

    def test_an_action_that_is_none(self, run: Path) -> None:
        path = self.log(run, 1)
        path.write_text(path.read_text().replace("1F0", "1Q0"))
        with pytest.raises(ValueError, match=r"rank-00001\.jsonl: action '1Q0'"):
            read_action_logs(run)

    def test_times_that_run_backwards(self, run: Path) -> None:
        path = self.log(run, 0)
        lines = path.read_text().splitlines(keepends=True)
        lines[2], lines[3] = lines[3], lines[2]
        path.write_text("".join(lines))
        with pytest.raises(ValueError, match="its times are not in order"):
            read_action_logs(run, 1)

    def test_a_rank_whose_file_is_missing(self, run: Path) -> None:
        self.log(run, 1).unlink()
        with pytest.raises(ValueError, match="of 4 ranks, the log of rank 1 is missing"):
            read_action_logs(run)
        self.log(run, 3).unlink()
        with pytest.raises(ValueError, match="of 4 ranks, the log of rank 1, 3 is missing"):
            read_action_logs(run, num_ranks=4)

    def test_a_step_that_not_all_ranks_have(self, run: Path) -> None:
        path = self.log(run, 3)
        path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if '"step": 3' not in line))
        assert read_action_logs(run).step == 2
        with pytest.raises(ValueError, match="step 3 is not whole on rank 3; whole steps: 1, 2"):
            read_action_logs(run, 3)
        with pytest.raises(ValueError, match="step 9 is not in the action logs; whole steps: 1, 2"):
            read_action_logs(run, 9)

    def test_a_run_that_went_on_with_another_layout(self, tmp_path: Path) -> None:
        before = execute(self.SCHEDULE, self.GRID, by_chance(1))
        after = execute(self.SCHEDULE, Grid(pp=2), by_chance(2))
        run = write(tmp_path, before, after)
        assert read_action_logs(run).step == 1
        assert len(read_action_logs(run, num_ranks=2).ranks) == 2
        assert read_action_logs(run, num_ranks=2).steps == (2,)
        with pytest.raises(ValueError, match="step 1 was also logged by rank 2, 3, but the layout has 2 ranks"):
            read_action_logs(run, 1, num_ranks=2)

    def test_no_logs(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"no action logs; a run writes them with output\.action_log_every"):
            read_action_logs(tmp_path)

    def test_another_layout_or_schedule(self, run: Path) -> None:
        logs = read_action_logs(run)
        with pytest.raises(ValueError, match="logged by 4 ranks, but tp 1 x cp 1 x pp 2 x dp 4 are 8"):
            replay(logs, self.SCHEDULE, Grid(pp=2, dp=4))
        more = generate(pp=2, num_micro_batches=3, kind="1f1b")
        with pytest.raises(ValueError, match="rank 0, step 3: the log is of another schedule or layout: its action"):
            replay(logs, more, self.GRID)
        short = self.log(run, 2)
        short.write_text("".join(short.read_text().splitlines(keepends=True)[:-1]))
        with pytest.raises(ValueError, match=r"rank 2, step 3: .* it has .* actions, the schedule"):
            replay(read_action_logs(run), self.SCHEDULE, self.GRID)


class TestRicherLogs:
    """Logs of today say more than those of before, and are replayed as these."""

    SCHEDULE, GRID = generate(pp=2, num_micro_batches=2, kind="1f1b"), Grid(pp=2, tp=2)

    def test_what_they_say(self, tmp_path: Path) -> None:
        real = execute(self.SCHEDULE, self.GRID, by_chance(3))
        before = read_action_logs(write(tmp_path / "before", real))
        path = write(tmp_path / "now", real) / "actions" / "rank-00002.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        at = next(i for i, line in enumerate(lines) if line["action"] == "1F0")
        lines[at] |= {"tp": 300, "cp": 20, "fsdp": 1, "cpu": 7}
        begun, ended = lines[0]["start"], lines[-1]["end"]
        load = {"step": 1, "action": "LOAD", "start": begun - 90, "end": begun - 40, "wait": 0, "cpu": 5}
        meet = {"step": 1, "action": "MEET", "start": ended + 10, "end": ended + 60, "wait": 30}
        path.write_text("".join(f"{json.dumps(line)}\n" for line in (load, *lines, meet)))
        now = read_action_logs(tmp_path / "now")
        log = now.ranks[2]
        assert log.extra == (
            Extra(Doing.LOAD, begun - 90, begun - 40, 0, 5), Extra(Doing.MEET, ended + 10, ended + 60, 30, UNKNOWN),
        )  # fmt: skip
        assert (log.tied[at], log.fsdp[at], log.cpu[at]) == (320, 1, 7)
        assert log.tied.sum() == 320
        assert [*log.cpu].count(UNKNOWN) == len(lines) - 1
        assert all(not old.tied.any() and old.extra == () and (old.cpu == UNKNOWN).all() for old in before.ranks)
        assert replay(now, self.SCHEDULE, self.GRID).step_seconds == pytest.approx(
            replay(before, self.SCHEDULE, self.GRID).step_seconds, rel=1e-9
        )

    def test_what_cannot_be(self, tmp_path: Path) -> None:
        run = write(tmp_path, execute(self.SCHEDULE, self.GRID, by_chance(3)))
        path = run / "actions" / "rank-00001.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([lines[0].replace("}", ', "tp": 999999999999}'), *lines[1:]]) + "\n")
        with pytest.raises(ValueError, match=r"rank-00001\.jsonl, step 1, .*: its times are not in order"):
            read_action_logs(run)
        path.write_text('{"step": 1, "action": "LOAD", "start": 1, "end": 2, "wait": 0}\n')
        with pytest.raises(ValueError, match=r"rank-00001\.jsonl: a step without an action of the schedule"):
            read_action_logs(run)
