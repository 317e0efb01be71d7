"""Memory over time: against the planner to the byte, and against events followed one by one, by definition."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fourfold.layout import Action, Kind, Schedule, Stage, compile_program, generate, partition
from fourfold.layout.actions import ENDS
from fourfold.planner.jobs import Jobs, Order, Split
from fourfold.planner.machines.chips import GIB
from fourfold.planner.memory.peak import PARTS, RESERVED, SavesMemory
from fourfold.planner.memory.walk import live_bytes, walk, walk_row
from fourfold.planner.run_memory import Trainer, held_of, job_of, run_memory
from fourfold.planner.search.exact import Exact, play_exactly, schedule_of, stages_of
from fourfold.planner.timing.stack import load_stack
from fourfold.recipe import check, from_table
from fourfold.simulator.engine import simulate
from fourfold.simulator.live import (
    Curve,
    StepMemory,
    compared,
    findings,
    step_memory,
    timeline_of,
    verdict,
    why,
)
from fourfold.simulator.scenario import scenario
from tests.planner.jobs_of_tests import job
from tests.planner.memory.test_peak import Software, any_job

LAYOUTS = 40  # random ones
PERSISTENT = ("weights", "gradients", "optimizer", "activations", "logits")


def at(curve: Curve, seconds: float) -> np.ndarray:
    """Bytes by part at a time at which nothing changes."""
    return curve.bytes[:, np.searchsorted(curve.times, seconds) - 1]


# The planner, to the byte


def test_peaks_are_the_planners_to_the_byte() -> None:
    """Random layouts of all schedules, ZeRO modes and saved sets: the fullest moment of every curve is the peak that
    the planner says, and everything is over at the end."""
    draw = np.random.default_rng(5)
    for number in range(LAYOUTS):
        saved_set, jobs = any_job(draw)
        software = Software(("standard", "meta")[number % 2] if number % 4 else saved_set)
        schedule = schedule_of(jobs, messages=False)
        timeline = compile_program(schedule).play(forward=1.5, backward=2.5, message=0.1)
        memory = step_memory(jobs, timeline, stages_of(jobs), software)
        assert memory.peaks == walk(jobs, schedule, stages_of(jobs), timeline, software)
        for peak in memory.peaks:
            curve = memory.curve(peak.pp_rank)
            total = curve.bytes.sum(axis=0)
            assert total.max() == peak.total
            assert curve.times[total.argmax()] <= peak.seconds
            assert (np.diff(curve.times) >= 0).all()
            assert curve.bytes[PARTS.index("activations"), -1] == pytest.approx(0, abs=1)
            assert curve.bytes.min() > -1


@pytest.mark.parametrize("order", [Order.AFAB, Order.ONE_F_ONE_B, Order.INTERLEAVED, Order.FLEXIBLE])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_planner_and_the_simulator_play_the_same(order: Order, zero: int) -> None:
    stack = load_stack("standard")
    v = 1 if order is Order.ONE_F_ONE_B else 2
    jobs = job("8b", pp=4, v=v, dp=2, sequences=24, nc=6, order=order, zero=zero)
    exact = play_exactly(jobs, stack)
    memory = memory_of_layout(jobs, exact, stack)
    assert memory.peaks == exact.ranks
    assert memory.worst_rank == exact.worst_rank
    assert memory.capacity == float(jobs.hbm_bytes)
    assert max(rank.total for rank in memory.peaks) == walk_row(jobs, stack).max()


def test_the_engines_times_give_the_same_bytes() -> None:
    """Its own seconds, in which ranks also wait for FSDP and for messages."""
    stack = load_stack("meta")
    jobs = job("8b", pp=4, v=2, dp=2, sequences=16, order=Order.INTERLEAVED)
    schedule, stages = schedule_of(jobs), stages_of(jobs)
    played = simulate(scenario(jobs, stack, schedule, stages))
    timeline = timeline_of(played)
    memory = step_memory(jobs, timeline, stages, stack)
    assert [rank.total for rank in memory.peaks] == walk_row(jobs, stack).tolist()
    for pp_rank in range(4):
        own = timeline.program.pp_rank == pp_rank
        assert (np.diff(timeline.start[own]) >= 0).all()
        assert (timeline.end[own] >= timeline.start[own]).all()
    assert 0 < max(rank.seconds for rank in memory.peaks) < played.pipeline_seconds
    last = Action(Kind.BACKWARD, 0, schedule.num_micro_batches - 1)
    ends = played.end[played.graph.where[last]]
    assert timeline.end[timeline.program.where[last]] == ends.ravel()[0]


@pytest.mark.parametrize("layout", [{"pp": 2, "dp": 2}, {"pp": 2, "dp": 2, "zero": 2}, {"tp": 2, "pp": 4, "zero": 3}])
def test_a_run_of_the_trainer(layout: dict[str, int]) -> None:
    """With its parameters, to the byte; frozen layers have no gradients."""
    model = {"dim": 64, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 160, "vocab_size": 512}
    table = {"model": model, "batch": {"sequences": 8, "seq_len": 64}, "layout": layout}
    plan = check(from_table(table | {"train": {"freeze": ["tok_embeddings", "layers.0"]}}))
    timeline = compile_program(plan.schedule).play()
    phase = plan.phases[0]
    row, held = job_of(plan, phase), held_of(plan, phase)
    memory = step_memory(row, timeline, plan.stages, Trainer(), held=held)
    assert memory.peaks == run_memory(plan, [timeline])
    assert memory.capacity is None
    ranks = tuple(live_bytes(row, phase.schedule, plan.stages, timeline, Trainer(), held=held))
    for rank, mine in zip(ranks, memory.ranks, strict=True):
        assert (rank.parts == mine.parts).all()
        assert (rank.in_flight == mine.in_flight).all()


# By definition


class Events:
    """What is alive on one pipeline rank, by definition.

    Weights: from the end of the computation before a stage's first one to the end of its last. A sum of gradients: from
    a first backward to its reduction, of which there is one after the last micro-batch of the step (ZeRO-1) or of each
    round (ZeRO-2); the reduced shard: from the first reduction on. Activations: from a forward to the end of its
    backward.
    """

    def __init__(self, jobs: Jobs, schedule: Schedule, stages: tuple[Stage, ...]) -> None:
        self.schedule, self.zero = schedule, int(jobs.zero)
        self.start, self.end = self._play()
        dim, table, tokens, dp = 4096, 128256 * 4096, 8192, int(jobs.dp)
        layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336 + 2 * 4096
        per_layer = tokens * (12 * dim + 4 * 8 * 128 + 6 * 14336) + 4 * tokens * 32 + 8 * tokens
        self.objects: list[tuple[int, str, float, float, float]] = []  # rank, part, bytes, from, until
        rounds = self._round_ends()
        forever = max(self.end.values()) + 1
        for stage in stages:
            rank = stage.index % schedule.pp
            parameters = len(stage.layers) * layer + stage.embedding * table + stage.head * (table + dim)
            kept = len(stage.layers) * per_layer + stage.head * 4 * tokens * dim
            mine = [key for key in self.start if key[1] == stage.index]
            last = {m: self.end[key] for key in mine if key[0] in ENDS for m in [key[2]]}
            first = {m: self.start[key] for key in mine if key[0] in ENDS for m in [key[2]]}
            begin, over = (
                self._free_before(rank, min(self.start[key] for key in mine)),
                max(self.end[key] for key in mine),
            )
            self._add(rank, "weights", 2 * parameters, begin, over)
            self._add(rank, "optimizer", 12 * parameters / dp, 0, forever)
            for head, part, size in ((False, "activations", kept), (True, "logits", 2 * tokens * 128256)):
                for m in range(schedule.num_micro_batches if stage.head or not head else 0):
                    self._add(rank, part, size, self.start[Kind.FORWARD, stage.index, m], last[m])
            at = 0
            for end in rounds:
                self._add(rank, "gradients", 4 * parameters, min(first[m] for m in range(at, end)), last[end - 1])
                at = end
            self._add(rank, "gradients", 4 * parameters / dp, last[rounds[0] - 1], forever)

    def _free_before(self, rank: int, time: float) -> float:
        """When the computation before is over."""
        ends = [end for key, end in self.end.items() if key[1] % self.schedule.pp == rank and end <= time]
        return max(ends, default=0.0)

    def _round_ends(self) -> list[int]:
        """How many micro-batches are done at each reduction."""
        number = self.schedule.num_micro_batches
        if self.zero == 1 or self.schedule.kind == "afab":
            return [number]
        return list(range(self.schedule.nc, number + 1, self.schedule.nc))

    def _add(self, rank: int, part: str, size: float, begin: float, end: float) -> None:
        self.objects.append((rank, part, size, begin, end))

    def _play(self) -> tuple[dict[Any, float], dict[Any, float]]:
        """A forward takes 1, a backward 2; over and over, whatever can begin does."""
        start: dict[Any, float] = {}
        end: dict[Any, float] = {}
        last = self.schedule.num_stages - 1
        queues = [[tuple(a) for a in actions if a.micro_batch >= 0] for actions in self.schedule.actions]
        clock = [0.0] * len(queues)
        while any(queues):
            for rank, queue in enumerate(queues):
                while queue:
                    kind, stage, m = queue[0]
                    need = (kind, stage - 1, m) if kind is Kind.FORWARD else (kind, stage + 1, m)
                    waits = stage > 0 if kind is Kind.FORWARD else stage < last
                    if waits and need not in end:
                        break
                    start[queue[0]] = max(clock[rank], end[need] if waits else 0.0)
                    clock[rank] = end[queue[0]] = start[queue[0]] + (1.0 if kind is Kind.FORWARD else 2.0)
                    queue.pop(0)
        return start, end

    def alive(self, rank: int, time: float) -> dict[str, float]:
        """Bytes by part."""
        found: dict[str, float] = defaultdict(float)
        for owner, part, size, begin, end in self.objects:
            found[part] += size * (owner == rank and begin <= time < end)
        return found


@pytest.mark.parametrize(
    ("kind", "pp", "v", "m", "nc", "layers", "zero"),
    [
        ("1f1b", 3, 1, 5, None, 7, 1),
        ("interleaved", 2, 2, 6, None, 8, 1),
        ("interleaved", 2, 2, 6, None, 9, 2),
        ("flexible", 2, 3, 8, 4, 7, 1),
        ("flexible", 2, 3, 8, 4, 7, 2),
        ("afab", 3, 2, 4, None, 12, 2),
        ("afab", 2, 1, 3, None, 5, 1),
    ],
)
def test_curves_against_events_by_definition(
    kind: str, pp: int, v: int, m: int, nc: int | None, layers: int, zero: int
) -> None:
    """At every moment, on every rank, in every part that lasts longer than a moment."""
    jobs = job("8b", layers=layers, pp=pp, v=v, sequences=4 * m, dp=4, zero=zero)
    schedule = generate(pp=pp, v=v, num_micro_batches=m, kind=kind, nc=nc, zero=zero, messages=False)
    stages = partition(layers, pp=pp, v=v)
    timeline = compile_program(schedule).play()
    memory = step_memory(jobs, timeline, stages, Software())
    events = Events(jobs, schedule, stages)
    moments = sorted({*events.start.values(), *events.end.values()})
    for rank in range(pp):
        curve = memory.curve(rank)
        for time in (0.5 * (a + b) for a, b in zip(moments, [*moments[1:], moments[-1] + 0.5], strict=True)):
            expected, found = events.alive(rank, time), dict(zip(PARTS, at(curve, time), strict=True))
            for part in PERSISTENT:
                assert found[part] == pytest.approx(expected[part], rel=1e-9, abs=1), (rank, time, part)


def test_curves_by_stage_sum_to_their_kind() -> None:
    jobs = job("8b", layers=17, pp=2, v=3, sequences=8, nc=4, order=Order.FLEXIBLE, shards=10**12)
    schedule = schedule_of(jobs, messages=False)
    memory = step_memory(jobs, compile_program(schedule).play(), stages_of(jobs), Software())
    for rank in range(2):
        whole = memory.curve(rank)
        for part, curve in (("activations", memory.activation_curve(rank)), ("gradients", memory.gradient_curve(rank))):
            assert curve.bytes.shape[0] == 3
            for time in np.arange(0.51, memory.timeline.step_time, 0.5):
                if time > whole.times[0]:
                    total = at(whole, time)[PARTS.index(part)]
                    assert at(curve, time).sum() == pytest.approx(total, abs=1e3), (part, time)


# Why


def figure_10(layers: int, split: Split) -> StepMemory:
    jobs = job("405b", layers=layers, tp=8, pp=8, v=4, nc=10, sequences=20, order=Order.FLEXIBLE, split=split)
    return memory_of_layout(jobs, exact_of(jobs), load_stack("meta"))


def memory_of_layout(job: Jobs, exact: Exact, stack: SavesMemory) -> StepMemory:
    """Of a layout as the planner played it: of many rounds the first few, which show all that there is."""
    return step_memory(job, exact.timeline, exact.stages, stack)


def exact_of(jobs: Jobs) -> Exact:
    return play_exactly(jobs, load_stack("meta"))


def test_the_peak_says_when_and_of_what() -> None:
    memory = figure_10(30, Split.ENDS_LIGHT)
    peak = memory.peaks[1]
    said = why(memory, 1)
    assert memory.worst_rank == 1
    assert f"peaks at {peak.total / GIB:.1f} GiB in {peak.at} (backward of micro-batch " in said
    assert f"{peak.seconds:.3g} s into the step, while forwards and backwards alternate" in said
    assert f"{peak.activations / GIB:.1f} GiB of activations of 43 (micro-batch, chunk) pairs" in said
    assert "gradients (unsharded: 4 of 4 chunks)" in said
    assert "weights (4 layers)" in said


def test_why_it_is_this_rank() -> None:
    """Figure 10: before balancing the embedding makes rank 0 the fullest; with a layer less it falls below rank 1."""
    before, after = figure_10(32, Split.EVEN), figure_10(30, Split.ENDS_LIGHT)
    assert before.worst_rank == 0
    assert "below that, with 2 pairs in flight less, without the embedding: " in compared(before, 1)
    assert compared(after, 0).startswith("pipeline rank 0 stays 6.13 GiB below that, with 1 layer less")
    assert "the embedding" in compared(after, 0)
    assert "the head" in compared(after, 7)
    assert "GiB more of logits" in compared(after, 7)
    first, *others = findings(after)
    assert first.startswith("pipeline rank 1 peaks at 40.9 GiB")
    assert [int(sentence.split()[2]) for sentence in others] == [0, 2, 7]


def test_whether_it_fits() -> None:
    """By the planner's rule: allocated bytes with the allocator's losses, and 1 GiB for CUDA and NCCL."""
    memory = figure_10(30, Split.ENDS_LIGHT)
    peak = memory.peaks[1]
    assert memory.fits
    largest = f"; the largest part is {peak.optimizer / GIB:.1f} GiB of master weights and moments"
    needs = f"pipeline rank 1 peaks at 40.9 GiB, with the allocator's fragmentation {1.03 * peak.total / GIB:.1f} GiB"
    assert verdict(memory) == (
        f"fits: {needs}, {1.03 * peak.total / (78.1 * GIB):.0%} of the 78.1 GiB of usable GPU memory "
        f"(79.1 GiB less 1.00 GiB for CUDA and NCCL){largest}"
    )
    tight = replace(memory, capacity=peak.reserved + 0.5 * GIB)
    assert not tight.fits
    assert verdict(tight).startswith(f"does not fit: {needs}, 0.50 GiB more than the 41.6 GiB of usable GPU memory (")
    assert replace(memory, capacity=peak.reserved + RESERVED).fits
    assert verdict(replace(memory, capacity=None)) == f"pipeline rank 1 peaks at 40.9 GiB{largest}"


def test_all_forwards_first_peak_at_the_first_backward() -> None:
    jobs = job("8b", pp=2, v=2, sequences=6, order=Order.AFAB)
    memory = memory_of_layout(jobs, exact_of(jobs), Software())
    assert "when its first backward begins" in why(memory, 0)
    assert "unsharded: 1 of 2 chunks" in why(memory, 0)
    assert "12 (micro-batch, chunk) pairs" in why(memory, 0)


def test_gradients_that_never_go_are_not_called_sums() -> None:
    jobs = job("8b", layers=8, pp=2, sequences=4)
    assert "of gradients," in why(memory_of_layout(jobs, exact_of(jobs), Software("megatron")), 0)


def test_equal_ranks_hold_as_much() -> None:
    jobs = job("8b", pp=4, v=2, sequences=4, order=Order.AFAB)
    memory = memory_of_layout(jobs, exact_of(jobs), Software())
    middle = [rank.total for rank in memory.peaks[1:3]]
    assert middle[0] == middle[1]
    if memory.worst_rank == 1:
        assert compared(memory, 2) == "pipeline rank 2 holds as much"
