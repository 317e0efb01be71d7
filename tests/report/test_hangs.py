"""How a hang is printed."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from fourfold.debugger.hangs import Cause, Hang, Stuck, Wait
from fourfold.layout import Coordinates
from fourfold.report.hangs import NO_CAUSE, NO_HANG, hang_text

WAIT = Wait("all_gather", 8, 2, 5, "[8] float32", 36.0, False, "tp", (6, 7), "")
STUCK = Stuck(WAIT, "tp 6-7", {6: 36.0}, (7,), {})
CAUSE = Cause(7, Coordinates(tp=1, cp=0, pp=3, dp=0), "work.py:7 f", 4, ("MainThread", ("a.py:1 f", "work.py:7 f")))
HANG = Hang((CAUSE,), (STUCK,), {7: "work.py:7 f"}, notes=("rank 3 is odd",))


def test_the_cause_and_a_table() -> None:
    assert (
        hang_text(HANG, head="HANG")
        == """\
HANG

cause: rank 7 (tp1 cp0 pp3 dp0): work.py:7 f; 4 wait for it

group   call                    stage  micro-batch  number  started (since)  missing
tp 6-7  all_gather [8] float32  2      5            8       6 (36.0 s)       7: work.py:7 f"""
    )


def test_with_the_stack_and_the_notes() -> None:
    text = hang_text(HANG, head="HANG", stacks=True)
    assert "\nstack of rank 7, MainThread, innermost last:\n  a.py:1 f\n  work.py:7 f\n" in text
    assert text.endswith("\n\nnote: rank 3 is odd")
    deep = replace(CAUSE, stack=("MainThread", tuple(f"a.py:{line} f" for line in range(40))))
    many = replace(HANG, causes=(deep,), notes=tuple(map(str, range(40))))
    lines = hang_text(many, head="HANG", stacks=True).splitlines()
    assert "  (25 frames outside of these)" in lines
    assert len(lines) < 45
    assert lines[-1] == "      and 28 more notes"


def test_without_a_layout_and_without_times() -> None:
    wait = Wait("0F1", 3, 0, 1, "", math.nan, False, "tp x cp", (6, 7), "")
    stuck = Stuck(wait, "tp x cp 6-7", {6: math.nan}, (7,), {})
    lines = hang_text(Hang((replace(CAUSE, place=None),), (stuck,), {}, "no log"), head="HANG").splitlines()
    assert lines[2] == "cause: rank 7: work.py:7 f; 4 wait for it"
    assert re.split(r"  +", lines[-1]) == ["tp x cp 6-7", "0F1", "0", "1", "3", "6", "7: work.py:7 f"]


def test_no_hang_and_no_cause_are_told_apart() -> None:
    assert hang_text(Hang((), (), {}), head="HANG").splitlines()[-1] == NO_HANG
    assert NO_CAUSE in hang_text(Hang((), (STUCK,), {}), head="HANG")


def test_who_called_what_if_they_do_not_agree() -> None:
    stuck = replace(STUCK, missing=(), calls={"all_gather [8] float32": (6,), "all_reduce [8] float32": (7,)})
    text = hang_text(Hang((), (stuck,), {}), head="HANG")
    assert "all_gather [8] float32 by 6 but all_reduce [8] float32 by 7" in text
    assert text.endswith("none")


def test_of_many_the_first_are_printed() -> None:
    causes = tuple(replace(CAUSE, rank=rank) for rank in range(256))
    rows = tuple(replace(STUCK, missing=tuple(range(100))) for _ in range(50))
    lines = hang_text(Hang(causes, rows, {}), head="HANG").splitlines()
    assert len(lines) < 35
    assert "       and 244 more ranks" in lines
    assert lines[-1] == "and 38 more"
    assert "; and 88 more" in lines[-2]
