"""Ranks, their coordinates in the four dimensions of parallelism, and the groups that talk to each other.

The order, inner to outer, is [TP, CP, PP, DP] (Herd report and ISCA'25): the dimension that talks most has neighbouring
ranks.

    rank = tp + TP * (cp + CP * (pp + PP * dp))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np

DIMENSIONS = ("tp", "cp", "pp", "dp")


class Coordinates(NamedTuple):
    """Where a rank stands in each dimension."""

    tp: int
    cp: int
    pp: int
    dp: int


def join_ranks(ranks: Iterable[int], most: int | None = None) -> str:
    """Ranks in short: 0-3, 8, 10-11; with `most`, no more than so many stretches."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    rest = f" and {len(texts) - most} more stretches" if most is not None and len(texts) > most else ""
    return ", ".join(texts[:most]) + rest


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes of the four dimensions. ValueError if one is below 1."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for dim, extent in zip(DIMENSIONS, astuple(self), strict=True):
            if extent < 1:
                raise ValueError(f"{dim} = {extent}: must be at least 1; nearest legal: 1")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank`. ValueError outside 0..size-1."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank = {rank}: must be in 0..{self.size - 1}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return Coordinates(tp, cp, pp, dp)

    def rank(self, *, tp: int = 0, cp: int = 0, pp: int = 0, dp: int = 0) -> int:
        """Rank at these coordinates. ValueError if one lies outside its dimension."""
        for dim, at, extent in zip(DIMENSIONS, (tp, cp, pp, dp), astuple(self), strict=True):
            if not 0 <= at < extent:
                raise ValueError(f"{dim} = {at}: must be in 0..{extent - 1}")
        return tp + self.tp * (cp + self.cp * (pp + self.pp * dp))

    def groups(self, *dims: str) -> list[tuple[int, ...]]:
        """All groups of ranks that differ in `dims` only; ranks ascend in a group, groups ascend by first rank.

        `groups("tp")` are the tensor-parallel groups, `groups("dp", "cp")` those over which FSDP shards.
        ValueError on an unknown dimension.
        """
        free = self._axes(dims)
        fixed = [axis for axis in range(4) if axis not in free]
        members = self._ranks().transpose(fixed + free)
        num_members = int(np.prod(members.shape[len(fixed) :], dtype=int))
        return [tuple(group) for group in members.reshape(-1, num_members).tolist()]

    def group_of(self, rank: int, *dims: str) -> tuple[int, ...]:
        """The one group of `groups(*dims)` that holds `rank`."""
        free = self._axes(dims)
        at = reversed(self.coordinates(rank))
        members = self._ranks()[tuple(slice(None) if axis in free else here for axis, here in enumerate(at))]
        return tuple(np.ravel(members).tolist())

    def crossing(self, *dims: str, gpus_per_node: int) -> list[tuple[int, ...]]:
        """Those of `groups(*dims)` that span more than one node; node = rank // gpus_per_node."""
        if gpus_per_node < 1:
            raise ValueError(f"gpus_per_node = {gpus_per_node}: must be at least 1; nearest legal: 1")
        return [group for group in self.groups(*dims) if group[0] // gpus_per_node != group[-1] // gpus_per_node]

    def _ranks(self) -> np.ndarray:
        """All ranks as an array [dp, pp, cp, tp]: outermost first, so that ranks ascend in memory."""
        return np.arange(self.size).reshape(self.dp, self.pp, self.cp, self.tp)

    @staticmethod
    def _axes(dims: tuple[str, ...]) -> list[int]:
        """Axes of `_ranks` along which `dims` vary, ascending."""
        for dim in dims:
            if dim not in DIMENSIONS:
                raise ValueError(f"dimension {dim!r}: must be one of {', '.join(DIMENSIONS)}")
        return [axis for axis, dim in enumerate(reversed(DIMENSIONS)) if dim in dims]
