"""Numbering what is alike in columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MANY = 1 << 40  # codes are numbered anew before they can overflow


def occurrence(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each value, how many like it stand before it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(values) else order
    run = np.repeat(begins, np.diff(np.concatenate((begins, [len(values)]))))
    out = np.empty_like(values)
    out[order] = np.arange(len(values)) - run
    return out


def numbered(*columns: NDArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers rows that are alike in all columns: the first row of each number, in their order, and each row's number.

    A sort of one code per row, which is many times as fast as one of rows.
    """
    code = np.zeros(len(columns[0]), dtype=np.int64)
    size = 1
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        if size * max(len(values), 1) > _MANY:
            kept, code = np.unique(code, return_inverse=True)
            size = len(kept)
        code = code * len(values) + place
        size *= max(len(values), 1)
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return first, which
