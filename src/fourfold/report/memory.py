"""Memory per pipeline rank as a table: what each rank holds at its worst moment, by kind of bytes, in GiB."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from fourfold.planner.machines.chips import GIB
from fourfold.planner.memory.walk import RankMemory

MEMORY_LEGEND = (
    "GiB. in flight: most (micro-batch, stage) pairs whose activations are alive at once; other: gathered keys and "
    "values, logits, transients, buffers."
)
_COLUMNS = ("in\nflight", "weights", "gradi-\nents", "opti-\nmizer", "activa-\ntions", "other", "all")


def memory_table(ranks: Sequence[RankMemory]) -> Table:
    """Every pipeline rank at its worst moment in GiB; neighbours that look alike share a line."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("pp rank", no_wrap=True)
    table.add_column("holds", min_width=len("embedding +"))
    for title in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for cells, alike in groupby(ranks, key=_cells):
        same = [rank.pp_rank for rank in alike]
        table.add_row(f"{same[0]}" if len(same) == 1 else f"{same[0]}-{same[-1]}", *cells)
    return table


def _cells(rank: RankMemory) -> tuple[str, ...]:
    holds = ["embedding"] if rank.embedding else []
    holds += [f"{rank.num_layers} layer{'' if rank.num_layers == 1 else 's'}"] if rank.num_layers else []
    holds += ["head"] if rank.head else []
    other = rank.gathered_kv + rank.logits + rank.transients + rank.buffers
    kinds = (rank.weights, rank.gradients, rank.optimizer, rank.activations, other, rank.total)
    return (" + ".join(holds) or "nothing", str(rank.in_flight), *(f"{kind / GIB:.1f}" for kind in kinds))
