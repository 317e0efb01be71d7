"""The verb that runs a step of single ranks of a job of any size on tensors without numbers: dry-run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fourfold.cli.errors import USER_ERROR, fail
from fourfold.layout import Grid


def dry_run(
    recipe: Path,
    /,
    *,
    rank: int | None = None,
    stages: Annotated[bool, Parameter(negative=())] = False,
    overrides: Annotated[
        tuple[str, ...], Parameter(name="--set", negative=(), help="KEY=VALUE, as in the recipe: layout.tp=2")
    ] = (),
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Run a step of single ranks of a job of any size, with the code that trains: what they hold, send and compute.

    No data, no GPU and no other rank is needed: tensors have shapes and no numbers. Ranks of the first, a middle and
    the last pipeline rank are run, if nothing else is asked for. An example:

    fourfold dry-run recipes/llama3-405b.toml --rank 64

    Parameters
    ----------
    recipe
        TOML file; docs/formats.md lists the keys. Its first batch is run, every row one document.
    rank
        The one rank to run.
    stages
        Run one rank of each pipeline rank.
    as_json
        Print one JSON object instead of text.
    """
    from fourfold.recipe import RecipeError, check, load

    try:
        plan = check(load(recipe, overrides))
        ranks = _ranks(plan.grid, rank, every=stages)
    except (RecipeError, ValueError) as error:
        return fail(error, USER_ERROR)

    from fourfold.report.dry_run import LEGEND, dry_run_json, dry_run_text
    from fourfold.trainer.dry_run.beside import beside
    from fourfold.trainer.dry_run.rank import dry_run as run  # imports torch: a refusal need not wait for it

    done = []
    for number in ranks:
        dry = run(plan, number)
        known = beside(plan, dry)
        done.append((dry, known))
        if not as_json:  # each as soon as it is there
            print(dry_run_text(plan, dry, known), end="\n\n", flush=True)
    print(json.dumps(dry_run_json(plan, done)) if as_json else LEGEND)
    return 0


def _ranks(grid: Grid, rank: int | None, *, every: bool) -> Sequence[int]:
    """Those to run. ValueError: there is no such rank, or it is asked for two things."""
    if rank is None:
        places = range(grid.pp) if every else dict.fromkeys((0, grid.pp // 2, grid.pp - 1))
        return [grid.rank(pp=place) for place in places]
    if every:
        raise ValueError(f"--rank {rank} and --stages: are two answers to which ranks to run; leave one of them out")
    if not 0 <= rank < grid.size:
        near = min(max(rank, 0), grid.size - 1)
        raise ValueError(f"--rank {rank}: must be one of the job's ranks, 0 to {grid.size - 1}; nearest legal: {near}")
    return [rank]
