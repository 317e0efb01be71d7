"""The verbs that answer before a run: plan, and how right its answers are: accuracy, calibrate. None needs torch."""

from __future__ import annotations

import gc
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from fourfold.cli.errors import RUN_FAILED, USER_ERROR, fail

if TYPE_CHECKING:
    from fourfold.planner.search.search import Plan

Flag = Annotated[bool, Parameter(negative=())]


def plan(
    recipe: Path | None = None,
    /,
    *,
    model: str | None = None,
    gpu: str | None = None,
    gpus: str | None = None,
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
    override what it says. An example:

    fourfold plan --model llama3-70b --gpu h100 --gpus 128 --seq 8K --batch-tokens 4M

    Parameters
    ----------
    recipe
        TOML file. Its own layout is reported beside the best.
    model
        A preset such as llama3-405b, or a Hugging Face config.json.
    gpu
        h100, a100-80, b200 ..., or a TOML file that describes a cluster.
    gpus
        How many: 128, or 16K for 16 x 1,024.
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
        Hold a dimension, each with a --fix of its own: --fix tp=8 --fix schedule=afab. Several values: --fix pp=8,16.
    top
        Candidates to show.
    explain
        Walk through the decision, with this job's numbers.
    as_json
        Print one JSON object instead of tables.
    recipe_out
        Write the best layout that `fourfold train` can run as a recipe.
    """
    from fourfold.planner.search.problem import asked_problem
    from fourfold.planner.search.search import search
    from fourfold.recipe import RecipeError

    gc.disable()  # all that is made here lives until the end, and looking for garbage in it takes a tenth of the time
    try:
        _check_out(recipe_out)
        problem, own = asked_problem(
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
        found = search(problem, top=top, own=own)
    except (RecipeError, ValueError, OSError) as error:
        return fail(error, USER_ERROR)
    _show(found, explain=explain, as_json=as_json)
    if recipe_out is not None:
        from fourfold.planner.reasons.as_recipe import layout_for_recipe, recipe_sentence, write_recipe

        try:
            written = layout_for_recipe(found)
            write_recipe(found.problem, written, recipe_out, command=_command())
        except ValueError as error:
            return fail(error, USER_ERROR)
        except OSError as error:
            return fail(f"--recipe-out {recipe_out}: {error.strerror}", USER_ERROR)
        if not as_json:
            print(recipe_sentence(found, written, recipe_out))
    return 0 if found.candidates else RUN_FAILED


def _check_out(path: Path | None) -> None:
    """ValueError if a recipe cannot have this name, before all the work."""
    if path is not None and (path.is_dir() or not path.name):
        raise ValueError(f"--recipe-out {path}: is a folder; give the name of a file, such as {path / 'run.toml'}")
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"--recipe-out {path}: there is no folder {path.parent}")


def _show(found: Plan, *, explain: bool, as_json: bool) -> None:
    """Prints a plan, with its reasons if they are wanted."""
    reasons = None
    if explain:
        from fourfold.planner.reasons.explain import explain as explained

        reasons = explained(found)
    if as_json:
        from fourfold.planner.reasons.plan_json import plan_json

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
    from fourfold.planner.measured.accuracy import accuracy_json, score_tables
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
        CSV files of runs, one a line. Needed are the columns gpu, layers, hidden, heads, seq_len, global_batch,
        micro_batch, tp, pp, gpu_count (or dp) and measured_step_time_s; docs/formats.md lists the others.
    out
        TOML file to be made.
    base
        Stack from which the constants start, and near which they stay where the runs say nothing.
    name
        Of the new stack; default: the name of the file.
    """
    from fourfold.planner.measured.calibrate import calibrate_files
    from fourfold.report.accuracy import print_calibration

    try:
        result = calibrate_files(rows, out=out, base=base, name=name or out.stem)
    except (ValueError, OSError) as error:
        return fail(error, USER_ERROR)
    print_calibration(result)
    return 0
