"""Which ranks a process group has, where a dump of the flight recorder does not say it.

NCCL's dumps say it, gloo's do not. There a group is known by its name and description, which its members share; by its
description, which names a dimension of the layout if that is given; by which ranks have used it; and by what a gather
makes of what goes in. A rank that has never come to a group is not seen in it, so a group that looks smaller than
others of its description is completed to their pattern.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fourfold.debugger.hangs.recordings import Dump
from fourfold.layout import Grid, join_ranks
from fourfold.layout.grid import DIMENSIONS

Name = tuple[str, str]  # name and description, as PyTorch has them
_WORLD = ("default_pg", "world")
_ALIASES = {"fsdp": ("dp", "cp"), "dp_cp": ("dp", "cp"), "dp_shard_cp": ("dp", "cp"), "world": DIMENSIONS,
            "default_pg": DIMENSIONS}  # fmt: skip
_HASH = re.compile(r"[0-9a-f]{12,}.*")


@dataclass(frozen=True)
class Communicator:
    """A process group.

    Attributes:
        title: what it is called: a dimension, if its description tells one; unique together with its ranks.
        ranks: global, ascending.
    """

    title: str
    ranks: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, int]:
        """Its first and its last rank, which name it in a `Line`."""
        return self.ranks[0], self.ranks[-1]


def num_ranks(dumps: Mapping[int, Dump], grid: Grid | None) -> int:
    """How many ranks the job has. ValueError if the layout has fewer than there are dumps."""
    if grid is not None:
        beyond = sorted(rank for rank in dumps if rank >= grid.size)
        if beyond:
            raise ValueError(
                f"there is a dump of rank {beyond[-1]}, but the layout tp={grid.tp},cp={grid.cp},pp={grid.pp},"
                f"dp={grid.dp} has {grid.size} ranks; give the layout of the run"
            )
        return grid.size
    named = [rank for dump in dumps.values() for ranks in dump.groups.values() for rank in ranks]
    return max([*dumps, *named]) + 1


def communicators(dumps: Mapping[int, Dump], size: int, grid: Grid | None) -> dict[tuple[int, Name], Communicator]:
    """The process groups that each rank has used, by rank and name.

    Args:
        dumps: by rank.
        size: number of ranks.
        grid: the layout, if it is known.
    """
    used = {(rank, call.group) for rank, dump in dumps.items() for call in dump.calls}
    users: dict[Name, list[int]] = defaultdict(list)
    for rank, name in sorted(used):
        users[name].append(rank)
    configured: dict[Name, list[tuple[int, ...]]] = defaultdict(list)
    for dump in dumps.values():
        for name, ranks in dump.groups.items():
            if ranks not in configured[name]:
                configured[name].append(ranks)
    seen = _completed(users, _sizes(dumps), size)
    ranks_of: dict[tuple[int, Name], tuple[int, ...]] = {}
    for rank, name in used:
        own = dumps[rank].groups.get(name)
        others = next((ranks for ranks in configured.get(name, ()) if rank in ranks), None)
        ranks_of[rank, name] = own or others or _by_layout(rank, name, size, grid) or seen[name]
    return _titled(ranks_of)


def too_small(dumps: Mapping[int, Dump], groups: Mapping[tuple[int, Name], Communicator]) -> list[str]:
    """Sentences on groups that must have more ranks than are known."""
    sizes = _sizes(dumps)
    found = {
        f"{group.title} {join_ranks(group.ranks)} has {sizes[name]} ranks by what it gathers, but no more than these "
        "have left a trace in it: give the layout"
        for (_, name), group in groups.items()
        if sizes.get(name, 0) > len(group.ranks)
    }
    return sorted(found)


def _by_layout(rank: int, name: Name, size: int, grid: Grid | None) -> tuple[int, ...] | None:
    description = _title(name)
    if description in _WORLD:
        return tuple(range(size))
    dimensions = _ALIASES.get(description, tuple(description.split("_")))
    if grid is None or not set(dimensions) <= {*DIMENSIONS}:
        return None
    return grid.group_of(rank, *dimensions)


def _title(name: Name) -> str:
    """What a group is called: its description without PyTorch's mesh_, or else its name, in short if that is a hash."""
    title, description = name
    if description in ("", "undefined"):
        return f"group {title[:8]}" if _HASH.fullmatch(title) else f"group {title}"
    return "world" if description == "default_pg" else description.removeprefix("mesh_")


def _titled(ranks_of: Mapping[tuple[int, Name], tuple[int, ...]]) -> dict[tuple[int, Name], Communicator]:
    """Names them. Two groups of one description with the same first and last rank are told apart by their names."""
    named: dict[tuple[str, int, int], set[tuple[Name, tuple[int, ...]]]] = defaultdict(set)
    for (_, name), ranks in ranks_of.items():
        named[_title(name), ranks[0], ranks[-1]].add((name, ranks))
    found = {}
    for (rank, name), ranks in ranks_of.items():
        title = _title(name)
        if len(named[title, ranks[0], ranks[-1]]) > 1:
            title = f"{title} {name[0]}"
        found[rank, name] = Communicator(title, ranks)
    return found


def _sizes(dumps: Mapping[int, Dump]) -> dict[Name, int]:
    """How many ranks a group must have by what its gathers and scatters make of their tensors."""
    sizes: dict[Name, int] = {}
    for dump in dumps.values():
        for call in dump.calls:
            factor = call.factor if call.factor >= 1 else 1 / call.factor if call.factor else 0.0
            if factor == int(factor) and factor > sizes.get(call.group, 0):
                sizes[call.group] = int(factor)
    return sizes


def _completed(
    users: Mapping[Name, Sequence[int]], sizes: Mapping[Name, int], size: int
) -> dict[Name, tuple[int, ...]]:
    """The ranks that have used each group, and those that must belong to it by the pattern of its like."""
    alike: dict[str, list[Name]] = defaultdict(list)
    for name in users:
        alike[_title(name)].append(name)
    found: dict[Name, tuple[int, ...]] = {}
    for names in alike.values():
        widest = max(len(users[name]) for name in names)
        patterns = {
            tuple(rank - users[name][0] for rank in users[name]) for name in names if len(users[name]) == widest
        }
        taken = {rank for name in names for rank in users[name]}
        for name in names:
            present = tuple(users[name])
            wanted = max(sizes.get(name, 0), widest)
            found[name] = present
            if len(present) < wanted == widest and len(patterns) == 1:
                found[name] = _placed(present, next(iter(patterns)), taken, size)
            elif len(present) < wanted == size:
                found[name] = tuple(range(size))
    return found


def _placed(present: tuple[int, ...], pattern: tuple[int, ...], taken: set[int], size: int) -> tuple[int, ...]:
    """The one place of a pattern that covers the ranks present and, besides, only such as no group of its like has.

    A rank beyond those that have left a dump may be the last of the job, if no other place is possible.
    """
    places = []
    for offset in pattern:
        place = tuple(present[0] - offset + step for step in pattern)
        if place[0] >= 0 and set(present) <= set(place) and not taken & {*place} - {*present}:
            places.append(place)
    within = [place for place in places if place[-1] < size]
    found = within or places
    return found[0] if len(found) == 1 else present
