"""How evenly both ways to deal tokens to context-parallel ranks share the attention of packed documents.

The table of algorithms.md 3.7: attention work only, rows of 131,072 tokens, 200 of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.layout.documents import Strategy
from fourfold.simulator.loads import STRATEGIES, loads_of, parse_mix

MIXES: tuple[tuple[str, str | None], ...] = (
    ("one document", None),
    ("exponential, mean 1K", "mean=1024,dist=exponential"),
    ("exponential, mean 8K", "mean=8192,dist=exponential"),
    ("log-normal, median 1K, sigma 1.5", "median=1024,dist=lognormal,sigma=1.5"),
    ("one 32K document first, then 96 of 1K", "lengths=32768,1024x96"),
)
"""What each row of the table is called, and its mix for `loads.parse_mix`; None: one document fills the row."""


@dataclass(frozen=True)
class Spread:
    """Of the ranks' work on rows of one mix."""

    documents: str
    cp: int
    strategy: Strategy
    max_over_mean: float
    """Mean over the rows: by so much the slowest rank delays all."""
    max_over_min: float
    """Median over the rows; infinite where a rank has nothing to do."""


def documents_table(
    *, seq_len: int = 131_072, draws: int = 200, cps: tuple[int, ...] = (2, 4, 8, 16), seed: int = 0
) -> tuple[Spread, ...]:
    """Every mix of `MIXES`, strategy and number of ranks, over `draws` rows."""
    table = []
    for name, text in MIXES:
        mix = None if text is None else parse_mix(text)
        for strategy in STRATEGIES:
            for cp in cps:
                loads = loads_of(mix, seq_len=seq_len, dp=1, micro_batches=draws, cp=cp, strategy=strategy, seed=seed)
                largest, smallest = loads.pairs.max(axis=2), loads.pairs.min(axis=2)
                with np.errstate(divide="ignore"):
                    ratio = largest / smallest
                table.append(
                    Spread(
                        documents=name,
                        cp=cp,
                        strategy=strategy,
                        max_over_mean=float((largest / loads.pairs.mean(axis=2)).mean()),
                        max_over_min=float(np.median(ratio)),
                    )
                )
    return tuple(table)
