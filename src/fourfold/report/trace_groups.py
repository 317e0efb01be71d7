"""The process groups of a rank as PyTorch's profiler describes them, and the sizes of what they move."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from fourfold.layout import Grid, Stage
from fourfold.planner.jobs import layer_parameters

if TYPE_CHECKING:
    from fourfold.planner.jobs import Jobs

LONGEST_LIST = 30  # ranks that the profiler writes of a group, before it writes ...

DIMENSIONS = {"world": (), "tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "dp": ("dp",), "fsdp": ("cp", "dp")}
STREAMS = {"compute": 7, "tp": 20, "cp": 24, "fsdp": 28, "world": 32, "pp": 36}
"""CUDA streams. Every channel of the pipeline has one of its own, from 36 on."""

_KERNELS = {
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL",
    "_reduce_scatter_base": "ncclDevKernel_ReduceScatter_Sum_{}_RING_LL",
    "allreduce": "ncclDevKernel_AllReduce_Sum_{}_RING_LL",
    "send": "ncclDevKernel_SendRecv",
    "recv": "ncclDevKernel_SendRecv",
}
_IN_KERNELS = {"BFloat16": "bf16", "Float": "f32"}
COLLECTIVES = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base", "all_reduce": "allreduce"}
"""PyTorch's names of what labels call otherwise."""


@dataclass(frozen=True)
class Sizes:
    """Elements of what one rank hands over, or has in the end where it gathers."""

    activation: int
    """Hidden state of the tokens of a CP rank: gathered over TP."""
    keys_values: int
    """Keys and values of a rank's heads for the whole micro-batch: gathered over CP."""
    parameters: tuple[int, ...]
    """Of a rank's share of every virtual stage: gathered over dp x cp."""
    dtype: str = "BFloat16"

    @classmethod
    def of(cls, job: Jobs, stages: Sequence[Stage]) -> Self:
        """Of a planner's job, a row of `Jobs`."""
        tokens = int(job.seq_len) * int(job.micro_batch)
        matrices, norms = layer_parameters(job)
        layer, table = float(matrices / job.tp + norms), float(job.padded_vocab * job.dim / job.tp)
        return cls(
            activation=tokens // int(job.cp) * int(job.dim),
            keys_values=2 * tokens * int(job.kv_heads) * int(job.head_dim) // int(job.tp),
            parameters=tuple(round(len(s.layers) * layer + (s.embedding + s.head) * table) for s in stages),
        )


@dataclass(frozen=True)
class Group:
    """A process group as one of its ranks sees it."""

    dimension: str
    ranks: tuple[int, ...]
    name: str
    """Unique in the job."""
    description: str
    stream: int

    @property
    def config(self) -> dict[str, object]:
        """Its entry in the profiler's pg_config."""
        return {
            "pg_name": self.name,
            "pg_desc": self.description,
            "backend_config": "cuda:nccl",
            "pg_size": len(self.ranks),
            "ranks": list(self.ranks),
        }

    def arguments(self, collective: str, dtype: str, elements: tuple[int, int] | None, peer: int | None = None) -> str:
        """What the profiler writes with a kernel of this group, as members of a JSON object, but for Seq.

        Args:
            collective: PyTorch's name.
            dtype: of the elements.
            elements: (in, out) of the message, if known.
            peer: of a send the receiver, of a receive the sender, a global rank.
        """
        shown = ", ".join(map(str, self.ranks[:LONGEST_LIST])) + (", ..." if len(self.ranks) > LONGEST_LIST else "")
        values: dict[str, object] = {"Collective name": collective}
        if elements is not None:
            values |= {"In msg nelems": elements[0], "Out msg nelems": elements[1]}
        values |= {
            "Group size": len(self.ranks),
            "dtype": dtype,
            "In split size": "[]",
            "Out split size": "[]",
            "Process Group Name": self.name,
            "Process Group Description": self.description,
            "Process Group Ranks": f"[{shown}]",
        }
        if peer is not None:
            values |= {"Rank": self.ranks.index(peer), "Dst Rank" if collective == "send" else "Src Rank": peer}
        return json.dumps(values)[1:-1]


def kernel_name(collective: str, dtype: str) -> str:
    """As NCCL names the kernel that runs it."""
    name = _KERNELS[collective].format(_IN_KERNELS.get(dtype, "bf16"))
    return f"{name}(ncclDevKernelArgsStorage<4096ul>)"


class Groups:
    """All groups of one rank.

    `world` is all ranks, the same tuple for each of them. With `one_channel` all messages of a pipeline go through its
    own group; else each direction between two neighbours has one.
    """

    def __init__(self, grid: Grid, rank: int, *, world: tuple[int, ...], one_channel: bool) -> None:
        self.grid, self.rank = grid, rank
        self.by_dimension: dict[str, Group] = {}
        for number, (dimension, dims) in enumerate(DIMENSIONS.items()):
            ranks = grid.group_of(rank, *dims) if dims else world
            name = str(number * grid.size + ranks[0] if dims else 0)
            description = f"mesh_{dimension}" if dims else "default_pg"
            stream = STREAMS.get(dimension, STREAMS["pp"])
            self.by_dimension[dimension] = Group(dimension, ranks, name, description, stream)
        self.channels: dict[tuple[int, int], Group] = {}  # sending and receiving pipeline rank
        self._open_channels(one_channel)

    def _open_channels(self, one_channel: bool) -> None:
        """A group of two for each direction between neighbours, or the pipeline's own for everything."""
        pp, whole = self.grid.pp, self.by_dimension["pp"]
        me = self.grid.coordinates(self.rank).pp
        pairs = dict.fromkeys(
            pair for other in ((me + 1) % pp, (me - 1) % pp) if other != me for pair in ((me, other), (other, me))
        )
        for number, (source, destination) in enumerate(pairs):
            if one_channel:
                self.channels[source, destination] = whole
                continue
            ranks = tuple(sorted((whole.ranks[source], whole.ranks[destination])))
            onward = destination == (source + 1) % pp
            name = str(len(DIMENSIONS) * self.grid.size + 2 * whole.ranks[source] + (not onward))
            self.channels[source, destination] = Group("pp", ranks, name, "undefined", STREAMS["pp"] + number)

    def all(self) -> list[Group]:
        """In the order in which they were made; of one rank there is none but the whole."""
        made = [group for group in self.by_dimension.values() if len(group.ranks) > 1 or group.dimension == "world"]
        return made + [group for group in dict.fromkeys(self.channels.values()) if group not in made]

    def label_rank(self, dimension: str) -> int:
        """The smallest rank of a group, which names it in labels."""
        return self.by_dimension[dimension].ranks[0]
