"""A hang from action logs: which rank stands before which action, and whose message or presence it needs there.

What a rank would have done next is known from its last whole step, or from a rank that has the same list. A receive is
a posting: it is the computation after it that waits for the message. Ranks of a TP or CP group meet inside of every
computation, those that shard a stage's weights in every GATHER and REDUCE, and all ranks at the end of a step.

A run writes a step's entries when the step has ended, so of a real hang often nothing is logged but who has ended the
step before. Logs that are cut off within a step say more.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fourfold.debugger.hangs.reports import Entry, Line, RankReport, Wait
from fourfold.debugger.hangs.waits import Hang, follow
from fourfold.layout import Action, Doing, Grid, Kind, join_ranks
from fourfold.layout.actions import BACKS, COMPUTE, RECEIVES, SENDS

NO_LOG = "no log: dead, or its file is missing"
_FILE = re.compile(r"rank-(\d+)\.jsonl")
_BLOCK = 1 << 16  # bytes, from the end of a file, that are read at first
_ENOUGH = 3  # steps: one that is cut off, a whole one, and that before, of which a part may be missing
_MEETINGS = {Kind.GATHER, Kind.REDUCE}
_DOINGS = frozenset(Doing)
_END = "the end of the step"


class _Line(msgspec.Struct, gc=False):
    step: int
    action: str


@dataclass(frozen=True)
class Tail:
    """The end of one rank's log.

    Attributes:
        steps: step -> its actions, in order, the last steps only.
        others: step -> what else was logged of it.
        notes: what is wrong with the file.
        torn: whether the last line is cut off.
    """

    steps: Mapping[int, tuple[Action, ...]]
    others: Mapping[int, frozenset[Doing]]
    notes: tuple[str, ...] = ()
    torn: bool = False

    @property
    def last(self) -> int:
        """The last step; 0 if there is none."""
        return max(self.steps, default=0)


@dataclass(frozen=True)
class _Position:
    """Where a rank stands in the step in which the job stands: ``at`` in its ``list`` of actions."""

    list: tuple[Action, ...]
    at: int
    passed: bool
    """The end of the step, where all ranks meet."""

    @property
    def next(self) -> Action | None:
        return self.list[self.at] if self.at < len(self.list) else None


def log_files(folder: Path) -> dict[int, Path]:
    """The action logs of a run's folder, or of its subfolder `actions`, by rank."""
    folder = folder / "actions" if (folder / "actions").is_dir() else folder
    found = {int(match[1]): path for path in folder.glob("rank-*.jsonl") if (match := _FILE.fullmatch(path.name))}
    return dict(sorted(found.items()))


def is_cut_off(files: Mapping[int, Path]) -> bool:
    """Whether logs end within a step."""
    tails = {rank: read_tail(path) for rank, path in files.items()}
    return any(
        tail.torn or len(tail.steps[tail.last]) < max(map(len, tail.steps.values()))
        for tail in tails.values()
        if tail.steps
    )


def from_logs(files: Mapping[int, Path], grid: Grid | None) -> Hang:
    """Finds where each rank stands, and follows the waits.

    Args:
        files: the logs by rank.
        grid: the layout; None: guessed from which ranks do the same.

    Raises:
        ValueError: no log holds anything, or there are logs of more ranks than the layout has.
    """
    tails = {rank: read_tail(path) for rank, path in files.items()}
    notes = [note for tail in tails.values() for note in tail.notes]
    tails = {rank: tail for rank, tail in tails.items() if tail.steps}
    if not tails:
        raise ValueError(f"the action logs hold no action; {'; '.join(notes) or 'their files are empty'}")
    if grid is None:
        grid = _guessed(tails)
        notes.append(
            f"the layout was guessed from which ranks do the same: {grid.tp} ranks of TP or CP, {grid.pp} of PP, "
            f"{grid.dp} of DP; give it to be certain"
        )
    if max(files) >= grid.size:
        raise ValueError(
            f"there is a log of rank {max(files)}, but the layout tp={grid.tp},cp={grid.cp},pp={grid.pp},dp={grid.dp} "
            f"has {grid.size} ranks; give the layout of the run"
        )
    step = max(tail.last for tail in tails.values())
    if all(len(tail.steps) == 1 for tail in tails.values()):
        notes.append(f"nothing but step {step} is logged: if no rank ended it, what came next cannot be known")
    positions = _positions(tails, step, grid)
    where = {rank: _where(position, tails[rank], step) for rank, position in positions.items() if rank in tails}
    stands: dict[str, list[int]] = defaultdict(list)
    for rank, text in where.items():
        stands[text].append(rank)
    notes += [f"rank {join_ranks(ranks)}: {text}" for text, ranks in stands.items()]
    missing = sorted({*range(grid.size)} - {*tails})
    if missing:
        notes.append(f"of {grid.size} ranks there is no log of rank {join_ranks(missing)}")
    job = _Job(positions, grid)
    reports = {rank: job.report(rank, text) for rank, text in where.items()}
    if not any(report.waits for report in reports.values()):
        return Hang((), (), where, NO_LOG, tuple(notes))
    hang = follow(
        reports,
        range(grid.size),
        lambda wait: group_in(grid, wait.dimension, wait.ranks[0]),
        grid=grid,
        silent=NO_LOG,
        notes=tuple(notes),
    )
    if len(hang.causes) > 1 and len({cause.what for cause in hang.causes}) < len(hang.causes):
        told = "of ranks that stand before the same action some are in it and wait for one: logs do not tell which"
        hang = dataclasses.replace(hang, notes=(told, *hang.notes))
    return hang


def read_tail(path: Path) -> Tail:
    """Reads the last steps of a log, from its end. Lines that are no entries are left out, and counted."""
    size = _BLOCK
    while True:
        data, whole = _end_of(path, size)
        torn = bool(data) and not data.endswith(b"\n")
        lines = data.split(b"\n")[:-1]
        steps: dict[int, list[Action]] = {}
        others: dict[int, set[Doing]] = defaultdict(set)
        damaged = 0
        for line in lines:
            try:
                entry = msgspec.json.decode(line, type=_Line)
                actions = steps.setdefault(entry.step, [])
                if entry.action in _DOINGS:
                    others[entry.step].add(Doing(entry.action))
                else:
                    actions.append(Action.parse(entry.action))
            except (msgspec.MsgspecError, ValueError):
                damaged += bool(line.strip())
        if whole or len(steps) > _ENOUGH:
            break
        size *= 4
    if not whole:
        steps.pop(min(steps))  # its beginning may lie before what was read
    notes = [f"{damaged} lines of {path.name} are no entries of an action log and were left out"] if damaged else []
    if torn:
        notes.append(f"the last line of {path.name} is torn, and was left out")
    return Tail(
        {step: tuple(actions) for step, actions in steps.items()},
        {step: frozenset(doings) for step, doings in others.items()},
        tuple(notes),
        torn,
    )


def _end_of(path: Path, size: int) -> tuple[bytes, bool]:
    """The last bytes of a file from the beginning of a line on, and whether they are all of it."""
    with path.open("rb") as file:
        length = file.seek(0, 2)
        file.seek(max(length - size, 0))
        data = file.read(size)
    return (data, True) if length <= size else (data[data.find(b"\n") + 1 :], False)


def _guessed(tails: Mapping[int, Tail]) -> Grid:
    """A layout in which ranks that do the same are neighbours in TP, and what they do changes along PP."""
    size = max(tails) + 1
    lists = [max(tails[rank].steps.values(), key=len) if rank in tails else () for rank in range(size)]
    stages = [frozenset(action.stage for action in of if action.kind in COMPUTE) for of in lists]
    known = [stage for stage in stages if stage]
    pp = len({*known})
    changes = [rank for rank in range(1, size) if stages[rank] != stages[rank - 1]]
    tp = min((b - a for a, b in zip([0, *changes], [*changes, size], strict=True)), default=1)
    if pp > 1 and size % (tp * pp) == 0:
        return Grid(tp=tp, pp=pp, dp=size // (tp * pp))
    return Grid(dp=size)


def _positions(tails: Mapping[int, Tail], step: int, grid: Grid) -> dict[int, _Position]:
    """Where each rank stands in ``step``. One without a log stands at its beginning."""
    longest: dict[int, tuple[Action, ...]] = {}
    for rank, tail in tails.items():
        pp = grid.coordinates(rank).pp
        for actions in tail.steps.values():
            if len(actions) > len(longest.get(pp, ())):
                longest[pp] = actions
    positions = {}
    for rank in range(grid.size):
        tail = tails.get(rank)
        done = tail.steps.get(step, ()) if tail else ()
        due = longest.get(grid.coordinates(rank).pp, done)
        due = due if due[: len(done)] == done else (done + due[len(done) :])
        passed = bool(tail) and Doing.NORM in tail.others.get(step, ())
        positions[rank] = _Position(due, len(done), passed)
    return positions


def _where(position: _Position, tail: Tail, step: int) -> str:
    if tail.last < step:
        return f"has logged nothing of step {step}"
    if position.next is None:
        return f"has ended step {step}"
    return f"stands before {position.next}, action {position.at + 1} of {len(position.list)}, of step {step}"


class _Job:
    """Where all ranks stand, and who sends what to whom."""

    def __init__(self, positions: Mapping[int, _Position], grid: Grid) -> None:
        self.positions = positions
        self.grid = grid
        self.all_ended = all(position.next is None for position in positions.values())
        sends: dict[tuple[int, int, int, Action], int] = {}
        receivers: dict[tuple[int, int, int, Action], int] = {}
        for rank, position in positions.items():
            at = grid.coordinates(rank)
            for action in position.list:
                if action.kind in SENDS:
                    sends[at.dp, at.cp, at.tp, action] = rank
                elif action.kind in RECEIVES:
                    receivers[at.dp, at.cp, at.tp, action.send] = rank
        self._senders = sends
        self._sent: dict[int, dict[Action, tuple[int, int]]] = {}  # of each sender: send -> receiver and its number
        for (dp, cp, tp, action), rank in sends.items():
            receiver = receivers.get((dp, cp, tp, action))
            if receiver is not None:
                own = self._sent.setdefault(rank, {})
                own[action] = receiver, sum(to == receiver for to, _ in own.values())

        # Whoever waits for the message that an action needs has not come to the others who are in it.
        self._entered = {rank: at.at + (self._receive(rank) is None) for rank, at in positions.items()}

    def report(self, rank: int, where: str) -> RankReport:
        """What a rank that has a log would say of itself."""
        position = self.positions[rank]
        lines = [self._line("world", rank, int(position.next is None), None, 0)]
        for dimension in ("tp x cp", "fsdp"):
            lines.append(self._line(dimension, rank, self._entered[rank], position.next, position.at))
        done = {*position.list[: position.at]}
        sent = Counter(to for action, (to, _) in self._sent.get(rank, {}).items() if action in done)
        lines += [Line("pp", (rank, to), "send", count, ()) for to, count in sent.items()]
        return RankReport(rank, "", 0, "", math.nan, where, self._waits(rank), tuple(lines))

    def _waits(self, rank: int) -> tuple[Wait, ...]:
        """What a rank waits for where it stands: a message, or those of a group that are not as far."""
        position = self.positions[rank]
        action = position.next
        if action is None:
            return () if position.passed or self.all_ended else (self._wait("world", rank, None, 0),)
        if action.kind not in COMPUTE | _MEETINGS:
            return ()
        if (receive := self._receive(rank)) is not None:
            return (receive,)
        dimension = "fsdp" if action.kind in _MEETINGS else "tp x cp"
        behind = any(self._entered[other] <= position.at for other in group_in(self.grid, dimension, rank))
        return (self._wait(dimension, rank, action, position.at),) if behind else ()

    def _receive(self, rank: int) -> Wait | None:
        """The message that has not been sent, if it is one that a rank needs where it stands."""
        position, at = self.positions[rank], self.grid.coordinates(rank)
        action = position.next
        send = None if action is None else _awaited(position, action)
        sender = None if send is None else self._senders.get((at.dp, at.cp, at.tp, send))
        if action is None or send is None or sender is None:
            return None
        if send in self.positions[sender].list[: self.positions[sender].at]:
            return None
        number = self._sent[sender][send][1]
        return Wait("receive", number, *_place(action), "", math.nan, False, "pp", (sender, rank), "receive")

    def _line(self, dimension: str, rank: int, started: int, action: Action | None, number: int) -> Line:
        entry = Entry(str(action or _END), number, *_place(action), "", math.nan, False)
        return Line(dimension, self._ends(dimension, rank), "", started, (entry,) if started else ())

    def _wait(self, dimension: str, rank: int, action: Action | None, number: int) -> Wait:
        ends = self._ends(dimension, rank)
        return Wait(str(action or _END), number, *_place(action), "", math.nan, False, dimension, ends, "")

    def _ends(self, dimension: str, rank: int) -> tuple[int, int]:
        group = group_in(self.grid, dimension, rank)
        return group[0], group[-1]


def group_in(grid: Grid, dimension: str, rank: int) -> tuple[int, ...]:
    """The ranks that meet a rank inside of a computation, in a GATHER or REDUCE, or at the end of a step."""
    if dimension == "world":
        return tuple(range(grid.size))
    return grid.group_of(rank, *{"tp x cp": ("tp", "cp"), "fsdp": ("dp", "cp")}[dimension])


def _place(action: Action | None) -> tuple[int, int]:
    return (action.stage, action.micro_batch) if action else (-1, -1)


def _awaited(position: _Position, due: Action) -> Action | None:
    """The send whose message the computation before which a rank stands needs, if it needs one."""
    if due.kind is Kind.FORWARD:
        receive = Action(Kind.RECV_FORWARD, due.stage, due.micro_batch)
    elif due.kind in BACKS:
        receive = Action(Kind.RECV_BACKWARD, due.stage, due.micro_batch)
    else:
        return None
    return receive.send if receive in position.list else None
