from __future__ import annotations

import numpy as np
import pytest

from fourfold.debugger.slow.columns import numbered, occurrence


@pytest.mark.parametrize("values", [[], [3], [1, 1, 1], [2, 1, 2, 2, 1, 0]])
def test_occurrence(values: list[int]) -> None:
    wanted = [values[:i].count(value) for i, value in enumerate(values)]
    assert occurrence(np.array(values, dtype=np.int64)).tolist() == wanted


@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("values", [3, 1 << 30])
def test_rows_that_are_alike_have_one_number(columns: int, values: int) -> None:
    random = np.random.default_rng(columns)
    rows = random.integers(-1, values, (2_000, columns))
    rows[1_000:] = rows[random.integers(0, 1_000, 1_000)]
    first, which = numbered(*rows.T)
    wanted, place, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    assert len(first) == len(wanted)
    np.testing.assert_array_equal(rows[first[which]], rows)
    np.testing.assert_array_equal(first, place)
    np.testing.assert_array_equal(which, inverse.reshape(-1))
