"""Constants of the time model from measured runs: for a new stack, or for all of the project's together.

Residuals are logarithms of predicted over measured seconds. Every constant has a log-normal (shares: logit-normal)
prior: what all stacks have in common around a physical guess, and what one stack has around that. So a constant that
the runs do not determine stays where it was, and a few runs of a new stack move only what they speak about. Runs far
off count less (Huber). `fitting` finds the constants, `priors` says what is known before, `stack_file` writes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.planner.flops import model_flops_per_step
from fourfold.planner.jobs import Column, Jobs
from fourfold.planner.machines.cluster import CHIPS
from fourfold.planner.measured.fitting import Fit, Model, Report, Runs, Unknown, find, unbounded
from fourfold.planner.measured.priors import FAMILIES, GUESSES, PORTABLE, PRIORS, SUSTAINED_PRIORS
from fourfold.planner.measured.rows import MeasuredRow, jobs_of
from fourfold.planner.timing.stack import SOFTWARE, TRAITS, Stack, load_stack
from fourfold.recipe.write import write_new

TRUST = {"A": 1.0, "B": 0.3, "C": 0.1}  # how much a row counts by its quality
NEW = 1.5  # a new stack may be so many times further from its base than one of the project's from what is common
NINETY = 1.645  # standard deviations on both sides of the mean that hold nine of ten
PRIOR_RUNS = 4  # runs that the expected spread counts as
UNSEEN = 1.15  # errors of runs that were not fitted over errors of those that were


@dataclass(frozen=True)
class CalibratedStack:
    """A stack, and what is known of its constants: for `stack_file.stack_text`."""

    stack: Stack
    runs: int
    sources: str
    mean_error: float  # of the runs it was fitted on, relative
    bias: float
    open: Mapping[str, float]  # relative standard deviation that the runs leave each constant


def runs_of(rows: Sequence[MeasuredRow], stacks: Sequence[str], *, balanced: bool = True) -> Runs:
    """The runs of these rows, under stacks of these names. `balanced`: sources with many runs count less per run."""
    sources = [f"{row.source} {row.stack} {row.gpu[:4]}" if balanced else f"{i}" for i, row in enumerate(rows)]
    weight = run_weights(sources, [row.group for row in rows])
    return Runs(
        jobs=jobs_of(rows),
        seconds=np.array([row.seconds for row in rows], dtype=float),
        stack=np.array([stacks.index(row.stack) for row in rows], dtype=int),
        weight=weight * np.array([TRUST.get(row.quality, 1.0) for row in rows]),
    )


def run_weights(sources: Sequence[str], groups: Sequence[str]) -> Column:
    """How much each run counts: n runs of a source as sqrt(n), and n repetitions of a configuration as less than n."""
    _, source, of_source = np.unique(np.array(sources), return_inverse=True, return_counts=True)
    _, group, of_group = np.unique(np.array(groups), return_inverse=True, return_counts=True)
    return of_source[source] ** -0.5 * of_group[group] ** -0.25


def calibrate_files(paths: Sequence[str | Path], *, out: Path, base: str, name: str) -> CalibratedStack:
    """Fits a stack to the runs of these tables and writes it, never over another file.

    ValueError on tables that are none, or have no runs that can be predicted, and if `out` exists.
    """
    from fourfold.planner.measured.stack_file import stack_text
    from fourfold.planner.measured.tables import read

    if not paths:
        raise ValueError("rows: name at least one table of measured runs")
    if out.suffix != ".toml":
        raise ValueError(f"{out}: a stack is a .toml file; nearest legal: {out.with_suffix('.toml')}")
    if out.exists():  # before the work; `write_new` would find it, too
        raise ValueError(f"{out}: exists; remove it, or give another name")
    start, tables = load_stack(base), [read(path) for path in paths]
    rows = [row for table in tables for row in table.rows]
    if not any(row.seconds for row in rows):
        reasons = Counter(row.reason for table in tables for row in table.unscored)
        why = "; ".join(f"{reason} ({count} rows)" for reason, count in reasons.most_common(3))
        raise ValueError(f"rows: no run can be fitted: {why or 'none has a step time or a token rate'}")
    found = fit(rows, start, name=name)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_new(out, stack_text(found))
    return found


def fit(rows: Sequence[MeasuredRow], base: Stack, *, name: str, report: Report | None = None) -> CalibratedStack:
    """A new stack from one's own runs, around what `base` has. What chips sustain stays as it is.

    Its software flags are those of most runs; what it keeps in memory is what `base` keeps.

    ValueError if no row has a time.
    """
    timed = [replace(row, stack=name) for row in rows if row.seconds]
    if not timed:
        raise ValueError("rows: none has a step time or a token rate; calibration needs at least one run that has")
    runs = runs_of(timed, [name], balanced=False)
    _refuse_impossible(timed, runs.jobs)
    sustained = base.constants.sustained
    model = Model(
        [Unknown(constant, NEW * prior.own, stack=0) for constant, prior in PRIORS.items()],
        {c: unbounded(getattr(base.constants, c), prior.share)[None] for c, prior in PRIORS.items()},
        {s: unbounded(getattr(sustained, s), prior.share) for s, prior in SUSTAINED_PRIORS.items()},
        {trait: np.array([getattr(base.constants, trait)]) for trait in TRAITS},
    )
    found = find(model, runs, report)
    stack = replace(
        base,
        name=name,
        description=f"Calibrated on {len(timed)} runs of {_sources(timed)}, starting from {base.name}",
        constants=found.of_stack(0),
        **{flag: _most(flag, timed) for flag in SOFTWARE},
    )
    spread = np.log(base.band[1] / base.band[0]) / (2 * NINETY)
    return calibrated(stack, found, index=0, rows=timed, runs=runs, spread=float(spread))


def _refuse_impossible(rows: Sequence[MeasuredRow], jobs: Jobs) -> None:
    """ValueError for a run faster than its GPUs' dense peak: one wrong number would bend all constants."""
    assert all(row.seconds for row in rows)
    share = model_flops_per_step(jobs) / (jobs.gpus * jobs.peak * np.array([row.seconds for row in rows]))
    worst = int(np.argmax(share))
    if share[worst] > 1:
        raise ValueError(
            f"row {rows[worst].id}: {rows[worst].seconds:.4g} s a step would be {share[worst]:.1%} of the dense "
            f"peak of {rows[worst].gpu}; must be below 100%"
        )


def fit_project(
    runs: Runs,
    *,
    traits: Mapping[str, Sequence[bool]],
    loose: Mapping[tuple[int, str], float] | None = None,
    known: Mapping[tuple[int, str], float] | None = None,
    report: Report | None = None,
) -> Fit:
    """Constants of several stacks and shares of all chips, together. A stack without runs gets what is common.

    `traits`: those of `stack.TRAITS`, per stack. `loose`: (stack, constant) that may be so many times further from what
    is common. `known`: (stack, constant) that is known otherwise, and stays.
    """
    loose, known = loose or {}, known or {}
    stacks = len(traits[TRAITS[0]])
    number = {chip.name: index for index, chip in enumerate(CHIPS)}
    shares = {name: np.full(len(CHIPS), prior.guess) for name, prior in SUSTAINED_PRIORS.items()}
    seen = {CHIPS[int(chip)].name for chip in np.atleast_1d(runs.jobs.chip)}
    unknowns = [Unknown(name, prior.common) for name, prior in PRIORS.items() if prior.common]
    unknowns += [
        Unknown(name, prior.own * loose.get((stack, name), 1.0), stack=stack)
        for stack in np.unique(runs.stack).tolist()
        for name, prior in PRIORS.items()
        if (stack, name) not in known
    ]
    for family, chips in FAMILIES.items():
        members = tuple(number[chip] for chip in chips)
        shares["portable"][list(members)] = PORTABLE[family]
        for name, prior in SUSTAINED_PRIORS.items():
            shares[name][list(members)] = GUESSES.get((family, name), shares[name][list(members)])
            unknowns.append(Unknown(name, prior.common, chips=members))
            unknowns += [Unknown(name, prior.own, chips=(number[chip],)) for chip in chips if chip in seen]
    model = Model(
        unknowns,
        {name: np.full(stacks, unbounded(prior.guess, prior.share)) for name, prior in PRIORS.items()},
        {name: unbounded(value, SUSTAINED_PRIORS[name].share) for name, value in shares.items()},
        {name: np.array(values) for name, values in traits.items()},
        known={at: float(unbounded(value, PRIORS[at[1]].share)) for at, value in known.items()},
    )
    return find(model, runs, report)


def calibrated(
    stack: Stack, found: Fit, *, index: int, rows: Sequence[MeasuredRow], runs: Runs | None, spread: float
) -> CalibratedStack:
    """A stack with its band. `runs`: those of `rows`. `spread`: standard deviation of log seconds expected before."""
    residual = found.residuals(runs) if runs else np.zeros(0)
    relative = np.expm1(residual) if runs else np.zeros(1)
    return CalibratedStack(
        stack=replace(stack, band=band(residual, runs.weight if runs else residual, spread)),
        runs=len(rows),
        sources=_sources(rows),
        mean_error=float(np.mean(np.abs(relative))),
        bias=float(np.mean(relative)),
        open={name: float(left[index]) for name, left in found.open_constants.items()},
    )


def band(residual: Column, weight: Column, spread: float) -> tuple[float, float]:
    """Multiples of predicted seconds that hold about nine of ten runs: of the fitted ones, mixed with what is expected.

    The spread of the fitted ones is taken from the size that nine of ten do not exceed, so that one run far off does
    not widen the band of all.
    """
    wide = spread
    if len(residual):
        order = np.argsort(np.abs(residual))
        share = np.cumsum(weight[order]) / np.sum(weight)
        seen = np.abs(residual)[order][min(int(np.searchsorted(share, 0.9)), len(order) - 1)] / NINETY
        counts = len(residual)
        wide = np.sqrt((counts * (UNSEEN * seen) ** 2 + PRIOR_RUNS * spread**2) / (counts + PRIOR_RUNS))
    return float(np.exp(-NINETY * wide)), float(np.exp(NINETY * wide))


def _most(column: str, rows: Sequence[MeasuredRow]) -> Any:
    """The value that most rows have."""
    return Counter(row.columns[column] for row in rows).most_common(1)[0][0]


def _sources(rows: Sequence[MeasuredRow]) -> str:
    counts = Counter(row.source for row in rows)
    return ", ".join(f"{source} ({count})" for source, count in counts.most_common())
