"""The most probable constants, given runs and priors: damped Gauss-Newton steps with differences for derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fourfold.planner.jobs import Column, Jobs
from fourfold.planner.machines.cluster import CHIPS
from fourfold.planner.measured.priors import PRIORS, SUSTAINED_PRIORS
from fourfold.planner.timing.stack import Constants, Sustained
from fourfold.planner.timing.step import step_time

NOISE = 0.04  # log seconds: what runs of the same configuration differ by, and what no formula of this kind knows
HUBER = 1.5  # residuals beyond so many NOISE count linearly
STEPS = 40
ENOUGH = 1e-4  # relative gain of a step at which the search ends

Report = Callable[[str], None]


@dataclass(frozen=True)
class Runs:
    """Measured runs: jobs, seconds, index of the stack that each ran under, and how much each counts."""

    jobs: Jobs
    seconds: Column
    stack: Column
    weight: Column

    def take(self, rows: Column) -> Runs:
        """Some of the runs."""
        return Runs(self.jobs.take(rows), self.seconds[rows], self.stack[rows], self.weight[rows])


@dataclass(frozen=True)
class Unknown:
    """A number to be found: added to a constant of all stacks, or of one, or to a share of some chips. 0 at first."""

    name: str
    deviation: float
    stack: int | None = None
    chips: tuple[int, ...] = ()

    def touches(self, runs: Runs) -> Column | None:
        """Runs that it matters to; None: all."""
        if self.chips:
            return np.flatnonzero(np.isin(np.broadcast_to(runs.jobs.chip, runs.seconds.shape), self.chips))
        return None if self.stack is None else np.flatnonzero(runs.stack == self.stack)


def unbounded(value: Column | float, share: bool) -> Column:
    """Logarithm, or logit of a share."""
    value = np.asarray(value, dtype=float)
    return np.log(value / (1 - value)) if share else np.log(value)


def bounded(value: Column, share: bool) -> Column:
    """The inverse of `unbounded`."""
    return 1 / (1 + np.exp(-value)) if share else np.exp(value)


@dataclass(frozen=True)
class Model:
    """How constants come from the vector of unknowns."""

    unknowns: Sequence[Unknown]
    constants: Mapping[str, Column]  # per stack, unbounded, where all unknowns are 0
    shares: Mapping[str, Column]  # per chip, likewise
    traits: dict[str, Column]  # bool per stack: what of `Constants` is not fitted
    known: Mapping[tuple[int, str], float] = field(default_factory=dict)  # (stack, constant), unbounded: stay

    def at(self, values: Column) -> tuple[dict[str, Column], Sustained]:
        """(constants per stack, shares per chip)."""
        constants = {name: centre.copy() for name, centre in self.constants.items()}
        shares = {name: centre.copy() for name, centre in self.shares.items()}
        for unknown, value in zip(self.unknowns, values, strict=True):
            if unknown.chips:
                shares[unknown.name][list(unknown.chips)] += value
            elif unknown.stack is None:
                constants[unknown.name] += value
            else:
                constants[unknown.name][unknown.stack] += value
        for (stack, name), value in self.known.items():
            constants[name][stack] = value
        of_chips = {name: bounded(value, SUSTAINED_PRIORS[name].share) for name, value in shares.items()}
        return {name: bounded(v, PRIORS[name].share) for name, v in constants.items()}, Sustained(**of_chips)

    def residuals(self, values: Column, runs: Runs) -> Column:
        """log(predicted / measured) of each run."""
        return _residuals(*self.at(values), self.traits, runs)


def _residuals(constants: dict[str, Column], sustained: Sustained, traits: dict[str, Column], runs: Runs) -> Column:
    columns = {name: value[runs.stack] for name, value in (constants | traits).items()}
    of_runs = Constants(**columns, sustained=sustained)
    return np.log(step_time(runs.jobs, of_runs).seconds / runs.seconds)


@dataclass(frozen=True)
class Fit:
    """Constants found, per stack and per chip, and how far the runs leave each open (relative standard deviation)."""

    constants: dict[str, Column]
    sustained: Sustained
    traits: dict[str, Column]
    open_constants: Mapping[str, Column]
    open_shares: Mapping[str, Column]

    def of_stack(self, index: int) -> Constants:
        """The constants of one stack."""
        values = {name: value[index] for name, value in (self.constants | self.traits).items()}
        return Constants(**values, sustained=self.sustained)

    def residuals(self, runs: Runs) -> Column:
        """log(predicted / measured) of each run."""
        return _residuals(self.constants, self.sustained, self.traits, runs)


def find(model: Model, runs: Runs, report: Report | None = None) -> Fit:
    """The most probable constants."""
    values, covariance = _minimise(model, runs, report)
    constants, sustained = model.at(values)
    left = {
        name: np.array([_open(model, covariance, name, stack=stack) for stack in range(len(of_stacks))])
        * (1 - of_stacks if PRIORS[name].share else 1.0)
        for name, of_stacks in constants.items()
    }
    left_of_chips = {
        name: np.array([_open(model, covariance, name, chip=chip) for chip in range(len(CHIPS))])
        * (1 - getattr(sustained, name))
        for name in SUSTAINED_PRIORS
    }
    return Fit(constants, sustained, model.traits, left, left_of_chips)


def _open(model: Model, covariance: Column, name: str, *, stack: int | None = None, chip: int | None = None) -> float:
    """Standard deviation of the sum of the unknowns that make a constant of this stack, or a share of this chip."""
    picked = [
        u.name == name and (chip in u.chips if chip is not None else not u.chips and u.stack in (None, stack))
        for u in model.unknowns
    ]
    if stack is not None and (stack, name) in model.known:
        return 0.0
    return float(np.sqrt(covariance[np.ix_(picked, picked)].sum())) if any(picked) else 0.0


def _minimise(model: Model, runs: Runs, report: Report | None) -> tuple[Column, Column]:
    """(unknowns at the least sum of Huber losses and prior terms, their covariance there)."""
    deviation = np.array([unknown.deviation for unknown in model.unknowns])
    touched = [unknown.touches(runs) for unknown in model.unknowns]
    subsets = [runs if rows is None else runs.take(rows) for rows in touched]
    values, damping = np.zeros(len(deviation)), 1e-2
    residual = model.residuals(values, runs)
    cost = _cost(residual, runs.weight, values / deviation)
    normal = np.diag(deviation**-2.0)
    for step in range(STEPS):
        jacobian = np.zeros((len(residual), len(values)))
        for column, (rows, subset) in enumerate(zip(touched, subsets, strict=True)):
            if len(subset.seconds):
                delta = 0.1 * min(deviation[column], 0.2)
                moved = values.copy()
                moved[column] += delta
                where = slice(None) if rows is None else rows
                jacobian[where, column] = (model.residuals(moved, subset) - residual[where]) / delta
        # Huber's weights: a run beyond the bend pulls with constant force.
        weight = runs.weight * np.minimum(1, HUBER * NOISE / np.maximum(np.abs(residual), 1e-12)) / NOISE**2
        normal = (jacobian * weight[:, None]).T @ jacobian + np.diag(deviation**-2.0)
        gradient = jacobian.T @ (weight * residual) + values * deviation**-2.0
        gain = 0.0
        for _ in range(8):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            trial = values + np.clip(move, -0.7, 0.7)
            trial_residual = model.residuals(trial, runs)
            trial_cost = _cost(trial_residual, runs.weight, trial / deviation)
            if trial_cost < cost:
                gain, values, residual, cost = cost - trial_cost, trial, trial_residual, trial_cost
                damping = max(damping / 5, 1e-5)
                break
            damping *= 5
        if report:
            report(f"step {step}: cost {cost:.2f}, mean error {100 * np.mean(np.abs(np.expm1(residual))):.2f} %")
        if gain < ENOUGH * cost:
            break
    return values, np.linalg.inv(normal)


def _cost(residual: Column, weight: Column, standardised: Column) -> float:
    size = np.abs(residual) / NOISE
    losses = np.where(size < HUBER, size**2, 2 * HUBER * size - HUBER**2)
    return float(np.sum(weight * losses) + np.sum(standardised**2))
