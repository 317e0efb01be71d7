"""Near misses: for each way to lay a job out differently the fastest that lost, and what it lost by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fourfold.planner.exact import Programs, micro_batches_to_play, play_exactly
from fourfold.planner.jobs import ORDER_NAMES, Column, Jobs, Order, Recompute, Split
from fourfold.planner.judge import Candidate, Swept, candidate, candidates, jobs_of, usable_bytes
from fourfold.planner.paper import PaperAnswer, paper_layout
from fourfold.planner.problem import SPLIT_NAMES, Problem
from fourfold.planner.space import Space

GIB = 1 << 30
NEAR = 1.25  # times the memory that there is: more is no near miss
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
    "transients": "transients of backward",
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
    words: str  # what they do


_KINDS = (
    _Kind("tp-beyond-domain", lambda c, p: c["tp"] > p.cluster.domain, "TP leaves the NVLink domain"),
    _Kind("no-tp", lambda c, p: c["tp"] == 1, "no TP"),
    _Kind("pipeline", lambda c, p: c["pp"] > 1, "a pipeline"),
    _Kind("no-pipeline", lambda c, p: c["pp"] == 1, "no pipeline"),
    _Kind("one-stage", lambda c, p: (c["pp"] > 1) & (c["v"] == 1), "one stage per pipeline rank"),
    _Kind("cp", lambda c, p: c["cp"] > 1, "CP"),
    _Kind("no-cp", lambda c, p: c["cp"] == 1, "no CP"),
    _Kind("zero-3", lambda c, p: c["zero"] == 3, "ZeRO-3"),
    _Kind("no-recompute", lambda c, p: c["recompute"] == Recompute.NONE, "no recomputation"),
    _Kind("recompute", lambda c, p: c["recompute"] == Recompute.FULL, "full recomputation"),
)


def near_misses(
    problem: Problem,
    layouts: Space,
    swept: Swept,
    order: np.ndarray,
    first: int,
    *,
    programs: Programs,
    own: Jobs | None = None,
) -> tuple[NearMiss, ...]:
    """One per kind of which the answer is not; the fastest that does not fit; and the paper's own layout.

    Args:
        order: rows of the layouts that fit, fastest first.
        first: the row of the answer.
        own: the layout that the user has.
    """
    rows = [first]
    say: list[tuple[str, Callable[[Candidate, Candidate], str]]] = []
    too_fast = _too_large(problem, swept, first)
    if too_fast is not None:
        rows.append(too_fast)
        say.append(("memory", lambda miss, best: _faster(problem, miss, best)))
    for kind in _KINDS:
        mask = np.broadcast_to(kind.holds(layouts.columns, problem), len(swept))
        if mask.any() and not mask[first]:
            row, sentence = _of_kind(problem, swept, order, mask, kind)
            rows.append(row)
            say.append((kind.name, sentence))
    best, *lost = candidates(problem, jobs_of(problem, layouts, rows))
    found = [NearMiss(name, miss, words(miss, best)) for miss, (name, words) in zip(lost, say, strict=True)]
    answer = paper_layout(problem)
    if answer.refusal is None:
        found.insert(
            0, _known("paper", "the paper's layout", problem, paper_job(problem, answer), swept, best, programs)
        )
    if own is not None:
        found.insert(0, _known("recipe", "the recipe's layout", problem, own, swept, best, programs))
    return tuple(_distinct(found, best))


def _of_kind(
    problem: Problem, swept: Swept, order: np.ndarray, mask: np.ndarray, kind: _Kind
) -> tuple[int, Callable[[Candidate, Candidate], str]]:
    """The fastest of a kind that fits and what is to be said of it; if none fits, the one that lacks least."""
    of_kind = order[mask[order]]
    if len(of_kind):
        return int(of_kind[0]), lambda miss, best: f"{kind.words}: {slower(miss, best)}"
    memory = np.where(mask, swept.memory, np.inf)
    if np.isinf(memory.min()):
        row = int(np.argmin(np.where(mask, swept.seconds, np.inf)))
        return row, lambda miss, best: f"{kind.words}: {slower(miss, best)}"
    words = f"{kind.words}: none fits; this one lacks least, and "
    return int(np.argmin(memory)), lambda miss, _: words + too_large(problem, miss)


def _too_large(problem: Problem, swept: Swept, first: int) -> int | None:
    """The fastest that does not fit by little, if it is faster than what fits."""
    near = ~swept.fits & (swept.memory <= NEAR * usable_bytes(problem)) & (swept.seconds < swept.seconds[first])
    return int(np.argmin(np.where(near, swept.seconds, np.inf))) if near.any() else None


def _faster(problem: Problem, miss: Candidate, best: Candidate) -> str:
    return f"{1 - miss.step_seconds / best.step_seconds:.1%} faster, but {too_large(problem, miss)}"


def _known(
    kind: str, words: str, problem: Problem, job: Jobs, swept: Swept, best: Candidate, programs: Programs
) -> NearMiss:
    """A layout that is reported whatever comes of it: its place, its time, its memory."""
    closed = candidate(problem, job)
    if _key(closed) == _key(best):
        return NearMiss(kind, closed, f"{words} is the first")
    place = int((swept.seconds[swept.fits] < closed.step_seconds).sum()) + 1
    number = int(swept.fits.sum())
    if not closed.fits:
        reason = f"{words}: {too_large(problem, closed)}; it would be number {place:,} of {number:,}"
    else:
        reason = f"{words}, number {place:,} of {number:,}: {slower(closed, best)}"
    played = 2 * int(job.pp * job.v) * micro_batches_to_play(job) <= MOST_PLAYED
    exact = play_exactly(job, problem.stack, imbalance=problem.imbalance, programs=programs) if played else None
    return NearMiss(kind, candidate(problem, job, exact), reason)


def paper_job(problem: Problem, answer: PaperAnswer) -> Jobs:
    """The paper's layout as a job."""
    orders = {name: order for order, name in ORDER_NAMES.items()}
    splits = {name: split for split, name in SPLIT_NAMES.items()}
    order = orders[answer.schedule]
    number = problem.sequences // (answer.dp * answer.micro_batch)
    return problem.jobs(
        tp=answer.tp,
        cp=answer.cp,
        pp=answer.pp,
        dp=answer.dp,
        v=answer.virtual_stages,
        nc=number if order is Order.AFAB else answer.nc or answer.pp,
        micro_batch=answer.micro_batch,
        order=int(order),
        split=int(splits.get(answer.split, Split.EVEN)),
        zero=answer.zero,
        recompute=int(Recompute.NONE),
    )


def slower(miss: Candidate, best: Candidate) -> str:
    """By how much a layout is slower than another, and what most of it goes to."""
    share = miss.step_seconds / best.step_seconds - 1
    if share < 5e-4:
        return "as fast, and less simple"
    more = {name: miss.breakdown[name] - best.breakdown[name] for name in best.breakdown}
    # That there are more ranks to wait for follows from the rest.
    name = max((n for n in more if n != "other"), key=lambda n: more[n])
    here, there = (round(one.breakdown[name], 6) for one in (miss, best))
    return (
        f"{share:.1%} slower, mostly by {SECONDS_WORDS[name]}: {here:.3g} s a step, where the first has {there:.3g} s"
    )


def too_large(problem: Problem, miss: Candidate) -> str:
    """By how much a layout does not fit, where, and what is there."""
    over = (miss.memory_bytes - usable_bytes(problem)) * problem.stack.allocator / GIB
    largest = sorted(miss.memory_parts.items(), key=lambda item: -item[1])[:2]
    what = " and ".join(f"{size / GIB:.1f} GiB of {BYTES_WORDS[name]}" for name, size in largest)
    return f"does not fit by {over:.1f} GiB on pipeline rank {miss.worst_rank}: {what}"


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
