"""A simulated step as a page: how long, where the time goes, who waits for whom, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fourfold.planner.memory.peak import RESERVED
from fourfold.report import drawing
from fourfold.report.documents import documents_table
from fourfold.report.live import activations_of, memory_of
from fourfold.report.simulation.findings import findings
from fourfold.report.simulation.measures import exposed_shares, means, own_computing
from fourfold.report.simulation.tables import pipeline_table, what_if_table
from fourfold.report.simulation.timeline import simulation_timeline, worst_replica
from fourfold.report.simulation.words import CLASS_WORDS, PATH_WORDS, bubble_words, layout_of
from fourfold.report.text import format_bytes, format_count
from fourfold.simulator.answer import Answer
from fourfold.simulator.causes import causes, duration
from fourfold.simulator.critical import CriticalPath, Replica
from fourfold.simulator.live import StepMemory
from fourfold.simulator.played import COMPUTING, Played
from fourfold.simulator.scenario import Scenario

PEAK = "peak memory"
_ALIKE = 0.01  # of a heat map's range: what differs by less looks the same
_WAITS = ("tp_wait", "cp_wait", "pp_wait", "dp_wait", "end_wait")


def simulation_page(answer: Answer, *, replica: Replica | None = None, notes: Sequence[str] = ()) -> drawing.Page:
    """All of a step.

    Args:
        answer: what is known of it.
        replica: whose timeline is shown, as (dp, cp, tp) of what was simulated; default: the one that ends last.
        notes: what was assumed.
    """
    scenario, played, gains, path = answer.scenario, answer.played, answer.gains, answer.path
    memory, name = answer.memory, answer.name
    found = causes(scenario, played, replica=replica or worst_replica(played), path=path)
    timeline = simulation_timeline(scenario, played, found)
    said = findings(scenario, played, gains=gains, path=path, memory=memory, found=found)
    return drawing.Page(
        title=f"{name}: {layout_of(scenario)}" if name else layout_of(scenario),
        summary=(
            *summary(played, memory=memory),
            *_rate(scenario, played, answer.tokens),
            ("ranks", f"{scenario.grid.size:,}"),
        ),
        warnings=() if memory is None or memory.fits else (PEAK,),
        findings=said.first,
        more=said.more,
        timeline=timeline,
        memory=None if memory is None else memory_of(memory, rows=timeline.rows),
        chunks=None if memory is None else activations_of(memory, rows=timeline.rows),
        splits=(step_split(played), path_split(path)),
        heat_maps=rank_heat_maps(scenario, played) if scenario.grid.size > 1 else (),
        tables=(
            what_if_table(gains),
            pipeline_table(played, path, memory=memory),
            *([documents_table(answer.splits)] if answer.splits else []),
        ),
        notes=tuple(notes),
        planted=tuple(f"Slow on purpose: {text}." for text in scenario.faults.descriptions()),
    )


def summary(played: Played, *, memory: StepMemory | None) -> tuple[tuple[str, str], ...]:
    """What a step comes to: (name, value) of the time, the bubble, exposed communication, memory."""
    transfers, waits = exposed_shares(played)
    parts = [
        ("step", duration(played.step_seconds)),
        ("bubble", bubble_words(played)),
        ("exposed communication", f"{', '.join(transfers)} of the step" if transfers else "none"),
    ]
    if waits:
        parts.append(("waiting for slower peers", f"{', '.join(waits)} of the step"))
    if memory is not None:
        worst = memory.peaks[memory.worst_rank]
        of = ""
        if memory.capacity is not None:
            usable = format_bytes(memory.capacity - RESERVED)
            of = f"; with fragmentation {format_bytes(worst.reserved)} of {usable} usable"
        parts.append((PEAK, f"{format_bytes(worst.total)} on pipeline rank {worst.pp_rank}{of}"))
    return tuple(parts)


def _rate(scenario: Scenario, played: Played, tokens: int | None) -> Iterator[tuple[str, str]]:
    if tokens:
        rate = tokens / played.step_seconds
        yield "tokens/s", f"{format_count(rate)}; {rate / scenario.grid.size:,.0f} per GPU"


def step_split(played: Played) -> drawing.Split:
    """What the mean rank's step goes to. The parts sum to it."""
    seconds = means(played)
    keys = tuple(name for name in CLASS_WORDS if seconds[name] > 0)
    parts = tuple((CLASS_WORDS[name], seconds[name]) for name in keys)
    return drawing.Split("The step, mean of all ranks", "s", parts, keys)


def path_split(path: CriticalPath) -> drawing.Split:
    """What the critical path consists of."""
    keys = tuple(name for name, seconds in path.by_class.items() if seconds > 0)
    parts = tuple((PATH_WORDS[name], path.by_class[name]) for name in keys)
    return drawing.Split("The critical path", "s", parts, keys)


def rank_heat_maps(scenario: Scenario, played: Played) -> tuple[drawing.HeatMap, ...]:
    """Computing, waiting, and attention if it is distributed otherwise than computing, of all ranks. Of replicas that
    are alike, one was simulated for all."""
    grid, faults = scenario.grid, scenario.faults
    slow = {*faults.ranks, *faults.cpus, *(rank for pair in faults.links for rank in pair)}
    places = (grid.coordinates(rank) for rank in sorted(slow))
    marked = tuple((at.dp, at.pp, at.cp, at.tp) for at in places)

    def of(title: str, *names: str) -> drawing.HeatMap:
        seconds = np.sum([played.spent[name] for name in names], axis=0)
        return drawing.HeatMap(title, "s", np.broadcast_to(seconds, (grid.dp, grid.pp, grid.cp, grid.tp)), marked)

    maps = [of("Computing time of every rank", *COMPUTING), of("Waiting time of every rank", *_WAITS)]
    if _says_more(played.spent["attention"], own_computing(played)):
        maps.append(of("Attention of every rank", "attention"))
    return tuple(maps)


def _says_more(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether the first looks otherwise than the second, if each is drawn from its smallest to its largest value."""
    one, other = one - one.min(), other - other.min()
    if one.max() <= _ALIKE * other.max():
        return False
    return bool(np.abs(one / one.max() - other / max(other.max(), 1e-300)).max() > _ALIKE)
