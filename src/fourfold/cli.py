"""The command line. Each verb parses, calls one function and prints; torch is imported only by those that need it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from fourfold import __version__

USER_ERROR, RUN_FAILED = 2, 1  # exit codes

app = App(
    name="fourfold",
    help="Plan, simulate, train and debug Llama-style models with four kinds of parallelism: TP, CP, PP and FSDP.",
    version=__version__,
    version_flags=["--version"],
    help_format="plaintext",  # markdown would take a quarter of the time of --help to import
)


@app.command
def train(
    recipe: Path,
    /,
    *,
    overrides: Annotated[
        tuple[str, ...], Parameter(name="--set", negative=(), help="KEY=VALUE, as in the recipe: layout.tp=2")
    ] = (),
) -> int:
    """Train a model as a recipe says, on all its ranks.

    On CPU and on the GPUs of one machine the ranks are started here. Under torchrun each process joins as one rank.

    Parameters
    ----------
    recipe
        TOML file; docs/formats.md lists the keys.
    """
    from fourfold.recipe import RecipeError, check, load

    try:
        plan = check(load(recipe, overrides))
    except RecipeError as error:
        return _fail(error, USER_ERROR)

    from fourfold.trainer.launch import run  # imports torch, which takes seconds: a refusal need not wait for it
    from fourfold.trainer.ranks import RankFailure

    try:
        return run(plan, recipe, overrides)
    except RecipeError as error:
        return _fail(error, USER_ERROR)
    except BrokenPipeError:
        raise
    except (RankFailure, TimeoutError, OSError) as error:
        return _fail(error, RUN_FAILED)


@app.command
def schedule(
    *,
    pp: int,
    nmb: int,
    v: int = 1,
    nc: int | None = None,
    kind: Literal["afab", "1f1b", "interleaved", "flexible"] = "flexible",
    zero: Literal[1, 2, 3] = 1,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
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
    """
    from fourfold.layout import generate, validate
    from fourfold.report.schedule import schedule_json, schedule_text

    try:
        made = generate(pp=pp, v=v, num_micro_batches=nmb, kind=kind, nc=nc, zero=zero)
    except ValueError as error:
        return _fail(str(error).replace("num_micro_batches", "nmb"), USER_ERROR)  # as it is called here
    validate(made)
    if as_json:
        print(json.dumps(schedule_json(made)))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(schedule_text(made, asked_nc=nc, width=width))
    return 0


def _fail(error: object, code: int) -> int:
    if os.environ.get("RANK", "0") == "0":  # under torchrun all ranks find the same, and one says it
        print(f"error: {error}", file=sys.stderr)
    return code


def main() -> None:
    """Entry point of ``fourfold``. What a user can mend ends with one message; a bug of ours shows where it is."""
    try:
        code = app(sys.argv[1:], result_action="return_value")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader went away, as in `| head`; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = RUN_FAILED
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
