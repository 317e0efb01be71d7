"""How fast profiler traces are read, and in how much memory, beside HolisticTraceAnalysis 0.5.0 on the same files.

    ./run bench trace_reading [--json] [--hta FOLDER] [--without-hta]

Files shaped like those of PyTorch's profiler on a GPU (operators with their shapes, launches, arrows, kernels, NCCL's
arguments) are made in a temporary folder: one of 200 MB, plain and gzip, and 1,024 ranks of 1 MB. Every reading is a
process of its own, from the file to all that is kept of a rank; its processor time and its peak resident memory count,
and what it has resident before it reads is shown, too. The ranks are diagnosed, to the verdict. The other tool is
installed into an environment of its own, or taken from where `--hta` says it is; where it cannot be had, the report
says so.

Exits with 1 if a bar is missed: 40 MB of JSON per second and core, a peak of at most the inflated file and 100 MB,
1,024 ranks in 60 s on two cores, 3 times the speed and a third of the memory of the other tool.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _kineto_files import write_file

from fourfold.debugger.reading import read
from fourfold.debugger.slow import diagnose_traces
from fourfold.debugger.slow.idle import cut

LARGE_MB, SMALL_MB, RANKS, WORKERS = 200, 1, 1024, 2
RATE, SLACK_MB, SECONDS, FASTER, SMALLER = 40, 100, 60, 3, 3
OTHER = "HolisticTraceAnalysis==0.5.0"
_OTHER_READS = """
import sys, time, json, resource, logging
logging.disable(logging.CRITICAL)
from hta.common.trace import Trace
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
wall, cpu = time.perf_counter(), time.process_time()
trace = Trace(trace_files={0: sys.argv[1]}, trace_dir="")
trace.parse_traces(use_multiprocessing=False, use_memory_profiling=False)
rows = len(trace.get_trace(0))
print(json.dumps({"rows": rows, "cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall,
                  "before_mb": before / 1024, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def one(path: Path) -> dict[str, float]:
    """Reads a file in this process, and cuts up its steps: all that is done with a file before ranks are compared."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    trace = read(path)[0]
    cut(trace)
    return {
        "rows": len(trace.works.start) + len(trace.calls.start),
        "cpu": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
        "before_mb": before / 1024,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _in_process(command: list[str]) -> dict[str, float] | None:
    """What a process prints last, as JSON; None if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def ours(path: Path) -> dict[str, float]:
    """Of one reading in a process of its own."""
    found = _in_process([sys.executable, __file__, "--one", str(path)])
    if found is None:
        raise SystemExit(f"{path} could not be read")
    return found


def other_python(given: Path | None, folder: Path) -> Path | None:
    """The interpreter that has the other tool; None if it cannot be had."""
    if given is not None:
        return given / "bin" / "python"
    python = folder / "hta" / "bin" / "python"
    make = [sys.executable, "-m", "venv", str(folder / "hta")]
    install = [str(python), "-m", "pip", "install", "-q", OTHER, "pandas<3"]
    for command in (make, install):
        if subprocess.run(command, capture_output=True).returncode:
            return None
    return python


def many(folder: Path) -> dict[str, float]:
    """Seconds in which a folder of ranks is diagnosed, two files at a time."""
    for rank in range(RANKS):
        write_file(folder / f"rank-{rank:05d}.json", SMALL_MB, rank, RANKS)
    start = time.perf_counter()
    found = diagnose_traces(folder, workers=WORKERS)
    took = time.perf_counter() - start
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"ranks": len(found.ranks), "seconds": took, "cpu": children.ru_utime + children.ru_stime}


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """All figures."""
    with tempfile.TemporaryDirectory(prefix="trace-reading-") as name:
        folder = Path(name)
        small = folder / "ranks"
        small.mkdir()
        # First, while this process has no other children whose processor time would be counted.
        out: dict[str, object] = {"ranks": many(small)}
        files = {"json": folder / "rank-0.json", "gz": folder / "rank-0.json.gz"}
        sizes = {kind: write_file(path, LARGE_MB, 0, 4) / 1e6 for kind, path in files.items()}
        out["megabytes"] = sizes["json"]
        for kind, path in files.items():
            out[kind] = ours(path)
        python = None if arguments.without_hta else other_python(arguments.hta, folder)
        out["other"] = None if python is None else {
            kind: _in_process([str(python), "-c", _OTHER_READS, str(path)]) for kind, path in files.items()
        }  # fmt: skip
    return out


def bars(found: dict) -> list[tuple[str, float, float, bool]]:
    """Name, value, limit, and whether it is kept."""
    size = found["megabytes"]
    out = []
    for kind in ("json", "gz"):
        rate, peak = size / found[kind]["cpu"], found[kind]["peak_mb"] * 1.048576
        out += [(f"{kind}: MB/s/core", rate, RATE, rate >= RATE),
                (f"{kind}: peak, MB", peak, size + SLACK_MB, peak <= size + SLACK_MB)]  # fmt: skip
    seconds = found["ranks"]["seconds"]
    out.append((f"{RANKS:,} ranks of {SMALL_MB} MB: s", seconds, SECONDS, seconds <= SECONDS))
    for kind, other in (found["other"] or {}).items():
        if other is not None:
            faster, smaller = other["cpu"] / found[kind]["cpu"], other["peak_mb"] / found[kind]["peak_mb"]
            out += [(f"{kind}: times as fast as HTA", faster, FASTER, faster >= FASTER),
                    (f"{kind}: HTA's memory is times ours", smaller, SMALLER, smaller >= SMALLER)]  # fmt: skip
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hta", type=Path, help="an environment that has HolisticTraceAnalysis")
    parser.add_argument("--without-hta", action="store_true")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(one(arguments.one)))
        return 0
    found = measure(arguments)
    rows = bars(found)
    if arguments.json:
        named = [{"name": n, "value": v, "limit": limit, "ok": ok} for n, v, limit, ok in rows]
        print(json.dumps({**found, "bars": named}, indent=2))
    else:
        for name, value, limit, ok in rows:
            print(f"{name:<32} {value:>10.1f}   bar {limit:>7.1f}   {'ok' if ok else 'MISSED'}")
        if found["other"] is None:
            print(f"{OTHER}: not measured, since it could not be installed")
    return 0 if all(ok for *_, ok in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
