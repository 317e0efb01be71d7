"""What a recipe means, before anything runs: parameters and bytes per rank, schedule, bubble, ZeRO mode and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.layout import Schedule, Timeline, play
from fourfold.planner.arithmetic import (
    Bytes,
    StageCount,
    count_parameters,
    count_stages,
    count_trained,
    moments_per_parameter,
    rank_bytes,
)
from fourfold.planner.memory.peak import RESERVED
from fourfold.planner.memory.walk import RankMemory
from fourfold.planner.precision import Precision, precisions
from fourfold.planner.run_memory import run_memory
from fourfold.planner.run_time import run_cluster, run_seconds
from fourfold.recipe import Phase, RunPlan


@dataclass(frozen=True, slots=True)
class RankConsequences:
    """One pipeline rank; its tp, cp and dp peers hold as much."""

    pp_rank: int
    stages: tuple[int, ...]  # global indices of its virtual stages
    num_layers: int
    embedding: bool
    head: bool
    parameters: int  # that one GPU computes with, after tensor parallelism
    trained_parameters: int
    bytes: Bytes  # without activations; each kind at its own peak
    memory: RankMemory  # with them; all kinds at the rank's worst moment
    warmup: int  # forwards before its first backward
    in_flight_peak: int  # (micro-batch, stage) pairs whose activations are alive at once
    reduce_scatters: int  # per step, counted per virtual stage


@dataclass(frozen=True, slots=True)
class LaterPhase:
    """What is different once training has seen `after_tokens` tokens."""

    after_tokens: int
    sequences: int
    seq_len: int
    num_micro_batches: int
    schedule: str
    bubble_over_total: float
    fallback: str | None
    zero_reason: str


@dataclass(frozen=True, slots=True)
class Consequences:
    """Everything that `fourfold train` prints before it starts, and `fourfold plan` answers."""

    name: str
    description: str  # of the model, one line
    parameters: int  # of the whole model, each once
    trained_parameters: int  # of them not frozen; equal to parameters as a rule
    tp: int
    cp: int
    pp: int
    dp: int
    num_ranks: int
    dtype: str
    optimizer: str
    sequences: int  # per step, all ranks
    seq_len: int
    tokens_per_step: int
    sequences_per_dp_group: int
    micro_batch: int  # sequences
    num_micro_batches: int
    schedule: str  # the kind that runs
    virtual_stages: int
    nc: int
    rounds: tuple[int, ...]
    bubble_over_compute: float  # idle / computing time, for equal stages and backward = 2 forward
    bubble_over_total: float  # idle / all time
    fallback: str | None  # why another schedule runs than was asked for
    zero: int
    zero_reason: str
    num_frozen_stages: int
    recompute: tuple[str, ...]  # what backward makes again, by virtual stage
    precisions: tuple[Precision, ...]  # what is held, sent and summed in which numbers
    ranks: tuple[RankConsequences, ...]  # by pipeline rank; bytes and in-flight peaks are the largest of all phases
    later_phases: tuple[LaterPhase, ...]  # other batches, in order
    step_seconds: float | None  # predicted, of the first phase; None: unknown
    usable_bytes: float | None  # of a GPU, less what CUDA and NCCL hold; None: unknown


def consequences(plan: RunPlan) -> Consequences:
    """Derives everything from a plan. No torch, milliseconds.

    Raises:
        RecipeError: ``cluster.gpu`` is not known.
    """
    recipe, config, schedule, grid = plan.recipe, plan.config, plan.schedule, plan.grid
    machines = run_cluster(plan)
    timelines = [play(phase.schedule) for phase in plan.phases]
    freeze = recipe.train.freeze
    counts = count_stages(config, plan.stages, tp=grid.tp, num_shards=grid.dp * grid.cp, freeze=freeze)
    return Consequences(
        name=recipe.output.name,
        description=_describe(plan),
        parameters=count_parameters(config).total,
        trained_parameters=count_trained(config, freeze),
        tp=grid.tp,
        cp=grid.cp,
        pp=grid.pp,
        dp=grid.dp,
        num_ranks=grid.size,
        dtype=recipe.train.dtype,
        optimizer=recipe.optimizer.name,
        sequences=recipe.batch.sequences,
        seq_len=recipe.batch.seq_len,
        tokens_per_step=recipe.batch.sequences * recipe.batch.seq_len,
        sequences_per_dp_group=plan.sequences_per_dp_group,
        micro_batch=recipe.pipeline.micro_batch,
        num_micro_batches=plan.num_micro_batches,
        schedule=schedule.kind,
        virtual_stages=schedule.v,
        nc=schedule.nc,
        rounds=schedule.rounds,
        bubble_over_compute=timelines[0].bubble_over_compute,
        bubble_over_total=timelines[0].bubble_over_total,
        fallback=schedule.fallback,
        zero=plan.zero,
        zero_reason=plan.zero_reason,
        num_frozen_stages=schedule.num_frozen_stages,
        recompute=plan.recompute,
        precisions=precisions(plan),
        ranks=tuple(_rank(plan, memory, counts) for memory in run_memory(plan, timelines)),
        later_phases=tuple(map(_later, plan.phases[1:], timelines[1:])),
        step_seconds=run_seconds(plan, machines, timelines[0].program),
        usable_bytes=None if machines is None else machines.chip.hbm_bytes - RESERVED,
    )


def _later(phase: Phase, timeline: Timeline) -> LaterPhase:
    return LaterPhase(
        after_tokens=phase.after_tokens,
        sequences=phase.sequences,
        seq_len=phase.seq_len,
        num_micro_batches=phase.num_micro_batches,
        schedule=phase.schedule.kind,
        bubble_over_total=timeline.bubble_over_total,
        fallback=phase.schedule.fallback,
        zero_reason=phase.zero_reason,
    )


def _rank(plan: RunPlan, memory: RankMemory, counts: Sequence[StageCount]) -> RankConsequences:
    pp_rank = memory.pp_rank
    schedule, optimizer = plan.schedule, plan.recipe.optimizer
    mine, held = plan.stages[pp_rank :: schedule.pp], counts[pp_rank :: schedule.pp]

    def held_in(schedule: Schedule) -> Bytes:
        return rank_bytes(
            pp_rank,
            schedule=schedule,
            counts=counts,
            dtype=plan.recipe.train.dtype,
            num_moments=moments_per_parameter(optimizer.name, momentum=optimizer.momentum),
        )

    return RankConsequences(
        pp_rank=pp_rank,
        stages=tuple(stage.index for stage in mine),
        num_layers=sum(len(stage.layers) for stage in mine),
        embedding=any(stage.embedding for stage in mine),
        head=any(stage.head for stage in mine),
        parameters=sum(c.held for c in held),
        trained_parameters=sum(c.trained for c in held),
        bytes=max((held_in(phase.schedule) for phase in plan.phases), key=lambda held: held.total),
        memory=memory,
        warmup=schedule.warmup[pp_rank],
        in_flight_peak=max(phase.schedule.in_flight_peak[pp_rank] for phase in plan.phases),
        reduce_scatters=schedule.reduce_scatters[pp_rank],
    )


def _describe(plan: RunPlan) -> str:
    """The model in one line, in the words of its papers."""
    config, model = plan.config, plan.recipe.model
    name = model.preset or model.path or ""
    parts = [
        f"{config.num_layers} layers of width {config.dim:,}",
        f"{config.num_heads} heads ({config.num_kv_heads} key-value)",
        f"ffn {config.ffn_dim:,}",
        f"vocabulary {config.vocab_size:,}" + (" (tied)" if config.tied else ""),
    ]
    return (f"{name}: " if name else "") + ", ".join(parts)
