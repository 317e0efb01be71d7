"""Writes the recipes of Llama 3 in recipes/, as `fourfold plan --recipe-out` writes them.

8B and 70B have the fastest layout that the trainer can run and that has memory to spare. 405B has the layout of Meta's
own training, which the paper's rules give (ISCA 2025, Table 2); where it does not fit in what the trainer needs, what
goes for next to nothing is recomputed. Each file says in its head with which command it can be made alone.
Run this after a new calibration of the planner; the old files are replaced.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

from fourfold.planner.jobs import Recompute
from fourfold.planner.machines.cluster import cluster
from fourfold.planner.reasons.as_recipe import layout_for_recipe, recipe_toml, trainable
from fourfold.planner.reasons.differences import compare_with_paper, paper_job
from fourfold.planner.search.exact import play_exactly
from fourfold.planner.search.judge import Candidate, candidate
from fourfold.planner.search.paper import paper_layout
from fourfold.planner.search.problem import Problem, parse_count
from fourfold.planner.search.search import Plan, search

HELD = ("tp", "cp", "pp", "virtual_stages", "micro_batch", "schedule", "zero", "recompute")
FOLDER = Path(__file__).resolve().parent.parent / "recipes"


@dataclass(frozen=True)
class Job:
    """What a recipe is made for."""

    model: str
    gpus: int
    seq: int
    tokens: str
    rules: bool = False
    """The layout of the paper's rules, if it fits as it is or with selective recomputation, not the search's."""
    tp: int | None = None
    """Hold TP to this. Across nodes it is nothing to recommend on a prediction alone."""

    @property
    def problem(self) -> Problem:
        """The job, on H100."""
        return Problem.of(
            model=self.model,
            cluster=cluster("h100", self.gpus),
            seq_len=self.seq,
            tokens=parse_count(self.tokens),
            limits={} if self.tp is None else {"tp": (self.tp,)},
        )

    def theirs(self) -> Candidate | None:
        """The layout of the paper's rules, if it is wanted and fits."""
        if not self.rules:
            return None
        job = paper_job(self.problem, paper_layout(self.problem))
        for recompute in (Recompute.NONE, Recompute.SELECTIVE):
            again = job.replace(recompute=int(recompute))
            one = candidate(self.problem, again, play_exactly(again, self.problem.stack))
            if one.fits:
                return one
        return None

    def plan(self) -> Plan:
        """What the trainer could run."""
        return search(trainable(self.problem), top=30)

    def layout(self) -> Candidate:
        """What the recipe gets."""
        return self.theirs() or layout_for_recipe(self.plan())

    def text(self, name: str) -> str:
        """The recipe."""
        theirs = self.theirs()
        if theirs is not None:
            return recipe_toml(self.problem, theirs, name=name, command=self.command(name, theirs))
        plan = self.plan()
        one = layout_for_recipe(plan)
        verdict = compare_with_paper(replace(plan, candidates=(one,))).verdict
        notes = textwrap.wrap(f"Beside the paper's rules: {verdict}", 118)
        return recipe_toml(self.problem, one, name=name, command=self.command(name), notes=notes)

    def command(self, name: str, held: Candidate | None = None) -> str:
        """What one types to get this recipe alone; `held`: to this layout."""
        own = "" if self.tp is None else f"--fix tp={self.tp} "
        fixed = own if held is None else "".join(f"--fix {key}={getattr(held, key)} " for key in HELD)
        return (
            f"fourfold plan --model {self.model} --gpu h100 --gpus {self.gpus} --seq {self.seq} "
            f"--batch-tokens {self.tokens} {fixed}--recipe-out recipes/{name}.toml"
        )


JOBS = {
    "llama3-8b": Job("llama3-8b", 32, 8_192, "4M"),
    "llama3-70b": Job("llama3-70b", 128, 8_192, "4M"),
    "llama3-405b": Job("llama3-405b", 16_384, 8_192, "16M", rules=True),
    "llama3-405b-131k": Job("llama3-405b", 16_384, 131_072, "16M", rules=True, tp=8),
}


def main() -> int:
    """Writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder (default: recipes)")
    out = parser.parse_args().out
    for name, job in JOBS.items():
        path = out / f"{name}.toml"
        path.write_text(job.text(name), encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
