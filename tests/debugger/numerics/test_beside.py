"""`fourfold compare RECIPE --reference`: faults are called bugs and found, other orders of sums are called order."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.debugger.numerics.comparison import Verdict
from fourfold.recipe import check, load
from fourfold.trainer.beside import Beside, run_beside
from tests.debugger.numerics.faults import FAULTS, ORDERS, Change
from tests.trainer.runs import write_recipe

STEPS = 2


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on a little text."""
    return write_recipe(tmp_path_factory.mktemp("beside"))


def beside(recipe: Path, overrides: tuple[str, ...], patch: pytest.MonkeyPatch) -> Beside:
    patch.chdir(recipe.parent)
    return run_beside(check(load(recipe, overrides)), steps=STEPS)


@pytest.mark.parametrize("change", FAULTS, ids=lambda change: change.name)
def test_a_fault_is_a_bug_and_is_found(change: Change, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change.plant(monkeypatch)
    found = beside(recipe, change.recipe, monkeypatch).ordered
    assert found.verdict is Verdict.BUG
    assert found.first is not None
    assert (found.first.step, found.first.kind, found.first.name) == change.at
    assert found.first.rank in change.ranks
    assert found.first.micro_batch in change.micro_batches
    assert change.pattern in [finding.pattern for finding in found.findings]
    assert found.beyond is not None
    assert (found.beyond.step, found.beyond.kind, found.beyond.name) == change.at


@pytest.mark.parametrize("change", ORDERS, ids=lambda change: change.name)
def test_another_order_of_sums_is_order(change: Change, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change.plant(monkeypatch)
    found = beside(recipe, change.recipe, monkeypatch)
    assert found.ordered.verdict is Verdict.ORDER
    assert found.ordered.first is not None
    assert (found.ordered.first.step, found.ordered.first.kind, found.ordered.first.name) == change.at
    assert found.ordered.first.rank in change.ranks
    assert found.ordered.first.micro_batch in change.micro_batches
    assert found.plain.verdict is Verdict.ORDER


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_either_it_is_the_same(dtype: str, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("layout.tp=2", "layout.cp=2", "layout.pp=2", "layout.dp=2", f"train.dtype={dtype}")
    found = beside(recipe, overrides, monkeypatch)
    assert found.ordered.verdict is Verdict.SAME
    assert found.plain.verdict is Verdict.ORDER
    kinds = {kind.kind: kind for kind in found.ordered.steps[-1].kinds}
    assert all(kind.tensors == kind.equal > 0 for kind in kinds.values())
    assert kinds.keys() >= {"output", "arriving", "gradient", "weight"}
