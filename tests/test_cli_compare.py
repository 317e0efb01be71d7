"""`fourfold compare` as its users meet it: what is printed, its exit codes, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.comparing import compare
from fourfold.debugger.numerics.comparison import Pattern, Verdict
from fourfold.debugger.numerics.records import Kind
from fourfold.layout import Grid
from tests.answers import printed, refused
from tests.debugger.numerics.made import Made, slightly, whole_step
from tests.debugger.numerics.test_runs import altered, run_folder
from tests.trainer.runs import fourfold, write_recipe

FORMATS = Path(__file__).parents[1] / "docs" / "formats.md"
WQ = (Kind.OUTPUT, "layers.1.attention.wq")


@pytest.fixture
def right(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "right", made=Made())


@pytest.fixture
def order(tmp_path: Path) -> Path:
    """Another layout of the same."""
    tensors = {name: slightly(x) for name, x in whole_step().items()}
    return run_folder(tmp_path / "order", altered(0, 1e-6, 0, 0), made=Made(Grid(tp=2, dp=2), tensors))


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """One with half of one tensor at one token."""
    tensors = whole_step()
    tensors[WQ][29] *= 0.5
    return run_folder(tmp_path / "wrong", made=Made(Grid(tp=2, dp=2), tensors, per_dp_group=2))


def test_the_same(right: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(right, right) == 0
    lines = printed(capsys).splitlines()
    assert lines[0] == "The same to the bit: 86 tensors in step 1."
    assert "1     results of operations      30 of 30" in lines
    assert any(re.fullmatch(r"2 +5\.109877 +5\.109877 +equal .*", line) for line in lines)


def test_order(right: Path, order: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(order, right) == 0
    text = printed(capsys)
    assert text.startswith(
        "Order only: the runs differ first in step 1, the result of tok_embeddings, rank 0 (tp0 cp0 pp0 dp0), "
    )
    assert "nothing differs by more than order makes" in text
    assert "first:  order (tp2 cp1 pp1 dp2)\nsecond: right (tp1 cp1 pp1 dp1)\n" in text
    assert "2     5.109878     5.109877  2.0e-07" in text


def test_a_bug(right: Path, wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(wrong, right) == 1
    lines = printed(capsys).splitlines()
    assert lines[0].startswith(
        "A bug: step 1, the result of layers.1.attention.wq, rank 2 (tp0 cp0 pp0 dp1), micro-batch 0, "
        "token 5 of sequence 2: "
    )
    assert lines[2] == "At layers.1.attention.wq only micro-batch 0 of dp 1 is wrong."


def test_other_recipes(right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(run_folder(tmp_path / "lr", altered(0.1, 0, 0, 0), lr=0.5), right) == 1
    assert printed(capsys).startswith("Not the same run: the recipes differ in optimizer.lr (0.5 and 0.01).\n")


def test_json_has_the_keys_of_the_documentation(right: Path, wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(wrong, right, as_json=True) == 1
    found = json.loads(printed(capsys))
    assert (found["verdict"], found["beyond"]["name"], found["beyond"]["token"]) == (
        "bug", "layers.1.attention.wq", {"sequence": 2, "place": 5},
    )  # fmt: skip
    assert found["sentence"].startswith("A bug: ")
    section = re.split(r"\n## ", FORMATS.read_text().split("## A comparison\n")[1])[0]
    documented = {*re.findall(r"`([a-z_]+)`", section)}
    keys: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            keys.update(value)
            for each in value.values():
                collect(each)
        elif isinstance(value, list):
            for each in value:
                collect(each)

    collect(found)
    assert keys <= documented | {"tp", "cp", "pp", "dp"}
    assert all(f"`{verdict}`" in section for verdict in Verdict)
    assert all(f"`{pattern}`" in section for pattern in Pattern)


def test_mistakes(right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text("")
    for arguments, options, words in (
        ((right,), {}, "right: compared with what? Name a second run"),
        ((recipe,), {}, "a.toml: compared with what? Name a second run; or add --reference, to run this recipe"),
        ((recipe, right), {}, "a.toml: is a recipe; name the folder of its run, or take one recipe and --reference"),
        ((recipe, right), {"reference": True}, "--reference takes one recipe; leave out "),
        ((right, right), {"overrides": ("train.seed=3",)}, "--set: is for a recipe with --reference; leave it out"),
        ((right, tmp_path / "nowhere"), {}, "nowhere: there is no such file or folder"),
        ((right, right), {"steps": "3-1"}, "--steps 3-1 runs backwards; 1-3 is meant"),
        ((right, right), {"steps": "7"}, "steps 7-7: none of them has numbers or a loss in both runs"),
        ((recipe,), {"reference": True, "steps": "2-4"}, "--steps 2-4: with --reference it is how many steps to run"),
        ((tmp_path / "b.toml",), {"reference": True}, "b.toml: no such file"),
        ((recipe,), {"reference": True, "overrides": ("layout.tp=3",)}, "layout.tp"),
    ):
        assert compare(*arguments, **options) == 2  # type: ignore[arg-type]
        assert words in refused(capsys)


def test_beside_its_reference(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    done = fourfold(tmp_path, "compare", recipe.name, "--reference", "--steps", "1", "--set", "layout.tp=2")
    assert (done.code, done.err.count("\n")) == (0, 4)
    assert done.out.startswith("The same to the bit: ")
    assert "What lies between it and a plain run of one process is the order of sums, and makes:" in done.out
    done = fourfold(tmp_path, "compare", recipe.name, "--reference", "--steps", "1", "--json")
    found = json.loads(done.out)
    assert (found["verdict"], found["ordered"]["verdict"]) == ("same", "same")
