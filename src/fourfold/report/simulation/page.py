"""A simulated step as a page: how long, where the time goes, who waits for whom, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fourfold.report import drawing
from fourfold.report.live import memory_of
from fourfold.report.simulation.findings import findings
from fourfold.report.simulation.measures import exposed, means, own_computing
from fourfold.report.simulation.timeline import simulation_timeline, worst_replica
from fourfold.report.simulation.words import CLASS_WORDS, DIMENSION_NAMES, PATH_WORDS, layout_of, percent, sentence
from fourfold.report.text import format_bytes, format_count
from fourfold.simulator.causes import causes, duration, idle_by_phase
from fourfold.simulator.critical import CriticalPath, Replica
from fourfold.simulator.live import StepMemory
from fourfold.simulator.live import findings as memory_findings
from fourfold.simulator.played import COMPUTING, Played
from fourfold.simulator.scenario import Scenario
from fourfold.simulator.whatif import Gain

_WAITS = ("tp_wait", "cp_wait", "pp_wait", "dp_wait", "end_wait")


def simulation_page(
    scenario: Scenario,
    played: Played,
    *,
    gains: Sequence[Gain],
    path: CriticalPath,
    memory: StepMemory | None = None,
    name: str = "",
    tokens: int | None = None,
    replica: Replica | None = None,
    notes: Sequence[str] = (),
) -> drawing.Page:
    """All of a step.

    Args:
        scenario: what was simulated.
        played: what came of it, with the times of all nodes.
        gains: what would help.
        path: its critical path.
        memory: live bytes through the step, if they are to be shown.
        name: of the recipe.
        tokens: of the step.
        replica: whose timeline is shown, as (dp, cp, tp) of what was simulated; default: the one that ends last.
        notes: what was assumed.
    """
    found = causes(scenario, played, replica=replica or worst_replica(played))
    timeline = simulation_timeline(scenario, played, found=found)
    sentences = findings(scenario, played, gains=gains, path=path, found=found)
    if memory is not None:
        sentences = (*sentences, *map(sentence, memory_findings(memory)))
    return drawing.Page(
        title=f"{name}: {layout_of(scenario)}" if name else layout_of(scenario),
        summary=_summary(scenario, played, memory=memory, tokens=tokens),
        findings=sentences,
        timeline=timeline,
        memory=None if memory is None else memory_of(memory, rows=timeline.rows),
        splits=(step_split(played), path_split(path)),
        heat_maps=rank_heat_maps(scenario, played) if scenario.grid.size > 1 else (),
        tables=(what_if_table(gains), pipeline_table(scenario, played, path, memory=memory)),
        notes=(*notes, *(f"Slow on purpose: {text}." for text in scenario.faults.descriptions())),
    )


def _summary(
    scenario: Scenario, played: Played, *, memory: StepMemory | None, tokens: int | None
) -> tuple[tuple[str, str], ...]:
    shown = [
        f"{DIMENSION_NAMES[dimension]} {percent(seconds / played.step_seconds)}"
        for dimension, (seconds, _) in exposed(played).items()
        if seconds > 0 and dimension != "pp"
    ]
    parts = [
        ("step", duration(played.step_seconds)),
        (
            "bubble",
            f"{percent(played.bubble_over_compute)} of computing time, {percent(played.bubble_over_total)} of both",
        ),
        ("exposed communication", ", ".join(shown) or "none"),
    ]
    if memory is not None:
        worst = memory.peaks[memory.worst_rank]
        parts.append(("peak memory", f"{format_bytes(worst.total)} on pipeline rank {worst.pp_rank}"))
    if tokens:
        rate = tokens / played.step_seconds
        parts.append(("tokens/s", f"{format_count(rate)}; {rate / scenario.grid.size:,.0f} per GPU"))
    parts.append(("ranks", f"{scenario.grid.size:,}"))
    return tuple(parts)


def step_split(played: Played) -> drawing.Split:
    """What the mean rank's step goes to. The parts sum to it."""
    seconds = means(played)
    parts = tuple((words, seconds[name]) for name, words in CLASS_WORDS.items() if seconds[name] > 0)
    return drawing.Split("The mean rank's step", "s", parts)


def path_split(path: CriticalPath) -> drawing.Split:
    """What the critical path consists of."""
    parts = tuple((PATH_WORDS[name], seconds) for name, seconds in path.by_class.items() if seconds > 0)
    return drawing.Split("The critical path", "s", parts)


def rank_heat_maps(scenario: Scenario, played: Played) -> tuple[drawing.HeatMap, ...]:
    """Own computing, waiting, and attention, of all ranks. Of replicas that are alike, one was simulated for all."""
    grid, faults = scenario.grid, scenario.faults
    slow = {*faults.ranks, *faults.cpus, *(rank for pair in faults.links for rank in pair)}
    places = (grid.coordinates(rank) for rank in sorted(slow))
    marked = tuple((at.dp, at.pp, at.cp, at.tp) for at in places)

    def of(title: str, *names: str) -> drawing.HeatMap:
        seconds = np.sum([played.spent[name] for name in names], axis=0)
        return drawing.HeatMap(title, "s", np.broadcast_to(seconds, (grid.dp, grid.pp, grid.cp, grid.tp)), marked)

    maps = [of("Own computing time of every rank", *COMPUTING), of("Waiting time of every rank", *_WAITS)]
    attention = played.spent["attention"]
    if float(attention.max() - attention.min()) > 1e-9 * played.step_seconds:
        maps.append(of("Attention of every rank", "attention"))
    return tuple(maps)


def what_if_table(gains: Sequence[Gain]) -> drawing.Table:
    """What would help, most first."""
    return drawing.Table(
        title="What would help",
        columns=("if", "the step would take", "shorter by", "share of the step"),
        rows=tuple(
            (gain.condition, duration(gain.step_seconds), duration(gain.seconds), percent(gain.share)) for gain in gains
        ),
        note="Each line is the step played again with this one thing otherwise; gains do not add up.",
    )


def pipeline_table(
    scenario: Scenario, played: Played, path: CriticalPath, *, memory: StepMemory | None = None
) -> drawing.Table:
    """Every pipeline rank: the mean of its replicas."""
    idle = idle_by_phase(played)
    own = own_computing(played).mean(axis=(0, 2, 3))
    head = ["pp rank", "computes", "waits: filling", "full", "draining", "of the critical path"]
    rows = []
    for pp_rank in range(scenario.grid.pp):
        cells = [
            str(pp_rank),
            duration(float(own[pp_rank])),
            *(duration(float(seconds)) for seconds in idle[:, pp_rank]),
        ]
        cells.append(percent(path.by_pipeline_rank[pp_rank]))
        rows.append((*cells, *([format_bytes(memory.peaks[pp_rank].total)] if memory is not None else [])))
    return drawing.Table(
        title="Pipeline ranks",
        columns=(*head, *(["peak memory"] if memory is not None else [])),
        rows=tuple(rows),
        note="Means of each pipeline rank's replicas. Filling: before its first backward. Full: from there to its last "
        "forward. Draining: after both.",
    )
