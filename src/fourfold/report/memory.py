"""Memory per pipeline rank as a table: what each rank holds at its worst moment, by kind of bytes, in GiB."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from fourfold.planner.walk import RankMemory

GIB = 1 << 30
PLAIN_WIDTH = 400  # characters; plain output is never wrapped, one statement stays one line
KINDS = (
    ("weights", "weights"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer"),
    ("activations", "activations"),
    ("gathered_kv", "gathered KV"),
    ("logits", "logits"),
    ("transients", "transient"),
    ("buffers", "buffers"),
)
LEGEND = (
    "GiB per GPU at each rank's worst moment, named in the last column. transient: alive for that moment only. "
    "reserved: with the allocator's fragmentation. in flight: most (micro-batch, stage) pairs whose activations are "
    "alive at once. >: the fullest rank."
)


def memory_table(ranks: Sequence[RankMemory], *, usable: float | None = None, pretty: bool = True) -> Table:
    """All pipeline ranks, neighbours that agree in one line, the fullest marked. Kinds that nobody has are left out.

    `usable`: bytes that a GPU has for it; ranks that need more are shown in red.
    """
    fullest = max(ranks, key=lambda rank: rank.total).pp_rank
    kinds = [(name, title) for name, title in KINDS if any(_gib(getattr(rank, name)) != "0.00" for rank in ranks)]
    table = Table(box=box.SIMPLE_HEAD if pretty else None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("pp rank", no_wrap=True)
    table.add_column("holds")
    for title in (*(title for _, title in kinds), "allocated", "reserved", "in flight"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("at", no_wrap=True)

    def cells(rank: RankMemory) -> tuple[str, ...]:
        sums = [*(getattr(rank, name) for name, _ in kinds), rank.total, rank.reserved]
        return (_holds(rank), *map(_gib, sums), str(rank.in_flight))

    for key, alike in groupby(ranks, key=lambda rank: (cells(rank), rank.pp_rank == fullest)):
        (texts, marked), several = key, list(alike)
        first, last = several[0], several[-1]
        too_much = usable is not None and first.reserved > usable
        table.add_row(
            ">" if marked else "",
            str(first.pp_rank) if first is last else f"{first.pp_rank}-{last.pp_rank}",
            *texts,
            first.at if first is last else "",
            style="red" if too_much else "bold" if marked else "",
        )
    return table


def memory_text(ranks: Sequence[RankMemory], *, usable: float | None = None) -> str:
    """The plain form: ASCII, no colour, no wrapping, no trailing spaces."""
    out = io.StringIO()
    console = Console(file=out, width=PLAIN_WIDTH, color_system=None, force_terminal=False)
    console.print(memory_table(ranks, usable=usable, pretty=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def _holds(rank: RankMemory) -> str:
    parts = ["embedding"] if rank.embedding else []
    if rank.num_layers:
        parts.append(f"{rank.num_layers} layer{'s' if rank.num_layers > 1 else ''}")
    return " + ".join([*parts, "head"] if rank.head else parts) or "nothing"
