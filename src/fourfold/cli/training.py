"""The verbs around training: train, schedule, runs, export, import. Torch is imported only by those that need it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from fourfold.cli.errors import RUN_FAILED, USER_ERROR, fail


def train(
    recipe: Path,
    /,
    *,
    overrides: Annotated[
        tuple[str, ...], Parameter(name="--set", negative=(), help="KEY=VALUE, as in the recipe: layout.tp=2")
    ] = (),
    resume: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Train a model as a recipe says, on all its ranks.

    On CPU and on the GPUs of one machine the ranks are started here. Under torchrun each process joins as one rank.

    Parameters
    ----------
    recipe
        TOML file; docs/formats.md lists the keys.
    resume
        Go on with the run of this name from its newest good checkpoint, under any layout; start it if there is none.
    """
    from fourfold.recipe import RecipeError, check, load

    try:
        plan = check(load(recipe, overrides))
    except RecipeError as error:
        return fail(error, USER_ERROR)

    from fourfold.trainer.launch import run  # imports torch, which takes seconds: a refusal need not wait for it
    from fourfold.trainer.ranks import EXPLAIN_THEMSELVES, RankFailure, is_echo

    try:
        return run(plan, recipe, overrides, resume=resume)
    except RecipeError as error:
        return fail(error, USER_ERROR)
    except BrokenPipeError:
        raise
    except (RankFailure, TimeoutError, OSError, *EXPLAIN_THEMSELVES) as error:
        return fail(error, RUN_FAILED, rank=os.environ.get("RANK"))
    except RuntimeError as error:
        if not is_echo(error):
            raise
        return fail("another rank has ended, and with it the connection to it", RUN_FAILED, rank=os.environ.get("RANK"))


def schedule(
    *,
    pp: int,
    nmb: int,
    v: int = 1,
    nc: int | None = None,
    kind: Literal["afab", "1f1b", "interleaved", "flexible", "zb-h1"] = "flexible",
    zero: Literal[1, 2, 3] = 1,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    html: Path | None = None,
    png: Path | None = None,
    svg: Path | None = None,
) -> int:
    """Show a pipeline schedule: what each pipeline rank does, its bubble and the activations it holds.

    Parameters
    ----------
    pp
        Pipeline ranks.
    nmb
        Micro-batches per step.
    v
        Virtual stages per rank.
    nc
        Consecutive micro-batches per virtual stage (flexible); default pp.
    kind
        Order of the computations.
    zero
        ZeRO mode, which places the FSDP events.
    as_json
        Print one JSON object instead of the table.
    html
        Write a page with the timeline, which can be zoomed, and the activations held.
    png
        Write the same as a picture.
    svg
        Write the same as a picture that can be scaled.
    """
    from fourfold.cli.drawings import check_drawings, write_drawings
    from fourfold.layout import generate, play, validate
    from fourfold.report.schedule import schedule_json, schedule_page, schedule_text

    try:
        check_drawings(html=html, png=png, svg=svg)
        made = generate(pp=pp, v=v, num_micro_batches=nmb, kind=kind, nc=nc, zero=zero)
    except ValueError as error:
        return fail(str(error).replace("num_micro_batches", "nmb"), USER_ERROR)  # as it is called here
    validate(made)
    played = play(made)
    drawn = []
    try:
        if html or png or svg:
            drawn = write_drawings(schedule_page(made, played=played), html=html, png=png, svg=svg)
    except OSError as error:
        return fail(error, USER_ERROR)
    if as_json:
        print(json.dumps(schedule_json(made, played=played)))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(schedule_text(made, asked_nc=nc, width=width, played=played))
        if drawn:
            print("", *drawn, sep="\n")
    return 0


def runs(
    directory: Path = Path("runs"),
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """List the runs of a folder: their state, how far they are, and their newest checkpoint.

    Parameters
    ----------
    directory
        Folder that holds runs, as output.dir of a recipe.
    as_json
        Print a JSON list instead of the table.
    """
    import time

    from fourfold.report.runs import print_runs
    from fourfold.trainer.runs import list_runs, summary_json

    try:
        found = list_runs(directory)
    except OSError as error:
        return fail(f"{directory}: {error.strerror}", USER_ERROR)
    if as_json:
        print(json.dumps([summary_json(run) for run in found]))
    elif found:
        print_runs(found, now=time.time())
    else:
        print(f"no runs in {directory}")
    return 0


def export(
    checkpoint: str,
    directory: Path,
    /,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    shard_size: str = "5GB",
) -> int:
    """Write a checkpoint's weights in Hugging Face's format.

    Parameters
    ----------
    checkpoint
        Folder or URL of a checkpoint, or of a run, or of several checkpoints: then their newest good one.
    directory
        Folder to be made.
    dtype
        Of the weights in the files.
    shard_size
        Of a file at most, such as 500MB; a weight that is larger has a file of its own.
    """
    from fourfold.parallel.model import DTYPES
    from fourfold.trainer.checkpoint import find_checkpoint
    from fourfold.trainer.export import export_checkpoint, parse_size

    try:
        limit = parse_size(shard_size)
        found = find_checkpoint(checkpoint)
        done = export_checkpoint(found, directory, dtype=DTYPES[dtype], shard_size=limit)
    except ValueError as error:
        return fail(error, USER_ERROR)
    except OSError as error:
        return fail(error, RUN_FAILED)
    print(f"Step {done.step} of {found.path}: {done}")
    return 0


def import_(directory: Path, checkpoint: str, /) -> int:
    """Make a checkpoint of step 0 of a model in Hugging Face's format. A recipe names it as model.path.

    Parameters
    ----------
    directory
        Folder with config.json and safetensors.
    checkpoint
        Folder or URL to be made.
    """
    from fourfold.trainer.export import import_model

    try:
        done = import_model(directory, checkpoint)
    except (ValueError, FileNotFoundError) as error:
        return fail(error, USER_ERROR)
    except OSError as error:
        return fail(error, RUN_FAILED)
    print(f"{directory}: {done}")
    return 0
