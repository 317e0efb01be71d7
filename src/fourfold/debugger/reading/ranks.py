"""Which rank a file is of: by what stands in it, else by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fourfold.debugger.reading.events import integer
from fourfold.debugger.reading.groups import Listed
from fourfold.debugger.reading.trace import UNKNOWN
from fourfold.layout import join_ranks

_WORD = re.compile(r"(?<![a-z])(?:global)?rank[-_. =]?(\d+)(?!\d)", re.IGNORECASE)
_LAST = re.compile(r"(?:^|[a-z][-_.]?|[-_])(\d{1,6})$", re.IGNORECASE)
_SUFFIXES = re.compile(r"(?:\.pt)?(?:[._-]trace)?\.json(?:\.gz)?$", re.IGNORECASE)


def from_groups(groups: Iterable[Listed | tuple[int, ...]]) -> int:
    """The only rank that is in all groups of a rank; UNKNOWN if several are."""
    common: set[int] | None = None
    for group in groups:
        ranks = group.ranks if isinstance(group, Listed) else group
        if ranks:
            common = {*ranks} if common is None else common & {*ranks}
    return next(iter(common)) if common is not None and len(common) == 1 else UNKNOWN


def from_name(path: Path) -> int:
    """rank-34.x.json, rank_0.json, trace_3.json, rank3/trace.json; UNKNOWN for host_1234.567.pt.trace.json."""
    for text in (path.name, path.parent.name):
        found = _WORD.findall(text)
        if found:
            return int(found[-1])
    # PyTorch's own handler writes HOST_PID.TIME.pt.trace.json: there the last number is none.
    if ".pt." in path.name:
        return UNKNOWN
    match = _LAST.search(_SUFFIXES.sub("", path.name))
    return int(match[1]) if match else UNKNOWN


def world_size(distributed: object, groups: Sequence[Listed]) -> int:
    """Number of ranks of the job; 0 if nothing says it."""
    said = integer(distributed.get("world_size"), 0) if isinstance(distributed, dict) else 0
    whole = [group.size for group in groups if group.description == "default_pg" or group.name == "default_pg"]
    return said if said > 0 else max(whole, default=0)


def missing(ranks: Iterable[int], world: int) -> tuple[str, ...]:
    """A sentence about ranks of which there is no trace; none if all are there or nobody knows how many there are."""
    there = {*ranks}
    absent = sorted({*range(world)} - there)
    if not absent:
        return ()
    return (f"of {world:,} ranks there are traces of {len(there):,}; missing: {join_ranks(absent, 8)}",)
