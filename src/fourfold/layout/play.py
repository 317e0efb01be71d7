"""Plays a schedule in time, given what each action and each message costs.

Which action waits for which does not depend on durations. So a schedule is compiled once into a program, its actions in
an order in which everything an action waits for comes before it, and playing is one pass over that program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fourfold.layout.actions import COMPUTE, ENDS, MESSAGES, Action, Kind
from fourfold.layout.schedule import Schedule
from fourfold.layout.validate import validate

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Program:
    """The actions of a schedule that take time, in an order of dependence.

    For action i, ``previous[i]`` is the action before it on its rank and ``needs[i]`` the one whose message it needs;
    the index ``len(actions)`` stands for none, and ``crosses[i]`` says whether that message goes from rank to rank.
    """

    schedule: Schedule
    actions: tuple[Action, ...]
    pp_rank: NDArray[np.int64]
    previous: list[int]
    needs: list[int]
    crosses: NDArray[np.bool_]

    @cached_property
    def where(self) -> dict[Action, int]:
        """The index of each F, B, I and W. FSDP events, of which there may be several alike, are not in it."""
        return {action: i for i, action in enumerate(self.actions) if action.kind in COMPUTE}

    @cached_property
    def indices(self) -> dict[Kind, tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """Per kind, (position, stage, micro-batch) of every action of it, in program order."""
        kinds = [kind for kind in Kind if kind not in MESSAGES]
        code = {kind: number for number, kind in enumerate(kinds)}
        if not self.actions:
            none = np.zeros(0, dtype=np.int64)
            return dict.fromkeys(kinds, (none, none, none))
        named, *numbers = zip(*self.actions, strict=True)
        of_kind = np.array([code[kind] for kind in named])
        stage, micro_batch = (np.array(column, dtype=np.int64) for column in numbers)
        found = {}
        for number, kind in enumerate(kinds):
            position = np.flatnonzero(of_kind == number)
            found[kind] = (position, stage[position], micro_batch[position])
        return found

    def play(
        self,
        *,
        forward: ArrayLike = 1.0,
        backward: ArrayLike = 2.0,
        weight: ArrayLike | None = None,
        message: ArrayLike = 0.0,
        gather: ArrayLike = 0.0,
        reduce: ArrayLike = 0.0,
    ) -> Timeline:
        """See :func:`play`."""
        schedule = self.schedule
        shape = (schedule.num_stages, schedule.num_micro_batches)
        forward, backward = _table(forward, shape, "forward"), _table(backward, shape, "backward")
        weight = backward / 2 if weight is None else _table(weight, shape, "weight")
        if schedule.splits_backward and (weight > backward).any():
            raise ValueError("weight: durations must be at most those of the whole backward")
        # A message is indexed by direction (0 forward, 1 backward), the stage that sends it, and the micro-batch.
        messages = _table(message, (2, *shape), "message")
        duration = np.zeros(len(self.actions))
        delay = np.zeros(len(self.actions))
        for kind, table, direction, source in (
            (Kind.FORWARD, forward, 0, -1),
            (Kind.BACKWARD, backward, 1, 1),
            (Kind.INPUT, backward - weight, 1, 1),
        ):
            position, stage, micro_batch = self.indices[kind]
            duration[position] = table[stage, micro_batch]
            neighbour = np.clip(stage + source, 0, schedule.num_stages - 1)
            delay[position] = messages[direction, neighbour, micro_batch] * self.crosses[position]
        position, stage, micro_batch = self.indices[Kind.WEIGHT]
        duration[position] = weight[stage, micro_batch]
        for kind, cost in ((Kind.GATHER, gather), (Kind.REDUCE, reduce)):
            position, stage, _ = self.indices[kind]
            duration[position] = _table(cost, shape[:1], kind.lower())[stage]
        start, end = _run(self.previous, self.needs, duration.tolist(), delay.tolist())
        return Timeline(self, np.array(start), np.array(end), delay)


def _table(value: ArrayLike, shape: tuple[int, ...], name: str) -> Times:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 1:
        # One value per stage, whatever the number of micro-batches.
        array = array.reshape((-1,) + (1,) * (len(shape) > 1))
    try:
        table = np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"{name}: an array of shape {array.shape} fits no shape {shape}; give a number, or one per stage"
        ) from None
    if not (table >= 0).all():
        raise ValueError(f"{name}: durations must be numbers >= 0")
    return table


def _run(
    previous: list[int], needs: list[int], duration: list[float], delay: list[float]
) -> tuple[list[float], list[float]]:
    """The hot loop. ``end`` has one more entry than there are actions: that of the action 'none', at time 0."""
    end = [0.0] * (len(previous) + 1)
    start = [0.0] * len(previous)
    for i, (before, need, cost, wait) in enumerate(zip(previous, needs, duration, delay, strict=True)):
        ready, arrival = end[before], end[need] + wait
        begin = arrival if arrival > ready else ready
        start[i] = begin
        end[i] = begin + cost
    end.pop()
    return start, end


def compile_program(schedule: Schedule) -> Program:
    """Orders the actions of a schedule by dependence. Raises ValueError if one of them waits for ever.

    Nothing else is checked here: run ``validate`` first on a schedule that ``generate`` did not make.
    """
    timed = [[a for a in actions if a.kind not in MESSAGES] for actions in schedule.actions]
    none, width, last_stage = sum(map(len, timed)), schedule.num_micro_batches, schedule.num_stages - 1
    # The index of every forward and backward (or its first half), by stage and micro-batch; -1 until it has its place.
    forwards, backwards = ([-1] * (schedule.num_stages * width) for _ in range(2))
    actions, ranks, previous, needs = [], [], [], []
    positions, last = [0] * schedule.pp, [none] * schedule.pp
    moved = True
    while moved:
        moved = False
        for pp_rank, own in enumerate(timed):
            position, before = positions[pp_rank], last[pp_rank]
            while position < len(own):
                kind, stage, micro_batch = action = own[position]
                need, place = none, stage * width + micro_batch
                if kind is Kind.FORWARD:
                    need = forwards[place - width] if stage > 0 else none
                    if need < 0:
                        break
                    forwards[place] = len(actions)
                elif kind is Kind.BACKWARD or kind is Kind.INPUT:
                    need = backwards[place + width] if stage < last_stage else none
                    if need < 0 or forwards[place] < 0:
                        break
                    backwards[place] = len(actions)
                elif kind is Kind.WEIGHT and backwards[place] < 0:
                    break
                previous.append(before)
                needs.append(need)
                before = len(actions)
                actions.append(action)
                ranks.append(pp_rank)
                position += 1
            moved |= position > positions[pp_rank]
            positions[pp_rank], last[pp_rank] = position, before
    if len(actions) < none:
        validate(schedule)  # says who waits for whom
        raise ValueError("the schedule cannot be played to its end")
    rank_of = np.array([*ranks, -1])
    crosses = (np.array(needs, dtype=np.int64) != none) & (rank_of[needs] != rank_of[:-1])
    return Program(schedule, tuple(actions), rank_of[:-1], previous, needs, crosses)


@dataclass(frozen=True)
class Timeline:
    """When every action of a program starts and ends, in the unit of the durations given."""

    program: Program
    start: Times
    end: Times
    delay: Times = field(repr=False)

    @cached_property
    def step_time(self) -> float:
        """From the start of the step to the end of its last action."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def compute(self) -> Times:
        """Per pipeline rank, the time spent in computations."""
        is_compute = np.array([action.kind in COMPUTE for action in self.program.actions])
        out = np.zeros(self.program.schedule.pp)
        np.add.at(out, self.program.pp_rank, (self.end - self.start) * is_compute)
        return out

    @property
    def idle(self) -> Times:
        """Per pipeline rank, the time of the step that is not computation."""
        return self.step_time - self.compute

    @property
    def bubble_over_compute(self) -> float:
        """Idle time over computing time, summed over ranks: the paper's r = (pp-1)/(nmb v) in the ideal case."""
        return float(self.idle.sum() / self.compute.sum())

    @property
    def bubble_over_total(self) -> float:
        """Idle time over all time, summed over ranks: r/(1+r)."""
        return float(self.idle.sum() / (self.step_time * self.program.schedule.pp))

    def span(self, action: Action) -> tuple[float, float]:
        """Start and end of one computation."""
        i = self.program.where[action]
        return float(self.start[i]), float(self.end[i])

    def critical_path(self) -> list[int]:
        """Indices of the actions that determine the step time, first to last: only shortening these can help."""
        if not self.program.actions:
            return []
        program, none = self.program, len(self.program.actions)
        i, path = int(self.end.argmax()), []
        while i != none:
            path.append(i)
            before, need = program.previous[i], program.needs[i]
            arrival = self.end[need] + self.delay[i] if need != none else -1.0
            i = need if arrival >= (self.end[before] if before != none else 0.0) else before
        return path[::-1]

    def live_chunks(self, pp_rank: int) -> tuple[Times, NDArray[np.int64]]:
        """(times, counts): how many (micro-batch, chunk) pairs hold activations on a rank, from each time on.

        A pair is live from the start of its forward to the end of its backward, or of its W. Chunks of frozen stages,
        which have no backward, never are.
        """
        program = self.program
        events = []  # in order of time, as the actions of one rank are
        for i, action in enumerate(program.actions):
            if action.stage < program.schedule.num_frozen_stages or program.pp_rank[i] != pp_rank:
                continue
            if action.kind is Kind.FORWARD:
                events.append((self.start[i], 1))
            elif action.kind in ENDS:
                events.append((self.end[i], -1))
        return np.array([t for t, _ in events]), np.cumsum([change for _, change in events], dtype=np.int64)


def play(
    schedule: Schedule,
    *,
    forward: ArrayLike = 1.0,
    backward: ArrayLike = 2.0,
    weight: ArrayLike | None = None,
    message: ArrayLike = 0.0,
    gather: ArrayLike = 0.0,
    reduce: ArrayLike = 0.0,
) -> Timeline:
    """Plays one step. Messages travel beside the computations, from the end of the one that made their data.

    Args:
        schedule: what to play. To play it several times, keep ``compile_program(schedule)`` and call its ``play``.
        forward, backward: durations, a number, one per stage, or an array [stage, micro-batch].
        weight: of the second half of backward, where the schedule splits it, as ``backward`` is of both; default half.
        message: a number, one per sending stage, or an array [direction, sending stage, micro-batch], direction 0 being
            forward. Neighbouring stages of one rank exchange no message.
        gather, reduce: durations of FSDP events, a number or one per stage; they hold up their rank.

    Raises:
        ValueError: a negative duration, a wrong shape, or a schedule that deadlocks.
    """
    return compile_program(schedule).play(
        forward=forward, backward=backward, weight=weight, message=message, gather=gather, reduce=reduce
    )
