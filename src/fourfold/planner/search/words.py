"""A layout in words, the same in tables, sentences and files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fourfold.planner.search.judge import Candidate


def pipeline_words(one: Candidate) -> str:
    """afab v8 mb1 light; flexible v4 nc8 mb1. Without a pipeline none mb2, or none v4 mb2 with 4 parts."""
    size = f"mb{one.micro_batch}"
    nc = f" nc{one.nc}" if one.schedule == "flexible" else ""
    if one.pp == 1:
        return f"none {size}" if one.virtual_stages == 1 else f"none v{one.virtual_stages}{nc} {size}"
    split = " light" if one.split == "ends_light" else ""
    if not isinstance(one.split, str):
        split = f" split {'-'.join(map(str, one.split))}"
    return f"{one.schedule} v{one.virtual_stages}{nc} {size}{split}"


def layout_words(one: Candidate) -> str:
    """tp 8 cp 1 pp 16 dp 128, afab v8 mb1 light, ZeRO-2, selective recompute."""
    again = "" if one.recompute == "none" else f", {one.recompute} recompute"
    return f"{one.layout}, {pipeline_words(one)}, ZeRO-{one.zero}{again}"


def many(count: int, one: str, several: str | None = None) -> str:
    """1 GPU; 1,024 GPUs; 2 micro-batches."""
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"


def listed(parts: Iterable[str]) -> str:
    """One, two and three."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
