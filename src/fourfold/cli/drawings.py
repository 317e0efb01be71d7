"""The options --html, --png and --svg of verbs that have something to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.report.files import check_target

if TYPE_CHECKING:
    from fourfold.report.drawing import Page


def check_drawings(*, html: Path | None, png: Path | None, svg: Path | None) -> None:
    """ValueError if one of the files cannot be written, before the work and before any of them is."""
    if html is not None:
        _check(check_target, html, (".html", ".htm"), option="--html")
    for option, path in (("--png", png), ("--svg", svg)):
        if path is not None:
            check_picture(path, (f".{option[2:]}",), option=option)


def check_picture(path: Path, suffixes: tuple[str, ...] = (".png", ".svg"), *, option: str) -> None:
    """The same of one picture that an option asks for."""
    from fourfold.report import pictures

    _check(pictures.check_picture, path, suffixes, option=option)


def check_merged(path: Path) -> None:
    """The same of a merged trace."""
    _check(check_target, path.with_suffix("") if path.suffix == ".gz" else path, (".json",), option="--merged")


def _check(check: Callable[[Path, Sequence[str]], None], path: Path, suffixes: tuple[str, ...], *, option: str) -> None:
    try:
        check(path, suffixes)
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None


def write_drawings(page: Page, *, html: Path | None, png: Path | None, svg: Path | None) -> list[str]:
    """Writes the page, and its timeline and memory as pictures. Returns sentences that say where they are.

    Raises:
        OSError: a file cannot be written; those before it are there.
    """
    written = []
    if html is not None:
        from fourfold.report.page import write_page

        write_page(page, html)
        written.append(f"page: {html} (open it in a browser)")
    for path in (png, svg):
        if path is not None and page.timeline is not None:
            from fourfold.report.pictures import write_timeline

            write_timeline(path, page.timeline, page.memory, heading=page.heading)
            written.append(f"picture: {path}")
    return written
