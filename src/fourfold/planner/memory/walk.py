"""Memory of every pipeline rank, by walking its schedule in time: at each action, the sum of all that is alive.

Weights are whole from GATHER to FREE and gradients from a stage's first backward to REDUCE; what a forward keeps lives
until the end of its backward (of one in halves, of W); and what is alive for a moment is added to the action whose
moment it is. Stages differ: one has the embedding, one the head and its logits, some a layer more. Their rank's peak is
the largest sum that occurs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.layout import Schedule, Stage, Timeline, compile_program, generate, partition
from fourfold.layout.actions import Kind
from fourfold.layout.play import Program
from fourfold.planner.jobs import ORDER_NAMES, Column, Jobs, Order, Split
from fourfold.planner.memory.peak import PARTS, SavesMemory, backward_transient, lasting
from fourfold.planner.memory.saved import MemoryRules, load_rules, sizes

Bytes = float
CODED = (Kind.FORWARD, Kind.BACKWARD, Kind.GATHER, Kind.REDUCE, Kind.FREE, Kind.INPUT, Kind.WEIGHT)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One pipeline rank at its worst moment; its tp, cp and dp peers hold as much. Bytes; the parts sum to `total`."""

    pp_rank: int
    stages: tuple[int, ...]  # global indices of its virtual stages
    num_layers: int
    embedding: bool
    head: bool
    in_flight: int  # most (micro-batch, stage) pairs whose activations are alive at once
    at: str  # the action at which the peak is, as in "3B7"
    seconds: float  # when that action begins, in the time line's unit
    weights: Bytes  # gathered, as the matrix products read them
    gradients: Bytes  # unreduced sums, and shards of reduced ones
    optimizer: Bytes  # fp32 weights and moments, sharded
    activations: Bytes
    gathered_kv: Bytes  # of the other CP ranks, kept for backward
    logits: Bytes  # kept by the loss
    transients: Bytes  # alive for the moment
    buffers: Bytes  # messages, and what libraries hold
    total: Bytes  # allocated
    reserved: Bytes  # with the allocator's fragmentation

    @property
    def parts(self) -> dict[str, Bytes]:
        """What `total` is the sum of, by name."""
        return {name: getattr(self, name) for name in PARTS}


@dataclass(frozen=True)
class StageBytes:
    """What every virtual stage holds, in bytes; arrays by global stage index."""

    layers: Column
    weights: Column  # gathered
    sums: Column  # gradients, unreduced
    shards: Column  # gradients, reduced
    optimizer: Column
    activations: Column  # per micro-batch, from its forward to its backward
    gathered_kv: Column
    logits: Column
    in_forward: Column  # for a moment
    in_backward: Column  # for a moment
    in_last_backward: Column  # if a reduction follows at once
    buffers: float  # per rank


def stage_bytes(job: Jobs, stages: Sequence[Stage], rules: MemoryRules) -> StageBytes:
    """The stages of one job. Parameters are counted as `saved.sizes` does: exactly, but for rounding of shards."""
    size = sizes(job, rules)
    layers = np.array([len(stage.layers) for stage in stages])
    embedding = np.array([stage.embedding for stage in stages])
    head = np.array([stage.head for stage in stages])
    parameters = layers * size.layer + embedding * size.embedding + head * size.head
    shards = max(int(job.shards), 1) if job.zero >= 1 else 1
    moment = {"own": layers, "head": head, "embedding": embedding}
    return StageBytes(
        layers=layers,
        weights=size.weight_bytes * parameters,
        sums=job.gradient_bytes * parameters * (job.zero < 3),
        shards=_shards(job, rules) * parameters / shards,
        optimizer=size.master_bytes * parameters / shards,
        activations=layers * size.activations + head * size.norm + size.output,
        gathered_kv=layers * size.gathered_kv,
        logits=head * size.logits,
        in_forward=head * size.head_transient,
        in_backward=backward_transient(job, rules, size, **moment, reduces=np.asarray(False)),
        in_last_backward=backward_transient(job, rules, size, **moment, reduces=np.asarray(True)),
        buffers=float(lasting(job, rules, size)),
    )


def _shards(job: Jobs, rules: MemoryRules) -> Column:
    """Bytes per parameter, before sharding, of reduced gradients; those of a static buffer are in the sums' place."""
    return job.gradient_bytes * (job.zero >= (2 if rules.static_gradients else 1))


@dataclass(frozen=True, slots=True)
class RankLive:
    """What is alive on one pipeline rank at each of its actions, in the order in which they run; columns by action."""

    pp_rank: int
    position: Column  # int: of the action in the program
    stage: Column  # int: global virtual stage
    seconds: Column  # when the action begins, in the time line's unit
    parts: Column  # float [PARTS, actions]: bytes alive while it runs
    freed: Column  # float [PARTS, actions]: of these, gone when it ends
    sums: Column  # bool: a backward (or its W) that begins a new sum of its stage's gradients
    reduces: Column  # bool: when it ends, that sum is gone
    keeps: Column  # bool: a forward whose activations live on
    frees: Column  # bool: when it ends, those of its micro-batch and stage are gone

    @property
    def in_flight(self) -> Column:
        """(micro-batch, stage) pairs whose activations are alive while each action runs."""
        return np.cumsum(self.keeps.astype(np.int64) - self.frees) + self.frees


def walk(
    job: Jobs,
    schedule: Schedule,
    stages: Sequence[Stage],
    timeline: Timeline | None,
    stack: SavesMemory,
    *,
    rules: MemoryRules | None = None,
    held: StageBytes | None = None,
) -> tuple[RankMemory, ...]:
    """Every pipeline rank's peak. Arguments as those of `live_bytes`, but `timeline` None: of unit durations."""
    timeline = compile_program(schedule).play() if timeline is None else timeline
    ranks = live_bytes(job, schedule, stages, timeline, stack, rules=rules, held=held)
    return tuple(peak_of(rank, stages, timeline, stack) for rank in ranks)


def peak_of(rank: RankLive, stages: Sequence[Stage], timeline: Timeline, stack: SavesMemory) -> RankMemory:
    """One rank at the first of its worst moments."""
    program = timeline.program
    totals = rank.parts.sum(axis=0)
    worst = int(totals.argmax())
    mine = stages[rank.pp_rank :: program.schedule.pp]
    values = dict(zip(PARTS, rank.parts[:, worst].tolist(), strict=True))
    return RankMemory(
        pp_rank=rank.pp_rank,
        stages=tuple(stage.index for stage in mine),
        num_layers=sum(len(stage.layers) for stage in mine),
        embedding=any(stage.embedding for stage in mine),
        head=any(stage.head for stage in mine),
        in_flight=int(rank.in_flight.max(initial=0)),
        at=str(program.actions[rank.position[worst]]),
        seconds=float(rank.seconds[worst]),
        **values,
        total=float(totals[worst]),
        reserved=float(totals[worst]) * stack.allocator,
    )


def live_bytes(
    job: Jobs,
    schedule: Schedule,
    stages: Sequence[Stage],
    timeline: Timeline,
    stack: SavesMemory,
    *,
    rules: MemoryRules | None = None,
    held: StageBytes | None = None,
) -> Iterator[RankLive]:
    """What is alive on every pipeline rank, action by action.

    Args:
        job: one row.
        schedule: what runs. Of a long one the first few rounds are enough for a peak.
        stages: of the model, by global index.
        timeline: when actions happen, to say when bytes are alive. How much is alive at an action
            depends on the order of the rank's actions only.
        stack: whose software it is.
        rules: instead of those of the stack's saved set.
        held: instead of what `stage_bytes` says of the stages.
    """
    rules = load_rules(stack.saved_set) if rules is None else rules
    held = stage_bytes(job, stages, rules) if held is None else held
    program = timeline.program
    codes, stage_of = _coded(program)
    trained = np.arange(schedule.num_stages) >= schedule.num_frozen_stages
    for pp_rank in range(schedule.pp):
        position = np.flatnonzero(program.pp_rank == pp_rank)
        code, stage = codes[position], stage_of[position]
        forward, backward, gather, reduce, free, of_input, of_weights = (code == number for number in range(len(CODED)))
        # Of a split backward, W makes the gradients, and ends the life of what a forward keeps: I frees about as much
        # as the gradients are that it leaves for W. But it reads the gathered keys and values last.
        ends = backward | of_weights
        first, reduces_next = _backwards(ends, reduce, stage)
        own = np.arange(pp_rank, schedule.num_stages, schedule.pp)
        sums, shards, weights = held.sums[stage], held.shards[stage], held.weights[stage]
        parts, freed = np.zeros((2, len(PARTS), len(position)))
        keeps = forward & trained[stage]
        parts[0], freed[0] = gather * weights, free * weights
        parts[1], freed[1] = first * sums, reduce * sums
        of_kv = backward | of_input
        for part, kept, last in ((3, held.activations, ends), (4, held.gathered_kv, of_kv), (5, held.logits, ends)):
            parts[part], freed[part] = keeps * kept[stage], last * kept[stage]
        np.cumsum(parts, axis=1, out=parts)
        parts[:, 1:] -= np.cumsum(freed, axis=1)[:, :-1]
        parts[2] += held.optimizer[own].sum()
        # The shards of reduced gradients are made at the first reduction of a stage, and stay for the optimizer.
        parts[1] += held.shards[own].sum() if rules.lasting_shards else np.cumsum(_first(stage, reduce) * shards)
        if rules.static_gradients and job.zero < 3:
            parts[0], freed[0] = held.weights[own].sum(), 0.0
            if job.zero < 2:
                parts[1], freed[1] = held.sums[own].sum(), 0.0
        if job.zero >= 3:
            parts[0], freed[0] = _gathered(job, rules, held, own, schedule), 0.0
        transient = np.where(forward, held.in_forward[stage], 0.0)
        transient = np.where(ends | of_input, held.in_backward[stage], transient)
        parts[6] = freed[6] = np.where(reduces_next, held.in_last_backward[stage], transient)
        parts[7] = held.buffers
        start = timeline.start[position]
        yield RankLive(pp_rank, position, stage, start, parts, freed, first, reduce, keeps, frees=ends)


def _coded(program: Program) -> tuple[Column, Column]:
    """(number of its kind in `CODED`, stage) of every action."""
    codes = np.zeros(len(program.actions), dtype=np.int64)
    stage_of = np.zeros(len(program.actions), dtype=np.int64)
    for code, kind in enumerate(CODED):
        position, stage, _ = program.indices[kind]
        codes[position], stage_of[position] = code, stage
    return codes, stage_of


def _backwards(ends: Column, reduce: Column, stage: Column) -> tuple[Column, Column]:
    """Of one rank's actions: (backwards that begin a new sum of gradients, backwards that a reduction follows).

    `ends`: where backwards make the gradients of weights.
    """
    first, last = np.zeros(len(ends), dtype=bool), np.zeros(len(ends), dtype=bool)
    for own in np.unique(stage):
        backwards, reductions = np.flatnonzero((stage == own) & ends), np.flatnonzero((stage == own) & reduce)
        if not len(backwards):
            continue
        starts = np.searchsorted(backwards, np.concatenate(([-1], reductions[:-1] if len(reductions) else reductions)))
        first[backwards[starts]] = True
        last[backwards[np.searchsorted(backwards, reductions) - 1]] = True
    return first, last


def _first(stage: Column, chosen: Column) -> Column:
    """The first of the chosen actions of every stage."""
    positions = np.flatnonzero(chosen)
    _, index = np.unique(stage[positions], return_index=True)
    out = np.zeros(len(stage), dtype=bool)
    out[positions[index]] = True
    return out


def _gathered(job: Jobs, rules: MemoryRules, held: StageBytes, own: Column, schedule: Schedule) -> float:
    """ZeRO-3 on one rank: the layer at work, those gathered ahead, and the larger of its tables."""
    size = sizes(job, rules)
    layers = min(float(held.layers[own].sum()), 1 + rules.prefetched_layers)
    tables = max(size.embedding * (own[0] == 0), size.head * (own[-1] == schedule.num_stages - 1))
    return float(size.weight_bytes * (layers * size.layer + tables))


def walk_row(job: Jobs, stack: SavesMemory) -> np.ndarray:
    """Allocated bytes of every pipeline rank of one job, whose schedule and stages are made from its columns."""
    order, number = Order(int(job.order)), int(job.micro_batches)
    schedule = generate(
        pp=int(job.pp),
        v=int(job.v),
        num_micro_batches=number,
        kind=ORDER_NAMES[order],
        nc=min(int(job.nc), number) if order is Order.FLEXIBLE else None,
        zero=max(int(job.zero), 1),
        messages=False,
    )
    split = "ends_light" if int(job.split) == Split.ENDS_LIGHT else "even"
    stages = partition(int(job.layers), pp=int(job.pp), v=int(job.v), split=split)
    return np.array([rank.total for rank in walk(job, schedule, stages, None, stack)])
