"""Ranks and groups, against the Herd report's 16-GPU example, the two production layouts and plain enumeration."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.layout.grid import DIMENSIONS, Coordinates, Grid

HERD = Grid(tp=2, cp=2, pp=2, dp=2)

extents = st.integers(1, 4)
grids = st.builds(Grid, tp=extents, cp=extents, pp=extents, dp=extents)
subsets = st.sets(st.sampled_from(DIMENSIONS)).map(sorted)


def test_herd_example() -> None:
    # Herd report, parallelism figure: GPU0/1 share a TP group, 0/2 CP, 0/4 PP, 0/8 DP.
    assert HERD.size == 16
    assert HERD.group_of(0, "tp") == (0, 1)
    assert HERD.group_of(0, "cp") == (0, 2)
    assert HERD.group_of(0, "pp") == (0, 4)
    assert HERD.group_of(0, "dp") == (0, 8)
    assert HERD.coordinates(11) == Coordinates(tp=1, cp=1, pp=0, dp=1)
    assert HERD.rank(tp=1, cp=1, dp=1) == 11


def test_groups_of_one_and_of_two_dimensions() -> None:
    assert HERD.groups("cp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert HERD.groups("dp", "cp") == [(0, 2, 8, 10), (1, 3, 9, 11), (4, 6, 12, 14), (5, 7, 13, 15)]
    assert HERD.groups("cp", "dp") == HERD.groups("dp", "cp")
    assert HERD.groups() == [(rank,) for rank in range(16)]
    assert HERD.groups(*DIMENSIONS) == [tuple(range(16))]


def test_one_rank() -> None:
    assert Grid().size == 1
    assert Grid().groups("tp", "dp") == [(0,)]
    assert Grid().group_of(0, "pp") == (0,)


def test_crossing_nodes() -> None:
    assert HERD.crossing("pp", gpus_per_node=8) == []
    assert HERD.crossing("dp", gpus_per_node=8) == HERD.groups("dp")
    # A node of 6 divides no group evenly: of the CP pairs only 4-6 and 5-7, of the TP pairs none, lie across its edges.
    assert HERD.crossing("cp", gpus_per_node=6) == [(4, 6), (5, 7)]
    assert HERD.crossing("tp", gpus_per_node=6) == []
    assert HERD.crossing("tp", gpus_per_node=5) == [(4, 5), (14, 15)]
    assert len(HERD.crossing("tp", gpus_per_node=1)) == 8


def test_production_at_131k_tokens() -> None:
    # ISCA'25 Table 2: 16,384 GPUs in nodes of 8; CP extends DP for parameters, 8 * 16 = 128 ranks share a shard.
    grid = Grid(tp=8, cp=16, pp=16, dp=8)
    assert grid.size == 16_384
    assert grid.crossing("tp", gpus_per_node=8) == []
    assert grid.crossing("cp", gpus_per_node=8) == grid.groups("cp")
    sharded_over = grid.groups("dp", "cp")
    assert {len(group) for group in sharded_over} == {128}
    assert len(sharded_over) == 8 * 16
    assert grid.coordinates(8 * 16 * 16 + 8 * 16 + 8 + 1) == (1, 1, 1, 1)


@given(grids)
def test_rank_and_coordinates_are_inverse_and_tp_is_innermost(grid: Grid) -> None:
    in_order = product(range(grid.dp), range(grid.pp), range(grid.cp), range(grid.tp))
    for rank, (dp, pp, cp, tp) in enumerate(in_order):
        assert grid.coordinates(rank) == Coordinates(tp=tp, cp=cp, pp=pp, dp=dp)
        assert grid.rank(tp=tp, cp=cp, pp=pp, dp=dp) == rank
    assert rank == grid.size - 1


@given(grids, subsets, st.integers(1, 9))
def test_groups_against_enumeration(grid: Grid, dims: list[str], gpus_per_node: int) -> None:
    fixed = [dim for dim in DIMENSIONS if dim not in dims]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(grid.size):
        found.setdefault(tuple(getattr(grid.coordinates(rank), dim) for dim in fixed), []).append(rank)
    expected = [tuple(group) for group in found.values()]

    assert grid.groups(*dims) == expected
    assert [grid.group_of(rank, *dims) for rank in range(grid.size)] == [
        next(group for group in expected if rank in group) for rank in range(grid.size)
    ]
    assert grid.crossing(*dims, gpus_per_node=gpus_per_node) == [
        group for group in expected if len({rank // gpus_per_node for rank in group}) > 1
    ]


@pytest.mark.parametrize("dim", DIMENSIONS)
def test_sizes_below_one_are_refused(dim: str) -> None:
    with pytest.raises(ValueError, match=f"{dim} = 0: must be at least 1"):
        Grid(**{dim: 0})


def test_what_lies_outside_is_refused() -> None:
    for rank in (-1, 16):
        with pytest.raises(ValueError, match=rf"rank = {rank}: must be in 0\.\.15"):
            HERD.coordinates(rank)
    for at in (-1, 2):
        with pytest.raises(ValueError, match=rf"pp = {at}: must be in 0\.\.1"):
            HERD.rank(pp=at)
    with pytest.raises(ValueError, match="dimension 'ep': must be one of tp, cp, pp, dp"):
        HERD.groups("ep")
    with pytest.raises(ValueError, match="gpus_per_node = 0"):
        HERD.crossing("tp", gpus_per_node=0)
