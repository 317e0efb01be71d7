"""Which line of a program asked for memory: of a stack, the innermost frame that is no library's."""

from __future__ import annotations

import re
from typing import Any

NO_PYTHON = "no line of Python (such as a backward of PyTorch's own)"
_LIBRARIES = re.compile(r"[/\\](?:site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]|^<|[/\\]_inductor[/\\]")
_OURS = re.compile(r"[/\\]fourfold[/\\]")  # which may be installed beside the libraries
_INSTALLED = re.compile(r".*[/\\](?:site-packages|dist-packages)[/\\]")
_KEPT = 3  # last parts of a path


class Places:
    """The place of every stack. PyTorch writes a stack once and refers to it from all events that have it."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}

    def of(self, frames: Any) -> str:
        """As "model/llama.py:120 forward"; "" if there is no stack, `NO_PYTHON` if nothing of Python is in it.

        Args:
            frames: dicts of `filename`, `line` and `name`, innermost first. The list must outlive this object.
        """
        if not isinstance(frames, list | tuple):
            return ""
        key = id(frames)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = _place(frames)
        return found


def _place(frames: list[Any] | tuple[Any, ...]) -> str:
    python = [
        (filename, frame) for frame in frames
        if isinstance(frame, dict) and (filename := str(frame.get("filename", ""))).endswith(".py")
    ]  # fmt: skip
    if not python:
        return NO_PYTHON if frames else ""
    ours = [one for one in python if _OURS.search(one[0]) or not _LIBRARIES.search(one[0])]
    filename, frame = (ours or python)[0]
    line, name = frame.get("line", 0), frame.get("name", "")
    return f"{_short(filename)}:{line} {name}".rstrip()


def _short(filename: str) -> str:
    """Without what is alike in all of a program's files."""
    if _INSTALLED.match(filename):
        return _INSTALLED.sub("", filename)
    return "/".join(re.split(r"[/\\]", filename)[-_KEPT:])
