"""The whole grid of layouts against REF, of which the tests take a sample.

Every combination of tp, cp, pp and dp in {1, 2}, with ZeRO 1, 2 and 3, one and two virtual stages, tied and untied,
both CP splits, and one, three and four micro-batches; then deeper pipelines with every micro-batch count up to 17 and
every nc. Two SGD steps each, compared as in the tests: loss, gradients, norm, weights.

    ./run bench parity [--part 1/8] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.parallel.harness import Case, check_case


def grid() -> list[Case]:
    """All cases, each once."""
    cases = []
    for tp, cp, pp, dp in product((1, 2), repeat=4):
        for zero, v, tied, nmb in product((1, 2, 3), (1, 2), (False, True), (1, 3, 4)):
            split = "per_document" if cp > 1 and nmb == 3 else "head_tail"
            cases.append(Case(tp=tp, cp=cp, pp=pp, dp=dp, v=v, zero=zero, tied=tied, nmb=nmb, cp_split=split, steps=2))
    for pp, v in ((3, 1), (3, 2), (4, 1), (4, 2), (4, 3)):
        cases += [Case(pp=pp, v=v, nmb=nmb, layers=pp * v, steps=2) for nmb in range(1, 18)]
    for nmb in (5, 7, 9):
        cases += [
            Case(pp=3, v=2, nmb=nmb, nc=nc, schedule="flexible", zero=2, layers=6, steps=2) for nc in range(1, nmb + 1)
        ]
    return list(dict.fromkeys(cases))


def main() -> int:
    """Runs the grid, or a part of it, and lists what fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="I/N: every N-th case, beginning with the I-th")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    cases = grid()[part - 1 :: parts]
    failures, started = {}, time.monotonic()
    for number, case in enumerate(cases, 1):
        try:
            check_case(case)
        except (AssertionError, RuntimeError) as error:
            failures[case.name] = str(error)
        if sys.stderr.isatty():
            print(f"\r{number}/{len(cases)}, {len(failures)} failed ", end="", file=sys.stderr)
    seconds = time.monotonic() - started
    if options.json:
        print(json.dumps({"cases": len(cases), "failures": failures, "seconds": seconds}))
    else:
        for name, error in failures.items():
            print(f"{name}: {error}")
        print(
            f"{len(cases)} layouts, {len(cases) - len(failures)} agree with the reference to 1e-5, in {seconds:.0f} s"
        )
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
