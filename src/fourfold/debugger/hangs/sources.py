"""Where a hang can be read from: a path is looked at, and what is there is followed.

A run's folder has reports of its watchdog in ``hangs/`` if a step has taken too long, and action logs in ``actions/``;
dumps of PyTorch's flight recorder lie wherever they were told to.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from pathlib import Path

import msgspec

from fourfold.debugger.hangs.flights import from_dumps
from fourfold.debugger.hangs.logs import from_logs, is_cut_off, log_files
from fourfold.debugger.hangs.recordings import is_dump, rank_in_name
from fourfold.debugger.hangs.reports import RankReport, read_reports
from fourfold.debugger.hangs.waits import Hang, diagnose
from fourfold.debugger.runs import has_finished, layout_of_run
from fourfold.layout import Grid, join_ranks

_REPORT = re.compile(r"rank-(\d{5})\.json")
_HEAD = 1 << 12


class Source(Enum):
    """What tells of a hang."""

    REPORTS = auto()
    DUMPS = auto()
    LOGS = auto()


def hang_source(path: Path) -> Source | None:
    """What there is at a path that a hang can be found in; the best of it, if there are several.

    Args:
        path: a run's folder, a folder with reports, dumps or logs, or a file that is a report or a dump.
    """
    if _report_folder(path) is not None:
        return Source.REPORTS
    if dump_files(path):
        return Source.DUMPS
    if path.is_dir() and log_files(path):
        return Source.LOGS
    return None


def is_hang_source(path: Path) -> bool:
    """Whether a path tells of a hang rather than of slow ranks.

    Action logs do where they end within a step. What reports a run has left does not count if it went on to its end.
    """
    source = hang_source(path)
    if source is None or (source is Source.REPORTS and has_finished(path)):
        return False
    return source is not Source.LOGS or is_cut_off(log_files(path))


def find_hang(path: Path, grid: Grid | None = None) -> Hang:
    """Why the job stands still whose reports, dumps or logs are at ``path``. A `Hang` without causes says: it does not.

    Args:
        path: as `hang_source` takes it.
        grid: the layout. None: what a run's folder says of itself; else it is made out from what is there.

    Raises:
        ValueError: there is nothing that a hang could be found in, or the layout does not fit.
    """
    source = hang_source(path)
    grid = grid or layout_of_run(path)
    if source is Source.REPORTS:
        folder = _report_folder(path)
        assert folder is not None
        return _from_reports(folder, grid or layout_of_run(folder))
    if source is Source.DUMPS:
        return from_dumps(dump_files(path), grid)
    if source is Source.LOGS:
        return from_logs(log_files(path), grid)
    raise ValueError(
        f"{path}: nothing to find a hang in; it must be a run's folder with hangs/ or actions/, or a folder with dumps "
        "of PyTorch's flight recorder, named like nccl_trace_rank_12"
    )


def dump_files(path: Path) -> list[Path]:
    """The dumps at a path: the file itself, or those in the folder, by name. Those too that are damaged or empty."""
    if path.is_file():
        return [path] if is_dump(path) else []
    if not path.is_dir():
        return []
    files = [file for file in sorted(path.iterdir()) if file.is_file() and rank_in_name(file) is not None]
    dumps = [file for file in files if is_dump(file)]
    # One that was cut off near its beginning does not say what it is, but its name is like the others'.
    names = {_unnumbered(file) for file in dumps}
    return [file for file in files if file in dumps or _unnumbered(file) in names]


def _unnumbered(file: Path) -> str:
    return re.sub(r"\d+", "#", file.name)


def _report_folder(path: Path) -> Path | None:
    """The folder with the reports of the last hang at a path."""
    if path.is_file():
        return path.parent if _REPORT.fullmatch(path.name) and _is_report(path) else None
    if not path.is_dir():
        return None
    if any(_is_report(file) for file in _reports_in(path)[:8]):
        return path
    hangs = path if path.name.startswith("hangs") else path / "hangs"
    if not hangs.is_dir():
        return None
    # "-abort" and "-after" of one step sort behind it, which is the order in which they come.
    folders = [folder for folder in sorted(hangs.glob("step-*"), reverse=True) if folder.is_dir()]
    return next((folder for folder in folders if _reports_in(folder)), None)


def _reports_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("rank-*.json") if _REPORT.fullmatch(file.name))


def _is_report(file: Path) -> bool:
    """Whether a file is the watchdog's, by its beginning, in which a profiler's trace has other keys."""
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD)
    except OSError:
        return False
    return head.lstrip()[:1] == b"{" and all(key in head for key in (b'"rank"', b'"doing"', b'"where"'))


def _from_reports(folder: Path, grid: Grid | None) -> Hang:
    ranks = [int(file.stem.removeprefix("rank-")) for file in _reports_in(folder)]
    size = grid.size if grid else max(ranks) + 1
    reports = read_reports(folder, size)
    grid = grid or _grid_of(folder, reports)
    if max(ranks) >= grid.size:
        raise ValueError(
            f"{folder}: there is a report of rank {max(ranks)}, but the layout tp={grid.tp},cp={grid.cp},pp={grid.pp},"
            f"dp={grid.dp} has {grid.size} ranks; give the layout of the run"
        )
    if not reports:
        raise ValueError(f"{folder}: none of the reports can be read; they are damaged")
    hang = diagnose(reports, grid)
    damaged = sorted({*ranks} - {*reports})
    notes = (f"the report of rank {join_ranks(damaged)} is damaged, and was left out",) if damaged else ()
    return Hang(hang.causes, hang.stuck, hang.doing, hang.silent, notes)


class _Places(msgspec.Struct):
    """Where a rank stands in the layout, which its report says besides."""

    tp: int
    cp: int
    pp: int
    dp: int


def _grid_of(folder: Path, reports: dict[int, RankReport]) -> Grid:
    """The smallest layout that has room for where the ranks say that they stand."""
    places = []
    for rank in reports:
        try:
            places.append(msgspec.json.decode((folder / f"rank-{rank:05d}.json").read_bytes(), type=_Places))
        except (msgspec.MsgspecError, OSError):
            continue
    if not places:
        raise ValueError(f"{folder}: the reports do not say which layout the run had; give it with --layout")
    return Grid(*(max(getattr(place, name) for place in places) + 1 for name in ("tp", "cp", "pp", "dp")))
