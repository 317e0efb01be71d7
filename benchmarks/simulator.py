"""How fast the simulator is: Llama 3 405B on 16,384 and on 131,072 GPUs, every rank with its own documents and speed.

Prints seconds, actions per CPU second (one action: one node of the graph on one rank) and peak memory of the process.
Other simulators, as measured on the same kind of machine (peers-measured.md, facts of 2.2): 0.29 million nodes per CPU
second, and 5 to 12 s for one pipeline of 16 ranks with 8 virtual stages.

    ./run bench simulator
    ./run bench simulator --small      # without the 131,072 ranks
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

from fourfold.layout import Grid
from fourfold.planner.machines.cluster import cluster
from fourfold.planner.search.exact import schedule_of, stages_of
from fourfold.planner.search.own import OwnLayout
from fourfold.planner.search.problem import Problem
from fourfold.simulator.engine import simulate
from fourfold.simulator.faults import Faults
from fourfold.simulator.loads import loads_of, parse_mix
from fourfold.simulator.scenario import Scenario, scenario

MIX = "median=1024,dist=lognormal,sigma=1.5"
JITTER = 0.02


def llama3_405b(grid: Grid, *, seq_len: int, micro_batches: int, schedule: str, all_ranks: bool) -> Scenario:
    """The paper's layout, with `micro_batches` sequences per data-parallel group."""
    problem = Problem.of(
        model="llama3-405b",
        cluster=cluster("h100", grid.size),
        seq_len=seq_len,
        sequences=micro_batches * grid.dp,
        stack="meta",
    )
    layout = OwnLayout(
        tp=grid.tp,
        cp=grid.cp,
        pp=grid.pp,
        dp=grid.dp,
        virtual_stages=8,
        schedule=schedule,
        zero=1 if schedule == "interleaved" else 2,
        split="ends_light",
    )
    job = layout.job(problem)
    loads, faults = None, Faults()
    if all_ranks:
        loads = loads_of(
            parse_mix(MIX),
            seq_len=seq_len,
            dp=grid.dp,
            micro_batches=micro_batches,
            cp=grid.cp,
        )
        faults = Faults(jitter=JITTER)
    return scenario(
        job,
        problem.stack,
        schedule_of(job, messages=False),
        stages_of(job),
        loads=loads,
        faults=faults,
        all_ranks=all_ranks,
    )


def measure(name: str, grid: Grid, *, all_ranks: bool = True, **case: Any) -> float:
    """Plays one step, prints what it took, and returns CPU seconds per action of a rank."""
    began = time.perf_counter()
    made = llama3_405b(grid, all_ranks=all_ranks, **case)
    ready, cpu = time.perf_counter(), time.process_time()
    played = simulate(made, keep=False)
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    ranks = made.lanes.size
    actions = len(made.graph.nodes) * ranks // grid.pp
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{name:<44} {ranks:>8,} ranks {actions:>12,} actions: {ready - began:5.2f} s to prepare, "
        f"{ended - ready:6.2f} s to play, {actions / cpu / 1e6:7.2f} M actions per CPU second, "
        f"peak {peak:.2f} GiB; a step of {played.step_seconds:.2f} s"
    )
    return (ended - ready) / actions


def main() -> None:
    """Runs all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--small", action="store_true", help="without the 131,072 ranks")
    arguments = parser.parse_args()
    short: dict[str, Any] = {"seq_len": 8192, "micro_batches": 16, "schedule": "afab"}
    print("one pipeline (pp 16, v 8), all replicas alike")
    for micro_batches, schedule in ((16, "afab"), (32, "interleaved"), (128, "interleaved")):
        case = short | {"micro_batches": micro_batches, "schedule": schedule}
        measure(f"  {micro_batches} micro-batches, {schedule}", Grid(8, 1, 16, 128), all_ranks=False, **case)
    print(f"every rank, documents {MIX}, {JITTER:.0%} jitter")
    costs = [measure(f"  8,192 tokens, dp {dp}", Grid(8, 1, 16, dp), **short) for dp in (16, 32, 64, 128)]
    measure("  131,072 tokens, cp 16 dp 8", Grid(8, 16, 16, 8), **short | {"seq_len": 131072})
    print(
        "  seconds per action of a rank, from 2,048 to 16,384 ranks: " + ", ".join(f"{c * 1e9:.0f} ns" for c in costs)
    )
    if not arguments.small:
        measure("  8,192 tokens, dp 1,024", Grid(8, 1, 16, 1024), **short)


if __name__ == "__main__":
    main()
