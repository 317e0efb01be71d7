"""Named ranges of a rank: in which step it is at a time, what it does, and which collective that is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fourfold.debugger.reading.classes import Call, call_of, is_communication
from fourfold.debugger.reading.spans import holder, outermost
from fourfold.debugger.reading.trace import UNKNOWN, Times
from fourfold.layout import Label, parse_label
from fourfold.layout.labels import PREFIX

_STEP = re.compile(r"ProfilerStep#(\d+)")
_WAITS = ("wait", "WAIT_F", "WAIT_B")


class Marks:
    """The ranges of one thread, which nest.

    Args:
        start, end: nanoseconds, in any order.
        names: of each.

    Attributes:
        steps: number of each step and when it began.
    """

    def __init__(self, start: Times, end: Times, names: Sequence[str]) -> None:
        self._start, self._end, self._names = start, end, names
        numbers = [_STEP.match(name) for name in names]
        self._steps = self._outer([match is not None for match in numbers])
        found = [numbers[row] for row in self._steps]
        self._number = np.array([int(match[1]) for match in found if match is not None], dtype=np.int64)
        self.steps = tuple(zip(self._number.tolist(), start[self._steps].tolist(), strict=True))
        ours = any(name.startswith(f"{PREFIX}:") for name in names)
        self._doings = self._outer([self._is_doing(name, ours) for name in names])
        self._calls = self._outer([_is_call(name) for name in names])

    def _outer(self, chosen: list[bool]) -> NDArray[np.intp]:
        """Of some ranges those that lie in no other of them, in order of time."""
        rows = np.flatnonzero(np.array(chosen, dtype=bool))
        rows = rows[np.lexsort((-self._end[rows], self._start[rows]))]
        return rows[outermost(self._start[rows], self._end[rows])]

    @staticmethod
    def _is_doing(name: str, ours: bool) -> bool:
        """Whether a range says what the rank is at: of other programs every range that is no communication."""
        if ours:
            return name.startswith(f"{PREFIX}:") and not _is_call(name)
        return _STEP.match(name) is None and not is_communication(name)

    def step_of(self, at: Times) -> NDArray[np.int64]:
        """Number of the step at each time; UNKNOWN outside of all."""
        row = self._row(at, self._steps)
        return np.where(row >= 0, self._number[np.maximum(row, 0)] if len(self._number) else UNKNOWN, UNKNOWN)

    def doing_of(self, at: Times) -> list[tuple[str, int]]:
        """What the rank is at, as "F of stage 3", and on which micro-batch; "" and UNKNOWN if unknown."""
        return self._said(at, self._doings, _doing)

    def call_of(self, at: Times) -> list[str]:
        """The collective that it is in, as "tp all_gather"; "" outside of one."""
        return [text for text, _ in self._said(at, self._calls, _call)]

    def _said(self, at: Times, rows: NDArray[np.intp], say: Callable[[str], tuple[str, int]]) -> list[tuple[str, int]]:
        said = [say(self._names[row]) for row in rows]
        return [said[row] if row >= 0 else ("", UNKNOWN) for row in self._row(at, rows).tolist()]

    def _row(self, at: Times, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        return holder(at, self._start[rows], self._end[rows])


def _is_call(name: str) -> bool:
    """Whether a label is of a collective, or of waiting for one: these lie in what the rank is at."""
    label = parse_label(name)
    if label is None:
        return False
    return label.kind in _WAITS or (label.kind.islower() and call_of(label.kind) is not Call.OTHER)


def _doing(name: str) -> tuple[str, int]:
    label = parse_label(name)
    if label is not None:
        return (f"{label.kind} of stage {label.stage}" if label.stage >= 0 else label.kind), label.micro_batch
    return name.removeprefix(f"{PREFIX}:"), UNKNOWN


def _call(name: str) -> tuple[str, int]:
    label = parse_label(name)
    assert isinstance(label, Label)
    return f"{label.dimension} {label.kind}", label.micro_batch
