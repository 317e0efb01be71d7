"""Near misses: for each way to lay a job out differently the fastest that lost, and what it lost by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from fourfold.planner.jobs import Column, Jobs, Recompute
from fourfold.planner.machines.chips import GIB
from fourfold.planner.search.exact import Exact, Programs, micro_batches_to_play, play_exactly
from fourfold.planner.search.judge import Candidate, Swept, allocatable_bytes, candidate, job_of, memory_of
from fourfold.planner.search.own import OwnLayout
from fourfold.planner.search.paper import PaperAnswer, paper_layout
from fourfold.planner.search.problem import Problem
from fourfold.planner.search.space import CHUNK, Space

NEAR = 1.25  # times the memory that there is: more is no near miss
FEW = 3  # of those that are too large are played, until one is too large then, too
MOST_PLAYED = 40_000  # actions of a schedule that is worth playing for a near miss

SECONDS_WORDS = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound operations",
    "launch": "launching kernels",
    "recompute": "recomputation",
    "head": "the head on the last rank",
    "tp": "TP's collectives",
    "cp": "CP's collectives",
    "bubble": "the bubble",
    "p2p": "messages between stages",
    "dp": "gathers and reduce-scatters of ZeRO that nothing hides",
    "optimizer": "the optimizer",
    "imbalance": "waiting for the rank with the longest documents",
    "other": "slow ranks and what comes once per step",
}
BYTES_WORDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "master weights and moments",
    "activations": "activations",
    "gathered_kv": "gathered keys and values",
    "logits": "logits",
    "transients": "transients",
    "buffers": "buffers",
}


@dataclass(frozen=True)
class NearMiss:
    """A layout that is not the answer, and the reason in a sentence with its numbers."""

    kind: str
    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class _Kind:
    name: str
    holds: Callable[[dict[str, Column], Problem], Column]  # which layouts are of it
    words: str  # what they do, after "the fastest"


_KINDS = (
    _Kind("tp-beyond-domain", lambda c, p: c["tp"] > p.cluster.domain, "where TP leaves the NVLink domain"),
    _Kind("no-tp", lambda c, p: c["tp"] == 1, "without TP"),
    _Kind("pipeline", lambda c, p: c["pp"] > 1, "with a pipeline"),
    _Kind("no-pipeline", lambda c, p: c["pp"] == 1, "without a pipeline"),
    _Kind("one-stage", lambda c, p: (c["pp"] > 1) & (c["v"] == 1), "with one stage per pipeline rank"),
    _Kind("cp", lambda c, p: c["cp"] > 1, "with CP"),
    _Kind("no-cp", lambda c, p: c["cp"] == 1, "without CP"),
    _Kind("zero-3", lambda c, p: c["zero"] == 3, "with ZeRO-3"),
    _Kind("no-recompute", lambda c, p: c["recompute"] == Recompute.NONE, "without recomputation"),
    _Kind("recompute", lambda c, p: c["recompute"] == Recompute.FULL, "with full recomputation"),
)


def fastest_of_kinds(problem: Problem, layouts: Space, order: np.ndarray) -> list[int]:
    """Of every kind the fastest layout that fits, by the closed form: those that may be near misses.

    Args:
        order: rows of the layouts that fit, fastest first.
    """
    ordered = layouts.take(order)
    held = [np.flatnonzero(np.broadcast_to(kind.holds(ordered.columns, problem), len(order))) for kind in _KINDS]
    fastest = dict.fromkeys(int(order[places[0]]) for places in held if len(places))
    return [row for row in fastest if _is_short(job_of(problem, layouts, row))]


def near_misses(
    problem: Problem,
    layouts: Space,
    swept: Swept,
    order: np.ndarray,
    played: dict[int, Exact],
    *,
    programs: Programs,
    own: OwnLayout | None = None,
) -> tuple[NearMiss, ...]:
    """One per kind of which the answer is not; the fastest that does not fit; and the paper's own layout. All are
    played, as the answer was.

    Args:
        order: rows of the layouts that fit, fastest first.
        played: the finalists by row, the answer first.
        own: the layout that the user has.
    """
    first = next(iter(played))
    best = candidate(problem, job_of(problem, layouts, first), played[first])

    def play(row: int) -> Candidate:
        return _played(problem, job_of(problem, layouts, row), programs, exact=played.get(row))

    found: list[NearMiss] = []
    for row in _too_large(problem, swept, first):
        miss = play(row)
        if not miss.fits and miss.step_seconds < best.step_seconds:
            found.append(NearMiss("memory", miss, _faster(problem, miss, best)))
            break
    for kind in _KINDS:
        mask = np.broadcast_to(kind.holds(layouts.columns, problem), len(swept))
        if mask.any() and not mask[first]:
            finalist = next((row for row in played if mask[row]), None)
            miss = play(_of_kind(problem, layouts, swept, order, mask) if finalist is None else finalist)
            none = f"{kind.words} none fits; {miss.layout} lacks least, and {too_large(problem, miss)}"
            how = f"the fastest {kind.words} is {miss.layout}: {slower(miss, best)}" if miss.fits else none
            found.append(NearMiss(kind.name, miss, how))
    paper = paper_layout(problem)
    if paper.refusal is None:
        job = paper_job(problem, paper)
        found.insert(0, _known("paper", "the paper's layout", problem, job, swept, best, programs))
    if own is not None and own.unjudged is None:
        job, split = own.job(problem), own.stage_layers
        found.insert(0, _known("recipe", "the recipe's layout", problem, job, swept, best, programs, split=split))
    return tuple(_distinct(found, best))


def _of_kind(problem: Problem, layouts: Space, swept: Swept, order: np.ndarray, mask: np.ndarray) -> int:
    """The fastest of a kind that fits; if none fits, the one that lacks least."""
    of_kind = order[mask[order]]
    memory = np.where(mask, swept.memory, np.inf)
    row = int(of_kind[0]) if len(of_kind) else _slow_one(problem, layouts, swept, mask, memory)
    return int(np.argmin(memory)) if row is None else row


def _slow_one(problem: Problem, layouts: Space, swept: Swept, mask: np.ndarray, memory: np.ndarray) -> int | None:
    """The fastest that fits of the layouts that the sweep left at their time; None if none does. Notes in `memory` what
    they need."""
    slow = np.flatnonzero(mask & np.isinf(swept.memory))
    slow = slow[np.argsort(swept.seconds[slow], kind="stable")]
    for rows in np.array_split(slow, -(-len(slow) // CHUNK)) if len(slow) else []:
        memory[rows] = memory_of(problem, layouts, rows)
        fits = np.flatnonzero(memory[rows] <= allocatable_bytes(problem))
        if len(fits):
            return int(rows[fits[0]])
    return None


def _too_large(problem: Problem, swept: Swept, first: int) -> list[int]:
    """The fastest few that do not fit by little, if they are faster than what fits."""
    near = ~swept.fits & (swept.memory <= NEAR * allocatable_bytes(problem)) & (swept.seconds < swept.seconds[first])
    rows = np.flatnonzero(near)
    return rows[np.argsort(swept.seconds[rows], kind="stable")[:FEW]].tolist()


def _faster(problem: Problem, miss: Candidate, best: Candidate) -> str:
    seconds = best.step_seconds - miss.step_seconds
    return f"{seconds:.3g} s ({seconds / best.step_seconds:.1%}) faster, but {too_large(problem, miss)}"


def _known(
    kind: str,
    words: str,
    problem: Problem,
    job: Jobs,
    swept: Swept,
    best: Candidate,
    programs: Programs,
    split: tuple[int, ...] | None = None,
) -> NearMiss:
    """A layout that is reported whatever comes of it: its place, its time, its memory."""
    one = _played(problem, job, programs, split=split)
    if _key(one) == _key(best):
        return NearMiss(kind, best, f"{words} is the first")
    place = int((swept.seconds[swept.fits] < one.step_seconds).sum()) + 1
    number = int(swept.fits.sum())
    outside = [name for name, values in problem.limits.items() if getattr(one, name) not in values]
    if outside:
        words += f" (outside of the limit on {', '.join(outside)})"
    if not one.fits:
        reason = f"{words}: {too_large(problem, one)}; by time it would be number {place:,} of {number + 1:,}"
    else:
        reason = f"{words}, number {min(place, number):,} of {number:,}: {slower(one, best)}"
    return NearMiss(kind, one, reason)


def _played(
    problem: Problem,
    job: Jobs,
    programs: Programs,
    *,
    exact: Exact | None = None,
    split: tuple[int, ...] | None = None,
) -> Candidate:
    """A layout played, as the best was, unless its schedule is too long; with `split`, of which closed forms know
    nothing, even then."""
    if exact is None and (_is_short(job) or split is not None):
        exact = play_exactly(job, problem.stack, imbalance=problem.imbalance, split=split, programs=programs)
    one = candidate(problem, job, exact)
    return one if split is None else replace(one, split=split)


def _is_short(job: Jobs) -> bool:
    return 2 * int(job.pp * job.v) * micro_batches_to_play(job) <= MOST_PLAYED


def paper_job(problem: Problem, answer: PaperAnswer) -> Jobs:
    """The paper's layout as a job."""
    names = ("tp", "cp", "pp", "dp", "virtual_stages", "micro_batch", "schedule", "zero", "split")
    own = OwnLayout(**{name: getattr(answer, name) for name in names}, nc=answer.nc or None)
    return own.job(problem)


def slower(miss: Candidate, best: Candidate) -> str:
    """By how much a layout is slower than another, and what most of it goes to."""
    seconds = miss.step_seconds - best.step_seconds
    share = seconds / best.step_seconds
    if abs(share) < 5e-4:
        return "as fast, and less simple"
    if share < 0:
        return f"{-share:.1%} faster" + ("" if miss.played else " by the closed form, which playing corrects")
    more = {name: miss.breakdown[name] - best.breakdown[name] for name in best.breakdown}
    # That there are more ranks to wait for follows from the rest.
    name = max((n for n in more if n != "other"), key=lambda n: more[n])
    here, there = (round(one.breakdown[name], 6) for one in (miss, best))
    instead = f"where the first has {there:.3g} s" if there else "where the first has none"
    return f"{seconds:.3g} s ({share:.1%}) slower, mostly by {SECONDS_WORDS[name]}: {here:.3g} s a step, {instead}"


def too_large(problem: Problem, miss: Candidate) -> str:
    """By how much a layout does not fit, where, and what is there."""
    over = (miss.memory_bytes - allocatable_bytes(problem)) * problem.stack.allocator / GIB
    where = f"on pipeline rank {miss.worst_rank} (largest: {largest_parts(miss, 2)})"
    return f"does not fit by {over:.1f} GiB {where}"


def largest_parts(one: Candidate, number: int) -> str:
    """What most of the fullest rank's memory is: 62.8 GiB of activations, 5.9 GiB of weights."""
    largest = sorted(one.memory_parts.items(), key=lambda item: -item[1])[:number]
    return ", ".join(f"{size / GIB:.1f} GiB of {BYTES_WORDS[name]}" for name, size in largest)


def _distinct(misses: list[NearMiss], best: Candidate) -> Iterator[NearMiss]:
    """Each layout once, by the first kind that it is of."""
    seen = [_key(best)]
    for miss in misses:
        if miss.kind in ("paper", "recipe") or _key(miss.candidate) not in seen:
            seen.append(_key(miss.candidate))
            yield miss


def _key(one: Candidate) -> tuple[object, ...]:
    return (
        *(one.tp, one.cp, one.pp, one.dp, one.virtual_stages, one.nc, one.micro_batch),
        *(one.schedule, one.zero, one.recompute, one.split),
    )
