"""Sums over what ranks spent that several views show."""

from __future__ import annotations

import numpy as np

from fourfold.report.simulation.words import DIMENSION_NAMES
from fourfold.report.text import percent
from fourfold.simulator.played import COMMUNICATION, COMPUTING, Played

_LEAST = 0.0005  # of the step: what is less rounds to 0.0%
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


def exposed_shares(played: Played) -> tuple[list[str], list[str]]:
    """Of the mean rank's step: transfers of collectives that nothing hides, and waiting for slower peers in them, as in
    "TP 7.2%"; not what is next to nothing. What messages between pipeline ranks cost is in the bubble."""
    seconds, step = exposed(played), played.step_seconds
    transfers = {name: seconds[name][0] - seconds[name][1] for name in DIMENSION_NAMES}
    waits = {name: seconds[name][1] for name in DIMENSION_NAMES}
    found = (
        [f"{DIMENSION_NAMES[name]} {percent(value / step)}" for name, value in one.items() if value >= _LEAST * step]
        for one in (transfers, waits)
    )
    first, second = found
    return first, second


def slowest(played: Played) -> tuple[int, int, int, int]:
    """Where the rank is that computes longest, (dp, pp, cp, tp) of what was simulated."""
    own = own_computing(played)
    dp, pp, cp, tp = np.unravel_index(int(own.argmax()), own.shape)
    return int(dp), int(pp), int(cp), int(tp)
