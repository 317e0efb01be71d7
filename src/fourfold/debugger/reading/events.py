"""Events of the Trace Event Format, as far as anything here reads them, and their times in whole nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

import msgspec
import numpy as np

from fourfold.debugger.reading.trace import Times

EXACT = 2.0**43
"""Microseconds, above which a float cannot tell a nanosecond from the next: 2^43 has 10 bits left for its fraction."""
_LARGEST = 9.2e15  # microseconds: more nanoseconds than that are no 64-bit integer


class Arguments(msgspec.Struct, gc=False):
    """What profilers write with an event. Any value may have any type: nobody promises one."""

    correlation: Any = msgspec.field(default=None, name="correlation")
    external: Any = msgspec.field(default=None, name="External id")
    stream: Any = None
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    description: Any = msgspec.field(default=None, name="Process Group Description")
    ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    size: Any = msgspec.field(default=None, name="Group size")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    sequence: Any = msgspec.field(default=None, name="Seq")
    destination: Any = msgspec.field(default=None, name="Dst Rank")
    source: Any = msgspec.field(default=None, name="Src Rank")
    dimensions: Any = msgspec.field(default=None, name="Input Dims")
    name: Any = None


class Event(msgspec.Struct, gc=False):
    """One event. `ts` and `dur` are microseconds."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Arguments | None = None
    id: Any = None


class ExactEvent(msgspec.Struct, gc=False):
    """Only its times, with all their digits."""

    ts: Decimal | None = None
    dur: Decimal | None = None


def nanoseconds(microseconds: Sequence[int | float | None]) -> Times | None:
    """Whole nanoseconds; None where floats have lost some. Three decimals survive below `EXACT`.

    What is missing, no number, or beyond 292 years is the smallest integer.
    """
    try:
        values = np.array(microseconds)
    except (ValueError, OverflowError):
        values = np.array([None])
    if values.dtype.kind not in "iuf" or values.ndim != 1:
        numbers = [v if isinstance(v, int | float) and not isinstance(v, bool) else np.nan for v in microseconds]
        values = np.array(numbers, dtype=np.float64)
    if values.dtype.kind in "iu":
        bad = np.abs(values.astype(np.float64)) > _LARGEST
        return np.where(bad, MISSING, np.where(bad, 0, values).astype(np.int64) * 1000)
    bad = ~(np.abs(values) <= _LARGEST)
    values = np.where(bad, 0.0, values)
    if values.size and np.abs(values).max() >= EXACT:
        return None
    whole = np.floor(values)
    return np.where(bad, MISSING, whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64))


MISSING = np.iinfo(np.int64).min


def exact_nanoseconds(microseconds: Sequence[Decimal | None]) -> Times:
    """The same of numbers with all their digits."""
    return np.array(
        [
            MISSING if value is None or abs(value) > _LARGEST
            else int((value * 1000).to_integral_value(rounding=ROUND_HALF_EVEN))
            for value in microseconds
        ],
        dtype=np.int64,
    )  # fmt: skip


def integer(value: object, default: int) -> int:
    """A whole number out of whatever stands there."""
    if isinstance(value, str):
        try:
            value = int(value, 0)
        except ValueError:
            return default
    if isinstance(value, float) and value % 1 == 0:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**62) < value < 2**62:
        return default
    return value


def decimal(value: object) -> Decimal | None:
    """A number as decimal; None if it is none."""
    return None if isinstance(value, bool) or not isinstance(value, int | float) else Decimal(value)
