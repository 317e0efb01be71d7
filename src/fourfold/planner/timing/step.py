"""Seconds of one training step: the parts of a micro-batch, then a closed form of how pipeline and DP combine them.

All formulas are over columns of `Jobs`, so that a sweep costs a microsecond per layout. `exact` plays finalists with
the same parts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from fourfold.planner.jobs import Column, Jobs, Order, Recompute, Split
from fourfold.planner.timing import exposure
from fourfold.planner.timing.compute import LayerWork, embedding_work, head_work, largest, layer_work, rates
from fourfold.planner.timing.stack import Constants, Stack, constants_of

if TYPE_CHECKING:
    from fourfold.planner.imbalance import Imbalance


@dataclass(frozen=True)
class Parts:
    """Seconds on one rank: of one micro-batch, in one layer or at the ends of the model; and per step."""

    layer_forward: Column
    layer_backward: Column  # with what is computed again
    embedding_forward: Column
    embedding_backward: Column
    head_forward: Column
    head_backward: Column
    message: Column  # one hop between pipeline ranks
    gather_exposed: Column  # per step
    reduce_exposed: Column
    optimizer: Column
    fixed: Column
    inflation: Column  # all of a step takes so many times longer: the slowest of many ranks
    p2p: Column  # share of a hop that each micro-batch waits for once the pipeline is full
    late: Column  # share of `layer_backward` that zero-bubble schedules put off: gradients of weights
    # Shares of `layer_forward + layer_backward`; they sum to 1
    matmul: Column
    attention: Column
    memory_bound: Column
    launch: Column
    recompute: Column
    tp: Column
    cp: Column
    dp: Column
    imbalance: Column


SHARES = ("matmul", "attention", "memory_bound", "launch", "recompute", "tp", "cp", "dp", "imbalance")
"""What a layer's time goes to."""


@dataclass(frozen=True)
class LayerSeconds:
    """One layer and micro-batch on one rank, in one direction; `SHARES` sum to `seconds`."""

    seconds: Column
    matmul: Column
    attention: Column
    memory_bound: Column
    launch: Column  # what launching takes longer than all else
    recompute: Column
    tp: Column  # exposed communication
    cp: Column
    dp: Column  # ZeRO-3's
    imbalance: Column  # waiting for the rank with most attention
    # Of `recompute`
    again_attention: Column
    again_tp: Column
    again_cp: Column


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and what they go to; the parts sum to `seconds`."""

    seconds: Column
    matmul: Column
    attention: Column
    memory_bound: Column
    launch: Column
    recompute: Column
    head: Column
    tp: Column
    cp: Column
    bubble: Column
    p2p: Column
    dp: Column
    optimizer: Column
    imbalance: Column
    other: Column

    def breakdown(self) -> dict[str, Column]:
        """All but `seconds`, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "seconds"}


def passes(
    jobs: Jobs, stack: Stack | Constants, imbalance: Imbalance | None = None
) -> tuple[LayerSeconds, LayerSeconds]:
    """What one layer takes of one micro-batch: (forward, backward)."""
    constants = constants_of(stack)
    work = layer_work(jobs, constants, rates(jobs, constants))
    return _passes(jobs, constants, work, imbalance)


def _passes(
    jobs: Jobs, constants: Constants, work: LayerWork, imbalance: Imbalance | None
) -> tuple[LayerSeconds, LayerSeconds]:
    tp = exposure.tensor_parallel(jobs, constants, work)
    cp = exposure.context_parallel(jobs, constants, work)
    again, relaunched = _recomputed(jobs, work, tp.forward + cp.forward)
    attended, gathered = of_recompute(jobs)
    # All wait for the rank with most attention.
    excess = 0.0 if imbalance is None else imbalance.factor(jobs) - 1
    waiting = (excess * work.attention[0], excess * work.attention[1])

    forward = work.matmul[0] + work.attention[0] + work.memory_bound[0] + waiting[0]
    backward = work.matmul[1] + work.attention[1] + work.memory_bound[1] + waiting[1] + again
    dp = exposure.layer_shards(jobs, constants, forward, backward)
    forward = forward + tp.forward + cp.forward + dp.forward
    backward = backward + tp.backward + cp.backward + dp.backward
    return (
        LayerSeconds(
            seconds=largest(forward, work.launch[0]),
            matmul=work.matmul[0],
            attention=work.attention[0],
            memory_bound=work.memory_bound[0],
            launch=largest(forward, work.launch[0]) - forward,
            recompute=np.zeros_like(again),
            tp=tp.forward,
            cp=cp.forward,
            dp=dp.forward,
            imbalance=waiting[0],
            again_attention=np.zeros_like(again),
            again_tp=np.zeros_like(again),
            again_cp=np.zeros_like(again),
        ),
        LayerSeconds(
            seconds=largest(backward, work.launch[1] + relaunched),
            matmul=work.matmul[1],
            attention=work.attention[1],
            memory_bound=work.memory_bound[1],
            launch=largest(backward, work.launch[1] + relaunched) - backward,
            recompute=again,
            tp=tp.backward,
            cp=cp.backward,
            dp=dp.backward,
            imbalance=waiting[1],
            again_attention=attended * work.attention[0],
            again_tp=gathered * tp.forward,
            again_cp=gathered * cp.forward,
        ),
    )


def parts(jobs: Jobs, stack: Stack | Constants, imbalance: Imbalance | None = None) -> Parts:
    """Durations of the pieces that a step consists of."""
    constants = constants_of(stack)
    at = rates(jobs, constants)
    work = layer_work(jobs, constants, at)
    head, embedding = head_work(jobs, at), embedding_work(jobs, at)
    forward, backward = _passes(jobs, constants, work, imbalance)
    both = forward.seconds + backward.seconds
    shards = exposure.step_shards(jobs, constants, forward.seconds, backward.seconds)
    return Parts(
        layer_forward=forward.seconds,
        layer_backward=backward.seconds,
        embedding_forward=embedding[0],
        embedding_backward=embedding[1],
        head_forward=head[0],
        head_backward=head[1],
        message=exposure.message(jobs, constants, work.tokens),
        gather_exposed=shards.forward,
        reduce_exposed=shards.backward,
        optimizer=exposure.optimizer(jobs, constants, at),
        fixed=np.asarray(constants.fixed),
        inflation=1 + constants.slow * np.log2(np.maximum(jobs.gpus / 8, 1)),
        p2p=np.asarray(constants.p2p),
        late=0.5 * work.matmul[1] / backward.seconds,
        **{name: (getattr(forward, name) + getattr(backward, name)) / both for name in SHARES},
    )


def _recomputed(jobs: Jobs, work: LayerWork, communication: Column) -> tuple[Column, Column]:
    """(GPU seconds, host seconds) of what backward computes again of a layer, on average over the layers."""
    matmul, attention, memory_bound = work.matmul[0], work.attention[0], work.memory_bound[0]
    kinds = [jobs.recompute == kind for kind in Recompute]
    seconds = np.select(
        kinds,
        [
            np.asarray(0.0),
            0.5 * memory_bound + np.where(jobs.fused_attention, 0.0, attention),
            0.5 * matmul + memory_bound,
            work.feed_forward[0] + attention + memory_bound,
            matmul + attention + memory_bound + communication,
        ],
    )
    launched = np.select(kinds, [0.0, 0.2, 0.7, 1.0, 1.0])
    return jobs.recomputed_layers * seconds, jobs.recomputed_layers * launched * work.launch[0]


def of_recompute(jobs: Jobs) -> tuple[Column, Column]:
    """How much of a layer's forward attention, and of its forward communication, backward does again on average."""
    selective = (jobs.recompute == Recompute.SELECTIVE) & ~np.asarray(jobs.fused_attention, dtype=bool)
    attention = selective | (jobs.recompute == Recompute.FEED_FORWARD) | (jobs.recompute == Recompute.FULL)
    return jobs.recomputed_layers * attention, jobs.recomputed_layers * (jobs.recompute == Recompute.FULL)


# --- The pipeline ---


def stage_layers(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Layers of (the first pipeline rank, the last, the one with most between), as `layout.partition` deals them.

    Even: counts of stages differ by one, and the surplus goes to a run of stages near the middle that spares the first
    and the last rank, or one of them. Ends light: the same over two layers more, of which both end stages lose one.
    """
    stages = jobs.pp * jobs.v
    light = np.where((jobs.split == Split.ENDS_LIGHT) & (jobs.layers + 2 >= stages), 1, 0)
    layers = jobs.layers + 2 * light
    least, rest = layers // jobs.pp, layers % jobs.pp  # `rest` ranks have one more
    on_first = _surplus_on_first(jobs.pp, stages - layers % stages)
    all_but_one = (rest == jobs.pp - 1) & (jobs.pp > 1)
    first = least + (all_but_one & on_first) - light
    last = least + (all_but_one & ~on_first) - light
    alone = jobs.pp == 1
    most = least + (rest > 0)
    return np.where(alone, jobs.layers, first), np.where(alone, jobs.layers, last), np.where(alone, jobs.layers, most)


def _surplus_on_first(pp: Column, places: Column) -> Column:
    """Whether a run of stages that burdens all ranks but one burdens the first: it can begin at 0 ... `places`, and
    begins as near to the middle as it can with one end spared: at a multiple of pp, or one after."""
    below = places // (2 * pp) * pp
    distances = [
        np.abs(2 * begin - places) + np.where(begin > places, 2 * pp, 0) for begin in (below, below + 1, below + pp)
    ]
    return (distances[0] <= distances[1]) | (distances[2] < distances[1])


def bubble_chunks(jobs: Jobs) -> Column:
    """Chunks, each 1 / v of a rank's layers forward and backward, for which ranks of equal stages idle in a step.

    pp - 1. All-forward-all-backward with fewer micro-batches than ranks has (pp - nmb)(v - 1) more: a round of a chunk
    ends before its first micro-batch is back at the first rank (facts.md 1, row 6).
    """
    missing = np.maximum(jobs.pp - jobs.micro_batches, 0)
    return jobs.pp - 1 + missing * (jobs.v - 1)


def step_time(
    jobs: Jobs, stack: Stack | Constants, parts_of: Parts | None = None, imbalance: Imbalance | None = None
) -> StepTime:
    """Closed form of a step.

    The busiest pipeline rank works all the time but for the bubble: chunks of the other ranks, on the way of the first
    micro-batch to it and of the last one from it. Messages are waited for while the pipeline fills and drains, and
    in between unless more micro-batches than ranks go through a chunk in a row.
    """
    p = parts_of or parts(jobs, stack, imbalance)
    layer = p.layer_forward + p.layer_backward
    embedding = p.embedding_forward + p.embedding_backward
    head = p.head_forward + p.head_backward
    first, last, middle = stage_layers(jobs)
    alone = jobs.pp == 1
    on_first = first * layer + embedding
    on_last = last * layer + head + np.where(alone, embedding, 0.0)
    busiest = np.maximum(np.maximum(on_first, on_last), np.where(jobs.pp > 2, middle * layer, 0.0))
    mean = (jobs.layers * layer + embedding + head) / jobs.pp

    # Measured runs exist whose last micro-batch is not full.
    micro_batches = np.maximum(jobs.sequences / (jobs.dp * jobs.micro_batch), 1)
    # ZB-H1 puts off (pp - 1) W, and fills as much of the wait for gradients with them: (pp - 1) (F + B - 2 W).
    filled = 1 + np.minimum(jobs.micro_batches - 1, jobs.pp - 1) / np.maximum(jobs.pp - 1, 1)
    put_off = np.where(jobs.order == Order.ZB_H1, filled * p.late * p.layer_backward / layer, 0.0)
    bubble = bubble_chunks(jobs) / jobs.v * mean * (1 - put_off)
    hops = 2 * p.message
    p2p = (jobs.pp - 1) * hops
    p2p = p2p + np.where((jobs.pp > 1) & (jobs.nc <= jobs.pp), micro_batches * jobs.v * hops * p.p2p, 0.0)

    work = micro_batches * busiest
    dp = p.gather_exposed + p.reduce_exposed
    as_measured = work + bubble + p2p + dp + p.optimizer + p.fixed
    # In the breakdown, layers and ends are those of the mean rank, which waits for what the busiest has more.
    layers = micro_batches * np.where(alone, jobs.layers, jobs.layers / jobs.pp) * layer
    ends = micro_batches * (head + embedding) / jobs.pp
    return StepTime(
        seconds=p.inflation * as_measured,
        matmul=p.matmul * layers,
        attention=p.attention * layers,
        memory_bound=p.memory_bound * layers,
        launch=p.launch * layers,
        recompute=p.recompute * layers,
        head=ends,
        tp=p.tp * layers,
        cp=p.cp * layers,
        bubble=np.maximum(bubble + work - layers - ends, 0.0),  # below 0 by rounding alone
        p2p=p2p,
        dp=dp + p.dp * layers,
        optimizer=p.optimizer + np.zeros_like(work),
        imbalance=p.imbalance * layers,
        other=p.fixed + (p.inflation - 1) * as_measured,
    )
