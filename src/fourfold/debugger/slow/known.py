"""Means and medians of what is known: NaN stands for what a missing trace would have told."""

from __future__ import annotations

import warnings

import numpy as np

_TO_SIGMA = 1.4826  # of a normal distribution: standard deviation over median absolute deviation


def spread(values: np.ndarray) -> float:
    """Standard deviation of normal values of which up to half may be far too large; NaN is passed over.

    So it is taken from the lower half alone: by how far these lie below the lower median.
    """
    ordered = np.sort(values[~np.isnan(values)])
    if not len(ordered):
        return 0.0
    lower = ordered[: (len(ordered) + 1) // 2]
    return _TO_SIGMA * float(np.median(lower[-1] - lower))


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
