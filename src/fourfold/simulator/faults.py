"""What is slower than it should be: ranks, links, hosts, and chance."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self, TypeVar

from fourfold.layout import Grid

_FORMS = "rank=RANK:FACTOR, link=RANK-RANK:FACTOR or cpu=RANK:SECONDS, as in rank=5:1.5, link=12-13:3, cpu=7:0.02"
_PATTERN = re.compile(r"(?P<kind>\w+)=(?P<ranks>\d+(?:-\d+)?):(?P<value>[^:]+)")
Key = TypeVar("Key", int, tuple[int, int])

_ENDS = {"rank": 1, "link": 2, "cpu": 1}
MAX_VALUE = 1e6


@dataclass(frozen=True)
class Faults:
    """Planted faults. Ranks are global."""

    ranks: Mapping[int, float] = field(default_factory=dict)
    """Everything that the rank computes takes so many times as long."""
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Whatever goes between these two ranks takes so many times as long: their messages, and the collectives of every
    group that both are in."""
    cpus: Mapping[int, float] = field(default_factory=dict)
    """The rank's host launches every computation of the schedule (F, B) so many seconds late."""
    jitter: float = 0.0
    """Relative standard deviation of every computation on every rank, log-normal with mean 1."""
    seed: int = 0

    def __bool__(self) -> bool:
        return bool(self.ranks or self.links or self.cpus or self.jitter)

    @classmethod
    def parse(cls, texts: Iterable[str], *, jitter: float = 0.0, seed: int = 0) -> Self:
        """From what a person types after --slow. ValueError, naming the text and the rule."""
        ranks: dict[int, float] = {}
        links: dict[tuple[int, int], float] = {}
        cpus: dict[int, float] = {}
        for text in texts:
            kind, pair, value = _read(text)
            if kind == "link":
                _put(links, (min(pair), max(pair)), value, text)
            else:
                _put(ranks if kind == "rank" else cpus, pair[0], value, text)
        if not 0 <= jitter < 1:
            raise ValueError(f"--jitter {jitter:g}: must be at least 0 and below 1; 0.01 is 1 %")
        return cls(ranks, links, cpus, jitter, seed)

    def check(self, grid: Grid, *, several_stages: bool = True) -> None:
        """ValueError for ranks that are not there, and for links over which nothing goes.

        With several stages per rank, the ends of the pipeline are neighbours, too.
        """
        for name, ranks in (("rank", self.ranks), ("cpu", self.cpus)):
            for rank in ranks:
                if rank >= grid.size:
                    raise ValueError(f"--slow {name}={rank}: there are ranks 0 to {grid.size - 1}")
        for one, other in self.links:
            if other >= grid.size:
                raise ValueError(f"--slow link={one}-{other}: there are ranks 0 to {grid.size - 1}")
            if one == other:
                raise ValueError(f"--slow link={one}-{other}: a link has two ends")
            reached = _peers(grid, one, several_stages)
            if other not in reached:
                peers = sorted(reached - {one})
                near = sorted(peers, key=lambda rank: (abs(rank - other), rank))[:3]
                hint = f"nearest that rank {one} talks to: {', '.join(map(str, sorted(near)))}" if near else ""
                raise ValueError(
                    f"--slow link={one}-{other}: nothing goes between these two ranks; {hint}".rstrip("; ")
                )

    def descriptions(self) -> tuple[str, ...]:
        """A sentence for each."""
        return (
            *(f"rank {rank} computes {_longer(factor)} as long" for rank, factor in self.ranks.items()),
            *(
                f"the link of ranks {a} and {b} takes {_longer(factor)} as long"
                for (a, b), factor in self.links.items()
            ),
            *(f"the host of rank {r} launches computations {s:g} s late" for r, s in self.cpus.items()),
            *((f"computations vary by {self.jitter:.1%} (seed {self.seed})",) if self.jitter else ()),
        )


def _longer(factor: float) -> str:
    """1.5 times; what is faster than normal, too."""
    return f"{factor:g} times" if factor >= 1 else f"{factor:.0%}"


def _read(text: str) -> tuple[str, tuple[int, ...], float]:
    """(rank, link or cpu; ranks; factor or seconds) of one --slow."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match["kind"] not in _ENDS:
        raise ValueError(f"--slow {text}: must be {_FORMS}")
    ranks = tuple(map(int, match["ranks"].split("-")))
    if len(ranks) != _ENDS[match["kind"]]:
        raise ValueError(f"--slow {text}: must be {_FORMS}")
    try:
        value = float(match["value"])
    except ValueError:
        raise ValueError(f"--slow {text}: {match['value']} is no number; the form is {_FORMS}") from None
    if not 0 < value <= MAX_VALUE:
        what = "seconds" if match["kind"] == "cpu" else "a factor (1 is normal, 1.5 takes half as long again)"
        raise ValueError(f"--slow {text}: {match['value']} must be {what} above 0, at most {MAX_VALUE:g}")
    return match["kind"], ranks, value


def _put(known: dict[Key, float], key: Key, value: float, text: str) -> None:
    if key in known:
        raise ValueError(f"--slow {text}: given twice")
    known[key] = value


def _peers(grid: Grid, rank: int, several_stages: bool) -> set[int]:
    """Ranks to which something goes from this one: of its groups, and of the neighbouring pipeline ranks."""
    peers = {*grid.group_of(rank, "tp"), *grid.group_of(rank, "cp"), *grid.group_of(rank, "cp", "dp")}
    at = grid.coordinates(rank)
    if grid.pp > 1:
        for pp in (at.pp - 1, at.pp + 1):
            if several_stages or 0 <= pp < grid.pp:
                peers.add(grid.rank(tp=at.tp, cp=at.cp, pp=pp % grid.pp, dp=at.dp))
    return peers
