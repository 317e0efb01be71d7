"""What ranks did, added up: against jobs worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from fourfold.debugger.reading.trace import RankTrace, Steps, Work
from fourfold.debugger.slow.accounts import (
    AWAITED,
    HOST,
    Accounts,
    account,
    common_steps,
    incomplete,
    sharing_processors,
)
from fourfold.debugger.slow.idle import RankSteps, cut
from fourfold.debugger.slow.meetings import meet
from fourfold.debugger.slow.places import Places
from fourfold.layout import Grid
from tests.debugger.hand import MS, pipeline, replicas, trace


def accounted(traces: Sequence[RankTrace], steps: tuple[int, ...] = (7,)) -> Accounts:
    ranks = [cut(one) for one in traces]
    grid = traces[0].grid
    assert grid is not None
    return account(ranks, meet(ranks, Places(grid)), grid, steps)


def ms(column: np.ndarray, names: Sequence[str] = AWAITED) -> dict[str, float]:
    """What is not 0, in milliseconds."""
    return {name: round(1e3 * value, 6) for name, value in zip(names, column.tolist(), strict=True) if value}


@pytest.mark.parametrize("skew", [0, 60])
def test_a_pipeline(skew: int) -> None:
    """`hand.pipeline`: rank 1 computes 40 ms, rank 0 10; then 10 on the second stage, and 2 ms for all in the end."""
    found = accounted(pipeline(skew=skew))
    assert (1e3 * found.work[0, :, Work.GEMM]).tolist() == pytest.approx([10, 40, 10, 10])
    assert ms(found.wait[0, 0]) == {"tp": 30, "end": 10}
    assert ms(found.wait[0, 1]) == {"end": 10}
    assert ms(found.wait[0, 2]) == {"pp": 41}
    assert ms(found.transfer[0, 0]) == {"tp": 1, "end": 2}
    assert ms(found.transfer[0, 2]) == {"pp": 1, "end": 2}
    # A send holds up nobody: rank 0 posts it at 41, and comes to the end at 42.
    assert ms(found.host[0, 0], HOST) == {"launch": 1}
    assert found.step_seconds.tolist() == pytest.approx([0.054])
    np.testing.assert_allclose(found.own[0], [0.011, 0.041, 0.010, 0.010])


def test_garbage() -> None:
    found = accounted(pipeline(garbage=True))
    assert ms(found.host[0, 1], HOST) == {"garbage": 30, "launch": 1}
    assert ms(found.wait[0, 0]) == {"tp": 30, "end": 10}


def test_replicas() -> None:
    found = accounted(replicas())
    assert [ms(found.wait[0, rank]) for rank in range(4)] == [{"tp": 30}, {}, {"dp": 30}, {"dp": 30}]
    assert [ms(found.transfer[0, rank]) for rank in range(4)] == [{"dp": 1}] * 4


def test_a_rank_without_a_trace_is_not_known() -> None:
    found = accounted([one for one in pipeline() if one.rank != 3])
    assert found.present.tolist() == [True, True, True, False]
    for column in (found.work, found.host, found.transfer, found.wait):
        assert np.isnan(column[:, 3]).all()
        assert not np.isnan(column[:, :3]).any()


def test_a_step_that_a_rank_has_not_got() -> None:
    found = accounted(pipeline(), (7, 8))
    assert np.isnan(found.work[1]).all()
    assert not np.isnan(found.work[0]).any()


def numbered(rank: int, numbers: Sequence[int], *, calls: Sequence[int] = ()) -> RankSteps:
    """A rank with some steps, and so many calls in each."""
    one = trace(rank, Grid(dp=4), end=10, works=[])
    times = np.arange(len(numbers)) * MS
    step = np.repeat(np.arange(len(calls)), calls).astype(np.int32)
    return cut(
        dataclasses.replace(
            one,
            steps=Steps(np.array(numbers), times, times + MS),
            calls=dataclasses.replace(one.calls, step=step, **_columns(len(step))),
        )
    )


def _columns(number: int) -> dict[str, np.ndarray]:
    zeros = np.zeros(number, dtype=np.int64)
    names = ("start", "end", "kind", "group", "sequence", "elements", "itemsize", "peer", "stream", "launched")
    return dict.fromkeys(names, zeros) | {"blocks": zeros.astype(bool)}


class TestCommonSteps:
    def test_those_that_most_have(self) -> None:
        ranks = [numbered(0, [3, 4, 5]), numbered(1, [4, 5, 6]), numbered(2, [4, 5]), numbered(3, [5, 4, 9])]
        assert common_steps(ranks, None) == (4, 5)
        assert common_steps(ranks, (5, 9)) == (5,)

    def test_where_one_rank_has_fewer(self) -> None:
        ranks = [numbered(0, [1, 2, 3]), numbered(1, [1, 2, 3]), numbered(2, [1])]
        assert common_steps(ranks, (2, 3)) == (2, 3)

    def test_none(self) -> None:
        ranks = [numbered(0, [3, 4]), numbered(1, [3, 4])]
        with pytest.raises(ValueError, match="--steps 5-7: no such step in the traces; they have 3 to 4"):
            common_steps(ranks, (5, 7))
        with pytest.raises(ValueError, match="no such step in the traces; they have none"):
            common_steps([numbered(0, [])], None)

    def test_nothing_in_common(self) -> None:
        ranks = [numbered(0, [3, 5]), numbered(1, [4, 5]), numbered(2, [])]
        with pytest.raises(ValueError, match="in common: rank 0 has step 3, rank 1 has step 4"):
            common_steps(ranks, (3, 4))
        with pytest.raises(ValueError, match=r"--steps 4-4: .* in common: rank 1 has step 4"):
            common_steps(ranks, (4, 4))
        assert common_steps(ranks, None) == (5,)
        with pytest.raises(ValueError, match=r"^the traces have no .* in common: rank 0 has step 3, rank 1 has step 4"):
            common_steps([numbered(0, [3]), numbered(1, [4])], None)


def test_steps_that_are_not_whole() -> None:
    """Of damaged files: fewer than nine tenths of the calls that its peers have."""
    ranks = [numbered(rank, [1, 2], calls=(20, 20)) for rank in range(3)]
    ranks.append(numbered(3, [1, 2], calls=(20, 17)))
    assert incomplete(ranks, Grid(dp=4), (1, 2)) == {3: (2,)}
    ranks[3] = numbered(3, [1, 2], calls=(20, 18))
    assert incomplete(ranks, Grid(dp=4), (1, 2)) == {}
    assert incomplete(ranks, Grid(dp=4), (1,)) == {}


class TestProcessors:
    """More ranks than processors: all are interrupted."""

    def made(self, busy: Sequence[float], launch: Sequence[float]) -> Accounts:
        work = np.zeros((1, len(busy), len(Work)))
        work[0, :, Work.GEMM], work[0, :, Work.MEMORY] = 0.75 * np.array(busy), 0.25 * np.array(busy)
        host = np.zeros((1, len(busy), len(HOST)))
        host[0, :, HOST.index("launch")] = launch
        rest = np.zeros((1, len(busy), len(AWAITED)))
        return Accounts(Grid(dp=len(busy)), (1,), work, host, rest, rest)

    def test_interruptions_that_all_have_lengthen_computing(self) -> None:
        found = sharing_processors(self.made([1.0, 2.0, 1.0, 1.0], [0.5, 1.0, 0.5, 0.9]))
        np.testing.assert_allclose(found.work[0].sum(axis=1), [1.5, 3.0, 1.5, 1.5])
        np.testing.assert_allclose(found.host[0, :, HOST.index("launch")], [0, 0, 0, 0.4], atol=1e-12)
        np.testing.assert_allclose(found.work[0, :, Work.GEMM], 0.75 * found.work[0].sum(axis=1))
        assert found.on_processor

    def test_what_the_processor_did_is_computing_and_the_rest_is_not(self) -> None:
        """Rank 1 was stopped for half of the time in which it seemed to compute."""
        given = self.made([1.0, 2.0, 1.0, 1.0], [0.0] * 4)
        found = sharing_processors(given, np.array([[1.0, 1.0, 1.0, np.nan]]))
        np.testing.assert_allclose(found.work[0].sum(axis=1), [1.0] * 4)
        np.testing.assert_allclose(found.host[0, :, HOST.index("launch")], [0, 1, 0, 0], atol=1e-12)

    def test_nothing_is_lost(self) -> None:
        random = np.random.default_rng(0)
        given = self.made(random.uniform(0, 2, 8).tolist(), random.uniform(0, 1, 8).tolist())
        given.work[0, 2] = 0
        given.work[0, 5], given.host[0, 5] = np.nan, np.nan
        for processor in (None, random.uniform(0, 3, (1, 8))):
            found = sharing_processors(given, processor)
            np.testing.assert_allclose(found.own, given.own)
            assert not (found.work < 0).any()
            assert not (found.host < -1e-12).any()
