"""Seconds of communication that computation does not hide: of TP, CP and FSDP in a layer, of DP and messages in a step.

TP with sequence parallelism all-gathers and reduce-scatters around attention and around the feed-forward network, so
four collectives per layer each way; without, two all-reduces, which take as long. All are exposed (facts.md 2.8) unless
the stack runs them under the products. CP gathers K and V once each way and scatters their gradients. FSDP
(ZeRO-3) gathers a layer while the one before computes, twice per micro-batch; ZeRO-1 gathers once per step, beside the
first forward, and reduces beside the last backward. What is hidden still slows what hides it, by `contention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fourfold.planner.jobs import Column, Jobs, Order, layer_parameters
from fourfold.planner.timing import collectives
from fourfold.planner.timing.compute import LayerWork, Rates, exposed

if TYPE_CHECKING:
    from fourfold.planner.timing.stack import Constants

TP_COLLECTIVES = 4  # per layer, each way
REGATHERS = 2  # all-gathers of inputs in backward for the gradients of weights, where inputs are kept cut over TP
OPTIMIZER_BYTES = 30  # per parameter: gradient 4, master and two moments 12 read and 12 written, weight 2
WEIGHT = 2  # bytes of a gathered parameter


@dataclass(frozen=True)
class Exposed:
    """Seconds of one layer and micro-batch, or of one step."""

    forward: Column
    backward: Column


def tensor_parallel(jobs: Jobs, constants: Constants, work: LayerWork) -> Exposed:
    """Per layer."""
    ranks = collectives.group(jobs, constants, size=jobs.tp, stride=np.asarray(1))
    one = collectives.all_gather(ranks, 2 * work.tokens * jobs.dim)
    shown = np.where(jobs.tp_overlap, 1 - constants.tp_hidden, 1.0)
    # Gathering an input again runs beside the product for the other gradient.
    again = np.where(jobs.sequence_parallel, REGATHERS * exposed(one, 0.5 * work.feed_forward[1]), 0.0)
    return Exposed(TP_COLLECTIVES * one * shown, (TP_COLLECTIVES * one + again) * shown)


def context_parallel(jobs: Jobs, constants: Constants, work: LayerWork) -> Exposed:
    """Per layer: K and V gathered; backward, gathered again and their gradients scattered."""
    ranks = collectives.group(jobs, constants, size=jobs.cp, stride=jobs.tp)
    kv_heads = np.maximum(jobs.kv_heads / jobs.tp, 1.0)
    one = collectives.all_gather(ranks, 2 * 2 * work.tokens * jobs.cp * kv_heads * jobs.head_dim)
    # A stack that overlaps TP passes K and V round in a ring, too, behind attention.
    return Exposed(
        np.where(jobs.tp_overlap, exposed(one, work.attention[0]), one),
        np.where(jobs.tp_overlap, exposed(2 * one, work.attention[1]), 2 * one),
    )


def reduces_in_layers(jobs: Jobs) -> Column:
    """Whether gradients leave a layer as soon as its backward ends: ZeRO-3, and ZeRO-2 without a pipeline."""
    return (jobs.zero == 3) | ((jobs.zero == 2) & (jobs.pp == 1))


def scatter_gradients(jobs: Jobs, constants: Constants, shards: collectives.Group, size: Column) -> Column:
    """Gradients of `size` parameters to their shards; where copies of the shards exist, summed over these, too."""
    copies = np.maximum(jobs.dp * jobs.cp / jobs.shards, 1)
    apart = np.maximum(jobs.shards / jobs.cp, 1) * collectives.dp_stride(jobs, constants)
    among = collectives.group(jobs, constants, size=copies, stride=apart)
    size = jobs.reduce_bytes * size
    return collectives.reduce_scatter(shards, size) + collectives.all_reduce(among, size / jobs.shards)


def layer_shards(jobs: Jobs, constants: Constants, forward: Column, backward: Column) -> Exposed:
    """Per layer and micro-batch, beside `forward` and `backward` seconds of the layer's other work."""
    matrices, norms = layer_parameters(jobs)
    size = matrices / jobs.tp + norms
    shards = collectives.sharding_group(jobs, constants, jobs.shards)
    gather = np.where(jobs.zero == 3, collectives.all_gather(shards, WEIGHT * size), 0.0)
    reduce = np.where(reduces_in_layers(jobs), scatter_gradients(jobs, constants, shards, size), 0.0)
    return Exposed(
        exposed(gather, forward) + constants.contention * np.minimum(gather, forward),
        exposed(gather + reduce, backward) + constants.contention * np.minimum(gather + reduce, backward),
    )


def rank_parameters(jobs: Jobs) -> Column:
    """Parameters of a pipeline rank on one TP rank: its share of the layers, and one vocabulary table or both."""
    matrices, norms = layer_parameters(jobs)
    tables = np.where((jobs.pp > 1) | jobs.tied, 1, 2) * jobs.padded_vocab / jobs.tp + jobs.positions
    return jobs.layers / jobs.pp * (matrices / jobs.tp + norms) + tables * jobs.dim


def step_shards(jobs: Jobs, constants: Constants, layer_forward: Column, layer_backward: Column) -> Exposed:
    """Per step: weights gathered beside the first forward, gradients reduced beside the last backward.

    Of a rank's layers, the first gathered and the last reduced have nothing beside them. Without ZeRO, gradients are
    all-reduced; ZeRO-2 reduces them after every round of micro-batches, but all-forward-all-backward has one round.
    """
    size = rank_parameters(jobs)
    shards = collectives.sharding_group(jobs, constants, np.where(jobs.zero == 0, jobs.dp * jobs.cp, jobs.shards))
    per_step = (jobs.zero == 1) | (jobs.zero == 2)
    gather = np.where(per_step, collectives.all_gather(shards, WEIGHT * size), 0.0)
    rounds = np.where((jobs.zero == 2) & (jobs.order != Order.AFAB), np.ceil(jobs.micro_batches / jobs.nc), 1)
    plain = collectives.all_reduce(shards, jobs.reduce_bytes * size)
    reduce = np.where(jobs.zero == 0, plain, rounds * scatter_gradients(jobs, constants, shards, size))
    reduce = np.where(reduces_in_layers(jobs), 0.0, reduce)
    layers = jobs.layers / jobs.pp
    return Exposed(
        _beside(gather, constants.dp_hidden * layers * layer_forward, layers, constants),
        _beside(reduce, constants.dp_hidden * layers * layer_backward, layers, constants),
    )


def _beside(seconds: Column, cover: Column, layers: Column, constants: Constants) -> Column:
    alone = seconds / layers
    return exposed(seconds - alone, cover) + alone + constants.contention * np.minimum(seconds, cover)


def optimizer(jobs: Jobs, constants: Constants, at: Rates) -> Column:
    """Per step: bytes of the shard that a rank updates over memory bandwidth."""
    shards = np.where(jobs.zero >= 1, jobs.shards, 1)
    return constants.optimizer * OPTIMIZER_BYTES * rank_parameters(jobs) / shards / at.hbm


def message(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """A layer's output on its way to the next pipeline rank.

    Every TP rank sends a part: it has one with sequence parallelism, and cuts the output without.
    """
    seconds = collectives.send(jobs, constants, 2 * tokens * jobs.dim / jobs.tp)
    return np.where(jobs.pp > 1, seconds, 0.0)
