"""The search: every legal layout by closed forms, the best of them played exactly, and why the others lost."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fourfold.planner.search.exact import Exact, Programs, play_exactly
from fourfold.planner.search.judge import (
    DIGITS,
    Candidate,
    Swept,
    allocatable_bytes,
    candidates,
    job_of,
    jobs_of,
    ranking,
    rounded,
    sweep,
)
from fourfold.planner.search.misses import NearMiss, fastest_of_kinds, near_misses
from fourfold.planner.search.own import OwnLayout
from fourfold.planner.search.problem import Problem
from fourfold.planner.search.space import LEFT_OUT, Space, space

if TYPE_CHECKING:
    from fourfold.planner.search.infeasible import Infeasible

FINALISTS = 50  # layouts that are played
REFINED = 20  # layouts whose other numbers of virtual stages are tried, too
PER_GRID = 4  # of them with the same (tp, cp, pp, dp)
PER_FAMILY = 2  # of them that differ in the order of work alone, each with its best stages, nc and split
LAST_RESORT = 300  # that are played until one fits
LOOKED_AT = 20_000  # of the fastest, to find finalists among
MOST_ACTIONS = 25_000  # played in all, once `top` layouts are found
PARETO = 12  # points that are shown
SLOWEST = 1.4  # times the fastest that fits: what is slower is not looked at any further

__all__ = ["Candidate", "NearMiss", "Plan", "search"]


@dataclass(frozen=True)
class Plan:
    """What the search found."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    """Played, fastest first."""
    pareto: tuple[Candidate, ...]
    """Of all that fit, each faster than what needs less memory; fastest first. By the closed forms."""
    near_misses: tuple[NearMiss, ...]
    evaluated: int
    """Layouts whose time and memory were computed."""
    feasible: int
    """Those of them that fit."""
    slow: int
    """Layouts that take more than 1.4 times as long as the fastest that fits, of which memory was not asked."""
    hopeless: int
    """Layouts left out because weights and optimizer state alone are too large."""
    played: int
    seconds: float
    infeasible: Infeasible | None = None
    own: OwnLayout | None = None
    """The layout that the user has, if it is one of this job; a near miss, unless it says why not."""
    left_out: tuple[str, ...] = LEFT_OUT
    """Kinds of layouts that were not looked at, and why."""

    @property
    def best(self) -> Candidate | None:
        """The answer."""
        return self.candidates[0] if self.candidates else None


def search(problem: Problem, *, top: int = 10, finalists: int = FINALISTS, own: OwnLayout | None = None) -> Plan:
    """The `top` fastest layouts that fit, and what is to be said of the others. The same job has the same answer.

    `own`: the layout that the user has, which is reported among the near misses.
    """
    if top < 1:
        raise ValueError(f"top = {top}: must be at least 1; nearest legal: 1")
    start = time.perf_counter()
    layouts = space(problem)
    swept = sweep(problem, layouts, slowest=SLOWEST)
    some = np.array(_diverse(layouts, _fitting(layouts, swept), max(REFINED, top)), dtype=np.int64)
    more = layouts.take(some).with_more_stage_numbers(problem)
    layouts, swept = layouts.and_also(more), swept.and_also(sweep(problem, more))
    order = _fitting(layouts, swept)
    programs = Programs()
    first = _diverse(layouts, order, max(finalists, top))
    kinds = fastest_of_kinds(problem, layouts, order)
    played = _play(problem, layouts, order, kinds=kinds, first=first, top=top, programs=programs)
    pareto: tuple[Candidate, ...] = ()
    misses: tuple[NearMiss, ...] = ()
    infeasible = None
    if played:
        pareto = _pareto(problem, layouts, swept, order)
        misses = near_misses(problem, layouts, swept, order, played, programs=programs, own=own)
    else:
        from fourfold.planner.search.infeasible import explain_infeasible

        infeasible = explain_infeasible(problem)
    return Plan(
        problem=problem,
        candidates=tuple(_top(problem, layouts, played, top)),
        pareto=pareto,
        near_misses=misses,
        evaluated=swept.judged,
        slow=len(layouts) - swept.judged,
        feasible=len(order),
        hopeless=layouts.hopeless,
        played=len(played),
        seconds=time.perf_counter() - start,
        infeasible=infeasible,
        own=own,
    )


def _fitting(layouts: Space, swept: Swept) -> np.ndarray:
    """Rows that fit, fastest first."""
    rows = np.flatnonzero(swept.fits)
    return rows[ranking(layouts.take(rows), swept.seconds[rows])]


def _play(
    problem: Problem,
    layouts: Space,
    order: np.ndarray,
    *,
    kinds: list[int],
    first: list[int],
    top: int,
    programs: Programs,
) -> dict[int, Exact]:
    """By row, those that fit when played, fastest first: of `kinds`, so that no near miss beats the answer, and of the
    finalists (`first`), the fastest, `top` that fit and as many more as can be played in a moment."""
    rows: list[int] = []
    exacts: list[Exact] = []
    usable = allocatable_bytes(problem)
    # Should none of them fit after all, those behind them are tried.
    sure, certain, finalists = set(kinds), [*dict.fromkeys([*kinds, *first])], set(first)
    others = [row for row in order[:LAST_RESORT].tolist() if row not in certain]
    played_of_kinds = 0
    for number, row in enumerate([*certain, *others]):
        if number == len(sure):
            played_of_kinds = programs.actions
        enough = len(finalists.intersection(rows)) >= top and programs.actions - played_of_kinds > MOST_ACTIONS
        if number >= len(sure) and (enough or (rows and number >= len(certain))):
            break
        job = job_of(problem, layouts, row)
        exact = play_exactly(job, problem.stack, imbalance=problem.imbalance, programs=programs)
        if exact.memory_bytes <= usable:
            rows.append(row)
            exacts.append(exact)
    if not rows:
        return {}
    simplest = np.argsort(ranking(layouts.take(np.array(rows)), np.zeros(len(rows))))
    keys = rounded(np.array([exact.seconds for exact in exacts]))
    return {rows[i]: exacts[i] for i in np.lexsort([simplest, keys])}


def _top(problem: Problem, layouts: Space, played: dict[int, Exact], top: int) -> list[Candidate]:
    """The fastest. Of those that differ in stages or ZeRO mode alone, and neither in time nor in memory, the first."""
    found: list[Candidate] = []
    seen: set[tuple[object, ...]] = set()
    rows = list(played)
    for one in candidates(problem, jobs_of(problem, layouts, rows), list(played.values())) if rows else []:
        layout = (one.tp, one.cp, one.pp, one.dp, one.micro_batch, one.recompute)
        key = (*layout, f"{one.step_seconds:.{DIGITS}g}", one.memory_bytes)
        if key not in seen and len(found) < top:
            seen.add(key)
            found.append(one)
    return found


def _diverse(layouts: Space, order: np.ndarray, number: int) -> list[int]:
    """The fastest rows, but only a few of one (tp, cp, pp, dp), and fewer that differ in the order of stages alone."""
    head = order[:LOOKED_AT]
    names = ("tp", "cp", "pp", "dp", "micro_batch", "zero", "recompute", "order")
    keys = np.stack([layouts.columns[name][head] for name in names]).T.tolist()
    chosen: list[int] = []
    others: list[int] = []
    seen: Counter[tuple[int, ...]] = Counter()
    for row, key in zip(head.tolist(), map(tuple, keys), strict=True):
        grid, family = key[:4], key[:-1]
        if seen[grid] < PER_GRID and seen[family] < PER_FAMILY and not seen[key]:
            seen.update((grid, family, key))
            chosen.append(row)
            if len(chosen) == number:
                return chosen
        elif len(others) < number:
            others.append(row)
    place = {row: i for i, row in enumerate(head.tolist())}
    return sorted([*chosen, *others[: number - len(chosen)]], key=place.__getitem__)


def _pareto(problem: Problem, layouts: Space, swept: Swept, order: np.ndarray) -> tuple[Candidate, ...]:
    """The front of time against memory, thinned to even steps of time."""
    order = order[swept.seconds[order] <= SLOWEST * swept.seconds[order[0]]] if len(order) else order
    memory = swept.memory[order]
    least = np.minimum.accumulate(memory)
    on_front = np.ones(len(order), dtype=bool)
    on_front[1:] = memory[1:] < least[:-1] * (1 - 1e-3)
    front: list[Candidate] = []
    for one in candidates(problem, jobs_of(problem, layouts, order[on_front])) if on_front.any() else []:
        if one.fits and (not front or one.memory_bytes < front[-1].memory_bytes * (1 - 1e-3)):
            front.append(one)
    seconds = np.log([one.step_seconds for one in front])
    if len(front) > PARETO:
        wanted = np.linspace(seconds[0], seconds[-1], PARETO)
        front = [front[i] for i in np.unique(np.searchsorted(seconds, wanted - 1e-12).clip(0, len(front) - 1))]
    return tuple(front)
