"""What a user did wrong in a recipe: each problem by key, value, rule and nearest legal values."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule. Printed as `layout.tp = 3: must divide model.num_heads = 8; nearest legal: 2, 4`."""

    key: str  # full dotted name; empty when the trouble is the file itself
    value: object  # what the recipe says; None when there is no value to show
    rule: str  # what the value has to satisfy, with the other keys and values that enter
    nearest: tuple[object, ...] = ()  # legal values close to `value`, in order

    def __str__(self) -> str:
        head = self.key if self.value is None else f"{self.key} = {show(self.value)}"
        tail = f"; nearest legal: {', '.join(show(v) for v in self.nearest)}" if self.nearest else ""
        return f"{head}: {self.rule}{tail}" if head else f"{self.rule}{tail}"


class RecipeError(ValueError):
    """Everything that is wrong with a recipe, found in one go. `problems` holds the single findings."""

    def __init__(self, problems: Sequence[Problem], *, source: str | None = None) -> None:
        assert problems, "a RecipeError needs at least one problem"
        self.problems = tuple(problems)
        self.source = source
        lines = [str(p) for p in self.problems]
        if len(lines) == 1 and source is None:
            message = lines[0]
        elif len(lines) == 1:
            message = f"{source}: {lines[0]}"
        else:
            message = "\n  ".join([f"{source or 'the recipe'} has {len(lines)} problems:", *lines])
        super().__init__(message)


def show(value: object) -> str:
    """A value as one would write it in TOML, so that it can be pasted back."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, float):
        return (
            ("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
            if not math.isfinite(value)
            else repr(value)
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k} = {show(v)}' for k, v in value.items())}}}"
    return str(value)


def nearest_integers(value: int, legal: Callable[[int], bool], *, limit: int = 1 << 16) -> tuple[int, ...]:
    """The nearest legal integer below `value` (at least 1) and the nearest above, as far as they exist.

    `limit` bounds the search upward: rules are divisibility rules, so a legal value is near or there is none.
    """
    below = next((n for n in range(min(value - 1, limit), 0, -1) if legal(n)), None)
    start = max(value + 1, 1)
    above = next((n for n in range(start, start + limit) if legal(n)), None)
    return tuple(n for n in (below, above) if n is not None)


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like `name`, or None when nothing is similar."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
