"""Colours of pictures and pages, for a light background: one place, so that both show the same thing alike.

Forwards are blue, backwards green, light to dark by chunk; the two halves of a split backward are tones of their own on
either side of green. What is no computation is muted. Blue, green and olive also differ for people who see red and
green alike, as do the series: theirs are the colours of Okabe and Ito.
"""

from __future__ import annotations

KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, gradient of the input",
    "W": "backward, gradient of the weights",
    "SEND_F": "sends an output",
    "SEND_B": "sends a gradient",
    "GATHER": "gathers weights",
    "REDUCE": "reduces gradients",
    "STEP": "optimizer",
}
"""What `drawing.KINDS` are, as a legend says it."""

INK, QUIET, FAINT, PAPER, IDLE = "#1b1f24", "#59626d", "#d5dae0", "#ffffff", "#f0f2f4"
"""Text and lines; what is less important; lines between things; the background; a row where nothing happens."""

ALARM = "#c0392b"
"""A limit, and what is pointed at."""

SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#332288")
"""Kinds of bytes, parts of a step, lines of a figure: by their position, over again after the last."""

# Light, middle and dark of each kind of computation; one colour of everything else.
_SHADES = {
    "F": ("#d6e6f7", "#5f9fd8", "#1b4a85"),
    "B": ("#d8efcb", "#6cb662", "#1e6332"),
    "I": ("#c9ece8", "#45b0a6", "#0d5f5c"),
    "W": ("#ecedb8", "#b9b544", "#6a6412"),
}
_MUTED = {"SEND_F": "#9db7d3", "SEND_B": "#a9c7a0", "GATHER": "#b9a9cc", "REDUCE": "#d9b08c", "STEP": "#a8adb3"}


def colour(kind: str, chunk: int = 0, num_chunks: int = 1) -> str:
    """The colour of a box as "#rrggbb".

    Args:
        kind: one of `drawing.KINDS`.
        chunk: which of its rank's virtual stages a computation belongs to, from 0; without meaning for other kinds.
        num_chunks: virtual stages per rank.
    """
    if kind in _MUTED:
        return _MUTED[kind]
    light, middle, dark = map(_channels, _SHADES[kind])
    # In the middle of the chunk's share of the way from light to dark: a rank's only chunk has the middle colour.
    way = 2 * (min(max(chunk, 0), num_chunks - 1) + 0.5) / num_chunks
    start, end = (light, middle) if way < 1 else (middle, dark)
    mixed = (round(a + (b - a) * (way % 1)) for a, b in zip(start, end, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def series_colour(index: int) -> str:
    """The colour of the series, part or kind of bytes at a position."""
    return SERIES[index % len(SERIES)]


def ink_on(background: str) -> str:
    """What is easier to read on a colour: `INK` or `PAPER`, by WCAG 2's contrast ratio."""
    return max((INK, PAPER), key=lambda ink: _contrast(ink, background))


def _contrast(one: str, other: str) -> float:
    bright, dark = sorted(map(_luminance, (one, other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    """Relative luminance of sRGB, as WCAG 2 defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (c / 255 for c in _channels(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
