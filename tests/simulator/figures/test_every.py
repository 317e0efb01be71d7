"""All figures: every value off by more than the reading error has its sentence, in the figure and where it is shown."""

from __future__ import annotations

from functools import cache

import pytest

from fourfold.report.figures import counts, figures_json, figures_page, figures_text
from fourfold.simulator.figures.every import FIGURES
from fourfold.simulator.figures.figure import Difference, Figure, Panel, Point, Series, union

PANEL = Panel(
    "Speed", "%", "x",
    (Series("all", {"a": 100.0, "b": 50.0, "c": None, "d": 0.0}, {"a": 101.0, "b": 52.0, "c": 7.0, "d": 1.0}),),
    reading_error=1.0,
)  # fmt: skip
B = Point("Speed", "all", "b")


@cache
def figure(number: str) -> Figure:
    return FIGURES[number]()


class TestEvery:
    @pytest.mark.parametrize("number", FIGURES)
    def test_every_difference_has_its_sentence(self, number: str) -> None:
        made = figure(number)
        assert made.number == number
        assert not made.beyond() - union(one.points for one in made.differences)

    @pytest.mark.parametrize("number", FIGURES)
    def test_sentences_are_of_points_that_are_off(self, number: str) -> None:
        made = figure(number)
        for one in made.differences:
            assert one.points <= made.beyond()
            assert one.points or one.explained  # nothing is left unexplained of no value
        assert not [text for text in (*made.assumptions, *(d.text for d in made.differences)) if "nan" in text]

    @pytest.mark.parametrize("number", set(FIGURES) - {"3", "4"})
    def test_what_is_not_printed_is_said(self, number: str) -> None:
        assert any("Not printed" in assumption for assumption in figure(number).assumptions)

    def test_panels_have_names_of_their_own(self) -> None:
        """As points are told apart by them."""
        for number in FIGURES:
            titles = [panel.title for panel in figure(number).panels]
            assert len({*titles}) == len(titles)


class TestMarks:
    def shown(self, *differences: Difference) -> Figure:
        return Figure("0", "By hand", (PANEL,), (), differences)

    def test_beyond_by_hand(self) -> None:
        """a is off by the reading error itself, c has nothing to be compared with, and 1 is not more than 1."""
        assert PANEL.beyond() == {B}
        assert PANEL.beyond(labels=["a"]) == PANEL.beyond(series=["other"]) == frozenset()
        assert counts(self.shown()) == (3, 1, 1)
        assert counts(self.shown(Difference("why", PANEL.beyond()))) == (3, 1, 0)
        assert counts(self.shown(Difference("how much", PANEL.beyond(), explained=False))) == (3, 1, 1)

    def test_text(self) -> None:
        made = self.shown(Difference("nowhere"), Difference("so much", PANEL.beyond(), explained=False))
        text = figures_text([made])
        assert next(line for line in text.splitlines() if " b " in line).endswith("+4.0 %  [2]")
        assert next(line for line in text.splitlines() if " a " in line).endswith("+1.0 %  (reading)")
        assert next(line for line in text.splitlines() if " d " in line).endswith("+1  (reading)")
        assert "[1] nowhere\n  [2] Not explained: so much" in text
        assert "1 of 3 are off by more than the reading error, 1 of them not explained" in text

    def test_page(self) -> None:
        page = figures_page([figure("3"), self.shown(Difference("so much", PANEL.beyond()))], folder="here")
        assert "| 3 | Flexible numbers of consecutive micro-batches | - | - | - | - |" in page
        assert "| 0 | By hand | 3 | 2.5 % | 1 | 0 |" in page
        assert "![Figure 3: our values](here/figure-3.png)" in page
        assert "![Figure 0: published values beside ours](here/figure-0.png)" in page
        assert "1. so much" in page

    def test_json(self) -> None:
        (found,) = figures_json([self.shown(Difference("so much", PANEL.beyond(), explained=False))])
        point = {"panel": "Speed", "series": "all", "label": "b"}
        assert found["differences"] == [{"text": "so much", "explained": False, "points": [point]}]
