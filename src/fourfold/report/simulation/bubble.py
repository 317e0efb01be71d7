"""The bubble in sentences: how much of the step, in which phase, why, and on which ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from fourfold.layout import compile_program
from fourfold.planner.search.words import listed
from fourfold.report.simulation.words import alike, bubble_words
from fourfold.report.text import percent
from fourfold.simulator.causes import PHASES, Causes, duration, gaps, idle_by_phase, phases
from fourfold.simulator.graph import NONE
from fourfold.simulator.played import Played
from fourfold.simulator.scenario import Scenario

_ROUNDING = 1e-9  # of the step: shorter waits are none
_LEAST = 0.0005  # of forwards and backwards: what rounds to 0.0%
_EVEN = 1.01  # times the least: pipeline ranks wait as long


def bubble(scenario: Scenario, played: Played, found: Causes | None) -> str:
    """How much, when and why: as the mean of all replicas, and in the replica that is shown."""
    if played.bubble_seconds < _ROUNDING * played.step_seconds:
        return "There is no bubble: no rank waits for another pipeline rank."
    if scenario.grid.pp == 1:
        return (
            "There is one pipeline rank, and no bubble but at the end: the mean rank waits "
            f"{duration(played.bubble_seconds)}, {percent(played.bubble_over_step)} of the step, for the last to end."
        )
    by_phase = idle_by_phase(played).sum(axis=1)
    text = f"Bubble, mean of all ranks: {bubble_words(played)}, of that {_in_phases(by_phase)}."
    text += f" {_schedule(scenario, played)}"
    if found is not None and not alike(played):
        text += f" {_of_shown(played, found)}"
    return text


def _in_phases(seconds: np.ndarray) -> str:
    """49% in warm-up, 51% in cool-down."""
    shares = zip(seconds / seconds.sum(), PHASES, strict=True)
    return listed([f"{share:.0%} in {phase}" for share, phase in shares if share >= 0.005])


def _schedule(scenario: Scenario, played: Played) -> str:
    """What the bubble would be if nothing but the schedule made one, and what else there is."""
    alone = compile_program(scenario.schedule).play().bubble_over_compute
    text = f"The schedule alone makes {percent(alone)} of forwards and backwards (even stages, B = 2 F, free messages)"
    if played.bubble_over_compute <= alone + _LEAST:
        return f"{text}."
    return f"{text}; uneven stages, messages, FSDP's collectives and slow ranks add the rest."


def _of_shown(played: Played, found: Causes) -> str:
    """Of the replica whose timeline is shown: its mean pipeline rank's bubble, its gaps, and who is behind them."""
    dp, cp, tp = at = found.replica
    by_phase = idle_by_phase(played, at).sum(axis=1)
    mean = float(by_phase.sum()) / played.graph.schedule.pp
    text = f"In the replica shown (dp {dp} cp {cp} tp {tp}) it is {percent(mean / played.step_seconds)} of the step"
    if mean < _ROUNDING * played.step_seconds:
        return f"{text}."
    phase = int(by_phase.argmax())
    long = _gaps(played, found, phase)
    text += f", {by_phase[phase] / by_phase.sum():.0%} of it in {PHASES[phase]}"
    if len(long) > 1:
        text += f": {len(long):,} gaps, {duration(float(np.median(long)))} in the median"
    behind, share = _most_behind(found)
    return f"{text}; behind {share:.0%} of all its waiting: {behind}." if behind else f"{text}."


def _gaps(played: Played, found: Causes, phase: int) -> list[float]:
    """Seconds of each wait for another pipeline rank in one phase of the replica that is shown."""
    waits = [
        float(seconds[found.replica])
        for pp_rank, own in enumerate(played.graph.on_rank)
        for seconds, when in zip(gaps(played, pp_rank), phases(played.graph, own), strict=True)
        if when == phase
    ]
    return [seconds for seconds in waits if seconds > _ROUNDING * played.step_seconds]


def _most_behind(found: Causes) -> tuple[str, float]:
    """What is behind most of the waiting, and its share; nothing if nothing is behind half of it."""
    seconds = defaultdict[str, float](float)
    for cause in (*found.before.values(), *found.at_end):
        seconds[cause.behind] += cause.wait
    whole = sum(seconds.values())
    behind = max(seconds, key=lambda name: seconds[name], default="")
    return (behind, seconds[behind] / whole) if behind and seconds[behind] >= 0.5 * whole else ("", 0.0)


def spread(played: Played) -> Iterator[str]:
    """Which pipeline ranks have most and least of the bubble."""
    by_rank = idle_by_phase(played).sum(axis=0)
    most, least = int(by_rank.argmax()), int(by_rank.argmin())
    if len(by_rank) == 1 or by_rank[most] <= _ROUNDING * played.step_seconds:
        return
    if by_rank[most] <= _EVEN * by_rank[least]:
        yield f"Bubble by pipeline rank, means of their replicas: all wait as long, {duration(float(by_rank[most]))}."
        return
    longest, shortest = (duration(float(by_rank[pp_rank])) for pp_rank in (most, least))
    yield (
        f"Bubble by pipeline rank, means of their replicas: pipeline rank {most} waits longest, {longest}, and "
        f"pipeline rank {least} least, {shortest}."
    )


def longest_wait(played: Played, found: Causes) -> Iterator[str]:
    """Of the replica that is shown."""
    nodes = played.graph.nodes
    i = max(found.before, key=lambda i: found.before[i].wait, default=NONE)
    inside = found.before[i].wait if i != NONE else 0.0
    pp_rank = max(range(len(found.at_end)), key=lambda rank: found.at_end[rank].wait)
    at_end = found.at_end[pp_rank]
    if max(inside, at_end.wait) <= _ROUNDING * played.step_seconds:
        return
    if inside >= at_end.wait:
        node, cause = nodes[i], found.before[i]
        where = f"on pipeline rank {node.pp_rank} before {node.action}"
    else:
        cause, where = at_end, f"at the end of pipeline rank {pp_rank}"
    whose = "" if alike(played) else " of the replica shown"
    yield f"The longest wait{whose} is {duration(cause.wait)} {where}: it {cause.sentence}."
