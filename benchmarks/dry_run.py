"""How long a dry run of the 405B model takes, and how much memory: a rank of the first, a middle and the last stage.

Each rank is a process of its own, as `fourfold dry-run RECIPE --rank R` starts it: 8,192 tokens on 16,384 ranks, and
131,072 tokens with the layout that the planner finds and with the paper's cp 16. The bounds are 60 seconds and 8 GB a
rank; with each comes whether the planner agrees.

    ./run bench dry_run [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
JOBS: dict[str, list[str]] = {
    "8K": [str(RECIPES / "llama3-405b.toml")],
    "131K": [str(RECIPES / "llama3-405b-131k.toml")],
    "131K, cp 16": [str(RECIPES / "llama3-405b-131k.toml"), "--set", "layout.cp=16", "--set", "layout.dp=8"],
}
MOST_SECONDS, MOST_BYTES = 60, 8e9


def measure(job: list[str], rank: int) -> dict[str, Any]:
    """One rank in a process of its own."""
    command = [sys.executable, "-m", "fourfold.cli", "dry-run", *job, "--rank", str(rank), "--json"]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(process.returncode)
    (found,) = json.loads(printed)["ranks"]
    apart = [one["what"] for one in found["planner"] if not one["agrees"]]
    return {
        "rank": rank,
        "stages": found["stages"],
        "seconds": time.monotonic() - began,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "resident_bytes": used.ru_maxrss * 1024,
        "peak_bytes": found["peak"]["bytes"],
        "compared": len(found["planner"]),
        "apart": apart,
    }


def ranks_of(job: list[str]) -> list[int]:
    """The first TP, CP and DP rank of the first, a middle and the last pipeline rank."""
    from fourfold.recipe import check, load

    grid = check(load(Path(job[0]), job[2::2])).grid
    return [grid.rank(pp=pp) for pp in (0, grid.pp // 2, grid.pp - 1)]


def main() -> int:
    """Measures every rank, one after the other, and says whether all keep to the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {name: [measure(job, rank) for rank in ranks_of(job)] for name, job in JOBS.items()}
    if options.json:
        print(json.dumps(results))
    else:
        print(f"{'job':<12} {'rank':>6} {'seconds':>8} {'CPU':>6} {'resident':>9} {'its peak':>9}  planner")
        for name, ranks in results.items():
            for one in ranks:
                agrees = f"agrees in {one['compared']}" if not one["apart"] else f"differs: {', '.join(one['apart'])}"
                print(
                    f"{name:<12} {one['rank']:>6} {one['seconds']:>8.1f} {one['cpu_seconds']:>6.1f} "
                    f"{one['resident_bytes'] / 1e9:>6.2f} GB {one['peak_bytes'] / 2**30:>5.1f} GiB  {agrees}"
                )
    every = [one for ranks in results.values() for one in ranks]
    kept = all(one["cpu_seconds"] < MOST_SECONDS and one["resident_bytes"] < MOST_BYTES for one in every)
    return 0 if kept and not any(one["apart"] for one in every) else 1


if __name__ == "__main__":
    sys.exit(main())
