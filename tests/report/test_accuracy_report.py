"""What `fourfold accuracy` prints: the figures, verdicts beside the bars, plain where it is no terminal."""

from __future__ import annotations

import io

from fourfold.planner.measured.accuracy import Accuracy, Bar, LayoutGroup
from fourfold.planner.measured.calibrate import CalibratedStack
from fourfold.planner.measured.memory_accuracy import FitScore, MemoryScore
from fourfold.planner.measured.scores import Score
from fourfold.planner.timing.stack import CONSTANT_UNITS, load_stack
from fourfold.report.accuracy import accuracy_text, print_accuracy, print_calibration

NOTHING = Score(0, None, None, None, None)
NO_MEMORY = MemoryScore(0, None, None, None, None)


def accuracy(**changes: object) -> Accuracy:
    values: dict[str, object] = {
        "half": "reported",
        "sets": {"bar_rows": Score(1226, 7.25, -1.5, 88.0, 9.75), "fp8": NOTHING},
        "sources": {"a": Score(1226, 7.25, -1.5, 88.0, 7.25)},
        "groups": (LayoutGroup("a: model [70B], 64 H100", "published", 7, 6, 0.8125, 1.0),),
        "rank_memory": MemoryScore(20, 0.4, 0.1, 1.25, 0.5),
        "peak_memory": NO_MEMORY,
        "fits": FitScore(100, 96.0, 40, 1, 60, 3),
        "rows": (),
        "peaks": (),
        "unscored": {"task: sft": 1, "mixture of experts": 1136},
        "bars": (
            Bar("bar_rows MAPE %", 7.25, "<= 8", True),
            Bar("tau", 0.5, ">= 0.7", False),
            Bar("fp8 MAPE %", None, "<= 12", None),
        ),
    }
    return Accuracy(**(values | changes))  # type: ignore[arg-type]


def lines(found: Accuracy) -> list[str]:
    return [" ".join(line.split()) for line in accuracy_text(found).splitlines()]


def test_figures() -> None:
    found = lines(accuracy())
    assert "16 bits, A100 and H100, 8 GPUs and more (bar_rows) 1,226 7.2 % -1.5 % 88.0 % 9.8 %" in found
    assert "a: model [70B], 64 H100 6 0.81 1.0 %" in found  # brackets are no markup
    assert "allocated by each pipeline rank (rank_memory) 20 0.4 % +0.1 % 1.2 % 0.5 %" in found
    assert found[0].startswith("Predicted against measured: the half of the configurations that was not calibrated on")
    assert any(line.startswith("fits or not: right for 96.0 % of 100 layouts. 1 of 40 that ran") for line in found)


def test_verdicts_stand_beside_the_bars() -> None:
    found = lines(accuracy())
    assert "bar_rows MAPE % 7.25 <= 8 ok" in found
    assert "tau 0.50 >= 0.7 missed" in found


def test_what_is_not_there_takes_no_line() -> None:
    found = lines(accuracy())
    assert not any("fp8" in line or "peak_memory" in line for line in found)
    empty = accuracy(sets={}, sources={}, groups=(), rank_memory=NO_MEMORY, fits=FitScore(0, None, 0, 0, 0, 0), bars=())
    assert len(lines(empty)) == 5  # one sentence, and what is not in the figures


def test_most_frequent_reason_first() -> None:
    assert lines(accuracy())[-2:] == ["mixture of experts 1,136", "task: sft 1"]


def test_many_groups_are_cut_to_those_of_most_layouts() -> None:
    groups = tuple(LayoutGroup(f"group {n}", "published", n, n, 1.0, 0.0) for n in range(5, 40))
    found = lines(accuracy(groups=groups))
    assert any(line.startswith("competing layouts, 12 of 35") for line in found)
    assert "group 39 39 1.00 0.0 %" in found
    assert "group 27 27 1.00 0.0 %" not in found


def test_plain_where_it_is_no_terminal() -> None:
    file = io.StringIO()
    print_accuracy(accuracy(), file=file)
    assert file.getvalue() == accuracy_text(accuracy()) + "\n"
    assert file.getvalue().isascii()
    assert "\x1b" not in file.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_pretty_on_a_terminal() -> None:
    file = Terminal()
    print_accuracy(accuracy(), file=file)
    assert "missed" in file.getvalue()
    assert not file.getvalue().isascii()  # rules between head and body


def test_calibration_names_every_constant_with_its_unit() -> None:
    stack = load_stack("standard")
    found = CalibratedStack(
        stack=stack, runs=7, sources="mine (7)", mean_error=0.031, bias=-0.004, open=dict.fromkeys(CONSTANT_UNITS, 0.25)
    )
    file = io.StringIO()
    print_calibration(found, file=file)
    text = [" ".join(line.split()) for line in file.getvalue().splitlines()]
    assert text[0].startswith("standard: 7 runs of mine (7). Mean error 3.1 %, bias -0.4 %; about nine of ten runs")
    for name, unit in CONSTANT_UNITS.items():
        assert f"{name} {float(getattr(stack.constants, name)):.4g} {unit} +-25 %" in text
    assert file.getvalue().isascii()
