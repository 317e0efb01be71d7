"""What `fourfold accuracy` and `fourfold calibrate` print: errors beside what must be reached, and constants."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fourfold.planner.measured.accuracy import Accuracy, Bar, LayoutGroup
from fourfold.planner.measured.calibrate import CalibratedStack
from fourfold.planner.measured.memory_accuracy import FitScore, MemoryScore
from fourfold.planner.measured.scores import Score
from fourfold.planner.timing.stack import CONSTANT_UNITS

_PLAIN_WIDTH = 1000  # characters; plain output is never wrapped
_NONE = "-"
_MOST_GROUPS = 12
_IN_SAMPLE = " (in sample: saved sets were chosen on these rows)"
_HALVES = {
    "reported": "the half of the configurations that was not calibrated on",
    "calibrated": "the half that the constants were calibrated on",
    "both": "all configurations",
}
_SETS = {
    "bar_rows": "16 bits, A100 and H100, 8 GPUs and more (bar_rows)",
    "fp8": "fp8 and mxfp8 (fp8)",
    "all_dense_A": "all dense models, quality A (all_dense_A)",
    "other_dense": "dense models, quality B and C (other_dense)",
    "a100_multi_node": "GPT on 64 to 512 A100 (a100_multi_node)",
    "a100_one_node": "GPT on 2 to 8 A100 (a100_one_node)",
}


def print_accuracy(accuracy: Accuracy, *, file: TextIO | None = None) -> None:
    """Prints the report; pretty where ``file`` (default stdout) is a terminal, plain elsewhere."""
    file = sys.stdout if file is None else file
    if file.isatty():
        Console(file=file).print(_report(accuracy, pretty=True))
    else:
        print(accuracy_text(accuracy), file=file)


def accuracy_text(accuracy: Accuracy) -> str:
    """The plain form: no colour, no wrapping, no trailing spaces."""
    out = io.StringIO()
    console = Console(file=out, width=_PLAIN_WIDTH, color_system=None, force_terminal=False)
    console.print(_report(accuracy, pretty=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def print_calibration(found: CalibratedStack, *, file: TextIO | None = None) -> None:
    """Prints what `fourfold calibrate` fitted: each constant, and how much of it the runs leave open."""
    file = sys.stdout if file is None else file
    pretty = file.isatty()
    console = Console(file=file) if pretty else Console(file=file, width=_PLAIN_WIDTH, color_system=None)
    stack = found.stack
    low, high = stack.band
    console.print(
        Text(
            f"{stack.name}: {found.runs} runs of {found.sources}. Mean error {100 * found.mean_error:.1f} %, bias "
            f"{100 * found.bias:+.1f} %; about nine of ten runs take {low:.2f} to {high:.2f} times what is predicted"
        )
    )
    console.print(_gap())
    table = _table("constant", ("value", "unit", "left open"), pretty)
    table.columns[2].justify = "left"
    for name, unit in CONSTANT_UNITS.items():
        value = f"{float(getattr(stack.constants, name)):.4g}"
        table.add_row(Text(name), value, Text(unit), f"+-{100 * found.open[name]:.0f} %")
    console.print(table)


def _report(accuracy: Accuracy, *, pretty: bool) -> Group:
    """All tables, one below the other, those without rows left out."""
    timed = {_SETS[name]: score for name, score in accuracy.sets.items() if score.rows}
    parts: list[Table | Text] = [Text(f"Predicted against measured: {_HALVES[accuracy.half]}.")]
    if timed:
        parts += [_gap(), _scores("seconds per step", timed, pretty)]
    if accuracy.sources:
        parts += [_gap(), _scores("by source", accuracy.sources, pretty)]
    if accuracy.groups:
        parts += [_gap(), _groups(accuracy.groups, pretty)]
    memory = {
        "allocated by each pipeline rank (rank_memory)": accuracy.rank_memory,
        "rank with most (peak_memory)": accuracy.peak_memory,
    }
    if any(score.rows for score in memory.values()):
        parts += [_gap(), _memory(memory, pretty, in_sample=accuracy.memory_in_sample)]
    if accuracy.fits.rows:
        parts += [_gap(), _fits(accuracy.fits, in_sample=accuracy.memory_in_sample)]
    shown = [bar for bar in accuracy.bars if bar.value is not None]
    if shown and accuracy.half == "reported":  # they are meant for runs that no constant was fitted to
        parts += [_gap(), _bars(shown, pretty)]
    if accuracy.unscored:
        parts += [_gap(), _unscored(accuracy.unscored, pretty)]
    return Group(*parts)


def _gap() -> Text:
    return Text("")


def _table(title: str, columns: Sequence[str], pretty: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD if pretty else None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(title, no_wrap=not pretty)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _scores(title: str, scores: dict[str, Score], pretty: bool) -> Table:
    table = _table(title, ("rows", "MAPE", "bias", "in band", "macro MAPE"), pretty)
    for name, score in scores.items():
        table.add_row(
            Text(name),
            f"{score.rows:,}",
            _percent(score.mape_percent),
            _percent(score.bias_percent, sign=True),
            _percent(score.in_band_percent),
            _percent(score.macro_mape_percent),
        )
    return table


def _groups(groups: Sequence[LayoutGroup], pretty: bool) -> Table:
    """The groups of most layouts."""
    shown = sorted(groups, key=lambda group: -group.layouts)[:_MOST_GROUPS]
    left_out = f", {len(shown)} of {len(groups)}" if len(shown) < len(groups) else ""
    table = _table(f"competing layouts{left_out}", ("layouts", "tau", "regret"), pretty)
    for group in shown:
        tau, regret = f"{group.kendall_tau:.2f}", _percent(group.regret_percent)
        table.add_row(Text(group.setting), str(group.layouts), tau, regret)
    return table


def _memory(scores: dict[str, MemoryScore], pretty: bool, *, in_sample: bool) -> Table:
    table = _table(f"bytes per rank{_IN_SAMPLE * in_sample}", ("rows", "MAPE", "bias", "largest", "too low by"), pretty)
    for name, score in scores.items():
        if score.rows:
            table.add_row(
                Text(name),
                str(score.rows),
                _percent(score.mape_percent),
                _percent(score.bias_percent, sign=True),
                _percent(score.max_error_percent),
                _percent(score.max_low_percent),
            )
    return table


def _fits(fits: FitScore, *, in_sample: bool) -> Text:
    return Text(
        f"fits or not{_IN_SAMPLE * in_sample}: right for {_percent(fits.right_percent)} of {fits.rows} layouts. "
        f"{fits.ran_predicted_not_to_fit} of {fits.ran} that ran should not have, "
        f"{fits.out_of_memory_predicted_to_fit} of {fits.out_of_memory} that ran out of memory should have fit"
    )


def _bars(bars: Sequence[Bar], pretty: bool) -> Table:
    table = _table("must be reached", ("is", "bar", ""), pretty)
    for bar in bars:
        verdict = Text("ok", style="green") if bar.ok else Text("missed", style="bold red")
        table.add_row(Text(bar.name), _NONE if bar.value is None else f"{bar.value:.2f}", bar.limit, verdict)
    return table


def _unscored(reasons: dict[str, int], pretty: bool) -> Table:
    table = _table("not in these figures", ("rows",), pretty)
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        table.add_row(Text(reason), f"{count:,}")
    return table


def _percent(value: float | None, *, sign: bool = False) -> str:
    return _NONE if value is None else f"{value:+.1f} %" if sign else f"{value:.1f} %"
