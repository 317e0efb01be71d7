"""Memory of every pipeline rank, by walking its schedule in time: at each action, the sum of all that is alive.

Weights are whole from GATHER to FREE and gradients from a stage's first backward to REDUCE; what a forward keeps lives
until the end of its backward; and what is alive for a moment is added to the action whose moment it is. Stages differ:
one has the embedding, one the head and its logits, some a layer more. Their rank's peak is the largest sum that occurs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.layout import Schedule, Stage, Timeline, compile_program, generate, partition
from fourfold.layout.actions import Kind
from fourfold.planner.jobs import ORDER_NAMES, Column, Jobs, Order, Split
from fourfold.planner.memory.peak import PARTS, SavesMemory, backward_transient, lasting
from fourfold.planner.memory.saved import MemoryRules, load_rules, sizes

Bytes = float


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
    """Every pipeline rank's peak.

    Args:
        job: one row.
        schedule: what runs. Of a long one the first few rounds are enough.
        stages: of the model, by global index.
        timeline: when actions happen, to say when the peak is; None: unit durations.
        stack: whose software it is.
        rules: instead of those of the stack's saved set.
        held: instead of what `stage_bytes` says of the stages.
    """
    rules = load_rules(stack.saved_set) if rules is None else rules
    held = stage_bytes(job, stages, rules) if held is None else held
    timeline = compile_program(schedule).play() if timeline is None else timeline
    ranks = []
    for pp_rank, (position, alive, transient, in_flight) in enumerate(_played(job, schedule, timeline, rules, held)):
        parts = np.vstack((alive, transient, np.full_like(transient, held.buffers)))
        totals = parts.sum(axis=0)
        worst = int(totals.argmax())
        mine = stages[pp_rank :: schedule.pp]
        values = dict(zip(PARTS, parts[:, worst].tolist(), strict=True))
        ranks.append(
            RankMemory(
                pp_rank=pp_rank,
                stages=tuple(stage.index for stage in mine),
                num_layers=sum(len(stage.layers) for stage in mine),
                embedding=any(stage.embedding for stage in mine),
                head=any(stage.head for stage in mine),
                in_flight=int(in_flight.max(initial=0)),
                at=str(timeline.program.actions[position[worst]]),
                seconds=float(timeline.start[position[worst]]),
                **values,
                total=float(totals[worst]),
                reserved=float(totals[worst]) * stack.allocator,
            )
        )
    return tuple(ranks)


def _played(job: Jobs, schedule: Schedule, timeline: Timeline, rules: MemoryRules, held: StageBytes):
    """Per pipeline rank: positions of its actions in the program; float [6, actions] alive at each by part, float
    [actions] alive for that moment, and how many (micro-batch, stage) pairs are in flight."""
    program = timeline.program
    codes = np.zeros(len(program.actions), dtype=np.int64)
    stage_of = np.zeros(len(program.actions), dtype=np.int64)
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.GATHER, Kind.REDUCE, Kind.FREE)
    for code, kind in enumerate(kinds):
        position, stage, _ = program.indices[kind]
        codes[position], stage_of[position] = code, stage
    trained = np.arange(schedule.num_stages) >= schedule.num_frozen_stages
    for pp_rank in range(schedule.pp):
        position = np.flatnonzero(program.pp_rank == pp_rank)
        code, stage = codes[position], stage_of[position]
        forward, backward, gather, reduce, free = (code == number for number in range(len(kinds)))
        first, reduces_next = _backwards(code, stage)
        own = np.arange(pp_rank, schedule.num_stages, schedule.pp)
        sums, shards, weights = held.sums[stage], held.shards[stage], held.weights[stage]
        began = np.zeros((6, len(position)))  # from this action on, by part
        ended = np.zeros((6, len(position)))  # after it
        began[0], ended[0] = gather * weights, -(free * weights)
        began[1], ended[1] = first * sums, -(reduce * sums)
        keeps = forward & trained[stage]
        for part, kept in ((3, held.activations), (4, held.gathered_kv), (5, held.logits)):
            began[part], ended[part] = keeps * kept[stage], -(backward * kept[stage])
        alive = np.cumsum(began, axis=1)
        alive[:, 1:] += np.cumsum(ended, axis=1)[:, :-1]
        alive[2] += held.optimizer[own].sum()
        # The shards of reduced gradients are made at the first reduction of a stage, and stay for the optimizer.
        alive[1] += held.shards[own].sum() if rules.lasting_shards else np.cumsum(_first(stage, reduce) * shards)
        if rules.static_gradients and job.zero < 3:
            alive[0] = held.weights[own].sum()
            if job.zero < 2:
                alive[1] = held.sums[own].sum()
        if job.zero >= 3:
            alive[0] = _gathered(job, rules, held, own, schedule)
        transient = np.where(forward, held.in_forward[stage], 0.0)
        transient = np.where(backward, held.in_backward[stage], transient)
        transient = np.where(backward & reduces_next, held.in_last_backward[stage], transient)
        change = keeps.astype(np.int64) - backward
        yield position, alive, transient, np.cumsum(change) + (change < 0)


def _backwards(code: Column, stage: Column) -> tuple[Column, Column]:
    """Of one rank's actions: (backwards that begin a new sum of gradients, backwards that a reduction follows)."""
    first, last = np.zeros(len(code), dtype=bool), np.zeros(len(code), dtype=bool)
    for own in np.unique(stage):
        backwards, reductions = (
            np.flatnonzero((stage == own) & (code == 1)),
            np.flatnonzero((stage == own) & (code == 3)),
        )
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
        kind="1f1b" if order is Order.ZB_H1 else ORDER_NAMES[order],
        nc=min(int(job.nc), number) if order is Order.FLEXIBLE else None,
        zero=max(int(job.zero), 1),
        messages=False,
    )
    split = "ends_light" if int(job.split) == Split.ENDS_LIGHT else "even"
    stages = partition(int(job.layers), pp=int(job.pp), v=int(job.v), split=split)
    return np.array([rank.total for rank in walk(job, schedule, stages, None, stack)])
