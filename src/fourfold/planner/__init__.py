"""What a run will need and do, by arithmetic. No torch."""

from fourfold.planner.arithmetic import (
    Bytes,
    ParameterCount,
    StageCount,
    count_parameters,
    count_stages,
    count_trained,
    moments_per_parameter,
    on_tensor_rank,
    rank_bytes,
)
from fourfold.planner.consequences import Consequences, LaterPhase, RankConsequences, consequences
from fourfold.planner.flops import ModelFlops, causal_pairs, model_flops, stage_flops
from fourfold.planner.machines.hardware import GPUS, Gpu, find_gpu
from fourfold.planner.precision import Precision, precisions

__all__ = [
    "GPUS",
    "Bytes",
    "Consequences",
    "Gpu",
    "LaterPhase",
    "ModelFlops",
    "ParameterCount",
    "Precision",
    "RankConsequences",
    "StageCount",
    "causal_pairs",
    "consequences",
    "count_parameters",
    "count_stages",
    "count_trained",
    "find_gpu",
    "model_flops",
    "moments_per_parameter",
    "on_tensor_rank",
    "precisions",
    "rank_bytes",
    "stage_flops",
]
