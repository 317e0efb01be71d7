"""From dumps to the rank to blame: real hangs of gloo, and made-up ones of NCCL whose truth is known."""

from __future__ import annotations

import pickle
import random
import shutil
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from fourfold.debugger.hangs import Hang
from fourfold.debugger.hangs.flights import NO_DUMP, from_dumps
from fourfold.layout import Grid

DUMPS = Path(__file__).parent / "dumps"
GRIDS = [None, Grid(tp=2, dp=2)]


def hang_of(folder: Path, grid: Grid | None = None) -> Hang:
    return from_dumps(folder.iterdir(), grid)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("case", "culprit", "what"),
    [
        (
            "skips",
            3,
            "has left out all_reduce [32] float32 of tp 2-3, and waits in all_reduce [1] float32 of world 0-3",
        ),
        ("skips_json", 3, "has left out all_reduce [32] float32 of tp 2-3"),
        ("dies", 0, NO_DUMP),
        ("other_call", 2, "calls all_gather [16] float32"),
        ("other_size", 2, NO_DUMP),  # gloo ended this process
        ("sleeps", 1, "its last call, ended, was all_reduce [32] float32 of tp 0-1"),
        ("no_message", 2, "its last call, ended, was all_reduce [16] float32 of dp 0, 2"),
    ],
)
def test_real_hangs_of_gloo(case: str, culprit: int, what: str, grid: Grid | None) -> None:
    first, *others = hang_of(DUMPS / case, grid).causes
    assert first.rank == culprit
    assert first.what.startswith(what)
    assert first.place == (grid.coordinates(culprit) if grid else None)
    assert [cause.rank for cause in others] == ([3] if case == "other_call" else [])
    if what != NO_DUMP and case != "skips_json":
        assert first.stack[0] == "at its last call"
        assert any("two_steps" in frame for frame in first.stack[1])


def test_no_hang_is_an_answer() -> None:
    hang = hang_of(DUMPS / "ends_well")
    assert (hang.causes, hang.stuck) == ((), ())


def test_messages_that_gloo_does_not_record_are_counted() -> None:
    notes = " ".join(hang_of(DUMPS / "no_message").notes)
    assert "before collective 1 of world 0-3" in notes
    assert "rank 0 1, rank 1 2, rank 3 2" in notes


@pytest.mark.parametrize("lost", range(4))
def test_a_dump_that_is_lost_or_damaged_is_named(tmp_path: Path, lost: int) -> None:
    for case in ("lost", "damaged"):
        folder = tmp_path / case
        shutil.copytree(DUMPS / "sleeps", folder)
        file = folder / f"nccl_trace_rank_{lost}"
        file.write_bytes(file.read_bytes()[:-300])
        if case == "lost":
            file.unlink()
        hang = hang_of(folder)
        # Where it is the culprit's, or that of one between, the search ends there.
        assert hang.causes[0].rank in (1, lost)
        assert any(f"no readable dump of rank {lost}" in note for note in hang.notes)
        assert any(f"nccl_trace_rank_{lost} is damaged" in note for note in hang.notes) == (case == "damaged")


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DUMPS / "skips", tmp_path, dirs_exist_ok=True)
    with pytest.raises(ValueError, match="dump of rank 3, but the layout tp=2,cp=1,pp=1,dp=1 has 2 ranks"):
        hang_of(tmp_path, Grid(tp=2))
    shutil.copy(DUMPS / "skips_json" / "rank0.json", tmp_path)
    with pytest.raises(ValueError, match=r"nccl_trace_rank_0 and .*rank0.json are both of rank 0"):
        hang_of(tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(b"\x80\x02")
    (tmp_path / "rank0.json").unlink()
    with pytest.raises(ValueError, match=r"no dump can be read; .*nccl_trace_rank_0 is damaged"):
        hang_of(tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(pickle.dumps({"version": "2.10", "entries": []}, protocol=2))
    with pytest.raises(ValueError, match="the dumps hold no calls"):
        hang_of(tmp_path)
    with pytest.raises(ValueError, match="no rank in its name"):
        from_dumps([tmp_path / "notes"], None)


# Jobs of NCCL: programs of ranks, played until nothing moves, and the dumps that would be left.

Op = tuple[str, tuple[int, ...], str]  # description of the group, its ranks, and what: a collective, or send, or recv


def program(grid: Grid, rank: int, layers: int = 2) -> list[Op]:
    """A step: collectives of TP inside of stages, messages between stages, gradients over FSDP, and a norm."""
    at, pipeline = grid.coordinates(rank), grid.group_of(rank, "pp")
    tp = ("mesh_tp", grid.group_of(rank, "tp"), "all_reduce")
    ops: list[Op] = []
    for way in (1, -1):
        before, after = at.pp - way, at.pp + way
        for _ in range(3):
            if 0 <= before < grid.pp:
                ops.append(("pp", pipeline, f"recv {at.pp}<-{before}"))
            ops += [tp] * layers
            if 0 <= after < grid.pp:
                ops.append(("pp", pipeline, f"send {at.pp}->{after}"))
    ops.append(("mesh_fsdp", grid.group_of(rank, "dp", "cp"), "_reduce_scatter_base"))
    return [*ops, ("default_pg", tuple(range(grid.size)), "all_reduce")]


def play(programs: list[list[Op]], stops: dict[int, int]) -> list[int]:
    """How many ops of its program each rank has done when nothing moves any more; some stop before one."""
    done = [0] * len(programs)

    def entered(rank: int) -> list[tuple[Op, int]]:
        """What a rank has come to: all that is done, and what it stands in."""
        upto = done[rank] + (stops.get(rank) != done[rank])
        counted: dict[Any, int] = defaultdict(int)
        found = []
        for op in programs[rank][:upto]:
            key = op if " " in op[2] else op[:2]
            found.append((op, counted[key]))
            counted[key] += 1
        return found

    moved = True
    while moved:
        moved = False
        for rank, of in enumerate(programs):
            if done[rank] == len(of) or stops.get(rank) == done[rank]:
                continue
            (description, ranks, what), number = entered(rank)[-1]
            if " " in what:
                a, b = (int(end) for end in what[5:].replace("<-", "->").split("->"))
                other = ranks[b]
                back = f"recv {b}<-{a}" if what.startswith("send") else f"send {b}->{a}"
                ready = ((description, ranks, back), number) in entered(other)
            else:
                ready = all(any(op[:2] == (description, ranks) and n == number for op, n in entered(r)) for r in ranks)
            if ready:
                done[rank] += 1
                moved = True
    return done


def write_dumps(
    folder: Path,
    programs: list[list[Op]],
    done: list[int],
    stops: dict[int, int],
    *,
    ahead: int,
    timing: bool,
    config: bool,
    kept: int = 2000,
    batched: bool = False,
) -> None:
    """What NCCL's recorder leaves: the host runs up to ``ahead`` calls before the device."""
    for rank, of in enumerate(programs):
        entries: list[dict[str, Any]] = []
        collectives: dict[Any, int] = defaultdict(int)
        messages = 0
        for i, (description, ranks, what) in enumerate(of[: min(done[rank] + 1 + ahead, stops.get(rank, len(of)))]):
            message = " " in what
            messages += message
            collectives[description, ranks] += not message
            state = "completed" if i < done[rank] else "started" if timing and i == done[rank] else "scheduled"
            entries.append({
                "record_id": i, "pg_id": 0, "process_group": (str(hash((description, ranks)) % 997), description),
                "collective_seq_id": collectives[description, ranks], "p2p_seq_id": messages * message,
                "op_id": i + 1, "profiling_name": f"nccl:{what}", "time_created_ns": 10**18 + i, "input_sizes": [[8]],
                "input_dtypes": ["Float"], "output_sizes": [[8]], "output_dtypes": ["Float"], "state": state,
                "retired": state == "completed", "is_p2p": message,
                "frames": [{"name": f"op_{i}", "filename": "model.py", "line": i}],
            })  # fmt: skip
        groups = {e["process_group"]: r for e, (_, r, _) in zip(entries, of, strict=False)}
        if batched:  # the state of a message is then that of a batch, which is recorded after it
            whole = [
                [{**e, "state": "scheduled"}, {**e, "profiling_name": "nccl:coalesced"}] if e["is_p2p"] else [e]
                for e in entries
            ]
            entries = [{**e, "record_id": i} for i, e in enumerate(chain.from_iterable(whole))]
        content = {
            "version": "2.10",
            "pg_config": {n: {"name": n, "desc": d, "ranks": str(list(r))} for (n, d), r in groups.items() if config},
            "entries": entries[-kept:],
        }
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.parametrize("timing", [True, False])
@pytest.mark.parametrize(("config", "batched"), [(True, False), (False, False), (True, True)])
def test_the_rank_that_stops_is_found_wherever_it_stops(
    tmp_path: Path, timing: bool, config: bool, batched: bool
) -> None:
    grid = Grid(tp=2, cp=2, pp=2, dp=2)
    programs = [program(grid, rank) for rank in range(grid.size)]
    for seed in range(15):
        chance = random.Random(seed)
        culprit = chance.randrange(grid.size)
        stops = {culprit: chance.randrange(1, len(programs[culprit]))}
        done = play(programs, stops)
        write_dumps(
            tmp_path, programs, done, stops, ahead=chance.randrange(6), timing=timing, config=config, batched=batched
        )
        hang = hang_of(tmp_path, None if config else grid)
        assert [cause.rank for cause in hang.causes] == [culprit]
        last = stops[culprit] - 1
        assert hang.causes[0].stack == ("at its last call", (f"model.py:{last} op_{last}",))
        assert hang.causes[0].num_waiting == grid.size - 1


@pytest.mark.parametrize("kept", [2000, 4])
def test_a_rank_without_a_dump_is_found_by_those_that_wait_for_it(tmp_path: Path, kept: int) -> None:
    grid = Grid(tp=2, pp=3, dp=2)
    programs = [program(grid, rank) for rank in range(grid.size)]
    for seed in range(12):
        chance = random.Random(seed)
        culprit = chance.randrange(grid.size)
        stops = {culprit: chance.randrange(1, len(programs[culprit]))}
        done = play(programs, stops)
        write_dumps(tmp_path, programs, done, stops, ahead=2, timing=True, config=True, kept=kept)
        (tmp_path / f"nccl_trace_rank_{culprit}").unlink()
        (cause,) = hang_of(tmp_path, grid).causes
        assert (cause.rank, cause.what, cause.stack) == (culprit, NO_DUMP, ("", ()))


def changed(case: str) -> Callable[[list[Op]], list[Op]]:
    """A program in which a call is left out, one too many, or another one."""

    def change(ops: list[Op]) -> list[Op]:
        at = next(i for i, op in enumerate(ops) if op[0] == "mesh_fsdp") - 1  # the last of TP before it
        at = max(i for i in range(at + 1) if ops[i][0] == "mesh_tp")
        if case == "left out":
            return ops[:at] + ops[at + 1 :]
        if case == "too many":
            return ops[: at + 1] + ops[at:]
        return [*ops[:at], (*ops[at][:2], "broadcast"), *ops[at + 1 :]]

    return change


@pytest.mark.parametrize("case", ["left out", "too many", "another"])
def test_a_rank_whose_program_differs_is_found(tmp_path: Path, case: str) -> None:
    grid = Grid(tp=2, pp=2, dp=3)
    for culprit in range(grid.size):
        programs = [program(grid, rank) for rank in range(grid.size)]
        programs[culprit] = changed(case)(programs[culprit])
        done = play(programs, {})
        if case == "another":  # what does not agree does not end, whatever the player thinks
            mate = culprit ^ 1
            at = next(i for i, op in enumerate(programs[culprit]) if op[2] == "broadcast")
            done = play(programs, {culprit: at, mate: at})
        write_dumps(tmp_path, programs, done, {}, ahead=0, timing=True, config=True)
        hang = hang_of(tmp_path, grid)
        assert hang.causes[0].rank == culprit
        said = {"left out": "has left out all_reduce", "too many": "which its peers do not call here"}
        assert said.get(case, "calls broadcast") in hang.causes[0].what


def test_all_stand_in_the_same_call_and_nothing_moves(tmp_path: Path) -> None:
    programs = [program(Grid(tp=4), rank) for rank in range(4)]
    write_dumps(tmp_path, programs, [3] * 4, {}, ahead=2, timing=False, config=True)
    hang = hang_of(tmp_path)
    assert hang.causes == ()
    assert hang.stuck[0].missing == ()


def test_groups_of_one_description_are_completed_to_the_pattern_of_the_others(tmp_path: Path) -> None:
    """Without a configuration and a layout, a group of which only one rank has come is known by its like."""
    grid = Grid(tp=4, dp=3)
    programs = [[("mesh_tp", grid.group_of(rank, "tp"), "all_reduce")] * 3 for rank in range(grid.size)]
    stops = dict.fromkeys((4, 6, 7), 0)
    write_dumps(tmp_path, programs, play(programs, stops), stops, ahead=0, timing=True, config=False)
    hang = hang_of(tmp_path)
    assert sorted(cause.rank for cause in hang.causes) == [4, 6, 7]
    assert [(s.group, s.missing) for s in hang.stuck] == [("tp 4-7", (4, 6, 7))]
