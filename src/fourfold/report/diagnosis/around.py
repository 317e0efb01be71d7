"""Which step and which ranks of it a page shows: the worst, and those around the culprit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fourfold.debugger.slow.chain import MOVING, OWN
from fourfold.debugger.slow.diagnosis import Diagnosis
from fourfold.layout import Grid
from fourfold.layout.grid import DIMENSIONS

MOST_ROWS = 24
_NEAR = 0.98  # of the worst step: what comes as near is as bad


def culprit_ranks(found: Diagnosis) -> tuple[int, ...]:
    """All ranks to blame, the worst first; of a rotating culprit those that it was, of links their ends."""
    verdict = found.verdict
    ranks = [rank for culprit in verdict.culprits for rank in culprit.ranks] + [rank for _, rank in verdict.rotating]
    return tuple(dict.fromkeys(ranks))


def culprit_ends(found: Diagnosis) -> frozenset[tuple[int, str]]:
    """Ends of chains of waiting that are because of them: a rank, and why it is late. Of a link only its transfers."""
    ends = {(rank, MOVING) for culprit in found.verdict.culprits if culprit.kind == "link" for rank in culprit.ranks}
    ranks = [rank for culprit in found.verdict.culprits if culprit.kind != "link" for rank in culprit.ranks]
    ranks += [rank for _, rank in found.verdict.rotating]
    return frozenset(ends | {(rank, doing) for rank in ranks for doing in OWN})


def worst_step(found: Diagnosis) -> int:
    """In which the culprits exceed most; without any, the longest. Of several alike one in the middle: the first and
    the last of a trace are often cut off."""
    excess, ranks = found.suspects.excess, list(culprit_ranks(found))
    of_ranks = np.nansum(np.nansum(excess[:, ranks], axis=2), axis=1) if ranks else np.zeros(len(found.steps))
    if not of_ranks.max(initial=0.0) > 0:
        of_ranks = np.nan_to_num(found.accounts.step_seconds)
    worst = np.flatnonzero(of_ranks >= _NEAR * of_ranks.max(initial=0.0))
    return found.steps[int(worst[len(worst) // 2])]


def centre(found: Diagnosis) -> tuple[int, ...]:
    """The ranks around which the others are shown: culprits; else a rank of the longest stage; else the slowest."""
    ranks = culprit_ranks(found)
    if ranks:
        return ranks
    present = np.flatnonzero(found.accounts.present).tolist()
    grid, stage = found.accounts.grid, found.verdict.stage
    if stage is not None:
        present = [rank for rank in present if grid.coordinates(rank).pp == stage.pp_rank] or present
    slow = np.nan_to_num(found.suspects.per_rank, nan=-np.inf)
    return (max(present, key=lambda rank: slow[rank]),) if present else ()


def around(grid: Grid, ranks: Sequence[int], present: Sequence[int], most: int = MOST_ROWS) -> list[tuple[int, str]]:
    """Some ranks and their peers, as many of each dimension: (rank, what it is to the first). All, if there are few.

    Args:
        grid: the layout.
        ranks: those to begin with, the most important first.
        present: ranks of which something can be shown.
        most: in all.
    """
    known = set(present)
    first = [rank for rank in ranks if rank in known][: most // 2]
    out = dict.fromkeys(first, "")
    queues = []
    for rank in first:
        for dimension in DIMENSIONS:
            others = [other for other in grid.group_of(rank, dimension) if other != rank and other in known]
            queues.append((f"{dimension} peer", sorted(others, key=lambda other: abs(other - rank))))
    while any(others for _, others in queues) and len(out) < most:
        for name, others in queues:
            if others and len(out) < most:
                out.setdefault(others.pop(0), name)
    order = {"": 0} | {f"{dimension} peer": i + 1 for i, dimension in enumerate(DIMENSIONS)}
    shown = sorted(out.items(), key=lambda item: (order[item[1]], item[0] if item[1] else 0))
    rest = [(rank, "") for rank in present if rank not in out]
    return shown + rest if first and len(shown) + len(rest) <= most else shown
