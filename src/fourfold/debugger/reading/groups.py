"""Process groups, as far as a trace tells of them: in its list of groups, with its kernels, or by our labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from fourfold.debugger.reading.events import Arguments, integer
from fourfold.debugger.reading.trace import UNKNOWN, Group
from fourfold.layout import Grid

_DIMENSIONS = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "fsdp": ("dp", "cp"),
    "world": ("tp", "cp", "pp", "dp"),
}
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Listed:
    """A group as the list of groups of a trace has it."""

    name: str
    description: str
    size: int
    ranks: tuple[int, ...] | None


def listed(distributed: object) -> tuple[Listed, ...]:
    """The groups in `pg_config`, a list or the text of one."""
    config = distributed.get("pg_config") if isinstance(distributed, dict) else None
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            config = None
    if isinstance(config, dict):
        config = [{"pg_name": name, **entry} for name, entry in config.items() if isinstance(entry, dict)]
    if not isinstance(config, list):
        return ()
    out = []
    for entry in config:
        if not isinstance(entry, dict):
            continue
        ranks, is_whole = ranks_of(entry.get("ranks"))
        size = integer(entry.get("pg_size", entry.get("group_size")), 0)
        known = ranks if ranks and is_whole and size in (0, len(ranks)) else None
        name, description = (str(entry.get(key, "")) for key in ("pg_name", "pg_desc"))
        out.append(Listed(name, description, size or len(ranks), known))
    return tuple(out)


def ranks_of(value: object) -> tuple[tuple[int, ...], bool]:
    """Ranks in a list, or in the text of one, ascending; and whether these are all: profilers cut after 30."""
    if isinstance(value, str):
        return tuple(sorted({int(text) for text in _NUMBER.findall(value)})), "..." not in value and "…" not in value
    if isinstance(value, list):
        numbers = [integer(item, UNKNOWN) for item in value]
        return tuple(sorted({number for number in numbers if number >= 0})), UNKNOWN not in numbers
    return (), False


class Groups:
    """The groups of one rank, each once."""

    def __init__(self, known: Iterable[Listed], grid: Grid | None, rank: int) -> None:
        self.found: list[Group] = []
        self._known = tuple(known)
        self._by_name = {group.name: group for group in self._known}
        self.grid, self.rank = grid, rank
        self._numbers: dict[object, int] = {}

    def of(self, arguments: Arguments) -> int:
        """Number of the group that the arguments of a kernel or an operator name; UNKNOWN if they name none."""
        name, description, ranks, size = (arguments.group, arguments.description, arguments.ranks, arguments.size)
        key = (str(name), str(description), str(ranks), str(size))
        if key not in self._numbers:
            group = self._described(name, description, ranks, size)
            self._numbers[key] = UNKNOWN if group is None else self._number(group)
        return self._numbers[key]

    def labelled(self, dimension: str, lowest: int) -> int:
        """Number of the group that a label of ours names."""
        key = (dimension, lowest)
        if key not in self._numbers:
            self._numbers[key] = self._number(self._of_label(dimension, lowest))
        return self._numbers[key]

    def _number(self, group: Group) -> int:
        if group not in self.found:
            self.found.append(group)
        return self.found.index(group)

    def _described(self, name: object, description: object, ranks: object, size: object) -> Group | None:
        members, is_whole = ranks_of(ranks)
        count = integer(size, 0)
        is_whole = is_whole and bool(members) and count in (0, len(members))
        entry = self._by_name.get(str(name)) if name not in (None, "") else None
        if entry is not None and (entry.size == count or not count):
            # Names may be numbers that other groups have on other ranks: the members, too, must be those.
            if entry.ranks is not None and {*members} <= {*entry.ranks}:
                members, is_whole = entry.ranks, True
            count = count or entry.size
        text = "" if description in (None, "undefined") else str(description)
        if entry is not None and not text:
            text = "" if entry.description == "undefined" else entry.description
        if name in (None, "") and not members and not text:
            return None
        return _made(str(name or ""), text, count, members, is_whole)

    def _of_label(self, dimension: str, lowest: int) -> Group:
        description = "default_pg" if dimension == "world" else f"mesh_{dimension}"
        ranks: tuple[int, ...] | None = None
        grid = self.grid
        if grid is not None and 0 <= self.rank < grid.size:
            ranks = grid.group_of(self.rank, *_DIMENSIONS[dimension])
            if ranks[0] != lowest:
                ranks = None
        for entry in self._known:
            same = entry.description == description or (ranks is not None and entry.ranks == ranks)
            if same and entry.ranks is not None and entry.ranks[0] == lowest:
                return _made(entry.name, description, entry.size, entry.ranks, True)
        if ranks is not None:
            return _made("", description, len(ranks), ranks, True)
        return _made("", description, 0, (lowest,), False)


def _made(name: str, description: str, size: int, members: tuple[int, ...], is_whole: bool) -> Group:
    """Numbers that profilers give as names may stand for different groups on different ranks: the lowest rank tells."""
    if members:
        name = f"{name or description or size}@{members[0]}"
    elif not name:
        name = description
    if is_whole:
        return Group(name, description, size or len(members), members)
    return Group(name, description, size, None, members)
