"""A figure of the paper beside our own: published values, ours, and what was assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Values = Mapping[str, float | None]
"""By the label of a point, such as a rank, a sequence length or a schedule. None: the figure does not show it."""


@dataclass(frozen=True)
class Series:
    """One line, or one colour of bars."""

    name: str
    published: Values
    """As read from the figure's vector graphics."""
    ours: Values


@dataclass(frozen=True)
class Panel:
    """One diagram."""

    title: str
    unit: str
    x: str
    """What the labels are."""
    series: tuple[Series, ...]
    reading_error: float
    """In the unit: how far a published value may be off for having been read from a picture."""
    kind: str = "bars"
    """"bars" or "lines"."""


@dataclass(frozen=True)
class Figure:
    """A figure recomputed."""

    number: str
    """Of the figure in "Scaling Llama 3 Training with Efficient Parallelism Strategies" (ISCA 2025), such as "9"."""
    title: str
    panels: tuple[Panel, ...]
    assumptions: tuple[str, ...]
    """What the paper does not say and we chose."""
    differences: tuple[str, ...]
    """Why ours differ from the published values, wherever by more than the reading error."""
