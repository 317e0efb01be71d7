"""A figure of the paper beside our own: published values, ours, what was assumed, and why they differ."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

Values = Mapping[str, float | None]
"""By the label of a point, such as a rank, a sequence length or a schedule. None: the figure does not show it."""


class Point(NamedTuple):
    """One value of a figure."""

    panel: str
    series: str
    label: str


@dataclass(frozen=True)
class Series:
    """One line, or one colour of bars."""

    name: str
    published: Values
    """As read from the figure's vector graphics."""
    ours: Values

    def both(self) -> Iterator[tuple[str, float, float]]:
        """(label, published, ours) wherever there are both."""
        for label, ours in self.ours.items():
            published = self.published.get(label)
            if published is not None and ours is not None:
                yield label, published, ours


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

    def compared(self) -> Iterator[tuple[Point, float, float]]:
        """(point, published, ours) wherever there are both."""
        for series in self.series:
            for label, published, ours in series.both():
                yield Point(self.title, series.name, label), published, ours

    def beyond(self, *, series: Collection[str] = (), labels: Collection[str] = ()) -> frozenset[Point]:
        """Points at which ours is off by more than the reading error; of these series and labels, or of all."""
        return frozenset(
            point
            for point, published, ours in self.compared()
            if abs(ours - published) > self.reading_error
            and (not series or point.series in series)
            and (not labels or point.label in labels)
        )


@dataclass(frozen=True)
class Difference:
    """Why ours differ from the published values, somewhere."""

    text: str
    points: frozenset[Point] = frozenset()
    """Where."""
    explained: bool = True
    """False: the text says by how much, and that we do not know why."""


@dataclass(frozen=True)
class Figure:
    """A figure recomputed."""

    number: str
    """Of the figure in "Scaling Llama 3 Training with Efficient Parallelism Strategies" (ISCA 2025), such as "9"."""
    title: str
    panels: tuple[Panel, ...]
    assumptions: tuple[str, ...]
    """What the paper does not say and we chose."""
    differences: tuple[Difference, ...]
    """They cover every point that is `beyond` the reading error."""

    def compared(self) -> tuple[Point, ...]:
        """All points for which there are a published value and ours."""
        return tuple(point for panel in self.panels for point, _, _ in panel.compared())

    def beyond(self) -> frozenset[Point]:
        """Points at which ours is off by more than the reading error."""
        return union(panel.beyond() for panel in self.panels)

    def unexplained(self) -> frozenset[Point]:
        """Those of them of which no sentence says why."""
        return self.beyond() - union(one.points for one in self.differences if one.explained)


def union(sets: Iterable[frozenset[Point]]) -> frozenset[Point]:
    """Points of any of them."""
    return frozenset().union(*sets)
