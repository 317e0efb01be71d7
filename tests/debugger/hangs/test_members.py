"""The ranks of process groups, from what a dump says, the layout, presence, and what gathers tell."""

from __future__ import annotations

from pathlib import Path

from fourfold.debugger.hangs.members import Name, communicators, too_small
from fourfold.debugger.hangs.recordings import Call, Dump
from fourfold.layout import Grid


def call(name: Name, factor: float = 0.0) -> Call:
    return Call(name, "gloo", "all_gather", 1, 0, 0, None, "", factor, 0, True, True, "", ())


def dumps(
    used: dict[int, list[Name]], groups: dict[int, dict[Name, tuple[int, ...]]] | None = None, factor: float = 0.0
) -> dict[int, Dump]:
    return {
        rank: Dump(Path("x"), rank, tuple(call(name, factor) for name in names), (groups or {}).get(rank, {}), False)
        for rank, names in used.items()
    }


def ranks_of(found: dict[int, Dump], size: int, grid: Grid | None = None) -> dict[tuple[int, Name], tuple[int, ...]]:
    return {key: group.ranks for key, group in communicators(found, size, grid).items()}


WORLD, TP0, TP1, ODD = ("0", "default_pg"), ("3", "mesh_tp"), ("4", "mesh_tp"), ("9", "undefined")


def test_the_world_is_everybody() -> None:
    assert ranks_of(dumps({1: [WORLD]}), 4) == {(1, WORLD): (0, 1, 2, 3)}


def test_what_a_dump_says_counts_most_then_what_another_says_then_the_layout() -> None:
    said = {0: {ODD: (0, 5)}}
    found = dumps({0: [ODD], 5: [ODD], 2: [("7", "mesh_fsdp")], 3: [("8", "mesh_dp_cp")], 1: [TP0]}, said)
    assert ranks_of(found, 8, Grid(tp=2, cp=2, dp=2)) == {
        (0, ODD): (0, 5),
        (5, ODD): (0, 5),
        (2, ("7", "mesh_fsdp")): (0, 2, 4, 6),
        (3, ("8", "mesh_dp_cp")): (1, 3, 5, 7),
        (1, TP0): (0, 1),
    }


def test_presence_and_the_pattern_of_the_like() -> None:
    assert ranks_of(dumps({0: [TP0], 1: [TP0], 3: [TP1]}), 4)[3, TP1] == (2, 3)
    assert ranks_of(dumps({0: [TP0], 1: [TP0], 2: [TP1]}), 3)[2, TP1] == (2, 3)  # the last has left no dump
    assert ranks_of(dumps({0: [TP0], 2: [TP0], 1: [TP1]}), 4)[1, TP1] == (1, 3)
    # Two places are possible: then nobody is added.
    assert ranks_of(dumps({0: [TP0], 1: [TP0], 4: [TP1]}), 8)[4, TP1] == (4,)


def test_groups_that_gather_more_than_they_have_ranks_are_named() -> None:
    found = dumps({0: [TP0], 1: [TP1]}, factor=4.0)
    (a, b) = too_small(found, communicators(found, 8, None))
    assert a.startswith("tp 0 has 4 ranks by what it gathers")
    assert b.startswith("tp 1 has 4 ranks")
    whole = dumps({0: [ODD], 1: [ODD]}, factor=4.0)
    assert ranks_of(whole, 4)[0, ODD] == (0, 1, 2, 3)  # as many as there are


def test_titles_tell_groups_apart() -> None:
    long = ("0f3c9a77e1b2c3d4e5f6", "undefined")
    other = ("5", "mesh_tp")
    said = {0: {TP0: (0, 1, 3), other: (0, 2, 3), long: (0, 1)}}
    found = communicators(dumps({0: [TP0, other, long, ODD]}, said), 4, None)
    assert {group.title for group in found.values()} == {"tp 3", "tp 5", "group 0f3c9a77", "group 9"}
    assert found[0, TP0].ends == (0, 3)
