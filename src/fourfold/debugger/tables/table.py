"""Operation tables: when every worker of a job did what, one row per operation, in Parquet.

Columns: `dp_rank`, `stage` (pipeline rank), `step`, `optype`, `start_ts` and `duration` in seconds; also, where they
are there, `rank`, `seq_id`, `mc` (model chunk), `gmc` (virtual stage) and `mb_id` (micro-batch). That is the form of
the tables that were published with ByteDance's study of stragglers (OSDI'25): each worker is one row of the grid
dp x pp, and stands for all its TP and CP ranks.

All steps of a job are one program: the same operations on every replica. So a table is kept as arrays [operation,
replica, step], and steps in which an operation is missing are left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.tables.kinds import COMPUTATIONS, MESSAGES, OPTIONAL, Role, role

Seconds = NDArray[np.float64]

NONE = -1
_NEEDED = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
_HELPFUL = ("rank", "seq_id", "mc", "mb_id", "gmc")
_MAGIC = b"PAR1"
_LARGEST = 1e15
"""No number in a table is as large as that; a 64-bit float holds whole ones exactly up to here."""
_SPARSE = 100
"""Times as many pairs of worker and kind of operation as rows: such a table cannot be one of whole steps."""


class Operation(NamedTuple):
    """One thing that a stage does in every step, on every replica."""

    stage: int
    name: str
    """As the table calls it: forward-compute."""
    index: int
    """Among those of its name in its stage, in order."""
    virtual_stage: int = NONE
    """Of a computation, counted over the whole pipeline; else NONE."""
    micro_batch: int = NONE


@dataclass(frozen=True)
class Table:
    """What a job did."""

    path: str
    pp: int
    replicas: tuple[int, ...]
    """`dp_rank` of each."""
    steps: tuple[int, ...]
    operations: tuple[Operation, ...]
    """Stage after stage, in order of start."""
    left_out: tuple[int, ...]
    """`dp_rank` of replicas whose operations are not all there. Others that wait for them seem to communicate."""
    start: Seconds = field(repr=False)
    """[operation, replica, step], since the first start in the step."""
    end: Seconds = field(repr=False)
    notes: tuple[str, ...] = ()
    """What is wrong with the file, or was left out of it, a sentence each."""

    @property
    def step_seconds(self) -> Seconds:
        """Per step, from its first start to its last end."""
        return self.end.max(axis=(0, 1)) - self.start.min(axis=(0, 1))

    def only(self, steps: Sequence[int]) -> Table:
        """With no other steps than these. ValueError if none of them is there."""
        wanted = set(steps)
        kept = [i for i, step in enumerate(self.steps) if step in wanted]
        if not kept:
            raise ValueError(
                f"{self.path}: none of the steps asked for is in the table, which has "
                f"{self.steps[0]} to {self.steps[-1]} ({len(self.steps)} of them)"
            )
        return Table(
            path=self.path,
            pp=self.pp,
            replicas=self.replicas,
            steps=tuple(self.steps[i] for i in kept),
            operations=self.operations,
            left_out=self.left_out,
            start=self.start[:, :, kept],
            end=self.end[:, :, kept],
            notes=self.notes,
        )


def is_table(path: str | Path) -> bool:
    """Whether a file is Parquet, by its name or its first bytes."""
    path = Path(path)
    if not path.is_file():
        return False
    if path.suffix == ".parquet":
        return True
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_table(path: str | Path) -> Table:
    """Reads an operation table.

    Raises:
        ValueError: the file cannot be read, lacks a column that is needed, or has no step that is whole; the sentence
            says which.
    """
    columns, names, notes = _columns(Path(path))
    rows, bad = _sound(columns)
    if bad:
        notes.append(f"{bad} rows without a number in a column that is needed, or of negative duration, are left out")
    if not len(rows["step"]):
        raise ValueError(f"{path}: there is no row to analyse in the table")
    rows, twice = _sorted(_one_rank_each(rows, notes))
    if twice:
        notes.append(f"{twice} rows that say the same as another are left out")
    return _Cells(str(path), rows, names, notes).table()


def _columns(path: Path) -> tuple[dict[str, NDArray[Any]], list[str], list[str]]:
    """The columns as numbers, `optype` as indices into the names that are returned with them; and notes."""
    if find_spec("pyarrow") is None:
        raise ValueError(
            f'{path}: tables in Parquet need the package "pyarrow", which is not installed: pip install pyarrow'
        )
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    try:
        present = parquet.read_schema(path).names
        absent = [name for name in _NEEDED if name not in present]
        if absent:
            raise ValueError(
                f"{path}: no column {', '.join(absent)}: an operation table has {', '.join(_NEEDED)}; "
                f"this file has {', '.join(present) or 'none'}"
            )
        helpful = [name for name in _HELPFUL if name in present]
        read = parquet.read_table(path, columns=[*_NEEDED, *helpful])
        names, codes = _encoded(read["optype"].combine_chunks(), pyarrow)
        columns = {"optype": codes}
        for name in (*_NEEDED, *helpful):
            if name != "optype":
                columns[name] = read[name].cast(pyarrow.float64()).to_numpy()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise ValueError(f"{path}: cannot be read as an operation table in Parquet: {reason}") from None
    notes = []
    if "mb_id" not in present:
        notes.append("no column mb_id: micro-batches are numbered by the order of computations")
    if "mc" not in present and "gmc" not in present:
        notes.append("no column mc or gmc: each stage is taken to be one model chunk")
    return columns, names, notes


def _encoded(column: Any, pyarrow: Any) -> tuple[list[str], NDArray[Any]]:
    """A column of words as its different words, sorted, and for each row which; NaN where there is none."""
    if not pyarrow.types.is_dictionary(column.type):
        column = column.cast(pyarrow.string()).dictionary_encode()
    indices = column.indices.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
    words = [str(name) for name in column.dictionary.to_pylist()]
    names, place = np.unique(np.array([*words, ""]), return_inverse=True)
    known = np.isfinite(indices)
    codes = np.full(len(indices), np.nan)
    codes[known] = place[indices[known].astype(np.int64)]
    return names.tolist(), codes


def _sound(columns: dict[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], int]:
    """The rows in which all that is needed is a number, and how many others there are."""
    good = np.ones(len(columns["step"]), dtype=bool)
    for name in _NEEDED:
        good &= np.isfinite(columns[name])
    good &= (columns["duration"] >= 0) & (columns["stage"] >= 0) & (columns["dp_rank"] >= 0)
    whole: dict[str, NDArray[Any]] = {}
    for name, column in columns.items():
        if name in ("start_ts", "duration"):
            good &= np.abs(column) < _LARGEST
            continue
        number = (np.abs(column) < _LARGEST) & (column == np.round(column))
        whole[name] = np.where(number, column, NONE).astype(np.int64)
        if name in _NEEDED:
            good &= number
    rows = {name: whole.get(name, column)[good] for name, column in columns.items()}
    return rows, int(len(good) - good.sum())


def _one_rank_each(rows: dict[str, NDArray[Any]], notes: list[str]) -> dict[str, NDArray[Any]]:
    """Of several ranks of a (dp_rank, stage), such as a TP group's, only the first: they compute together."""
    if "rank" not in rows:
        return rows
    worker = rows["dp_rank"] * (rows["stage"].max() + 1) + rows["stage"]
    pairs = np.unique(np.stack([worker, rows["rank"]]), axis=1)
    workers, first = np.unique(pairs[0], return_index=True)
    if len(workers) == pairs.shape[1]:
        return rows
    notes.append(f"there are rows of {pairs.shape[1]} ranks for {len(workers)} workers: the first rank of each is used")
    lowest = pairs[1][first]
    kept = rows["rank"] == lowest[np.searchsorted(workers, worker)]
    return {name: column[kept] for name, column in rows.items()}


def _sorted(rows: dict[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], int]:
    """By step, replica, stage, kind and start; without rows that are there twice."""
    keys = [rows[name] for name in ("start_ts", "optype", "stage", "dp_rank", "step")]
    if "seq_id" in rows:
        keys.insert(0, rows["seq_id"])
    order = np.lexsort(keys)
    rows = {name: column[order] for name, column in rows.items()}
    new = np.zeros(len(order), dtype=bool)
    new[:1] = True
    for column in rows.values():
        new[1:] |= column[1:] != column[:-1]
    return {name: column[new] for name, column in rows.items()}, int(len(new) - new.sum())


class _Cells:
    """The rows of a table by (step, replica), and which of these cells are whole."""

    def __init__(self, path: str, rows: dict[str, NDArray[Any]], names: list[str], notes: list[str]) -> None:
        self.path, self.rows, self.names, self.notes = path, rows, names, notes
        self.steps, step = np.unique(rows["step"], return_inverse=True)
        self.replicas, replica = np.unique(rows["dp_rank"], return_inverse=True)
        stages = np.unique(rows["stage"])
        self.pp = int(stages[-1]) + 1
        if len(stages) != self.pp:
            lost = next(i for i, stage in enumerate(stages) if stage != i)
            raise ValueError(f"{path}: stages go up to {self.pp - 1}, but there is no row of stage {lost}")
        self.step, self.replica = step, replica
        self.key = rows["stage"] * len(names) + rows["optype"]
        self.num_keys = self.pp * len(names)
        cell = (step * len(self.replicas) + replica) * self.num_keys + self.key
        shape = (len(self.steps), len(self.replicas), self.num_keys)
        if np.prod(shape, dtype=float) > _SPARSE * len(cell) + 1e6:
            raise ValueError(
                f"{path}: no step is whole: {len(cell)} rows are too few for {shape[0]} steps of {shape[1]} replicas"
            )
        self.counts = np.bincount(cell, minlength=int(np.prod(shape))).reshape(shape)
        self.first = np.searchsorted(cell, cell)  # rows are in the order of cells
        self.usual = self._usual()
        if not self.usual[self._of(COMPUTATIONS)].any():
            raise ValueError(f"{path}: most workers do no {' or '.join(r.value for r in COMPUTATIONS)} in a step")

    def _usual(self) -> NDArray[np.int64]:
        """How many operations of each kind a worker does in a step: what most do."""
        flat = self.counts.reshape(-1, self.num_keys)
        usual = np.array([np.bincount(column).argmax() for column in flat.T])
        return np.where(self._of(OPTIONAL), flat.max(axis=0), usual)

    def _of(self, roles: tuple[Role, ...]) -> NDArray[np.bool_]:
        """Which kinds of operation have one of these roles."""
        return np.array([role(self.names[key % len(self.names)]) in roles for key in range(self.num_keys)])

    def _agreeing(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Replicas that are whole in most steps, and the steps in which all these are; these first."""
        whole = ((self.counts == self.usual) | self._of(OPTIONAL) | (self.usual == 0)).all(axis=2)
        replicas = np.flatnonzero(2 * whole.sum(axis=0) >= len(self.steps))
        steps = np.flatnonzero(whole[:, replicas].all(axis=1)) if len(replicas) else np.zeros(0, dtype=np.int64)
        return steps, replicas

    def _whole(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which steps and replicas are used; notes what is not."""
        steps, replicas = self._agreeing()
        if len(replicas) < len(self.replicas) or 2 * len(steps) < len(self.steps):
            # Messages cost little: rather without them than without a replica, which may be the one that is slow.
            usual = self.usual
            self.usual = np.where(self._of(MESSAGES), 0, usual)
            others = self._agreeing()
            if len(others[0]) * len(others[1]) > len(steps) * len(replicas):
                steps, replicas = others
            else:
                self.usual = usual
        if not len(steps):
            raise ValueError(f"{self.path}: no step is whole: {self._worst()}")
        if len(replicas) < len(self.replicas):
            lost = sorted(set(range(len(self.replicas))) - set(replicas.tolist()))
            which = ", ".join(str(self.replicas[i]) for i in lost[:8]) + (", ..." if len(lost) > 8 else "")
            self.notes.append(f"left out dp_rank {which}: operations are missing there in most steps")
        if len(steps) < len(self.steps):
            self.notes.append(
                f"left out {len(self.steps) - len(steps)} of {len(self.steps)} steps: operations are missing in them"
            )
        return steps, replicas

    def _worst(self) -> str:
        """What is missing most often."""
        off = ((self.counts != self.usual) & ~self._of(OPTIONAL) & (self.usual > 0)).sum(axis=(0, 1))
        key = int(off.argmax())
        stage, name = divmod(key, len(self.names))
        cells = self.counts.shape[0] * self.counts.shape[1]
        return (
            f"stage {stage} does {self.names[name]} {self.usual[key]} times in most steps, "
            f"but not in {off[key]} of {cells} pairs of step and dp_rank"
        )

    def table(self) -> Table:
        """The arrays."""
        steps, replicas = self._whole()
        unusual = sorted({self.names[k % len(self.names)] for k in self._rare()})
        if unusual:
            self.notes.append(f"left out {', '.join(unusual)}: not every worker, or not in every step, has it")
        offset = np.concatenate([[0], np.cumsum(self.usual)])
        slot = offset[self.key] + np.arange(len(self.key)) - self.first
        new_step, new_replica = np.full(len(self.steps), NONE), np.full(len(self.replicas), NONE)
        new_step[steps], new_replica[replicas] = np.arange(len(steps)), np.arange(len(replicas))
        at = slot, new_replica[self.replica], new_step[self.step]
        used = (self.usual[self.key] > 0) & (at[1] != NONE) & (at[2] != NONE)
        at = tuple(index[used] for index in at)
        shape = (int(offset[-1]), len(replicas), len(steps))
        start, seconds = np.full(shape, np.nan), np.zeros(shape)
        start[at], seconds[at] = self.rows["start_ts"][used], self.rows["duration"][used]
        origin = np.nanmin(start, axis=(0, 1))
        start -= origin
        begin = self._filled(start)
        first = used & (self.step == steps[0]) & (self.replica == replicas[0])
        operations = self._operations(np.repeat(np.arange(self.num_keys), self.usual), slot, first)
        order = np.array(sorted(range(shape[0]), key=lambda i: (operations[i].stage, begin[i])), dtype=np.int64)
        start, seconds = start[order], seconds[order]
        start = np.where(np.isnan(start), begin[order][:, None, None], start)
        return Table(
            path=self.path,
            pp=self.pp,
            replicas=tuple(self.replicas[replicas].tolist()),
            steps=tuple(self.steps[steps].tolist()),
            operations=tuple(operations[i] for i in order),
            left_out=tuple(np.delete(self.replicas, replicas).tolist()),
            start=start,
            end=start + seconds,
            notes=tuple(self.notes),
        )

    def _rare(self) -> NDArray[np.int64]:
        return np.flatnonzero((self.usual == 0) & self.counts.any(axis=(0, 1)))

    @staticmethod
    def _filled(start: Seconds) -> Seconds:
        """Mean start per operation, over the cells that have it."""
        there = ~np.isnan(start)
        number = there.sum(axis=(1, 2))
        return np.where(there, start, 0.0).sum(axis=(1, 2)) / np.maximum(number, 1)

    def _operations(
        self, keys: NDArray[np.int64], slot: NDArray[np.int64], first: NDArray[np.bool_]
    ) -> list[Operation]:
        """What each slot is, by the rows of one cell."""
        numbers = {}
        for name in ("mc", "gmc", "mb_id"):
            numbers[name] = np.full(len(keys), NONE)
            if name in self.rows:
                numbers[name][slot[first]] = self.rows[name][first]
        index = np.arange(len(keys)) - np.searchsorted(keys, keys)
        found = [
            Operation(int(key) // len(self.names), self.names[key % len(self.names)], int(i))
            for key, i in zip(keys, index, strict=True)
        ]
        return _numbered(found, numbers, self.pp, self.notes)


def _numbered(
    operations: list[Operation], numbers: dict[str, NDArray[np.int64]], pp: int, notes: list[str]
) -> list[Operation]:
    """With virtual stage and micro-batch of computations: from the table, else from the order of computations."""
    computes = [i for i, o in enumerate(operations) if role(o.name) in COMPUTATIONS]
    stage = np.array([o.stage for o in operations])
    virtual = numbers["gmc"]
    if any(virtual[i] < 0 or virtual[i] % pp != stage[i] for i in computes):
        virtual = np.where(numbers["mc"] >= 0, numbers["mc"] * pp + stage, stage)
    seen: dict[tuple[str, int], int] = {}
    ordered = {}
    for i in computes:  # in order of start within stage and name
        key = operations[i].name, int(virtual[i])
        ordered[i] = seen[key] = seen.get(key, NONE) + 1
    given = {i: int(numbers["mb_id"][i]) for i in computes}
    distinct = {(operations[i].name, int(virtual[i]), given[i]) for i in computes}
    unnumbered = min(given.values(), default=0) < 0
    if unnumbered or len(distinct) < len(computes):
        if not unnumbered:
            notes.append("column mb_id gives one number to several micro-batches: made up from the order of operations")
        given = ordered
    numbered = list(operations)
    for i in computes:
        numbered[i] = operations[i]._replace(virtual_stage=int(virtual[i]), micro_batch=given[i])
    return numbered
