"""From accounts to an answer: causes, stages, documents, and what is left when nobody stands out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from fourfold.debugger.reading.trace import Work
from fourfold.debugger.slow.accounts import AWAITED, HOST, Accounts
from fourfold.debugger.slow.links import SlowLink
from fourfold.debugger.slow.meetings import Unseen
from fourfold.debugger.slow.verdict import Verdict, judge
from fourfold.debugger.slow.whatif import Computed, Replay, make_replay
from fourfold.layout import Action, Grid, Kind

GRID = Grid(tp=2, pp=2, dp=2)
GEMM, ATTENTION, MEMORY = 0.6, 0.3, 0.1
STEP = 1.5


def accounts(
    grid: Grid = GRID,
    *,
    work: Mapping[tuple[int, Work], float] | None = None,
    host: Mapping[tuple[int, str], float] | None = None,
    waits: float = 0.0,
    steps: int = 3,
) -> Accounts:
    """A second of computing, and waiting for the rest of a step of 1.5 s.

    Args:
        grid: sizes.
        work: by rank and class, the factor of it.
        host: by rank and kind, seconds.
        waits: of the step, for replicas; the rest of what is waited is for all ranks in the end.
        steps: how many.
    """
    column = np.empty((steps, grid.size, len(Work)))
    column[:] = GEMM, ATTENTION, MEMORY
    for (rank, kind), factor in (work or {}).items():
        column[:, rank, kind] *= factor
    pauses = np.zeros((steps, grid.size, len(HOST)))
    for (rank, kind), seconds in (host or {}).items():
        pauses[:, rank, HOST.index(kind)] = seconds
    transfer = np.zeros((steps, grid.size, len(AWAITED)))
    wait = np.zeros_like(transfer)
    wait[:, :, AWAITED.index("dp")] = waits * STEP
    left = STEP - column.sum(axis=2) - pauses.sum(axis=2) - wait.sum(axis=2)
    wait[:, :, AWAITED.index("end")] = left
    return Accounts(grid, tuple(range(1, steps + 1)), column, pauses, transfer, wait)


def verdict(given: Accounts, **more: object) -> Verdict:
    return judge(given, **more)[0]


def factors(rank: int, *kinds: Work, by: float = 1.5) -> dict[tuple[int, Work], float]:
    return {(rank, kind): by for kind in kinds}


class TestCause:
    @pytest.mark.parametrize(
        ("kinds", "cause"),
        [
            (tuple(Work), "all work"),
            ((Work.GEMM,), "matrix products"),
            ((Work.ATTENTION,), "attention"),
            ((Work.MEMORY,), "memory-bound work"),
            ((Work.GEMM, Work.ATTENTION), "all work"),
        ],
    )
    def test_of_computing(self, kinds: tuple[Work, ...], cause: str) -> None:
        found = verdict(accounts(work=factors(6, *kinds)))
        (culprit,) = found.culprits
        assert (found.answer, culprit.kind, culprit.ranks, culprit.cause) == ("slow rank", "compute", (6,), cause)
        more = 0.5 * sum((GEMM, ATTENTION, MEMORY)[kind] for kind in kinds)
        assert culprit.excess == pytest.approx(more)
        assert culprit.factor == pytest.approx(1 + more)
        assert culprit.gain is None

    @pytest.mark.parametrize(
        ("kind", "cause"),
        [
            ("garbage", "garbage collection"),
            ("loader", "data loader"),
            ("optimizer", "optimizer"),
            ("launch", "launches"),
        ],
    )
    def test_of_a_late_host(self, kind: str, cause: str) -> None:
        found = verdict(accounts(host={(3, kind): 0.2}))
        (culprit,) = found.culprits
        assert (culprit.kind, culprit.ranks, culprit.cause) == ("cpu", (3,), cause)
        assert culprit.excess == pytest.approx(0.2)
        assert culprit.factor == pytest.approx(1.2)

    def test_of_both_what_is_more(self) -> None:
        both = accounts(work=factors(3, *Work, by=1.2), host={(3, "launch"): 0.3})
        assert verdict(both).culprits[0].kind == "cpu"
        both = accounts(work=factors(3, *Work, by=1.4), host={(3, "launch"): 0.3})
        assert verdict(both).culprits[0].kind == "compute"

    @pytest.mark.parametrize(("ranks", "cause"), [((5,), "network card"), ((4, 5), "link"), ((1, 3, 5, 7), "group")])
    def test_of_a_link(self, ranks: tuple[int, ...], cause: str) -> None:
        link = SlowLink(ranks, "tp", 3.0, 0.2, (("tp", ranks),))
        found = verdict(accounts(), links=[link])
        (culprit,) = found.culprits
        assert (found.answer, culprit.kind, culprit.ranks, culprit.cause) == ("slow link", "link", ranks, cause)
        assert (culprit.factor, culprit.excess) == (3.0, 0.2)


def test_several_the_worst_first() -> None:
    work = factors(1, *Work, by=1.2) | factors(6, *Work, by=1.6)
    link = SlowLink((2, 3), "tp", 2.0, 0.4, (("tp", (2, 3)),))
    found = verdict(accounts(work=work), links=[link])
    assert found.answer == "several"
    assert [culprit.ranks for culprit in found.culprits] == [(6,), (2, 3), (1,)]


def test_one_that_hides_another() -> None:
    """Of four peers two are slow, one of them far more: taking it away shows the other."""
    work = factors(0, *Work, by=3.0) | factors(1, *Work, by=1.2)
    assert [culprit.ranks for culprit in verdict(accounts(work=work)).culprits] == [(0,), (1,)]


def test_pauses_that_a_whole_group_has_are_a_link() -> None:
    """All replicas of one TP index of a stage pause alike: they wait for weights, not for their hosts."""
    grid = Grid(tp=2, pp=2, dp=4)
    group = grid.groups("dp")[1]
    given = accounts(grid, host={(rank, "launch"): 0.2 for rank in group})
    found = verdict(given)
    (culprit,) = found.culprits
    assert (culprit.kind, culprit.ranks, culprit.cause) == ("link", group, "group")
    assert culprit.excess == pytest.approx(0.2)


class TestStages:
    def long(self, by: float) -> Accounts:
        work = {(rank, kind): by for rank in range(8) if GRID.coordinates(rank).pp == 1 for kind in Work}
        return accounts(work=work)

    def test_one_that_is_longer_on_all_replicas(self) -> None:
        found = verdict(self.long(1.3))
        assert (found.answer, found.culprits) == ("partition", ())
        assert found.stage is not None
        assert found.stage.pp_rank == 1
        assert found.stage.ratio == pytest.approx(1.3)
        assert found.stage.gain == pytest.approx(0.3)

    def test_that_should_be_longer(self) -> None:
        """By plan: no answer, but said."""
        found = verdict(self.long(1.3), shares=(1 / 2.3, 1.3 / 2.3))
        assert (found.answer, found.stage) == ("healthy", None)
        assert found.uneven is not None
        assert (found.uneven.pp_rank, found.uneven.ratio) == (1, pytest.approx(1.3))
        assert [what.what for what in found.what_ifs] == ["stage 1"]

    def test_a_little_longer(self) -> None:
        assert verdict(self.long(1.08)).answer == "healthy"

    def test_a_slow_rank_comes_before(self) -> None:
        given = self.long(1.3)
        given.work[:, 3] *= 1.5
        found = verdict(given)
        assert (found.answer, [culprit.ranks for culprit in found.culprits]) == ("slow rank", [(3,)])
        assert found.stage is not None


class TestDocuments:
    def uneven(self, by: float) -> Accounts:
        """One replica has so much more attention."""
        return accounts(work={(rank, Work.ATTENTION): by for rank in range(4, 8)})

    def test_that_cost_much_are_the_answer(self) -> None:
        found = verdict(self.uneven(3.0))
        assert (found.answer, found.culprits) == ("documents", ())
        assert found.documents == pytest.approx(3.0 / 2.0)
        # Attention of all would be the mean: 0.6 instead of 0.9 s.
        assert found.documents_gain == pytest.approx(0.3)
        assert [what.what for what in found.what_ifs] == ["documents"]

    def test_that_cost_little_are_not(self) -> None:
        found = verdict(self.uneven(1.5))
        assert found.answer == "healthy"
        assert found.documents_gain == pytest.approx(0.075)


class TestNobody:
    def test_without_peers(self) -> None:
        found = verdict(accounts(Grid(pp=2)))
        assert (found.answer, found.reason) == ("no single culprit", "no rank has peers that do the same")

    def test_alone(self) -> None:
        given = accounts()
        for column in (given.work, given.host, given.transfer, given.wait):
            column[:, 1:] = np.nan
        found = verdict(given)
        assert found.answer == "no single culprit"
        assert found.reason == "one rank of 8 has a trace, and nobody to be compared with"

    def test_all_wait_for_each_other(self) -> None:
        found = verdict(accounts(waits=0.3))
        assert found.answer == "no single culprit"
        assert "none of them stands out" in found.reason
        assert verdict(accounts(waits=0.1)).answer == "healthy"

    def test_who_has_no_trace_may_be_waited_for(self) -> None:
        found = verdict(accounts(), unseen=Unseen((9, 10), 0.3))
        assert found.answer == "no single culprit"
        assert found.reason == "ranks 9-10, of which there is no trace to use, held up others for 20% of the step"
        assert verdict(accounts(), unseen=Unseen((9, 10), 0.05)).answer == "healthy"
        assert verdict(accounts(work=factors(2, *Work)), unseen=Unseen((9, 10), 0.3)).answer == "slow rank"

    def test_rotating(self) -> None:
        given = accounts(steps=4)
        for step, rank in enumerate((2, 5, 0, 7)):
            given.work[step, rank] *= 1.5
        found = verdict(given)
        assert (found.answer, found.rotating) == ("rotating", ((1, 2), (2, 5), (3, 0), (4, 7)))
        assert found.culprits == ()


class TestReplayed:
    """dp 4 without a pipeline: a step takes what its slowest rank computes, and pauses."""

    GRID = Grid(dp=4)

    def replay(self, given: Accounts) -> Replay:
        own = given.work[0].sum(axis=1)
        pauses = given.host[0].sum(axis=1)
        computed = {rank: [Computed(Action(Kind.FORWARD, 0, 0), float(own[rank]), float(pauses[rank]), 0.0)]
                    for rank in range(4)}  # fmt: skip
        made = make_replay(self.GRID, 1, float(max(own + pauses)), computed, {})
        assert made is not None
        return made

    def test_gain_is_up_to_the_next(self) -> None:
        given = accounts(self.GRID, work=factors(2, *Work, by=1.4) | factors(0, *Work, by=1.1))
        found = verdict(given, replays=[self.replay(given)])
        assert [culprit.ranks for culprit in found.culprits] == [(2,), (0,)]
        # 1.4 s with both, 1.1 once the first is mended, then 1.
        assert [culprit.gain for culprit in found.culprits] == pytest.approx([0.3, 0.1])
        assert found.gain == pytest.approx(0.4)
        assert found.replay_error == pytest.approx(0)

    def test_of_a_late_host(self) -> None:
        given = accounts(self.GRID, host={(1, "loader"): 0.25})
        found = verdict(given, replays=[self.replay(given)])
        assert found.gain == pytest.approx(0.25)

    def test_of_each_class_of_work(self) -> None:
        given = accounts(self.GRID, work=factors(1, *Work, by=1.5))
        found = verdict(given, replays=[self.replay(given)])
        gains = {what.what: what.gain for what in found.what_ifs}
        assert gains == pytest.approx({"gemm": 0.3, "attention": 0.15, "memory": 0.05})
        assert [what.what for what in found.what_ifs] == ["gemm", "attention", "memory"]

    def test_one_that_costs_nothing_is_still_named_if_it_stands_out(self) -> None:
        """Not so one that stands out by little: rank 4 is what a step waits for once the first is mended."""
        grid = Grid(pp=2, dp=3)
        lists = {0: Action(Kind.FORWARD, 0, 0), 1: Action(Kind.FORWARD, 1, 0)}

        def found_with(by: float) -> list[tuple[int, ...]]:
            given = accounts(grid, work=factors(0, *Work, by=2.0) | factors(3, *Work, by=by))
            own = given.work[0].sum(axis=1)
            computed = {rank: [Computed(lists[rank % 2], float(own[rank]), 0.0, 0.0)] for rank in range(6)}
            slowed = {4: 2.0}
            computed = {rank: [row._replace(own=row.own * slowed.get(rank, 1.0))] for rank, (row,) in computed.items()}
            made = make_replay(grid, 1, 3.0, computed, {})
            assert made is not None
            return [culprit.ranks for culprit in verdict(given, replays=[made]).culprits]

        assert found_with(1.5) == [(0,), (3,)]
        assert found_with(1.04) == [(0,)]


def test_accounts_are_not_changed() -> None:
    given = accounts(work=factors(5, *Work))
    before = dataclasses.replace(given, work=given.work.copy(), host=given.host.copy(), wait=given.wait.copy())
    verdict(given)
    for name in ("work", "host", "wait"):
        np.testing.assert_array_equal(getattr(given, name), getattr(before, name))
