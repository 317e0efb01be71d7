"""What would help: the same step with something free, or with something slow made normal.

Each answer is a step that is played anew: what is hidden behind something else then counts for nothing, and what takes
its place does count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fourfold.layout import Grid
from fourfold.layout.actions import COMPUTE
from fourfold.simulator.causes import duration
from fourfold.simulator.engine import simulate
from fourfold.simulator.faults import Faults
from fourfold.simulator.played import Played
from fourfold.simulator.scenario import Scenario
from fourfold.simulator.work import Work

_FREE = {
    "attention": "attention took no time",
    "tp": "TP's transfers took no time",
    "cp": "CP's transfers took no time",
    "pp": "messages between pipeline ranks took no time",
    "dp": "FSDP's transfers took no time and slowed nothing beside them",
    "optimizer": "the optimizer's step took no time",
    "fixed": "the fixed cost per step took no time",
}
"""By the name that `Work.without` knows it by."""

_ROUNDING = 1e-9  # of the step: gains below are none


@dataclass(frozen=True)
class Gain:
    """A step with one thing otherwise."""

    what: str
    """A class ("attention", "tp", "cp", "pp", "dp", "optimizer", "fixed"), "documents", "jitter", "rank 5",
    "link 12-13", "cpu 7", or "all slow" for all ranks, links and hosts."""
    condition: str
    """What is otherwise, as in "if it were so"."""
    step_seconds: float
    seconds: float
    """By which the step is shorter."""
    share: float
    """Of the step as it is."""

    @property
    def sentence(self) -> str:
        """What would be, in plain words."""
        if not self.seconds:
            return f"If {self.condition}, the step would take as long: {duration(self.step_seconds)}."
        change = f"{abs(self.share):.1%}" if abs(self.share) >= 0.001 else "less than 0.1%"
        way = "longer" if self.seconds < 0 else "shorter"
        return f"If {self.condition}, the step would take {duration(self.step_seconds)}: {change} {way}."


def what_if(scenario: Scenario, played: Played | None = None) -> tuple[Gain, ...]:
    """What each thing costs the step, by what the step would gain without it, most first.

    Things on which the mean rank spends nothing are left out, and so is computing itself, which is the point of it all.

    Args:
        scenario: what was simulated.
        played: what came of it, if that is known.
    """
    played = played or simulate(collapsed(scenario), keep=False)
    gains = []
    for what, condition, changed in _cases(scenario, played):
        after = simulate(collapsed(changed), keep=False).step_seconds
        seconds = played.step_seconds - after
        if abs(seconds) < _ROUNDING * played.step_seconds:
            seconds, after = 0.0, played.step_seconds
        gains.append(Gain(what, condition, after, seconds, seconds / played.step_seconds))
    return tuple(sorted(gains, key=lambda gain: -gain.seconds))


def _cases(scenario: Scenario, played: Played) -> Iterator[tuple[str, str, Scenario]]:
    """(what, under which condition, the scenario without it)."""
    work = scenario.work
    for what, condition in _FREE.items():
        # That messages travel does not show in what ranks spend: it is part of what they wait.
        spends = scenario.grid.pp > 1 and work.message > 0 if what == "pp" else played.share(what) > 0
        if spends:
            yield what, condition, scenario.replace(work=work.without(what))
    if scenario.loads is not None and np.ptp(scenario.loads.pairs):
        yield "documents", "every rank had the mean attention of its batch", _with_even_documents(scenario)
    faults = scenario.faults
    if faults.jitter:
        still = scenario.replace(faults=dataclasses.replace(faults, jitter=0.0))
        yield "jitter", "no computation varied by chance", still
    single = [*_single_faults(faults)]
    for what, condition, healed in single:
        yield what, condition, scenario.replace(faults=healed)
    if len(single) > 1:
        healed = Faults(jitter=faults.jitter, seed=faults.seed)
        yield "all slow", "all slow ranks, links and hosts ran at normal speed", scenario.replace(faults=healed)


def _single_faults(faults: Faults) -> Iterator[tuple[str, str, Faults]]:
    """Every planted fault with what is left when it is gone."""
    for rank in faults.ranks:
        left = {other: factor for other, factor in faults.ranks.items() if other != rank}
        yield f"rank {rank}", f"rank {rank} ran at normal speed", dataclasses.replace(faults, ranks=left)
    for a, b in faults.links:
        left = {pair: factor for pair, factor in faults.links.items() if pair != (a, b)}
        yield (
            f"link {a}-{b}",
            f"the link of ranks {a} and {b} ran at normal speed",
            dataclasses.replace(faults, links=left),
        )
    for rank in faults.cpus:
        left = {other: seconds for other, seconds in faults.cpus.items() if other != rank}
        condition = f"the host of rank {rank} launched its computations on time"
        yield f"cpu {rank}", condition, dataclasses.replace(faults, cpus=left)


def _with_even_documents(scenario: Scenario) -> Scenario:
    assert scenario.loads is not None
    relative = float(scenario.loads.pairs.mean()) / scenario.work.pairs
    return scenario.replace(loads=None, work=_with_attention(scenario.work, relative))


def _with_attention(work: Work, factor: float) -> Work:
    """With so many times the attention in every layer."""
    layers = {
        kind: dataclasses.replace(layer, attention=factor * layer.attention)
        for kind, layer in work.layer.items()
        if kind in COMPUTE
    }
    return work.replace(layer=layers)


def collapsed(scenario: Scenario) -> Scenario:
    """A smaller cluster whose step takes exactly as long.

    Ranks without a fault, and with the same documents, are alike: of each dimension the coordinates at which something
    is slow are kept, and one more that stands for all the others. What is waited for is always the latest of a group,
    and none of these is lost.
    """
    faults, grid = scenario.faults, scenario.grid
    if faults.jitter:
        return scenario
    touched = [
        grid.coordinates(rank)
        for rank in (*faults.ranks, *faults.cpus, *(rank for pair in faults.links for rank in pair))
    ]
    kept = {name: _kept({getattr(at, name) for at in touched}, getattr(grid, name)) for name in ("tp", "cp", "dp")}
    if scenario.loads is not None:  # documents are of a DP group and its CP ranks
        kept |= {"cp": range(grid.cp), "dp": range(grid.dp)}
    small = Grid(pp=grid.pp, **{name: len(places) for name, places in kept.items()})
    if small == grid:
        return scenario.replace(all_ranks=False)

    def moved(rank: int) -> int:
        at = grid.coordinates(rank)
        return small.rank(pp=at.pp, **{name: places.index(getattr(at, name)) for name, places in kept.items()})

    return scenario.replace(
        grid=small,
        faults=Faults(
            {moved(rank): factor for rank, factor in faults.ranks.items()},
            {(moved(a), moved(b)): factor for (a, b), factor in faults.links.items()},
            {moved(rank): seconds for rank, seconds in faults.cpus.items()},
            seed=faults.seed,
        ),
        all_ranks=False,
    )


def _kept(touched: Iterable[int], size: int) -> list[int]:
    """The coordinates at which something is otherwise, and the first of the rest."""
    places = sorted(touched)
    rest = next((i for i in range(size) if i not in places), None)
    return places if rest is None else sorted([*places, rest])
