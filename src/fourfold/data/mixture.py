"""Which source each sample comes from, so that every stretch of training holds each source in its weight.

Weights are decimals as written, and so fractions: with D as their common denominator every D samples hold source i
exactly a_i times. The order in those D samples is that of a fair queue: sample k of source i may come from place
floor(k D / a_i) on and must come before place ceil((k + 1) D / a_i), and of those that may come the most urgent is
next. Whoever always takes the most urgent meets all deadlines if they can be met (Horn 1974), and these can: sharing
out every place in the ratio of the weights meets them, and where shares fit into such windows, whole samples do. So
after any number n of samples every source has had n a_i / D of them to within less than 1, and any window is right to
within less than 2, for ever: nothing adds up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from fourfold.recipe import Problem, RecipeError

LONGEST_PERIOD = 1 << 20


class Mixture:
    """The source of every sample number from 0 on.

    Args:
        weights: positive; only their ratios count. A float is taken as the shortest decimal that is this float.

    Attributes:
        counts_per_period: a_i, how many samples of each source every period of ``period`` samples has.

    Raises:
        RecipeError: ``data.mix`` needs a longer period than 2^20.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts_per_period = _whole_ratios(weights)
        self.period = sum(self.counts_per_period)
        self._table = _fair_queue(self.counts_per_period)
        self._places = [np.flatnonzero(self._table == source) for source in range(len(weights))]

    def source(self, sample: int) -> int:
        """Index of the source that sample number ``sample`` comes from."""
        return int(self._table[sample % self.period])

    def count(self, source: int, samples: int) -> int:
        """How many of the first ``samples`` samples come from ``source``. Takes as long for a trillion as for ten."""
        periods, rest = divmod(samples, self.period)
        return periods * self.counts_per_period[source] + int(np.searchsorted(self._places[source], rest))


def _whole_ratios(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the ratios of the weights."""
    exact = [Fraction(str(weight)) for weight in weights]
    ratios = _reduced([int(weight * math.lcm(*(w.denominator for w in exact))) for weight in exact])
    if sum(ratios) <= LONGEST_PERIOD:
        return ratios
    rule = (
        f"weights repeat after {sum(ratios):,} samples; must after at most 2^20 = {LONGEST_PERIOD:,}: "
        "give them with fewer digits"
    )
    raise RecipeError([Problem("data.mix", list(weights), rule, (list(_rounded(ratios)),))])


def _reduced(numbers: Sequence[int]) -> tuple[int, ...]:
    divisor = math.gcd(*numbers)
    return tuple(number // divisor for number in numbers)


def _rounded(ratios: Sequence[int]) -> tuple[float, ...]:
    """The nearest shares in millionths that sum to 1 and leave nobody out: largest remainders are rounded up."""
    total, units = sum(ratios), 10**6
    shares = [max(1, ratio * units // total) for ratio in ratios]
    by_remainder = sorted(range(len(ratios)), key=lambda i: shares[i] - Fraction(ratios[i] * units, total))
    for source in by_remainder[: max(0, units - sum(shares))]:
        shares[source] += 1
    shares[shares.index(max(shares))] -= max(0, sum(shares) - units)
    return tuple(share / units for share in shares)


def _fair_queue(counts: Sequence[int]) -> np.ndarray:
    """Unsigned integers [sum of counts]: the source at each place of a period."""
    period = sum(counts)
    table = np.empty(period, dtype=np.min_scalar_type(len(counts)))
    done = [0] * len(counts)
    not_yet = [(0, source) for source in range(len(counts))]  # (place from which its next sample may come, source)
    ready: list[tuple[int, int]] = []  # (place before which it must come, source)
    for place in range(period):
        while not_yet and not_yet[0][0] <= place:
            _, source = heapq.heappop(not_yet)
            heapq.heappush(ready, (-(-(done[source] + 1) * period // counts[source]), source))
        _, source = heapq.heappop(ready)
        table[place] = source
        done[source] += 1
        heapq.heappush(not_yet, (done[source] * period // counts[source], source))
    return table
