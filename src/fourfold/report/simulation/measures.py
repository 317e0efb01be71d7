"""Sums over what ranks spent that several views show."""

from __future__ import annotations

import numpy as np

from fourfold.simulator.played import COMMUNICATION, COMPUTING, Played

_ROUNDING = 1e-9  # of the step: what is less is nothing


def own_computing(played: Played) -> np.ndarray:
    """float64 [dp, pp, cp, tp]: seconds for which each rank computes itself."""
    return np.sum([played.spent[name] for name in COMPUTING], axis=0)


def means(played: Played) -> dict[str, float]:
    """Seconds of the mean rank by class."""
    seconds = {name: float(of_ranks.mean()) for name, of_ranks in played.spent.items()}
    return {name: value if value > _ROUNDING * played.step_seconds else 0.0 for name, value in seconds.items()}


def exposed(played: Played) -> dict[str, tuple[float, float]]:
    """By dimension: seconds of the mean rank's step that are its communication, and how many of them are waiting."""
    seconds = means(played)
    return {
        dimension: (
            sum(seconds[name] for name in names),
            sum(seconds[name] for name in names if name.endswith("_wait")),
        )
        for dimension, names in COMMUNICATION.items()
    }


def slowest(played: Played) -> tuple[int, int, int, int]:
    """Where the rank is that computes longest, (dp, pp, cp, tp) of what was simulated."""
    own = own_computing(played)
    dp, pp, cp, tp = np.unravel_index(int(own.argmax()), own.shape)
    return int(dp), int(pp), int(cp), int(tp)
