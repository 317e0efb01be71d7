"""The verb that says whether two runs are the same, apart by the order of sums, or one of them wrong: compare."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from fourfold.cli.errors import RUN_FAILED, USER_ERROR, fail

if TYPE_CHECKING:
    from fourfold.debugger.numerics.comparison import Comparison

DIFFERENT = 1  # exit code where a bug is found, as of diff
_STEPS = 3  # that are run beside a reference


def compare(
    first: Path,
    second: Path | None = None,
    /,
    *,
    reference: Annotated[bool, Parameter(negative=())] = False,
    steps: str | None = None,
    overrides: Annotated[
        tuple[str, ...], Parameter(name="--set", negative=(), help="KEY=VALUE, of the recipe beside its reference")
    ] = (),
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Say whether the numbers of two runs are the same, differ by the order of sums, or one is wrong, and where.

    Two runs of any layouts: fourfold compare runs/demo runs/demo-2

    A recipe beside a reference that makes all its sums in the same order: fourfold compare demo.toml --reference

    Exit code 1: a bug, runs whose recipes ask for other numbers, or what cannot be told.

    Parameters
    ----------
    first
        Folder of a run, or of its numerics; a JSONL file of losses or a folder with one, or a model in Hugging Face's
        format, of any system. With --reference a recipe.
    second
        The same of what it should be.
    reference
        Run the first steps of a recipe, and the same sums in the same order in one process, and compare them to the
        bit.
    steps
        Steps to look at, as in 1-3; default: all that both have. With --reference how many to run; default: 3.
    as_json
        Print one JSON object instead of text.
    """
    if reference:
        if second is not None:
            return fail(f"--reference takes one recipe; leave out {second}, or --reference", USER_ERROR)
        return _beside_reference(first, steps, overrides, as_json)
    if overrides:
        return fail("--set: is for a recipe with --reference; leave it out", USER_ERROR)
    if second is None:
        hint = "; or add --reference, to run this recipe beside one" if first.suffix == ".toml" else ""
        return fail(f"{first}: compared with what? Name a second run{hint}", USER_ERROR)
    return _two_runs(first, second, steps, as_json)


def _two_runs(first: Path, second: Path, steps: str | None, as_json: bool) -> int:
    from fourfold.report.comparison import comparison_json, comparison_text

    try:
        wanted = None if steps is None else _range(steps)
        for path in (first, second):
            if path.suffix == ".toml":
                raise ValueError(f"{path}: is a recipe; name the folder of its run, or take one recipe and --reference")
            if not path.exists():
                raise ValueError(f"{path}: there is no such file or folder")

        from fourfold.debugger.numerics.runs import compare_runs  # imports torch: a refusal need not wait for it
        from fourfold.trainer.export import side_of_checkpoint

        a, b = (side_of_checkpoint(path) or path for path in (first, second))
        found = compare_runs(a, b, steps=wanted)
    except (ValueError, OSError) as error:
        return fail(error, USER_ERROR)
    print(json.dumps(comparison_json(found)) if as_json else comparison_text(found))
    return _code(found)


def _beside_reference(recipe: Path, steps: str | None, overrides: tuple[str, ...], as_json: bool) -> int:
    from fourfold.recipe import RecipeError, check, load
    from fourfold.report.comparison import reference_json, reference_text

    try:
        plan = check(load(recipe, overrides))
        number = _STEPS if steps is None else _count(steps)
    except (RecipeError, ValueError) as error:
        return fail(error, USER_ERROR)

    from fourfold.trainer.beside import run_beside
    from fourfold.trainer.ranks import EXPLAIN_THEMSELVES, RankFailure, Stopped

    try:
        beside = run_beside(plan, steps=number, say=lambda text: print(text, file=sys.stderr, flush=True))
    except RecipeError as error:
        return fail(error, USER_ERROR)
    except Stopped as stopped:
        return 128 + stopped.signal
    except (RankFailure, TimeoutError, OSError, ValueError, *EXPLAIN_THEMSELVES) as error:
        return fail(error, RUN_FAILED)
    ordered, plain = beside.ordered, beside.plain
    print(json.dumps(reference_json(ordered, plain)) if as_json else reference_text(ordered, plain))
    return max(_code(ordered), _code(plain))


def _code(found: Comparison) -> int:
    return DIFFERENT if found.verdict in ("bug", "other run", "unknown") else 0


def _range(text: str) -> tuple[int, int]:
    from fourfold.recipe.ranges import parse_range

    try:
        steps = parse_range(text)
    except ValueError as error:
        raise ValueError(f"--steps {error}") from None
    return steps[0], steps[-1]


def _count(text: str) -> int:
    number = text.removeprefix("1-")
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(f"--steps {text}: with --reference it is how many steps to run, from the first on; such as 3")
    return int(number)
