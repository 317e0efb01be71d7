"""Stretches of time against the same done nanosecond by nanosecond."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fourfold.debugger.reading.spans import holder, merged, outermost, without

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8)


def sorted_spans(spans):
    rows = sorted(((a, a + n) for a, n in spans), key=lambda row: (row[0], -row[1]))
    return np.array(rows, dtype=np.int64).reshape(-1, 2).T


def ticks(start, end):
    return {t for a, b in zip(start.tolist(), end.tolist(), strict=True) for t in range(a, b)}


@given(SPANS)
def test_union(spans):
    start, end = sorted_spans(spans)
    a, b = merged(start, end)
    assert ticks(a, b) == ticks(start, end)
    assert (a[1:] > b[:-1]).all()


@given(SPANS, SPANS)
def test_what_is_left(spans, cuts):
    start, end = sorted_spans(spans)
    rows = outermost(start, end)
    disjoint = np.concatenate(([True], start[rows][1:] >= np.maximum.accumulate(end[rows])[:-1])) if len(rows) else []
    start, end = start[rows][disjoint], end[rows][disjoint]
    gone = merged(*sorted_spans(cuts))
    a, b, of = without(start, end, gone)
    assert ticks(a, b) == ticks(start, end) - ticks(*gone)
    assert (b >= a).all()
    for begin, finish, row in zip(a, b, of, strict=True):
        assert start[row] <= begin <= finish <= end[row]


@given(SPANS)
def test_the_outermost_of_nested_ones(spans):
    # Nested as calls are: each is cut to what encloses it.
    rows, open_ = [], []
    for a, b in sorted_spans(spans).T.tolist():
        while open_ and open_[-1] <= a:
            open_.pop()
        b = min([b, *open_])
        open_.append(b)
        rows.append((a, b, len(open_)))
    rows.sort(key=lambda row: (row[0], -row[1]))
    start, end = np.array([row[:2] for row in rows], dtype=np.int64).reshape(-1, 2).T
    found = outermost(start, end)
    assert ticks(start[found], end[found]) == ticks(start, end)
    assert (start[found][1:] >= end[found][:-1]).all()


def test_holders():
    start, end = np.array([0, 10, 20]), np.array([5, 20, 30])
    assert holder(np.array([-1, 0, 4, 5, 10, 19, 20, 30]), start, end).tolist() == [-1, 0, 0, -1, 1, 1, 2, -1]
    assert holder(np.array([3]), start[:0], end[:0]).tolist() == [-1]
