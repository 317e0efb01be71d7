"""One layout, played: its schedule action by action, with the durations of the time model, and memory of every rank.

The sweep judges layouts by closed forms; the best of them, and the one that a recipe asks for, are judged by this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product
from typing import TYPE_CHECKING

import numpy as np

from fourfold.layout import Action, Kind, Schedule, Stage, Timeline, compile_program, generate, partition
from fourfold.layout.play import Program
from fourfold.layout.schedule import rounds_of
from fourfold.planner.jobs import ORDER_NAMES, Column, Jobs, Order, Split
from fourfold.planner.timing.step import Parts, parts

if TYPE_CHECKING:
    from fourfold.planner.imbalance import Imbalance
    from fourfold.planner.memory.walk import RankMemory
    from fourfold.planner.timing.stack import Stack

MOST_ACTIONS = 2_000  # of a schedule that is played in full, however many rounds it has


@dataclass(frozen=True)
class Exact:
    """What playing says of one layout."""

    seconds: float  # of a step
    bubble_over_compute: float  # idle time of all pipeline ranks over computing time: the paper's r
    bubble_over_total: float  # idle time over all time of the pipeline
    ranks: tuple[RankMemory, ...]  # by pipeline rank
    schedule: Schedule  # as played: of many rounds, the first few
    stages: tuple[Stage, ...]
    timeline: Timeline = field(repr=False)
    idle: float  # seconds of a step in which the mean pipeline rank does not compute
    messages: Callable[[], float] = field(repr=False)  # plays without messages: seconds that they add to a step

    @cached_property
    def waiting(self) -> tuple[float, float]:
        """Seconds of `idle`: (the bubble, what messages between stages add to it)."""
        added = min(max(self.messages(), 0.0), self.idle)
        return self.idle - added, added

    @property
    def worst_rank(self) -> int:
        """The pipeline rank that needs most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    @property
    def memory_bytes(self) -> int:
        """Allocated bytes of that rank at its peak."""
        return round(self.ranks[self.worst_rank].total)


@dataclass
class Programs:
    """Schedules that have been made and ordered, for several layouts that share them."""

    made: dict[tuple[int, ...], Program] = field(default_factory=dict)
    actions: int = 0
    """Of all that were asked for: a measure of the time spent that is the same on every machine."""

    def of(self, job: Jobs, micro_batches: int) -> Program:
        """The program of a job's schedule, for so many micro-batches."""
        key = tuple(int(c) for c in (job.pp, job.v, micro_batches, job.order, job.nc, max(int(job.zero), 1)))
        if key not in self.made:
            self.made[key] = compile_program(schedule_of(job, micro_batches=micro_batches, messages=False))
        self.actions += len(self.made[key].actions)
        return self.made[key]


def schedule_of(job: Jobs, *, micro_batches: int | None = None, messages: bool = True) -> Schedule:
    """The schedule of one job; `micro_batches` instead of its own number."""
    order, number = Order(int(job.order)), micro_batches or int(job.micro_batches)
    return generate(
        pp=int(job.pp),
        v=int(job.v),
        num_micro_batches=number,
        kind=ORDER_NAMES[order],
        nc=min(int(job.nc), number) if order is Order.FLEXIBLE else None,
        zero=max(int(job.zero), 1),
        messages=messages,
    )


def stages_of(job: Jobs, split: tuple[int, ...] | None = None) -> tuple[Stage, ...]:
    """The layers of every virtual stage; `split`: how many each has, instead of the job's rule."""
    rule = "ends_light" if int(job.split) == Split.ENDS_LIGHT else "even"
    return partition(int(job.layers), pp=int(job.pp), v=int(job.v), split=split or rule)


def play_exactly(
    job: Jobs,
    stack: Stack,
    *,
    imbalance: Imbalance | None = None,
    split: tuple[int, ...] | None = None,
    programs: Programs | None = None,
) -> Exact:
    """Plays the step of one job (a row of `Jobs`)."""
    from fourfold.planner.memory.walk import walk

    programs = programs or Programs()
    pieces = parts(job, stack, imbalance)
    stages = stages_of(job, split)
    forward, backward = stage_seconds(pieces, stages)
    weight = weight_seconds(pieces, stages)

    number, played = int(job.micro_batches), micro_batches_to_play(job)
    program = programs.of(job, played)
    rounds = rounds_of(number, nc=int(job.nc), pp=int(job.pp)) if played < number else ()

    def play(message: float) -> tuple[Timeline, float]:
        timeline = program.play(forward=forward, backward=backward, weight=weight, message=message)
        return timeline, timeline.step_time + _seconds_of_more_rounds(timeline, rounds)

    timeline, pipeline = play(float(pieces.message))
    computing = timeline.compute.mean() * number / played
    return Exact(
        seconds=float(pieces.inflation * (pipeline + once_per_step(pieces))),
        bubble_over_compute=float(pipeline / computing - 1),
        bubble_over_total=float(1 - computing / pipeline),
        ranks=tuple(walk(job, program.schedule, stages, timeline, stack)),
        schedule=program.schedule,
        stages=stages,
        timeline=timeline,
        idle=max(float(pipeline - computing), 0.0),
        messages=lambda: pipeline - play(0.0)[1] if int(job.pp) > 1 else 0.0,
    )


def micro_batches_to_play(job: Jobs) -> int:
    """How many micro-batches show all that a schedule does: all of them, but of many rounds a few.

    Once the pipeline is full, rounds take equally long and hold equally much, so that what another round adds is what
    each of the rest adds. Where rounds cannot be equal, some are one shorter than the first. In ZB-H1 a heavier stage
    slows the others only when it has put off all the Ws that it may, which can take any number of rounds.
    """
    number, nc, pp = int(job.micro_batches), int(job.nc), int(job.pp)
    if int(job.order) in (Order.AFAB, Order.ZB_H1) or 2 * pp * int(job.v) * number <= MOST_ACTIONS:
        return number
    rounds = rounds_of(number, nc=nc, pp=pp)
    larger = rounds.count(rounds[0])
    smaller = len(rounds) - larger
    for few in product(_few(larger), _few(smaller)):
        wanted = (rounds[0],) * few[0] + (rounds[-1],) * few[1]
        if rounds_of(sum(wanted), nc=nc, pp=pp) == wanted:
            return sum(wanted)
    return number


def _few(number: int) -> tuple[int, ...]:
    """Numbers of rounds of one size to try. A round shows how long it takes if one was before it and two come after."""
    return (number,) if number <= 5 else (4, 5, 6)


def _seconds_of_more_rounds(timeline: Timeline, rounds: tuple[int, ...]) -> float:
    """What the rounds that were not played take: as long as the second of their size. The first follows a larger one,
    and fills the pipeline otherwise. 0 if all were played."""
    if not rounds:
        return 0.0
    played = timeline.program.schedule.rounds
    ends = [timeline.span(Action(Kind.BACKWARD, 0, last - 1))[1] for last in accumulate(played)]
    seconds = 0.0
    for size in {*rounds}:
        missing = rounds.count(size) - played.count(size)
        if missing:
            one = played.index(size) + 1
            seconds += (ends[one] - ends[one - 1]) * missing
    return seconds


def once_per_step(pieces: Parts) -> Column:
    """Seconds of a step outside of the pipeline: ZeRO's messages that nothing hides, the optimizer, what is fixed."""
    return pieces.gather_exposed + pieces.reduce_exposed + pieces.optimizer + pieces.fixed


def stage_seconds(pieces: Parts, stages: tuple[Stage, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(forward, backward) seconds of every virtual stage for one micro-batch."""
    layers = np.array([len(stage.layers) for stage in stages])
    embedding = np.array([stage.embedding for stage in stages])
    head = np.array([stage.head for stage in stages])
    forward = layers * pieces.layer_forward + embedding * pieces.embedding_forward + head * pieces.head_forward
    backward = layers * pieces.layer_backward + embedding * pieces.embedding_backward + head * pieces.head_backward
    return forward, backward


def weight_seconds(pieces: Parts, stages: tuple[Stage, ...]) -> np.ndarray:
    """Seconds of W, the second half of a split backward, of every virtual stage for one micro-batch.

    Half of the matrix products of layers and head (the head's backward is its forward and one product more), and the
    sums of the embedding's gradient.
    """
    layers = np.array([len(stage.layers) for stage in stages])
    embedding = np.array([stage.embedding for stage in stages])
    head = np.array([stage.head for stage in stages])
    of_head = pieces.head_backward - pieces.head_forward
    return layers * pieces.late * pieces.layer_backward + embedding * pieces.embedding_backward + head * of_head
