"""Results as people read them: text for the terminal. No torch.

The names below come from :mod:`fourfold.report.text`, which is imported when the first of them is used: drawing a
schedule, which has to answer at once, needs neither the planner nor the recipe behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.report.text import consequences_text, format_bytes, format_count, print_consequences

__all__ = ["consequences_text", "format_bytes", "format_count", "print_consequences"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fourfold.report import text

    return getattr(text, name)
