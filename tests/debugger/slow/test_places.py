"""Layouts: as a person writes them, as traces tell them, and as groups betray them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import pairwise, product

import numpy as np
import pytest

from fourfold.debugger.reading.trace import Call, Group, RankTrace
from fourfold.debugger.slow.places import Places, layout_of, parse_layout
from fourfold.layout import Grid
from tests.debugger.hand import Met, trace


class TestParse:
    @pytest.mark.parametrize(
        ("text", "grid"),
        [
            ("tp=2,cp=3,pp=4,dp=5", Grid(2, 3, 4, 5)),
            ("dp=8", Grid(dp=8)),
            (" pp = 2 , tp = 4 ", Grid(tp=4, pp=2)),
        ],
    )
    def test_as_written(self, text: str, grid: Grid) -> None:
        assert parse_layout(text) == grid

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("tp=2,ep=4", "--layout tp=2,ep=4: 'ep=4' must be tp, cp, pp or dp and its size, as in tp=2,pp=4"),
            ("tp=0", "'tp=0' must be"),
            ("tp=-1", "'tp=-1' must be"),
            ("tp=2.5", "'tp=2.5' must be"),
            ("tp", "'tp' must be"),
            ("tp=", "'tp=' must be"),
            ("", "'' must be"),
            ("tp=2,", "'' must be"),
            ("tp=2;pp=2", "must be"),
            ("tp=2,pp=2,tp=4", "--layout tp=2,pp=2,tp=4: tp is given twice"),
        ],
    )
    def test_refused(self, text: str, message: str) -> None:
        with pytest.raises(ValueError, match="--layout") as error:
            parse_layout(text)
        assert message in str(error.value)


def member(
    rank: int,
    world: int,
    groups: Iterable[tuple[int, ...]] = (),
    channels: Iterable[tuple[int, int]] = (),
    *,
    names: dict[tuple[int, ...], str] | None = None,
    world_size: int | None = None,
) -> RankTrace:
    """A rank that has these groups and messages, and says nothing of the layout."""
    mine = [group for group in groups if rank in group]
    calls = [Met(10 * i, 10 * i + 5, Call.ALL_REDUCE, group, i) for i, group in enumerate(mine)]
    for i, (source, destination) in enumerate(channels):
        pair = tuple(sorted((source, destination)))
        if rank == source:
            calls.append(Met(1000 + 10 * i, 1005 + 10 * i, Call.SEND, pair, i, destination))
        elif rank == destination:
            calls.append(Met(1000 + 10 * i, 1005 + 10 * i, Call.RECV, pair, i, source))
    one = trace(rank, Grid(dp=world), end=5000, works=[], calls=calls)
    told = tuple(
        dataclasses.replace(group, description=(names or {}).get(group.ranks or (), "")) for group in one.groups
    )
    return dataclasses.replace(one, grid=None, world_size=world if world_size is None else world_size, groups=told)


def job(grid: Grid, *, names: bool = False, fsdp: bool = True, world: bool = True) -> list[RankTrace]:
    """All ranks of a layout, with the groups that a trainer makes: those of one rank it does not."""
    named: dict[tuple[int, ...], str] = {}
    for name, dims in (("tp", ("tp",)), ("cp", ("cp",)), ("fsdp", ("cp", "dp"))):
        if name != "fsdp" or fsdp:
            named |= {group: f"mesh_{name}" for group in grid.groups(*dims) if len(group) > 1 and group not in named}
    if world:
        named.setdefault(tuple(range(grid.size)), "default_pg")
    channels = [pair for group in grid.groups("pp") for a, b in pairwise(group) for pair in ((a, b), (b, a))]
    return [member(rank, grid.size, named, channels, names=named if names else None) for rank in range(grid.size)]


class TestLayout:
    @pytest.mark.parametrize(
        "grid",
        [
            Grid(tp=2, dp=4),
            Grid(tp=2, pp=2, dp=2),
            Grid(tp=2, cp=2, pp=2, dp=2),
            Grid(tp=4, pp=4, dp=2),
            Grid(pp=4, dp=2),
            Grid(pp=8),
            Grid(dp=8),
            Grid(tp=2, cp=2, pp=4),
            Grid(tp=8, pp=2),
            Grid(cp=2, pp=2, dp=3),
            Grid(tp=2, cp=2, dp=2),
        ],
        ids=str,
    )
    def test_is_made_out_of_named_groups(self, grid: Grid) -> None:
        found = layout_of(job(grid, names=True), None)
        assert found.grid == grid
        assert found.source == "groups"
        assert "inferred" in found.note

    @pytest.mark.parametrize(
        "grid",
        [
            Grid(tp=2, dp=4),
            Grid(tp=2, pp=2, dp=2),
            Grid(tp=4, pp=4, dp=2),
            Grid(pp=4, dp=2),
            Grid(tp=2, cp=2, pp=2, dp=2),
        ],
        ids=str,
    )
    def test_is_made_out_of_strides_and_messages(self, grid: Grid) -> None:
        assert layout_of(job(grid), None).grid == grid

    def test_of_another_order_has_the_right_stages(self) -> None:
        """TP, DP, PP from inner to outer, as others have it: what is between TP and PP counts as CP."""
        tp = [(0, 1), (2, 3), (4, 5), (6, 7)]
        dp = [(0, 2), (1, 3), (4, 6), (5, 7)]
        channels = [(rank, rank + 4) for rank in range(4)]
        names = dict.fromkeys(tp, "TENSOR_MODEL_PARALLEL_GROUP") | dict.fromkeys(dp, "DATA_PARALLEL_GROUP")
        for told in (names, None):
            found = layout_of([member(rank, 8, [*tp, *dp], channels, names=told) for rank in range(8)], None)
            assert (found.grid.tp, found.grid.pp) == (2, 2)
            for rank in range(8):
                assert found.grid.coordinates(rank).pp == rank // 4
                assert found.grid.coordinates(rank).tp == rank % 2

    def test_of_a_few_ranks_of_many(self) -> None:
        """Traces of one replica: the others are known from the size of the world."""
        some = [one for one in job(Grid(tp=2, pp=2, dp=4), names=True) if one.rank < 4]
        assert layout_of(some, None).grid == Grid(tp=2, pp=2, dp=4)

    def test_without_groups_all_are_replicas(self) -> None:
        found = layout_of([member(rank, 4) for rank in range(4)], None)
        assert found.grid == Grid(dp=4)
        assert found.source == "none"
        assert "--layout helps" in found.note
        assert layout_of([member(0, 1)], None).note == ""

    def test_groups_that_make_no_layout(self) -> None:
        groups = [(0, 1, 2), (3, 4, 5)]
        found = layout_of([member(rank, 7, groups) for rank in range(7)], None)
        assert (found.grid, found.source) == (Grid(dp=7), "none")
        assert "make no layout" in found.note

    def test_as_the_traces_tell(self) -> None:
        ranks = [dataclasses.replace(member(rank, 4), grid=Grid(tp=2, dp=2)) for rank in range(4)]
        found = layout_of(ranks, None)
        assert (found.grid, found.source, found.note) == (Grid(tp=2, dp=2), "traces", "")

    def test_of_different_runs(self) -> None:
        ranks = [dataclasses.replace(member(rank, 4), grid=Grid(tp=2, dp=2) if rank else Grid(dp=4)) for rank in (0, 1)]
        with pytest.raises(ValueError, match="of runs with different layouts: tp=1 cp=1 pp=1 dp=4; tp=2 cp=1 pp=1 dp"):
            layout_of(ranks, None)

    def test_what_is_given_counts(self) -> None:
        ranks = [dataclasses.replace(member(rank, 4), grid=Grid(dp=4)) for rank in range(4)]
        found = layout_of(ranks, Grid(pp=4))
        assert (found.grid, found.source) == (Grid(pp=4), "given")

    @pytest.mark.parametrize(
        ("given", "world_size", "message"),
        [
            (Grid(tp=2, dp=4), 4, "--layout: tp=2 cp=1 pp=1 dp=4 are 8 ranks, but the traces are of 4 ranks"),
            (Grid(tp=2), 4, "tp=2 cp=1 pp=1 dp=1 are 2 ranks, but the traces are of 4 ranks"),
            (Grid(tp=2), 0, "are 2 ranks, but there is a trace of rank 3"),
        ],
    )
    def test_what_is_given_and_cannot_be(self, given: Grid, world_size: int, message: str) -> None:
        ranks = [member(rank, 4, world_size=world_size) for rank in range(4)]
        with pytest.raises(ValueError) as error:
            layout_of(ranks, given)
        assert message in str(error.value)

    def test_more_than_the_traces_know_of_may_be_given(self) -> None:
        ranks = [member(rank, 4, world_size=0) for rank in range(4)]
        assert layout_of(ranks, Grid(dp=8)).grid == Grid(dp=8)


class TestPlaces:
    @pytest.mark.parametrize("sizes", [*product((1, 2), (1, 2), (1, 3), (1, 2))])
    def test_dimension_of_every_group(self, sizes: tuple[int, int, int, int]) -> None:
        grid = Grid(*sizes)
        places = Places(grid)
        spans = {"tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "fsdp": ("cp", "dp"), "dp": ("dp",)}
        for name, dims in spans.items():
            for group in grid.groups(*dims):
                if len(group) == 1:
                    continue
                found = places.dimension(group)
                # A group may be one of several dimensions; then the name must be of one that has these ranks.
                legal = {other for other, along in spans.items() if group in grid.groups(*along)}
                legal |= {"world"} if len(group) == grid.size else set()
                assert found in legal
                if name in ("tp", "cp", "pp") and len(group) < grid.size:
                    assert found == name
        if grid.size > 1 and sum(size > 1 for size in sizes) > 1:
            assert places.dimension(tuple(range(grid.size))) == "world"

    def test_what_is_in_no_layout(self) -> None:
        places = Places(Grid(tp=2, dp=4))
        assert places.dimension((0, 3)) == "other"
        assert places.dimension((6, 8)) == "other"
        assert places.dimension((5, 80)) == "other"

    @pytest.mark.parametrize(
        ("group", "rank", "ranks"),
        [
            (Group("1", "", 3, (4, 5, 6)), 4, (4, 5, 6)),
            (Group("1", "", 8, None, (0, 4, 8)), 0, tuple(range(0, 32, 4))),
            (Group("1", "", 8, None, (1, 5, 9)), 9, tuple(range(1, 32, 4))),
            (Group("1", "", 0, None, (0, 4, 8)), 0, tuple(range(0, 32, 4))),
            (Group("1", "", 32, None, (0, 1, 2, 3)), 0, tuple(range(32))),
            (Group("1", "mesh_tp", 4, None), 6, (4, 5, 6, 7)),
            (Group("1", "mesh_dp", 8, None), 6, tuple(range(2, 32, 4))),
            (Group("1", "default_pg", 32, None), 6, tuple(range(32))),
            (Group("1", "mesh_tp", 5, None), 6, None),
            (Group("1", "", 8, None, (0, 3)), 0, None),
            (Group("1", "", 7, None, (0, 4)), 0, None),
            (Group("1", "something", 4, None), 0, None),
        ],
    )
    def test_lists_that_are_cut(self, group: Group, rank: int, ranks: tuple[int, ...] | None) -> None:
        assert Places(Grid(tp=4, dp=8)).complete(group, rank) == ranks


def test_numbers_are_whole() -> None:
    """What comes out of numpy's arrays must be what JSON can hold."""
    found = layout_of(job(Grid(tp=2, pp=2, dp=2)), None).grid
    assert not any(isinstance(size, np.generic) for size in dataclasses.astuple(found))
