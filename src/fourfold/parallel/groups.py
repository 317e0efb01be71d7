"""Process groups of a layout, and the collectives that Fourfold writes itself.

Every collective carries a label in profiler traces (:mod:`fourfold.layout.labels`) and leaves an entry in the rank's
recorder (:mod:`fourfold.parallel.recorder`), and every sum of tensors is made in fp32 in the order of ranks: the data
travel by all-to-all or all-gather in their own dtype, and each rank adds what arrived. So a sum repeats bit for bit, on
any back end, and a bf16 run loses nothing in it. A group of one rank communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import record_function

from fourfold.layout import Coordinates, Grid
from fourfold.layout.labels import Label
from fourfold.parallel.channels import Channels, open_channels
from fourfold.parallel.recorder import Entry, Line, Position, Recorder, cuda_marker
from fourfold.parallel.torch_private import flatten_mesh, profiler_runs


class Group:
    """One process group of one dimension.

    Attributes:
        dimension: "tp", "cp", "dp", "fsdp", "pp" or "world".
        size: number of ranks.
        rank: this process's index in the group.
        ranks: the global ranks, ascending.
        device: type of device whose tensors it moves, "cpu" or "cuda".
        ordered: whether sums that a back end could make are made here, too, in the order of ranks.
    """

    def __init__(
        self, dimension: str, process_group: dist.ProcessGroup, recorder: Recorder, device: str, *, ordered: bool
    ) -> None:
        self.dimension = dimension
        self.device = device
        self.ordered = ordered
        self.process_group = process_group
        self.ranks = dist.get_process_group_ranks(process_group)
        self.size = len(self.ranks)
        self.rank = dist.get_rank(process_group)
        self._recorder = recorder
        self._line = recorder.line(dimension, self.ranks)
        self._sequence = 0

    def labelled(self, kind: str) -> AbstractContextManager[Any]:
        """Names the range of a profiler trace in which this rank does the action ``kind``, and records it."""
        self._recorder.action(kind)
        return self.named(kind)

    @contextmanager
    def collective(self, kind: str) -> Generator[None]:
        """Names and records a collective that somebody else runs, and waits for, inside of this range."""
        with self.named(kind):
            entry = self._line.start(kind)
            entry.wait_begins()
            yield
            entry.wait_ends()

    def named(self, kind: str) -> AbstractContextManager[Any]:
        """Names a range of a profiler trace."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        return self._range(kind, sequence)

    def _range(self, kind: str, sequence: int) -> AbstractContextManager[Any]:
        if not profiler_runs():
            return nullcontext()  # hundreds of ranges a step: naming them for nobody would cost a small model a tenth
        here = self._recorder.position
        return record_function(str(Label(self.dimension, kind, self.ranks[0], here.stage, here.micro_batch, sequence)))

    def _waiting(self) -> Callable[[], AbstractContextManager[Any]]:
        """Names the range in which the collective that was started last is waited for: by the number of its start."""
        return partial(self._range, "wait", self._sequence - 1)

    @property
    def waited(self) -> int:
        """Nanoseconds that this rank's main thread has spent waiting in collectives of the group so far."""
        return self._line.waited

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] on every rank -> [size * n, ...], in the order of ranks."""
        gathered = self.start_all_gather(x)
        return gathered.wait()

    def start_all_gather(self, x: Tensor) -> Pending:
        """As :meth:`all_gather`, but returns at once; ``wait`` gives the result."""
        if self.size == 1:
            return Pending(x, None, None)
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        with self.named("all_gather"):
            entry = self._line.start("all_gather", x)
            work = dist.all_gather_single(out, x.contiguous(), group=self.process_group, async_op=True)
        return Pending(out, work, entry, waiting=self._waiting())

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size * n, ...] on every rank -> the fp32 sum over ranks of this rank's [n, ...], in the dtype of ``x``."""
        return self.start_reduce_scatter(x).wait()

    def start_reduce_scatter(self, x: Tensor) -> Pending:
        """As :meth:`reduce_scatter`, but returns at once; ``wait`` adds and gives the result."""
        if self.size == 1:
            return Pending(x, None, None)
        out = x.new_empty(x.shape)
        with self.named("reduce_scatter"):
            entry = self._line.start("reduce_scatter", x)
            work = dist.all_to_all_single(out, x.contiguous(), group=self.process_group, async_op=True)
        blocks = out.view(self.size, -1, *x.shape[1:])
        return Pending(blocks, work, entry, waiting=self._waiting(), sum_blocks=True)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The fp32 sum of ``x`` over ranks, bitwise the same on all of them, in the dtype of ``x``."""
        if self.size == 1:
            return x
        return sum_in_rank_order(self.all_gather(x.unsqueeze(0))).to(x.dtype)

    def total(self, values: Sequence[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[float]:
        """Sums, or maxima, of a few numbers over the ranks, in fp64; sums in the order of the back end, or of ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.ordered and op == dist.ReduceOp.SUM:
            return self.all_reduce(tensor).tolist()
        with self.named("all_reduce"):
            entry = self._line.start("all_reduce", tensor)
            work = dist.all_reduce(tensor, op, group=self.process_group, async_op=True)
            assert work is not None
            entry.wait(work)
        return tensor.tolist()

    def barrier(self) -> None:
        """Waits for all ranks of the group."""
        with self.collective("barrier"):
            dist.barrier(self.process_group)


class Pending:
    """A collective that has been started."""

    def __init__(
        self,
        buffer: Tensor,
        work: dist.Work | None,
        entry: Entry | None,
        *,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
        sum_blocks: bool = False,
    ) -> None:
        self._buffer = buffer
        self._work = work
        self._entry = entry
        self._waiting = waiting
        self._sum_blocks = sum_blocks

    def wait(self) -> Tensor:
        """The result, once the collective is done."""
        if self._work is not None and self._entry is not None:
            with self._waiting():
                self._entry.wait(self._work)
        if self._sum_blocks:
            return sum_in_rank_order(self._buffer).to(self._buffer.dtype)
        return self._buffer


class Transfer:
    """A message that has been posted, on its way to or from another rank."""

    def __init__(self, work: dist.Work, entry: Entry) -> None:
        self._work = work
        self._entry = entry

    def wait(self) -> None:
        """Returns when it has arrived; on a GPU, when the device will have it before it goes on."""
        self._entry.wait(self._work)

    def is_completed(self) -> bool:
        """Whether it has arrived."""
        completed = self._work.is_completed()
        if completed:
            self._entry.wait_ends()
        return completed


def sum_in_rank_order(blocks: Tensor) -> Tensor:
    """[ranks, ...] -> the sum over ranks, left to right, in at least fp32.

    ``torch.sum`` promises no order. The sum lies in memory of its own: a part of the blocks' would keep all of them.
    """
    first, *others = blocks
    total = first if first.dtype == torch.float64 else first.float()
    for block in others:
        total = total + block if total is first else total.add_(block)
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
    messages: dict[tuple[int, int], Line] = field(repr=False)
    tp_mesh: DeviceMesh = field(repr=False)
    fsdp_mesh: DeviceMesh = field(repr=False)
    recorder: Recorder = field(repr=False)

    @property
    def position(self) -> Position:
        """Where in the schedule this rank is."""
        return self.recorder.position

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place in each dimension."""
        return self.grid.coordinates(self.rank)

    def send(self, tensor: Tensor, pp_rank: int) -> Transfer:
        """Starts sending to another rank of the pipeline."""
        way = (self.pp.rank, pp_rank)
        entry = self.messages[way].start("send", tensor)
        work = dist.isend(tensor, dst=self.pp.ranks[pp_rank], group=self.channels[way])
        assert work is not None
        return Transfer(work, entry)

    def receive(self, buffer: Tensor, pp_rank: int) -> Transfer:
        """Starts receiving from another rank of the pipeline."""
        way = (pp_rank, self.pp.rank)
        entry = self.messages[way].start("receive", buffer)
        work = dist.irecv(buffer, src=self.pp.ranks[pp_rank], group=self.channels[way])
        assert work is not None
        return Transfer(work, entry)

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.world.barrier()

    def share(self, text: str) -> list[str]:
        """What every rank says, in the order of ranks, on every rank. A collective for rare and small things."""
        said: list[str] = [""] * self.world.size
        with self.world.collective("all_gather"):
            dist.all_gather_object(said, text, group=self.world.process_group)
        return said


def connect(grid: Grid, device_type: str, *, ordered: bool = False, recorder: Recorder | None = None) -> Groups:
    """Makes all groups. Every rank of an initialised default group calls it, with the same arguments.

    Args:
        grid: the layout.
        device_type: "cpu" or "cuda".
        ordered: sums that the back end could make are made by us, too: see ``train.ordered``.
        recorder: of what the rank does; default: a new one.

    Raises:
        ValueError: the default group has another size than the grid.
    """
    if dist.get_world_size() != grid.size:
        raise ValueError(f"{dist.get_world_size()} processes were started, but tp x cp x pp x dp = {grid.size}")
    mesh = init_device_mesh(device_type, (grid.dp, grid.pp, grid.cp, grid.tp), mesh_dim_names=("dp", "pp", "cp", "tp"))
    fsdp_mesh = flatten_mesh(mesh["dp", "cp"], "fsdp")
    recorder = recorder or Recorder(cuda_marker if device_type == "cuda" else None)

    def group(name: str, process_group: dist.ProcessGroup | int | None) -> Group:
        assert isinstance(process_group, dist.ProcessGroup)
        return Group(name, process_group, recorder, device_type, ordered=ordered)

    pp = group("pp", mesh["pp"].get_group())
    channels = open_channels(pp.ranks, pp.rank)
    return Groups(
        grid=grid,
        rank=dist.get_rank(),
        tp=group("tp", mesh["tp"].get_group()),
        cp=group("cp", mesh["cp"].get_group()),
        pp=pp,
        dp=group("dp", mesh["dp"].get_group()),
        fsdp=group("fsdp", fsdp_mesh.get_group()),
        world=group("world", dist.group.WORLD),
        channels=channels,
        messages={
            (source, destination): recorder.line(
                "pp", (pp.ranks[source], pp.ranks[destination]), "send" if source == pp.rank else "receive"
            )
            for source, destination in channels
        },
        tp_mesh=mesh["tp"],
        fsdp_mesh=fsdp_mesh,
        recorder=recorder,
    )
