"""What any layout has saved, any other loads: weights and moments bitwise, and the next losses are the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fourfold.trainer.checkpoint import CheckpointStore, load_newest
from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import Case
from tests.trainer.saves import STATE, Parts, assert_same, build, merge

# Twelve sequences a step in every layout, so that all see the same batches.
LAYOUTS = {
    "single": Case(nmb=4, micro_batch=3),
    "pp4 v2": Case(pp=4, v=2, nmb=6, micro_batch=2),
    "pp3": Case(pp=3, nmb=4, micro_batch=3),
    "dp2 pp2": Case(dp=2, pp=2, nmb=2, micro_batch=3),
    "dp4": Case(dp=4, nmb=1, micro_batch=3, zero=2),
    "tp2 cp2": Case(tp=2, cp=2, nmb=2, micro_batch=6),
    "tp2 dp3": Case(tp=2, dp=3, nmb=1, micro_batch=4),
    "dp3 zero3": Case(dp=3, nmb=2, micro_batch=2, zero=3),
    "tp4": Case(tp=4, nmb=2, micro_batch=6),
}
TIED = {
    "tied": Case(nmb=2, micro_batch=6, v=2, tied=True),
    "tied pp2": Case(pp=2, nmb=4, micro_batch=3, tied=True),
    "tied tp2 dp2": Case(tp=2, dp=2, nmb=1, micro_batch=6, tied=True, zero=3),
}
CASES = {name: replace(case, layers=3) for name, case in (LAYOUTS | TIED).items()}
PAIRS = [
    ("pp4 v2", "single"), ("single", "pp3"), ("pp4 v2", "pp3"), ("pp3", "pp4 v2"), ("single", "pp4 v2"),
    ("dp2 pp2", "dp4"), ("dp2 pp2", "single"), ("dp2 pp2", "tp2 cp2"), ("dp4", "dp2 pp2"), ("tp2 cp2", "dp2 pp2"),
    ("single", "tp2 dp3"), ("tp2 dp3", "single"), ("tp2 dp3", "dp3 zero3"), ("dp3 zero3", "tp2 dp3"),
    ("dp4", "dp3 zero3"), ("dp3 zero3", "dp4"), ("tp2 dp3", "dp4"), ("tp4", "tp2 cp2"), ("tp2 dp3", "tp4"),
    ("tp4", "single"), ("single", "single"),
    *((source, target) for source, target in product(TIED, TIED) if source != target),
]  # fmt: skip


def run_and_save(name: str, folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    """Two steps and a checkpoint. Returns what was saved, and where it costs little the losses of three more steps."""
    case = CASES[name]

    def work(rank: int) -> tuple[Parts, list[float]]:
        own = build(case)
        own.train(0, 2)
        own.save(folder / name)
        return own.parts(), own.train(2, 5) if case.world == 1 else []

    reports = fork_ranks(case.world, work, timeout=100)
    return merge([parts for parts, _ in reports]), reports[0][1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Every layout's checkpoint, what it must hold, and the losses that follow: those of one process, for all."""
    folder = tmp_path_factory.mktemp("reshard")
    found = {name: run_and_save(name, folder) for name in CASES}
    return folder, {name: (whole, found["tied" if name in TIED else "single"][1]) for name, (whole, _) in found.items()}


def test_there_are_at_least_twenty_pairs() -> None:
    assert len(set(PAIRS)) >= 20


@pytest.mark.parametrize("target", CASES)
def test_loads_under_another_layout(saved: tuple[Path, dict[str, Any]], target: str) -> None:
    folder, truth = saved
    sources = [source for source, loading in PAIRS if loading == target]

    def work(rank: int) -> list[tuple[Parts, list[float]]]:
        own = build(CASES[target], seed=99)  # other weights, which loading has to replace
        found = []
        for source in sources:
            own.optimizer.state.clear()
            state = load_newest(
                own.model, own.optimizer, CheckpointStore(folder / source), own.groups, say=lambda line: None
            )
            assert state == STATE
            found.append((own.parts(), own.train(2, 5)))
        return found

    reports = fork_ranks(CASES[target].world, work, timeout=100)
    for number, source in enumerate(sources):
        assert_same(merge([report[number][0] for report in reports]), truth[source][0])
        assert reports[0][number][1] == pytest.approx(truth[source][1], rel=1e-6, abs=0), source
