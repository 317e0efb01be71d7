"""At which moments, on which pipeline ranks, memory can be at its peak: counts of what is alive, without bytes.

They depend only on the shape of a job's pipeline (layers, pp, v, micro-batches, order, nc, split, ZeRO mode), which
many layouts share. So the moments are worked out once per shape, and a moment is dropped if another of the same rank
has as much or more of everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from fourfold.layout.partition import partition
from fourfold.planner.jobs import Column, Jobs, Order, Split
from fourfold.planner.memory.saved import MemoryRules

MOST_RANKS = 6  # that are looked at, per shape
FEW = 64  # shards times chunks
KEYS = (1 << 63) - 1  # the largest int64
EXACT = 1 << 21  # up to which whole numbers are divided rightly in float32, with a margin of 4


class Shape(NamedTuple):
    """What a job's moments depend on. Columns, as in `Jobs`."""

    layers: Column
    pp: Column
    v: Column
    order: Column
    split: Column
    nc: Column
    zero: Column
    micro_batches: Column
    few: Column = np.asarray(False)  # bool: so few shards that a reduction may be the worst moment


class Flow(NamedTuple):
    """How a job's schedule fills its ranks. Columns."""

    v: Column
    total: Column  # (micro-batch, chunk) pairs of a rank in a step
    several: Column  # bool: more than one round
    size: Column  # micro-batches per virtual stage in the first rounds
    turn: Column  # pairs of such a round
    uneven: bool  # in any job: rounds with one micro-batch less follow
    long: Column  # pairs of all rounds of the first kind
    last_round: Column  # pairs before the last round
    turns: Column  # chunks of all rounds
    all_forward: Column  # bool


class Rank(NamedTuple):
    """One pipeline rank. Columns. Its chunks have `base` layers, `count` from `start` on one more, the ends less."""

    rank: Column
    layers: Column
    base: Column
    start: Column
    count: Column
    first_less: Column  # layers that chunk 0 has less
    last_less: Column  # layers that the last chunk has less


class Counts(NamedTuple):
    """What is where on a rank at one moment. Columns."""

    chunks: Column  # (micro-batch, chunk) pairs in flight
    layers: Column  # (micro-batch, layer) pairs
    heads: Column  # micro-batches whose head has run forward
    own: Column  # layers of the chunk whose backward is next
    at_head: Column  # bool: it has the head
    after_head: Column  # bool: the last forward was through the head
    at_embedding: Column  # bool: it has the embedding
    begun: Column  # chunks that have had a backward
    ended: Column  # chunks whose gradients have been reduced once
    released: Column  # chunks that have had their last backward
    reduces: Column  # bool: a reduction of its gradients follows


class Moments(NamedTuple):
    """The moments of jobs, a job's one after another. Columns, one value per moment."""

    job: Column  # index
    rank: Rank
    counts: Counts
    several: Column  # bool: the job's schedule has more than one round


def moments_of(jobs: Jobs, rules: MemoryRules, *, fullest_only: bool = False) -> Moments:
    """The moments at which each job's memory may be at its peak, at least one per job.

    `fullest_only`: only when as many are in flight as ever and all gradients have been begun.
    """
    shapes, shape_of = _shapes(jobs)
    flow = _flow(shapes)
    ranks: list[Rank] = []
    counts: list[Counts] = []
    kept: list[Column] = []
    for rank in _ranks(shapes):
        live = _in_flight(shapes, flow, rank)
        moments = [np.minimum(flow.total - live, flow.turn)]
        if not fullest_only:
            moments = list(_moments(shapes, rules, flow, rank, live))
        done = np.stack(np.broadcast_arrays(*moments))  # [moment, shape]
        found = _counts(shapes, flow, rank, live, done)
        ranks.append(Rank(*(np.broadcast_to(column, done.shape) for column in rank)))
        counts.append(Counts(*(np.broadcast_to(column, done.shape) for column in found)))
        kept.append(_undominated(shapes, flow, rules, ranks[-1], counts[-1]))
        if len(ranks) > 1:
            kept[-1] &= ranks[-1].rank[0] != ranks[0].rank[0]  # else a shape with fewer candidates
    rank = Rank(*map(np.concatenate, zip(*ranks, strict=True)))
    every = Counts(*map(np.concatenate, zip(*counts, strict=True)))
    shape, moment = np.nonzero(np.concatenate(kept).T)
    # Each job takes the moments of its shape, which follow one another.
    first = np.searchsorted(shape, np.arange(rank.rank.shape[1]))
    number = np.diff(first, append=len(shape))[shape_of]
    job = np.repeat(np.arange(len(number)), number)
    chosen = np.arange(len(job)) - np.repeat(np.cumsum(number) - number, number) + first[shape_of][job]
    pick = np.ravel_multi_index((moment[chosen], shape[chosen]), rank.rank.shape)
    return Moments(
        job=job,
        rank=Rank(*(column.take(pick) for column in rank)),
        counts=Counts(*(column.take(pick) for column in every)),
        several=np.broadcast_to(flow.several, rank.rank.shape[1:])[shape[chosen]],
    )


def _shapes(jobs: Jobs) -> tuple[Shape, Column]:
    """(the different shapes, which of them each job has)"""
    fields = {name: getattr(jobs, name) for name in Shape._fields if name != "few"} | {"few": few_shards(jobs)}
    columns = [column.reshape(-1) for column in np.broadcast_arrays(*fields.values())]
    key = np.zeros(columns[0].size, dtype=np.int64)
    largest = 0  # that the key can be
    for column in columns:
        values = int(column.max(initial=0)) + 1
        largest = largest * values + values - 1
        if largest > KEYS:  # so far it is replaced by its rank among those there are
            _, key = np.unique(key, return_inverse=True)
            largest = int(key.max(initial=0)) * values + values - 1
        key = key * values + column.astype(np.int64)
    _, index, inverse = np.unique(key, return_index=True, return_inverse=True)
    most = float((fields["micro_batches"] * fields["v"]).max(initial=0))  # (micro-batch, chunk) pairs
    number = np.float32 if most < EXACT else np.float64
    return Shape(*(column[index].astype(number) for column in columns)), inverse


def few_shards(jobs: Jobs) -> Column:
    """bool: the shard that a reduction makes may be more than what backward had, which is free by then."""
    # ZeRO-3 has the shard from a chunk's second backward on: only where there is none it comes last.
    return np.asarray((jobs.shards * jobs.v <= FEW) & ((jobs.zero < 3) | (jobs.micro_batches == 1)))


def _undominated(shape: Shape, flow: Flow, rules: MemoryRules, rank: Rank, counts: Counts) -> Column:
    """bool [moment, shape]: no other moment of this rank has as much of everything that takes memory."""
    lasting = (shape.zero <= 1) & flow.several  # sums of gradients are kept to the last round
    sums = np.where(lasting, counts.begun * (rank.base + (rank.count > 0)), counts.own)
    flags = counts.at_head + 2 * counts.after_head + 4 * counts.at_embedding + 8 * (counts.own > 0)
    amounts = [counts.layers, counts.heads]
    if not rules.static_gradients:
        amounts += [np.where(shape.zero >= 3, 0, sums), np.where(shape.zero >= 3, 0, -counts.released)]
    else:
        amounts.append(np.where(shape.zero == 2, counts.own, 0))
    if not rules.lasting_shards:
        amounts.append(counts.ended * (shape.zero >= (2 if rules.static_gradients else 1)))
    if rules.stage_outputs:
        amounts.append(counts.chunks)
    # What one micro-batch's layers free counts where copies are made and at the embedding's turn.
    copies = rules.weight_gradients == "stage" or rules.reduction_copy
    reductions = counts.reduces & (copies | (shape.few > 0))
    flags = flags + 16 * reductions
    if copies:
        amounts += [counts.own, -counts.own]
    flags = flags.astype(np.uint8)
    amounts = [amount.astype(np.float32) for amount in amounts if np.any(amount)]
    covers = np.empty((len(flags), *flags.shape), dtype=bool)
    for i in range(len(flags)):
        covers[i] = (flags & ~flags[i]) == 0
        for amount in amounts:
            covers[i] &= amount[i] >= amount
        if not copies and np.any(reductions):
            covers[i] &= (counts.own[i] == counts.own) | ~reductions
        # The head's moment frees the logits before the layers' moments come.
        covers[i] &= (counts.at_head[i] == counts.at_head) | (counts.own == 0)
        if not copies and np.any(counts.at_embedding):
            covers[i] &= (counts.own[i] <= counts.own) | ~counts.at_embedding
    first = np.triu(np.ones((len(flags), len(flags)), dtype=bool), 1)[:, :, None]  # of equal moments
    return ~np.any(covers & (~covers.swapaxes(0, 1) | first), axis=0)


def _flow(shape: Shape) -> Flow:
    """The rounds of `layout.generate`, and when it runs all forwards first."""
    m, v = shape.micro_batches, shape.v
    nc = np.where(
        shape.order == Order.INTERLEAVED, shape.pp, np.where(shape.order == Order.FLEXIBLE, shape.nc, shape.pp)
    )
    all_forward = (shape.order == Order.AFAB) | (nc < shape.pp) | (m < shape.pp)
    nc = np.where(all_forward, m, np.minimum(nc, m))
    rounds = np.minimum(np.ceil(m / nc), np.maximum(1, _quotient(m, shape.pp)))
    size = np.ceil(m / rounds)
    short = size * rounds - m
    turn = v * size
    return Flow(
        v=v,
        total=m * v,
        several=rounds > 1,
        size=size,
        turn=turn,
        uneven=bool(np.any(short > 0)),
        long=turn * (rounds - short),
        last_round=m * v - turn + v * (short > 0),
        turns=rounds * v,
        all_forward=all_forward,
    )


def _quotient(a: Column, b: Column) -> Column:
    """Whole numbers divided, rounded down: in floating point, several times as fast as NumPy divides integers."""
    return np.floor(a / b)


def _rest(a: Column, b: Column) -> Column:
    return a - _quotient(a, b) * b


def _in_flight(shape: Shape, flow: Flow, rank: Rank) -> Column:
    """Chunks held at once: warm-up plus one, never more than there are; all of them if all forwards come first. ZB-H1
    holds on every rank what the first of 1F1B does."""
    behind = shape.pp - np.where(shape.order == Order.ZB_H1, 0, rank.rank) - 1
    warmup = np.where(flow.v == 1, behind, (flow.v - 1) * flow.size + 2 * behind)
    return np.where(flow.all_forward, flow.total, np.minimum(flow.total, warmup + 1))


def _moments(shape: Shape, rules: MemoryRules, flow: Flow, rank: Rank, live: Column) -> Iterator[Column]:
    """How many backwards are done when it may be worst."""
    final = flow.total - 1
    yield np.zeros_like(final)
    if not np.any(final > 0):
        return
    steady = flow.total - live
    interleaved = bool(np.any(flow.v > 1))
    # As many are in flight as ever, all chunks' gradients have been begun, and the first chunk's turn is next again.
    yield np.minimum(steady, flow.turn)
    if interleaved:
        yield np.minimum(final, flow.turn)
        yield np.minimum(final, flow.turn - flow.size)
        yield np.minimum(final, flow.size)  # the chunk before the head's, which may have more layers
    at_end = bool(np.any(rank.rank == shape.pp - 1))
    if interleaved and (at_end or np.any(rank.first_less)):  # a round's last forward of the last chunk
        yield np.minimum(steady, _rest(-live, flow.turn))
    if interleaved and at_end:
        yield steady
    if np.any(shape.zero >= 3):  # the first reduced gradients of a chunk are there
        for start in (np.zeros_like(final), flow.size, flow.turn - flow.size):
            yield np.minimum(final, start + 1)
    # The chunks with one layer more are all there.
    if interleaved and np.any(rank.count > 0):
        turn = np.maximum(0, flow.v - rank.start - rank.count) * flow.size
        yield np.minimum(steady, turn)
        yield np.minimum(steady, flow.turn + turn)
        yield np.minimum(steady, np.maximum(0, flow.v - rank.start - 1) * flow.size)  # and have all begun
        yield np.minimum(steady, _rest((rank.start + rank.count) * flow.size - live, flow.turn))
        if np.any(shape.zero == 2):
            yield np.minimum(final, turn)
            yield np.minimum(final, flow.turn + turn)
    if interleaved and np.any(shape.zero == 2):
        yield np.minimum(steady, 2 * flow.turn - flow.size)
        if np.any(rank.first_less):  # the first chunk's last backward of a round: all shards but its own are there
            yield np.minimum(steady, flow.turn - 1)
    if flow.uneven:  # the heads of a short round come early, while the chunks of the round before go on
        for end in (flow.long, flow.long + flow.v * (flow.size - 1), flow.last_round):
            yield np.clip(end - 1, 0, final)
            yield np.clip(end - flow.size, 0, final)
            yield np.minimum(final, end)
        fuller = np.maximum(0, flow.v - rank.start - rank.count)  # turns before those of the chunks with more
        yield np.minimum(steady, flow.long + fuller * (flow.size - 1))
        yield np.clip(flow.long - flow.turn + fuller * flow.size, 0, steady)
    yield final  # the turn of the embedding, and a reduction
    if interleaved and np.any(shape.few):  # the first reductions
        yield np.minimum(final, np.where(shape.zero >= 2, 0, flow.last_round) + flow.size - 1)
    if rules.reduction_copy:  # at the end of a chunk's turn
        last = flow.size - (flow.last_round >= flow.long)
        more = np.maximum(1, flow.v - rank.start)
        for turns in (np.ones_like(more), 2 * np.ones_like(more), more, more - rank.count + 1):
            yield np.minimum(final, turns * flow.size - 1)
            yield np.minimum(final, flow.turn + turns * flow.size - 1)
            yield np.minimum(final, flow.last_round + turns * last - 1)
        yield np.maximum(_quotient(steady + 1, flow.size) * flow.size - 1, 0)


def _counts(shape: Shape, flow: Flow, rank: Rank, live: Column, done: Column) -> Counts:
    """How a rank stands when `done` backwards are done and the next begins."""
    first, last = rank.rank == 0, rank.rank == shape.pp - 1
    ahead = np.minimum(done + live, flow.total)
    chunks = ahead - done
    turns = _turns(done, flow)
    chunk = flow.v - 1 - _rest(turns, flow.v)
    forward = _rest(_turns(ahead - 1, flow), flow.v)  # chunk
    at_head = last & (chunk == flow.v - 1)
    before = np.where(shape.zero >= 2, 0, flow.turns - flow.v)  # turns before the first reduction

    def alive(start: Column | int, count: Column | int) -> Column:
        """Pairs in flight of the chunks from `start` on. Backward takes the last chunk first."""
        backwards = _span(done, flow.v - start - count, count, flow, flow.v)
        return _span(ahead, start, count, flow, flow.v) - backwards

    layers, own = chunks * rank.base, rank.base
    heads = np.zeros_like(chunks)
    if np.any(rank.count):
        layers = layers + alive(rank.start, rank.count)
        own = own + ((chunk >= rank.start) & (chunk < rank.start + rank.count))
    if np.any(rank.first_less):
        layers = layers - rank.first_less * alive(0, 1)
        own = own - rank.first_less * (chunk == 0)
    if np.any(last):
        heads = last * alive(flow.v - 1, 1)
        layers = layers - rank.last_less * heads
        own = own - rank.last_less * (chunk == flow.v - 1)
    if flow.uneven:
        short = done >= flow.long
        length = np.where(short, np.maximum(flow.size - 1, 1), flow.size)
        into = _rest(np.where(short, done - flow.long, done), length)
        ends = into == flow.size - 1 - short
    else:
        ends = _rest(done, flow.size) == flow.size - 1
    return Counts(
        chunks=chunks,
        layers=layers,
        heads=heads,
        own=own,
        at_head=at_head,
        after_head=last & (forward == flow.v - 1) & (ahead == done + live),
        at_embedding=first & (chunk == 0),
        begun=np.minimum(turns + 1, flow.v),
        ended=np.clip(np.where(shape.zero >= 3, _turns(done - 1, flow) + 1, turns - before), 0, flow.v),
        released=np.clip(turns - (flow.turns - flow.v), 0, flow.v),
        reduces=ends & ((shape.zero == 2) | (done >= flow.last_round)),
    )


def _turns(done: Column, flow: Flow) -> Column:
    """How often the chunk has changed in the first `done` computations."""
    if not flow.uneven:
        return _quotient(done, flow.size)
    rest = done - flow.long
    return np.where(
        rest < 0,
        _quotient(done, flow.size),
        _quotient(flow.long, flow.size) + _quotient(rest, np.maximum(flow.size - 1, 1)),
    )


def _span(done: Column, start: Column | int, count: Column | int, flow: Flow, v: Column) -> Column:
    """How many of the first `done` computations are of the chunks from `start` on, each round taking them in turn."""

    def of_rounds(done: Column, size: Column) -> Column:
        turn = v * size
        full = _quotient(done, turn)
        return full * count * size + np.minimum(np.maximum(done - full * turn - start * size, 0), count * size)

    if not flow.uneven:
        return of_rounds(done, flow.size)
    long = np.minimum(done, flow.long)
    return of_rounds(long, flow.size) + of_rounds(done - long, np.maximum(flow.size - 1, 1))


def _ranks(shape: Shape) -> Iterator[Rank]:
    """The pipeline ranks that may be the worst."""
    layers, pp, v, split = (c.astype(np.int64) for c in (shape.layers, shape.pp, shape.v, shape.split))
    _, index, inverse = np.unique(
        ((layers * 65536 + pp) * 65536 + v) * 2 + split, return_index=True, return_inverse=True
    )
    cuts = [tuple(int(column[i]) for column in (layers, pp, v, split)) for i in index]
    table = np.array([_candidates(*cut) for cut in cuts], dtype=shape.v.dtype)  # [cut, candidate, field]
    for candidate in range(MOST_RANKS):
        if candidate == 0 or (table[:, candidate] != table[:, 0]).any():
            yield Rank(*table[inverse, candidate].T)


@cache
def _candidates(num_layers: int, pp: int, v: int, split: int) -> tuple[tuple[int, ...], ...]:
    """`Rank` of both ends, and of the ranks between that have more in some chunk than every rank before them, which
    have more in flight. If there are too many, those with most layers; if too few, the first rank again."""
    name = "ends_light" if split == Split.ENDS_LIGHT else "even"
    counts = [len(stage.layers) for stage in partition(num_layers, pp=pp, v=v, split=name)]
    fuller: list[list[int]] = [counts[::pp]]
    between = []
    for rank in range(1, pp - 1):
        chunks = counts[rank::pp]
        # A rank before it that has at least as much in every chunk holds more of them.
        if not any(all(a >= b for a, b in zip(before, chunks, strict=True)) for before in fuller):
            fuller.append(chunks)
            between.append(rank)
    between = sorted(between, key=lambda rank: -sum(counts[rank::pp]))[: MOST_RANKS - 2]
    ranks = [0, pp - 1, *between]
    found = [_rank(counts[rank::pp], rank=rank, pp=pp) for rank in ranks]
    return (*found, *[found[0]] * (MOST_RANKS - len(found)))


def _rank(chunks: list[int], *, rank: int, pp: int) -> tuple[int, ...]:
    """`Rank` from the layers of its chunks. Of more than two sizes between a rank's ends all count as the largest."""
    rest = chunks[(rank == 0) : len(chunks) - (rank == pp - 1)] or [max(chunks)]
    # An end chunk with less than the others is counted apart; one with as much or more joins them.
    first_less = max(0, min(rest) - chunks[0]) if rank == 0 else 0
    last_less = max(0, min(rest) - chunks[-1]) if rank == pp - 1 and len(chunks) > 1 else 0
    level = list(chunks)
    level[0] += first_less
    level[-1] += last_less
    base, more = min(level), [i for i, n in enumerate(level) if n > min(level)]
    start, count = (more[0], len(more)) if more else (0, 0)
    if more and (max(level) > base + 1 or more[-1] - more[0] + 1 != len(more)):
        base, start, count = max(level), 0, 0
    return (rank, sum(chunks), base, start, count, first_less, last_less)
