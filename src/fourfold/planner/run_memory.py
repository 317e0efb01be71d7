"""Memory of every pipeline rank of a run of Fourfold's own trainer, from its checked recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.layout import Timeline
from fourfold.planner.arithmetic import FP32, count_stages, moments_per_parameter
from fourfold.planner.jobs import TRAINED_IN, Jobs, Order, Recompute, Split, model_columns
from fourfold.planner.memory.peak import ALLOCATOR
from fourfold.planner.memory.saved import load_rules
from fourfold.planner.memory.walk import RankMemory, StageBytes, stage_bytes, walk
from fourfold.recipe import Phase, RunPlan


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
    """What every virtual stage holds in a phase of the run."""
    held = stage_bytes(job_of(plan, phase), plan.stages, load_rules(Trainer().saved_set))
    return _exact(plan, phase, held)


def _exact(plan: RunPlan, phase: Phase, held: StageBytes) -> StageBytes:
    """With parameters as the trainer has them: those that are frozen have no gradient and no moments."""
    recipe, grid = plan.recipe, plan.grid
    counts = count_stages(
        plan.config, plan.stages, tp=grid.tp, num_shards=grid.dp * grid.cp, freeze=recipe.train.freeze
    )
    whole, trained, shard, trained_shard = np.array(
        [(count.held, count.trained, count.held_shard, count.trained_shard) for count in counts]
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


def job_of(plan: RunPlan, phase: Phase) -> Jobs:
    """The columns that memory depends on; those of the machine are 0."""
    grid, schedule = plan.grid, phase.schedule
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
        recompute=Recompute.NONE,
        recomputed_layers=0.0,
        precision=TRAINED_IN[plan.recipe.train.dtype],
        gradient_bytes=FP32,
        reduce_bytes=FP32,
        fused_attention=True,
        compiled=False,
        cuda_graphs=False,
        tp_overlap=False,
        chip=0,
        **dict.fromkeys(
            ("peak", "peak_16", "units", "hbm_bytes", "hbm_bandwidth", "link", "nic", "tier", "oversubscription"), 0.0
        ),
        domain=1,
    )
