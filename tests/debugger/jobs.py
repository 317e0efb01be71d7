"""Small jobs played by hand, and their traces as a profiler writes them: an oracle that shares no code with Fourfold.

Each rank has a list of things to do. A collective begins on a rank when it comes to it and ends for all members
together; a receive holds up its rank until the message is there; a send holds up nobody.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np

COMPUTE, TP, DP, PP = 7, 20, 28, 36  # streams
TRANSFER = 30  # us of any collective or message


@dataclass
class Job:
    """Sizes, and what is slow in it. Ranks are tp + TP (pp + PP dp)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    steps: int = 3
    micro_batches: int = 4
    layers: int = 4
    layer_us: float = 200.0
    jitter: float = 0.01
    slow: Mapping[int, float] = field(default_factory=dict)
    """Rank -> factor of its computing."""
    slow_in_step: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(step, rank) -> factor, in that step only."""
    pause_us: Mapping[int, float] = field(default_factory=dict)
    """Rank -> how long its host pauses at the start of each step."""
    head: float = 1.0
    """Times as long as the other stages that the last computes."""
    sync_us: float = TRANSFER
    """Of the collective over dp."""
    seed: int = 0

    @property
    def size(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> tuple[int, int, int]:
        """(tp, pp, dp)."""
        return rank % self.tp, rank // self.tp % self.pp, rank // self.tp // self.pp

    def rank(self, tp: int, pp: int, dp: int) -> int:
        """The reverse."""
        return tp + self.tp * (pp + self.pp * dp)


@dataclass
class Event:
    """A kernel."""

    what: str
    stream: int
    start: float
    end: float
    step: int
    ranks: tuple[int, ...] = ()
    elements: int = 0
    number: int = -1


def play(job: Job) -> tuple[list[list[Event]], list[tuple[float, float]]]:
    """The kernels of every rank, and when each step began and ended. Microseconds."""
    random = np.random.default_rng(job.seed)
    todo = [list(_todo(job, rank)) for rank in range(job.size)]
    at, now = [0] * job.size, [0.0] * job.size
    events: list[list[Event]] = [[] for _ in range(job.size)]
    arrived: dict[object, dict[int, float]] = defaultdict(dict)
    sent: dict[object, tuple[int, float]] = {}
    numbers: dict[object, int] = defaultdict(int)
    steps: list[tuple[float, float]] = []
    moved = True
    while moved:
        moved = False
        for rank in range(job.size):
            while at[rank] < len(todo[rank]):
                kind, step, value = todo[rank][at[rank]]
                if kind == "compute":
                    name, took = value
                    took *= job.slow.get(rank, 1.0) * job.slow_in_step.get((step, rank), 1.0)
                    took *= float(np.exp(random.normal(0, job.jitter))) if job.jitter else 1.0
                    events[rank].append(Event(name, COMPUTE, now[rank], now[rank] + took, step))
                    now[rank] += took
                elif kind == "pause":
                    now[rank] += value
                elif kind == "send":
                    key, peer = value
                    sent[key] = rank, now[rank]
                elif kind == "recv":
                    key, peer = value
                    if key not in sent:
                        break
                    begun = sent[key][1]
                    end = max(begun, now[rank]) + TRANSFER
                    numbers[peer, rank] += 1
                    pair = tuple(sorted((peer, rank)))
                    for who, start, what in ((peer, begun, "send"), (rank, now[rank], "recv")):
                        stream = PP + (peer > rank)
                        events[who].append(Event(what, stream, start, end, step, pair, 4096, numbers[peer, rank]))
                    now[rank] = end
                else:
                    name, group, key, took = value
                    arrived[key][rank] = now[rank]
                    if len(arrived[key]) < len(group):
                        break
                    end = max(arrived[key].values()) + took
                    numbers[group] += 1
                    for member in group:
                        stream = TP if kind == "tp" else DP
                        event = Event(name, stream, arrived[key][member], end, step, group, 8192, numbers[group])
                        events[member].append(event)
                        now[member] = end
                        at[member] += 1
                        if kind == "end":
                            while len(steps) <= step:
                                steps.append((end, end))
                            steps[step] = steps[step][0], max(end, steps[step][1])
                    moved = True
                    continue
                at[rank] += 1
                moved = True
    assert all(at[rank] == len(todo[rank]) for rank in range(job.size))
    begins = [0.0, *(end for _, end in steps)]
    return [sorted(own, key=lambda e: e.start) for own in events], [
        *zip(begins, [end for _, end in steps], strict=False)
    ]


def _todo(job: Job, rank: int) -> Iterator[tuple[str, int, object]]:
    """All forwards, then all backwards; in the end gradients are summed over dp, and all ranks meet."""
    tp, pp, dp = job.place(rank)
    group = tuple(job.rank(t, pp, dp) for t in range(job.tp))
    replicas = tuple(job.rank(tp, pp, d) for d in range(job.dp))
    longer = job.head if pp == job.pp - 1 else 1.0
    for step in range(job.steps):
        if rank in job.pause_us:
            yield "pause", step, job.pause_us[rank]
        for direction, m in product(("F", "B"), range(job.micro_batches)):
            before, after = (pp - 1, pp + 1) if direction == "F" else (pp + 1, pp - 1)
            key = step, direction, m, dp, tp
            if 0 <= before < job.pp:
                yield "recv", step, ((*key, before), job.rank(tp, before, dp))
            for layer in range(job.layers):
                took = job.layer_us * longer * (1 if direction == "F" else 2)
                yield "compute", step, ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", 0.6 * took)
                yield (
                    "compute",
                    step,
                    ("void at::native::vectorized_elementwise_kernel<4, at::native::Add>", 0.4 * took),
                )
                if job.tp > 1:
                    yield "tp", step, ("AllReduce", group, (*key[:4], pp, layer), TRANSFER)
            if 0 <= after < job.pp:
                yield "send", step, ((*key, pp), job.rank(tp, after, dp))
        if job.dp > 1:
            yield "dp", step, ("ReduceScatter", replicas, (step, "dp", tp, pp), job.sync_us)
        yield "compute", step, ("void at::native::multi_tensor_apply_kernel<FusedAdam>", job.layer_us)
        yield "end", step, ("AllReduce", tuple(range(job.size)), (step, "end"), TRANSFER)


_ARGUMENTS = {"AllReduce": "allreduce", "ReduceScatter": "_reduce_scatter_base", "send": "send", "recv": "recv"}


@dataclass
class Style:
    """How a profiler writes it."""

    names: str = "ncclDevKernel_{}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    """Of collectives; {} is AllReduce and so on."""
    arguments: bool = True
    sequence: bool = True
    distributed: bool = True
    skew_us: Mapping[int, float] = field(default_factory=dict)
    file: str = "rank-{}.json"
    compress: bool = False


def write(job: Job, folder: Path, style: Style | None = None) -> Path:
    """Writes one trace per rank."""
    style = style or Style()
    folder.mkdir(parents=True, exist_ok=True)
    events, steps = play(job)
    for rank, own in enumerate(events):
        text = json.dumps(_document(job, rank, own, steps, style), indent=1)
        path = folder / style.file.format(rank)
        if style.compress:
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
    return folder


def _document(job: Job, rank: int, own: list[Event], steps: list[tuple[float, float]], style: Style) -> dict:
    shift = 5_000_000.0 + style.skew_us.get(rank, 0.0)
    out: list[dict] = []
    for number, (start, end) in enumerate(steps):
        head = {"ph": "X", "cat": "user_annotation", "pid": 100, "tid": 100}
        out.append({**head, "name": f"ProfilerStep#{number + 1}", "ts": _us(start + shift), "dur": _us(end - start)})
    for n, event in enumerate(own):
        launch = event.start + shift - 5.0
        head = {"ph": "X", "pid": 100, "tid": 100, "ts": _us(launch)}
        out.append({**head, "cat": "cpu_op", "name": "aten::mm", "dur": 4.0, "args": {"External id": n}})
        out.append({**head, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 3.0, "args": {"correlation": n}})
        arguments = {"device": rank % 8, "stream": event.stream, "correlation": n}
        name = event.what
        if event.ranks:
            kind = "SendRecv" if event.what in ("send", "recv") else event.what
            name = style.names.format(kind)
            if style.arguments:
                arguments |= {
                    "Collective name": _ARGUMENTS[event.what],
                    "In msg nelems": event.elements,
                    "Out msg nelems": event.elements,
                    "Group size": len(event.ranks),
                    "dtype": "BFloat16",
                    "Process Group Name": str(hash(event.ranks) % 1000),
                    "Process Group Description": "undefined",
                    "Process Group Ranks": str([*event.ranks]),
                }
                if event.what in ("send", "recv"):
                    peer = sum(event.ranks) - rank
                    arguments["Dst Rank" if event.what == "send" else "Src Rank"] = peer
            if style.sequence:
                arguments["Seq"] = event.number
        times = {"ts": _us(event.start + shift), "dur": _us(event.end - event.start)}
        row = {"ph": "X", "cat": "kernel", "name": name, "pid": rank % 8, "tid": event.stream, **times}
        out.append({**row, "args": arguments})
    document: dict = {"schemaVersion": 1}
    if style.distributed:
        document["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": job.size}
    return {**document, "traceEvents": out}


def _us(value: float) -> float:
    return round(value, 3)
