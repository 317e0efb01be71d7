"""The table of memory per pipeline rank."""

from __future__ import annotations

from dataclasses import replace

from fourfold.planner.machines.chips import GIB
from fourfold.planner.memory.walk import RankMemory
from fourfold.report.memory import memory_table
from fourfold.report.plan import as_plain

MIDDLE = RankMemory(
    pp_rank=1,
    stages=(1, 5),
    num_layers=8,
    embedding=False,
    head=False,
    in_flight=7,
    at="5B0",
    seconds=3.0,
    weights=6.0 * GIB,
    gradients=12.0 * GIB,
    optimizer=0.25 * GIB,
    activations=30.0 * GIB,
    gathered_kv=0.0,
    logits=0.0,
    transients=1.0 * GIB,
    buffers=0.5 * GIB,
    total=49.75 * GIB,
    reserved=51.24 * GIB,
)
RANKS = (
    replace(MIDDLE, pp_rank=0, embedding=True, num_layers=7, weights=8.0 * GIB, total=51.75 * GIB, at="4B0"),
    MIDDLE,
    replace(MIDDLE, pp_rank=2, stages=(2, 6), at="6B0"),
    replace(MIDDLE, pp_rank=3, head=True, num_layers=7, logits=2.0 * GIB, total=51.0 * GIB, at="7F1"),
)


def test_neighbours_that_agree_are_one_line() -> None:
    lines = [" ".join(line.split()) for line in as_plain(memory_table(RANKS)).splitlines()]
    assert lines[2:] == [
        "0 embedding + 7 layers 7 8.0 12.0 0.2 30.0 1.5 51.8",
        "1-2 8 layers 7 6.0 12.0 0.2 30.0 1.5 49.8",
        "3 7 layers + head 7 6.0 12.0 0.2 30.0 3.5 51.0",
    ]


def test_a_rank_with_nothing_says_so() -> None:
    (line,) = as_plain(memory_table((replace(MIDDLE, num_layers=0),))).splitlines()[2:]
    assert line.split()[:2] == ["1", "nothing"]
    assert "1 layer " in as_plain(memory_table((replace(MIDDLE, num_layers=1),)))
