"""Layouts judged: all of a space by the closed forms of time and memory, or one as a candidate with all its figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fourfold.planner.flops import model_flops_per_step
from fourfold.planner.jobs import ORDER_NAMES, RECOMPUTE_NAMES, Column, Jobs, Order, Recompute, Split, model_parameters
from fourfold.planner.memory.peak import PARTS, RESERVED, Memory, peak_memory
from fourfold.planner.search.exact import Exact, once_per_step
from fourfold.planner.search.problem import SPLIT_NAMES, Problem
from fourfold.planner.search.space import CHUNK, LAYOUT, Space
from fourfold.planner.timing.step import SHARES, Parts, parts, step_time

if TYPE_CHECKING:
    from fourfold.planner.memory.walk import RankMemory

FIRST_LOOKS = 500  # layouts of which the fastest that fits is sought first, to know what is too slow
DIGITS = 5  # of a time; layouts that differ by less are equally fast, and the simpler one goes first


@dataclass(frozen=True)
class Swept:
    """What the closed forms say of every layout of a space."""

    seconds: Column
    memory: Column  # bytes allocated on the fullest rank, of those that do not fit at least; infinite: not asked for
    fits: Column  # bool

    def __len__(self) -> int:
        return len(self.seconds)

    def and_also(self, other: Swept) -> Swept:
        """Of the layouts of both spaces, these first."""
        return Swept(
            np.concatenate([self.seconds, other.seconds]),
            np.concatenate([self.memory, other.memory]),
            np.concatenate([self.fits, other.fits]),
        )

    @property
    def judged(self) -> int:
        """Layouts of which both are known."""
        return int(np.isfinite(self.memory).sum())


@dataclass(frozen=True)
class Candidate:
    """A layout with what is predicted of it."""

    tp: int
    cp: int
    pp: int
    dp: int
    virtual_stages: int
    nc: int
    micro_batch: int
    schedule: str
    zero: int
    recompute: str
    split: str | tuple[int, ...]
    """How layers are dealt to stages; of a recipe that says so, the layers of each."""
    step_seconds: float
    step_seconds_band: tuple[float, float]
    """Nine of ten measured runs of the stack lie within it."""
    memory_bytes: int
    """Allocated at most, on the fullest rank."""
    worst_rank: int
    """The pipeline rank which that is."""
    fits: bool
    mfu: float
    """6 (P - V D) and attention as far as masks leave it, of the dense peak."""
    mfu_6p: float
    tokens_per_second_per_gpu: float
    bubble_over_compute: float
    """Idle time of all pipeline ranks over computing time: the paper's r. Without a pipeline 0."""
    bubble_over_total: float
    """Idle time over all time of the pipeline."""
    breakdown: dict[str, float]
    """Seconds of a step; they sum to step_seconds."""
    memory_parts: dict[str, float]
    """Bytes of the fullest rank at its worst moment, by kind; they sum to memory_bytes."""
    ranks: tuple[RankMemory, ...] = ()
    """By pipeline rank, of layouts that were played; of others nothing."""

    @property
    def played(self) -> bool:
        """Whether time and memory come from playing the schedule, not from the closed form."""
        return bool(self.ranks)

    @property
    def layout(self) -> str:
        """tp 8 cp 1 pp 16 dp 128."""
        return f"tp {self.tp} cp {self.cp} pp {self.pp} dp {self.dp}"


def sweep(problem: Problem, layouts: Space, *, slowest: float = math.inf) -> Swept:
    """Time of every layout, and memory from the fastest on; those that take more than `slowest` times as long as the
    fastest that fits cannot be of use, and are left at that.

    Memory is first that of the fullest moment, which is less than what a rank needs by up to a half, and mostly by
    nothing. All moments are looked at of what fits by the first look, so that what fits does.
    """
    _keep_freed_memory()
    seconds = _seconds(problem, layouts)
    memory = np.full(len(layouts), math.inf)
    order = np.argsort(seconds, kind="stable")
    allocatable, enough = allocatable_bytes(problem), math.inf
    for first in range(0, len(order), CHUNK):
        rows = order[first : first + CHUNK]
        memory[rows] = allocated(problem, layouts, rows, fullest_only=True)
        close = rows[memory[rows] <= allocatable][:FIRST_LOOKS]
        fits = close[allocated(problem, layouts, close) <= allocatable]
        enough = slowest * seconds[fits].min(initial=math.inf)
        if enough < math.inf:
            break
    # The rest as they are enumerated: neighbours have schedules in common, which are looked at once.
    rest = np.flatnonzero((seconds <= enough) & np.isinf(memory))
    memory[rest] = allocated(problem, layouts, rest, fullest_only=True)
    close = np.flatnonzero(memory <= allocatable)
    memory[close] = allocated(problem, layouts, close)
    return Swept(seconds, memory, memory <= allocatable)


def memory_of(problem: Problem, layouts: Space, rows: np.ndarray) -> np.ndarray:
    """Bytes that these layouts allocate on the fullest rank; of those that do not fit, at least so many."""
    memory = allocated(problem, layouts, rows, fullest_only=True)
    close = np.flatnonzero(memory <= allocatable_bytes(problem))
    memory[close] = allocated(problem, layouts, rows[close])
    return memory


def allocated(problem: Problem, layouts: Space, rows: np.ndarray, *, fullest_only: bool = False) -> np.ndarray:
    """Bytes that some layouts allocate on the fullest rank; with `fullest_only` at least so many, sooner."""
    memory = np.empty(len(rows))
    for part, jobs in layouts.take(rows).chunks(problem):
        memory[part] = peak_memory(jobs, problem.stack, fullest_only=fullest_only).allocated
    return memory


def _keep_freed_memory() -> None:
    """Has the C library keep arrays' memory for the next ones. glibc gives large blocks back to the system, which then
    clears every page again: half of the time of a sweep. It stops doing so for sizes of which it has seen one freed.
    """
    np.empty(24 << 20, dtype=np.uint8)


def _seconds(problem: Problem, layouts: Space) -> np.ndarray:
    """Time of every layout. What a micro-batch takes does not depend on the order of stages, and is the same in many
    layouts: it is computed once."""
    if not len(layouts):
        return np.zeros(0)
    c = layouts.columns
    by_round = c["zero"] == 2  # only then do nc and the order matter: they say how often gradients are reduced
    kinds = [c[name] for name in ("tp", "cp", "pp", "micro_batch", "zero", "recompute")]
    key = np.zeros(len(layouts), dtype=np.int64)
    for column in (*kinds, c["nc"] * by_round, c["order"] * by_round):
        key = key * (int(column.max()) + 1) + column
    _, first, kind_of = np.unique(key, return_index=True, return_inverse=True)
    names = [field.name for field in fields(Parts) if field.name not in SHARES]  # these say nothing of how much it is
    pieces = {name: np.empty(len(first)) for name in names}
    for rows, jobs in layouts.take(first).chunks(problem):
        some = parts(jobs, problem.stack, problem.imbalance)
        for name in names:
            pieces[name][rows] = getattr(some, name)
    seconds = np.empty(len(layouts))
    nothing = dict.fromkeys(SHARES, np.asarray(0.0))
    for rows, jobs in layouts.chunks(problem):
        some = Parts(**{name: column[kind_of[rows]] for name, column in pieces.items()}, **nothing)
        seconds[rows] = step_time(jobs, problem.stack, some).seconds
    return seconds


def ranking(layouts: Space, seconds: Column) -> np.ndarray:
    """Indices, fastest first. Among equally fast layouts the simpler goes first: less of each dimension, no
    recomputation, the lower ZeRO mode, the plainer schedule."""
    shown = rounded(seconds)
    names = ("recompute", "pp", "cp", "tp", "v", "zero", "order", "nc", "split", "micro_batch")
    return np.lexsort([*(layouts.columns[name] for name in reversed(names)), shown])


def rounded(seconds: Column) -> Column:
    """To so many digits as mean something."""
    safe = np.maximum(seconds, 1e-30)
    unit = 10.0 ** (np.floor(np.log10(safe)) - DIGITS + 1)
    return np.round(safe / unit) * unit


def jobs_of(problem: Problem, layouts: Space, rows: Sequence[int] | np.ndarray) -> Jobs:
    """Some layouts of a space as jobs."""
    rows = np.asarray(rows, dtype=np.int64)
    return problem.jobs(**{name: column[rows] for name, column in layouts.columns.items()})


def job_of(problem: Problem, layouts: Space, row: int) -> Jobs:
    """One layout of a space as a job, all of its columns 0-d."""
    return jobs_of(problem, layouts, [row]).row(0)


def candidate(problem: Problem, job: Jobs, exact: Exact | None = None) -> Candidate:
    """A job with its figures: as played if `exact` is given, else by the closed forms."""
    return candidates(problem, job, None if exact is None else [exact])[0]


def candidates(problem: Problem, jobs: Jobs, exacts: Sequence[Exact] | None = None) -> list[Candidate]:
    """Jobs with their figures, one by one."""
    number = len(jobs)

    def listed(column: Column) -> list[Any]:
        return np.broadcast_to(column, (number,)).tolist()

    pieces = parts(jobs, problem.stack, problem.imbalance)
    time = step_time(jobs, problem.stack, pieces)
    pipeline = listed(time.seconds / pieces.inflation - once_per_step(pieces))
    computing = listed(computing_seconds(jobs, pieces))
    held = _walked(exacts) if exacts else _by_closed_form(peak_memory(jobs, problem.stack), number)
    breakdown = {name: listed(part) for name, part in time.breakdown().items()}
    layout = {name: listed(getattr(jobs, name)) for name in LAYOUT}
    seconds = listed(time.seconds)
    flops, sixfold = listed(model_flops_per_step(jobs)), listed(6.0 * model_parameters(jobs) * jobs.tokens)
    peak, slow = listed(jobs.gpus * jobs.peak), listed(1 - 1 / pieces.inflation)
    return [
        _candidate(
            problem,
            {name: column[i] for name, column in layout.items()},
            seconds=seconds[i],
            breakdown={name: column[i] for name, column in breakdown.items()},
            held=held[i],
            flops=(flops[i], sixfold[i]),
            peak=peak[i],
            pipeline=(pipeline[i], computing[i]),
            slow=slow[i],
            exact=exacts[i] if exacts else None,
        )
        for i in range(number)
    ]


class _Held(NamedTuple):
    """Memory of a layout's fullest rank."""

    allocated: int
    worst_rank: int
    parts: dict[str, float]


def _walked(exacts: Sequence[Exact]) -> list[_Held]:
    return [
        _Held(one.memory_bytes, one.worst_rank, {name: getattr(one.ranks[one.worst_rank], name) for name in PARTS})
        for one in exacts
    ]


def _by_closed_form(peak: Memory, number: int) -> list[_Held]:
    columns = [np.broadcast_to(getattr(peak, name), (number,)).tolist() for name in ("allocated", "worst_rank", *PARTS)]
    return [
        _Held(round(allocated), int(worst_rank), dict(zip(PARTS, parts, strict=True)))
        for allocated, worst_rank, *parts in zip(*columns, strict=True)
    ]


def _candidate(
    problem: Problem,
    layout: dict[str, int],
    *,
    seconds: float,
    breakdown: dict[str, float],
    held: _Held,
    flops: tuple[float, float],
    peak: float,
    pipeline: tuple[float, float],
    slow: float,
    exact: Exact | None,
) -> Candidate:
    if exact is not None:
        # Playing changes how long stages wait for each other, and so how long slow ranks take longer.
        breakdown["bubble"], breakdown["p2p"] = exact.waiting
        breakdown["other"] += slow * (exact.seconds - seconds)
        seconds = exact.seconds
    whole, computing = pipeline
    low, high = problem.band
    return Candidate(
        **{name: layout[name] for name in ("tp", "cp", "pp", "dp", "nc", "micro_batch", "zero")},
        virtual_stages=layout["v"],
        schedule=ORDER_NAMES[Order(layout["order"])],
        recompute=RECOMPUTE_NAMES[Recompute(layout["recompute"])],
        split=SPLIT_NAMES[Split(layout["split"])],
        step_seconds=seconds,
        step_seconds_band=(low * seconds, high * seconds),
        memory_bytes=held.allocated,
        worst_rank=held.worst_rank,
        fits=held.allocated <= allocatable_bytes(problem),
        mfu=flops[0] / (seconds * peak),
        mfu_6p=flops[1] / (seconds * peak),
        tokens_per_second_per_gpu=problem.tokens / seconds / problem.gpus,
        bubble_over_compute=whole / computing - 1 if exact is None else exact.bubble_over_compute,
        bubble_over_total=1 - computing / whole if exact is None else exact.bubble_over_total,
        breakdown=breakdown,
        memory_parts=held.parts,
        ranks=() if exact is None else exact.ranks,
    )


def computing_seconds(jobs: Jobs, pieces: Parts) -> Column:
    """Seconds of a step in which the mean pipeline rank computes."""
    ends = pieces.embedding_forward + pieces.embedding_backward + pieces.head_forward + pieces.head_backward
    layer = pieces.layer_forward + pieces.layer_backward
    return jobs.sequences / (jobs.dp * jobs.micro_batch) * (jobs.layers * layer + ends) / jobs.pp


def allocatable_bytes(problem: Problem) -> float:
    """Bytes that may be allocated on one GPU: what is left of its memory, after what the allocator loses."""
    return (problem.cluster.chip.hbm_bytes - RESERVED) / problem.stack.allocator
