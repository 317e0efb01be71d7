"""The verb that finds what is slow, stuck, or fills the memory: diagnose. It needs no torch."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from fourfold.cli.drawings import check_drawings, check_merged, write_drawings
from fourfold.cli.errors import USER_ERROR, fail

if TYPE_CHECKING:
    from fourfold.debugger.slow.diagnosis import Progress

Flag = Annotated[bool, Parameter(negative=())]


def diagnose(
    path: Path,
    /,
    *,
    layout: str | None = None,
    steps: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    html: Path | None = None,
    merged: Path | None = None,
    keep: Flag = False,
    workers: int | None = None,
) -> int:
    """Find the rank, host or link that holds up the others, the rank that a hung run waits for, or what fills memory.

    An example:

    fourfold diagnose runs/demo/profile --html slow.html

    Parameters
    ----------
    path
        Folder of a run, of profiler traces (.json, .json.gz, one per rank), of action logs, of flight-recorder dumps or
        of memory snapshots (.pickle); one trace, dump or snapshot; or a table of operations (.parquet).
    layout
        Sizes of the dimensions, tp=2,cp=2,pp=2,dp=2, where the files do not tell.
    steps
        Steps to look at, as in 10-12; default: all that the ranks have in common.
    as_json
        Print one JSON object instead of text.
    html
        Write a page with every rank's excess, who waits for whom, and the timelines around the culprit.
    merged
        Write one small trace of all ranks with their clocks aligned, for Perfetto.
    keep
        Leave a compact copy beside each trace, from which the next question is answered faster.
    workers
        Processes that read traces; default: one per CPU.
    """
    from fourfold.debugger.ask import ask, write_merged_of
    from fourfold.report.diagnosis import answer_json, answer_page, answer_text

    try:
        check_drawings(html=html, png=None, svg=None)
        if merged is not None:
            check_merged(merged)
        wanted = None if steps is None else _steps(steps)
        if workers is not None and workers < 1:
            raise ValueError(f"--workers {workers}: must be at least 1; nearest legal: 1")
        with _bar() as progress:
            found = ask(path, layout=layout, steps=wanted, workers=workers, keep=keep, progress=progress)
        page = None if html is None else answer_page(found)  # what is refused leaves nothing behind
        written: list[str] = []
        if merged is not None:
            left_out = write_merged_of(found, merged)
            written += [f"trace: {merged} (Perfetto opens it)", *(f"  {sentence}" for sentence in left_out)]
        if page is not None:
            written += write_drawings(page, html=html, png=None, svg=None)
    except (ValueError, OSError) as error:
        return fail(error, USER_ERROR)
    print(json.dumps(answer_json(found)) if as_json else _wrapped(answer_text(found)))
    if written:
        print("", *written, sep="\n", file=sys.stderr if as_json else sys.stdout)
    return 0


def _wrapped(text: str) -> str:
    """On a terminal, sentences that are longer than a line are broken between words."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(line if line.startswith(" ") else textwrap.fill(line, width) for line in text.split("\n"))


def _steps(text: str) -> tuple[int, int]:
    from fourfold.recipe.ranges import parse_range

    try:
        steps = parse_range(text)
    except ValueError as error:
        raise ValueError(f"--steps {error}") from None
    return steps[0], steps[-1]


@contextmanager
def _bar() -> Generator[Progress]:
    """A progress bar on a terminal; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
