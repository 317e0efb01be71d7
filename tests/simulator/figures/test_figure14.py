"""Figure 14 against the published spread of computation (facts.md 2.12): its order, and that groups differ most."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from fourfold.simulator.figures import figure14
from fourfold.simulator.figures.figure import Figure


@cache
def figure() -> Figure:
    return figure14.figure()


def values(panel: int, *, published: bool) -> np.ndarray:
    """[groups, (min, mean, max)]"""
    series = figure().panels[panel].series
    columns = [(one.published if published else one.ours).values() for one in series]
    return np.array([[value for value in column if value is not None] for column in columns]).T


@pytest.mark.parametrize("panel", [0, 1])
def test_published_order(panel: int) -> None:
    """Groups 0, 2, 1, 3 by their attention, and in the same order by all computation."""
    means = values(panel, published=True)[:, 1]
    assert means.tolist() == [[0.953, 0.945, 0.907, 0.873], [0.865, 0.810, 0.678, 0.444]][panel]


@pytest.mark.parametrize("panel", [0, 1])
def test_order_and_spread(panel: int) -> None:
    ours = values(panel, published=False)
    assert (np.diff(ours[:, 1]) < 0).all()
    assert (ours[:, 0] < ours[:, 1]).all()
    assert (ours[:, 1] < ours[:, 2]).all()
    assert figure14.between_share(ours) > 0.5  # most of the way from rank to rank is between groups
    assert ours == pytest.approx(values(panel, published=True), abs=(0.06, 0.18)[panel])
    assert np.abs(ours - values(panel, published=True)).mean() < (0.02, 0.08)[panel]


def test_ratios() -> None:
    """Attention 3.1 between the largest and the smallest rank, all computation 1.21 (facts.md row 10)."""
    compute, attention = (values(panel, published=False) for panel in (0, 1))
    assert attention[:, 2].max() / attention[:, 0].min() == pytest.approx(3.1, rel=0.15)
    assert compute[:, 2].max() / compute[:, 0].min() == pytest.approx(1.21, abs=0.05)


def test_most_of_the_variance_is_between_groups() -> None:
    """Over all ranks of single steps, by analysis of variance."""
    shares = []
    for seed in range(40):
        pairs = figure14.pairs_per_rank(seed).astype(float)
        between = pairs.mean(axis=1).var()
        shares.append(between / pairs.var())
    assert np.median(shares) > 0.6


def test_seconds_are_the_planner_s() -> None:
    """Of a layer of 405B: 3.16e9 weights over tp 8 and 8,192 tokens, 6 FLOPs each, at some 65 % of 989 TFLOP/s;
    attention to all of the row has 72 % as many FLOPs (facts.md 5.2: 67 % with the vocabulary)."""
    full, other = figure14.seconds_per_micro_batch()
    flops = 6 * (2 * 16384 * 128 * (128 + 8) + 3 * 16384 * 53248) / 8 * 8192
    assert other == pytest.approx(flops / (0.65 * 989.4e12), rel=0.1)
    assert full / other == pytest.approx(0.72 / 0.88, rel=0.15)


def test_large_differences_are_explained() -> None:
    assert figure().number == "14"
    assert len(figure().differences) == 4
    assert "2.8 times" in figure().differences[1]
