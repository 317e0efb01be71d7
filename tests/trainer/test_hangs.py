"""A run of the command line that hangs is ended by its watchdogs, and says why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fourfold.debugger.hangs import find_hang
from fourfold.trainer import join
from fourfold.trainer.batches import Loader
from tests.trainer.runs import metrics, train, write_recipe

LIMITS = ("step_factor=5", "step_minimum=0.8", "startup=2", "abort=3")


def test_a_loader_that_never_returns_ends_the_run_by_its_rank(tmp_path: Path) -> None:
    def patch() -> None:
        plain, calls = Loader.micro_batches, []

        def micro_batches(self: Loader, *args: Any) -> Any:
            calls.append(args)
            if len(calls) == 3 and join.dist.get_rank() == 2:
                time.sleep(1000)
            return plain(self, *args)

        Loader.micro_batches = micro_batches  # type: ignore[method-assign]

    write_recipe(tmp_path)
    done = train(tmp_path, "layout.tp=2", "layout.pp=2", *(f"timeouts.{limit}" for limit in LIMITS), patch=patch)
    assert done.code == 1
    assert done.seconds < 20
    report, error = done.err.split("\n\nerror: ")
    assert report.startswith("\nHANG: step 3 has taken ")
    lines = error.splitlines()
    assert lines[:2] == ["rank 2 failed", "RuntimeError: step 3 took longer than timeouts.abort = 3 s"]
    assert lines[4].startswith(f"cause: rank 2 (tp0 cp0 pp1 dp0): {__file__}:")
    assert lines[4].endswith("micro_batches; 3 wait for it")
    run = tmp_path / "runs" / "tiny"
    assert len(metrics(run)) == 2
    assert {path.name for path in (run / "hangs").iterdir()} == {"step-00000003", "step-00000003-abort"}
    assert len(list((run / "hangs" / "step-00000003").glob("rank-*.json"))) == 4
    (cause,) = find_hang(run).causes
    assert (cause.rank, cause.num_waiting) == (2, 3)
    assert cause.stack[1][-1].endswith("micro_batches")
