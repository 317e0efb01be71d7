"""Every legal layout of a job, as columns. A row of the space is one configuration: (tp, cp, pp, dp), virtual stages,
nc, micro-batch, schedule, ZeRO mode, recomputation, split of the layers.

The rules of legality are those of a recipe (`recipe.rules`) and of `layout.generate`; a layout uses all GPUs. What is
left out is the same as something that is in, cannot be among the best, or must be asked for; `LEFT_OUT` says it in
words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fourfold.planner.jobs import Column, Jobs, Order, Precision, Split
from fourfold.planner.search.problem import ORDERS, RECOMPUTES, SPLITS, Limits, Problem
from fourfold.recipe import ModelConfig

MOST_TOKENS = 16_384  # per rank and micro-batch, above one sequence: products are as efficient with fewer
SMALLEST_CHUNK = 256  # tokens; two chunks per CP rank
CHUNK = 16_384  # rows that are judged at once, so that their columns stay in the cache

LEFT_OUT = (
    "groups of tp or tp x cp ranks that lie askew in NVLink domains (neither dividing one nor filling several)",
    f"cp with chunks of fewer than {SMALLEST_CHUNK} tokens, and tokens that 2 cp does not divide",
    f"micro-batches of more than {MOST_TOKENS:,} tokens per rank, but for one sequence",
    "virtual stages that leave the largest stage as many layers as fewer stages do, but for finalists",
    "pp 1 with all forwards first, or with virtual stages other than in ZeRO-2 among several ranks: as fast, with as "
    "much memory or more",
    "nc < pp and fewer micro-batches than pp other than as afab, which they run as",
    "nc without virtual stages, and nc that makes the rounds of another nc",
    "ZeRO-2 or ZeRO-1 where all gradients are reduced in one round, which makes them the same",
    "ZeRO-2 with one stage per rank: ZeRO-1 holds as little, and reduces once",
    "even where ends_light deals the layers alike",
    "recomputation of other parts than none, selective and full",
    "zb-h1, unless it is asked for",
)

LAYOUT = ("tp", "cp", "pp", "dp", "v", "nc", "micro_batch", "order", "split", "zero", "recompute")


@dataclass(frozen=True)
class Space:
    """Layouts as columns of equal length, named as in `Jobs`."""

    columns: dict[str, Column]
    hopeless: int
    """Layouts that are not in it because weights and optimizer state alone are more than a GPU holds."""

    def __len__(self) -> int:
        return len(self.columns["tp"])

    def chunks(self, problem: Problem, size: int = CHUNK) -> Iterator[tuple[slice, Jobs]]:
        """The jobs of the space, some rows at a time."""
        base = problem.jobs(**{name: column[:1] for name, column in self.columns.items()})
        shards = self.columns["dp"] * self.columns["cp"]
        for first in range(0, len(self), size):
            rows = slice(first, first + size)
            part = {name: column[rows] for name, column in self.columns.items()}
            yield rows, base.replace(**part, shards=shards[rows])

    def take(self, rows: np.ndarray) -> Space:
        """The layouts at these indices, or where a mask is true."""
        return Space({name: column[rows] for name, column in self.columns.items()}, self.hopeless)

    def with_more_stage_numbers(self, problem: Problem) -> Space:
        """These layouts with the numbers of virtual stages that `space` leaves out."""
        columns, layers = self.columns, problem.config.num_layers
        found = []
        for pp in np.unique(columns["pp"]).tolist() if "virtual_stages" not in problem.limits else []:
            rows = np.flatnonzero((columns["pp"] == pp) & (columns["v"] > 1))
            others = sorted({*range(2, (layers + 2) // pp + 1)} - {*stage_numbers(layers, pp)})
            part = {name: np.repeat(column[rows], len(others)) for name, column in columns.items()}
            part["v"] = np.tile(np.array(others, dtype=np.int64), len(rows))
            found.append(np.stack([part[name] for name in LAYOUT]))
        every = np.unique(np.concatenate([np.zeros((len(LAYOUT), 0), dtype=np.int64), *found], axis=1), axis=1)
        more = dict(zip(LAYOUT, every, strict=True))
        keep = _is_split(layers, more["pp"] * more["v"], more["split"])
        return Space({name: column[keep] for name, column in more.items()}, 0)

    def and_also(self, other: Space) -> Space:
        """The layouts of both, these first."""
        columns = {name: np.concatenate([column, other.columns[name]]) for name, column in self.columns.items()}
        return Space(columns, self.hopeless)


def space(problem: Problem, *, hopeful: bool = True) -> Space:
    """All layouts within the limits of the problem; maybe none. `hopeful`: without those whose state alone is too
    large."""
    grids, choices = _grids(problem), {shared: _choices(problem.limits, shared=shared) for shared in (False, True)}
    static = _state_bytes(problem, grids)
    budget = problem.cluster.chip.hbm_bytes if hopeful else math.inf
    inner: dict[tuple[int, ...], dict[str, Column]] = {}
    parts: list[dict[str, Column]] = []
    hopeless = 0
    for row in range(len(grids["tp"])):
        tp, cp, pp, dp = (int(grids[name][row]) for name in ("tp", "cp", "pp", "dp"))
        cap = max(1, MOST_TOKENS * cp // problem.seq_len)
        key = (pp, problem.sequences // dp, cap, dp * cp > 1)
        if key not in inner:
            inner[key] = _expand(problem, pp, key[1], cap, choices[key[3]], shared=key[3])
        found = inner[key]
        keep = static[found["zero"], row] <= budget
        number = int(keep.sum())
        hopeless += len(keep) - number
        if number:
            same = {name: np.full(number, value) for name, value in (("tp", tp), ("cp", cp), ("pp", pp), ("dp", dp))}
            parts.append(same | {name: column[keep] for name, column in found.items()})
    empty = np.zeros(0, dtype=np.int64)
    columns = {name: np.concatenate([empty, *(part[name] for part in parts)]) for name in LAYOUT}
    return Space(columns, hopeless)


def tensor_degrees(config: ModelConfig) -> list[int]:
    """tp that cuts query heads, feed-forward width and padded vocabulary, and cuts or repeats the key-value heads."""
    common = math.gcd(config.num_heads, config.ffn_dim, config.padded_vocab)
    kv = config.num_kv_heads
    return [tp for tp in divisors(common) if kv % tp == 0 or tp % kv == 0]


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def stage_numbers(num_layers: int, pp: int) -> list[int]:
    """Virtual stages per rank worth a look: for every size of the largest stage the fewest that reach it, with the
    ends of the model counted as layers and without."""
    sizes = range(1, -(-num_layers // pp) + 1)
    found = {-(-num_layers // (pp * size)) for size in sizes}
    found |= {(num_layers + 2) // (pp * size) for size in sizes if (num_layers + 2) % (pp * size) == 0}
    return sorted(v for v in found | {1} if pp * v <= num_layers + 2)


def _grids(problem: Problem) -> dict[str, Column]:
    """(tp, cp, pp, dp) of all GPUs, as columns."""
    gpus, limits, config = problem.gpus, problem.limits, problem.config
    tps = [tp for tp in tensor_degrees(config) if gpus % tp == 0]
    cps = [cp for cp in divisors(gpus) if cp == 1 or _cuts_sequence(problem.seq_len, cp, limits)]
    dps = divisors(math.gcd(gpus, problem.sequences))
    tp, cp, dp = (a.ravel() for a in np.meshgrid(tps, cps, dps, indexing="ij"))
    pp = gpus // (tp * cp * dp)
    domain = math.gcd(problem.cluster.domain, gpus) if gpus > problem.cluster.domain else gpus
    keep = (tp * cp * dp * pp == gpus) & (pp <= config.num_layers + 2)
    if gpus > problem.cluster.gpus_per_node and gpus % problem.cluster.gpus_per_node:
        keep[:] = False  # a job larger than a node fills its nodes
    for group in (tp, tp * cp):
        keep &= (domain % group == 0) | (group % domain == 0)
    grids = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
    for name, column in grids.items():
        if name in limits:
            keep &= np.isin(column, limits[name])
    return {name: column[keep] for name, column in grids.items()}


def has_grid(problem: Problem) -> bool:
    """Whether any (tp, cp, pp, dp) is legal: without it, nothing is."""
    return len(_grids(problem)["tp"]) > 0


def _cuts_sequence(seq_len: int, cp: int, limits: Limits) -> bool:
    return seq_len % (2 * cp) == 0 and (seq_len // (2 * cp) >= SMALLEST_CHUNK or cp in limits.get("cp", ()))


def _state_bytes(problem: Problem, grids: dict[str, Column]) -> Column:
    """[ZeRO mode 0 to 3, grid]: bytes that a rank holds of weights, and of fp32 master weights and moments: the mean
    over pipeline ranks, which one of them exceeds."""
    from fourfold.planner.arithmetic import count_parameters

    own = count_parameters(problem.config).total / (grids["tp"] * grids["pp"])
    shards = grids["dp"] * grids["cp"]
    whole = 4.0 if problem.precision is Precision.FP32 else 2.0
    master = 12.0 * own / shards
    return np.stack([own * whole + 12.0 * own, own * whole + master, own * whole + master, master])


def _schedules(problem: Problem, pp: int, per_group: int, cap: int) -> dict[str, Column]:
    """(v, micro_batch, order, nc, rounds) for a pipeline of pp ranks and so many sequences per DP group."""
    limits, layers = problem.limits, problem.config.num_layers
    sizes = [b for b in divisors(per_group) if b in limits.get("micro_batch", (b,))]
    if "micro_batch" not in limits:
        sizes = [b for b in sizes if b <= cap]
    stages = [int(v) for v in limits.get("virtual_stages", stage_numbers(layers, pp))]
    asked = [int(nc) for nc in limits["nc"]] if "nc" in limits else [-(-3 * pp // 2), 2 * pp, per_group]
    options = [(Order.AFAB, 0), (Order.INTERLEAVED, pp), *((Order.FLEXIBLE, nc) for nc in sorted({*asked} - {pp}))]
    if "zb-h1" in limits.get("schedule", ()):
        options.append((Order.ZB_H1, pp))
    micro_batch, v, option = (
        a.ravel()
        for a in np.meshgrid(np.array(sizes, int), np.array(stages, int), np.arange(len(options)), indexing="ij")
    )
    number = per_group // micro_batch
    order, nc = (np.array(column)[option] for column in zip(*options, strict=True))
    order = np.where((order == Order.INTERLEAVED) & (v == 1), Order.ONE_F_ONE_B, order)
    nc = np.where(order == Order.AFAB, number, np.minimum(nc, number) if "nc" not in limits else nc)
    rounds = np.where(order == Order.AFAB, 1, np.minimum(-(-number // np.maximum(nc, 1)), np.maximum(number // pp, 1)))

    afab, flexible, split = (order == kind for kind in (Order.AFAB, Order.FLEXIBLE, Order.ZB_H1))
    keep = np.where(afab, pp > 1 or limits.get("schedule") == ("afab",), (number >= pp) | split)
    keep &= ~split | ((v == 1) & (pp > 1 or limits.get("schedule") == ("zb-h1",)))
    keep &= ~flexible | ((v > 1) & (nc >= pp) & (nc <= number) & (rounds < np.maximum(number // pp, 1)))
    # The same rounds as the option before (they are sorted by nc): the same schedule.
    before = np.roll(rounds, 1)
    keep &= ~flexible | (option <= 2) | (rounds != before)
    plain = _asked_as_flexible(limits, order, v, nc)
    if "nc" in limits:
        keep &= afab | np.isin(nc, limits["nc"]) | (plain & (order == Order.ONE_F_ONE_B))
    if "schedule" in limits:
        keep &= plain | np.isin(order, [ORDERS[str(name)] for name in limits["schedule"]])
    columns = {"v": v, "micro_batch": micro_batch, "order": order, "nc": nc, "rounds": rounds}
    return {name: column[keep] for name, column in columns.items()}


def _asked_as_flexible(limits: Limits, order: Column, v: Column, nc: Column) -> Column:
    """Schedules that somebody asks for as flexible ones, but that have plainer names: those of one stage per rank, if
    that is asked for, are 1F1B, and those with nc = pp are interleaved."""
    if "flexible" not in limits.get("schedule", ()):
        return np.zeros(order.shape, dtype=bool)
    one_stage = (order == Order.ONE_F_ONE_B) & np.isin(v, limits.get("virtual_stages", ()))
    return one_stage | ((order == Order.INTERLEAVED) & np.isin(nc, limits.get("nc", ())))


def _choices(limits: Limits, *, shared: bool) -> dict[str, Column]:
    """(zero, recompute, split), every combination; with nobody to share anything, all ZeRO modes are the first."""
    zeros = [int(z) for z in limits.get("zero", (1, 2, 3))]
    kinds = [RECOMPUTES[str(name)] for name in limits.get("recompute", ("none", "selective", "full"))]
    splits = [SPLITS[str(name)] for name in limits.get("split", tuple(SPLITS))]
    every = np.meshgrid(zeros if shared else [min(zeros)], kinds, splits, indexing="ij")
    return dict(zip(("zero", "recompute", "split"), (column.ravel() for column in every), strict=True))


def _is_split(layers: int, stages: Column, split: Column) -> Column:
    """Whether every stage gets a layer, but the ends."""
    return stages <= np.where(split == Split.ENDS_LIGHT, layers + 2, layers)


def _expand(
    problem: Problem, pp: int, per_group: int, cap: int, choices: dict[str, Column], *, shared: bool
) -> dict[str, Column]:
    """Every schedule with every choice, without what is not legal and what is there twice."""
    limits, layers = problem.limits, problem.config.num_layers
    schedules = _schedules(problem, pp, per_group, cap)
    number, several = len(schedules["v"]), len(choices["zero"])
    rows = {name: np.repeat(column, several) for name, column in schedules.items()}
    rows |= {name: np.tile(column, number) for name, column in choices.items()}
    stages = pp * rows["v"]
    fixed = "split" in limits and "virtual_stages" in limits  # as somebody has it: stages may be empty
    keep = _is_split(layers, stages, rows["split"]) | fixed
    if "split" not in limits:
        alike = (layers + 2) % stages == 0
        keep &= np.where(rows["split"] == Split.EVEN, ~alike | (pp == 1), pp > 1)
    if pp == 1 and "virtual_stages" not in limits:
        # Without a pipeline, all that stages do is to have the gradients of one at a time reduced.
        by_stage = (rows["zero"] == 2) | ((rows["zero"] == 1) & (rows["rounds"] == 1))
        keep &= (rows["v"] == 1) | (by_stage & shared)
    if {1, 2} <= set(choices["zero"].tolist()):
        # With one round, gradients are reduced once either way. It goes by the name that the paper's rule gives it.
        keep &= (rows["rounds"] > 1) | (rows["zero"] != (2 if per_group >= 2 * pp else 1))
        keep &= (rows["rounds"] == 1) | (rows["zero"] != 2) | (rows["v"] > 1)
    return {name: rows[name][keep] for name in ("v", "nc", "micro_batch", "order", "split", "zero", "recompute")}
