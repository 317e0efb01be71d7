"""A simulated step as one JSON object; docs/formats.md explains its keys. Seconds, bytes, shares from 0 to 1."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from fourfold.report.simulation.findings import findings
from fourfold.report.simulation.measures import exposed, means, own_computing, slowest
from fourfold.simulator.answer import Answer
from fourfold.simulator.causes import idle_by_phase
from fourfold.simulator.critical import CriticalPath
from fourfold.simulator.live import StepMemory
from fourfold.simulator.loads import Loads
from fourfold.simulator.played import CLASSES, Played
from fourfold.simulator.scenario import Scenario

FORMAT = 1
_MOST_RANKS = 16  # of the critical path's, the most important


def simulation_json(answer: Answer) -> dict[str, Any]:
    """docs/formats.md explains the keys."""
    scenario, played, gains, path = answer.scenario, answer.played, answer.gains, answer.path
    memory, name, tokens = answer.memory, answer.name, answer.tokens
    grid, schedule, lanes = scenario.grid, scenario.schedule, played.lanes
    found = findings(scenario, played, gains=gains, path=path, memory=memory)
    return {
        "format": FORMAT,
        "name": name,
        "layout": {"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "dp": grid.dp, "ranks": grid.size},
        "simulated": {"tp": lanes.tp, "cp": lanes.cp, "pp": grid.pp, "dp": lanes.dp},
        "schedule": {
            "kind": schedule.kind,
            "virtual_stages": schedule.v,
            "nc": schedule.nc,
            "micro_batches": schedule.num_micro_batches,
            "zero": schedule.zero,
            "frozen_stages": schedule.num_frozen_stages,
            "receives": scenario.graph.receives,
        },
        "slow": list(scenario.faults.descriptions()),
        "documents": None if scenario.loads is None else scenario.loads.mix,
        "cp_splits": [_split(loads) for loads in answer.splits],
        "step_seconds": played.step_seconds,
        "pipeline_seconds": played.pipeline_seconds,
        "tokens_per_second": None if not tokens else tokens / played.step_seconds,
        "bubble_over_compute": played.bubble_over_compute,
        "bubble_over_total": played.bubble_over_total,
        "bubble_seconds": played.bubble_seconds,
        "bubble_share_of_step": played.bubble_over_step,
        "exposed": _exposed(played),
        "spent": means(played),
        "ranks": _ranks(scenario, played, path, memory),
        "slowest_rank": _slowest(scenario, played),
        "critical_path": {
            "by_class": path.by_class,
            "by_pipeline_rank": list(path.by_pipeline_rank),
            "by_rank": {str(rank): share for rank, share in list(path.by_rank.items())[:_MOST_RANKS]},
            "ranks": len(path.by_rank),
        },
        "gains": [
            {
                "what": gain.what,
                "sentence": gain.sentence,
                "step_seconds": gain.step_seconds,
                "gain_seconds": gain.seconds,
                "gain_share": gain.share,
            }
            for gain in gains
        ],
        "memory": None if memory is None else _memory(memory),
        "findings": [*found.first, *found.more],
    }


def _exposed(played: Played) -> dict[str, dict[str, float]]:
    return {
        dimension: {"seconds": seconds, "share": seconds / played.step_seconds, "wait_seconds": waits}
        for dimension, (seconds, waits) in exposed(played).items()
    }


def _ranks(scenario: Scenario, played: Played, path: CriticalPath, memory: StepMemory | None) -> list[dict[str, Any]]:
    """Every pipeline rank, the mean of its replicas."""
    idle = idle_by_phase(played)
    return [
        {
            "pp_rank": pp_rank,
            "stages": list(range(pp_rank, scenario.schedule.num_stages, scenario.grid.pp)),
            "spent": {one: float(played.spent[one][:, pp_rank].mean()) for one in CLASSES},
            "bubble_warm_up": float(idle[0, pp_rank]),
            "bubble_steady_state": float(idle[1, pp_rank]),
            "bubble_cool_down": float(idle[2, pp_rank]),
            "path_share": path.by_pipeline_rank[pp_rank],
            "peak_bytes": None if memory is None else memory.peaks[pp_rank].total,
        }
        for pp_rank in range(scenario.grid.pp)
    ]


def _slowest(scenario: Scenario, played: Played) -> dict[str, Any]:
    """The rank that computes longest; of replicas that are alike, the first."""
    own = own_computing(played)
    dp, pp, cp, tp = slowest(played)
    middle = float(np.median(own))
    return {
        "rank": scenario.grid.rank(dp=dp, pp=pp, cp=cp, tp=tp),
        "dp": dp,
        "pp": pp,
        "cp": cp,
        "tp": tp,
        "computing_seconds": float(own.max()),
        "over_median": float(own.max()) / middle if middle else None,
    }


def _memory(memory: StepMemory) -> dict[str, Any]:
    return {
        "worst_rank": memory.worst_rank,
        "capacity_bytes": memory.capacity,
        "ranks": [asdict(rank) | {"stages": list(rank.stages)} for rank in memory.peaks],
    }


def _split(loads: Loads) -> dict[str, Any]:
    """Infinite factors, of ranks without work, are null."""

    def finite(factor: float) -> float | None:
        return factor if math.isfinite(factor) else None

    return {
        "strategy": loads.strategy,
        "slowest_over_mean": loads.slowest_over_mean,
        "slowest_over_fastest": finite(loads.slowest_over_fastest),
        "slowest_over_mean_per_micro_batch": loads.slowest_over_mean_per_micro_batch,
        "slowest_over_fastest_per_micro_batch": finite(loads.slowest_over_fastest_per_micro_batch),
        "waiting_share": loads.waiting_share,
    }
