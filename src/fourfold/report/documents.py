"""How evenly documents share attention among ranks, as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fourfold.report.drawing import Table
from fourfold.simulator.loads import Loads

SPLITS = {"head_tail": "head-tail", "per_document": "per document"}
COLUMNS = ("split", "micro-batch: over mean", "over fastest", "step: over mean", "step: over fastest", "waiting")
NOTE = (
    "Attention of the slowest rank over the mean and over the fastest one's. Micro-batch: its CP ranks, which meet in "
    "every layer; mean and median over all. Step: all ranks, summed. Waiting: share of attention's time in which the "
    "mean rank waits for the slowest of its micro-batch."
)


def documents_table(loads: Sequence[Loads]) -> Table:
    """A row for each, as `simulator.loads.both_splits` has them of one mix."""
    mixes = dict.fromkeys(one.mix for one in loads)
    return Table(
        title=f"Attention by split of context parallelism: {', '.join(mixes)}",
        columns=COLUMNS,
        rows=tuple(
            (
                SPLITS[one.strategy],
                _times(one.slowest_over_mean_per_micro_batch),
                _times(one.slowest_over_fastest_per_micro_batch),
                _times(one.slowest_over_mean),
                _times(one.slowest_over_fastest),
                f"{one.waiting_share:.1%}",
            )
            for one in loads
        ),
        note=NOTE,
    )


def _times(factor: float) -> str:
    """A rank without work is infinitely faster."""
    return f"{factor:.2f}" if math.isfinite(factor) else "-"
