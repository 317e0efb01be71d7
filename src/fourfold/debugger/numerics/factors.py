"""Known ways of being wrong: gradients or losses that are a number of times too large."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fourfold.debugger.numerics.alignment import Pair
from fourfold.debugger.numerics.comparison import SCALAR, Finding, Pattern
from fourfold.debugger.numerics.judging import SUMS
from fourfold.debugger.numerics.records import Kind
from fourfold.debugger.numerics.situation import SAME_FACTOR, Search, Situation, number_text, sizes_text
from fourfold.debugger.numerics.stepping import LOSS

_ROUNDED = 1e-3  # what may be left of a factor
_MOSTLY_FACTOR = 0.5  # what may be left where factors are of parts
_MOST = 4  # factors that are written out


def constant_factor(here: Situation) -> Iterator[Finding]:
    """All gradients, or the loss, are the same number of times too large."""
    wrong = here.wrong_of(Kind.GRADIENT)
    if wrong and len(wrong) == len(here.of(Kind.GRADIENT)) and not here.wrong_of(Kind.ARRIVING):
        yield from _factor_of_gradients(here, wrong)
    ratio = here.ratio(LOSS)
    if abs(ratio - 1) > here.limits.of(SCALAR, LOSS, SUMS) and not here.wrong_of(Kind.OUTPUT):
        meaning = sizes_text(here, ratio)
        if meaning or here.of(Kind.OUTPUT):
            yield Finding(
                Pattern.FACTOR, f"The loss that is told is {number_text(ratio)} times what it should be{meaning}."
            )


def _factor_of_gradients(here: Situation, wrong: Sequence[Pair]) -> Iterator[Finding]:
    factors = sorted(each.scale()[0] for each in wrong)
    middle, rest = factors[len(factors) // 2], max(each.scale()[1] for each in wrong)
    allowed = 2 * max(here.limits.of(each.kind, each.name, each.a.dtype) for each in wrong) + SAME_FACTOR
    if middle > 0 and abs(middle - 1) > SAME_FACTOR and rest < allowed:
        if factors[-1] - factors[0] <= SAME_FACTOR * middle:
            yield Finding(
                Pattern.FACTOR,
                f"All gradients are {number_text(middle)} times what they should be{sizes_text(here, middle)}.",
                (f"from {factors[0]:.4g} to {factors[-1]:.4g}; without the factor {rest:.1e} is left",),
            )
    elif factors[0] > 1 + SAME_FACTOR and rest < _MOSTLY_FACTOR:
        yield Finding(
            Pattern.LOCAL_COUNT,
            f"All gradients are too large, {factors[0]:.3g} to {factors[-1]:.3g} times: as if every part of the batch "
            "were divided by its own count of labels, not by that of all.",
            (
                f"without such factors {rest:.1e} is left",
                f"the middle one is about {round(middle)}{sizes_text(here, round(middle))}",
            ),
        )


def local_count(here: Situation) -> Iterator[Finding]:
    """The gradient that enters the backward has a factor, in all of the batch or another one in each part of it."""
    wrong = here.wrong_of(Kind.ARRIVING)
    if not wrong or here.wrong_of(Kind.OUTPUT):
        return
    first, grid = wrong[0], here.grids[0]
    dp, cp, number = (here.place(first, name) for name in ("dp", "cp", "micro-batch"))
    groupings = {
        "data-parallel group": dp,
        "rank of dp x cp": dp * grid.cp + cp,
        "micro-batch": dp << 20 | number,
        "micro-batch of every CP rank": (dp * grid.cp + cp) << 20 | number,
    }
    allowed = 2 * here.limits.of(first.kind, first.name, first.a.dtype) + _ROUNDED
    found = {what: (factors, rest) for what, group in groupings.items()
             for factors, rest in [_factors_of(first, group)] if factors and rest <= allowed}  # fmt: skip
    # The inverses are shares of the labels if each part is divided by its own count.
    shares = {what: sum(1 / factor for factor in factors) for what, (factors, _) in found.items()}
    own = next(
        (what for what, share in shares.items() if abs(share - 1) < SAME_FACTOR and len(found[what][0]) > 1), None
    )
    if own is not None:
        factors, rest = found[own]
        yield Finding(
            Pattern.LOCAL_COUNT,
            f"The gradient that enters the backward is divided by the number of labels of each {own}, not of all: it "
            f"is {_listed(factors)} times what it should be.",
            (
                f"inverses of the factors, the shares of all labels, add up to {shares[own]:.4g}",
                f"without the factors {rest:.1e} is left",
            ),
        )
        return
    factor, rest = _factors_of(first, torch.zeros_like(dp))
    if factor and rest <= allowed and abs(factor[0] - 1) > SAME_FACTOR:
        yield Finding(
            Pattern.FACTOR,
            f"The gradient that enters the backward is {number_text(factor[0])} times what it should be"
            f"{sizes_text(here, factor[0])}.",
            (f"without the factor {rest:.1e} is left",),
        )
    elif found:
        what, (factors, rest) = next(iter(found.items()))
        if max(abs(factor - 1) for factor in factors) > SAME_FACTOR:
            yield Finding(
                Pattern.FACTOR,
                f"The gradient that enters the backward has a factor of its own in every {what}: {_listed(factors)}.",
                (f"without the factors {rest:.1e} is left",),
            )


def _listed(factors: Sequence[float]) -> str:
    return ", ".join(f"{factor:.3g}" for factor in factors[:_MOST]) + (", ..." if len(factors) > _MOST else "")


def _factors_of(together: Pair, group: Tensor) -> tuple[list[float], float]:
    """Of each group of rows the factor of the first run over the second, and the largest that is left without it."""
    factors, rests = [], [0.0]
    for number in group.unique().tolist():
        rows = group == number
        if float(together.square[rows].sum()) == 0.0:
            continue
        factor, rest = together.scale(rows)
        if factor <= 0:
            return [], math.inf
        factors.append(factor)
        rests.append(rest)
    return (factors, max(rests)) if factors else ([], math.inf)


SEARCHES: tuple[Search, ...] = (local_count, constant_factor)
