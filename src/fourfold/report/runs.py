"""The table of `fourfold runs`."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fourfold.report.hangs import CAUSE, NO_CAUSE
from fourfold.trainer.runs import RunSummary

_PLAIN_WIDTH = 1000  # characters; plain output is never wrapped, one run stays one line
_STYLES = {"running": "green", "failed": "red", "died": "red", "stopped": "yellow", "unknown": "dim"}
_UNKNOWN = "-"


def print_runs(runs: Sequence[RunSummary], *, now: float, file: TextIO | None = None) -> None:
    """Prints the table; pretty where ``file`` (default stdout) is a terminal, plain elsewhere.

    Args:
        runs: a line each.
        now: seconds since 1970; ages count back from here.
        file: where to.
    """
    file = sys.stdout if file is None else file
    if file.isatty():
        Console(file=file).print(_table(runs, now, pretty=True))
    else:
        print(runs_text(runs, now=now), file=file)


def runs_text(runs: Sequence[RunSummary], *, now: float) -> str:
    """The plain form: no colour, no wrapping, no trailing spaces."""
    out = io.StringIO()
    console = Console(file=out, width=_PLAIN_WIDTH, color_system=None, force_terminal=False)
    console.print(_table(runs, now, pretty=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def format_age(seconds: float) -> str:
    """How long ago, in the largest fitting unit: 5 s, 12 min, 3 h, 40 d."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _table(runs: Sequence[RunSummary], now: float, *, pretty: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD if pretty else None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for title in ("step", "loss", "tokens/s", "last write"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("checkpoint", no_wrap=not pretty)
    table.add_column("layout", no_wrap=not pretty)
    table.add_column("message", no_wrap=not pretty)
    for run in runs:
        table.add_row(
            Text(run.name),
            Text(run.state, style=_STYLES.get(run.state, "")),
            f"{_shown(run.step)}/{_shown(run.steps)}",
            _UNKNOWN if run.loss is None else "not finite" if math.isnan(run.loss) else f"{run.loss:.4f}",
            _UNKNOWN if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
            _UNKNOWN if run.last_write is None else f"{format_age(now - run.last_write)} ago",
            Text(run.checkpoint or _UNKNOWN),
            run.layout or _UNKNOWN,
            Text(_in_one_line(run.message)),
        )
    return table


def _shown(number: int | None) -> str:
    return _UNKNOWN if number is None else str(number)


def _in_one_line(message: str | None) -> str:
    """What failed, and how: the likeliest cause of a hang, else the last line of a traceback."""
    lines = (message or "").strip().splitlines()
    causes = [line for line in lines if line.startswith((CAUSE, NO_CAUSE))]
    return ": ".join(dict.fromkeys(lines[:1] + (causes[:1] or lines[-1:])))
