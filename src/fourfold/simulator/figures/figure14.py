"""Figure 14: how unevenly documents load the ranks, most of all those of different data-parallel groups."""

from __future__ import annotations

from functools import cache

import numpy as np

from fourfold.planner.jobs import Order, Recompute, Split
from fourfold.planner.machines.cluster import cluster
from fourfold.planner.search.problem import Problem
from fourfold.planner.timing.compute import layer_work, rates
from fourfold.planner.timing.stack import load_stack
from fourfold.simulator.figures.figure import Difference, Figure, Panel, Point, Series, Values, union
from fourfold.simulator.loads import loads_of, parse_mix

TP, CP, PP, DP = 8, 16, 16, 4
SEQ_LEN, MICRO_BATCHES = 131_072, 32
GRID = tuple(
    f"median={median},dist=lognormal,sigma={sigma}" for sigma in (1.5, 2, 2.5) for median in (128, 256, 512, 1024)
)
"""Mixes of which `MIX` comes nearest to the figure, by `distance`."""
MIX = "median=512,dist=lognormal,sigma=2"
STEPS = 200
USUAL = (0.05, 0.95)  # of the steps: between which values of single steps are called usual
POINTS = ("min", "mean", "max")
PUBLISHED = {
    "compute": ((0.914, 0.953, 0.998), (0.877, 0.907, 0.944), (0.889, 0.945, 1.000), (0.824, 0.873, 0.921)),
    "attention": ((0.778, 0.865, 1.000), (0.622, 0.678, 0.741), (0.671, 0.810, 0.955), (0.320, 0.444, 0.551)),
}
"""By group: least, mean and most of its plotted ranks (facts.md 2.12)."""
DEAREST_FIRST = np.argsort([-mean for _, mean, _ in PUBLISHED["attention"]])
GROUPS = ("1st", "2nd", "3rd", "4th")

ASSUMPTIONS = (
    f"Printed: 8,192 GPUs, tp {TP}, cp {CP}, pp {PP}, so dp {DP}; rows of 131,072 tokens; pipeline ranks 0 and 15 are "
    "not shown, and those in between have 8 layers each. 16M tokens are 128 rows, 32 micro-batches per group.",
    f"Not printed: the documents. Ours have log-normal lengths, {MIX}, so a mean of 3.8K, and are packed end to end: a "
    "document longer than a row goes on in the next rows of the same group. With this sigma 2.3 % of the documents "
    "hold half of the tokens. Median and sigma are both chosen with the figure in view: of medians from 128 to 1,024 "
    "and sigma 1.5, 2 and 2.5 they come nearest, by the mean difference in both panels. So the height of the bars is "
    "no finding; that groups differ more than the ranks of one is.",
    "Not printed: what is summed. The computation of one whole step, forward and backward, without communication: the "
    "planner's layer under stack `meta`, with its attention in proportion to each rank's pairs.",
    "Which group gets which documents is chance: groups stand in the order of their attention, on both sides, and "
    f"ours are means over {STEPS} steps.",
)


def figure() -> Figure:
    """The figure: groups in the order of their attention."""
    ours = simulated()
    panels = tuple(
        Panel(
            title=title,
            unit="of the largest",
            x="data-parallel group, dearest first",
            series=tuple(
                Series(point, _by_group(published(key)[:, number]), _by_group(ours[key][:, number]))
                for number, point in enumerate(POINTS)
            ),
            reading_error=0.002,
        )
        for title, key in (("Computation", "compute"), ("Attention", "attention"))
    )
    return Figure(
        number="14",
        title="Spread of computation over ranks with a document mask",
        panels=panels,
        assumptions=ASSUMPTIONS,
        differences=_differences(panels, ours["attention"], ours["compute"]),
    )


def published(key: str) -> np.ndarray:
    """float [groups, (min, mean, max)] of "compute" or "attention", the dearest group first."""
    return np.array(PUBLISHED[key])[DEAREST_FIRST]


def simulated(mix: str = MIX) -> dict[str, np.ndarray]:
    """ "compute" and "attention" as float [groups, (min, mean, max)], relative to the largest: means over steps."""
    return {key: steps.mean(axis=0) for key, steps in simulated_steps(mix).items()}


def distance(mix: str) -> float:
    """Between our values and the published ones: mean difference, of both panels together."""
    return sum(float(np.abs(ours - published(key)).mean()) for key, ours in simulated(mix).items())


@cache
def simulated_steps(mix: str = MIX) -> dict[str, np.ndarray]:
    """The same of every step, [steps, groups, 3], in each of which groups are in the order of their attention."""
    full, other = seconds_per_micro_batch()
    attention, compute = [], []
    for seed in range(STEPS):
        share = pairs_per_rank(seed, mix) / (SEQ_LEN * (SEQ_LEN + 1) / 2 / CP * MICRO_BATCHES)
        share = share[np.argsort(-share.mean(axis=1))]
        attention.append(_spread(full * share))
        compute.append(_spread(full * share + other))
    return {"compute": np.array(compute), "attention": np.array(attention)}


def pairs_per_rank(seed: int, mix: str = MIX) -> np.ndarray:
    """int64 [dp, cp] of one step."""
    return loads_of(parse_mix(mix), seq_len=SEQ_LEN, dp=DP, micro_batches=MICRO_BATCHES, cp=CP, seed=seed).per_rank


@cache
def seconds_per_micro_batch() -> tuple[float, float]:
    """(attention to one document that fills the row, all else) that a rank computes of one layer and micro-batch."""
    stack = load_stack("meta")
    problem = Problem.of(
        model="llama3-405b",
        cluster=cluster("h100", TP * CP * PP * DP),
        seq_len=SEQ_LEN,
        sequences=DP * MICRO_BATCHES,
        stack=stack,
    )
    job = problem.jobs(
        tp=TP, cp=CP, pp=PP, dp=DP, v=8, nc=PP, micro_batch=1,
        order=Order.FLEXIBLE, split=Split.ENDS_LIGHT, zero=1, recompute=Recompute.NONE,
    )  # fmt: skip
    work = layer_work(job, stack.constants, rates(job, stack.constants))
    return float(sum(work.attention)), float(sum(work.matmul) + sum(work.memory_bound))


def between_share(values: np.ndarray) -> float:
    """From the largest mean of a group to the smallest, over what lies between the largest and the smallest rank."""
    return float(np.ptp(values[:, 1]) / (values[:, 2].max() - values[:, 0].min()))


def _spread(of_ranks: np.ndarray) -> np.ndarray:
    """float [groups, (min, mean, max)] of [groups, ranks], relative to the largest rank."""
    return np.stack([of_ranks.min(axis=1), of_ranks.mean(axis=1), of_ranks.max(axis=1)], axis=1) / of_ranks.max()


def _by_group(values: np.ndarray) -> Values:
    return dict(zip(GROUPS, values.tolist(), strict=True))


def _differences(panels: tuple[Panel, ...], attention: np.ndarray, compute: np.ndarray) -> tuple[Difference, ...]:
    ratio = attention[:, 2].max() / attention[:, 0].min()
    of_attention, of_all = 100 * between_share(attention), 100 * between_share(compute)
    beyond = union(panel.beyond() for panel in panels)
    most = max(abs(ours - bar) for panel in panels for _, bar, ours in panel.compared())
    return (
        Difference(
            f"All values, by up to {most:.2f}: the figure is one step of four groups, ours is a mean of {STEPS} steps. "
            "Every published value lies within the range of nine in ten of our single steps.",
            beyond & union(map(_usual, panels, ("compute", "attention"))),
        ),
        Difference(
            f"From the mean attention of the dearest group to that of the cheapest it is {of_attention:.0f} % of the "
            f"way from the largest rank to the smallest, published 62 %; of all computation {of_all:.0f} %, published "
            "45 %. What is left is between ranks of one group.",
        ),
        Difference(
            f"The largest rank has {ratio:.1f} times the attention of the smallest, published 3.1. The 1.44 that the "
            "paper names for all computation is not in its figure, which shows 1.21 (facts.md row 10).",
        ),
        Difference(
            f"Exponential lengths of mean 1K would leave {_between_groups('mean=1024,dist=exponential'):.0f} % between "
            f"the dearest group and the mean, these {_between_groups(MIX):.0f} %, published 24 %: only documents about "
            "as long as a row, or longer, make groups differ so much over 32 rows.",
        ),
    )


def usual(key: str) -> tuple[np.ndarray, np.ndarray]:
    """float [groups, 3], twice: between which values nine in ten steps are."""
    low, high = np.quantile(simulated_steps()[key], USUAL, axis=0)
    return low, high


def _usual(panel: Panel, key: str) -> frozenset[Point]:
    """Points of which the published value is one that our steps have, too."""
    low, high = usual(key)
    inside = (low <= published(key)) & (published(key) <= high)
    return frozenset(
        Point(panel.title, POINTS[number], GROUPS[group]) for group, number in np.argwhere(inside).tolist()
    )


def _between_groups(mix: str) -> float:
    """In percent, attention of the dearest group above the mean of the groups; mean over steps."""
    groups = np.array([pairs_per_rank(seed, mix).sum(axis=1) for seed in range(STEPS)])
    return 100 * float((groups.max(axis=1) / groups.mean(axis=1)).mean() - 1)
