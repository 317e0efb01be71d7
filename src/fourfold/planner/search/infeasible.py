"""When nothing fits, or no layout is legal: what binds, and the nearest changes with which the job runs.

Every change that is named was tried: a layout of the changed job fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fourfold.planner.jobs import Order
from fourfold.planner.machines.chips import CHIPS, GIB, Chip
from fourfold.planner.memory.peak import peak_memory
from fourfold.planner.search.contradictions import contradiction, runs_as_afab, unfilled_node
from fourfold.planner.search.exact import play_exactly
from fourfold.planner.search.judge import Candidate, allocatable_bytes, allocated, candidate, job_of, ranking, sweep
from fourfold.planner.search.misses import largest_parts
from fourfold.planner.search.problem import DIMENSIONS, Problem
from fourfold.planner.search.space import has_grid, space, tensor_degrees
from fourfold.planner.search.words import layout_words

if TYPE_CHECKING:
    from fourfold.planner.machines.cluster import Cluster

MOST_COUNTS = 400  # of GPUs that are tried
MOST_PLAYED = 20  # layouts until one fits when played, too
MOST_GROWTH = 4096  # times the GPUs that there are
ROOMY = 1.5  # times the fewest GPUs: so many are worth some room to spare, and TP that stays in its domain
NEARBY = 25  # a batch is near if it differs by one part in so many
BATCHES = 12  # near ones that are looked at
FASTER = 1.02  # times the tokens per second that are worth another step away
SLOWER = 1.05  # times the fastest that fits: so much is looked at when the fastest is sought
_Maker = Callable[["Problem"], Iterator["Change"]]
_DIMENSION_WORDS = {"virtual_stages": "virtual stages", "micro_batch": "the micro-batch", "recompute": "recomputation"}


@dataclass(frozen=True)
class Change:
    """Something to do otherwise, and the fastest layout that fits then."""

    kind: str
    words: str
    problem: Problem
    candidate: Candidate
    changed: dict[str, int | str] = field(default_factory=dict)
    """What is otherwise than asked: gpus, gpu, seq_len, sequences, gradient_bytes, or a dimension, to its value."""

    def __str__(self) -> str:
        one = self.candidate
        return (
            f"{self.words}: {layout_words(one)}, {one.memory_bytes / GIB:.1f} of "
            f"{allocatable_bytes(self.problem) / GIB:.1f} GiB, {one.step_seconds:.3g} s a step"
        )


@dataclass(frozen=True)
class Infeasible:
    """Why there is no answer, and what would make one."""

    constraint: str
    """What binds, in a sentence."""
    leanest: Candidate | None
    """The layout that lacks least; None if none is legal."""
    changes: tuple[Change, ...]

    @property
    def headline(self) -> str:
        """What is wrong in general: nothing fits, or nothing is legal to begin with."""
        return "Nothing fits." if self.leanest is not None else "No layout is legal."


def explain_infeasible(problem: Problem) -> Infeasible:
    """What binds, and the nearest changes with which something fits."""
    layouts = space(problem, hopeful=False)
    if not len(layouts):
        constraint, makers = _illegal(problem)
        return Infeasible(constraint, None, tuple(change for make in makers for change in make(problem)))
    memory = allocated(problem, layouts, np.arange(len(layouts)))
    leanest = candidate(problem, job_of(problem, layouts, int(np.argmin(memory))))
    afab = runs_as_afab(problem)
    constraint = f"{afab}; {_binding(problem, leanest)}" if afab else _binding(problem, leanest)
    changes = [change for make in _CHANGES for change in make(problem)]
    return Infeasible(constraint, leanest, tuple(changes))


def fastest_fit(problem: Problem, *, comfortable: bool = False) -> Candidate | None:
    """The fastest layout that fits, played. `comfortable`: of those whose TP stays in the NVLink domain and that fit
    with what allocators have lost at most; None if there is none."""
    layouts = space(problem)
    usable = allocatable_bytes(problem)
    if comfortable:
        layouts = layouts.take(layouts.columns["tp"] <= problem.cluster.domain)
        usable = min(usable, usable * problem.stack.allocator / problem.stack.allocator_band[1])
    if not len(layouts):
        return None
    swept = sweep(problem, layouts, slowest=SLOWER)
    rows = np.flatnonzero(swept.fits & (swept.memory <= usable))
    if comfortable and not len(rows):  # the sweep stopped at what fits without room to spare
        swept = sweep(problem, layouts)
        rows = np.flatnonzero(swept.memory <= usable)
    for row in rows[ranking(layouts.take(rows), swept.seconds[rows])][:MOST_PLAYED].tolist():
        job = job_of(problem, layouts, row)
        found = candidate(problem, job, play_exactly(job, problem.stack, imbalance=problem.imbalance))
        if found.memory_bytes <= usable:
            return found
    return None


def fits_at_all(problem: Problem) -> bool:
    """Whether any layout fits. Looks at the leanest settings only: single sequences, most is computed again."""
    layouts = space(problem)
    if not len(layouts):
        return False
    columns = layouts.columns
    lean = columns["recompute"] == columns["recompute"].max()
    if "micro_batch" not in problem.limits:
        lean &= columns["micro_batch"] == 1
    if "schedule" not in problem.limits:
        lean &= columns["order"] != Order.FLEXIBLE
    layouts = layouts.take(np.flatnonzero(lean))
    return any((peak_memory(jobs, problem.stack).fits).any() for _, jobs in layouts.chunks(problem))


def _binding(problem: Problem, leanest: Candidate) -> str:
    """The largest part of the memory of the layout that lacks least."""
    usable = allocatable_bytes(problem)
    within = f" with {_limits(problem)}" if problem.limits else ""
    return (
        f"memory: of all layouts{within}, the one that needs least ({leanest.layout}, ZeRO-{leanest.zero}, "
        f"recomputation {leanest.recompute}, micro-batch {leanest.micro_batch}) allocates "
        f"{leanest.memory_bytes / GIB:.1f} GiB on pipeline rank {leanest.worst_rank}, and an "
        f"{problem.cluster.chip.name} has room for {usable / GIB:.1f}: {largest_parts(leanest, 3)}"
    )


def _limits(problem: Problem, names: Collection[str] = DIMENSIONS) -> str:
    limits = [(name, values) for name, values in problem.limits.items() if name in names]
    return ", ".join(f"{name} = {' or '.join(map(str, values))}" for name, values in limits)


def _illegal(problem: Problem) -> tuple[str, tuple[_Maker, ...]]:
    """Why no layout is legal, and which kinds of changes could make one so."""
    node, against = unfilled_node(problem), contradiction(problem)
    if node is not None:
        return node, (_fewer_gpus, _more_gpus)
    if against is not None:
        return against, (_drop_limits,)
    degrees = ", ".join(map(str, tensor_degrees(problem.config)))
    within = f" and {_limits(problem)}{_culprits(problem)}" if problem.limits else ""
    words = (
        f"no layout: {problem.gpus} GPUs = tp x cp x pp x dp has no solution with tp one of {degrees}, pp at most "
        f"{problem.config.num_layers + 2}, dp a divisor of {problem.sequences} sequences, 2 cp a divisor of "
        f"{problem.seq_len} tokens{within}"
    )
    return words, (_drop_limits, _other_batch, _fewer_gpus, _more_gpus, _shorter)


def _culprits(problem: Problem) -> str:
    """; there are some without tp = 3, or without nc = 5: which limit it is that leaves nothing."""
    names = [name for name in problem.limits if len(space(_without(problem, name), hopeful=False))]
    told = " or ".join(f"without {_limits(problem, (name,))}" for name in names)
    return f"; there are some {told}" if told else ""


def _without(problem: Problem, name: str) -> Problem:
    return problem.replace(limits={key: values for key, values in problem.limits.items() if key != name})


def _tried(kind: str, words: str, problem: Problem, **changed: int | str) -> Iterator[Change]:
    """The change, if something fits then."""
    found = fastest_fit(problem)
    if found is not None:
        yield Change(kind, words, problem, found, changed)


def _drop_limits(problem: Problem) -> Iterator[Change]:
    """Each limit dropped; if none alone helps, all of them."""
    found = []
    for name in DIMENSIONS:
        if name in problem.limits:
            for change in _tried("limit", "", _without(problem, name)):
                was = " or ".join(map(str, problem.limits[name]))
                now = getattr(change.candidate, name)
                word = _DIMENSION_WORDS.get(name, name)
                found.append(replace(change, words=f"{word} {now} instead of {was}", changed={name: now}))
    yield from found
    if not found and problem.limits:
        for change in _tried("limit", "without any of the limits", problem.replace(limits={})):
            yield replace(change, changed={name: getattr(change.candidate, name) for name in problem.limits})


def _more_gpus(problem: Problem) -> Iterator[Change]:
    """The first number of GPUs of those tried (`_counts`) with which something fits: at most an eighth too many. If a
    little more lets TP stay in its domain and leaves some memory to spare, then that."""
    first: int | None = None
    for gpus in _counts(problem):
        changed = problem.replace(cluster=_with_gpus(problem, gpus))
        if first is not None and gpus > ROOMY * first:
            break
        if fits_at_all(changed):
            first = first or gpus
            found = fastest_fit(changed, comfortable=True)
            if found is not None:
                words = f"{gpus:,} GPUs instead of {problem.gpus:,}"
                yield Change("gpus", words, changed, found, {"gpus": gpus})
                return
    if first is not None:
        changed = problem.replace(cluster=_with_gpus(problem, first))
        yield from _tried("gpus", f"{first:,} GPUs instead of {problem.gpus:,}", changed, gpus=first)


def _counts(problem: Problem) -> Iterator[int]:
    """Numbers of GPUs above the present one: every whole node, then in steps of about an eighth."""
    node, gpus, tried = problem.cluster.gpus_per_node, problem.gpus, 0
    while gpus < problem.gpus * MOST_GROWTH and tried < MOST_COUNTS:
        if gpus < node:
            gpus = min(2 * gpus, node)
        else:
            step = max(1, gpus // (8 * node))
            gpus = (gpus // node + (1 << (step.bit_length() - 1))) * node
        tried += 1
        yield gpus


def _with_gpus(problem: Problem, gpus: int) -> Cluster:
    cluster = problem.cluster
    tier = gpus if cluster.tier >= cluster.gpus else cluster.tier
    return msgspec.structs.replace(cluster, gpus=gpus, tier=tier)


def _with_chip(problem: Problem, chip: Chip) -> Cluster:
    """The cluster with other GPUs: as they usually are connected, unless this one says how otherwise."""
    from fourfold.planner.machines.cluster import cluster

    here = problem.cluster
    usual, there = cluster(here.chip.name, here.gpus), cluster(chip.name, here.gpus)
    names = ("domain", "gpus_per_node", "link", "nic", "tier", "oversubscription")
    said = {name: getattr(here, name) for name in names if getattr(here, name) != getattr(usual, name)}
    return msgspec.structs.replace(there, **said)


def _larger_memory(problem: Problem) -> Iterator[Change]:
    """The GPU with least memory with which it fits."""
    here = problem.cluster.chip
    for chip in sorted(CHIPS, key=lambda chip: (chip.hbm_bytes, chip.name)):
        if (
            chip.hbm_bytes > here.hbm_bytes
            and ("TPU" in chip.title) == ("TPU" in here.title)
            and problem.precision.name.lower() in chip.peaks
        ):
            changed = problem.replace(cluster=_with_chip(problem, chip))
            if fits_at_all(changed):
                yield from _tried("gpu", f"{chip.name} instead of {here.name}", changed, gpu=chip.name)
                return


def _shorter(problem: Problem) -> Iterator[Change]:
    """The longest sequence, halved, with which it fits; the same tokens per step."""
    seq_len, sequences = problem.seq_len, problem.sequences
    while seq_len % 2 == 0 and seq_len > 1024:
        seq_len, sequences = seq_len // 2, sequences * 2
        changed = problem.replace(seq_len=seq_len, sequences=sequences)
        if fits_at_all(changed):
            words = f"sequences of {seq_len:,} tokens instead of {problem.seq_len:,}"
            yield from _tried("seq", words, changed, seq_len=seq_len, sequences=sequences)
            return


def _other_batch(problem: Problem) -> Iterator[Change]:
    """Where no layout is legal: of the nearest few batches with which one is, and fits, the one with most tokens per
    second; of those that are about as fast, the nearest."""
    best: Change | None = None
    close, looked = max(2, problem.sequences // NEARBY), 0
    for distance in range(1, min(problem.gpus, problem.sequences + MOST_COUNTS) + 1):
        if best is not None and (distance > close or looked >= BATCHES):
            break
        for sequences in (problem.sequences + distance, problem.sequences - distance):
            changed = problem.replace(sequences=sequences) if sequences > 0 else problem
            if not has_grid(changed) or not fits_at_all(changed):
                continue
            looked += 1
            words = f"{sequences:,} sequences per step ({changed.tokens:,} tokens) instead of {problem.sequences:,}"
            for change in _tried("batch", words, changed, sequences=sequences):
                if best is None or _rate(change) > FASTER * _rate(best):
                    best = change
    if best is not None:
        yield best


def _rate(change: Change) -> float:
    return change.candidate.tokens_per_second_per_gpu


def _fewer_gpus(problem: Problem) -> Iterator[Change]:
    """Where no layout is legal: the largest number of GPUs below with which one is, and fits."""
    node = problem.cluster.gpus_per_node
    step = node if problem.gpus > node else 1
    for gpus in range((problem.gpus - 1) // step * step, 0, -step)[:64]:
        changed = problem.replace(cluster=_with_gpus(problem, gpus))
        if fits_at_all(changed):
            yield from _tried("gpus", f"{gpus:,} GPUs instead of {problem.gpus:,}", changed, gpus=gpus)
            return


def _smaller_gradients(problem: Problem) -> Iterator[Change]:
    """Gradients summed in 16 bits."""
    if problem.stack.gradient_bytes > 2:
        changed = problem.replace(stack=replace(problem.stack, gradient_bytes=2))
        words = "gradients summed in 16 bits (less exact) instead of 32"
        yield from _tried("gradients", words, changed, gradient_bytes=2)


_CHANGES: tuple[_Maker, ...] = (_drop_limits, _more_gpus, _larger_memory, _shorter, _smaller_gradients)
