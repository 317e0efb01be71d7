"""Memory of every pipeline rank of a run of Fourfold's own trainer, from its checked recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from fourfold.layout import Timeline
from fourfold.planner.arithmetic import FP32, count_stages, moments_per_parameter
from fourfold.planner.jobs import TRAINED_IN, Jobs, Order, Recompute, Split, model_columns
from fourfold.planner.memory.peak import ALLOCATOR
from fourfold.planner.memory.saved import MemoryRules, load_rules
from fourfold.planner.memory.walk import RankMemory, StageBytes, stage_bytes, walk
from fourfold.recipe import Phase, RunPlan
from fourfold.recipe.schema import Recompute as Recomputed


@dataclass(frozen=True, slots=True)
class Trainer:
    """The trainer as a stack, as far as memory goes."""

    saved_set: str = "fourfold"
    allocator: float = ALLOCATOR


def run_memory(plan: RunPlan, timelines: Sequence[Timeline] | None = None) -> tuple[RankMemory, ...]:
    """Every pipeline rank's peak, in the phase of the run in which it is highest.

    `timelines`: of each phase's schedule, to say when that is; None: those of unit durations.

    Parameters are exact, with frozen ones and the rounding of shards; activations are those of `saved`'s inventory,
    which the trainer's functions keep. Not in it: what an attention kernel needs for a moment, and NCCL's buffers.
    """
    played = timelines or [None] * len(plan.phases)
    phases = [_phase_memory(plan, *phase) for phase in zip(plan.phases, played, strict=True)]
    return tuple(max(ranks, key=lambda rank: rank.total) for ranks in zip(*phases, strict=True))


def _phase_memory(plan: RunPlan, phase: Phase, timeline: Timeline | None) -> tuple[RankMemory, ...]:
    job, held = job_of(plan, phase), held_of(plan, phase)
    return walk(job, phase.schedule, plan.stages, timeline, Trainer(), held=held)


def held_of(plan: RunPlan, phase: Phase) -> StageBytes:
    """What every virtual stage holds in a phase of the run, each by what its backward makes again."""
    jobs = {kind: job_of(plan, phase, kind).replace(recomputed_layers=1.0) for kind in plan.recompute}
    of_kind = {kind: stage_bytes(job, plan.stages, _rules(kind)) for kind, job in jobs.items()}
    held = of_kind[plan.recompute[0]]
    columns = [field.name for field in dataclasses.fields(held) if np.ndim(getattr(held, field.name))]
    each: dict[str, Any] = {
        name: np.array([getattr(of_kind[kind], name)[stage] for stage, kind in enumerate(plan.recompute)])
        for name in columns
    }
    return _exact(plan, phase, dataclasses.replace(held, **each))


def _rules(kind: Recomputed) -> MemoryRules:
    """The trainer's, with what "selective" is in this kind."""
    rules = load_rules(Trainer().saved_set)
    only = {"norms": ("norms",), "swiglu": ("product",)}
    return msgspec.structs.replace(rules, selective=only.get(kind, rules.selective))


def _exact(plan: RunPlan, phase: Phase, held: StageBytes) -> StageBytes:
    """With parameters as the trainer has them: those that are frozen have no gradient and no moments."""
    recipe, grid = plan.recipe, plan.grid
    counts = count_stages(
        plan.config, plan.stages, tp=grid.tp, num_shards=grid.dp * grid.cp, freeze=recipe.train.freeze
    )
    whole, trained, shard, trained_shard = np.array(
        [(count.gathered, count.trained, count.held_shard, count.trained_shard) for count in counts]
    ).T
    moments = moments_per_parameter(recipe.optimizer.name, momentum=recipe.optimizer.momentum)
    number = 4 if recipe.train.dtype == "float32" else 2
    return dataclasses.replace(
        held,
        weights=number * whole,
        sums=FP32 * trained * (phase.zero < 3),
        shards=FP32 * trained_shard,
        optimizer=FP32 * (shard + moments * trained_shard),
    )


def recomputation(plan: RunPlan, kind: Recomputed | None = None) -> tuple[Recompute, float]:
    """What backward makes again, and for which share of the layers, as columns of a job have it.

    "norms" and "swiglu" are the shares of "selective" that they take: bytes read and written, of 16-bit numbers 8 per
    hidden unit for two norms and 6 per feed-forward unit. Where stages differ, the mean over layers counts; of lists
    with "full" in them "full" alone, beside which the others cost nothing.
    """
    norms = 8 * plan.config.dim / (8 * plan.config.dim + 6 * plan.config.ffn_dim)
    kinds = plan.recompute if kind is None else (kind,) * len(plan.stages)
    full = "full" in kinds
    costs = {"full": 1.0} if full else {"norms": norms, "swiglu": 1 - norms, "selective": 1.0}
    each = (costs.get(kind, 0.0) * len(stage.layers) for kind, stage in zip(kinds, plan.stages, strict=True))
    share = sum(each) / plan.config.num_layers
    return (Recompute.FULL if full else Recompute.SELECTIVE if share else Recompute.NONE), share


def job_of(plan: RunPlan, phase: Phase, kind: Recomputed | None = None) -> Jobs:
    """The columns that memory depends on; those of the machine are 0.

    `kind`: what backward makes again in all stages, instead of what the recipe says.
    """
    grid, schedule = plan.grid, phase.schedule
    recompute, share = recomputation(plan, kind)
    order = Order.FLEXIBLE
    if schedule.kind == "afab":
        order = Order.AFAB
    elif schedule.v == 1:
        order = Order.ZB_H1 if schedule.splits_backward else Order.ONE_F_ONE_B
    return Jobs.of(
        **model_columns(plan.config),
        seq_len=phase.seq_len,
        sequences=phase.sequences,
        pairs=phase.seq_len * (phase.seq_len + 1) // 2,
        tp=grid.tp,
        cp=grid.cp,
        pp=grid.pp,
        dp=grid.dp,
        v=schedule.v,
        nc=schedule.nc,
        micro_batch=plan.recipe.pipeline.micro_batch,
        order=order,
        split=Split.ENDS_LIGHT if plan.recipe.pipeline.split == "ends_light" else Split.EVEN,
        zero=phase.zero,
        shards=grid.dp * grid.cp,
        sequence_parallel=grid.tp > 1,
        recompute=recompute,
        recomputed_layers=share,
        precision=TRAINED_IN[plan.recipe.train.dtype],
        gradient_bytes=FP32,
        reduce_bytes=FP32,
        fused_attention=True,
        compiled=plan.recipe.train.compile,
        cuda_graphs=False,
        tp_overlap=False,
        chip=0,
        **dict.fromkeys(
            ("peak", "peak_16", "units", "hbm_bytes", "hbm_bandwidth", "link", "nic", "tier", "oversubscription"), 0.0
        ),
        domain=1,
    )
