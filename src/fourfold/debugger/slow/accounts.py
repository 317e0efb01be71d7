"""What every rank did in every step: computing, pauses of its host, transfers, and waiting for others, by dimension.

A rank's own time is its computing and the pauses of its host: what it would take if nobody held it up. Of what is left
of its step, transfers take as long for all of a group, and the rest is waiting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.reading.trace import Host, Work
from fourfold.debugger.slow.idle import RankSteps
from fourfold.debugger.slow.known import median
from fourfold.debugger.slow.meetings import Meetings
from fourfold.layout import Grid

_SOME = 0.05  # of the computing that peers do: with less nothing of a step was recorded
_WHOLE = 0.9  # of the calls that peers have: with fewer a step is not whole
Seconds = NDArray[np.float64]
AWAITED = ("tp", "cp", "pp", "dp", "end", "other")
"""For whom a rank waits: dp stands for FSDP over dp x cp, end for all ranks at the end of a step."""
_DIMENSION_OF = {"tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "fsdp": "dp", "world": "end"}
HOST = (*(kind.name.lower() for kind in Host), "launch")


@dataclass(frozen=True)
class Accounts:
    """Seconds of every step and rank; NaN where a rank's trace is missing or has not got the step.

    `work`, `host`, `transfer` and `wait` sum to the rank's step.
    """

    grid: Grid
    steps: tuple[int, ...]
    """The profiler's numbers."""
    work: Seconds = field(repr=False)
    """[steps, ranks, `Work`]."""
    host: Seconds = field(repr=False)
    """[steps, ranks, `HOST`]: pauses of the host."""
    transfer: Seconds = field(repr=False)
    """[steps, ranks, `AWAITED`]."""
    wait: Seconds = field(repr=False)
    """[steps, ranks, `AWAITED`]."""
    attention_known: bool = True
    """Whether attention is told from other work; else all is in GEMM."""
    incomplete: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By rank, the steps that were left out because a good part of them is missing in its trace."""
    on_processor: bool = False
    """Whether what computes is the host's processor, which others may have, too."""

    @property
    def own(self) -> Seconds:
        """[steps, ranks]: computing, and pauses of the host."""
        return self.work.sum(axis=2) + self.host.sum(axis=2)

    @property
    def step_seconds(self) -> Seconds:
        """[steps]: of the median rank. All take the same, but for where they cut."""
        whole = self.own + self.transfer.sum(axis=2) + self.wait.sum(axis=2)
        return median(whole, axis=1)

    @property
    def present(self) -> NDArray[np.bool_]:
        """[ranks]: which have a trace."""
        return np.logical_not(np.isnan(self.own).all(axis=0))

    def shaped(self, column: Seconds) -> Seconds:
        """[..., ranks] -> [..., dp, pp, cp, tp]."""
        grid = self.grid
        return column.reshape(*column.shape[:-1], grid.dp, grid.pp, grid.cp, grid.tp)


def sharing_processors(accounts: Accounts, processor: Seconds | None = None) -> Accounts:
    """Of ranks that compute on processors: time in which these did other things belongs to the computing it lengthens.

    Where more ranks than processors run, all are interrupted, in proportion to what they compute. What a rank is
    interrupted beyond that is its own.

    Args:
        accounts: what ranks did by the wall's clock.
        processor: [steps, ranks] seconds for which the processor worked; NaN, or None: unknown, or accounted for.
    """
    launch = HOST.index("launch")
    work, host = accounts.work.copy(), accounts.host.copy()
    busy = work.sum(axis=2)
    if processor is not None:
        own = busy + host[:, :, launch]
        ran = np.where(np.isnan(processor) | (busy == 0), busy, np.minimum(processor, own))
        with np.errstate(divide="ignore", invalid="ignore"):
            work *= np.where(busy > 0, ran / busy, 1.0)[:, :, None]
        host[:, :, launch], busy = own - ran, work.sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        usual = median(np.where(busy > 0, host[:, :, launch] / busy, np.nan), axis=1, keepdims=True)
    lengthened = np.minimum(host[:, :, launch], np.nan_to_num(usual) * busy)
    host[:, :, launch] -= lengthened
    with np.errstate(divide="ignore", invalid="ignore"):
        work *= np.where(busy > 0, 1 + lengthened / busy, 1.0)[:, :, None]
    return dataclasses.replace(accounts, work=work, host=host, on_processor=True)


def common_steps(ranks: Sequence[RankSteps], chosen: tuple[int, int] | None) -> tuple[int, ...]:
    """The steps that most ranks have: all of them if there are such, else those of at least half of the ranks.

    ValueError: none is left of those that were chosen.
    """
    counts: dict[int, int] = {}
    for steps in ranks:
        for number in steps.trace.steps.number.tolist():
            counts[number] = counts.get(number, 0) + 1
    wanted = {n: count for n, count in counts.items() if chosen is None or chosen[0] <= n <= chosen[1]}
    asked = "" if chosen is None else f"--steps {chosen[0]}-{chosen[1]}: "
    if not wanted:
        there = f"{min(counts)} to {max(counts)}" if counts else "none"
        raise ValueError(f"{asked}no such step in the traces; they have {there}")
    most = max(wanted.values())
    if most == 1 < len(ranks):
        owner = {n: one.trace.rank for one in ranks for n in one.trace.steps.number.tolist()}
        who = ", ".join(f"rank {owner[n]} has step {n}" for n in sorted(wanted)[:2])
        raise ValueError(f"{asked}the traces have no step in common: {who}")
    return tuple(sorted(n for n, count in wanted.items() if count == most))


def incomplete(ranks: Sequence[RankSteps], grid: Grid, steps: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Of ranks whose files are damaged, the steps of which a good part is missing.

    These have fewer calls than their peers have, or next to no computing.
    """
    counts, busy = np.full((2, len(steps), grid.size), np.nan)
    for one in ranks:
        calls = np.bincount(one.trace.calls.step[one.trace.calls.step >= 0], minlength=len(one.trace.steps.number))
        for at, number in enumerate(one.trace.steps.number.tolist()):
            if number in steps:
                counts[steps.index(number), one.trace.rank] = calls[at]
                busy[steps.index(number), one.trace.rank] = one.busy[at].sum()
    shape = (len(steps), grid.dp, grid.pp, grid.cp, grid.tp)
    few = np.zeros(shape, dtype=bool)
    for column, least in ((counts, _WHOLE), (busy, _SOME)):
        column = column.reshape(shape)
        few |= column < least * median(column, (1, 3, 4), keepdims=True)
    few = few.reshape(len(steps), -1)
    return {
        int(rank): tuple(steps[i] for i in np.flatnonzero(few[:, rank])) for rank in np.flatnonzero(few.any(axis=0))
    }


def account(ranks: Sequence[RankSteps], meetings: Meetings, grid: Grid, steps: tuple[int, ...]) -> Accounts:
    """Adds up what each rank did."""
    shape = (len(steps), grid.size)
    work, host = np.full((*shape, len(Work)), np.nan), np.full((*shape, len(HOST)), np.nan)
    transfer, wait = np.full((*shape, len(AWAITED)), np.nan), np.full((*shape, len(AWAITED)), np.nan)
    processor = np.full(shape, np.nan)
    # A step that is the first of some traces only begins there with its first event: its beginning is left out of all.
    first = [one.trace.steps.number[0] for one in ranks if len(one.trace.steps.number)]
    cut_short = np.array([0 < first.count(number) < len(ranks) for number in steps])
    dimension = np.array(
        [AWAITED.index(_DIMENSION_OF.get(key[0], "other")) for key in meetings.keys] + [AWAITED.index("other")]
    )
    for index, one in enumerate(ranks):
        rank = one.trace.rank
        at = {number: i for i, number in enumerate(one.trace.steps.number.tolist())}
        place = np.full(len(one.trace.steps.number), -1)
        for j, number in enumerate(steps):
            if number in at:
                place[at[number]] = j
                work[j, rank] = one.busy[at[number]] / 1e9
                host[j, rank] = transfer[j, rank] = wait[j, rank] = 0.0
                processor[j, rank] = one.trace.processor[at[number]] / 1e9 if one.trace.processor else np.nan
        turned = one.turned(meetings.per_call(index, one, meetings.transfer))
        dims = meetings.per_call(index, one, dimension[meetings.key] + 1) - 1  # those of no meeting: the last, "other"
        pieces = one.in_calls
        kept = place[pieces.step] >= 0
        at = place[pieces.step][kept], dims[pieces.what][kept]
        np.add.at(wait[:, rank], at, (turned - pieces.start)[kept] / 1e9)
        np.add.at(transfer[:, rank], at, (pieces.end - turned)[kept] / 1e9)
        late = one.by_host
        kept = place[late.step] >= 0
        kept &= ~((late.start == one.start[late.step]) & cut_short[place[late.step]])
        kind = late.what[kept]
        np.add.at(host[:, rank], (place[late.step][kept], kind), (late.end[kept] - late.start[kept]) / 1e9)
    left_out = incomplete(ranks, grid, steps)
    for rank, numbers in left_out.items():
        for column in (work, host, transfer, wait):
            column[[steps.index(number) for number in numbers], rank] = np.nan
    accounts = Accounts(grid, steps, work, host, transfer, wait, incomplete=left_out)
    return sharing_processors(accounts, processor) if ranks[0].trace.device == "cpu" else accounts
