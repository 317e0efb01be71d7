"""Results as people read them: text for the terminal. No torch."""

from fourfold.report.text import consequences_text, format_bytes, format_count, print_consequences

__all__ = ["consequences_text", "format_bytes", "format_count", "print_consequences"]
