"""Figures 3 and 4: flexible rounds and the lives of gradients, against the paper's text and drawing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fourfold.layout import generate
from fourfold.layout.actions import Kind
from fourfold.simulator.figures import figure3, figure4
from fourfold.simulator.figures.figure import Panel, Values


def test_bubbles_of_figure_3_are_those_of_the_table() -> None:
    """facts.md 2.2, P2P sensitivity, in percent."""
    table = {
        "1F1B, nc 4": (3.57, 4.64, 5.71, 7.86),
        "flexible, nc 6": (3.57, 3.69, 3.81, 4.05),
        "nc 3: AFAB": (3.57, 3.69, 3.81, 4.05),
    }
    panel = figure3.figure().panels[0]
    ours = {series.name: tuple(numbers(series.ours)) for series in panel.series}
    for name, values in table.items():
        assert ours[name] == pytest.approx(values, abs=0.005), name
    for series in panel.series:  # without messages, the paper's (pp - 1) / (nmb v)
        assert series.ours["0%"] == pytest.approx(100 * 3 / (12 * 7))


def test_more_in_flight_is_what_the_paper_says() -> None:
    """(nc - pp)(v - 1) more; and the peaks on rank 0 of the table in facts.md 2.2: 31, 43, 79 and, of AFAB, 84."""
    (series,) = figure3.figure().panels[2].series
    assert numbers(series.ours) == [0, (6 - 4) * (7 - 1), (12 - 4) * (7 - 1), 84 - 31]
    assert [figure3.in_flight(nc) for nc in (4, 6, 12, 3)] == [31, 43, 79, 84]
    assert figure3.schedule(3).kind == "afab"


def test_figure_3_has_no_published_values() -> None:
    assert figure3.figure().compared() == ()


def test_only_more_micro_batches_than_ranks_hide_messages() -> None:
    (series,) = figure3.figure().panels[1].series
    plain, *flexible = numbers(series.ours)
    assert plain == pytest.approx(0.8, abs=0.1)  # as far behind as in Figure 9, which is printed to 0.1
    # 1F1B waits for every round trip, the others only while the pipeline fills and drains: by hand 2 (pp - 1) hops.
    assert flexible == pytest.approx([100 * 2 * 3 * 0.042 / (3 * (12 * 7 + 3) + 2 * 3 * 0.042)] * 3)


def test_figure_4_is_what_was_drawn() -> None:
    reductions, most, mean, *_ = figure4.figure().panels
    for panel in (reductions, most):
        (series,) = panel.series
        assert series.ours == series.published, panel.title
    lasting, afab, same, short = numbers(mean.series[0].ours)
    assert afab == same < short < 1 < lasting


@pytest.mark.parametrize("mode", figure4.MODES)
def test_lives_of_gradients_against_the_list_of_actions(mode: str) -> None:
    """The same counts from the rank's list alone: a sum from a backward on, until its reduction."""
    kind, zero = figure4.MODES[mode]
    schedule = generate(pp=4, v=4, num_micro_batches=8, kind=kind, zero=zero, messages=False)
    alive: set[int] = set()
    most = chunks = 0
    for action_kind, stage, _ in schedule.actions[figure4.RANK]:
        if action_kind is Kind.BACKWARD:
            alive.add(stage)
        elif action_kind is Kind.REDUCE:
            alive.remove(stage)
            chunks += 1
        most = max(most, len(alive))
    panels = {panel.title: panel for panel in figure4.figure().panels}
    assert value(panels["Most chunks alive at once"], mode) == most
    assert value(panels["Reduce-scatters per step"], mode) == chunks
    by_chunk = {series.name: tuple(numbers(series.ours)) for series in panels["When a chunk's gradients appear"].series}
    assert by_chunk[mode] == tuple(sorted(by_chunk[mode], reverse=True))  # the last chunk's come first


def numbers(values: Values) -> list[float]:
    """All of them; none is missing."""
    return list(present(values.values()))


def present(values: Iterable[float | None]) -> Iterable[float]:
    for number in values:
        assert number is not None
        yield number


def value(panel: Panel, label: str) -> float | None:
    return panel.series[0].ours[label]
