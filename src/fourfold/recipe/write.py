"""Writing a recipe for people: the keys that say something, in the order of the schema, with comments.

And writing files whole, whatever is in them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from fourfold.recipe.load import to_table, toml_value
from fourfold.recipe.schema import Recipe

_GAP = 2  # spaces between the longest line of a section and its comments


def commented_toml(
    recipe: Recipe,
    *,
    header: Sequence[str] = (),
    comments: Mapping[str, str] | None = None,
    always: Collection[str] = (),
) -> str:
    """A recipe as TOML that `load` reads back: only keys that differ from their default.

    Args:
        recipe: what is written.
        header: lines of the comment at the head, without "# ".
        comments: full key ("layout.tp"), or section ("layout"), to the comment on its line.
        always: full keys that are written even if they have their default.
    """
    comments = comments or {}
    usual = to_table(Recipe())
    lines = [f"# {line}".rstrip() for line in header]
    for name, section in to_table(recipe).items():
        kept = {
            key: value
            for key, value in section.items()
            if f"{name}.{key}" in always or usual.get(name, {}).get(key) != value
        }
        if not kept:
            continue
        entries = [(f"[{name}]", comments.get(name, ""))]
        entries += [(f"{key} = {toml_value(value)}", comments.get(f"{name}.{key}", "")) for key, value in kept.items()]
        width = max((len(text) for text, comment in entries if comment), default=0) + _GAP
        lines += ["", *(f"{text:<{width}}# {comment}" if comment else text for text, comment in entries)]
    return "\n".join(lines).lstrip("\n") + "\n"


def write_new(path: Path, text: str) -> None:
    """Writes a small text file whole or not at all, and never over another one.

    A file that has this very text already is left as it is, so that a command can be repeated.

    Raises:
        ValueError: there is a file of this name with another text, or a folder; nothing is written.
        OSError: the file cannot be written.
    """
    data = text.encode("utf-8")
    if path.exists():
        if path.is_file() and path.read_bytes() == data:
            return
        raise ValueError(f"{path}: exists and says something else; remove it, or give another name")
    write_whole(path, data)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that it is whole or as it was before: under a temporary name, then renamed.

    Raises:
        OSError: the file cannot be written; it names this path, not the temporary one.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        partial.unlink(missing_ok=True)
