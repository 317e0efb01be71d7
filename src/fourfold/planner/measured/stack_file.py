"""Stacks and the chips' shares as TOML: what `fourfold calibrate` and `benchmarks/calibrate.py` leave behind."""

from __future__ import annotations

from collections.abc import Mapping

from fourfold.planner.jobs import Column
from fourfold.planner.machines.cluster import CHIPS
from fourfold.planner.measured.calibrate import CalibratedStack
from fourfold.planner.measured.fitting import Fit
from fourfold.planner.measured.priors import SUSTAINED_PRIORS
from fourfold.planner.timing.stack import CONSTANT_UNITS, SOFTWARE


def stack_text(found: CalibratedStack) -> str:
    """The file of a stack. `stack.parse_stack` reads it."""
    stack = found.stack
    lines = [
        f"name = {_toml(stack.name)}",
        f"description = {_toml(stack.description)}",
        f"saved_set = {_toml(stack.saved_set)}",
        f"allocator = {stack.allocator:g}",
        f"allocator_band = [{stack.allocator_band[0]:g}, {stack.allocator_band[1]:g}]",
        "",
        "[band] # multiples of predicted seconds between which nine of ten runs lie",
        f"low = {stack.band[0]:.3f}",
        f"high = {stack.band[1]:.3f}",
        "",
        "[software]",
        *(f"{name} = {_toml(getattr(stack, name))}" for name in SOFTWARE),
        f"portable_attention = {_toml(bool(stack.constants.portable))}",
        f"pxn = {_toml(bool(stack.constants.pxn))}",
        f"pp_inside = {_toml(bool(stack.constants.pp_inside))}",
        "",
        "[residual] # of the runs that the constants were fitted on, in percent",
        f"runs = {found.runs}",
        f"mean = {100 * found.mean_error:.2f}",
        f"bias = {100 * found.bias:.2f}",
    ]
    source = f"{found.runs} runs: {found.sources}" if found.runs else "common to all stacks: no runs of its own"
    for name, unit in CONSTANT_UNITS.items():
        lines += [
            "",
            f"[constants.{name}]",
            f"value = {float(getattr(stack.constants, name)):.4g}",
            f"unit = {_toml(unit)}",
            f"source = {_toml(source)}",
            f"residual = {100 * found.mean_error:.2f} # percent, of those runs",
            f"open = {100 * found.open[name]:.0f} # percent, standard deviation that they leave it",
        ]
    return "\n".join(lines) + "\n"


def chips_text(found: Fit, *, source: str, runs: Mapping[str, Column]) -> str:
    """The file of what chips sustain. `stack.load_sustained` reads it.

    `runs`: for the shares of matrix products, how many runs each chip has that depend on it.
    """
    lines = [
        "# Shares of the dense peak that big work sustains. `open`: standard deviation in percent that the runs leave;",
        "# `runs`: how many were fitted on that chip in these numbers.",
        f"# {source}",
    ]
    for index, chip in enumerate(CHIPS):
        lines += ["", f"[{chip.name}] # {chip.title}"]
        for name in SUSTAINED_PRIORS:
            value, left = getattr(found.sustained, name)[index], found.open_shares[name][index]
            counted = f", runs = {int(runs[name][index])}" if name in runs else ""
            lines.append(f"{name} = {{ value = {value:.4f}, open = {100 * left:.0f}{counted} }}")
    return "\n".join(lines) + "\n"


def _toml(value: str | bool | int) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
