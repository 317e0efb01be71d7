"""Live bytes of every pipeline rank through a step, by kind; the peak, when it is, and why it is on that rank.

The bytes are those of `planner.memory.walk`, action by action, so that this peak and the planner's are the same number.
When things happen comes from whoever played the schedule: the planner, with `play_exactly`, or the engine here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fourfold.layout import Kind, Stage, Timeline, compile_program
from fourfold.layout.actions import COMPUTE
from fourfold.planner.jobs import Column, Jobs
from fourfold.planner.machines.chips import GIB
from fourfold.planner.memory.peak import PARTS, RESERVED, SavesMemory
from fourfold.planner.memory.saved import MemoryRules, load_rules
from fourfold.planner.memory.walk import RankLive, RankMemory, StageBytes, live_bytes, peak_of, stage_bytes
from fourfold.planner.search.misses import BYTES_WORDS
from fourfold.planner.search.words import listed
from fourfold.simulator.causes import duration

if TYPE_CHECKING:
    from fourfold.simulator.played import Played

_WORTH_SAYING = 0.02  # of a peak: parts that are less are summed up
_ROUNDING = 1e-4  # of a peak: parts that differ by less are equal
_GAP = 1e-12  # seconds: an action that begins so soon after the one before it follows at once


@dataclass(frozen=True)
class Curve:
    """Steps: from each time on, until the next, so many bytes are alive."""

    times: Column  # seconds, ascending
    bytes: Column  # float [parts, times]


@dataclass(frozen=True)
class StepMemory:
    """Live bytes of every pipeline rank through one step; tp, cp and dp peers of a rank hold as much."""

    stages: tuple[Stage, ...]
    held: StageBytes
    timeline: Timeline = field(repr=False)
    ranks: tuple[RankLive, ...] = field(repr=False)
    peaks: tuple[RankMemory, ...]
    capacity: float | None
    """Of one GPU, as a program sees it: what CUDA and NCCL take is in it. None: unknown."""

    @property
    def worst_rank(self) -> int:
        """The pipeline rank that needs most, the first of several."""
        return max(range(len(self.peaks)), key=lambda rank: self.peaks[rank].total)

    @property
    def fits(self) -> bool:
        """By the planner's rule: with the allocator's losses, and beside what CUDA and NCCL hold."""
        return self.capacity is None or self.peaks[self.worst_rank].reserved <= self.capacity - RESERVED

    @cached_property
    def worst_action(self) -> tuple[int, ...]:
        """Per pipeline rank, the index of the action at which it peaks among its own."""
        return tuple(int(rank.parts.sum(axis=0).argmax()) for rank in self.ranks)

    def curve(self, pp_rank: int) -> Curve:
        """By kind of bytes, in the order of `planner.memory.peak.PARTS`."""
        rank = self.ranks[pp_rank]
        return _curve(rank.seconds, self.timeline.end[rank.position], rank.parts, rank.parts - rank.freed)

    def activation_curve(self, pp_rank: int) -> Curve:
        """Activations by virtual stage of the rank, the first chunk first."""
        rank = self.ranks[pp_rank]
        return self._by_stage(rank, rank.keeps, rank.frees, self.held.activations)

    def gradient_curve(self, pp_rank: int) -> Curve:
        """Unsharded gradients, not reduced yet, by virtual stage of the rank (ISCA'25 Figure 4)."""
        rank = self.ranks[pp_rank]
        return self._by_stage(rank, rank.sums, rank.reduces, self.held.sums)

    def _by_stage(self, rank: RankLive, begins: Column, ends: Column, size: Column) -> Curve:
        """What begins with some actions, ends after others and has a size per stage."""
        own = np.array([stage.index for stage in self.stages[rank.pp_rank :: len(self.ranks)]])[:, None]
        mine = rank.stage == own
        after = np.cumsum(mine & begins, axis=1) - np.cumsum(mine & ends, axis=1)
        during = after + (mine & ends)
        return _curve(rank.seconds, self.timeline.end[rank.position], during * size[own], after * size[own])


def _curve(start: Column, end: Column, during: Column, after: Column) -> Curve:
    """From what is alive during each action, and after it until the next one begins. Points that change nothing go."""
    times = np.empty(2 * len(start))
    values = np.empty((len(during), 2 * len(start)))
    times[::2], times[1::2] = start, end
    values[:, ::2], values[:, 1::2] = during, after
    keep = np.ones(len(times), dtype=bool)
    keep[1:-1:2] = start[1:] - end[:-1] > _GAP  # nothing lies between
    times, values = times[keep], values[:, keep]
    changes = np.append(True, np.any(np.diff(values, axis=1) != 0, axis=0)) if len(times) else keep
    return Curve(times[changes], values[:, changes])


def step_memory(
    job: Jobs,
    timeline: Timeline,
    stages: Sequence[Stage],
    stack: SavesMemory,
    *,
    rules: MemoryRules | None = None,
    held: StageBytes | None = None,
) -> StepMemory:
    """Live bytes of a job whose schedule has been played.

    Args:
        job: one row.
        timeline: when actions happen, in seconds.
        stages: of the model, by global index.
        stack: whose software it is.
        rules: instead of those of the stack's saved set.
        held: instead of what `stage_bytes` says of the stages.
    """
    rules = load_rules(stack.saved_set) if rules is None else rules
    held = stage_bytes(job, stages, rules) if held is None else held
    ranks = tuple(live_bytes(job, timeline.program.schedule, stages, timeline, stack, rules=rules, held=held))
    return StepMemory(
        stages=tuple(stages),
        held=held,
        timeline=timeline,
        ranks=ranks,
        peaks=tuple(peak_of(rank, stages, timeline, stack) for rank in ranks),
        capacity=float(job.hbm_bytes) or None,
    )


def timeline_of(played: Played, *, dp: int = 0, cp: int = 0, tp: int = 0) -> Timeline:
    """When one replica's pipeline did what, from the engine.

    Weights and sums of gradients come and go between computations, as when the planner plays: FSDP's own collectives,
    which the engine runs beside the computations, hold both a little longer.
    """
    graph, program = played.graph, compile_program(played.graph.schedule)
    start, end = np.zeros((2, len(program.actions)))
    for pp_rank in range(graph.schedule.pp):
        at = 0.0
        for i in np.flatnonzero(program.pp_rank == pp_rank):
            start[i] = at
            if program.actions[i].kind in COMPUTE:
                node = graph.where[program.actions[i]]
                start[i], at = (float(times[node][dp, cp, tp]) for times in (played.start, played.end))
            end[i] = at
    return Timeline(program, start, end, np.zeros(len(program.actions)))


# --- Why ---


def findings(memory: StepMemory) -> tuple[str, ...]:
    """Sentences: which rank peaks, when and of what; why no other rank is fuller."""
    worst = memory.worst_rank
    return (f"pipeline rank {worst} {why(memory, worst)}", *(compared(memory, other) for other in _others(memory)))


def verdict(memory: StepMemory) -> str:
    """Whether it fits, as in "fits: pipeline rank 1 peaks at ...", how much room is left, and what takes most of it."""
    worst, capacity = memory.worst_rank, memory.capacity
    peak = memory.peaks[worst]
    name, most = max(peak.parts.items(), key=lambda part: part[1])
    largest = f"the largest part is {_gib(most)} of {_words(memory, worst, name)}"
    peaks = f"pipeline rank {worst} peaks at {_gib(peak.total)}"
    if capacity is None:
        return f"{peaks}; {largest}"
    usable = capacity - RESERVED
    less = f"({_gib(capacity)} less {_gib(RESERVED)} for CUDA and NCCL)"
    needs = f"{peaks}, with the allocator's fragmentation {_gib(peak.reserved)}"
    if not memory.fits:
        over = _gib(peak.reserved - usable)
        return f"does not fit: {needs}, {over} more than the {_gib(usable)} of usable GPU memory {less}; {largest}"
    share = f"{peak.reserved / usable:.{0 if peak.reserved > 0.1 * usable else 1}%}"
    return f"fits: {needs}, {share} of the {_gib(usable)} of usable GPU memory {less}; {largest}"


def why(memory: StepMemory, pp_rank: int) -> str:
    """Of one rank: "peaks at 37.2 GiB in 5B4, ...: 8.9 GiB of activations of 29 (micro-batch, chunk) pairs, ..."."""
    peak = memory.peaks[pp_rank]
    parts = sorted(peak.parts.items(), key=lambda part: -part[1])
    said = [f"{_gib(size)} of {_words(memory, pp_rank, name)}" for name, size in parts if _large(size, peak)]
    rest = sum(size for _, size in parts if not _large(size, peak))
    said += [f"{_gib(rest)} of other things"] if rest > 0 else []
    when = f"{peak.at}{_in_words(memory, pp_rank)}, {duration(peak.seconds)} into the step, {_phase(memory, pp_rank)}"
    return f"peaks at {_gib(peak.total)} in {when}: {', '.join(said)}"


def compared(memory: StepMemory, other: int) -> str:
    """Why the fullest rank holds more than another: what they differ in, and what that is in bytes."""
    worst = memory.worst_rank
    high, low = memory.peaks[worst], memory.peaks[other]
    less = high.total - low.total
    bytes_less = [
        (size - low.parts[name], BYTES_WORDS[name])
        for name, size in high.parts.items()
        if abs(size - low.parts[name]) > max(_WORTH_SAYING * abs(less), _ROUNDING * high.total)
    ]
    sizes = [f"{_gib(abs(size))} {'less' if size > 0 else 'more'} of {name}" for size, name in sorted(bytes_less)[::-1]]
    if not sizes:
        return f"pipeline rank {other} holds as much"
    owns = _owns(memory, other)
    return f"pipeline rank {other} stays {_gib(less)} below that{owns}: {', '.join(sizes)}"


def _others(memory: StepMemory) -> list[int]:
    """The ranks to compare the fullest with: both ends of the pipeline, and its neighbours."""
    worst, last = memory.worst_rank, len(memory.peaks) - 1
    return sorted({rank for rank in (0, worst - 1, worst + 1, last) if 0 <= rank <= last} - {worst})


def _owns(memory: StepMemory, other: int) -> str:
    """What a rank has more or less of than the fullest, as far as it explains bytes: ", with the head"."""
    high, low = memory.peaks[memory.worst_rank], memory.peaks[other]
    has = []
    for number, one, many in (
        (low.num_layers - high.num_layers, "layer", "layers"),
        (_pairs(memory, other) - _pairs(memory, memory.worst_rank), "pair in flight", "pairs in flight"),
    ):
        if number:
            has.append(f"{abs(number)} {one if abs(number) == 1 else many} {'more' if number > 0 else 'less'}")
    ends = (("the embedding", low.embedding, high.embedding), ("the head", low.head, high.head))
    has += [name for name, mine, theirs in ends if mine and not theirs]
    lacks = [name for name, mine, theirs in ends if theirs and not mine]
    return "".join(f", {word} {listed(names)}" for word, names in (("with", has), ("without", lacks)) if names)


def _large(size: float, peak: RankMemory) -> bool:
    return size >= _WORTH_SAYING * peak.total


def _words(memory: StepMemory, pp_rank: int, name: str) -> str:
    """A part, with the number of what it is made of."""
    peak = memory.peaks[pp_rank]
    if name == "activations":
        pairs = _pairs(memory, pp_rank)
        return f"activations of {pairs} (micro-batch, chunk) pair{'' if pairs == 1 else 's'}"
    if name == "gradients":
        chunks = _summed(memory, pp_rank)
        return f"gradients (unsharded: {chunks} of {len(peak.stages)} chunks)" if chunks else "gradients"
    if name == "weights":
        holds = [f"{peak.num_layers} layer{'' if peak.num_layers == 1 else 's'}"]
        holds += ["the embedding"] if peak.embedding else []
        holds += ["the head"] if peak.head else []
        return f"weights ({', '.join(holds)})"
    return BYTES_WORDS[name]


def _pairs(memory: StepMemory, pp_rank: int) -> int:
    """(micro-batch, chunk) pairs in flight when a rank peaks."""
    return int(memory.ranks[pp_rank].in_flight[memory.worst_action[pp_rank]])


def _summed(memory: StepMemory, pp_rank: int) -> int:
    """Chunks whose gradients are being summed, and not reduced yet, when a rank peaks; 0 where sums never go."""
    rank, worst = memory.ranks[pp_rank], memory.worst_action[pp_rank]
    if not rank.freed[PARTS.index("gradients")].any():
        return 0
    return int(rank.sums[: worst + 1].sum() - rank.reduces[:worst].sum())


def _in_words(memory: StepMemory, pp_rank: int) -> str:
    position = memory.ranks[pp_rank].position[memory.worst_action[pp_rank]]
    kind, stage, micro_batch = memory.timeline.program.actions[position]
    name = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "backward", Kind.WEIGHT: "backward"}
    return f" ({name[kind]} of micro-batch {micro_batch} in stage {stage})" if kind in name else ""


def _phase(memory: StepMemory, pp_rank: int) -> str:
    """Where in the schedule a rank peaks."""
    rank, worst = memory.ranks[pp_rank], memory.worst_action[pp_rank]
    actions = memory.timeline.program.actions
    kinds = [actions[position].kind for position in rank.position]
    forwards = Kind.FORWARD in kinds[worst + 1 :]
    backwards = any(kind in COMPUTE and kind is not Kind.FORWARD for kind in kinds[:worst])
    if not backwards:
        return "when its first backward begins" if kinds[worst] is not Kind.FORWARD else "before its first backward"
    if forwards:
        return "while forwards and backwards alternate"
    return "in its last forward" if kinds[worst] is Kind.FORWARD else "after its last forward"


def _gib(size: float) -> str:
    """72.6 GiB, 5.94 GiB, 0.25 GiB; in MiB what would be less than 0.10 GiB."""
    value, unit = (size / GIB, "GiB") if abs(size) >= 0.0995 * GIB or not size else (size * 1024 / GIB, "MiB")
    return f"{value:.{2 if abs(value) < 9.995 else 1}f} {unit}"
