"""The options --html, --png and --svg of verbs that have something to draw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.report.files import check_target

if TYPE_CHECKING:
    from fourfold.report.drawing import Page


def check_drawings(*, html: Path | None, png: Path | None, svg: Path | None) -> None:
    """ValueError if one of the files cannot be written, before the work and before any of them is."""
    for option, path, suffixes in (
        ("--html", html, (".html", ".htm")),
        ("--png", png, (".png",)),
        ("--svg", svg, (".svg",)),
    ):
        if path is None:
            continue
        try:
            check_target(path, suffixes)
            if option != "--html":
                from fourfold.report.pictures import check_picture

                check_picture(path)
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

            write_timeline(path, page.timeline, page.memory)
            written.append(f"picture: {path}")
    return written
