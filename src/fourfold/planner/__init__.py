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

__all__ = [
    "Bytes",
    "Consequences",
    "LaterPhase",
    "ParameterCount",
    "RankConsequences",
    "StageCount",
    "consequences",
    "count_parameters",
    "count_stages",
    "count_trained",
    "moments_per_parameter",
    "on_tensor_rank",
    "rank_bytes",
]
