"""What all pictures share: settings of their own, sizes of text, units, and how a drawing becomes a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import get_hinting_flag
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from fourfold.recipe.write import write_whole
from fourfold.report.palette import FAINT, INK, PAPER, QUIET

DPI = 150
POINTS = 72.0  # per inch
_SETTINGS = {
    "font.size": 8.0,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "figure.facecolor": PAPER,
    "svg.fonttype": "none",  # text stays text: it can be searched, and files are small
    "svg.hashsalt": "fourfold",  # else names in the file differ from time to time
}
_NO_METADATA = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
_BYTES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def write_drawn(path: Path, draw: Callable[[], Figure]) -> None:
    """Draws under matplotlib's own settings and ours, whatever the user's are, and writes the file whole."""
    kind = path.suffix.lower().removeprefix(".")
    out = BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        draw().savefig(out, format=kind, dpi=DPI, metadata=_NO_METADATA[kind])
    write_whole(path, out.getvalue())


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Inches that a text takes, the longest of its lines."""
    font = get_font(findfont(FontProperties(weight="bold" if bold else "normal")))
    font.set_size(size, DPI)  # as it is drawn: letters are fitted to pixels, which are not as wide at each resolution
    widths = [0.0]
    for line in text.splitlines():
        font.set_text(line, 0.0, flags=get_hinting_flag())
        widths.append(font.get_width_height()[0] / 64 / DPI)  # from 26.6 fixed point
    return max(widths)


def place(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes in inches from the left and from the top of the figure."""
    full_width, full_height = figure.get_size_inches()
    return figure.add_axes(
        (left / full_width, 1 - (top + height) / full_height, width / full_width, height / full_height)
    )


def write_at(
    figure: Figure, left: float, baseline: float, text: str, *, size: float, bold: bool = False, colour: str = INK
) -> None:
    """A line of text whose baseline starts so many inches from the left and from the top of the figure."""
    full_width, full_height = figure.get_size_inches()
    x, y, weight = left / full_width, 1 - baseline / full_height, "bold" if bold else "normal"
    figure.text(x, y, text, size=size, weight=weight, color=colour, parse_math=False)


@dataclass(frozen=True)
class Line:
    """Of a picture's head: a text and how it is set."""

    text: str
    size: float  # points
    height: float  # inches, down to the next line
    bold: bool = False
    colour: str = INK


def head_lines(heading: Sequence[str], title: str, *, width: float, text: float) -> list[Line]:
    """What stands over a picture, in lines of at most `width` inches; `text`: points of ordinary text.

    The first of the heading says what the picture is about, the others more of it; the title is of what is drawn.
    """
    line = text / POINTS
    parts = [(heading[0], 1.5, 2.1, True, INK)] if heading else []
    parts += [(more, 1.0, 1.6, False, INK) for more in heading[1:]]
    if not heading:
        parts = [(title, 1.25, 1.9, True, INK)]
    elif not title.startswith(heading[0]):  # or the heading says it all
        parts += [(title, 1.0, 1.9, False, QUIET)]
    return [
        Line(words, text * scale, line * pitch, bold, colour)
        for whole, scale, pitch, bold, colour in parts
        for words in wrapped(whole, width, text * scale, bold=bold)
    ]


def write_head(figure: Figure, lines: Sequence[Line], *, left: float = 0.15, top: float = 0.12) -> None:
    """Writes them one under the other, inches from the left and the top of the figure."""
    for line in lines:
        write_at(figure, left, top + 0.72 * line.height, line.text, size=line.size, bold=line.bold, colour=line.colour)
        top += line.height


def wrapped(text: str, width: float, size: float, *, bold: bool = False) -> list[str]:
    """Lines of whole words, none wider than `width` inches unless it is a single word. A no-break space is none."""
    lines: list[str] = []
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, bold=bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def byte_unit(most: float) -> tuple[str, float]:
    """The unit in which a number of bytes is read best, and its size: GiB, or what is next to it."""
    return next(((name, float(size)) for name, size in _BYTES if most >= size), ("B", 1.0))


def time_label(unit: str, span: float) -> str:
    """The name of an axis of time that ends at `span`."""
    if unit == "F":
        return "time, in forwards of one micro-batch through one chunk"
    return f"time ({_time_unit(unit, span)[0]})"


def set_times(axes: Axes, unit: str, span: float) -> None:
    """Numbers along an axis of time: seconds may become milliseconds."""
    _, size = _time_unit(unit, span)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / size:g}")


def _time_unit(unit: str, span: float) -> tuple[str, float]:
    if unit != "s":
        return unit, 1.0
    return next((entry for entry in _SECONDS if span >= entry[1]), _SECONDS[-1])
