"""Whether `fourfold diagnose` is right: faults planted in simulated steps, found again in their traces.

Every case is one job with its own documents, 1 % jitter, and clocks of hosts (4 ranks each) that are wrong by up to
60 ms. Planted are, on every rank in turn: a GPU that computes longer; a host that launches late, by as much in all; a
link to a neighbour, tp, cp and pp in turn. And jobs in which nothing is slow, and some in which two things are.

    ./run bench diagnose                 # 16 ranks, all cases
    ./run bench diagnose --ranks 64      # 64 ranks
    ./run bench diagnose --every 4       # every fourth rank
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fourfold.debugger.slow import Culprit, Diagnosis, diagnose_traces
from fourfold.layout import Grid
from fourfold.planner.machines.cluster import cluster
from fourfold.planner.timing.stack import load_stack
from fourfold.recipe import check, load
from fourfold.report.trace import write_traces
from fourfold.report.trace_groups import Sizes
from fourfold.simulator.engine import simulate
from fourfold.simulator.faults import Faults
from fourfold.simulator.loads import loads_of, parse_mix
from fourfold.simulator.scenario import Scenario, recipe_job, recipe_scenario

GRIDS = {16: Grid(tp=2, cp=2, pp=2, dp=2), 64: Grid(tp=2, cp=2, pp=4, dp=4)}
FACTORS = (1.1, 1.2, 1.3, 1.5, 2.0)
FROM = 1.3  # from here on answers must be right
MIX = "mean=2048,dist=exponential"
JITTER, SKEW_MS, STEPS = 0.01, 60.0, 3
HEALTHY, PAIRS = 100, 40


@dataclass(frozen=True)
class Case:
    """What is planted."""

    kind: str
    """compute, cpu, link, healthy or two."""
    factor: float
    slow: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    """Of each fault: one rank, or the ends of a link."""
    seed: int


class Bench:
    """One layout, and its cases."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self.grid, self.folder = GRIDS[ranks], folder
        grid = self.grid
        settings = {
            "model.num_layers": 8,
            "layout.tp": grid.tp,
            "layout.cp": grid.cp,
            "layout.pp": grid.pp,
            "layout.dp": grid.dp,
            "layout.zero": 1,
            "pipeline.schedule": '"1f1b"',
            "pipeline.virtual_stages": 1,
            "train.recompute": '"none"',
            "pipeline.split": "[5, 3]" if grid.pp == 2 else "[3, 2, 2, 1]",  # the head is 2.4 layers
            "batch.sequences": 6 * grid.dp,
            "cluster.gpus_per_node": 4,
        }
        recipe = Path(__file__).parents[1] / "recipes" / "llama3-8b.toml"
        self.plan = check(load(recipe, tuple(f"{key}={value}" for key, value in settings.items())))
        self.machines, self.stack = cluster("h100", grid.size), load_stack("standard")
        self.sizes = Sizes.of(recipe_job(self.plan, self.machines, self.stack), self.plan.stages)
        healthy = simulate(self._scenario(Faults(), seed=0, everyone=True))
        self.computing = {
            pp: float(sum(healthy.spent[name][:, pp].mean() for name in ("compute", "attention")))
            for pp in range(grid.pp)
        }  # seconds per step of a rank
        self.launches = [len(own) for own in healthy.graph.on_rank]
        self.step_seconds = healthy.step_seconds

    def _scenario(self, faults: Faults, *, seed: int, everyone: bool = False) -> Scenario:
        grid, plan = self.grid, self.plan
        loads = loads_of(
            parse_mix(MIX),
            seq_len=plan.phases[0].seq_len,
            dp=grid.dp,
            micro_batches=plan.num_micro_batches,
            cp=grid.cp,
            seed=seed,
        )
        return recipe_scenario(plan, self.machines, self.stack, loads=loads, faults=faults, all_ranks=everyone)

    def cases(self, every: int) -> Iterator[Case]:
        """All of them."""
        ranks, seed = range(0, self.grid.size, every), 0
        for factor in FACTORS:
            for rank in ranks:
                seed += 1
                yield Case("compute", factor, (f"rank={rank}:{factor}",), ((rank,),), seed)
                yield Case("cpu", factor, (self._late(rank, factor),), ((rank,),), seed)
                ends = self._link(rank)
                yield Case("link", factor, (f"link={ends[0]}-{ends[1]}:{factor}",), (ends,), seed)
        for seed in range(1_000, 1_000 + max(HEALTHY // every, 4)):
            yield Case("healthy", 1.0, (), (), seed)
        random = np.random.default_rng(0)
        for seed in range(2_000, 2_000 + max(PAIRS // every, 4)):
            one, other = sorted(random.choice(self.grid.size, 2, replace=False).tolist())
            factor = float(random.choice(FACTORS[FACTORS.index(FROM) :]))
            slow = (f"rank={one}:{factor}", self._late(other, factor) if seed % 2 else f"rank={other}:{factor}")
            yield Case("two", factor, slow, ((one,), (other,)), seed)

    def _late(self, rank: int, factor: float) -> str:
        """A host so late that its rank takes `factor` times as long."""
        pp = self.grid.coordinates(rank).pp
        return f"cpu={rank}:{(factor - 1) * self.computing[pp] / self.launches[pp]:.9f}"

    def _link(self, rank: int) -> tuple[int, int]:
        """Each rank's link to its next in tp, cp or pp, in turn."""
        dimension = ("tp", "cp", "pp")[rank % 3]
        group = self.grid.group_of(rank, dimension)
        at = group.index(rank)
        peer = group[at + 1] if at + 1 < len(group) else group[at - 1]
        return min(rank, peer), max(rank, peer)

    def run(self, case: Case) -> tuple[Diagnosis, float]:
        """The answer, and the seconds by which the step is longer for what is planted."""
        faults = Faults.parse(case.slow, jitter=JITTER, seed=case.seed)
        scenario = self._scenario(faults, seed=case.seed)
        played = simulate(scenario)
        shutil.rmtree(self.folder, ignore_errors=True)
        write_traces(
            self.folder,
            scenario,
            played,
            skew_ms=SKEW_MS,
            seed=case.seed,
            steps=STEPS,
            sizes=self.sizes,
            gpus_per_node=4,
        )
        found = diagnose_traces(self.folder, workers=1)
        normal = simulate(self._scenario(Faults(jitter=JITTER, seed=case.seed), seed=case.seed), keep=False)
        return found, played.step_seconds - normal.step_seconds

    def right(self, case: Case, found: Diagnosis) -> bool:
        """Whether the answer is."""
        culprits = found.verdict.culprits
        if case.kind == "healthy":
            return found.verdict.answer == "healthy"
        if len(culprits) != len(case.ranks):
            return False
        kinds = [slow.partition("=")[0].replace("rank", "compute") for slow in case.slow]
        return {*zip(kinds, case.ranks, strict=True)} == {(c.kind, c.ranks) for c in culprits}

    def excess(self, case: Case, culprit: Culprit) -> float:
        """The excess that was found over the one that was planted, of a rank."""
        rank = culprit.ranks[0]
        planted = (case.factor - 1) * self.computing[self.grid.coordinates(rank).pp]
        return culprit.excess / planted


def main() -> None:
    """Runs all cases and prints how many answers are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=GRIDS, default=16)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="faults on every N-th rank")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        rows, wrong = measure(Bench(arguments.ranks, Path(folder) / "traces"), arguments.every)
    if arguments.json:
        print(json.dumps({"ranks": arguments.ranks, "rows": rows, "wrong": wrong}))
        return
    print(f"{arguments.ranks} ranks, {sum(row['cases'] for row in rows)} cases in {time.perf_counter() - began:.0f} s")
    print(f"{'planted':<9}{'factor':>7}{'cases':>7}{'right':>8}   found / planted: excess, gain (median, worst)")
    for row in rows:
        more = "".join(
            f"   {row[key][0]:5.2f} {row[key][1]:5.2f}" if row[key] else "       -     -" for key in ("excess", "gain")
        )
        print(f"{row['kind']:<9}{row['factor']:>7}{row['cases']:>7}{row['right'] / row['cases']:>8.1%}{more}")
    for line in wrong[:20]:
        print("wrong:", line)


def measure(bench: Bench, every: int) -> tuple[list[dict], list[str]]:
    """A row per kind and factor, and a sentence per wrong answer."""
    results: dict[tuple[str, float], list[tuple[bool, float, float]]] = defaultdict(list)
    wrong = []
    for case in bench.cases(every):
        found, cost = bench.run(case)
        right = bench.right(case, found)
        excess = gain = np.nan
        if right and case.kind in ("compute", "cpu"):
            excess = bench.excess(case, found.verdict.culprits[0])
        if right and case.ranks and found.verdict.gain is not None and cost > 0.01 * bench.step_seconds:
            gain = found.verdict.gain / cost
        if not right:
            said = ", ".join(f"{c.kind} {c.ranks} x {c.factor:.2f}" for c in found.verdict.culprits)
            wrong.append(f"{' '.join(case.slow) or 'nothing'} (seed {case.seed}): {found.verdict.answer} {said}")
        results[case.kind, case.factor if case.kind != "two" else FROM].append((right, excess, gain))
    rows = []
    for (kind, factor), answers in results.items():
        columns = list(zip(*answers, strict=True))
        rows.append(
            {
                "kind": kind,
                "factor": factor,
                "cases": len(answers),
                "right": sum(columns[0]),
                "excess": _summary(columns[1]),
                "gain": _summary(columns[2]),
            }
        )
    return rows, wrong


def _summary(ratios: tuple[float, ...]) -> tuple[float, float] | None:
    """Median, and the farthest from 1."""
    known = [ratio for ratio in ratios if not np.isnan(ratio)]
    return (float(np.median(known)), max(known, key=lambda ratio: abs(ratio - 1))) if known else None


if __name__ == "__main__":
    main()
