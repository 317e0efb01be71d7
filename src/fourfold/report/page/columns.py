"""Columns of numbers inside a page: typed arrays, one after the other, compressed and written in base64.

A page of 8,192 boxes holds some hundred thousand numbers. As JSON they would be several megabytes that the browser
parses one character at a time; as typed arrays it copies them.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_ALIGNMENT = 8  # bytes; a typed array begins at a multiple of its element's size
_TICKS = 1 << 29  # of the largest time: a fifth of a nanosecond of 0.1 s; differences of ticks still fit in 32 bits
_INTEGERS = ((np.int8, "Int8Array"), (np.int16, "Int16Array"), (np.int32, "Int32Array"))

Column = dict[str, Any]
"""What the script needs to read a column back: at (byte), length, type, and of times the scale."""


@dataclass
class Columns:
    """Gathers columns. Each method adds one and returns how to read it."""

    _parts: list[bytes] = field(default_factory=list)
    _size: int = 0

    def integers(self, values: np.ndarray) -> Column:
        """Whole numbers, in as few bytes as the largest needs. ValueError if one needs more than 32 bits."""
        values = np.asarray(values)
        low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
        for dtype, name in _INTEGERS:
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return self._add(values.astype(dtype), name)
        raise ValueError(f"{low} to {high}: more than 32 bits")

    def times(self, values: np.ndarray) -> Column:
        """Numbers of one scale, as differences of whole ticks: off by at most 1e-9 of the largest.

        Times of a schedule repeat themselves in their differences, which then compress well.
        """
        values = np.asarray(values, dtype=np.float64)
        if not np.isfinite(values).all():
            raise ValueError("times of a timeline or of a memory curve must be finite")
        scale = float(np.abs(values).max(initial=0.0)) / _TICKS or 1.0
        ticks = np.rint(values / scale).astype(np.int64)
        return self._add(np.diff(ticks, prepend=0).astype(np.int32), "Int32Array") | {"scale": scale}

    def numbers(self, values: np.ndarray) -> Column:
        """Any numbers, NaN too, to seven digits."""
        return self._add(np.asarray(values, dtype=np.float32), "Float32Array")

    def text(self) -> str:
        """All columns, zlib-compressed, in base64."""
        return base64.b64encode(zlib.compress(b"".join(self._parts))).decode("ascii")

    def _add(self, values: np.ndarray, name: str) -> Column:
        data = values.astype(values.dtype.newbyteorder("<")).tobytes()
        column = {"at": self._size, "length": values.size, "type": name}
        data += bytes(-len(data) % _ALIGNMENT)
        self._parts.append(data)
        self._size += len(data)
        return column
