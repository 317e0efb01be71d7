"""Peak memory per rank in closed form, over columns of jobs: the sweep's, and a table of measured runs'.

A rank's peak is the largest sum of what is alive at one moment, not the sum of each kind's largest. Which moments can
be the worst is known: when most micro-batches are in flight, when all gradients have begun to be summed beside them,
around the head, and at a reduction into large shards. The ranks that can be worst are few, too: the two ends, and those
between that have more layers in some chunk than every rank before them. This file tries those moments on those ranks;
`walk` plays every action of every rank, and a test holds them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fourfold.planner.jobs import Column, Jobs, Order
from fourfold.planner.machines.chips import GIB
from fourfold.planner.memory.moments import Moments, Rank, few_shards, moments_of
from fourfold.planner.memory.saved import MemoryRules, Sizes, load_rules, sizes

RESERVED = 1 * GIB  # of the device, never the plan's: CUDA context and NCCL (algorithms.md 3.10)
ALLOCATOR = 1.03  # reserved over allocated bytes (algorithms.md 3.10)
PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "gathered_kv",
    "logits",
    "transients",
    "buffers",
)


class SavesMemory(Protocol):
    """What this module reads of a stack."""

    @property
    def saved_set(self) -> str: ...
    @property
    def allocator(self) -> float: ...


@dataclass(frozen=True)
class Memory:
    """Columns: the worst pipeline rank of every job, in bytes, at its worst moment; the parts sum to `allocated`."""

    allocated: Column
    reserved: Column  # with the allocator's fragmentation
    worst_rank: Column
    fits: Column  # bool: reserved bytes within what the device has, less 1 GiB
    weights: Column  # as the matrix products read them: gathered
    gradients: Column  # unreduced sums, and the shard of reduced ones
    optimizer: Column  # fp32 weights and moments
    activations: Column
    gathered_kv: Column  # of the other CP ranks, kept for backward
    logits: Column  # kept by the loss
    transients: Column  # alive for a moment
    buffers: Column  # messages, and what libraries hold


def peak_memory(
    jobs: Jobs, stack: SavesMemory, rules: MemoryRules | None = None, *, fullest_only: bool = False
) -> Memory:
    """The peak of every job's worst pipeline rank.

    Against what `walk` finds, of 9,700 random jobs of every kind: two were 1 to 2 % lower and no other more than 1 %,
    none more than 5 % higher, and the mean error is 0.02 % (600 of them: tests/planner/memory/test_peak.py).

    `rules`: instead of those of the stack's saved set.
    `fullest_only`: looks at one moment alone, when as many are in flight as ever and all gradients have been begun: a
    lower bound, most often the peak itself, and faster.
    """
    rules = load_rules(stack.saved_set) if rules is None else rules
    found = moments_of(jobs, rules, fullest_only=fullest_only)
    shape = np.broadcast_shapes(*(column.shape for column in vars(jobs).values()))
    if not shape:
        here, size = jobs, sizes(jobs, rules)
    else:
        here, size = jobs.take(found.job), sizes(jobs, rules).take(found.job)
    parts = _held(here, rules, size, found.rank) | _alive(here, rules, size, found)
    parts = {name: np.broadcast_to(parts[name], found.job.shape) for name in PARTS}
    totals = np.asarray(sum(parts.values()))
    # Of each job's moments, which follow one another, the first of the highest.
    highest = np.maximum.reduceat(totals, np.flatnonzero(np.diff(found.job, prepend=-1)))
    best = np.flatnonzero(totals == highest[found.job])
    best = best[np.flatnonzero(np.diff(found.job[best], prepend=-1))]
    allocated = highest.reshape(shape)
    return Memory(
        allocated=allocated,
        reserved=allocated * stack.allocator,
        worst_rank=found.rank.rank[best].astype(np.int64).reshape(shape),
        fits=allocated * stack.allocator <= jobs.hbm_bytes - RESERVED,
        **{name: part[best].reshape(shape) for name, part in parts.items()},
    )


def _held(jobs: Jobs, rules: MemoryRules, size: Sizes, rank: Rank) -> dict[str, Column]:
    """What is there all the time."""
    first, last = rank.rank == 0, rank.rank == jobs.pp - 1
    parameters = rank.layers * size.layer + first * size.embedding + last * size.head
    shards = np.where(jobs.zero >= 1, np.maximum(jobs.shards, 1), 1)
    return {
        "optimizer": size.master_bytes * parameters / shards,
        "buffers": lasting(jobs, rules, size),
    }


def lasting(jobs: Jobs, rules: MemoryRules, size: Sizes) -> Column:
    """Buffers that a rank has all the time: of weight gradients, messages and libraries."""
    shapes = size.weight_bytes * size.shapes if rules.weight_gradients == "shapes" else 0.0
    return shapes + rules.messages * size.message * (jobs.pp > 1) + rules.workspace


def _alive(jobs: Jobs, rules: MemoryRules, size: Sizes, found: Moments) -> dict[str, Column]:
    """What is alive at each moment."""
    rank, counts = found.rank, found.counts
    first, last = rank.rank == 0, rank.rank == jobs.pp - 1
    stage = counts.own * size.layer
    every = rank.layers * size.layer
    if np.any(last):
        stage, every = stage + counts.at_head * size.head, every + last * size.head
    if np.any(first):
        stage, every = stage + counts.at_embedding * size.embedding, every + first * size.embedding

    def chunks_of(number: Column, more: Column | int = 0) -> Column:
        """Parameters of a rank's last chunks, of `base` layers or `more`."""
        some = (number > 0) * (number * (rank.base + more) * size.layer + last * size.head)
        return np.where(number >= jobs.v, every, np.minimum(some, every))

    reduced = chunks_of(counts.released, -rank.last_less)  # for good: their weights are free, too
    if rules.static_gradients:
        sums = np.where(jobs.zero <= 1, every, stage)
    else:
        # ZeRO-1 sums all chunks to the end of the last round; with one round, and in ZeRO-2, one at a time.
        begun = chunks_of(counts.begun, rank.count > 0) - reduced
        sums = np.where((jobs.zero <= 1) & found.several, begun, stage)
    # ZeRO-3 gathers a layer at a time: the one at work, what is ahead of it, and the tables at the ends.
    layers = np.minimum(rank.layers, 1 + rules.prefetched_layers)
    gathered = layers * size.layer + np.maximum(first * size.embedding, last * size.head)
    there = every if rules.static_gradients else every - reduced
    shard = (every if rules.lasting_shards else chunks_of(counts.ended, rank.count > 0)) / np.maximum(jobs.shards, 1)
    shard = shard * (jobs.zero >= (2 if rules.static_gradients else 1))
    transient = backward_transient(
        jobs,
        rules,
        size,
        own=counts.own,
        head=counts.at_head,
        embedding=counts.at_embedding,
        reduces=counts.reduces,
    )
    few = few_shards(jobs)
    if not rules.lasting_shards and np.any(few):  # beside the sum, when what backward needed is free
        new = counts.reduces & (counts.ended < jobs.v) & (jobs.zero >= (2 if rules.static_gradients else 1))
        new = new & few
        freed = counts.own * (size.activations + size.gathered_kv) + counts.at_head * (size.norm + size.logits)
        made = jobs.gradient_bytes * stage / np.maximum(jobs.shards, 1)
        transient = np.maximum(transient, new * (made - freed - size.output))
    # In ZB-H1 the first half of backward frees gathered keys and values: no more are there than in 1F1B.
    past = np.where(jobs.order == Order.ZB_H1, np.maximum(counts.chunks - (jobs.pp - rank.rank), 0), 0)
    return {
        "weights": size.weight_bytes * np.where(jobs.zero >= 3, gathered, there),
        "gradients": jobs.gradient_bytes * (sums * (jobs.zero < 3) + shard),
        "activations": counts.layers * size.activations + counts.heads * size.norm + counts.chunks * size.output,
        "gathered_kv": (counts.layers - past * rank.layers) * size.gathered_kv,
        "logits": counts.heads * size.logits,
        "transients": np.maximum(transient, counts.after_head * size.head_transient),
    }


def backward_transient(
    jobs: Jobs, rules: MemoryRules, size: Sizes, *, own: Column, head: Column, embedding: Column, reduces: Column
) -> Column:
    """The most that is alive for a moment of one backward, beyond all that was before it.

    `own`: layers of its stage; `head`, `embedding`: whether it has them; `reduces`: whether its gradients go at once.
    """
    started = {"stage": size.layer, "largest": size.matrix}.get(rules.weight_gradients, np.asarray(0.0))
    # ZeRO-3 reduces layer by layer: its gradient in 16 bits, and copied into the numbers that travel.
    started = np.where(jobs.zero >= 3, size.layer * (2 + jobs.reduce_bytes), 2 * started)
    worst = (own > 0) * (size.layer_transient + started)
    if np.any(head):
        # Backward frees the logits at once; if it comes in halves, their gradient takes their place until W.
        freed = np.where(jobs.order == Order.ZB_H1, 0.0, size.logits)
        worst = np.where(head, np.maximum(size.head_transient, worst - freed), worst)
    copies = rules.weight_gradients == "stage" or rules.reduction_copy
    if not copies and not np.any(embedding):
        return worst
    freed = own * (size.activations + size.gathered_kv)  # of this micro-batch, at the end
    singles = 2 if rules.weight_gradients == "stage" else 0
    if np.any(embedding):
        made = np.where(jobs.zero >= 3, 0.0, singles * own * size.layer)
        worst = np.maximum(worst, embedding * (size.embedding_transient + made - freed))
    if copies:
        whole = np.where(jobs.zero >= 3, 0.0, own * size.layer + head * size.head + embedding * size.embedding)
        copied = reduces * jobs.reduce_bytes if rules.reduction_copy else 0
        worst = np.maximum(worst, np.maximum(singles, copied) * whole - freed)
    return worst
