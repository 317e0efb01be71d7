"""The events of one rank's trace, as text in the Trace Event Format that Chrome, Perfetto and PyTorch's profiler share.

All times here are integer nanoseconds; the format has microseconds with three decimals, so nothing is lost.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.layout import Grid, Kind
from fourfold.layout.actions import COMPUTE
from fourfold.layout.labels import Label
from fourfold.report.trace_groups import COLLECTIVES, STREAMS, Groups, Sizes, kernel_name

_CPU_PROCESS = 1000  # of rank 0, in a file of its own

_KERNELS = {
    ("matmul", False): "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
    ("matmul", True): "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN",
    ("attention", False): "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>",
    ("attention", True): "void cutlass::device_kernel<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90>>",
}
_OPTIMIZER = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)"
    "::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>"
)


@dataclass(frozen=True)
class Processes:
    """Where a rank's events are shown."""

    cpu: int
    gpu: int
    thread: int  # of its host
    flows: int  # the number of its first arrow from a launch to a kernel, less 1

    @classmethod
    def of(cls, rank: int, gpus_per_node: int, *, merged: bool) -> Processes:
        """In a file of its own as the profiler numbers them; with others in one file, one process per rank."""
        if merged:
            return cls(rank, rank, 1, rank << 32)
        return cls(_CPU_PROCESS + rank, rank % gpus_per_node, _CPU_PROCESS + rank, 0)


class RankTrace:
    """Makes the events of one rank, in the order of its list of actions. Its clock is wrong by `offset` nanoseconds.

    `slot` is how long the host is busy with one launch.
    """

    def __init__(
        self,
        grid: Grid,
        groups: Groups,
        processes: Processes,
        *,
        device: int,
        offset: int,
        slot: int,
        sizes: Sizes | None,
    ) -> None:
        self.grid, self.groups, self.processes, self.sizes = grid, groups, processes, sizes
        self.device, self.offset, self.slot = device, offset, slot
        self._dtype = "BFloat16" if sizes is None else sizes.dtype
        self.host = 0  # when the host is free
        self._events: list[str] = []
        self._ranges: dict[str, int] = defaultdict(int)  # by dimension: labelled ranges so far
        # Collectives so far by name of group, and messages by pair of pipeline ranks: both ends count them alike.
        self._sequence: dict[object, int] = defaultdict(int)
        self._correlation = 0
        self._heads: dict[object, str] = {}
        self._arguments: dict[object, str] = {}

    def metadata(self, at: int) -> None:
        """Names of processes and threads."""
        rank, where = self.groups.rank, self.grid.coordinates(self.groups.rank)
        title = f"rank {rank} (tp {where.tp}, cp {where.cp}, pp {where.pp}, dp {where.dp})"
        both = {self.processes.cpu: f"{title}", self.processes.gpu: f"{title}"}
        if len(both) > 1:
            both = {self.processes.cpu: f"{title}: host", self.processes.gpu: f"{title}: GPU {self.device}"}
        for order, (process, name) in enumerate(both.items()):
            self._name("process_name", process, 0, {"name": name}, at)
            self._name("process_sort_index", process, 0, {"sort_index": rank * 2 + order}, at)
        self._name("thread_name", self.processes.cpu, self.processes.thread, {"name": "host"}, at)
        streams = {STREAMS["compute"]: "compute"}
        for group in self.groups.all():
            streams.setdefault(group.stream, group.dimension)
        for (source, destination), group in self.groups.channels.items():
            if group.description == "undefined":
                streams[group.stream] = f"pp {source} to {destination}"
        for stream, name in streams.items():
            self._name("thread_name", self.processes.gpu, stream, {"name": f"stream {stream} {name}"}, at)

    def _name(self, what: str, process: int, thread: int, values: dict[str, object], at: int) -> None:
        event = {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": at / 1000, "args": values}
        self._events.append(json.dumps(event))

    def annotate_step(self, number: int, start: int, end: int) -> None:
        """The profiler's mark of a step, on the host."""
        self._host_range(f"ProfilerStep#{number}", start, end)

    def action(self, kind: Kind, stage: int, micro_batch: int, *, earliest: int, kernels: Sequence[tuple] = ()) -> None:
        """One action of the schedule: its range on the host with the launches in it, and what they launch.

        Args:
            kind, stage, micro_batch: the action.
            earliest: when the host may begin with it.
            kernels: (what, kind, start, end) of each; `what` as in `segments`, or the dimension of a collective; for
                messages "pp", and `kind` the pair of pipeline ranks.
        """
        dimension = "pp" if micro_batch >= 0 else "fsdp"
        name = self._label(dimension, kind.value, stage, micro_batch)
        slot = self.slot
        begin = max(self.host, earliest)
        end = begin + (len(kernels) + 1) * slot
        self.host = end
        self._host_range(name, begin, end - 1)
        if kind in COMPUTE and kernels:
            self._gpu("gpu_user_annotation", name, STREAMS["compute"], kernels[0][2], kernels[-1][3], "")
        at = begin + slot // 2
        backward = kind is not Kind.FORWARD
        for what, how, start, finish in kernels:
            if what in ("matmul", "attention"):
                self._launch(at, _KERNELS[what, backward], STREAMS["compute"], start, finish, "")
            elif what == "pp":
                self._message(at, kind, how, start, finish)
            else:
                self._collective(at, what, how, stage, micro_batch, start, finish)
            at += slot

    def finish_step(self, earliest: int, reduced: tuple[int, int], optimizer: tuple[int, int]) -> None:
        """What ends a step: the sum of the gradients' norms over all ranks, and the optimizer's step."""
        begin, slot = max(self.host, earliest), self.slot
        if len(self.groups.by_dimension["world"].ranks) > 1:
            self._collective(begin, "world", "all_reduce", -1, -1, *reduced)
        self._host_range("Optimizer.step#AdamW.step", begin + slot, begin + 2 * slot)
        self._launch(begin + slot, _OPTIMIZER, STREAMS["compute"], *optimizer, "")
        self.host = begin + 2 * slot

    def take(self, least: int = 1) -> str:
        """The events made since it was last called, one a line, if there are at least so many; else nothing."""
        if len(self._events) < max(least, 1):
            return ""
        text = ",\n".join(self._events)
        self._events.clear()
        return text

    def _label(self, dimension: str, kind: str, stage: int, micro_batch: int) -> str:
        sequence = self._ranges[dimension]
        self._ranges[dimension] = sequence + 1
        return str(Label(dimension, kind, self.groups.label_rank(dimension), stage, micro_batch, sequence))

    def _collective(
        self, at: int, dimension: str, kind: str, stage: int, micro_batch: int, start: int, end: int
    ) -> None:
        group, name = self.groups.by_dimension[dimension], COLLECTIVES[kind]
        key = (dimension, kind, stage if dimension == "fsdp" else 0)
        arguments = self._arguments.get(key)
        reduces = dimension == "world" or (dimension == "fsdp" and kind == "reduce_scatter")  # sums are made in fp32
        dtype = "Float" if reduces else self._dtype
        if arguments is None:
            elements = self._elements(dimension, kind, stage, len(group.ranks))
            arguments = self._arguments[key] = group.arguments(name, dtype, elements)
        label = self._label(dimension, kind, stage, micro_batch)
        self._host_range(label, at, at + self.slot - 1)
        sequence = self._sequence[group.name] = self._sequence[group.name] + 1
        self._launch(
            at, kernel_name(name, dtype), group.stream, start, end, f',{arguments},"Seq":{sequence}', inside=True
        )

    def _message(self, at: int, kind: Kind, pair: tuple[int, int], start: int, end: int) -> None:
        group, sends = self.groups.channels[pair], kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        name = "send" if sends else "recv"
        key = (pair, name)
        arguments = self._arguments.get(key)
        dtype = self._dtype
        if arguments is None:
            elements = (self.sizes.activation // self.grid.tp,) * 2 if self.sizes is not None else None
            peer = self.groups.by_dimension["pp"].ranks[pair[1] if sends else pair[0]]
            arguments = self._arguments[key] = group.arguments(name, dtype, elements, peer)
        sequence = self._sequence[pair] = self._sequence[pair] + 1
        self._launch(at, kernel_name(name, dtype), group.stream, start, end, f',{arguments},"Seq":{sequence}')

    def _elements(self, dimension: str, kind: str, stage: int, members: int) -> tuple[int, int] | None:
        """(in, out) of a rank's message in a collective."""
        if dimension == "world":
            return 1, 1
        if self.sizes is None:
            return None
        whole = {
            "tp": self.sizes.activation,
            "cp": self.sizes.keys_values,
            "fsdp": self.sizes.parameters[stage] if dimension == "fsdp" else 0,
        }[dimension]
        return (whole // members, whole) if kind == "all_gather" else (whole, whole // members)

    def _launch(
        self, at: int, name: str, stream: int, start: int, end: int, arguments: str, *, inside: bool = False
    ) -> None:
        """A launch on the host, the kernel that it starts, and an arrow from one to the other."""
        correlation = self._correlation = self._correlation + 1
        head = self._heads.get("launch")
        if head is None:
            head = self._heads["launch"] = _head(
                "cuda_runtime", "cudaLaunchKernel", self.processes.cpu, self.processes.thread
            )
        begin, lasts = at + self.offset + (self.slot // 4 if inside else 0), max(self.slot // 2, 1)
        self._events.append(
            f'{head}{begin // 1000}.{begin % 1000:03d},"dur":{lasts // 1000}.{lasts % 1000:03d},'
            f'"args":{{"External id":{correlation},"cbid":211,"correlation":{correlation}}}}}'
        )
        self._flow('"s"', correlation, self.processes.cpu, self.processes.thread, begin)
        more = f',"External id":{correlation},"correlation":{correlation}{arguments}'
        self._gpu("kernel", name, stream, start, end, more)
        self._flow('"f","bp":"e"', correlation, self.processes.gpu, stream, start + self.offset)

    def _flow(self, phase: str, correlation: int, process: int, thread: int, at: int) -> None:
        """One end of an arrow, which is told from others by its number alone."""
        self._events.append(
            f'{{"ph":{phase},"id":{self.processes.flows + correlation},"pid":{process},"tid":{thread},'
            f'"ts":{at // 1000}.{at % 1000:03d},"cat":"ac2g","name":"ac2g"}}'
        )

    def _gpu(self, category: str, name: str, stream: int, start: int, end: int, arguments: str) -> None:
        key = (name, stream)
        head = self._heads.get(key)
        if head is None:
            head = _head(category, name, self.processes.gpu, stream)
            if category == "kernel":  # the names of ranges are all different
                self._heads[key] = head
        start, lasts = start + self.offset, end - start
        self._events.append(
            f'{head}{start // 1000}.{start % 1000:03d},"dur":{lasts // 1000}.{lasts % 1000:03d},'
            f'"args":{{"device":{self.device},"stream":{stream}{arguments}}}}}'
        )

    def _host_range(self, name: str, start: int, end: int) -> None:
        start, lasts = start + self.offset, end - start
        head = _head("user_annotation", name, self.processes.cpu, self.processes.thread)
        self._events.append(
            f'{head}{start // 1000}.{start % 1000:03d},"dur":{lasts // 1000}.{lasts % 1000:03d},"args":{{}}}}'
        )


def _head(category: str, name: str, process: int, thread: int) -> str:
    """An event up to its time."""
    return f'{{"ph":"X","cat":"{category}","name":"{name}","pid":{process},"tid":{thread},"ts":'
