"""Kinds of pipeline schedules side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from fourfold.planner.machines.chips import GIB
from fourfold.planner.memory.peak import RESERVED
from fourfold.report.plan import as_plain
from fourfold.simulator.compare import Compared

if TYPE_CHECKING:
    from fourfold.planner.machines.cluster import Cluster


def compare_text(found: Sequence[Compared], machines: Cluster) -> str:
    """A line per kind, fastest first, and why the recipe cannot have the others."""
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for name in ("schedule", "v", "nc", "zero"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for name in ("step s", "bubble", "memory GiB", "fullest rank", "in flight"):
        table.add_column(name, justify="right")
    table.add_column("")
    can = [one for one in found if one.refused is None]
    for one in can:
        assert one.step_seconds is not None and one.memory_bytes is not None
        assert one.bubble_over_compute is not None
        table.add_row(
            one.kind,
            str(one.virtual_stages),
            str(one.nc),
            str(one.zero),
            f"{one.step_seconds:.4g}",
            f"{one.bubble_over_compute:.1%}",
            f"{one.memory_bytes / GIB:.1f}",
            str(one.worst_rank),
            str(one.in_flight),
            _marks(one),
        )
    usable = (machines.chip.hbm_bytes - RESERVED) / GIB
    lines = [
        "Every kind of pipeline schedule. v: virtual stages per rank; bubble: of forwards and backwards; in flight: "
        "(micro-batch, chunk) pairs.",
        "",
        as_plain(table),
        "",
        f"Memory is what the fullest rank allocates. {usable:.1f} GiB are usable, of which the allocator loses some.",
    ]
    lines += [f"note: {one.kind}, v {one.virtual_stages}: {one.note}" for one in can if one.note]
    lines += [f"not {one.kind}, v {one.virtual_stages}, nc {one.nc}: {one.refused}" for one in found if one.refused]
    return "\n".join(lines)


def _marks(one: Compared) -> str:
    marks = (("this recipe", one.of_recipe), ("does not fit", not one.fits))
    return ", ".join(words for words, holds in marks if holds)
