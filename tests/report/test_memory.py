"""The table of memory per pipeline rank."""

from __future__ import annotations

from dataclasses import replace

from rich.table import Table

from fourfold.planner.walk import RankMemory
from fourfold.report.memory import memory_table, memory_text

GIB = float(1 << 30)
MIDDLE = RankMemory(
    pp_rank=1,
    stages=(1, 5),
    num_layers=8,
    embedding=False,
    head=False,
    in_flight=7,
    at="5B0",
    seconds=3.0,
    weights=6 * GIB,
    gradients=12 * GIB,
    optimizer=0.25 * GIB,
    activations=30 * GIB,
    gathered_kv=0.0,
    logits=0.0,
    transients=1 * GIB,
    buffers=0.5 * GIB,
    total=49.75 * GIB,
    reserved=51.24 * GIB,
    context=GIB,
)
RANKS = (
    replace(MIDDLE, pp_rank=0, embedding=True, num_layers=7, weights=8 * GIB, total=51.75 * GIB, at="4B0"),
    MIDDLE,
    replace(MIDDLE, pp_rank=2, stages=(2, 6), at="6B0"),
    replace(MIDDLE, pp_rank=3, head=True, num_layers=7, logits=2 * GIB, total=51 * GIB, at="7F1"),
)


def test_table_in_plain_text() -> None:
    lines = [" ".join(line.split()) for line in memory_text(RANKS).splitlines()]
    kinds = "weights gradients optimizer activations logits transient buffers"
    assert lines == [  # ranks 1 and 2 agree
        f"pp rank holds {kinds} allocated reserved in flight at",
        "> 0 embedding + 7 layers 8.00 12.00 0.25 30.00 0.00 1.00 0.50 51.75 51.24 7 4B0",
        "1-2 8 layers 6.00 12.00 0.25 30.00 0.00 1.00 0.50 49.75 51.24 7",
        "3 7 layers + head 6.00 12.00 0.25 30.00 2.00 1.00 0.50 51.00 51.24 7 7F1",
    ]
    assert all(line == line.rstrip() and line.isascii() for line in memory_text(RANKS).splitlines())


def test_only_the_fullest_rank_is_marked() -> None:
    marks = [line.startswith(">") for line in memory_text(RANKS).splitlines()]
    assert marks == [False, True, False, False]
    last = (*RANKS[:3], replace(RANKS[3], total=60 * GIB))
    assert memory_text(last).splitlines()[3].startswith(">")


def test_equal_neighbours_of_the_fullest_are_a_line_of_their_own() -> None:
    lines = memory_text(RANKS[1:3]).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [[">", "1"], ["2", "8"]]


def test_kinds_that_nobody_has_are_left_out() -> None:
    header = memory_text(RANKS[1:3]).splitlines()[0]
    assert "logits" not in header
    assert "KV" not in header
    assert "gathered KV" in memory_text((replace(MIDDLE, gathered_kv=GIB),)).splitlines()[0]


def test_ranks_that_need_too_much_are_red() -> None:
    def styles(table: Table) -> list[object]:
        return [row.style for row in table.rows]

    assert styles(memory_table(RANKS, usable=60 * GIB)) == ["bold", "", ""]
    assert styles(memory_table(RANKS, usable=51 * GIB)) == ["red", "red", "red"]
