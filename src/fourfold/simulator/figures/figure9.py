"""Figure 9: speed and memory of all-forward-all-backward, 1F1B and the flexible schedule between them."""

from __future__ import annotations

from fourfold.planner.search.exact import play_exactly
from fourfold.planner.timing.step import parts
from fourfold.simulator.figures.figure import Difference, Figure, Panel, Series, Values
from fourfold.simulator.figures.small_scale import HOP, SHARE, small_job, small_stack, tflops

MICRO_BATCHES = 12
FORWARDS_FIRST = "all forwards first"
SCHEDULES = {"AFAB": 12, "1F1B": 4, "flexible": 6, FORWARDS_FIRST: None}
"""Consecutive micro-batches per virtual stage; None: all forwards of a rank come before its backwards."""
PUBLISHED_TFLOPS = {"AFAB": 401.9, "1F1B": 398.5, "flexible": 401.7}
PUBLISHED_GB = {"AFAB": 49.1, "1F1B": 42.5, "flexible": 46.4}

ASSUMPTIONS = (
    "Printed: 26 of 405B's layers, pp 4, v 7, 12 micro-batches; the first stage is the embedding alone, the last the "
    "head alone (28 - 2 layers).",
    "Not printed: dp and ZeRO. dp 2, so 64 GPUs, and ZeRO-1 are chosen because they fit: with dp 1 every bar would be "
    "17 GB higher, with dp 4 8 GB lower. So how high the bars are is no finding, how far they are apart is in part.",
    SHARE,
    "AFAB is one round of 12, as the paper counts it beside 3 and 2 rounds, in the flexible schedule's own order: "
    "backwards begin after (v - 1) nc + 2 (pp - rank - 1) forwards, so that 79 to 73 (micro-batch, chunk) pairs are in "
    "flight. The last bar is the order in which all 84 forwards of a rank come first.",
    HOP,
)


def figure() -> Figure:
    """The figure, each schedule played."""
    speed, memory, hop = {}, {}, 0.0
    for name, nc in SCHEDULES.items():
        job = small_job(layers=26, pp=4, v=7, dp=2, micro_batches=MICRO_BATCHES, nc=nc)
        exact = play_exactly(job, small_stack())
        speed[name], memory[name] = tflops(job, exact), exact.memory_bytes / 1e9
        pieces = parts(job, small_stack())
        hop = float(pieces.message / pieces.layer_forward)
    panels = (
        ("Speed, relative", "% of flexible", _relative(PUBLISHED_TFLOPS), _relative(speed), 0.05),
        ("Speed", "TFLOP/s per GPU", PUBLISHED_TFLOPS, speed, 0.1),
        ("Memory of the fullest rank", "GB", PUBLISHED_GB, memory, 0.1),
        ("Memory above that of 1F1B", "GB", _above(PUBLISHED_GB), _above(memory), 0.15),
    )
    made = tuple(
        Panel(title, unit, "schedule", (Series(title, _shown(published, ours), ours),), reading_error=error)
        for title, unit, published, ours, error in panels
    )
    return Figure(
        number="9",
        title="Pipeline schedules: speed and memory",
        panels=made,
        assumptions=(*ASSUMPTIONS, _which_afab(speed, memory)),
        differences=_differences(made, speed, memory, hop),
    )


def _shown(published: dict[str, float], ours: dict[str, float]) -> Values:
    """Published values in the order of ours; None where the figure has no bar."""
    return {name: published.get(name) for name in ours}


def _relative(values: dict[str, float]) -> dict[str, float]:
    return {name: 100 * value / values["flexible"] for name, value in values.items()}


def _above(values: dict[str, float]) -> dict[str, float]:
    return {name: value - values["1F1B"] for name, value in values.items() if name != "1F1B"}


def _which_afab(speed: dict[str, float], memory: dict[str, float]) -> str:
    more, pure = memory[FORWARDS_FIRST] - memory["AFAB"], memory[FORWARDS_FIRST] - PUBLISHED_GB["AFAB"]
    return (
        f"Which AFAB: with all forwards first a rank holds 84 pairs instead of 77, {more:.1f} GB more, {pure:.1f} GB "
        f"above the bar. That step is also {100 - _relative(speed)[FORWARDS_FIRST]:.1f} % slower than the flexible, "
        "because nothing fills the time in which the last stage, half a layer long, turns round; were head and loss as "
        "long as a layer, it would be as fast. The bars show neither, so one round of the flexible order is chosen."
    )


def _differences(
    panels: tuple[Panel, ...], speed: dict[str, float], memory: dict[str, float], hop: float
) -> tuple[Difference, ...]:
    """`hop`: of a chunk's forward."""
    relative, absolute, bars, above = panels
    high = [memory[name] - gb for name, gb in PUBLISHED_GB.items()]
    faster = 100 * speed["flexible"] / PUBLISHED_TFLOPS["flexible"] - 100
    grows = _above(memory)["AFAB"] - _above(memory)["flexible"]
    return (
        Difference(
            f"1F1B is {100 - _relative(speed)['1F1B']:.1f} % behind, published 0.8 %: a hop takes {100 * hop:.1f} % "
            "of a chunk's forward here, its latency with it; 4.2 % would give 0.8 %.",
            relative.beyond(),
        ),
        Difference(
            f"TFLOP/s are {faster:.0f} % above the published ones: stack `meta` is fitted to production runs, whose "
            "layers were faster (400 TFLOP/s at a bubble of 12 %, where these have 402 at 4 %). Between schedules that "
            "cancels out.",
            absolute.beyond(),
        ),
        Difference(
            f"Memory is {min(high):.1f} to {max(high):.1f} GB high, nearly alike for all: 1.0 GB is what we count for "
            f"a moment of backward and for buffers, which the paper does not print. The other {min(high) - 1:.1f} to "
            f"{max(high) - 1:.1f} GB are about 1 % of the bars.",
            bars.beyond(),
            explained=False,
        ),
        Difference(
            "From flexible to AFAB rank 1 has 36 pairs of 0.33 GB more, and 6 of its 7 sums of gradients, 1.59 GB "
            f"each, less (Figure 4): {grows:.1f} GB in all, published 2.7. What is missing is as much as one pair.",
            above.beyond(),
            explained=False,
        ),
    )
