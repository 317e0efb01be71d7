"""Quantities as a page writes them. The script says the same of what the pointer is on (`script/words.js`)."""

from __future__ import annotations

import numpy as np

from fourfold.report.text import format_bytes

BYTES = ("B", "bytes")
SECONDS = "s"


def quantity(value: float, unit: str) -> str:
    """A number with its unit, three digits: 12.3 ms, 44.4 GiB, 21.5 F, 3.14 %."""
    if value != value:
        return "unknown"
    if unit in BYTES:
        return f"-{format_bytes(-value)}" if value < 0 else format_bytes(value)
    if unit == SECONDS:
        scales = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
        fitting = (scale for scale in scales if abs(value) >= scale[1] * 0.9995)
        name, scale = next(fitting, scales[-1]) if value else scales[0]
        return f"{_digits(value / scale)} {name}"
    return f"{_digits(value)} {unit}".rstrip()


def _digits(value: float) -> str:
    """Three digits without trailing zeros and without an exponent: 12,345, 3.14, 0.25."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")
