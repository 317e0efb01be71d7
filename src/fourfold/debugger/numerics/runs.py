"""Two runs, of ours or of any other system: whatever both have is compared, and one verdict made of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.debugger.numerics.compare import compare_records, layout_text
from fourfold.debugger.numerics.comparison import (
    SCALAR,
    Comparison,
    Finding,
    KindTally,
    Pattern,
    StepNumbers,
    Verdict,
)
from fourfold.debugger.numerics.judging import ROUNDING, limit_of_layouts
from fourfold.debugger.numerics.order import place_in_model
from fourfold.debugger.numerics.records import Kind, recorded_steps
from fourfold.debugger.numerics.sides import Series, Side, Weights, find_side
from fourfold.debugger.numerics.situation import SAME_FACTOR, number_text
from fourfold.debugger.numerics.stepping import LOSS, relative_difference

_ASSUMED = "bfloat16"  # dtype of computation of a run that does not say
_ASSUMED_LAYERS = 32
_WIDE = 4096  # terms of a sum in a model whose width is not known
_FAR = 0.02  # relative difference of losses that runs which part by rounding rarely exceed
_GROWTH = 4.0  # of a loss's difference from step to step, while it is small
_SEVERITY = (Verdict.SAME, Verdict.ORDER, Verdict.UNKNOWN, Verdict.BUG)
_FIRST = 20  # steps that tell how losses belong together
_MOST_SETTINGS = 6  # that are written out
# Sections and keys of a recipe that do not change what is computed, but for the order of sums.
_NO_MATTER = (
    "layout.", "pipeline.", "output.", "profile.", "checkpoint.", "timeouts.", "cluster.", "numerics.", "train.steps",
    "train.device", "train.sanity_steps", "train.ordered", "train.recompute", "train.compile", "train.gc_every",
    "data.prefetch", "data.verify", "data.validation", "model.vocab_multiple",
)  # fmt: skip


def compare_runs(
    a: Path | Side,
    b: Path | Side,
    *,
    steps: tuple[int, int] | None = None,
) -> Comparison:
    """Two runs of any layouts, or of other systems.

    Recorded numbers of both are compared tensor by tensor; else, and for other steps, there are the losses. Weights at
    the end are compared where both have them.

    Args:
        a: a path, see `find_side`, or what is there.
        b: what it should be.
        steps: first and last to look at, and weights at the end not; default: all that both have.

    Raises:
        ValueError: a path holds nothing to compare, the two have nothing in common, or a file is damaged.
    """
    side_a, side_b = (find_side(each) if isinstance(each, Path) else each for each in (a, b))
    names = _names(side_a.path, side_b.path)
    compute = _coarsest(side_a.compute, side_b.compute)
    found: list[Comparison] = []
    both_have_losses = side_a.series is not None and side_b.series is not None
    if (
        side_a.records is not None
        and side_b.records is not None
        and not (both_have_losses and _none_recorded(side_a.records, side_b.records, steps))
    ):
        vocab_size = side_a.vocab_size if side_a.vocab_size == side_b.vocab_size else None
        recorded = compare_records(
            side_a.records, side_b.records, names=names, compute=compute, vocab_size=vocab_size, steps=steps
        )
        found.append(recorded)
    if both_have_losses:
        losses = _compare_losses(side_a, side_b, names, steps, alone=not found)
        if losses is not None:
            found.append(losses)
    if side_a.weights is not None and side_b.weights is not None and steps is None:
        found.append(_compare_weights(side_a, side_b, names, alone=not found))
    if not found and steps is not None:
        raise ValueError(f"steps {steps[0]}-{steps[1]}: none of them has numbers or a loss in both runs")
    if not found:
        raise ValueError(f"{side_a.path} and {side_b.path} have nothing in common: {_has(side_a)}, and {_has(side_b)}")
    return _together(found, names, (side_a, side_b))


def _none_recorded(a: Path, b: Path, steps: tuple[int, int] | None) -> bool:
    """Whether no step that is wanted was recorded in both."""
    common = {*recorded_steps(a)} & {*recorded_steps(b)}
    return not any(steps is None or steps[0] <= step <= steps[1] for step in common)


def _names(a: Path, b: Path) -> tuple[str, str]:
    return (a.name, b.name) if a.name != b.name and a.name and b.name else (str(a), str(b))


def _coarsest(*dtypes: str | None) -> str | None:
    known = [dtype for dtype in dtypes if dtype in ROUNDING]
    return max(known, key=lambda dtype: ROUNDING[dtype], default=None)


def _has(side: Side) -> str:
    what = {"recorded numbers": side.records, "losses": side.series, "weights": side.weights}
    return f"{side.path} has {' and '.join(name for name, there in what.items() if there is not None)}"


def _together(found: list[Comparison], names: tuple[str, str], sides: tuple[Side, Side]) -> Comparison:
    """One answer of several: that of the tensors first."""
    first = found[0]
    worst = max(found, key=lambda each: _SEVERITY.index(each.verdict))
    apart_at_the_end = worst.weights is not None and worst.weights.units > 1.0
    if apart_at_the_end and len(found) > 1 and all(x.verdict is Verdict.SAME for x in found[:-1]):
        reason = f"all that was compared step by step is equal, but {worst.reason}"
        worst = replace(worst, verdict=Verdict.UNKNOWN, reason=reason)
    steps: dict[int, StepNumbers] = {}
    for each in reversed(found):
        steps |= {numbers.step: numbers for numbers in each.steps}
    layouts = tuple(
        text or (None if side.grid is None else layout_text(side.grid))
        for text, side in zip(first.layouts, sides, strict=True)
    )
    settings = [] if worst.verdict is Verdict.SAME else [*_other_settings(sides)]
    if settings and worst.verdict in (Verdict.UNKNOWN, Verdict.BUG):
        worst = replace(worst, verdict=Verdict.OTHER, reason=_inside(settings.pop(0).sentence))
    return replace(
        first,
        names=names,
        layouts=(layouts[0], layouts[1]),
        verdict=worst.verdict,
        reason=worst.reason,
        findings=(*settings, *(finding for each in found for finding in each.findings)),
        steps=tuple(steps[number] for number in sorted(steps)),
        weights=next((each.weights for each in found if each.weights is not None), None),
        notes=tuple(dict.fromkeys(note for each in found for note in each.notes)),
    )


def _other_settings(sides: tuple[Side, Side]) -> Iterator[Finding]:
    """Keys of the recipes, or learning rates, that are not the same and change what is computed."""
    a, b = sides
    if a.settings is not None and b.settings is not None:
        apart = [
            f"{key} ({_shown(a.settings, key)} and {_shown(b.settings, key)})"
            for key in sorted({*a.settings} | {*b.settings})
            if a.settings.get(key) != b.settings.get(key) and not key.startswith(_NO_MATTER)
        ]
        if apart:
            more = f" and {len(apart) - _MOST_SETTINGS} more" if len(apart) > _MOST_SETTINGS else ""
            yield Finding(Pattern.SETTINGS, f"The recipes differ in {', '.join(apart[:_MOST_SETTINGS])}{more}.")
            return
    if a.series is not None and b.series is not None:
        shared = sorted(a.series.rates.keys() & b.series.rates.keys())
        for step in shared:
            x, y = a.series.rates[step], b.series.rates[step]
            if relative_difference(x, y) > 1e-3:
                yield Finding(Pattern.SETTINGS, f"The learning rates differ from step {step} on: {x:.6g} and {y:.6g}.")
                return


def _inside(sentence: str) -> str:
    """A sentence as it stands inside of another."""
    return sentence[:1].lower() + sentence[1:].removesuffix(".")


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return str(settings[key]) if key in settings else "not given"


@dataclass(frozen=True)
class _Shared:
    """Losses that both have. offset: to be added to steps of b to have those of a. steps: of a, ascending."""

    offset: int
    steps: list[int]
    errors: list[float]


def _shared(a: Series, b: Series, wanted: tuple[int, int] | None) -> _Shared:
    """Aligns steps: some systems count from 0."""
    tried = []
    for offset in (0, 1, -1):
        steps = sorted(step for step in a.losses if step - offset in b.losses)
        if wanted is not None:
            steps = [step for step in steps if wanted[0] <= step <= wanted[1]]
        errors = [relative_difference(a.losses[step], b.losses[step - offset]) for step in steps]
        if steps:
            tried.append(_Shared(offset, steps, errors))
    if not tried:
        return _Shared(0, [], [])
    begins = min(a.losses) - min(b.losses) if {min(a.losses), min(b.losses)} == {0, 1} else 0
    likely = next((each for each in tried if each.offset == begins), tried[0])
    return min(tried, key=lambda each: _mean(each.errors) * (0.5 if each is likely else 1.0))


def _mean(errors: list[float]) -> float:
    """Of the first ones, which chaos has not yet reached."""
    return sum(errors[:_FIRST]) / len(errors[:_FIRST])


def _compare_losses(
    a: Side, b: Side, names: tuple[str, str], wanted: tuple[int, int] | None, *, alone: bool
) -> Comparison | None:
    """Losses only: what a first step says, and how far the curves are apart later. None: no step is in both."""
    assert a.series is not None and b.series is not None
    shared = _shared(a.series, b.series, wanted)
    if not shared.steps:
        return None
    notes = [
        f"Losses of {name} are from {series.file.name}, {series.keys[1]!r} by {series.keys[0]!r}."
        for name, series in zip(names, (a.series, b.series), strict=True)
        if series.keys[:2] != ("step", "loss")
    ]
    if shared.offset:
        notes.append(f"Step {shared.steps[0]} of {names[0]} is step {shared.steps[0] - shared.offset} of {names[1]}.")
    compute = _coarsest(a.compute, b.compute)
    if a.compute is None or b.compute is None:
        compute = _coarsest(compute, _ASSUMED)
        notes.append(f"The dtype of computation is not known of both; {_ASSUMED} is assumed.")
    layers = a.num_layers or b.num_layers or _ASSUMED_LAYERS
    assert compute is not None
    limit = limit_of_layouts(SCALAR, LOSS, compute, num_layers=layers, terms=_WIDE)
    verdict, reason = _verdict_of_losses(a.series, b.series, shared, limit, alone=alone)
    losses = [
        StepNumbers(
            step,
            (a.series.losses[step], b.series.losses[step - shared.offset]),
            (a.series.norms.get(step), b.series.norms.get(step - shared.offset)),
        )
        for step in shared.steps
    ]
    return Comparison(
        names=names,
        layouts=(None, None),
        verdict=verdict,
        reason=reason,
        findings=tuple(_factor_of_losses(a.series, b.series, shared, limit)),
        steps=tuple(losses),
        notes=tuple(notes),
    )


def _verdict_of_losses(a: Series, b: Series, shared: _Shared, limit: float, *, alone: bool) -> tuple[Verdict, str]:
    """What losses tell. They are printed with so many digits, which is no difference."""
    printed = [
        1.01 * (a.resolution + b.resolution) / abs(b.losses[step - shared.offset]) if 0.0 < error < math.inf else 0.0
        for step, error in zip(shared.steps, shared.errors, strict=True)
    ]
    apart = [i for i, error in enumerate(shared.errors) if error > printed[i]]
    if not apart:
        digits = "" if not any(shared.errors) else ", as far as they are printed"
        return Verdict.SAME, f"all losses are equal{digits}" if alone else ""
    begins = (
        shared.steps[0] == min(a.losses) and shared.steps[0] - shared.offset == min(b.losses) and shared.steps[0] <= 1
    )
    first, at = shared.errors[0], shared.steps[0]
    if first > limit + printed[0]:
        if begins:
            return (
                Verdict.BUG,
                f"the losses of the first step, {at}, are {first:.1e} apart, and order makes {limit:.1e}",
            )
        return Verdict.UNKNOWN, f"step {at} is the first that both have, and its losses are already {first:.1e} apart"
    for i in apart:
        allowed = min(_FAR, limit * _GROWTH ** min(shared.steps[i] - at, 20)) + printed[i]
        if shared.errors[i] > allowed:
            if not alone:
                return Verdict.ORDER, ""
            return Verdict.UNKNOWN, (
                f"the first losses agree to {first:.1e}, and from step {shared.steps[i]} on they are "
                f"{shared.errors[i]:.1e} apart, which is more than runs are that part by rounding alone"
            )
    worst = max(apart, key=lambda i: shared.errors[i])
    return Verdict.ORDER, (
        f"the losses of the first step agree to {first:.1e}, and later ones to {shared.errors[worst]:.1e}"
        if alone
        else ""
    )


def _factor_of_losses(a: Series, b: Series, shared: _Shared, limit: float) -> Iterator[Finding]:
    """The same factor in every step."""
    ratios = [
        a.losses[step] / b.losses[step - shared.offset]
        for step in shared.steps[:_FIRST]
        if b.losses[step - shared.offset] and math.isfinite(a.losses[step])
    ]
    if not ratios or shared.errors[0] <= limit or abs(ratios[0] - 1) <= SAME_FACTOR:
        return
    if max(ratios) - min(ratios) < SAME_FACTOR * abs(ratios[0]):
        yield Finding(
            Pattern.FACTOR,
            f"The losses are {number_text(ratios[0])} times those of the other run in every step.",
            (f"from {min(ratios):.4g} to {max(ratios):.4g} in {len(ratios)} steps",),
        )


def _compare_weights(a: Side, b: Side, names: tuple[str, str], *, alone: bool) -> Comparison:
    """Weights at the end, each exactly."""
    assert a.weights is not None and b.weights is not None
    common = sorted(a.weights.shapes.keys() & b.weights.shapes.keys(), key=place_in_model)
    notes = [*_unmatched(a.weights, b.weights, names)]
    if not common:
        raise ValueError(f"{a.weights.place} and {b.weights.place} have no weight of the same name")
    errors: dict[str, float] = {}
    for name in common:
        if [*a.weights.shapes[name]] != [*b.weights.shapes[name]]:
            shapes = [" x ".join(map(str, side.weights.shapes[name])) for side in (a, b) if side.weights is not None]
            raise ValueError(f"{name} has shape {shapes[0]} in {names[0]} and {shapes[1]} in {names[1]}: other models")
        errors[name] = _error(a.weights.read(name), b.weights.read(name))
    worst = max(errors, key=lambda name: errors[name])
    equal = sum(error == 0.0 for error in errors.values())
    compute = _coarsest(a.compute, b.compute) or "float32"
    unit = ROUNDING[compute]
    tally = KindTally(str(Kind.WEIGHT), len(errors), equal, worst, errors[worst], errors[worst] / unit)
    if equal == len(errors):
        verdict, reason = Verdict.SAME, "all weights are equal" if alone else ""
    elif errors[worst] <= unit:
        verdict, reason = Verdict.ORDER, f"all weights agree within a rounding of {compute}" if alone else ""
    else:
        verdict = Verdict.UNKNOWN if alone else Verdict.ORDER
        reason = (
            f"{len(errors) - equal} of {len(errors)} weights differ, {worst} most, by {errors[worst]:.1e}; after many "
            "steps weights alone do not tell why, but losses or recorded numbers of the first one do"
        )
    return Comparison(names, (None, None), verdict, reason, weights=tally, notes=tuple(notes))


def _unmatched(a: Weights, b: Weights, names: tuple[str, str]) -> Iterator[str]:
    for name, mine, others in ((names[0], a, b), (names[1], b, a)):
        only = sorted(mine.shapes.keys() - others.shapes.keys(), key=place_in_model)
        if only:
            more = f" and {len(only) - 3} more weights" if len(only) > 3 else ""
            yield f"Only {name} has {', '.join(only[:3])}{more}."


def _error(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|, exactly; 0 only if they are equal."""
    if torch.equal(x, y) and x.dtype == y.dtype:
        return 0.0
    wide_x, wide_y = x.double(), y.double()
    apart = float(torch.linalg.vector_norm(wide_x - wide_y))
    size = float(torch.linalg.vector_norm(wide_y))
    return 0.0 if apart == 0.0 else apart / size if size > 0.0 and math.isfinite(apart) else math.inf
