"""Figures of merit of predictions. Percentages are 0 to 100.

With e = predicted / measured - 1 per run:
mean absolute percentage error (MAPE) 100 mean |e|; bias 100 mean e; share in band: of the runs whose measured seconds
lie in their predicted band; macro: the mean of the MAPEs of the sources, so that a large table counts no more than a
small one.
Of layouts that compete: Kendall's tau-b of predicted and measured seconds; regret: how much longer the layout that is
predicted fastest takes, measured, than the fastest one measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Score:
    """How good predictions of a set of runs are. None where the set is empty."""

    rows: int
    mape_percent: float | None
    bias_percent: float | None
    in_band_percent: float | None
    macro_mape_percent: float | None


def score(
    predicted: ArrayLike, measured: ArrayLike, *, band: tuple[ArrayLike, ArrayLike], sources: Sequence[str]
) -> Score:
    """The score of a set. `band`: lowest and highest seconds of each run; `sources`: where each comes from."""
    predicted, measured = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    low, high = (np.broadcast_to(np.asarray(end, dtype=float), measured.shape) for end in band)
    if not len(measured):
        return Score(0, None, None, None, None)
    errors = predicted / measured - 1
    of_source = np.asarray(sources)
    return Score(
        rows=len(measured),
        mape_percent=float(100 * np.abs(errors).mean()),
        bias_percent=float(100 * errors.mean()),
        in_band_percent=float(100 * np.mean((low <= measured) & (measured <= high))),
        macro_mape_percent=float(
            np.mean([100 * np.abs(errors[of_source == source]).mean() for source in dict.fromkeys(sources)])
        ),
    )


def kendall_tau(first: ArrayLike, second: ArrayLike) -> float:
    """Kendall's tau-b: (concordant - discordant pairs) / sqrt(pairs untied in one times pairs untied in the other).

    0 if all values of one are equal: an order that says nothing.
    """
    one, other = (_pair_signs(np.asarray(values, dtype=float)) for values in (first, second))
    untied = np.sqrt(float(np.sum(one != 0)) * float(np.sum(other != 0)))
    return float(np.sum(one * other) / untied) if untied else 0.0


def regret_percent(predicted: ArrayLike, measured: ArrayLike) -> float:
    """How much longer what is predicted fastest takes than the fastest. Of several predicted alike, the slowest."""
    predicted, measured = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    chosen = measured[predicted <= predicted.min()].max()
    return float(100 * (chosen / measured.min() - 1))


def _pair_signs(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sign of the difference of each pair."""
    first, second = np.triu_indices(len(values), k=1)
    return np.sign(values[first] - values[second])
