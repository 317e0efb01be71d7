"""What a run's folder says of the run: its layout, and whether it came to its end."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fourfold.layout import Grid
from fourfold.layout.grid import DIMENSIONS

_FOLDERS = 4  # the path itself and so many less one around it


class _RunState(msgspec.Struct):
    """run.json, as docs/formats.md has it."""

    layout: dict[str, int] = {}
    state: str = ""


def layout_of_run(path: Path) -> Grid | None:
    """The layout that run.json says, in a folder or one of the three around it; None if there is none."""
    for folder in [path, *path.absolute().parents][:_FOLDERS]:
        state = _state(folder)
        if state is not None and {*DIMENSIONS} <= {*state.layout}:
            try:
                return Grid(**{name: state.layout[name] for name in DIMENSIONS})
            except ValueError:
                continue
    return None


def has_finished(folder: Path) -> bool:
    """Whether it is the folder of a run that came to its end: whatever stood still in it went on."""
    state = _state(folder)
    return state is not None and state.state == "finished"


def _state(folder: Path) -> _RunState | None:
    try:
        return msgspec.json.decode((folder / "run.json").read_bytes(), type=_RunState)
    except (OSError, msgspec.MsgspecError):
        return None
