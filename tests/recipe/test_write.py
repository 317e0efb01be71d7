"""Recipes written for people: what says nothing is left out, what is left reads back, and no file is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.recipe import (
    Batch,
    BatchPhase,
    Data,
    Layout,
    Model,
    Optimizer,
    Output,
    Pipeline,
    Recipe,
    RopeScalingTable,
    Source,
    check,
    load,
)
from fourfold.recipe.write import commented_toml, write_new

RECIPE = Recipe(
    model=Model(preset="tiny", rope_scaling=RopeScalingTable(factor=4.0)),
    layout=Layout(tp=2, pp=2, zero=2),
    pipeline=Pipeline(virtual_stages=2, split=(1, 2, 3, 2)),
    batch=Batch(sequences=8, phases=(BatchPhase(after_tokens=10_000, sequences=16),)),
    data=Data(mix=(Source(source='with "quotes"', weight=2.0), Source(source="b"))),
    optimizer=Optimizer(betas=(0.9, 0.99)),
    output=Output(name="x"),
)


def read(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    return load(path)


class TestText:
    def test_reads_back(self, tmp_path: Path) -> None:
        assert read(tmp_path, commented_toml(RECIPE)) == RECIPE
        check(RECIPE)

    def test_leaves_out_what_is_usual(self) -> None:
        text = commented_toml(RECIPE)
        assert "tp = 2" in text
        for key in ("cp =", "dp =", "lr =", "[train]", "seed"):
            assert key not in text

    def test_keeps_what_is_asked_for(self, tmp_path: Path) -> None:
        text = commented_toml(RECIPE, always=("layout.cp", "train.dtype"))
        assert "cp = 1" in text
        assert 'dtype = "float32"' in text
        assert read(tmp_path, text) == RECIPE

    def test_comments(self, tmp_path: Path) -> None:
        text = commented_toml(
            RECIPE, header=("First line", "", "third"), comments={"layout": "four ranks", "layout.tp": "two each"}
        )
        assert text.startswith("# First line\n#\n# third\n\n[model]\n")
        assert "[layout]  # four ranks\n" in text
        assert "tp = 2    # two each\n" in text
        assert read(tmp_path, text) == RECIPE

    def test_a_recipe_of_defaults_is_empty(self, tmp_path: Path) -> None:
        text = commented_toml(Recipe())
        assert text == "\n"
        assert read(tmp_path, text) == Recipe(output=Output(name="x"))


class TestFile:
    def test_writes(self, tmp_path: Path) -> None:
        write_new(tmp_path / "a.toml", "x = 1\n")
        assert (tmp_path / "a.toml").read_text(encoding="utf-8") == "x = 1\n"
        assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]  # nothing is left beside it

    def test_may_be_repeated(self, tmp_path: Path) -> None:
        write_new(tmp_path / "a.toml", "x = 1\n")
        write_new(tmp_path / "a.toml", "x = 1\n")

    def test_overwrites_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "a.toml"
        path.write_text("mine", encoding="utf-8")
        with pytest.raises(ValueError, match="exists and says something else; remove it, or give another name"):
            write_new(path, "x = 1\n")
        assert path.read_text(encoding="utf-8") == "mine"
        (tmp_path / "folder.toml").mkdir()
        with pytest.raises(ValueError, match="exists"):
            write_new(tmp_path / "folder.toml", "x = 1\n")

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            write_new(tmp_path / "none" / "a.toml", "x = 1\n")
