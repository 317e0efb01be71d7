"""Figures of merit against numbers worked out by hand."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from fourfold.planner.measured.scores import Score, kendall_tau, regret_percent, score


def test_score_by_hand() -> None:
    # Errors +10 %, -20 %, 0 %, +50 %. Of source a: 10 and 20, of b: 0 and 50.
    found = score(
        [11.0, 8.0, 5.0, 3.0],
        [10.0, 10.0, 5.0, 2.0],
        band=([10.0, 7.0, 4.0, 2.5], [12.0, 9.0, 6.0, 3.5]),  # holds 10, not 10, 5, not 2
        sources=["a", "a", "b", "b"],
    )
    assert found.rows == 4
    assert found.mape_percent == pytest.approx((10 + 20 + 0 + 50) / 4)
    assert found.bias_percent == pytest.approx((10 - 20 + 0 + 50) / 4)
    assert found.in_band_percent == 50
    assert found.macro_mape_percent == pytest.approx((15 + 25) / 2)


def test_macro_counts_every_source_once() -> None:
    found = score([1.0, 1.0, 1.0, 1.3], [1.0] * 4, band=(0, 9), sources=["large", "large", "large", "small"])
    assert found.mape_percent == pytest.approx(7.5)
    assert found.macro_mape_percent == pytest.approx(15)


def test_no_rows_no_figures() -> None:
    assert score([], [], band=([], []), sources=[]) == Score(0, None, None, None, None)


def test_tau_by_hand() -> None:
    assert kendall_tau([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    # Pairs of (1,3), (2,1), (3,2): one concordant, two discordant.
    assert kendall_tau([1, 2, 3], [3, 1, 2]) == pytest.approx(-1 / 3)
    # A tie in the first: two pairs concordant, of two untied there and three in the other.
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(2 * 3))
    assert kendall_tau([1, 1, 1], [1, 2, 3]) == 0


def test_tau_counts_pairs() -> None:
    random.seed(4)
    first, second = ([random.randrange(6) for _ in range(30)] for _ in range(2))
    pairs = [
        ((first[i] > first[j]) - (first[i] < first[j]), (second[i] > second[j]) - (second[i] < second[j]))
        for i, j in itertools.combinations(range(30), 2)
    ]
    untied = math.sqrt(sum(a != 0 for a, _ in pairs) * sum(b != 0 for _, b in pairs))
    assert kendall_tau(first, second) == pytest.approx(sum(a * b for a, b in pairs) / untied)


def test_regret_by_hand() -> None:
    assert regret_percent([3.0, 1.0, 2.0], [10.0, 11.0, 12.0]) == pytest.approx(10)
    assert regret_percent([1.0, 3.0, 2.0], [10.0, 11.0, 12.0]) == 0
    assert regret_percent([1.0, 1.0, 2.0], [10.0, 12.0, 12.0]) == pytest.approx(20)  # a tie is no choice
