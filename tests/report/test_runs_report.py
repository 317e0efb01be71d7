"""The table of runs: a line each, whatever is not known."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

from fourfold.debugger.hangs import NO_REPORT, Cause, Hang, Stuck, Wait
from fourfold.layout import Coordinates
from fourfold.report.hangs import NO_CAUSE, hang_text
from fourfold.report.runs import format_age, print_runs, runs_text
from fourfold.trainer.runs import RunSummary

NOW = 2_000_000_000.0
FULL = RunSummary(
    name="demo", folder="runs/demo", state="running", message=None, step=40, steps=80, loss=3.25,
    tokens_per_second=12_345.6, layout="tp2 cp2 pp2 dp2", checkpoint="step-00000020", last_write=NOW - 90, host="h",
    pid=1, started=None, ended=None,
)  # fmt: skip
EMPTY = RunSummary(
    name="[bold]x", folder="runs/x", state="unknown", message=None, step=None, steps=None, loss=None,
    tokens_per_second=None, layout=None, checkpoint=None, last_write=None, host=None, pid=None, started=None,
    ended=None,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain() -> None:
    failed = replace(
        FULL, name="b", state="failed", loss=float("nan"), message="rank 3 failed\nTraceback\n  ...\nValueError: bad"
    )
    head, *rows = runs_text([FULL, failed, EMPTY], now=NOW).splitlines()
    assert re.split(r"  +", head) == [
        "run", "state", "step", "loss", "tokens/s", "last write", "checkpoint", "layout", "message",
    ]  # fmt: skip
    assert [re.split(r"  +", row) for row in rows] == [
        ["demo", "running", "40/80", "3.2500", "12,346", "2 min ago", "step-00000020", "tp2 cp2 pp2 dp2"],
        ["b", "failed", "40/80", "not finite", "12,346", "2 min ago", "step-00000020", "tp2 cp2 pp2 dp2",
         "rank 3 failed: ValueError: bad"],
        ["[bold]x", "unknown", "-/-", "-", "-", "-", "-", "-"],
    ]  # fmt: skip


@pytest.mark.parametrize("causes", [True, False])
def test_of_a_hang_the_cause_is_shown(causes: bool) -> None:
    silent = Cause(2, Coordinates(tp=0, cp=0, pp=1, dp=0), NO_REPORT, 3)
    wait = Wait("all_gather", 4, 0, 0, "[32, 32]", 3.0, False, "tp", (0, 1), "")
    stuck = Stuck(wait, "tp 0-1", {1: 3.0}, (0,), {})
    hang = Hang((silent, replace(silent, rank=3)) if causes else (), (stuck,), {0: "waits in receive of pp 2 > 0"})
    head = "HANG: step 3 has taken 3.1 s. Reports: runs/b/hangs/step-00000003-abort"
    aborted = "RuntimeError: step 3 took longer than timeouts.abort = 3 s"
    message = f"rank 2 failed\n{aborted}\n{hang_text(hang, head=head)}"
    _, row = runs_text([replace(FULL, state="failed", message=message)], now=NOW).splitlines()
    shown = f"cause: rank 2 (tp0 cp0 pp1 dp0): {NO_REPORT}; 3 wait for it" if causes else NO_CAUSE
    assert row.endswith(f"  rank 2 failed: {shown}")


@pytest.mark.parametrize("columns", ["80", "140"])
def test_a_terminal_gets_colour_within_its_width(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    print_runs([FULL, EMPTY], now=NOW, file=out)
    assert "\x1b[" in out.getvalue()
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert max(map(len, shown.splitlines())) <= int(columns)
    assert all(part in shown for part in ("demo", "running", "40/80", "3.2500", "2 min ago"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "60 min"), (3600, "1 h"), (86_400 * 40, "40 d")],
)
def test_ages(seconds: float, text: str) -> None:
    assert format_age(seconds) == text
