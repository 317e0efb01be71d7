"""The verbs that answer before a run: plan, and how right its answers are: accuracy, calibrate. None needs torch."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from fourfold.cli.errors import RUN_FAILED, USER_ERROR, fail

if TYPE_CHECKING:
    from fourfold.planner.search import Plan

Flag = Annotated[bool, Parameter(negative=())]


def plan(
    recipe: Path | None = None,
    /,
    *,
    model: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    seq: str | None = None,
    batch_tokens: str | None = None,
    dtype: str | None = None,
    stack: str = "standard",
    documents: str | None = None,
    fix: Annotated[tuple[str, ...], Parameter(name="--fix", negative=())] = (),
    top: int = 10,
    explain: Flag = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    recipe_out: Path | None = None,
) -> int:
    """Find the best layout of a training job: does it fit, how fast is it, and why.

    The job is that of a recipe, or --model, --gpu, --gpus, --seq and --batch-tokens say it; with a recipe they
    override what it says.

    Parameters
    ----------
    recipe
        TOML file. Its own layout is reported beside the best.
    model
        A preset such as llama3-405b, or a Hugging Face config.json.
    gpu
        h100, a100-80, b200 ..., or a TOML file that describes a cluster.
    gpus
        How many.
    seq
        Tokens per sequence: 8192, or 8K for 8 x 1,024.
    batch_tokens
        Tokens per step over all GPUs: 16M is 16 x 1,024 x 1,024.
    dtype
        bf16 (default), fp16, fp32, fp8, mxfp8 or fp4.
    stack
        Software whose speed and memory are assumed, or a file that `fourfold calibrate` made.
    documents
        Lengths of the documents in a sequence, such as mean=1024,dist=exponential; without it a sequence is one.
    fix
        Hold a dimension: --fix tp=8 --fix schedule=afab. Several values: --fix pp=8,16.
    top
        Candidates to show.
    explain
        Walk through the decision, with this job's numbers.
    as_json
        Print one JSON object instead of tables.
    recipe_out
        Write the best layout that `fourfold train` can run as a recipe.
    """
    from fourfold.planner.own import OwnLayout
    from fourfold.planner.problem import asked_problem
    from fourfold.planner.search import search
    from fourfold.recipe import RecipeError

    try:
        problem, known = asked_problem(
            recipe,
            model=model,
            gpu=gpu,
            gpus=gpus,
            seq=seq,
            batch_tokens=batch_tokens,
            dtype=dtype,
            stack=stack,
            documents=documents,
            fix=fix,
        )
        if top < 1:
            raise ValueError(f"--top: must be at least 1, but is {top}")
        found = search(problem, top=top, own=None if known is None else OwnLayout.of(known))
    except (RecipeError, ValueError, OSError) as error:
        return fail(error, USER_ERROR)
    _show(found, explain=explain, as_json=as_json)
    if recipe_out is not None:
        from fourfold.planner.as_recipe import layout_for_recipe, write_recipe

        try:
            write_recipe(found.problem, layout_for_recipe(found), recipe_out, command=_command())
        except (ValueError, OSError) as error:
            return fail(error, USER_ERROR)
        if not as_json:
            print(f"Recipe: {recipe_out}")
    return 0 if found.candidates else RUN_FAILED


def _show(found: Plan, *, explain: bool, as_json: bool) -> None:
    """Prints a plan, with its reasons if they are wanted."""
    reasons = None
    if explain:
        from fourfold.planner.explain import explain as explained

        reasons = explained(found)
    if as_json:
        from fourfold.planner.plan_json import plan_json

        print(json.dumps(plan_json(found, reasons)))
        return
    from fourfold.report.plan import print_plan

    print_plan(found)
    if reasons is not None:
        from fourfold.report.explain import print_explanation

        print()
        print_explanation(reasons)


def _command() -> str:
    """What was typed."""
    return shlex.join(["fourfold", *sys.argv[1:]])


def accuracy(
    *,
    data: Annotated[tuple[Path, ...], Parameter(negative=())] = (),
    half: Literal["reported", "calibrated", "both"] | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Compare predictions with measured runs: step times, peak memory, and what ran out of memory.

    Parameters
    ----------
    data
        CSV files; docs/formats.md says their columns. Default: the measurements that come with Fourfold.
    half
        Runs that the constants were not fitted to (reported), those that they were, or both. Default: reported of
        Fourfold's own files, both of files that are given.
    as_json
        Print one JSON object instead of tables.
    """
    from fourfold.planner.accuracy import accuracy_json, score_tables
    from fourfold.report.accuracy import print_accuracy

    try:
        scored = score_tables(data or None, half=half)
    except (ValueError, OSError) as error:
        return fail(error, USER_ERROR)
    if as_json:
        print(json.dumps(accuracy_json(scored)))
    else:
        print_accuracy(scored)
    return 0


def calibrate(
    *rows: Path,
    out: Path,
    base: str = "standard",
    name: str | None = None,
) -> int:
    """Fit the constants of the time model to your own runs, and write them as a stack for `fourfold plan --stack`.

    Parameters
    ----------
    rows
        CSV files with the columns of published.csv; docs/formats.md lists those that are needed.
    out
        TOML file to be made.
    base
        Stack from which the constants start, and near which they stay where the runs say nothing.
    name
        Of the new stack; default: the name of the file.
    """
    from fourfold.planner.calibrate import calibrate_files
    from fourfold.report.accuracy import print_calibration

    try:
        result = calibrate_files(rows, out=out, base=base, name=name or out.stem)
    except (ValueError, OSError) as error:
        return fail(error, USER_ERROR)
    print_calibration(result)
    return 0
