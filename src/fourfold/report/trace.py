"""Chrome traces of simulated steps, as PyTorch's profiler would have written them on every rank.

They open in Perfetto, and they are what the debugger is tested on: groups, arguments and ranges are those of real
traces, faults are where they would be, and the clocks of hosts are wrong on request. What is true stands beside them in
truth.json. docs/formats.md has the form.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from fourfold.recipe import ranges
from fourfold.recipe.write import write_whole
from fourfold.report.trace_events import Processes, RankTrace
from fourfold.report.trace_groups import Groups, Sizes
from fourfold.report.trace_step import Step, slot_of
from fourfold.simulator.engine import simulate
from fourfold.simulator.played import Played
from fourfold.simulator.scenario import Scenario

MOST_RANKS = 256
"""Files that are written without being asked for by rank."""
MOST_SKEW_MS = 3.6e6
"""An hour. No clock is more wrong without anybody noticing."""
TRUTH = "truth.json"

_ORIGIN = 1_000_000_000  # ns: when the first step begins
_EPOCH = 1_774_000_000_000_000_000  # ns since 1970, of the traces' time 0
_TOGETHER = 16  # ranks whose events are made at once
_HELD = 2_000  # events of a rank that are held before they are written
_LEVEL, _GZIP = 5, 31  # of compression; zlib's code for gzip's form with the largest window


def write_traces(
    folder: Path,
    scenario: Scenario,
    played: Played,
    *,
    ranks: Sequence[int] | None = None,
    merged: bool = False,
    skew_ms: float = 0.0,
    seed: int = 0,
    steps: int = 1,
    sizes: Sizes | None = None,
    gpus_per_node: int = 8,
    compress: bool = False,
) -> tuple[Path, ...]:
    """Writes the traces of some steps, one file per rank, and truth.json beside them.

    Args:
        folder: is made if it is not there.
        scenario: what was simulated.
        played: its first step, simulated with `keep`.
        ranks: global ranks to write; None: all, if these are not too many.
        merged: one file, merged.json, in which each rank is a process.
        skew_ms: the clock of each host is wrong by up to so many milliseconds.
        seed: of the clocks.
        steps: how many; those after the first have other random variations, if the scenario has any.
        sizes: of messages; without, the traces do not tell them.
        gpus_per_node: ranks that share a host, and its clock.
        compress: write .json.gz.

    Returns:
        The traces, by rank.

    Raises:
        ValueError: what `check_traces` refuses, or a step that was not played for this.
        OSError: a file cannot be written; it names the file, and no half of one is left.
    """
    if not played.end and played.graph.nodes:
        raise ValueError("a trace needs the start and end of every node; simulate with keep=True")
    if played.graph is not scenario.graph or played.lanes != scenario.lanes:
        raise ValueError("what was played is not this scenario")
    paths = check_traces(
        folder,
        scenario.grid.size,
        ranks=ranks,
        merged=merged,
        skew_ms=skew_ms,
        steps=steps,
        gpus_per_node=gpus_per_node,
        compress=compress,
    )
    hosts = -(-scenario.grid.size // gpus_per_node)
    skews = np.random.default_rng(seed).uniform(-skew_ms, skew_ms, hosts) * 1e6
    offsets = np.rint(skews).astype(int).tolist()
    writer = _Writer(scenario, paths, offsets, sizes=sizes, gpus_per_node=gpus_per_node, merged=merged)
    try:
        seconds = writer.write(played, steps)
        (folder / TRUTH).unlink(missing_ok=True)  # it would be that of other traces
        writer.show()
    finally:
        writer.discard()
    truth = {
        "format": 1,
        "grid": dataclasses.asdict(scenario.grid),
        "gpus_per_node": gpus_per_node,
        "skew_ms": skew_ms,
        "seed": seed,
        "clock_offsets_ns": offsets,
        "step_seconds": seconds,
        "ranks": [*paths],
        "faults": _faults(scenario),
    }
    write_whole(folder / TRUTH, f"{json.dumps(truth, indent=1)}\n".encode())
    return tuple(dict.fromkeys(paths.values()))


def check_traces(
    folder: Path,
    size: int,
    *,
    ranks: Sequence[int] | None = None,
    merged: bool = False,
    skew_ms: float = 0.0,
    steps: int = 1,
    gpus_per_node: int = 8,
    compress: bool = False,
) -> dict[int, Path]:
    """Checks what can be wrong with traces before their step is played, and makes their folder.

    Args:
        folder, ranks, merged, skew_ms, steps, gpus_per_node, compress: as for `write_traces`.
        size: ranks of the cluster.

    Returns:
        The file of each rank that will be written.

    Raises:
        ValueError: more files than anybody wants, a rank that is not there, a number that makes no sense, or a folder
            that cannot be written to or holds other traces. It names the option.
    """
    chosen = _chosen(size, ranks, merged=merged)
    for name, value in (("--trace-steps", steps), ("cluster.gpus_per_node:", gpus_per_node)):
        if value < 1:
            raise ValueError(f"{name} {value}: must be at least 1")
    if not 0 <= skew_ms <= MOST_SKEW_MS:  # nor is it nan
        raise ValueError(f"--skew-ms {skew_ms:g}: must be between 0 and {MOST_SKEW_MS:.0f}, an hour")
    ending = ".json.gz" if compress else ".json"
    names = {rank: "merged" if merged else f"rank-{rank:05d}" for rank in chosen}
    paths = {rank: folder / f"{name}{ending}" for rank, name in names.items()}
    _check_folder(folder, {*paths.values()})
    return paths


def parse_ranks(text: str, size: int) -> tuple[int, ...]:
    """Ranks as a person lists them: 0-7,16. ValueError, naming the text and the rule."""
    try:
        return ranges.parse_ranks(text, size)
    except ValueError as error:
        raise ValueError(f"--trace-ranks {text}: must be ranks and ranges of them, as in 0-7,16: {error}") from None


def _chosen(size: int, ranks: Sequence[int] | None, *, merged: bool) -> list[int]:
    if ranks is None:
        if size > MOST_RANKS:
            would = "one trace that no viewer can open" if merged else f"{size:,} traces"
            raise ValueError(
                f"--trace: {size:,} ranks would be {would}; choose some with --trace-ranks, such as --trace-ranks 0-63 "
                f"(all that there are with --trace-ranks 0-{size - 1})"
            )
        return [*range(size)]
    wrong = [rank for rank in ranks if not 0 <= rank < size]
    if wrong or not ranks:
        raise ValueError(f"--trace-ranks: rank {wrong[0] if wrong else 'none'}: there are ranks 0 to {size - 1}")
    return sorted({*ranks})


def _check_folder(folder: Path, paths: set[Path]) -> None:
    """Makes the folder. Traces of other ranks in it would be read as part of these."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"--trace {folder}: is a file; give a folder") from None
    except OSError as error:
        raise ValueError(f"--trace {folder}: this folder cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"--trace {folder}: this folder cannot be written to")
    found = [
        path for pattern in ("rank-*.json", "merged.json") for end in ("", ".gz") for path in folder.glob(pattern + end)
    ]
    others = sorted(path.name for path in found if path not in paths)
    if others:
        raise ValueError(f"--trace {folder}: there are other traces in it, such as {others[0]}; choose an empty folder")


def _faults(scenario: Scenario) -> dict[str, object]:
    faults = scenario.faults
    return {
        "ranks": {str(rank): factor for rank, factor in faults.ranks.items()},
        "links": [[one, other, factor] for (one, other), factor in faults.links.items()],
        "cpus": {str(rank): seconds for rank, seconds in faults.cpus.items()},
        "jitter": faults.jitter,
        "seed": faults.seed,
        "sentences": list(faults.descriptions()),
    }


class _Writer:
    """Writes the files piece by piece, a step of a few ranks at a time, under other names until all are whole."""

    def __init__(
        self,
        scenario: Scenario,
        paths: dict[int, Path],
        offsets: Sequence[int],
        *,
        sizes: Sizes | None,
        gpus_per_node: int,
        merged: bool,
    ) -> None:
        self.scenario, self.paths, self.merged, self.gpus_per_node = scenario, paths, merged, gpus_per_node
        self.slot = slot_of(scenario)
        self.begins = _ORIGIN + max(map(abs, offsets))
        self._opened: set[Path] = set()
        self._begun: set[int] = set()
        self._packers = defaultdict(lambda: zlib.compressobj(_LEVEL, wbits=_GZIP))
        world = tuple(range(scenario.grid.size))
        one_channel = scenario.graph.receives != "asynchronous"
        self.traces = {
            rank: RankTrace(
                scenario.grid,
                Groups(scenario.grid, rank, world=world, one_channel=one_channel),
                Processes.of(rank, gpus_per_node, merged=merged),
                device=rank % gpus_per_node,
                offset=offsets[rank // gpus_per_node],
                slot=self.slot,
                sizes=sizes,
            )
            for rank in paths
        }

    def write(self, played: Played, steps: int) -> list[float]:
        """All steps. Their seconds."""
        seconds: list[float] = []
        begins = self.begins
        for number in range(steps):
            scenario = self._varied(number)
            if number and scenario.faults.jitter:
                played = simulate(scenario)
            step = Step(scenario, played, number=number + 1, begins=begins, slot=self.slot)
            for some in self._batches():
                self._write_step(step, some)
            seconds.append(played.step_seconds)
            begins += round(played.step_seconds * 1e9)
        for path in self._opened:
            self._append(path, "\n]}\n", is_last=True)
        return seconds

    def show(self) -> None:
        """Gives the files their names."""
        for path in sorted(self._opened):
            try:
                _partial(path).replace(path)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None

    def discard(self) -> None:
        """Removes what has not got its name."""
        for path in self._opened:
            _partial(path).unlink(missing_ok=True)

    def _varied(self, number: int) -> Scenario:
        """The scenario of a later step."""
        faults = self.scenario.faults
        return self.scenario.replace(faults=dataclasses.replace(faults, seed=faults.seed + number))

    def _batches(self) -> Iterator[list[int]]:
        """Ranks that are written at once: of one pipeline rank, whose computations are laid out once for all."""
        ranks = sorted(self.paths, key=lambda rank: (self.scenario.grid.coordinates(rank).pp, rank))
        for _, some in groupby(ranks, key=lambda rank: self.scenario.grid.coordinates(rank).pp):
            some = [*some]
            yield from (some[i : i + _TOGETHER] for i in range(0, len(some), _TOGETHER))

    def _write_step(self, step: Step, ranks: Sequence[int]) -> None:
        traces = [self.traces[rank] for rank in ranks]
        for trace in traces:
            self._begin(trace)
        step.write(traces, self._put)
        for trace in traces:
            self._put(trace, 1)

    def _put(self, trace: RankTrace, least: int = _HELD) -> None:
        if text := trace.take(least):
            self._append(self.paths[trace.groups.rank], f",\n{text}")

    def _append(self, path: Path, text: str, *, is_last: bool = False) -> None:
        data = text.encode()
        if path.suffix == ".gz":
            packer = self._packers[path]
            data = packer.compress(data) + (packer.flush() if is_last else b"")
        mode = "ab" if path in self._opened else "wb"  # what an earlier run may have left is no part of this
        self._opened.add(path)
        try:
            with _partial(path).open(mode) as file:
                file.write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None

    def _begin(self, trace: RankTrace) -> None:
        """What stands in a file before a rank's events, if they are its first."""
        rank = trace.groups.rank
        if rank in self._begun:
            return
        self._begun.add(rank)
        path = self.paths[rank]
        before = ",\n" if path in self._opened else self._header(rank)
        trace.metadata(self.begins)
        self._append(path, f"{before}{trace.take()}")

    def _header(self, rank: int) -> str:
        """The file up to its events."""
        grid = self.scenario.grid
        groups = self.traces[rank].groups.all()
        if self.merged:
            known = {group.name: group for one in self.traces.values() for group in one.groups.all()}
            groups = [known[name] for name in sorted(known, key=int)]
        info = {
            "backend": "nccl",
            **({} if self.merged else {"rank": rank}),
            "world_size": grid.size,
            "pg_count": len(groups),
            "pg_config": [group.config for group in groups],
        }
        values = {
            "schemaVersion": 1,
            "deviceProperties": [],
            "distributedInfo": info,
            "fourfold": self._of_job(rank),
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": _EPOCH,
            "traceName": self.paths[rank].name,
        }
        return json.dumps(values)[:-1] + ', "traceEvents": [\n'

    def _of_job(self, rank: int) -> dict[str, object]:
        """What no profiler knows: the layout, and how much of the work each pipeline rank should have."""
        scenario = self.scenario
        told: dict[str, object] = {
            "grid": dataclasses.asdict(scenario.grid),
            "shares": [round(share, 6) for share in scenario.work.shares(scenario.grid.pp)],
        }
        return told if self.merged else {**told, "host": f"node-{rank // self.gpus_per_node}"}


def _partial(path: Path) -> Path:
    """Its name until it is whole."""
    return path.with_name(f"{path.name}.partial")
