"""Process groups of a layout, and the collectives that Fourfold writes itself.

Every collective carries a label in profiler traces (:mod:`fourfold.layout.labels`), and every sum of tensors is made in
fp32 in the order of ranks: the data travel by all-to-all or all-gather in their own dtype, and each rank adds what
arrived. So a sum repeats bit for bit, on any back end, and a bf16 run loses nothing in it. A group of one rank
communicates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import record_function

from fourfold.layout import Coordinates, Grid
from fourfold.layout.labels import Label
from fourfold.parallel.channels import Channels, open_channels
from fourfold.parallel.torch_private import flatten_mesh, profiler_runs


@dataclass
class Position:
    """Where in the schedule a rank is. The pipeline keeps it, so that collectives inside a stage can be labelled."""

    stage: int = -1
    micro_batch: int = -1


class Group:
    """One process group of one dimension.

    Attributes:
        dimension: "tp", "cp", "dp", "fsdp", "pp" or "world".
        size: number of ranks.
        rank: this process's index in the group.
        ranks: the global ranks, ascending.
        device: type of device whose tensors it moves, "cpu" or "cuda".
    """

    def __init__(self, dimension: str, process_group: dist.ProcessGroup, position: Position, device: str) -> None:
        self.dimension = dimension
        self.device = device
        self.process_group = process_group
        self.ranks = dist.get_process_group_ranks(process_group)
        self.size = len(self.ranks)
        self.rank = dist.get_rank(process_group)
        self._position = position
        self._sequence = 0

    def labelled(self, kind: str) -> AbstractContextManager[Any]:
        """Names the range of a profiler trace in which this group does ``kind``."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        if not profiler_runs():
            return nullcontext()  # hundreds of ranges a step: naming them for nobody would cost a small model a tenth
        here = self._position
        return record_function(str(Label(self.dimension, kind, self.ranks[0], here.stage, here.micro_batch, sequence)))

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] on every rank -> [size * n, ...], in the order of ranks."""
        gathered = self.start_all_gather(x)
        return gathered.wait()

    def start_all_gather(self, x: Tensor) -> Pending:
        """As :meth:`all_gather`, but returns at once; ``wait`` gives the result."""
        if self.size == 1:
            return Pending(x, None)
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        with self.labelled("all_gather"):
            work = dist.all_gather_single(out, x.contiguous(), group=self.process_group, async_op=True)
        return Pending(out, work)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size * n, ...] on every rank -> the fp32 sum over ranks of this rank's [n, ...], in the dtype of ``x``."""
        return self.start_reduce_scatter(x).wait()

    def start_reduce_scatter(self, x: Tensor) -> Pending:
        """As :meth:`reduce_scatter`, but returns at once; ``wait`` adds and gives the result."""
        if self.size == 1:
            return Pending(x, None)
        out = x.new_empty(x.shape)
        with self.labelled("reduce_scatter"):
            work = dist.all_to_all_single(out, x.contiguous(), group=self.process_group, async_op=True)
        return Pending(out.view(self.size, -1, *x.shape[1:]), work, sum_blocks=True)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The fp32 sum of ``x`` over ranks, bitwise the same on all of them, in the dtype of ``x``."""
        if self.size == 1:
            return x
        return _sum_in_rank_order(self.all_gather(x.unsqueeze(0))).to(x.dtype)

    def total(self, values: Sequence[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[float]:
        """Sums, or maxima, of a few numbers over the ranks, in fp64; in the order of the back end."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self.labelled("all_reduce"):
            dist.all_reduce(tensor, op, group=self.process_group)
        return tensor.tolist()


class Pending:
    """A collective that has been started."""

    def __init__(self, buffer: Tensor, work: dist.Work | None, *, sum_blocks: bool = False) -> None:
        self._buffer = buffer
        self._work = work
        self._sum_blocks = sum_blocks

    def wait(self) -> Tensor:
        """The result, once the collective is done."""
        if self._work is not None:
            self._work.wait()
        if self._sum_blocks:
            return _sum_in_rank_order(self._buffer).to(self._buffer.dtype)
        return self._buffer


def _sum_in_rank_order(blocks: Tensor) -> Tensor:
    """[ranks, ...] -> the sum over ranks, left to right, in at least fp32; it may overwrite ``blocks``.

    ``torch.sum`` promises no order.
    """
    total = blocks[0] if blocks.dtype == torch.float64 else blocks[0].float()
    for block in blocks[1:]:
        total.add_(block)
    return total


@dataclass(frozen=True)
class Groups:
    """The groups that one rank belongs to, and its place in the grid."""

    grid: Grid
    rank: int
    tp: Group
    cp: Group
    pp: Group
    dp: Group
    fsdp: Group
    world: Group
    channels: Channels = field(repr=False)
    tp_mesh: DeviceMesh = field(repr=False)
    fsdp_mesh: DeviceMesh = field(repr=False)
    position: Position = field(repr=False)

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place in each dimension."""
        return self.grid.coordinates(self.rank)

    def send(self, tensor: Tensor, pp_rank: int) -> dist.Work:
        """Starts sending to another rank of the pipeline."""
        group = self.channels[self.pp.rank, pp_rank]
        work = dist.isend(tensor, dst=self.pp.ranks[pp_rank], group=group)
        assert work is not None
        return work

    def receive(self, buffer: Tensor, pp_rank: int) -> dist.Work:
        """Starts receiving from another rank of the pipeline."""
        group = self.channels[pp_rank, self.pp.rank]
        work = dist.irecv(buffer, src=self.pp.ranks[pp_rank], group=group)
        assert work is not None
        return work

    def barrier(self) -> None:
        """Waits for all ranks."""
        dist.barrier(self.world.process_group)


def connect(grid: Grid, device_type: str) -> Groups:
    """Makes all groups. Every rank of an initialised default group calls it, with the same grid.

    Raises:
        ValueError: the default group has another size than the grid.
    """
    if dist.get_world_size() != grid.size:
        raise ValueError(f"{dist.get_world_size()} processes were started, but tp x cp x pp x dp = {grid.size}")
    mesh = init_device_mesh(device_type, (grid.dp, grid.pp, grid.cp, grid.tp), mesh_dim_names=("dp", "pp", "cp", "tp"))
    fsdp_mesh = flatten_mesh(mesh["dp", "cp"], "fsdp")
    position = Position()

    def group(name: str, process_group: dist.ProcessGroup | int | None) -> Group:
        assert isinstance(process_group, dist.ProcessGroup)
        return Group(name, process_group, position, device_type)

    pp = group("pp", mesh["pp"].get_group())
    return Groups(
        grid=grid,
        rank=dist.get_rank(),
        tp=group("tp", mesh["tp"].get_group()),
        cp=group("cp", mesh["cp"].get_group()),
        pp=pp,
        dp=group("dp", mesh["dp"].get_group()),
        fsdp=group("fsdp", fsdp_mesh.get_group()),
        world=group("world", dist.group.WORLD),
        channels=open_channels(pp.ranks, pp.rank),
        tp_mesh=mesh["tp"],
        fsdp_mesh=fsdp_mesh,
        position=position,
    )
