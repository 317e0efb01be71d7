"""Playing a layout against hand computation, the closed form, and itself in full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fourfold.planner.jobs import Jobs, Order, Recompute, Split
from fourfold.planner.machines.cluster import cluster
from fourfold.planner.memory.peak import peak_memory
from fourfold.planner.search import exact
from fourfold.planner.search.exact import Programs, micro_batches_to_play, play_exactly, schedule_of, stages_of
from fourfold.planner.search.judge import job_of
from fourfold.planner.search.problem import Problem
from fourfold.planner.search.space import space
from fourfold.planner.timing.step import parts, step_time

B70 = Problem.of(model="llama3-70b", cluster=cluster("h100", 128), seq_len=8192, sequences=512)
B405 = Problem.of(model="llama3-405b", cluster=cluster("h100", 16_384), seq_len=8192, sequences=2048)


def job(problem: Problem = B70, **layout: Any) -> Jobs:
    plain = {"tp": 8, "cp": 1, "pp": 4, "dp": 4, "v": 1, "nc": 4, "micro_batch": 1}
    plain |= {"order": Order.ONE_F_ONE_B, "split": Split.EVEN, "zero": 1, "recompute": Recompute.NONE}
    return problem.jobs(**(plain | layout))


class TestZeroBubble:
    def test_two_ranks_two_micro_batches(self) -> None:
        """Both ranks put what they can behind the gradient that the other waits for: on one rank F0 F1 . I0 W0 . I1 W1,
        on the other F0 I0 F1 I1 W0 W1. The way of the last gradient, and the first rank's last W, end the step."""
        one = job(B70.replace(sequences=16), pp=2, dp=8, order=Order.ZB_H1, nc=2)
        p = parts(one, B70.stack)
        product = 40 * p.late * p.layer_backward
        first = 40 * p.layer_forward + p.embedding_forward
        last = 40 * p.layer_forward + p.head_forward
        # The head's backward is its forward and one product more, which is put off; the embedding's all is.
        last_input = 40 * p.layer_backward - product + p.head_forward
        first_input = 40 * p.layer_backward - product
        way = first + p.message + 2 * (last + last_input) + p.message + first_input + product + p.embedding_backward
        once = p.gather_exposed + p.reduce_exposed + p.optimizer + p.fixed
        found = play_exactly(one, B70.stack)
        assert found.seconds == pytest.approx(float(p.inflation * (way + once)), rel=1e-12)

    @pytest.mark.parametrize(("pp", "m"), [(4, 8), (8, 16), (8, 64)])
    def test_it_is_faster_than_1f1b_and_holds_more_on_the_last_rank(self, pp: int, m: int) -> None:
        problem = B70.replace(sequences=16 // pp * m)
        usual, split = (
            play_exactly(job(problem, pp=pp, dp=16 // pp, nc=pp, order=order), B70.stack)
            for order in (Order.ONE_F_ONE_B, Order.ZB_H1)
        )
        assert 0.8 < split.seconds / usual.seconds < 0.97
        assert split.bubble_over_compute < 0.8 * usual.bubble_over_compute
        assert [rank.in_flight for rank in usual.ranks] == list(range(pp, 0, -1))
        assert [rank.in_flight for rank in split.ranks] == [pp] * pp
        assert split.ranks[0].total == usual.ranks[0].total
        assert split.ranks[-1].activations == pytest.approx(pp * usual.ranks[-1].activations)

    def test_closed_form(self) -> None:
        """As below, for layouts that only somebody who asks for them gets."""
        asked = B70.replace(limits={"schedule": ("zb-h1",)})
        for one in sample(asked, 15, 2000):
            found = play_exactly(one, asked.stack)
            assert float(step_time(one, asked.stack).seconds) == pytest.approx(found.seconds, rel=0.06)
            assert found.memory_bytes <= float(peak_memory(one, asked.stack).allocated) * (1 + 1e-9)


class TestByHand:
    def test_without_a_pipeline(self) -> None:
        """32 micro-batches of 80 layers, embedding and head, one after another."""
        one = job(pp=1, dp=16, nc=1)
        p = parts(one, B70.stack)
        micro_batch = 80 * (p.layer_forward + p.layer_backward)
        micro_batch += p.embedding_forward + p.embedding_backward + p.head_forward + p.head_backward
        once = p.gather_exposed + p.reduce_exposed + p.optimizer + p.fixed
        found = play_exactly(one, B70.stack)
        assert found.seconds == pytest.approx(float(p.inflation * (32 * micro_batch + once)), rel=1e-12)
        assert found.bubble_over_compute == pytest.approx(0, abs=1e-12)
        assert found.worst_rank == 0

    def test_two_ranks_one_micro_batch(self) -> None:
        """Forward through both, backward through both, and a message each way."""
        one = job(B70.replace(sequences=8), pp=2, dp=8, order=Order.AFAB, nc=1)
        p = parts(one, B70.stack)
        way = 80 * (p.layer_forward + p.layer_backward) + 2 * p.message
        way += p.embedding_forward + p.embedding_backward + p.head_forward + p.head_backward
        once = p.gather_exposed + p.reduce_exposed + p.optimizer + p.fixed
        found = play_exactly(one, B70.stack)
        assert found.seconds == pytest.approx(float(p.inflation * (way + once)), rel=1e-12)

    def test_layers_of_the_paper(self) -> None:
        """126 layers and two light ends on pp = 16, v = 8: nothing but the embedding on stage 0, the head on 127."""
        paper = job(B405, pp=16, dp=128, v=8, order=Order.AFAB, nc=16, split=Split.ENDS_LIGHT, zero=2)
        counts = [len(stage.layers) for stage in stages_of(paper)]
        assert counts == [0, *[1] * 126, 0]
        assert schedule_of(paper).kind == "afab"
        found = play_exactly(paper, B405.stack)
        assert len(found.ranks) == 16
        # facts.md 2.3: about 12 % by the formula, and more by the light ends and the messages.
        assert 0.117 < found.bubble_over_compute < 0.2

    def test_given_split(self) -> None:
        split = (19, 21, 21, 19)
        found = play_exactly(job(), B70.stack, split=split)
        assert tuple(len(stage.layers) for stage in found.stages) == split
        assert found.seconds != play_exactly(job(), B70.stack).seconds


def sample(problem: Problem, number: int, most: int, **where: Any) -> list[Jobs]:
    """Some layouts of a problem with a pipeline, of at most so many (micro-batch, stage) pairs."""
    layouts = space(problem)
    c = layouts.columns
    work = c["pp"] * c["v"] * (problem.sequences // c["dp"] // c["micro_batch"])
    keep = (c["pp"] > 1) & (c["tp"] <= 8) & (work <= most) & (c["recompute"] == Recompute.NONE)
    for name, values in where.items():
        keep &= np.isin(c[name], values)
    chosen = np.random.default_rng(0).choice(np.flatnonzero(keep), number, replace=False)
    return [job_of(problem, layouts, int(row)) for row in chosen]


@pytest.mark.parametrize("problem", [B70, B405], ids=["70B", "405B"])
def test_closed_form(problem: Problem) -> None:
    """The closed form against playing, on layouts drawn from the space.

    What it does not see: how far messages are hidden by the order of work, and who waits for a heavier stage when.
    """
    errors = []
    for one in sample(problem, 60, 3000):
        found = play_exactly(one, problem.stack)
        errors.append(float(step_time(one, problem.stack).seconds) / found.seconds - 1)
    print(f"median {np.median(np.abs(errors)):.4f}, from {min(errors):.4f} to {max(errors):.4f}")
    assert np.median(np.abs(errors)) < 0.01
    assert np.quantile(np.abs(errors), 0.95) < 0.05
    assert np.max(np.abs(errors)) < 0.10


def test_few_rounds_show_what_many_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of schedules with many rounds the first four are played. In full they take as long, and hold as much."""
    orders = (Order.ONE_F_ONE_B, Order.INTERLEAVED, Order.FLEXIBLE)
    some = [one for one in sample(B70, 60, 5000, order=orders) if micro_batches_to_play(one) < int(one.micro_batches)]
    assert len(some) >= 5
    short = [play_exactly(one, B70.stack) for one in some]
    monkeypatch.setattr(exact, "MOST_ACTIONS", 1 << 40)
    for one, few in zip(some, short, strict=True):
        full = play_exactly(one, B70.stack)
        assert few.seconds == pytest.approx(full.seconds, rel=2e-3)
        assert few.bubble_over_compute == pytest.approx(full.bubble_over_compute, abs=2e-3)
        assert [rank.total for rank in few.ranks] == pytest.approx([rank.total for rank in full.ranks], rel=2e-3)


@pytest.mark.parametrize(("pp", "m", "nc", "zero"), [(4, 157, 4, 1), (8, 154, 8, 1)])
def test_rounds_of_two_sizes(monkeypatch: pytest.MonkeyPatch, pp: int, m: int, nc: int, zero: int) -> None:
    """A round of 5 and 38 of 4, and 2 of 9 with 17 of 8: the first of the smaller ones is none like the others."""
    problem = B70.replace(sequences=2 * m, cluster=cluster("h100", pp * 16))
    one = job(problem, pp=pp, dp=2, v=3, nc=nc, order=Order.INTERLEAVED, zero=zero)
    assert micro_batches_to_play(one) < m / 2
    few = play_exactly(one, B70.stack)
    monkeypatch.setattr(exact, "MOST_ACTIONS", 1 << 40)
    assert few.seconds == pytest.approx(play_exactly(one, B70.stack).seconds, rel=2e-4)


def test_schedules_are_made_once() -> None:
    programs = Programs()
    for recompute in (Recompute.NONE, Recompute.FULL):
        play_exactly(job(recompute=recompute), B70.stack, programs=programs)
    assert len(programs.made) == 1
    assert programs.actions == 2 * len(next(iter(programs.made.values())).actions)
