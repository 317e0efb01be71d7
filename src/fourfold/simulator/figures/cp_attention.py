"""What context-parallel attention costs inside one NVLink domain: all keys and values gathered, or passed on in a ring.

All-gather: every rank gets all K and V, then one kernel attends from its queries, whatever the mask (facts.md
2.7). Ring: as many steps as ranks; in each, a kernel attends to the part of K and V that the rank has just now, while
the part travels on to the next, and the results are merged by their log-sum-exp.

A kernel of fused attention is dealt to the GPU's units tile by tile: 128 queries of one document and head, which go
through the keys that they see in blocks of 64. A unit that ends its tile takes the next, in the order of launch. So
few tiles, or some long ones at the end, leave units idle: nothing else is needed to see why CP is inefficient on short
sequences. Gathers are as NCCL makes them. Every constant says where it comes from; `SLOWER` is the only one read off
the figures that the model is compared with. What the paper leaves open is decided in `figures.attention`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from fourfold.layout.documents import Run, shards
from fourfold.planner.machines.chips import CHIPS
from fourfold.planner.timing.compute import BACKWARD_ATTENTION, HBM_SHARE
from fourfold.planner.timing.stack import load_sustained

# --- Kernels ---
FLASH_2 = 335e12  # FLOP/s of FlashAttention 2 on an H100 with HBM3, long sequences: its authors
TILE = 128  # queries of a tile of the forward; keys of one of the backward
BLOCK = 64  # keys (in the backward, queries) that a tile works on at a time
VALUE = 2  # bytes of a 16-bit number
EMPTY = 0.3e-6  # seconds of a tile that has no query: two dependent reads from L2, 260 cycles each
LAUNCH = 5e-6  # seconds between two small kernels (algorithms.md 3.5: 5 to 8)
MERGES = 2  # kernels that merge one step of the ring: the log-sum-exps, then the outputs
MERGE_BYTES = 6  # per number of the output: read what is there and what comes, write

# --- Gathers: NCCL's own tuning table for a ring inside an H100 node, of the versions of 2023 ---
LL = (6.6e-6, 0.6e-6)  # seconds: once, and per hop, of the protocol for small messages
LL_RATE = 87.7e9  # bytes/s of that protocol
SIMPLE = (8.4e-6, 3.4e-6)  # the same of the protocol for large ones
LINK = 370e9  # bytes/s that NVLink of an H100 reaches (facts.md 4.2)
SLOWER = 2.0  # times the table's latency that large messages take in ISCA'25's Figure 12, from 8K tokens on


@dataclass(frozen=True)
class Gpu:
    """Where kernels run."""

    attention: float
    """FLOP/s of the forward on long sequences, all units busy."""
    units: int
    hbm: float
    """Bytes/s that long streams reach."""
    evenly: bool = False
    """Whether units share tiles evenly, which no order of launch betters, instead of taking them in ours."""

    @classmethod
    def of(cls, chip: str, *, evenly: bool = False) -> Gpu:
        """A chip of the planner by name: "h100" has HBM3, "h100-hbm2e" less power and slower memory."""
        names = [one.name for one in CHIPS]
        row, portable = names.index(chip), load_sustained().portable
        return cls(
            attention=FLASH_2 * float(portable[row] / portable[names.index("h100")]),
            units=CHIPS[row].units,
            hbm=CHIPS[row].hbm_bandwidth * HBM_SHARE,
            evenly=evenly,
        )


@dataclass(frozen=True)
class Heads:
    """Of one GPU. By default those of Llama 3 405B with tp = 8."""

    query: int = 16
    kv: int = 1
    dim: int = 128


@dataclass(frozen=True)
class Seconds:
    """Of the slowest rank, one layer and one way."""

    kernels: float
    communication: float
    """Not hidden behind kernels."""

    @property
    def total(self) -> float:
        """One after the other."""
        return self.kernels + self.communication


# --- The three ways to attend ---


def one_gpu(gpu: Gpu, heads: Heads, documents: Sequence[int], *, backward: bool = False) -> float:
    """Seconds of attention over one row of these documents on one GPU."""
    runs = shards([documents], cp=1)[0].runs
    return kernel(gpu, heads, _sizes(runs), documents=len(documents), backward=backward)


def all_gather(gpu: Gpu, heads: Heads, documents: Sequence[int], *, cp: int, backward: bool = False) -> Seconds:
    """Attention over one row of these documents, cut head-tail over `cp` ranks, with K and V gathered.

    The forward gathers K, then V. The backward, which has them still, scatters the sums of their gradients.
    """
    kernels = [
        kernel(gpu, heads, _sizes(shard.runs), documents=len(documents), backward=backward)
        for shard in shards([documents], cp=cp)
    ]
    return Seconds(max(kernels), 2 * gather_seconds(cp, _bytes(heads, sum(documents))))


def ring(gpu: Gpu, heads: Heads, seq_len: int, *, cp: int, backward: bool = False) -> Seconds:
    """Causal attention over one row, cut head-tail over `cp` ranks, with K and V passed round.

    First each rank attends to its own part: its two chunks see each other causally. Of each other part, either all
    its queries see one chunk, or half of its queries both; ranks wait for the slower. The backward passes gradients of
    K and V round as well.
    """
    chunk, rest = divmod(seq_len, 2 * cp)
    if rest or not chunk:
        whole = 2 * cp * max(1, chunk)
        raise ValueError(f"seq_len = {seq_len}: must be a multiple of 2 cp = {2 * cp}; nearest legal: {whole}")
    own = kernel(gpu, heads, np.array([[2 * chunk, 2 * chunk]]), backward=backward)
    other = max(
        kernel(gpu, heads, np.array([[queries, keys]]), causal=False, backward=backward)
        for queries, keys in ((2 * chunk, chunk), (chunk, 2 * chunk))
    )
    hop = _simple_seconds(2, 2 * (2 if backward else 1) * _bytes(heads, 2 * chunk))
    merged = MERGE_BYTES * 2 * chunk * heads.query * heads.dim / gpu.hbm
    merge = MERGES * LAUNCH + merged
    kernels = own + (cp - 1) * other + cp * merge
    # The last step has nothing left to pass on.
    waits = [max(0.0, hop - seconds) for seconds in (own, *[other] * (cp - 2))] if cp > 1 else []
    return Seconds(kernels, sum(waits))


def relative_hfu(documents: Sequence[int], *, cp: int, seconds: float, alone: float) -> float:
    """FLOP/s per GPU of `cp` that attend to these documents in `seconds`, over those of one GPU that attends to as many
    tokens with the full causal mask, in `alone` seconds."""
    tokens = sum(documents)
    pairs = sum(length * (length + 1) // 2 for length in documents)
    return (pairs / cp / seconds) / (tokens * (tokens + 1) // 2 / alone)


# --- Kernels ---


def kernel(
    gpu: Gpu, heads: Heads, runs: np.ndarray, *, documents: int = 1, causal: bool = True, backward: bool = False
) -> float:
    """Seconds of one kernel over `runs`, int64[n, 2]: queries, and the keys that they end with and see.

    `documents`: in the list that the kernel is given, most of which may be on other ranks. It is launched with as many
    tiles for each as the longest run needs, and those without queries end at once.
    """
    if not len(runs):
        return 0.0
    work = _backward_tiles(runs, causal) if backward else _forward_tiles(runs, causal)
    per_pair = 4 * heads.dim * gpu.units / gpu.attention * (BACKWARD_ATTENTION if backward else 1)
    # Its queries come and its output goes, while the tile multiplies nothing.
    idle = 2 * TILE * heads.dim * VALUE * gpu.units / gpu.hbm
    tiles = work * TILE * per_pair + idle
    if gpu.evenly:
        busy = float(max(tiles.max(), tiles.sum() * heads.query / gpu.units))
    else:
        busy = _last_end(tiles, heads.query, gpu.units)
    launched = max(documents, len(runs)) * int(np.ceil(runs[:, 0].max() / TILE))
    return busy + max(0, launched - len(work)) * heads.query * EMPTY / gpu.units


def _forward_tiles(runs: np.ndarray, causal: bool) -> np.ndarray:
    """Keys that each tile of queries goes through, in whole blocks."""
    run, tile = _tiles_of(runs[:, 0])
    queries, keys = runs[run, 0], runs[run, 1]
    seen = keys - queries + np.minimum((tile + 1) * TILE, queries) if causal else keys
    return _in_blocks(seen)


def _backward_tiles(runs: np.ndarray, causal: bool) -> np.ndarray:
    """Queries that each tile of keys goes through, in whole blocks."""
    run, tile = _tiles_of(runs[:, 1])
    queries, keys = runs[run, 0], runs[run, 1]
    seen = np.minimum(queries, keys - tile * TILE) if causal else queries
    return _in_blocks(seen)


def _tiles_of(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(run, number in the run) of every tile."""
    counts = -(-lengths // TILE)
    run = np.repeat(np.arange(len(lengths)), counts)
    return run, np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)


def _in_blocks(length: np.ndarray) -> np.ndarray:
    return -(-length // BLOCK) * BLOCK


def _last_end(seconds: np.ndarray, heads: int, units: int) -> float:
    """When the last tile ends, if all tiles of a head are launched in order, then those of the next head."""
    free = [0.0] * units
    for _ in range(heads):
        for tile in seconds.tolist():
            heapq.heapreplace(free, free[0] + tile)
    return max(free)


def _sizes(runs: Sequence[Run]) -> np.ndarray:
    """int64[n, 2] of a shard's runs."""
    return np.array([(run.query_length, run.key_length) for run in runs], dtype=np.int64).reshape(-1, 2)


# --- Gathers ---


def _bytes(heads: Heads, tokens: int) -> int:
    """Of the keys, or the values, of so many tokens."""
    return tokens * heads.kv * heads.dim * VALUE


@cache
def gather_seconds(ranks: int, size: int) -> float:
    """An all-gather (or reduce-scatter) of `size` bytes over GPUs of one NVLink domain, of which each has 1 / ranks.

    NCCL takes the protocol that its table says is quicker.
    """
    if ranks == 1:
        return 0.0
    hops = ranks - 1
    arriving = size * hops / ranks
    small = LL[0] + hops * LL[1] + arriving / LL_RATE
    by_the_table = SIMPLE[0] + hops * SIMPLE[1] + arriving / LINK
    return small if small < by_the_table else _simple_seconds(ranks, size)


def _simple_seconds(ranks: int, size: int) -> float:
    """The protocol for large messages. A GPU handles all `size` bytes, its own among them: it copies these to where the
    others arrive. Pieces are on the way while others start, so that latency and transfer overlap in part: the root of
    the sum of their squares."""
    latency = SLOWER * (SIMPLE[0] + (ranks - 1) * SIMPLE[1])
    return float(np.hypot(latency, size / LINK))


def gather_bandwidth(heads: Heads, seq_len: int, *, cp: int) -> float:
    """Bytes/s at which K and V of the other ranks arrive at each GPU."""
    size = 2 * _bytes(heads, seq_len)
    return size * (cp - 1) / cp / (2 * gather_seconds(cp, size // 2))
