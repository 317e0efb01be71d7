"""The demo against the same run on one process: their losses, step by step.

Trains recipes/demo.toml (16 ranks, all four dimensions) and recipes/demo-1.toml (one rank) for the first steps and
compares the losses. Exit code 1 if any differs by more than the bar, 1e-4 relative.

    ./run bench demo [--steps 10] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BAR = 1e-4


def losses(recipe: str, steps: int, folder: Path) -> list[float]:
    """Of a run of the first steps only. They are part of the warm-up, so their learning rates are the whole run's."""
    arguments = [f"train.steps={steps}", f"output.dir={folder}", "output.name=run"]
    command = [sys.executable, "-m", "fourfold.cli", "train", str(ROOT / "recipes" / recipe)]
    for argument in arguments:
        command += ["--set", argument]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def main() -> int:
    """Runs both and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        four, one = (losses(f"{name}.toml", options.steps, Path(folder) / name) for name in ("demo", "demo-1"))
    differences = [abs(a - b) / b for a, b in zip(four, one, strict=True)]
    if options.json:
        print(json.dumps({"demo": four, "demo-1": one, "largest_relative_difference": max(differences), "bar": BAR}))
    else:
        print("step     16 ranks       1 rank   relative difference")
        for step, (a, b, difference) in enumerate(zip(four, one, differences, strict=True), 1):
            print(f"{step:>4}  {a:>11.7f}  {b:>11.7f}   {difference:.1e}")
        print(f"largest relative difference {max(differences):.1e}, bar {BAR:.0e}")
    return int(max(differences) > BAR)


if __name__ == "__main__":
    sys.exit(main())
