"""Figures 11 to 13 against all published values of context-parallel attention."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from fourfold.simulator.figures import figure11, figure12, figure13
from fourfold.simulator.figures.figure import Figure, Series


@cache
def figures() -> dict[str, Figure]:
    return {"11": figure11.figure(), "12": figure12.figure(), "13": figure13.figure()}


def off(series: Series) -> list[float]:
    """How far each of our values is from the published one, relative to it."""
    return [abs(ours / published - 1) for _, published, ours in series.both()]


def all_series(number: str) -> list[Series]:
    return [series for panel in figures()[number].panels for series in panel.series]


def test_published_values_are_the_paper_s() -> None:
    """Ends of the lines as in facts.md 2.12, and 12 + 12 values, twice, and 24 in all."""
    ends = {
        (number, panel, series.name): (series.published["4K"], series.published["128K"])
        for number, figure in figures().items()
        for panel, one in enumerate(figure.panels)
        for series in one.series
    }
    assert ends == {
        ("11", 0, "cp 2"): (74.2, 94.3), ("11", 0, "cp 4"): (49.9, 94.6),
        ("11", 1, "cp 2"): (38.5, 59.0), ("11", 1, "cp 4"): (22.3, 41.6),
        ("12", 0, "cp 2"): (40.3, 190.6), ("12", 0, "cp 4"): (50.5, 249.1),
        ("12", 1, "cp 2"): (41.8, 197.3), ("12", 1, "cp 4"): (54.0, 255.3),
        ("13", 0, "all-gather"): (78.8, 98.1), ("13", 0, "ring"): (79.2, 100.0),
        ("13", 1, "all-gather"): (53.7, 97.3), ("13", 1, "ring"): (40.2, 97.7),
    }  # fmt: skip
    assert sum(len(series.published) for number in figures() for series in all_series(number)) == 72


@pytest.mark.parametrize("number", ["11", "12", "13"])
def test_median_per_figure(number: str) -> None:
    """At most 10 % are asked for over all values; each figure keeps it."""
    assert np.median([value for series in all_series(number) for value in off(series)]) < 0.1


def test_per_line() -> None:
    """Each line keeps it, too, but one, half of which the figure itself says is not explained."""
    worse = {
        (number, panel.title, series.name)
        for number in figures()
        for panel in figures()[number].panels
        for series in panel.series
        if np.median(off(series)) > 0.1
    }
    (line,) = worse
    assert line == ("11", "Relative HFU, document mask, mean 1K", "cp 4")
    assert len([point for point in figures()["11"].unexplained() if point[:2] == line[1:]]) >= 3


def test_all_gather_is_ahead_of_the_ring_where_the_figure_has_it() -> None:
    """Most at 4K on four ranks, published 13.5 points; at 128K the ring has caught up, published to half a point. The
    ring is ahead on two ranks at 8K."""
    two, four = figures()["13"].panels
    gathered, passed = (series.ours for series in four.series)
    ahead = {name: (value or 0) - (passed[name] or 0) for name, value in gathered.items()}
    assert ahead["4K"] > 13.5 / 2
    assert abs(ahead["128K"]) < ahead["4K"] / 3
    assert (two.series[1].ours["8K"] or 0) > (two.series[0].ours["8K"] or 0)


def test_a_document_mask_costs_a_third_of_the_rate_and_more_on_four_ranks() -> None:
    causal, documents = figures()["11"].panels
    for cp in (0, 1):
        for length in ("4K", "32K", "128K"):
            assert (documents.series[cp].ours[length] or 0) < 0.75 * (causal.series[cp].ours[length] or 0)
    assert all((documents.series[1].ours[k] or 0) < (v or 0) for k, v in documents.series[0].ours.items())
