"""Measured runs as rows: what was run, in the columns of `jobs`, and what it took. And reading of their tables."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from fourfold.planner.jobs import Jobs

if TYPE_CHECKING:
    from fourfold.planner.timing.stack import Stack

MemoryKind = Literal["allocated", "reserved"]


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One measured run."""

    id: str
    source: str
    quality: str  # "A", "B", "C", or "" where the table does not grade its rows
    group: str  # rows of the same configuration share it, and so end up in the same half
    setting: str  # rows of the same model, cluster, batch and software share it: their layouts compete
    stack: str  # the planner's name of the software
    saved_set: str  # the planner's name of what it keeps in memory
    columns: Mapping[str, float]  # every column of `jobs.Jobs`
    precision: str  # as the source words it
    gpu: str  # as the source words it
    seconds: float | None = None  # per step
    memory: float | None = None  # peak bytes per rank, of the rank with most
    memory_kind: MemoryKind = "reserved"
    rank_bytes: tuple[float, ...] = ()  # allocated, of every rank
    fits: bool | None = None  # whether it ran or ran out of memory, where the table is about that


@dataclass(frozen=True, slots=True)
class Unscored:
    """A row that cannot be predicted, and why."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A table of measured runs. Every row of the file is in `rows` or in `unscored`."""

    kind: Literal["published", "a100_multi_node", "a100_one_node", "out_of_memory", "rank_memory"]
    rows: tuple[MeasuredRow, ...]
    unscored: tuple[Unscored, ...] = ()


def jobs_of(rows: Sequence[MeasuredRow]) -> Jobs:
    """The rows as columns, in order. Columns that `Jobs` has defaults for may be missing from a row."""
    defaults = {field.name: field.default_factory() for field in fields(Jobs) if field.default_factory is not MISSING}
    values = {
        field.name: np.array([row.columns.get(field.name, defaults.get(field.name)) for row in rows])
        for field in fields(Jobs)
    }
    return Jobs.of(**values)


def by_stack(
    rows: Sequence[MeasuredRow], stacks: Callable[[str], Stack]
) -> Iterator[tuple[Stack, NDArray[np.intp], Jobs]]:
    """Rows of one stack together, with their indices."""
    names = np.array([row.stack for row in rows], dtype=object)
    for name in dict.fromkeys(row.stack for row in rows):
        indices = np.flatnonzero(names == name)
        yield stacks(name), indices, jobs_of([rows[int(index)] for index in indices])


def is_calibration(group: str) -> bool:
    """Whether rows of this group may be calibrated on. Of the others accuracy is reported.

    The lowest bit of SHA-256 of the group: the same half on every machine and for every table, however it is sorted.
    """
    return int(hashlib.sha256(group.encode()).hexdigest(), 16) % 2 == 0


def hashed_group(values: Sequence[object]) -> str:
    """A group for a row whose table has none: a short hash of the columns that configure it."""
    return hashlib.sha256(",".join(map(str, values)).encode()).hexdigest()[:10]


class Cells:
    """One row of a table: cells by column, found whatever the case of the header, numbers checked."""

    def __init__(self, cells: Mapping[str, str], *, file: str, line: int) -> None:
        self._cells = cells
        self.where = f"{file}, line {line}"

    def text(self, column: str, default: str = "") -> str:
        """The cell without spaces around it; the default if it is empty or the table has no such column."""
        return self._cells.get(column.lower(), "") or default

    def number(self, column: str, default: float | None = None) -> float | None:
        """The number in a cell; the default if it is empty. ValueError if it is no number."""
        cell = self.text(column)
        if not cell:
            return default
        try:
            value = float(cell.replace("_", "x"))  # Python reads "1_0" as 10; a table hardly means it
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{self.where}, column {column}: {cell!r} is not a number")
        return value

    def count(self, column: str, default: int | None = None) -> int | None:
        """A whole number of at least 1. ValueError if the cell has another."""
        value = self.number(column)
        if value is None:
            return default
        if value < 1 or value != int(value):
            raise ValueError(f"{self.where}, column {column}: {self.text(column)} must be a whole number from 1")
        return int(value)

    def positive(self, column: str) -> float | None:
        """A number above 0; None if the cell is empty. ValueError if it has another."""
        value = self.number(column)
        if value is not None and value <= 0:
            raise ValueError(f"{self.where}, column {column}: {self.text(column)} must be greater than 0")
        return value

    def flag(self, column: str, default: bool) -> bool:
        """Whether a cell says yes. ValueError if it says neither yes nor no."""
        cell = self.text(column).lower()
        if cell in ("1", "1.0", "true", "yes", "on"):
            return True
        if cell in ("0", "0.0", "false", "no", "off"):
            return False
        if cell:
            raise ValueError(f"{self.where}, column {column}: {self.text(column)!r} is neither 1 nor 0")
        return default


def header(path: Path) -> list[str]:
    """Columns of a table, in lower case."""
    return next((names for names, _, _ in _lines(path)), [])


def read_cells(path: Path) -> Iterator[Cells]:
    """Rows of a table. ValueError if one is longer or shorter than the header."""
    for names, cells, line in _lines(path):
        if not any(cell.strip() for cell in cells):  # the header, too
            continue
        if len(cells) != len(names):
            few = len(cells) < len(names)
            first = f"column {names[len(cells)]} is missing" if few else "the rest has no column"
            raise ValueError(
                f"{path.name}, line {line}: {len(cells)} cells under a header of {len(names)} columns; "
                f"{first}. A comma inside a cell needs quotes around it"
            )
        values = {name: cell.strip() for name, cell in zip(names, cells, strict=True)}
        yield Cells(values, file=path.name, line=line)


def _lines(path: Path) -> Iterator[tuple[list[str], list[str], int]]:
    """(columns, cells, number of the line) of each row, first of the header: without cells."""
    # What is no UTF-8 can only be in words; those are looked through for patterns of ASCII.
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file)
        try:
            names = [name.strip().lower() for name in next(reader, [])]
            yield names, [], reader.line_num
            for cells in reader:
                yield names, cells, reader.line_num
        except csv.Error as error:
            raise ValueError(f"{path.name}, line {reader.line_num}: not valid CSV: {error}") from None
