"""Chains of waiting, against what was worked out by hand, and on jobs that another program played."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fourfold.debugger.reading.trace import Call, RankTrace
from fourfold.debugger.slow import diagnose_traces
from fourfold.debugger.slow.chain import COMPUTING, MOVING, UNSEEN, Chains, Hop
from fourfold.debugger.slow.clocks import align
from fourfold.debugger.slow.idle import cut
from fourfold.debugger.slow.meetings import meet
from fourfold.debugger.slow.places import Places
from tests.debugger import jobs
from tests.debugger.hand import pipeline, replicas

STEP = 7


def chains(traces: Sequence[RankTrace]) -> Chains:
    ranks = [cut(trace) for trace in traces]
    meetings = meet(ranks, Places(traces[0].grid))
    return Chains(ranks, meetings, align(ranks, meetings), STEP)


def ms(seconds: float) -> float:
    return pytest.approx(seconds / 1e3, abs=1e-9)


@pytest.mark.parametrize("skew", [0, 60])
def test_a_wait_is_followed_to_the_rank_that_computes(skew: int) -> None:
    found = chains(pipeline(skew=skew))
    assert [found.waiting(rank) for rank in range(4)] == [ms(30 + 10), ms(10), ms(41), ms(41)]
    tp, last = found.of_rank(0)
    assert (tp.hop, tp.seconds, tp.doing, tp.kinds) == (
        Hop(0, 1, "tp"),
        ms(30),
        {COMPUTING: ms(30)},
        (Call.ALL_REDUCE,),
    )
    assert (last.hop.dimension, last.seconds) == ("world", ms(10))
    # Rank 2 waits 41 ms for rank 0, which computes 10 of them, reduces 1, and waits 30 for rank 1.
    (message,) = found.of_rank(2)
    assert (message.hop, message.seconds, message.kinds) == (Hop(2, 0, "pp"), ms(41), (Call.RECV,))
    assert message.doing == {COMPUTING: ms(10), MOVING: ms(1)}
    (behind,) = message.behind
    assert (behind.hop, behind.seconds, behind.doing) == (Hop(0, 1, "tp"), ms(30), {COMPUTING: ms(30)})
    assert message.ends() == {(0, COMPUTING): ms(10), (0, MOVING): ms(1), (1, COMPUTING): ms(30)}
    assert message.because_of({(1, COMPUTING)}) == ms(30)
    assert [wait.hop for wait in message.path()] == [Hop(2, 0, "pp"), Hop(0, 1, "tp")]
    assert [wait.hop for wait in message.path({(0, COMPUTING)})] == [Hop(2, 0, "pp")]


def test_a_pause_of_the_host_is_named() -> None:
    found = chains(pipeline(garbage=True))
    tp, _ = found.of_rank(0)
    assert (tp.seconds, tp.doing) == (ms(30), {"garbage": ms(30)})
    (message,) = found.of_rank(2)
    assert message.ends() == {(0, COMPUTING): ms(10), (0, MOVING): ms(1), (1, "garbage"): ms(30)}


def test_who_computes_while_it_is_waited_for_need_not_be_the_cause() -> None:
    # Rank 0 computes all the while, but no longer than rank 2 did: it is late because it waited before.
    found = chains(replicas())
    (wait,) = found.of_rank(2)
    assert (wait.hop, wait.seconds, wait.doing) == (Hop(2, 0, "fsdp"), ms(30), {})
    assert wait.ends() == {(1, COMPUTING): ms(30)}
    (other,) = found.of_rank(3)
    assert (other.hop, other.doing) == (Hop(3, 1, "fsdp"), {COMPUTING: ms(30)})


def test_a_rank_without_a_trace() -> None:
    found = chains([trace for trace in pipeline() if trace.rank != 0])
    (message,) = found.of_rank(2)
    assert (message.hop, message.doing, message.behind) == (Hop(2, 0, "pp"), {UNSEEN: ms(41)}, ())


@pytest.mark.parametrize("slow", range(8))
def test_most_waiting_ends_at_the_slow_rank(slow: int, tmp_path: Path) -> None:
    job = jobs.Job(tp=2, pp=2, dp=2, steps=2, slow={slow: 2.0})
    found = diagnose_traces(jobs.write(job, tmp_path, jobs.Style(skew_us={slow: 30_000.0})), workers=1)
    assert found.meetings is not None
    assert found.clocks is not None
    for step in found.steps:
        followed = Chains(found.traces, found.meetings, found.clocks, step)
        ends: dict[tuple[int, str], float] = {}
        for rank in followed.ranks:
            waits = followed.of_rank(rank)
            # Nothing is lost, and nothing is counted twice; the accounts, which follow nobody, agree.
            waited = found.accounts.wait[found.steps.index(step), rank].sum()
            assert sum(wait.seconds for wait in waits) == pytest.approx(waited)
            assert sum(sum(wait.ends().values()) for wait in waits) == pytest.approx(waited)
            for wait in waits:
                assert wait.seconds == pytest.approx(sum(wait.doing.values()) + sum(w.seconds for w in wait.behind))
                for end, seconds in wait.ends().items():
                    ends[end] = ends.get(end, 0.0) + seconds
        assert max(ends, key=lambda end: ends[end]) == (slow, COMPUTING)


def test_a_step_that_a_rank_has_not_got() -> None:
    ranks = [cut(trace) for trace in pipeline()]
    meetings = meet(ranks, Places(ranks[0].trace.grid))
    assert Chains(ranks, meetings, align(ranks, meetings), 8).ranks == ()


def test_stretches_are_apart_and_in_order() -> None:
    found = chains(pipeline(garbage=True))
    for rank in found.ranks:
        what = found.stretches(rank)
        assert np.all(what.start[1:] >= what.end[:-1])
        assert np.all(what.end > what.start)
        begin, end = found.window(rank)
        assert begin <= what.start[0]
        assert what.end[-1] <= end
    assert found.stretches(1).pause(0) == "garbage"
