"""Colours of pictures and pages: one place, so that both show the same thing alike. Pages may be dark, too.

Forwards are blue, backwards green, light to dark by chunk; the two halves of a split backward are tones of their own on
either side of green. Chunks also differ in hue, so that a projector does not make neighbours alike, and none is as
light, or on a dark page as dark, as a rank that waits. What is no computation is muted. Blue, green and olive also
differ for people who see red and green alike, as do the series: theirs are the colours of Okabe and Ito, and violet.
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
    "STEP": "optimizer and fixed cost",
    "WORK": "computing without a name",
    "TP": "TP collective",
    "CP": "CP collective",
    "PP": "message",
    "DP": "FSDP's or all ranks' collective",
}
"""What `drawing.KINDS` are, as a legend says it."""

INK, QUIET, FAINT, PAPER, IDLE = "#1b1f24", "#59626d", "#d5dae0", "#ffffff", "#e0e4e9"
"""Text and lines; what is less important; lines between things; the background; a row where nothing happens."""

ALARM = "#c0392b"
"""A limit, and what is pointed at."""

BELOW, ABOVE = "#f28cc8", "#e8382c"
"""In a heat map, the few that are so far from the others that its scale ends before; on any background."""

SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#7b5cd6")
"""Kinds of bytes, parts of a step, lines of a figure: by their position, over again after the last."""

STEP_COLOURS = {
    "compute": "#0072b2",
    "attention": "#56b4e9",
    "tp": "#009e73",
    "cp": "#cc79a7",
    "pp": "#d55e00",
    "dp": "#e69f00",
    "host": "#7a3b0a",
    "end": "#6f7782",
    "optimizer": "#7b5cd6",
    "fixed": "#b3aa7a",
}
"""What a step's time goes to, by the key of a `drawing.Split`'s part. A wait, such as "dp_wait", has the colour of what
is waited for, and stripes."""

# Light, middle and dark of each kind of computation, on light and on dark ground; one colour of everything else.
_SHADES = {
    "F": ("#b4dff8", "#4a92dc", "#2a2f8c"),
    "B": ("#d6e99a", "#5bb45c", "#0e5344"),
    "I": ("#b5e6e0", "#45b0a6", "#0d5f5c"),
    "W": ("#ebe59a", "#b9b544", "#6a6412"),
}
_SHADES_ON_DARK = {
    "F": ("#c4e8fc", "#559fe8", "#4b52cc"),
    "B": ("#e0f0a6", "#62bd60", "#1c8468"),
    "I": ("#c4eee9", "#4dbbb1", "#1b8581"),
    "W": ("#f0eba8", "#c0bc4b", "#8f8827"),
}
_MUTED = {
    "SEND_F": "#9db7d3",
    "SEND_B": "#a9c7a0",
    "GATHER": "#b9a9cc",
    "REDUCE": "#d9b08c",
    "STEP": "#a8adb3",
    "WORK": "#7596bd",
    "TP": "#5fbf9f",
    "CP": "#dda3c4",
    "PP": "#e5935a",
    "DP": "#e8c15c",
}


def colour(kind: str, chunk: int = 0, num_chunks: int = 1, *, dark: bool = False) -> str:
    """The colour of a box as "#rrggbb".

    Args:
        kind: one of `drawing.KINDS`.
        chunk: which of its rank's virtual stages a computation belongs to, from 0; without meaning for other kinds.
        num_chunks: virtual stages per rank.
        dark: for a dark background.
    """
    if kind in _MUTED:
        return _MUTED[kind]
    first, middle, last = map(_channels, (_SHADES_ON_DARK if dark else _SHADES)[kind])
    # In the middle of the chunk's share of the way from light to dark: a rank's only chunk has the middle colour.
    way = 2 * (min(max(chunk, 0), num_chunks - 1) + 0.5) / num_chunks
    start, end = (first, middle) if way < 1 else (middle, last)
    mixed = (round(a + (b - a) * (way % 1)) for a, b in zip(start, end, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def series_colour(index: int) -> str:
    """The colour of the series, part or kind of bytes at a position."""
    return SERIES[index % len(SERIES)]


def step_colour(key: str, index: int) -> tuple[str, bool]:
    """The colour of a part of a step's time, and whether it is striped: by its key, else by its position."""
    name = key.removesuffix("_wait")
    if name in STEP_COLOURS:
        return STEP_COLOURS[name], name != key
    return series_colour(index), index >= len(SERIES)


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
