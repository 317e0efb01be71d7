"""Figure 3: what more consecutive micro-batches than pipeline ranks, or fewer, do to messages and memory."""

from __future__ import annotations

from functools import cache

from fourfold.layout import Schedule, compile_program, generate
from fourfold.simulator.figures.figure import Figure, Panel, Series, Values

PP, V, MICRO_BATCHES = 4, 7, 12
SCHEDULES = {"1F1B, nc 4": 4, "flexible, nc 6": 6, "one round, nc 12": 12, "nc 3: AFAB": 3}
"""Consecutive micro-batches per virtual stage."""
HOPS = (0.0, 0.05, 0.1, 0.2)
"""Of a chunk's forward: what a message to the next rank takes."""
MEASURED_HOP = 0.042  # at which 1F1B is as far behind as in Figure 9 (facts.md 2.2)

ASSUMPTIONS = (
    "What is drawn in Figure 3 is not in our sources, so no value is beside ours. Played is what the text around it "
    "says of the flexible schedule: with nc above pp, nc - pp more micro-batches per virtual stage enter the warm-up "
    "and hide messages, at the cost of (nc - pp)(v - 1) more pairs in flight; with nc below pp all forwards come "
    "before all backwards.",
    "The shape of Figure 9: pp 4, v 7, 12 micro-batches; equal stages, a backward twice as long as a forward.",
)


def figure() -> Figure:
    """The figure, from schedules played with messages of several lengths."""
    bubbles = {name: _by_hop(nc) for name, nc in SCHEDULES.items()}
    more: dict[str, float] = {name: in_flight(nc) - in_flight(PP) for name, nc in SCHEDULES.items()}
    nothing = dict.fromkeys(SCHEDULES)
    return Figure(
        number="3",
        title="Flexible numbers of consecutive micro-batches",
        panels=(
            Panel(
                "Bubble and exposed messages", "% of computing time", "hop, of a chunk's forward",
                tuple(Series(name, dict.fromkeys(ours), ours) for name, ours in bubbles.items()),
                reading_error=0.0, kind="lines",
            ),
            Panel(
                "Exposed messages with a hop of 4.2 % of a forward", "% of the step", "schedule",
                (Series("exposed", nothing, {name: exposed(nc) for name, nc in SCHEDULES.items()}),),
                reading_error=0.0,
            ),
            Panel(
                "More pairs in flight than with nc = pp", "(micro-batch, chunk) pairs", "schedule",
                (Series("rank 0", nothing, more),), reading_error=0.0,
            ),
        ),
        assumptions=ASSUMPTIONS,
        differences=(),
    )  # fmt: skip


@cache
def schedule(nc: int) -> Schedule:
    """That of so many consecutive micro-batches."""
    return generate(pp=PP, v=V, num_micro_batches=MICRO_BATCHES, nc=nc, messages=False)


def bubble(nc: int, hop: float) -> float:
    """Idle over computing time, all ranks, if a message takes `hop` of a forward."""
    return compile_program(schedule(nc)).play(message=hop).bubble_over_compute


def exposed(nc: int) -> float:
    """Percent of the step that messages add to it, at the hop that Figure 9 shows."""
    without, with_messages = (compile_program(schedule(nc)).play(message=hop).step_time for hop in (0.0, MEASURED_HOP))
    return 100 * (1 - without / with_messages)


def in_flight(nc: int) -> int:
    """Most (micro-batch, chunk) pairs that rank 0 holds."""
    return schedule(nc).in_flight_peak[0]


def _by_hop(nc: int) -> Values:
    return {_label(hop): 100 * bubble(nc, hop) for hop in HOPS}


def _label(hop: float) -> str:
    return f"{hop:.0%}"
