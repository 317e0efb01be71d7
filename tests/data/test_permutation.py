"""The order of chunks without a table: every place once, and as random as a shuffle."""

from __future__ import annotations

import numpy as np
import pytest

from fourfold.data.permutation import Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 100, 961, 962, 4097])
def test_every_place_once(size: int) -> None:
    order = Permutation(size, 3, "name", 0)
    assert sorted(order[i] for i in range(size)) == list(range(size))
    for beyond in (-1, size):
        with pytest.raises(IndexError):
            order[beyond]


def test_every_part_of_the_key_matters_and_nothing_else() -> None:
    def order(*parts: object) -> list[int]:
        permutation = Permutation(50, *parts)
        return [permutation[i] for i in range(50)]

    wanted = order(1, "a", 2)
    assert order(1, "a", 2) == wanted
    # Sums and joined texts of seeds would be alike here.
    for other in ((2, "a", 1), (1, "b", 2), (1, "a", 3), (1, "a2"), (12, "a")):
        assert order(*other) != wanted


@pytest.mark.parametrize("size", [2, 3, 5, 6, 13])
def test_all_places_are_equally_likely(size: int) -> None:
    # Pairs (where 0 comes from, where 1 comes from) over many keys, against the uniform law, by chi-squared.
    trials, counts = 4000, np.zeros((size, size))
    for epoch in range(trials):
        order = Permutation(size, 0, "source", epoch)
        counts[order[0], order[1]] += 1
    assert (np.diagonal(counts) == 0).all()
    expected = trials / (size * (size - 1))
    chi_squared = (((counts - expected) ** 2) / expected)[~np.eye(size, dtype=bool)].sum()
    freedom = size * (size - 1) - 1
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_neighbours_are_parted() -> None:
    # Of a random order of n, one neighbour in n stays behind its predecessor: among 100,000, about one.
    order = Permutation(100_000, 5)
    values = np.array([order[i] for i in range(100_000)])
    assert (np.diff(values) == 1).sum() < 12
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_a_trillion_needs_no_table() -> None:
    order = Permutation(10**12, 0)
    found = [order[i] for i in range(0, 10**12, 10**9)]
    assert len(set(found)) == 1000
    assert 0.45 < sum(value < 5 * 10**11 for value in found) / 1000 < 0.55
