"""Means and medians of what is known: NaN stands for what a missing trace would have told."""

from __future__ import annotations

import warnings

import numpy as np


def mean(values: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """Of what is not NaN; NaN where nothing is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that nothing is known is no mistake
        return np.nanmean(values, axis=axis)


def median(values: np.ndarray, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> np.ndarray:
    """The same for the median."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmedian(values, axis=axis, keepdims=keepdims)
