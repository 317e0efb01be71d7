"""Recipes from files and overrides, every way of getting them wrong, and the way back to TOML."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.recipe import Recipe, RecipeError, from_table, load, to_toml

FIVE_LINES = """
[model]
preset = "tiny"
[batch]
sequences = 8
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "five.toml"
    path.write_text(FIVE_LINES)
    return path


def refusal(table: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as caught:
        from_table(table)
    return str(caught.value)


class TestLoad:
    def test_a_five_line_recipe_has_everything(self, recipe_file: Path) -> None:
        recipe = load(recipe_file)
        assert (recipe.model.preset, recipe.batch.sequences) == ("tiny", 8)
        assert (recipe.layout.tp, recipe.layout.zero, recipe.pipeline.schedule) == (1, "auto", "auto")
        assert recipe.output.name == "five"  # of the file

    def test_an_empty_file_is_a_recipe(self, tmp_path: Path) -> None:
        (tmp_path / "empty.toml").write_text("")
        assert load(tmp_path / "empty.toml", ["output.name=run"]) == Recipe()

    @pytest.mark.parametrize(
        ("override", "section", "key", "value"),
        [
            ("layout.tp=4", "layout", "tp", 4),
            ("layout.tp = 4", "layout", "tp", 4),
            ("model.tied=true", "model", "tied", True),
            ("optimizer.betas=[0.9,0.95]", "optimizer", "betas", (0.9, 0.95)),
            ("optimizer.lr=1", "optimizer", "lr", 1.0),
            ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
            ("optimizer.clip_norm_type=inf", "optimizer", "clip_norm_type", math.inf),
            ("data.source=/some/path", "data", "source", "/some/path"),
            ("data.source=/a=b", "data", "source", "/a=b"),
            ('data.source="/with space"', "data", "source", "/with space"),
            ("data.source=./with space", "data", "source", "./with space"),
            ("data.tokenizer=bpe:512", "data", "tokenizer", "bpe:512"),
            ("layout.zero=2", "layout", "zero", 2),
            ("layout.zero=auto", "layout", "zero", "auto"),
            ("pipeline.schedule=1f1b", "pipeline", "schedule", "1f1b"),
            ("pipeline.split=[4,4]", "pipeline", "split", (4, 4)),
            ("pipeline.split=ends_light", "pipeline", "split", "ends_light"),
            ("train.freeze=['layers.0']", "train", "freeze", ("layers.0",)),
            ("output.name=2026-11-29", "output", "name", "2026-11-29"),  # TOML would make a date of it
            ("output.name=7", "output", "name", "7"),
            ("model.preset=llama3.2-1b", "model", "preset", "llama3.2-1b"),
        ],
    )
    def test_overrides(self, recipe_file: Path, override: str, section: str, key: str, value: object) -> None:
        got = getattr(getattr(load(recipe_file, [override]), section), key)
        assert got == value
        assert type(got) is type(value)

    def test_an_override_reaches_a_nested_table(self, recipe_file: Path) -> None:
        scaling = load(recipe_file, ["model.rope_scaling.factor=16"]).model.rope_scaling
        assert isinstance(scaling, msgspec.Struct)
        assert msgspec.to_builtins(scaling)["factor"] == 16.0

    def test_the_last_override_wins(self, recipe_file: Path) -> None:
        assert load(recipe_file, ["batch.sequences=16", "batch.sequences=32"]).batch.sequences == 32


class TestRefusals:
    @pytest.mark.parametrize(
        ("table", "message"),
        [
            ({"layout": {"tpp": 2}}, "layout.tpp: unknown key; did you mean layout.tp?"),
            (
                {"pipeline": {"virtual_stage": 2}},
                "pipeline.virtual_stage: unknown key; did you mean pipeline.virtual_stages?",
            ),
            ({"layuot": {"tp": 2}}, "layuot: unknown key; did you mean layout?"),
            (
                {"optimizer": {"steps": 2}},
                "optimizer.steps: unknown key; did you mean train.steps or profile.steps or numerics.steps?",
            ),
            ({"batch": {"gpus_per_node": 2}}, "batch.gpus_per_node: unknown key; did you mean cluster.gpus_per_node?"),
            ({"tp": 2}, "tp: unknown key; did you mean layout.tp?"),
            ({"layout": {"qqqqqq": 2}}, "layout.qqqqqq: unknown key"),
            (
                {"model": {"rope_scaling": {"factr": 2}}},
                "model.rope_scaling.factr: unknown key; did you mean model.rope_scaling.factor?",
            ),
            ({"layout": 2}, "layout = 2: is a section; write keys under [layout]"),
            ({"layout": {"tp": "two"}}, 'layout.tp = "two": must be an integer'),
            ({"layout": {"tp": 2.0}}, "layout.tp = 2.0: must be an integer"),
            ({"layout": {"tp": True}}, "layout.tp = true: must be an integer"),
            ({"layout": {"zero": 4}}, 'layout.zero = 4: must be one of "auto", 1, 2, 3'),
            ({"layout": {"zero": "1"}}, 'layout.zero = "1": must be one of "auto", 1, 2, 3'),
            ({"layout": {"cp_split": "headtail"}}, '; nearest legal: "head_tail"'),
            ({"pipeline": {"schedule": "interleave"}}, '"flexible", "zb-h1"; nearest legal: "interleaved"'),
            ({"pipeline": {"split": [1, "a"]}}, 'must be one of "even", "ends_light" or a list of integers'),
            ({"pipeline": {"nc": "x"}}, 'pipeline.nc = "x": must be an integer'),
            ({"optimizer": {"betas": [0.9]}}, "optimizer.betas = [0.9]: must be a list of 2 numbers"),
            ({"optimizer": {"lr": "fast"}}, 'optimizer.lr = "fast": must be a number'),
            ({"optimizer": {"name": "adam"}}, 'must be one of "adamw", "sgd"; nearest legal: "adamw"'),
            ({"model": {"tied": "yes"}}, 'model.tied = "yes": must be true or false'),
            ({"model": {"rope_scaling": "off"}}, 'model.rope_scaling = "off": must be "none" or a table with factor'),
            ({"train": {"freeze": "layers.0"}}, 'train.freeze = "layers.0": must be a list of texts'),
            ({"train": {"dtype": "float16"}}, 'nearest legal: "bfloat16"'),
            ({"data": {"source": 3}}, "data.source = 3: must be text in quotes"),
        ],
    )
    def test_one_mistake_one_line(self, table: dict[str, Any], message: str) -> None:
        text = refusal(table)
        assert message in text
        assert "\n" not in text

    def test_all_mistakes_are_found(self) -> None:
        text = refusal({"layout": {"tp": "x", "ccp": 2}, "train": {"stepz": 3}, "bogus": {}})
        assert text.startswith("the recipe has 4 problems:\n  ")
        for part in ("layout.tp", "layout.ccp", "train.stepz", "bogus"):
            assert part in text

    @pytest.mark.parametrize("override", ["layout.tp", "tp=4", "=4", "layout.=4", ".tp=4", "lay out.tp=4", ""])
    def test_malformed_override(self, recipe_file: Path, override: str) -> None:
        with pytest.raises(
            RecipeError, match=r"override .*: must be section\.key=value, such as layout\.tp=4"
        ) as caught:
            load(recipe_file, [override])
        assert f'"{override}"' in str(caught.value)

    def test_override_below_a_value(self, recipe_file: Path) -> None:
        with pytest.raises(RecipeError, match=r"batch\.sequences holds a value, not keys"):
            load(recipe_file, ["batch.sequences.x=1"])

    def test_override_of_an_unknown_key(self, recipe_file: Path) -> None:
        with pytest.raises(RecipeError, match=r"layout\.tpp: unknown key; did you mean layout\.tp\?"):
            load(recipe_file, ["layout.tpp=2"])

    def test_override_cannot_smuggle_a_second_key(self, recipe_file: Path) -> None:
        with pytest.raises(RecipeError, match=r"layout\.tp"):
            load(recipe_file, ["layout.tp=2\nother = 3"])


class TestFiles:
    def test_syntax_error_has_file_and_line(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.toml"
        path.write_text("[layout]\ntp = 2\ncp = = 3\n")
        with pytest.raises(RecipeError) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}:3:")
        assert "not valid TOML" in str(caught.value)

    def test_syntax_error_at_the_end_of_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.toml"
        path.write_text("[layout]\ntp = [2,")
        with pytest.raises(RecipeError) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}:2:")

    def test_missing_file_offers_a_similar_one(self, recipe_file: Path) -> None:
        with pytest.raises(RecipeError, match=r"fiv\.toml: no such file; did you mean .*five\.toml\?"):
            load(recipe_file.with_name("fiv.toml"))

    def test_missing_file_without_a_similar_one(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match=r"no such file$"):
            load(tmp_path / "nowhere" / "x.toml")

    def test_a_directory(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match="is a directory; a recipe is a TOML file"):
            load(tmp_path)

    def test_not_text(self, tmp_path: Path) -> None:
        path = tmp_path / "bytes.toml"
        path.write_bytes(b"[layout]\ntp = 2 # \xff\n")
        with pytest.raises(RecipeError, match="line 2 is not UTF-8 text"):
            load(path)

    def test_several_problems_name_the_file(self, recipe_file: Path) -> None:
        with pytest.raises(RecipeError) as caught:
            load(recipe_file, ["layout.tp=x", "bad"])
        assert str(caught.value).startswith(f"{recipe_file} has 2 problems:")
        assert len(caught.value.problems) == 2


COUNTS = st.integers(min_value=-(2**62), max_value=2**62)
NUMBERS = st.floats(allow_nan=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
RECIPES = st.fixed_dictionaries(
    {},
    optional={
        "model": st.fixed_dictionaries(
            {},
            optional={
                "preset": TEXTS,
                "dim": COUNTS,
                "tied": st.booleans(),
                "rope_theta": NUMBERS,
                "rope_scaling": st.just("none")
                | st.fixed_dictionaries({}, optional={"factor": NUMBERS, "original_max_positions": COUNTS}),
            },
        ),
        "layout": st.fixed_dictionaries({}, optional={"tp": COUNTS, "zero": st.sampled_from(["auto", 1, 2, 3])}),
        "pipeline": st.fixed_dictionaries({}, optional={"split": st.just("even") | st.lists(COUNTS), "nc": COUNTS}),
        "data": st.fixed_dictionaries({}, optional={"source": TEXTS, "tokenizer": TEXTS}),
        "optimizer": st.fixed_dictionaries(
            {}, optional={"lr": NUMBERS, "betas": st.tuples(NUMBERS, NUMBERS).map(list)}
        ),
        "train": st.fixed_dictionaries({}, optional={"freeze": st.lists(TEXTS)}),
    },
)


class TestToml:
    @settings(max_examples=300, deadline=None)
    @given(RECIPES)
    def test_round_trip(self, table: dict[str, Any]) -> None:
        recipe = from_table(table)
        assert from_table(tomllib.loads(to_toml(recipe))) == recipe

    def test_every_key_is_written(self) -> None:
        written = tomllib.loads(to_toml(Recipe()))
        assert {f"{s}.{k}" for s, keys in written.items() for k in keys} >= {"layout.tp", "train.steps", "output.name"}
        assert written["pipeline"] == {
            "schedule": "auto",
            "virtual_stages": 1,
            "micro_batch": 1,
            "split": "even",
        }  # nc has no value

    def test_a_written_recipe_loads(self, recipe_file: Path, tmp_path: Path) -> None:
        recipe = load(recipe_file, ["layout.tp=2", "model.rope_scaling.factor=8"])
        (tmp_path / "copy.toml").write_text(to_toml(recipe))
        assert load(tmp_path / "copy.toml") == recipe
