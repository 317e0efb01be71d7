"""The whole way from traces to an answer: what each rank did, and who holds up the others."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fourfold.debugger.memory import Memory
from fourfold.debugger.reading import find, read_all
from fourfold.debugger.slow.accounts import Accounts, account, common_steps
from fourfold.debugger.slow.clocks import Clocks, align
from fourfold.debugger.slow.idle import RankSteps, cut
from fourfold.debugger.slow.links import find_slow_links
from fourfold.debugger.slow.meetings import Meetings, exposed, in_steps, meet, waits_for_unseen
from fourfold.debugger.slow.places import Layout, Places, layout_of
from fourfold.debugger.slow.suspects import Suspects
from fourfold.debugger.slow.verdict import Verdict, judge
from fourfold.debugger.slow.whatif import Replay, replays_of_traces
from fourfold.layout import Grid, join_ranks
from fourfold.planner.search.words import many

_REPLAYED = 3  # steps that are played again: their gains are averaged
Progress = Callable[[int, int], None]
"""Called with how many files are read, of how many."""


@dataclass(frozen=True)
class Diagnosis:
    """The answer, and all that it rests on.

    Attributes:
        source: "traces" or "action logs".
        path: where it was read from.
        layout: of the job, and where it is known from.
        ranks: global ranks that were read.
        verdict, suspects, accounts: the answer; whom it came from; what every rank did.
        steps: the profiler's or the run's numbers.
        traces: of traces, every rank cut up, for pictures.
        meetings, clocks: of traces.
        replays: the steps that were played again.
        device: what computes, "gpu" or "cpu".
        memory: what the ranks held, if that was recorded beside what they did.
        notes: what a reader should know of the files, a sentence each.
    """

    source: str
    path: Path
    layout: Layout
    ranks: tuple[int, ...]
    verdict: Verdict
    suspects: Suspects
    accounts: Accounts
    steps: tuple[int, ...]
    traces: tuple[RankSteps, ...] = field(default=(), repr=False)
    meetings: Meetings | None = field(default=None, repr=False)
    clocks: Clocks | None = None
    replays: tuple[Replay, ...] = field(default=(), repr=False)
    device: str = "gpu"
    memory: Memory | None = None
    notes: tuple[str, ...] = ()


def diagnose_traces(
    path: Path,
    *,
    layout: Grid | None = None,
    steps: tuple[int, int] | None = None,
    workers: int | None = None,
    keep: bool = False,
    progress: Progress | None = None,
) -> Diagnosis:
    """Diagnoses profiler traces, one per rank.

    Args:
        path: a folder with them, a pattern, or one file.
        layout: sizes of the four dimensions; None: what the traces tell.
        steps: first and last to look at; None: all that all ranks have.
        workers: processes that read; None: one per CPU.
        keep: leave a compact copy of each trace beside it, and use it the next time.
        progress: is called as files are read.

    Raises:
        ValueError: there are no traces, two are of one rank, they are of different runs, or the layout does not fit.
    """
    failed: list[str] = []
    ranks = read_all(find(path), reduce=cut, workers=workers, keep=keep, progress=progress, failed=failed.append)
    found = judge_ranks(ranks, path=path, layout=layout, steps=steps)
    return dataclasses.replace(found, notes=(*found.notes, *failed))


def judge_ranks(
    ranks: Sequence[RankSteps], *, path: Path, layout: Grid | None = None, steps: tuple[int, int] | None = None
) -> Diagnosis:
    """Diagnoses ranks that were read. See `diagnose_traces`."""
    known = layout_of([one.trace for one in ranks], layout)
    grid = known.grid
    chosen = common_steps(ranks, steps)
    everything = meet(ranks, Places(grid))
    meetings = in_steps(everything, ranks, chosen)
    accounts = account(ranks, meetings, grid, chosen)
    waited, moved = exposed(meetings, ranks)
    # Where ranks compute on processors, these also carry what the ranks exchange: it takes as long as they are busy.
    links = () if accounts.on_processor else find_slow_links(
        meetings, grid, num_steps=len(chosen), step_seconds=float(np.mean(accounts.step_seconds))
    )  # fmt: skip
    replays = replays_of_traces(ranks, meetings, moved, grid, some(chosen))
    shares = next((one.trace.shares for one in ranks if one.trace.shares), ())
    present = accounts.present
    useless = [one.trace.rank for one in ranks if not present[one.trace.rank]]
    unseen = waits_for_unseen(meetings, ranks, waited, len(chosen), useless)
    verdict, suspects = judge(accounts, shares=shares, links=links, replays=replays, unseen=unseen)
    return Diagnosis(
        source="traces",
        path=path,
        layout=known,
        ranks=tuple(one.trace.rank for one in ranks),
        verdict=verdict,
        suspects=suspects,
        accounts=accounts,
        steps=chosen,
        traces=tuple(ranks),
        meetings=everything,
        clocks=align(ranks, everything),
        replays=tuple(replays),
        device=ranks[0].trace.device,
        notes=_notes(ranks, known, meetings, accounts, useless),
    )


def some(steps: tuple[int, ...]) -> list[int]:
    """A few, from the middle on: the first of a trace is often odd."""
    if len(steps) <= _REPLAYED:
        return [*steps]
    middle = (len(steps) - _REPLAYED + 1) // 2
    return [*steps[middle : middle + _REPLAYED]]


def _notes(
    ranks: Sequence[RankSteps], layout: Layout, meetings: Meetings, accounts: Accounts, useless: Sequence[int]
) -> tuple[str, ...]:
    """What is wrong with the files; what many of them have in common is said once."""
    notes = [layout.note] if layout.note else []
    read = {one.trace.rank for one in ranks}
    missing = sorted({*range(layout.grid.size)} - read)
    if missing:
        which = f"{len(missing):,} of {layout.grid.size:,} ranks have no trace ({join_ranks(missing, 8)})"
        notes.append(f"{which}: they are not compared, and of their groups it is not known who came last")
    if useless:
        notes.append(f"rank {join_ranks(useless, 8)}: nothing of these steps is in its trace, and it is not compared")
    others = [key[1] for key in meetings.keys if key[0] == "other"]
    if others:
        example = join_ranks(others[0], 8)
        notes.append(f"{many(len(others), 'group')}, such as ranks {example}, fit no dimension: is the layout right?")
    alike: dict[str, list[str]] = defaultdict(list)
    for one in ranks:
        for note in one.trace.notes:
            alike[re.sub(r"\d+", "0", note)].append(f"rank {one.trace.rank}: {note}")
    for said in alike.values():
        more = f" (and the like of {many(len(said) - 1, 'other rank')})" if len(said) > 1 else ""
        notes.append(f"{said[0]}{more}")
    if meetings.alone and not missing:
        notes.append(f"{many(meetings.alone, 'call')} met no counterpart on some rank of their group")
    notes += [
        f"rank {rank}: step {', '.join(map(str, numbers))} is not whole, and left out"
        for rank, numbers in accounts.incomplete.items()
    ]
    return tuple(notes)
