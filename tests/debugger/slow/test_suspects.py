"""Who stands out, on accounts that were made up: what was put in is what must come out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest

from fourfold.debugger.reading.trace import Work
from fourfold.debugger.slow.accounts import AWAITED, HOST, Accounts
from fourfold.debugger.slow.suspects import (
    CLASSES,
    LEAST,
    LEAST_ON_PROCESSOR,
    Suspects,
    find_suspects,
    typical,
)
from fourfold.layout import Grid

GRID = Grid(tp=2, cp=2, pp=2, dp=2)
GEMM, ATTENTION, MEMORY = 0.06, 0.03, 0.01
OWN = GEMM + ATTENTION + MEMORY


def accounts(
    grid: Grid = GRID,
    *,
    steps: int = 3,
    slow: Mapping[int, float] | None = None,
    slow_in_step: Mapping[tuple[int, int], float] | None = None,
    documents: np.ndarray | None = None,
    pause: Mapping[tuple[int, str], float] | None = None,
    longer: Mapping[int, float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
    **more: bool,
) -> Accounts:
    """A job of 100 ms of computing.

    Args:
        grid: sizes.
        steps: how many.
        slow: by rank, the factor of all its work.
        slow_in_step: the same by (step, rank), in that step only.
        documents: [dp, cp] factor of attention.
        pause: by rank and kind, seconds.
        longer: by pipeline rank, the factor of all work.
        jitter: standard deviation of each class of work, relative.
        seed: of that.
        more: attention_known, on_processor.
    """
    random = np.random.default_rng(seed)
    work = np.empty((steps, grid.size, len(Work)))
    work[:] = np.array([GEMM, ATTENTION, MEMORY])
    host = np.zeros((steps, grid.size, len(HOST)))
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        if documents is not None:
            work[:, rank, Work.ATTENTION] *= documents[at.dp, at.cp]
        work[:, rank] *= (slow or {}).get(rank, 1.0) * (longer or {}).get(at.pp, 1.0)
        for step in range(steps):
            work[step, rank] *= (slow_in_step or {}).get((step, rank), 1.0)
    for (rank, kind), seconds in (pause or {}).items():
        host[:, rank, HOST.index(kind)] = seconds
    if not more.get("attention_known", True):
        work[:, :, Work.GEMM] += work[:, :, Work.ATTENTION]
        work[:, :, Work.ATTENTION] = 0
    work *= 1 + jitter * random.standard_normal(work.shape)
    rest = np.zeros((steps, grid.size, len(AWAITED)))
    return Accounts(grid, tuple(range(10, 10 + steps)), work, host, rest, rest, **more)


class TestTypical:
    """The lower median."""

    @pytest.mark.parametrize("axes", [(0,), (1, 3), (0, 1, 2, 3), (2, 0)])
    @pytest.mark.parametrize("unknown", [0.0, 0.3, 0.9])
    def test_against_sorting_by_hand(self, axes: tuple[int, ...], unknown: float) -> None:
        random = np.random.default_rng(len(axes))
        values = random.standard_normal((2, 3, 4, 5))
        values[random.random(values.shape) < unknown] = np.nan
        found = typical(values, axes)
        kept = [axis for axis in range(4) if axis not in axes]
        assert found.shape == tuple(1 if axis in axes else values.shape[axis] for axis in range(4))
        for at in product(*(range(values.shape[axis]) for axis in kept)):
            where: list[slice | int] = [slice(None)] * 4
            for axis, place in zip(kept, at, strict=True):
                where[axis] = place
            known = sorted(value for value in values[tuple(where)].ravel().tolist() if not math.isnan(value))
            here = [0] * 4
            for axis, place in zip(kept, at, strict=True):
                here[axis] = place
            got = float(found[tuple(here)])
            assert got == known[(len(known) - 1) // 2] if known else math.isnan(got)

    def test_of_two_the_smaller(self) -> None:
        assert typical(np.array([[3.0, 2.0]]), (1,)).tolist() == [[2.0]]
        assert typical(np.array([[3.0, np.nan]]), (1,)).tolist() == [[3.0]]


class TestExcess:
    @pytest.mark.parametrize("rank", range(GRID.size))
    def test_is_what_was_planted(self, rank: int) -> None:
        found = find_suspects(accounts(slow={rank: 1.5}))
        assert found.ranks == (rank,)
        assert found.per_rank[rank] == pytest.approx(0.5 * OWN)
        by_class = dict(zip(CLASSES, found.by_class(rank).tolist(), strict=True))
        assert by_class == pytest.approx(
            {"gemm": 0.03, "attention": 0.015, "memory": 0.005, **dict.fromkeys(HOST, 0.0)}
        )
        others = np.delete(found.per_rank, rank)
        np.testing.assert_allclose(others, 0, atol=1e-12)
        np.testing.assert_allclose(found.usual, OWN)

    def test_of_a_pause(self) -> None:
        found = find_suspects(accounts(pause={(3, "garbage"): 0.02, (3, "launch"): 0.01}))
        assert found.ranks == (3,)
        by_class = dict(zip(CLASSES, found.by_class(3).tolist(), strict=True))
        assert by_class["garbage"] == pytest.approx(0.02)
        assert by_class["launch"] == pytest.approx(0.01)
        assert found.per_rank[3] == pytest.approx(0.03)

    def test_a_pause_that_all_have_is_nobodys(self) -> None:
        assert find_suspects(accounts(pause={(rank, "launch"): 0.02 for rank in range(16)})).ranks == ()

    def test_a_stage_is_held_against_itself_only(self) -> None:
        found = find_suspects(accounts(longer={1: 1.6}, slow={2: 1.1}))
        assert found.ranks == (2,)
        assert GRID.coordinates(2).pp == 0
        found = find_suspects(accounts(longer={1: 1.6}, slow={5: 1.1}))
        assert GRID.coordinates(5).pp == 1
        assert found.per_rank[5] == pytest.approx(0.1 * 1.6 * OWN)

    def test_most_first(self) -> None:
        assert find_suspects(accounts(slow={1: 1.2, 6: 1.5, 11: 1.3})).ranks == (6, 11, 1)

    def test_a_rank_without_a_trace_is_no_suspect_and_no_peer(self) -> None:
        made = accounts(slow={9: 1.4})
        for column in (made.work, made.host):
            column[:, [0, 5]] = np.nan
        found = find_suspects(made)
        assert found.ranks == (9,)
        assert np.isnan(found.per_rank[[0, 5]]).all()
        assert found.per_rank[9] == pytest.approx(0.4 * OWN)

    def test_a_step_that_one_rank_lacks(self) -> None:
        made = accounts(slow={9: 1.4})
        made.work[1, 9] = np.nan
        assert find_suspects(made).per_rank[9] == pytest.approx(0.4 * OWN)


class TestDocuments:
    """Attention that follows (dp, cp)."""

    UNEVEN = np.array([[1.0, 3.0], [0.5, 2.0]])

    def test_are_no_fault(self) -> None:
        found = find_suspects(accounts(documents=self.UNEVEN))
        assert found.ranks == ()
        # 1: as most have. Of four the second smallest.
        np.testing.assert_allclose(found.documents, np.broadcast_to(self.UNEVEN, (3, 2, 2)))
        np.testing.assert_allclose(found.per_rank, 0, atol=1e-12)

    @pytest.mark.parametrize("rank", range(GRID.size))
    def test_are_divided_out_of_a_slow_rank(self, rank: int) -> None:
        found = find_suspects(accounts(documents=self.UNEVEN, slow={rank: 1.3}))
        at = GRID.coordinates(rank)
        usual = GEMM + MEMORY + ATTENTION * self.UNEVEN[at.dp, at.cp]
        assert found.ranks == (rank,)
        assert found.per_rank[rank] == pytest.approx(0.3 * usual)
        np.testing.assert_allclose(found.documents, np.broadcast_to(self.UNEVEN, (3, 2, 2)))

    def test_slow_attention_of_one_rank_is_its_own(self) -> None:
        made = accounts(documents=self.UNEVEN)
        made.work[:, 13, Work.ATTENTION] *= 2
        found = find_suspects(made)
        at = GRID.coordinates(13)
        assert found.ranks == (13,)
        assert found.per_rank[13] == pytest.approx(ATTENTION * self.UNEVEN[at.dp, at.cp])

    def test_change_from_step_to_step(self) -> None:
        made = accounts(steps=4)
        factors = np.random.default_rng(3).uniform(0.2, 4.0, (4, 2, 2))
        for rank in range(GRID.size):
            at = GRID.coordinates(rank)
            made.work[:, rank, Work.ATTENTION] *= factors[:, at.dp, at.cp]
        found = find_suspects(made)
        assert (found.ranks, found.rotating) == ((), ())
        second = np.sort(factors.reshape(4, -1), axis=1)[:, 1]
        np.testing.assert_allclose(found.documents, factors / second[:, None, None])

    def test_with_nobody_who_has_the_same(self) -> None:
        """dp alone: then other work says how fast a rank is."""
        documents = np.array([[1.0], [2.0], [0.5], [1.5]])
        grid = Grid(dp=4)
        assert find_suspects(accounts(grid, documents=documents)).ranks == ()
        found = find_suspects(accounts(grid, documents=documents, slow={1: 1.3}))
        assert found.ranks == (1,)
        assert found.per_rank[1] == pytest.approx(0.3 * (GEMM + MEMORY + 2 * ATTENTION))
        assert find_suspects(accounts(grid, slow={1: 1.3}, attention_known=False)).ranks == (1,)

    def test_in_work_that_is_not_told_apart(self) -> None:
        found = find_suspects(accounts(documents=self.UNEVEN, attention_known=False))
        assert found.ranks == ()
        found = find_suspects(accounts(documents=self.UNEVEN, attention_known=False, slow={6: 1.3}))
        assert found.ranks == (6,)


class TestThresholds:
    @pytest.mark.parametrize(("on_processor", "least"), [(False, LEAST), (True, LEAST_ON_PROCESSOR)])
    def test_without_chance(self, on_processor: bool, least: float) -> None:
        below = find_suspects(accounts(slow={4: 1 + 0.97 * least}, on_processor=on_processor))
        above = find_suspects(accounts(slow={4: 1 + 1.03 * least}, on_processor=on_processor))
        assert below.ranks == ()
        assert above.ranks == (4,)
        np.testing.assert_allclose(above.threshold, least * OWN)

    @pytest.mark.parametrize(("jitter", "most"), [(0.01, 0), (0.1, 5)])
    def test_chance_is_nobodys_fault(self, jitter: float, most: int) -> None:
        grid = Grid(tp=4, pp=4, dp=4)
        blamed = [find_suspects(accounts(grid, jitter=jitter, seed=seed)).ranks for seed in range(100)]
        assert sum(map(bool, blamed)) <= most

    def test_what_is_lost_in_chance_is_found_where_it_varies_less(self) -> None:
        grid = Grid(tp=4, pp=4, dp=4)
        slow = {21: 1.15}
        assert find_suspects(accounts(grid, slow=slow, jitter=0.01)).ranks == (21,)
        assert find_suspects(accounts(grid, slow=slow, jitter=0.3)).ranks == ()


class TestRotating:
    def test_another_rank_in_every_step(self) -> None:
        found = find_suspects(accounts(steps=4, slow_in_step={(0, 3): 1.5, (1, 9): 1.4, (3, 0): 1.5}))
        assert found.ranks == ()
        assert found.rotating == ((10, 3), (11, 9), (13, 0))

    def test_one_that_is_slow_more_often_than_another(self) -> None:
        """Two of three are not most."""
        found = find_suspects(accounts(steps=6, slow_in_step={(0, 3): 1.5, (2, 9): 1.5, (4, 3): 1.5}))
        assert found.ranks == ()
        assert found.rotating == ((10, 3), (12, 9), (14, 3))

    def test_the_same_rank_now_and_then(self) -> None:
        """Two of five steps: its median is that of the others, but it is always the same."""
        found = find_suspects(accounts(steps=5, slow_in_step={(1, 7): 1.5, (4, 7): 1.5}))
        assert found.ranks == (7,)
        assert found.rotating == ()
        assert found.per_rank[7] == pytest.approx(2 / 5 * 0.5 * OWN)

    def test_one_step_is_an_accident(self) -> None:
        found = find_suspects(accounts(steps=5, slow_in_step={(2, 7): 2.0}))
        assert (found.ranks, found.rotating) == ((), ())

    def test_who_is_slow_in_most_steps_is_slow(self) -> None:
        found = find_suspects(accounts(steps=3, slow_in_step={(0, 7): 1.5, (1, 7): 1.5, (2, 2): 1.5}))
        assert found.ranks == (7,)


class TestWithoutPeers:
    def test_stages_against_their_shares(self) -> None:
        grid, shares = Grid(pp=4), (0.2, 0.2, 0.2, 0.4)
        longer = {pp: 5 * share for pp, share in enumerate(shares)}
        found = find_suspects(accounts(grid, longer=longer), shares)
        assert found.compared
        assert found.ranks == ()
        found = find_suspects(accounts(grid, longer=longer, slow={1: 1.3}), shares)
        assert found.ranks == (1,)
        assert found.per_rank[1] == pytest.approx(0.3 * OWN)

    @pytest.mark.parametrize(("grid", "shares"), [(Grid(pp=4), ()), (Grid(pp=2), (0.5, 0.5)), (Grid(), (1.0,))])
    def test_nobody_is_blamed_where_nobody_can_be_compared(self, grid: Grid, shares: tuple[float, ...]) -> None:
        found = find_suspects(accounts(grid, slow={0: 2.0}), shares)
        assert not found.compared
        assert found.ranks == ()


@pytest.mark.parametrize("grid", [GRID, Grid(tp=3, cp=1, pp=2, dp=4), Grid(dp=8), Grid(pp=5)])
def test_levels_are_what_a_search_by_hand_finds(grid: Grid) -> None:
    random = np.random.default_rng(1)
    per_rank = random.standard_normal(grid.size)
    per_rank[random.integers(grid.size)] = np.nan
    none = np.zeros((1, grid.size, len(CLASSES)))
    suspects = Suspects(grid, none, none[:, :, 0], none, per_rank, per_rank, (), (), True)
    names = ("dp", "pp", "cp", "tp")
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        inside = {*range(grid.size)}
        for level, name in zip(suspects.levels(rank), names, strict=True):
            each = []
            for index in range(getattr(grid, name)):
                excesses = [
                    0.0 if math.isnan(per_rank[other]) else max(float(per_rank[other]), 0.0)
                    for other in inside
                    if getattr(grid.coordinates(other), name) == index
                ]
                each.append(max(excesses))
            mine = getattr(at, name)
            rest = [value for index, value in enumerate(each) if index != mine]
            assert (level.dimension, level.index) == (name, mine)
            assert level.excess == pytest.approx(each[mine])
            assert level.share == pytest.approx(each[mine] / sum(each) if sum(each) else 0.0)
            assert level.gap == pytest.approx(each[mine] - max(rest, default=0.0))
            inside = {other for other in inside if getattr(grid.coordinates(other), name) == mine}
