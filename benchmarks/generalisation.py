"""How well step times of a source are predicted that no constant was fitted on: leave one source out.

For every source of measured runs, all constants are fitted again without its rows, on the calibration half of the
others, and its rows of quality A are predicted. Beside that stands the error with the constants that come with the
project. Where a source is the only one of its stack, it is predicted with what all stacks have in common.

    ./run bench generalisation        # a minute or two on one core
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from calibrate import NAMES, build, fit_rows, is_fitted, llama3_rows, measured_rows

from fourfold.planner.measured.accuracy import predict
from fourfold.planner.measured.rows import MeasuredRow
from fourfold.planner.measured.scores import Score, score
from fourfold.planner.timing.stack import Stack, load_stack


def without(source: str, rows: Sequence[MeasuredRow]) -> dict[str, Stack]:
    """All stacks, fitted on the other sources."""
    others = [row for row in rows if row.source != source and is_fitted(row)]
    found = fit_rows(others)
    return {name: build(found, index, others).stack for index, name in enumerate(NAMES)}


def scored(rows: Sequence[MeasuredRow], stacks: Callable[[str], Stack]) -> Score:
    """Score of these rows under these constants."""
    found = predict(rows, kinds=["published"] * len(rows), stacks=stacks)
    return score(
        [row.predicted_seconds for row in found],
        [row.measured_seconds for row in found],
        band=([row.low_seconds for row in found], [row.high_seconds for row in found]),
        sources=[row.source for row in found],
    )


def main() -> None:
    """A line per source, and their mean."""
    began = time.perf_counter()
    rows = [*measured_rows(), *llama3_rows()]
    print(f"{'source left out':28} {'rows':>5}  {'MAPE':>6} {'bias':>7} {'in band':>8}   as shipped   stack")
    errors: list[float] = []
    for source in sorted({row.source for row in rows}):
        mine = [row for row in rows if row.source == source and row.quality == "A"]
        if not mine:
            continue
        left_out = scored(mine, without(source, rows).__getitem__)
        shipped = scored(mine, load_stack)
        names = sorted({row.stack for row in mine})
        seen = {row.stack for row in rows if row.source != source and is_fitted(row)}
        unseen = "".join(f" ({name} unseen)" for name in names if name not in seen)
        errors.append(left_out.mape_percent or 0.0)
        print(
            f"{source:28} {len(mine):5}  {left_out.mape_percent:5.1f}% {left_out.bias_percent:+6.1f}% "
            f"{left_out.in_band_percent:7.0f}%   {shipped.mape_percent:8.1f}%   {', '.join(names)}{unseen}",
            flush=True,
        )
    print(
        f"mean over {len(errors)} sources {np.mean(errors):.1f}%, median {np.median(errors):.1f}%; "
        f"{len(NAMES)} stacks fitted {len(errors)} times in {time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
