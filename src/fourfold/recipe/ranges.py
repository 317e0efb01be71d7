"""Numbers as a person lists them: 0-7,16."""

from __future__ import annotations


def parse_range(text: str) -> range:
    """One number, or the first and the last of a range. Raises ValueError with the rule, and what may be meant."""
    first, dash, last = text.strip().partition("-")
    if not first.isdecimal() or not (last.isdecimal() if dash else not last):
        raise ValueError(f"{text.strip()!r} is neither a number nor a range such as 3-5")
    low, high = int(first), int(last if dash else first)
    if low > high:
        raise ValueError(f"{text.strip()} runs backwards; {high}-{low} is meant")
    return range(low, high + 1)


def parse_ranges(text: str) -> list[range]:
    """Numbers, and ranges of them, between commas, as they are listed. Raises ValueError with the rule."""
    return [parse_range(part) for part in text.split(",")]


def parse_ranks(text: str, size: int) -> tuple[int, ...]:
    """Ranks, of so many, and ranges of them between commas; ascending, each once. Raises ValueError with the rule."""
    ranges = parse_ranges(text)
    if max(numbers[-1] for numbers in ranges) >= size:
        raise ValueError(f"there are ranks 0 to {size - 1}")
    return tuple(sorted({number for numbers in ranges for number in numbers}))
