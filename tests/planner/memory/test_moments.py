"""Counts of what is alive: against the actions of the schedule itself, at every moment of every rank."""

from __future__ import annotations

import numpy as np
import pytest

from fourfold.layout import generate, partition
from fourfold.layout.actions import Action, Kind
from fourfold.planner.jobs import ORDER_NAMES, Order, Split
from fourfold.planner.memory import moments
from fourfold.planner.memory.moments import Shape, moments_of
from fourfold.planner.memory.saved import load_rules
from tests.planner.jobs_of_tests import job

SHAPES = [
    # layers, pp, v, order, split, nc, zero, micro-batches
    (16, 4, 1, Order.ONE_F_ONE_B, Split.EVEN, 4, 1, 6),
    (14, 4, 1, Order.AFAB, Split.ENDS_LIGHT, 4, 1, 3),
    (11, 2, 3, Order.INTERLEAVED, Split.EVEN, 2, 1, 8),
    (13, 2, 3, Order.INTERLEAVED, Split.EVEN, 2, 2, 9),  # rounds of 3, 2, 2, 2
    (26, 4, 7, Order.FLEXIBLE, Split.ENDS_LIGHT, 6, 1, 12),
    (26, 4, 7, Order.FLEXIBLE, Split.EVEN, 8, 3, 17),  # rounds of 6, 6, 5
    (18, 3, 2, Order.FLEXIBLE, Split.ENDS_LIGHT, 4, 2, 11),
    (9, 3, 2, Order.FLEXIBLE, Split.EVEN, 2, 1, 6),  # nc < pp: all forwards first
    (8, 1, 1, Order.ONE_F_ONE_B, Split.EVEN, 1, 1, 5),
    (30, 4, 4, Order.INTERLEAVED, Split.EVEN, 4, 2, 16),
]


@pytest.mark.parametrize("case", SHAPES)
def test_counts_are_those_of_the_schedule(case: tuple[int, ...]) -> None:
    layers, pp, v, order, split, nc, zero, m = case
    name = ORDER_NAMES[Order(order)]
    schedule = generate(
        pp=pp, v=v, num_micro_batches=m, kind=name, nc=nc if order == Order.FLEXIBLE else None, zero=zero
    )
    stages = partition(layers, pp=pp, v=v, split="ends_light" if split == Split.ENDS_LIGHT else "even")
    shape = Shape(*(np.array([value]) for value in case))
    flow = moments._flow(shape)
    checked = set()
    for rank in moments._ranks(shape):
        pp_rank = int(rank.rank[0])
        checked.add(pp_rank)
        live = moments._in_flight(shape, flow, rank)
        assert live[0] == schedule.in_flight_peak[pp_rank]
        done = np.arange(m * v, dtype=np.float64)[:, None]
        counts = moments._counts(shape, flow, rank, live, done)
        computed = [a for a in schedule.actions[pp_rank] if a.kind in (Kind.FORWARD, Kind.BACKWARD)]
        events = [a for a in schedule.actions[pp_rank] if a.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE)]
        for i, backward in enumerate(a for a in computed if a.kind is Kind.BACKWARD):
            here = computed[: computed.index(backward)]
            alive = [a for a in here if a.kind is Kind.FORWARD and Action(Kind.BACKWARD, *a[1:]) not in here]
            assert counts.chunks[i, 0] == len(alive)
            assert counts.layers[i, 0] == sum(len(stages[a.stage].layers) for a in alive), (pp_rank, i)
            assert counts.heads[i, 0] == sum(stages[a.stage].head for a in alive)
            stage = stages[backward.stage]
            assert np.broadcast_to(counts.own, done.shape)[i, 0] == len(stage.layers)
            assert counts.at_head[i, 0] == stage.head
            assert counts.at_embedding[i, 0] == stage.embedding
            begun = {a.stage for a in here if a.kind is Kind.BACKWARD} | {backward.stage}
            assert counts.begun[i, 0] == len(begun)
            before = events[: events.index(backward)]
            assert counts.ended[i, 0] == len({a.stage for a in before if a.kind is Kind.REDUCE})
            if zero < 3:
                after = events[events.index(backward) + 1 :]
                assert counts.reduces[i, 0] == (bool(after) and after[0] == (Kind.REDUCE, backward.stage, -1))
            last_forward = here[-1] if here and here[-1].kind is Kind.FORWARD else None
            if last_forward is not None and pp_rank == pp - 1 and counts.after_head[i, 0]:
                assert stages[last_forward.stage].head
    assert {0, pp - 1} <= checked


def test_moments_of_equal_shapes_are_worked_out_once() -> None:
    jobs = job("8b", pp=np.array([4, 4, 2, 4]), dp=np.array([1, 1, 2, 1]), sequences=8, tp=np.array([1, 8, 1, 2]))
    found = moments_of(jobs, load_rules("standard"))
    assert found.job.tolist() == sorted(found.job)
    assert set(found.job) == {0, 1, 2, 3}
    first, second = (
        [column[found.job == index].tolist() for column in (*found.rank, *found.counts)] for index in (0, 1)
    )
    assert first == second


def test_the_fullest_moment_is_one_of_all() -> None:
    jobs = job("8b", pp=4, v=2, order=Order.INTERLEAVED, sequences=16)
    every, fullest = (moments_of(jobs, load_rules("standard"), fullest_only=only) for only in (False, True))
    assert len(fullest.job) <= len(every.job)
    assert fullest.counts.chunks.max() == every.counts.chunks.max()


def test_shapes_of_huge_jobs_stay_apart() -> None:
    """Numbers whose product is beyond 64 bits: 4M micro-batches, 126 virtual stages, in one table."""
    columns = {
        "pp": np.array([1, 126, 1, 126]),
        "v": np.array([126, 1, 126, 1]),
        "nc": np.array([1 << 22, 126, 1 << 22, 127]),
        "order": np.array([3, 1, 3, 3]),
        "zero": np.array([3, 0, 3, 1]),
    }
    jobs = job("405b", seq_len=64, sequences=np.array([1 << 22, 1 << 22, 1 << 22, 1 << 21]), **columns)
    shapes, shape_of = moments._shapes(jobs)
    assert len(set(shape_of.tolist())) == 3
    assert shape_of[0] == shape_of[2]
    for name, column in (columns | {"micro_batches": jobs.micro_batches}).items():
        assert getattr(shapes, name)[shape_of].tolist() == column.tolist(), name
