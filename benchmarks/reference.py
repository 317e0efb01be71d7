"""The demo beside its ordered reference, layout by layout, in fp32 and bf16: equal to the bit, or where not.

Trains recipes/demo.toml for a few steps under every layout of the list, makes the same sums in the same order in one
process, and trains the plain model. Prints whether job and reference are equal to the bit, loss, gradients and weights
and what every operation gave, and how far the plain run is from them: how large order alone is. Exit code 1 if a layout
is not equal.

    ./run bench reference [--steps 3] [--json] [--dtype bfloat16] [--only tp2]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from fourfold.recipe import check, load
from fourfold.trainer.beside import run_beside

ROOT = Path(__file__).resolve().parent.parent
LAYOUTS = (  # tp, cp, pp, dp, virtual stages, ZeRO mode
    (1, 1, 1, 1, 1, 1),
    (2, 1, 1, 1, 1, 1),
    (1, 2, 1, 1, 1, 1),
    (1, 1, 2, 1, 1, 1),
    (1, 1, 1, 2, 1, 1),
    (1, 1, 2, 1, 2, 1),
    (2, 2, 1, 1, 1, 1),
    (2, 1, 2, 1, 2, 1),
    (1, 2, 1, 2, 1, 3),
    (2, 1, 1, 2, 1, 2),
    (1, 1, 2, 2, 2, 2),
    (4, 1, 1, 1, 1, 1),
    (1, 1, 1, 2, 1, 3),
    (2, 2, 2, 2, 1, 3),
    (2, 2, 2, 2, 2, 1),
    (2, 2, 2, 2, 2, 2),
)
NAMES = ("layout.tp", "layout.cp", "layout.pp", "layout.dp", "pipeline.virtual_stages", "layout.zero")
SHORT = ("tp", "cp", "pp", "dp", "v", "zero")


def name_of(layout: tuple[int, ...]) -> str:
    """In short: what is not 1; ZeRO always."""
    return " ".join(f"{s}{n}" for s, n in zip(SHORT, layout, strict=True) if n > 1 or s == "zero")


def measure(layout: tuple[int, ...], dtype: str, steps: int) -> dict[str, object]:
    """One row of the table."""
    overrides = [f"{key}={value}" for key, value in zip(NAMES, layout, strict=True)]
    started = time.monotonic()
    found = run_beside(check(load(ROOT / "recipes" / "demo.toml", [*overrides, f"train.dtype={dtype}"])), steps=steps)
    plain = {kind.kind: kind.error for kind in found.plain.steps[0].kinds}
    return {
        "layout": name_of(layout),
        "dtype": dtype,
        "verdict": found.ordered.verdict.value,
        "compared": sum(kind.tensors for step in found.ordered.steps for kind in step.kinds),
        "equal": sum(kind.equal for step in found.ordered.steps for kind in step.kinds),
        "plain": found.plain.verdict.value,
        "order": plain.get("gradient"),
        "seconds": time.monotonic() - started,
    }


def main() -> int:
    """Measures all layouts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", default="", help="layouts whose name has this in it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for dtype in options.dtype:
        for layout in LAYOUTS:
            if options.only not in name_of(layout):
                continue
            row = measure(layout, dtype, options.steps)
            rows.append(row)
            if not options.json:
                print(
                    f"{row['layout']:24} {dtype:9} {row['verdict']:6} {row['equal']} of {row['compared']} tensors "
                    f"equal; plain run: {row['plain']}, worst gradient of step 1 off by {row['order']:.1e}; "
                    f"{row['seconds']:.0f} s",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows))
    return 0 if all(row["verdict"] == "same" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
