"""All figures, by number."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fourfold.simulator.figures import (
    figure3,
    figure4,
    figure9,
    figure10,
    figure11,
    figure12,
    figure13,
    figure14,
)
from fourfold.simulator.figures.figure import Figure

FIGURES: Mapping[str, Callable[[], Figure]] = {
    "3": figure3.figure,
    "4": figure4.figure,
    "9": figure9.figure,
    "10": figure10.figure,
    "11": figure11.figure,
    "12": figure12.figure,
    "13": figure13.figure,
    "14": figure14.figure,
}
"""Each recomputes its figure, in seconds."""


def chosen(numbers: tuple[str, ...]) -> tuple[str, ...]:
    """The numbers asked for, all if none is; ValueError for one that is not there."""
    for number in numbers:
        if number not in FIGURES:
            raise ValueError(f"--only {number}: must be one of {', '.join(FIGURES)}")
    return tuple(number for number in FIGURES if not numbers or number in numbers)
