"""Where pictures and pages are to be written: asked before the work whether they can be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def check_target(path: Path, suffixes: Sequence[str]) -> None:
    """ValueError if no file of one of these kinds can be written here. A file that is there will be replaced.

    Args:
        path: of the file to be.
        suffixes: legal endings, such as ".png"; capitals are as good.
    """
    if path.is_dir() or not path.name:
        example = path / f"picture{suffixes[0]}"
        raise ValueError(f"{path}: is a folder; give the name of a file, such as {example}")
    if path.suffix.lower() not in suffixes:
        legal = " or ".join(suffixes)
        nearest = path.with_suffix(suffixes[0])
        has = f"ends in {path.suffix!r}" if path.suffix else "has no ending"
        raise ValueError(f"{path}: {has}; must end in {legal}, such as {nearest}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: the folder {path.parent} cannot be written to")
