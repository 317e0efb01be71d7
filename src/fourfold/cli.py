"""The command line. Each verb parses, calls one function and prints; torch is imported only by those that need it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from fourfold import __version__

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
    from fourfold.trainer.launch import run

    return run(recipe, overrides)


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
        raise ValueError(str(error).replace("num_micro_batches", "nmb")) from None  # as it is called here
    validate(made)
    print(json.dumps(schedule_json(made)) if as_json else schedule_text(made))
    return 0


def main() -> None:
    """Entry point of ``fourfold``. User mistakes end with one message and exit code 2, failures of a run with 1."""
    try:
        code = app(sys.argv[1:], result_action="return_value")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
