"""What everything in a step costs on a healthy rank, from the planner's time model: seconds of each piece.

A computation is so many layers, each of them in the order of its collectives: up to the gather of keys and values,
attention, and the rest. TP's ranks meet at both ends of each half of a layer and CP's at each gather, so that what one
of them does slower is waited for layer by layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fourfold.layout import Kind, Stage
from fourfold.planner.jobs import Jobs, layer_parameters
from fourfold.planner.search.exact import stage_seconds, weight_seconds
from fourfold.planner.timing import collectives, exposure
from fourfold.planner.timing.compute import layer_work, rates
from fourfold.planner.timing.stack import Constants, Stack, constants_of
from fourfold.planner.timing.step import LayerSeconds, Parts, of_recompute, parts, passes

Seconds = float


@dataclass(frozen=True)
class Layer:
    """One layer and micro-batch in one direction, in seconds. They sum to the planner's."""

    compute: Seconds  # all but attention
    before: Seconds  # of `compute`, what lies before CP's collective
    attention: Seconds  # with as many pairs as `Work.pairs`
    tp: Seconds  # transfers that computation does not hide
    cp: Seconds
    dp: Seconds  # of FSDP's collectives that every layer has: ZeRO-3's, and ZeRO-2's without a pipeline

    def scaled(self, factor: float) -> Layer:
        """All of it so many times as long."""
        return Layer(*(factor * getattr(self, field.name) for field in dataclasses.fields(self)))


@dataclass(frozen=True)
class Work:
    """The costs of one step."""

    layers: tuple[int, ...]  # of every virtual stage
    layer: Mapping[Kind, Layer]
    ends: Mapping[Kind, tuple[Seconds, ...]]  # embedding and head, of every virtual stage
    pairs: float  # (query, key) pairs of one CP rank and micro-batch that `Layer.attention` is for
    message: Seconds  # from one pipeline rank to the next
    gather: tuple[Seconds, ...]  # FSDP's collectives of every virtual stage, 0 where its layers have them
    reduce: tuple[Seconds, ...]
    contention: float  # share of the time of these by which they slow what runs beside them
    optimizer: Seconds
    fixed: Seconds
    hidden: float = 1.0  # share of the computation beside them that can hide FSDP's collectives
    slow: Mapping[float, Mapping[Kind, Layer]] = field(default_factory=dict)
    """By factor of a slow link: what `tp`, `cp` and `dp` of a layer are, where it is in their group. For other factors
    nothing is known of what hides them: then all that is exposed takes so many times as long."""

    def replace(self, **changes: object) -> Work:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def shares(self, pp: int) -> tuple[float, ...]:
        """Share of all computing that each pipeline rank has. They sum to 1."""
        seconds = [0.0] * pp
        for kind, layer in self.layer.items():
            for stage, (number, ends) in enumerate(zip(self.layers, self.ends[kind], strict=True)):
                seconds[stage % pp] += number * (layer.compute + layer.attention) + ends
        return tuple(one / sum(seconds) for one in seconds)

    def behind(self, factor: float, kind: Kind) -> Layer:
        """A layer whose collectives go over a link that is so many times as slow."""
        if factor in self.slow:
            return self.slow[factor][kind]
        layer = self.layer[kind]
        return dataclasses.replace(layer, tp=factor * layer.tp, cp=factor * layer.cp, dp=factor * layer.dp)

    def without(self, name: str) -> Work:
        """A copy in which something is free. What it hid stays hidden.

        `name`: "attention", "tp", "cp", "pp" (messages), "dp" (FSDP's collectives), "optimizer" or "fixed".
        """
        if name == "pp":
            return self.replace(message=0.0)
        if name in ("optimizer", "fixed"):
            return self.replace(**{name: 0.0})

        def freed(layers: Mapping[Kind, Layer]) -> dict[Kind, Layer]:
            return {kind: dataclasses.replace(layer, **{name: 0.0}) for kind, layer in layers.items()}

        changes: dict[str, object] = {
            "layer": freed(self.layer),
            "slow": {factor: freed(layers) for factor, layers in self.slow.items()},
        }
        if name == "dp":
            none = (0.0,) * len(self.layers)
            changes |= {"gather": none, "reduce": none, "contention": 0.0}
        return self.replace(**changes)


def work_of(job: Jobs, stack: Stack, stages: Sequence[Stage], *, factors: Collection[float] = ()) -> Work:
    """The costs of one job, a row of `Jobs` with the machine's columns, on its stages.

    The planner's allowance for the slowest of many GPUs is in all of them. `factors`: of slow links, for which
    `Work.slow` will know what a layer's collectives leave open.
    """
    constants = constants_of(stack)
    pieces = parts(job, stack)
    slower = float(pieces.inflation)
    layer = _layers(job, constants, late=float(pieces.late * pieces.layer_backward))
    ends = _ends(stages, pieces)
    gather, reduce = _collectives(job, stack, stages)
    return Work(
        layers=tuple(len(stage.layers) for stage in stages),
        layer={kind: seconds.scaled(slower) for kind, seconds in layer.items()},
        slow={
            factor: {
                kind: seconds.scaled(slower) for kind, seconds in _slow_layers(job, constants, factor, layer).items()
            }
            for factor in factors
        },
        ends={kind: tuple((slower * seconds).tolist()) for kind, seconds in ends.items()},
        pairs=float(job.pairs * job.micro_batch / job.cp),
        message=slower * float(pieces.message),
        gather=tuple((slower * gather).tolist()),
        reduce=tuple((slower * reduce).tolist()),
        contention=float(constants.contention),
        hidden=float(constants.dp_hidden),
        optimizer=slower * float(pieces.optimizer),
        fixed=slower * float(pieces.fixed),
    )


def _layers(job: Jobs, constants: Constants, *, late: Seconds) -> dict[Kind, Layer]:
    work = layer_work(job, constants, rates(job, constants))
    forward, backward = passes(job, constants)
    # Matrix products of the projections into attention, of all projections and the feed-forward network.
    into = float(job.heads + 2 * job.kv_heads) / float(2 * job.heads + 2 * job.kv_heads)
    shares = [into * float(work.projections[i] / work.matmul[i]) for i in (0, 1)]
    whole = _layer(
        backward, 1 - shares[1]
    )  # it meets CP's collective after the feed-forward network and the projection
    return {Kind.FORWARD: _layer(forward, shares[0]), Kind.BACKWARD: whole} | _halves(whole, late)


def _slow_layers(job: Jobs, constants: Constants, factor: float, healthy: Mapping[Kind, Layer]) -> dict[Kind, Layer]:
    """What a layer's collectives leave open where a link of their group has 1 / `factor` of its bandwidth, and so many
    times its latency: of TP, CP and ZeRO-3 each, the others being healthy. What hides them stays as long."""
    slow = job.replace(link=job.link / factor, nic=job.nic / factor)
    late = dataclasses.replace(constants, latency=constants.latency * factor)
    work = layer_work(job, constants, rates(job, constants))
    tp, cp = exposure.tensor_parallel(slow, late, work), exposure.context_parallel(slow, late, work)
    out = {}
    for kind, layer in healthy.items():
        way = "forward" if kind is Kind.FORWARD else "backward"
        if kind is Kind.WEIGHT:
            out[kind] = layer
            continue
        cover = layer.compute + layer.attention + layer.tp + layer.cp
        dp = getattr(exposure.layer_shards(slow, late, np.asarray(cover), np.asarray(cover)), way)
        again = float(of_recompute(job)[1]) * (way == "backward")
        out[kind] = dataclasses.replace(
            layer,
            tp=float(getattr(tp, way) + again * tp.forward),
            cp=float(getattr(cp, way) + again * cp.forward),
            dp=float(dp),
        )
    return out


def _layer(seconds: LayerSeconds, before: float) -> Layer:
    """What is computed again counts where it belongs."""
    again = seconds.recompute - seconds.again_attention - seconds.again_tp - seconds.again_cp
    compute = float(seconds.matmul + seconds.memory_bound + seconds.launch + again)
    return Layer(
        compute=compute,
        before=before * compute,
        attention=float(seconds.attention + seconds.again_attention),
        tp=float(seconds.tp + seconds.again_tp),
        cp=float(seconds.cp + seconds.again_cp),
        dp=float(seconds.dp),
    )


def _halves(whole: Layer, late: Seconds) -> dict[Kind, Layer]:
    """The backward of a zero-bubble schedule: all but the products for the gradients of weights, and these."""
    left = (whole.compute - late) / whole.compute
    return {
        Kind.INPUT: dataclasses.replace(whole, compute=whole.compute - late, before=whole.before * left),
        Kind.WEIGHT: Layer(compute=late, before=0.0, attention=0.0, tp=0.0, cp=0.0, dp=0.0),
    }


def _ends(stages: Sequence[Stage], pieces: Parts) -> dict[Kind, np.ndarray]:
    forward, backward = stage_seconds(pieces, tuple(stages))
    weight = weight_seconds(pieces, tuple(stages))
    layers = np.array([len(stage.layers) for stage in stages])
    weight = weight - layers * pieces.late * pieces.layer_backward
    backward = backward - layers * pieces.layer_backward
    return {
        Kind.FORWARD: forward - layers * pieces.layer_forward,
        Kind.BACKWARD: backward,
        Kind.INPUT: backward - weight,
        Kind.WEIGHT: weight,
    }


def _collectives(job: Jobs, stack: Stack, stages: Sequence[Stage]) -> tuple[np.ndarray, np.ndarray]:
    """(all-gather, reduction) seconds of every stage's weights and gradients, over the ranks that share them."""
    none = np.zeros(len(stages))
    if int(job.zero) == 3:
        return none, none
    constants = constants_of(stack)
    matrices, norms = layer_parameters(job)
    table = float(job.padded_vocab * job.dim / job.tp)
    parameters = np.array(
        [
            len(stage.layers) * float(matrices / job.tp + norms)
            + stage.embedding * table
            + stage.head * (table * (not (job.tied and job.pp == 1)) + float(job.dim))
            for stage in stages
        ]
    )
    sharded = int(job.zero) > 0
    shards = collectives.sharding_group(job, constants, job.shards if sharded else job.dp * job.cp)
    if not sharded:
        return none, np.array(collectives.all_reduce(shards, job.reduce_bytes * parameters))
    held = parameters > 0
    gather = collectives.all_gather(shards, exposure.WEIGHT * parameters) * held
    if exposure.reduces_in_layers(job):
        return gather, none
    return gather, exposure.scatter_gradients(job, constants, shards, parameters) * held
