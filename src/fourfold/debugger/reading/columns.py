"""A copy of a file's columns beside it, which is read in a fraction of the time: FILE.columns.npz."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.debugger.reading.trace import Calls, Group, HostRanges, Labels, RankTrace, Steps, Works
from fourfold.layout import Grid

FORMAT = 1
_TABLES: dict[str, type[Any]] = {"steps": Steps, "works": Works, "calls": Calls, "labels": Labels, "ranges": HostRanges}


def place(path: Path) -> Path:
    """Where the copy of a file is."""
    return path.with_name(f"{path.name}.columns.npz")


def save(path: Path, traces: Sequence[RankTrace]) -> bool:
    """Writes the copy of a file's ranks; False if the folder cannot be written to."""
    target = place(path)
    partial = target.with_name(f"{target.name}.partial")
    arrays: list[np.ndarray] = []
    said = [_taken_apart(trace, arrays) for trace in traces]
    text = json.dumps({"format": FORMAT, "source": _stamp(path), "ranks": said})
    try:
        with partial.open("wb") as file:
            # Two members, however many columns: opening a member takes longer than reading a small one.
            np.savez(
                file,
                allow_pickle=False,
                said=np.frombuffer(text.encode(), np.uint8),
                data=np.concatenate([np.ascontiguousarray(array).view(np.uint8) for array in arrays]),
            )
        partial.replace(target)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        return False
    return True


def load(path: Path) -> list[RankTrace] | None:
    """The ranks of a file from its copy; None if there is none that is of this very file, and whole."""
    try:
        with place(path).open("rb") as file, np.load(file, allow_pickle=False) as members:
            said = json.loads(bytes(members["said"]))
            if said["format"] != FORMAT or said["source"] != _stamp(path):
                return None
            data = members["data"]
        return [_put_together(rank, data, path) for rank in said["ranks"]]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None


def _stamp(path: Path) -> list[int]:
    """By which a file is known to be the same: its size and when it was last written."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _taken_apart(trace: RankTrace, arrays: list[np.ndarray]) -> dict[str, Any]:
    """Adds the columns of a rank to those of the others, and returns where they are, and the rest."""
    at = sum(array.nbytes for array in arrays)
    said: dict[str, Any] = {}
    for entry in fields(trace):
        value = getattr(trace, entry.name)
        if entry.name == "groups":
            said["groups"] = [asdict(group) for group in value]
        elif entry.name == "grid":
            said["grid"] = None if value is None else asdict(value)
        elif entry.name not in _TABLES:
            said[entry.name] = value
        else:
            for column in fields(value):
                found = getattr(value, column.name)
                if isinstance(found, np.ndarray):
                    arrays.append(found)
                    said[f"{entry.name}.{column.name}"] = {"at": at, "type": found.dtype.str, "rows": len(found)}
                    at += found.nbytes
                else:
                    said[f"{entry.name}.{column.name}"] = found
    return said


def _put_together(said: dict[str, Any], data: np.ndarray, path: Path) -> RankTrace:
    found: dict[str, Any] = {}
    for entry in fields(RankTrace):
        if entry.name in _TABLES:
            table = _TABLES[entry.name]
            columns = {column.name: said[f"{entry.name}.{column.name}"] for column in fields(table)}
            found[entry.name] = table(**{
                name: _column(value, data) if isinstance(value, dict) else tuple(value)
                for name, value in columns.items()
            })  # fmt: skip
        elif entry.name == "groups":
            found["groups"] = tuple(_group(group) for group in said["groups"])
        elif entry.name == "grid":
            found["grid"] = None if said["grid"] is None else Grid(**said["grid"])
        else:
            value = said[entry.name]
            found[entry.name] = tuple(value) if isinstance(value, list) else value
    return RankTrace(**found | {"path": str(path)})


def _column(said: dict[str, Any], data: np.ndarray) -> np.ndarray:
    """A column of its own, which the rest of the data does not outlive."""
    kind = np.dtype(said["type"])
    return data[said["at"] : said["at"] + said["rows"] * kind.itemsize].copy().view(kind)


def _group(said: dict[str, Any]) -> Group:
    ranks = said["ranks"]
    return Group(**said | {"ranks": None if ranks is None else tuple(ranks), "first": tuple(said["first"])})
