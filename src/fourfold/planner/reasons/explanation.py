"""An explanation as data: sections of figures with their formulas, and how two layouts differ. `report` prints it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from fourfold.planner.search.paper import PaperAnswer

if TYPE_CHECKING:
    from fourfold.planner.search.search import Candidate, Plan

Unit = Literal[
    "", "count", "parameters", "FLOP", "FLOP/s", "FLOP/byte", "bytes", "tokens", "tokens/s", "GPUs", "s", "days",
    "GPU-hours", "dollars", "share", "layers", "steps",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit and where it comes from."""

    name: str
    value: float
    unit: Unit = ""
    formula: str = ""
    """With this job's numbers, so that a reader can repeat it."""


@dataclass(frozen=True, slots=True)
class Section:
    """One question of the walk and its answer."""

    key: str
    """A stable name, for programs: "parameters", "tp_bound"."""
    title: str
    sentence: str
    """The answer, with the numbers that decide it."""
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    """Where a number that is in circulation is another one, and why."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One dimension in which the layout that was found is not the paper's."""

    dimension: str
    found: int | str
    paper: int | str
    sentence: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The paper's layout beside the one that was found."""

    paper: PaperAnswer
    candidate: Candidate | None
    """The paper's layout judged by the same model; None where it does not fit, or the rules give none."""
    verdict: str
    """One sentence: which is faster, by how much, in how much memory."""
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a plan is as it is."""

    plan: Plan
    sections: tuple[Section, ...]
    comparison: Comparison

    def section(self, key: str) -> Section:
        """The section of this key. KeyError if there is none: without a layout that fits, some are missing."""
        for section in self.sections:
            if section.key == key:
                return section
        raise KeyError(key)


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """What `--explain --json` adds: sections and differences; docs/formats.md explains the keys."""
    comparison = explanation.comparison
    return {
        "sections": [asdict(section) for section in explanation.sections],
        "verdict": comparison.verdict,
        "differences": [asdict(difference) for difference in comparison.differences],
    }
