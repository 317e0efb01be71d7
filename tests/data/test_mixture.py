"""Weights hold in every window of samples, exactly and for ever."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.data.mixture import LONGEST_PERIOD, Mixture
from fourfold.recipe import RecipeError

WEIGHTS = st.lists(st.integers(1, 300), min_size=1, max_size=12)


def shares(weights: list[float]) -> list[Fraction]:
    """Of decimals as a person reads them."""
    exact = [Fraction(repr(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_every_prefix_is_right_to_within_less_than_one(weights: list[int]) -> None:
    mixture = Mixture(weights)
    wanted = np.array(weights) * mixture.period  # times the sum of weights
    seen = np.zeros(len(weights), dtype=np.int64)
    for n in range(mixture.period):
        assert [mixture.count(i, n) for i in range(len(weights))] == seen.tolist()
        seen[mixture.source(n)] += 1
        # |seen - (n + 1) w / sum| < 1, in whole numbers
        assert (np.abs(seen * sum(weights) - (n + 1) * np.array(weights)) < sum(weights)).all()
    assert (seen * sum(weights) == wanted).all()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.decimals("0.01", "20", places=2).map(float), min_size=2, max_size=6),
    st.integers(0, 10**13),
    st.integers(1, 10**12),
)
def test_windows_anywhere_in_a_long_run_do_not_drift(weights: list[float], start: int, length: int) -> None:
    mixture, wanted = Mixture(weights), shares(weights)
    counts = [mixture.count(i, start + length) - mixture.count(i, start) for i in range(len(weights))]
    assert sum(counts) == length
    for count, share in zip(counts, wanted, strict=True):
        assert abs(count - length * share) < 2


def test_counts_agree_with_single_samples_far_out() -> None:
    mixture = Mixture([0.5, 0.3, 0.2])
    start = 3 * 10**15 + 7
    for i in range(3):
        found = sum(mixture.source(start + k) == i for k in range(1000))
        assert mixture.count(i, start + 1000) - mixture.count(i, start) == found


@pytest.mark.parametrize(
    ("weights", "ratios"),
    [
        ([0.1, 0.2, 0.7], (1, 2, 7)),  # the floats themselves have a common denominator of 2^55
        ([1.0], (1,)),
        ([3, 1.5], (2, 1)),
        ([1e-05, 1.0], (1, 100_000)),
        ([0.333333, 0.666667], (333_333, 666_667)),
    ],
)
def test_weights_are_the_decimals_as_written(weights: list[float], ratios: tuple[int, ...]) -> None:
    assert Mixture(weights).counts_per_period == ratios


def test_a_rare_source_is_spread_evenly() -> None:
    mixture = Mixture([99, 1])
    places = [n for n in range(1000) if mixture.source(n) == 1]
    assert np.diff(places).tolist() == [100] * 9


@pytest.mark.parametrize("weights", [[0.333333333, 0.666666667], [1e-9, 1.0], [0.1234567, 1e-08, 7.0]])
def test_weights_with_too_many_digits_are_refused_with_the_nearest_that_are_legal(weights: list[float]) -> None:
    with pytest.raises(RecipeError, match=r"data.mix = .*fewer digits") as caught:
        Mixture(weights)
    (nearest,) = caught.value.problems[0].nearest
    assert isinstance(nearest, list)
    mixture = Mixture(nearest)
    assert mixture.period <= LONGEST_PERIOD
    for given_share, share in zip(shares(weights), shares(nearest), strict=True):
        assert abs(given_share - share) <= Fraction(2, 10**6)
        assert share > 0
