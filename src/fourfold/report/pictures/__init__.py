"""Pictures as PNG and SVG: timelines, memory curves, heat maps, figures beside their published values.

matplotlib draws them. It takes half a second to import, so it is imported when the first picture is drawn; the files of
this folder import it at their head and are imported by these functions alone. The same input gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.report.drawing import HeatMap, Memory, Timeline
from fourfold.report.files import check_target

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

    from fourfold.simulator.figures.figure import Figure

SUFFIXES = (".png", ".svg")


def check_picture(path: Path, suffixes: Sequence[str] = SUFFIXES) -> None:
    """ValueError if no picture can be written here, before the work: wrong ending, no folder, no matplotlib."""
    check_target(path, suffixes)
    if find_spec("matplotlib") is None:
        raise ValueError(
            f'{path}: drawing needs the package "matplotlib", which is not installed: pip install "fourfold[report]"'
        )


def write_timeline(
    path: Path, timeline: Timeline, memory: Memory | None = None, *, heading: Sequence[str] = ()
) -> None:
    """Draws what happens when, a row per rank, and the memory under it on the same axis of time.

    Args:
        path: of the picture, which ends in .png or .svg.
        timeline: what to draw. Numbers of micro-batches are left out where boxes are too small for them.
        memory: of the same rows and unit of time, or None.
        heading: what stands over it, such as `drawing.Page.heading`: a large line, and ordinary ones.

    Raises:
        ValueError: the path cannot be a picture, or matplotlib is missing.
        OSError: the file cannot be written.
    """

    def draw() -> Canvas:
        from fourfold.report.pictures.timeline import draw_timeline

        return draw_timeline(timeline, memory, heading, pixels=path.suffix.lower() == ".png")

    _write(path, draw)


def write_memory(path: Path, memory: Memory) -> None:
    """Draws what is alive over time: a curve per row, and the parts of the one that peaks. Raises as above."""

    def draw() -> Canvas:
        from fourfold.report.pictures.memory import draw_memory

        return draw_memory(memory)

    _write(path, draw)


def write_heat_map(path: Path, heat_map: HeatMap, *, heading: Sequence[str] = ()) -> None:
    """Draws a number per rank: a block per DP group, in it a row per PP rank, in it CP and TP. Raises as above."""

    def draw() -> Canvas:
        from fourfold.report.pictures.heat_map import draw_heat_map

        return draw_heat_map(heat_map, heading)

    _write(path, draw)


def write_figure(path: Path, figure: Figure) -> None:
    """Draws a figure of the paper: the published values beside ours. Raises as above."""

    def draw() -> Canvas:
        from fourfold.report.pictures.figure import draw_figure

        return draw_figure(figure)

    _write(path, draw)


def _write(path: Path, draw: Callable[[], Canvas]) -> None:
    check_picture(path)
    from fourfold.report.pictures.canvas import write_drawn

    write_drawn(path, draw)
