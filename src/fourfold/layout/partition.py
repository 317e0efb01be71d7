"""Layers over virtual stages: by simple rules, by an explicit list, or balanced by time and memory.

A stage's index is s = chunk * pp + pp_rank, so pipeline rank r owns stages r, pp + r, 2 * pp + r, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np

Split = Literal["even", "ends_light"] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Stage:
    """One virtual stage: global ids of its layers (contiguous, maybe none), and which ends of the model it holds."""

    index: int
    layers: tuple[int, ...]
    embedding: bool
    head: bool


@dataclass(frozen=True, slots=True)
class Costs:
    """What one layer, the embedding and the head cost, in one unit (seconds, bytes). ValueError if negative."""

    layer: float
    embedding: float = 0.0
    head: float = 0.0

    def __post_init__(self) -> None:
        for name, cost in zip(("layer", "embedding", "head"), astuple(self), strict=True):
            if not cost >= 0:
                raise ValueError(f"{name} = {cost}: must not be negative; nearest legal: 0")


def partition(num_layers: int, *, pp: int, v: int = 1, split: Split = "even") -> tuple[Stage, ...]:
    """Cut layers 0..num_layers-1 into pp * v stages, each layer in exactly one.

    split="even": layer counts differ by at most one; the surplus goes to the middle.
    split="ends_light": the embedding and the head count as one layer each (ISCA'25, balanced PP: 128 - 2 layers), so
    that 126 layers on pp=16, v=8 leave stage 0 with the embedding only, stage 127 with the head only, and one layer on
    each stage between.
    split=[...]: the number of layers of every stage, in stage order.
    A stage may be empty. ValueError on sizes below 1 and on a list of the wrong length, sum or sign.
    """
    _check_sizes(num_layers=num_layers, pp=pp, v=v)
    num_stages = pp * v
    if split == "even":
        counts = _even(num_layers, pp=pp, v=v)
    elif split == "ends_light":
        counts = _ends_light(num_layers, pp=pp, v=v)
    elif isinstance(split, str):
        raise ValueError(f'split = {split!r}: must be "even", "ends_light" or a list of {num_stages} layer counts')
    else:
        counts = _checked_counts(split, num_layers=num_layers, num_stages=num_stages)

    ends = np.cumsum(counts).tolist()
    stages = tuple(
        Stage(index, tuple(range(end - count, end)), embedding=index == 0, head=index == num_stages - 1)
        for index, (count, end) in enumerate(zip(counts, ends, strict=True))
    )
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    return stages


def balanced(
    num_layers: int,
    *,
    pp: int,
    v: int = 1,
    time: Costs,
    memory: Costs | None = None,
    activation_bytes: float = 0.0,
    in_flight: Sequence[int] | None = None,
    memory_limit: float | None = None,
) -> list[int]:
    """Layer counts per stage, for `partition(split=...)`: least largest rank time, then least largest rank memory.

    A rank with n layers takes n * time.layer, plus time.embedding on the first rank and time.head on the last. It holds
    as much by `memory`, and the activations of in_flight[rank] chunks: n / v layers per chunk, `activation_bytes` per
    layer. That mean is exact where the chunks of the rank are equal. Both costs depend on n only, and grow with it,
    which makes the optimum exact: see `_smallest_peak`. A rank's layers are spread evenly over its chunks.

    ValueError if no partition fits in `memory_limit` (the message says what the smallest possible peak is), if
    `activation_bytes` comes without `in_flight`, or if anything about memory is given without `memory`.
    """
    _check_sizes(num_layers=num_layers, pp=pp, v=v)
    if memory is None and (activation_bytes or in_flight is not None or memory_limit is not None):
        raise ValueError("memory = None: activation_bytes, in_flight and memory_limit have no meaning without it")
    if activation_bytes and in_flight is None:
        raise ValueError(f"in_flight = None: must give {pp} chunk counts, one per pipeline rank, with activation_bytes")
    if in_flight is not None and len(in_flight) != pp:
        raise ValueError(f"in_flight = {list(in_flight)}: must have one entry per pipeline rank, pp = {pp}")

    activations = activation_bytes / v * np.array(in_flight if in_flight is not None else [0] * pp)
    durations = _rank_costs(time, num_layers=num_layers, pp=pp)
    sizes = _rank_costs(memory or Costs(0), num_layers=num_layers, pp=pp, extra_per_layer=activations)

    allowed = np.ones(sizes.shape, dtype=bool)
    if memory_limit is not None:
        smallest = _smallest_peak(sizes, allowed)
        if smallest > memory_limit:
            raise ValueError(f"memory_limit = {memory_limit:.12g}: the smallest possible peak is {smallest:.12g}")
        allowed &= sizes <= memory_limit
    allowed &= durations <= _smallest_peak(durations, allowed)

    # Layers are dealt to the places cheapest in memory, then in time, then to whoever has fewest, then to middle ranks.
    rank, count = np.nonzero(allowed[:, 1:])
    off_centre = np.abs(2 * rank - (pp - 1))
    cheapest = np.lexsort((off_centre, count, durations[rank, count + 1], sizes[rank, count + 1]))[:num_layers]
    layers_of_rank = np.bincount(rank[cheapest], minlength=pp).tolist()

    chunks_of_rank = [_even(layers, pp=1, v=v) for layers in layers_of_rank]
    if pp > 1:  # `_even` spares the last chunk before the first: not so where only the embedding is
        chunks_of_rank[0].reverse()
    return [chunks_of_rank[pp_rank][chunk] for chunk in range(v) for pp_rank in range(pp)]


def _even(num_layers: int, *, pp: int, v: int) -> list[int]:
    """Counts that differ by at most one over the stages, and over the ranks.

    The surplus goes to one unbroken run of stages, which hands it round the ranks in turn. Of all such runs we take the
    one that spares the first and last rank (v > 1 brings them to the middle of the model too), then is nearest to the
    middle. So the first stage has surplus only if all but one have, and the last never: the head computes, the
    embedding hardly does.
    """
    num_stages = pp * v
    base, surplus = divmod(num_layers, num_stages)

    def burden(first: int) -> tuple[int, int]:
        run = range(first, first + surplus)
        # Every pp stages in a row burden every rank once: only the rest of the division tells runs apart.
        on_end_ranks = sum(stage % pp in (0, pp - 1) for stage in run[: surplus % pp])
        off_centre = abs(2 * first + surplus - num_stages)
        return on_end_ranks, off_centre

    first = min(range(num_stages - surplus + 1), key=burden)
    return [base + (first <= stage < first + surplus) for stage in range(num_stages)]


def _ends_light(num_layers: int, *, pp: int, v: int) -> list[int]:
    """`_even` over the layers, the embedding and the head."""
    if num_layers + 2 < pp * v:  # too few to give every stage one: `_even` leaves both ends empty already
        return _even(num_layers, pp=pp, v=v)
    counts = _even(num_layers + 2, pp=pp, v=v)
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def _checked_counts(split: Sequence[int], *, num_layers: int, num_stages: int) -> list[int]:
    counts = list(split)
    if len(counts) != num_stages:
        raise ValueError(f"split = {counts}: has {len(counts)} entries; must have one per stage, pp * v = {num_stages}")
    if min(counts) < 0:
        raise ValueError(f"split = {counts}: stage {counts.index(min(counts))} is negative; nearest legal: 0")
    if sum(counts) != num_layers:
        raise ValueError(f"split = {counts}: sums to {sum(counts)}; must sum to num_layers = {num_layers}")
    return counts


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} = {size}: must be at least 1; nearest legal: 1")


def _rank_costs(costs: Costs, *, num_layers: int, pp: int, extra_per_layer: np.ndarray | float = 0.0) -> np.ndarray:
    """float [pp, num_layers + 1]: the cost of each pipeline rank if it had 0, 1, ..., num_layers layers."""
    fixed = np.zeros(pp)
    fixed[0] += costs.embedding
    fixed[-1] += costs.head
    per_layer = np.full(pp, costs.layer) + extra_per_layer
    return fixed[:, None] + np.outer(per_layer, np.arange(num_layers + 1))


def _smallest_peak(costs: np.ndarray, allowed: np.ndarray) -> float:
    """The least possible maximum over ranks of costs [pp, num_layers + 1] that grow along rows, all layers dealt out.

    Dealing out num_layers layers picks as many entries of costs[:, 1:], a prefix of every row, and the peak is the
    largest one picked; the num_layers smallest entries are prefixes, so the num_layers-th smallest is the optimum.
    Nobody goes below column 0.
    """
    num_layers = costs.shape[1] - 1
    picked = np.partition(costs[:, 1:][allowed[:, 1:]], num_layers - 1)[num_layers - 1]
    return float(max(costs[:, 0].max(), picked))
