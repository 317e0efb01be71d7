"""The rules: one table of illegal combinations, and the odd ones that are legal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.layout import validate
from fourfold.recipe import Layout, Recipe, RecipeError, RunPlan, check, config_to_hf, from_table, preset

Table = dict[str, Any]


def recipe(keys: Table) -> Recipe:
    """{"layout.tp": 2} -> Recipe. Else the defaults: the tiny model (8 layers, width 64, 4 heads, 2 key-value)."""
    table: Table = {}
    for full, value in keys.items():
        *sections, key = full.split(".")
        here = table
        for section in sections:
            here = here.setdefault(section, {})
        here[key] = value
    return from_table(table)


def plan(keys: Table) -> RunPlan:
    return check(recipe(keys))


class Dead(fsspec.AbstractFileSystem):
    """A store that is not there, and says so in its own way."""

    protocol = "dead"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        raise RuntimeError(f"no route to {path.removeprefix('dead://').partition('/')[0]}")


# keys of the recipe | key that is blamed | its value | part of the rule | nearest legal values (None: not pinned)
ILLEGAL: list[tuple[Table, str, object, str, tuple[object, ...] | None]] = [
    ({"layout.tp": 0}, "layout.tp", 0, "at least 1", (1,)),
    ({"layout.cp": -2}, "layout.cp", -2, "at least 1", (1,)),
    ({"layout.pp": 0}, "layout.pp", 0, "at least 1", (1,)),
    ({"layout.dp": 0}, "layout.dp", 0, "at least 1", (1,)),
    ({"layout.tp": 3, "model.num_heads": 8}, "layout.tp", 3, "divide model.num_heads = 8", (2, 4)),
    ({"layout.tp": 8}, "layout.tp", 8, "divide model.num_heads = 4", (4,)),
    (
        {"layout.tp": 3, "model.num_heads": 6, "model.dim": 96},
        "layout.tp",
        3,
        "multiple of model.num_kv_heads = 2",
        (2,),
    ),
    ({"layout.tp": 4, "model.ffn_dim": 130}, "layout.tp", 4, "divide model.ffn_dim = 130", (2,)),
    ({"layout.tp": 2, "model.ffn_dim": 129}, "layout.tp", 2, "divide model.ffn_dim = 129", (1,)),
    (
        {"layout.tp": 16, "model.vocab_size": 261, "model.vocab_multiple": 6, "model.num_heads": 16, "model.dim": 128},
        "layout.tp",
        16,
        "padded vocabulary of 264 (model.vocab_multiple = 6)",
        (8,),
    ),
    ({"layout.pp": 2, "layout.dp": 5}, "batch.sequences", 16, "multiple of layout.dp = 5", (15, 20)),
    ({"batch.sequences": 4, "layout.dp": 8}, "batch.sequences", 4, "multiple of layout.dp = 8", (8,)),
    (
        {"batch.sequences": 10, "layout.dp": 4, "pipeline.micro_batch": 2},
        "batch.sequences",
        10,
        "multiple of layout.dp = 4",
        (8, 16),
    ),
    ({"pipeline.micro_batch": 3}, "pipeline.micro_batch", 3, "the 16 sequences of a DP group", (2, 4)),
    ({"pipeline.micro_batch": 32}, "pipeline.micro_batch", 32, "the 16 sequences of a DP group", (16,)),
    ({"pipeline.micro_batch": 0}, "pipeline.micro_batch", 0, "at least 1", (1,)),
    ({"batch.sequences": 0}, "batch.sequences", 0, "at least 1", (1,)),
    ({"batch.seq_len": 0}, "batch.seq_len", 0, "at least 1", (1,)),
    (
        {"pipeline.schedule": "1f1b", "pipeline.virtual_stages": 2, "layout.pp": 2},
        "pipeline.schedule",
        "1f1b",
        "pipeline.virtual_stages = 1, which is 2",
        ("interleaved", "flexible", "afab"),
    ),
    (
        {"pipeline.schedule": "zb-h1", "pipeline.virtual_stages": 4, "layout.pp": 2},
        "pipeline.schedule",
        "zb-h1",
        "pipeline.virtual_stages = 1, which is 4",
        ("interleaved", "flexible", "afab"),
    ),
    (
        {"pipeline.schedule": "interleaved", "layout.pp": 2},
        "pipeline.schedule",
        "interleaved",
        "virtual_stages of at least 2",
        ("1f1b", "flexible", "afab"),
    ),
    ({"pipeline.virtual_stages": 0}, "pipeline.virtual_stages", 0, "at least 1", (1,)),
    ({"pipeline.nc": 0}, "pipeline.nc", 0, "at least 1", (1,)),
    ({"pipeline.nc": 17, "layout.pp": 2}, "pipeline.nc", 17, "at most the 16 micro-batches", (16,)),
    (
        {"pipeline.nc": 6, "pipeline.schedule": "interleaved", "pipeline.virtual_stages": 2, "layout.pp": 4},
        "pipeline.nc",
        6,
        'pipeline.schedule = "interleaved" means 4',
        (4,),
    ),
    ({"pipeline.nc": 4, "pipeline.schedule": "afab"}, "pipeline.nc", 4, 'schedule = "afab" means 16', (16,)),
    ({"pipeline.nc": 4, "pipeline.schedule": "1f1b", "layout.pp": 2}, "pipeline.nc", 4, "means 2", (2,)),
    ({"pipeline.nc": 4, "pipeline.schedule": "zb-h1", "layout.pp": 2}, "pipeline.nc", 4, "means 2", (2,)),
    ({"pipeline.split": [8], "layout.pp": 2}, "pipeline.split", (8,), "one entry per stage, layout.pp = 2", ((4, 4),)),
    ({"pipeline.split": [4, 3], "layout.pp": 2}, "pipeline.split", (4, 3), "sum to model.num_layers = 8", ((4, 4),)),
    ({"pipeline.split": [9, -1], "layout.pp": 2}, "pipeline.split", (9, -1), "negative", ((4, 4),)),
    ({"pipeline.split": []}, "pipeline.split", (), "one entry per stage", ((8,),)),
    ({"model.num_layers": 0}, "model.num_layers", 0, "at least 1", (1,)),
    ({"model.num_heads": 5}, "model.num_heads", 5, "divide model.dim = 64", (4, 8)),
    ({"model.num_kv_heads": 3}, "model.num_kv_heads", 3, "divide model.num_heads = 4", (2, 4)),
    ({"model.num_kv_heads": 8}, "model.num_kv_heads", 8, "divide model.num_heads = 4", (4,)),
    ({"model.head_dim": 15}, "model.head_dim", 15, "even", (14, 16)),
    ({"model.dim": 60}, "model.dim", 60, "even multiple of model.num_heads = 4", (56, 64)),
    ({"model.vocab_size": 0}, "model.vocab_size", 0, "at least 1", (1,)),
    ({"model.vocab_multiple": 0}, "model.vocab_multiple", 0, "at least 1", (1,)),
    ({"model.rope_theta": 0.0}, "model.rope_theta", 0.0, "greater than 1", ()),
    ({"model.norm_eps": 0.0}, "model.norm_eps", 0.0, "greater than 0", ()),
    ({"model.rope_scaling.factor": 0.5}, "model.rope_scaling.factor", 0.5, "at least 1", (1,)),
    (
        {"model.rope_scaling.low_freq_factor": 4.0},
        "model.rope_scaling.high_freq_factor",
        4.0,
        "greater than low_freq_factor = 4",
        (),
    ),
    ({"model.preset": "llama3-7b"}, "model.preset", "llama3-7b", "one of llama3-8b", ("llama3-70b",)),
    ({"model.path": "/no/such/dir"}, "model.path", "/no/such/dir", "No such file", ()),
    ({"data.tokenizer": "byte"}, "data.tokenizer", "byte", "path of a tokenizer.json", ("bytes",)),
    ({"data.tokenizer": "bpe"}, "data.tokenizer", "bpe", "number of entries", ("bpe:512",)),
    ({"data.tokenizer": "bpe:128"}, "data.tokenizer", "bpe:128", "at least 257", ("bpe:257",)),
    ({"data.source": ""}, "data.source", "", "folder or file", ()),
    ({"optimizer.lr": 0.0}, "optimizer.lr", 0.0, "greater than 0", ()),
    ({"optimizer.lr": math.inf}, "optimizer.lr", math.inf, "finite", ()),
    ({"optimizer.lr": math.nan}, "optimizer.lr", None, "greater than 0", ()),
    ({"optimizer.betas": [0.9, 1.0]}, "optimizer.betas", (0.9, 1.0), "less than 1", ()),
    ({"optimizer.momentum": 0.9}, "optimizer.momentum", 0.9, 'only optimizer.name = "sgd"', (0.0,)),
    ({"optimizer.weight_decay": -0.1}, "optimizer.weight_decay", -0.1, "at least 0", (0,)),
    ({"optimizer.warmup_steps": -1}, "optimizer.warmup_steps", -1, "at least 0", (0,)),
    ({"optimizer.min_lr_ratio": 1.5}, "optimizer.min_lr_ratio", 1.5, "at most 1", (1,)),
    ({"optimizer.clip_norm": -1.0}, "optimizer.clip_norm", -1.0, "at least 0", (0,)),
    ({"optimizer.clip_norm_type": 1.0}, "optimizer.clip_norm_type", 1.0, "2.0 or inf", (2.0, math.inf)),
    ({"train.steps": 0}, "train.steps", 0, "at least 1", (1,)),
    ({"train.sanity_steps": -1}, "train.sanity_steps", -1, "at least 0", (0,)),
    ({"train.freeze": ["layer.0"]}, "train.freeze", "layer.0", "matches no parameter", ("layers.0",)),
    ({"train.freeze": ["layers.8"]}, "train.freeze", "layers.8", "matches no parameter", None),
    (
        {"train.freeze": ["tok_embeddings", "layers", "norm", "output"]},
        "train.freeze",
        ("tok_embeddings", "layers", "norm", "output"),
        "leaves no parameter to train",
        (),
    ),
    ({"cluster.gpus_per_node": 0}, "cluster.gpus_per_node", 0, "at least 1", (1,)),
    (
        {"train.device": "cuda", "layout.tp": 4, "layout.pp": 3},
        "cluster.gpus_per_node",
        8,
        "divide the 12 ranks",
        (6, 12),
    ),
    ({"output.name": "a/b"}, "output.name", "a/b", "one folder", ()),
    ({"output.name": ".."}, "output.name", "..", "one folder", ()),
    ({"output.dir": ""}, "output.dir", "", "not be empty", ("runs",)),
    ({"output.action_log_every": -5}, "output.action_log_every", -5, "at least 0", (0,)),
]


class TestIllegal:
    @pytest.mark.parametrize(("keys", "key", "value", "rule", "nearest"), ILLEGAL)
    def test_refused_by_key_value_rule_and_nearest(
        self, keys: Table, key: str, value: object, rule: str, nearest: tuple[object, ...] | None
    ) -> None:
        with pytest.raises(RecipeError) as caught:
            plan(keys)
        (problem,) = caught.value.problems
        assert problem.key == key
        assert value is None or problem.value == value
        assert rule in problem.rule
        assert nearest is None or problem.nearest == nearest
        assert str(caught.value).startswith(f"{key} = ")

    @pytest.mark.parametrize(("keys", "key", "value", "rule", "nearest"), ILLEGAL)
    def test_every_nearest_value_is_legal(
        self, keys: Table, key: str, value: object, rule: str, nearest: tuple[object, ...] | None
    ) -> None:
        """The advice is followed word for word and must work: no second refusal."""
        if key == "train.freeze":
            return  # the problem's value is one entry of the list
        with pytest.raises(RecipeError) as caught:
            plan(keys)
        for better in caught.value.problems[0].nearest:
            plan({**keys, key: list(better) if isinstance(better, tuple) else better})

    def test_the_message_is_as_specified(self) -> None:
        with pytest.raises(RecipeError) as caught:
            plan({"layout.tp": 3, "model.num_heads": 8, "model.ffn_dim": 192, "model.vocab_multiple": 48})
        assert str(caught.value) == "layout.tp = 3: must divide model.num_heads = 8; nearest legal: 2, 4"

    def test_all_problems_at_once(self) -> None:
        with pytest.raises(RecipeError) as caught:
            plan(
                {
                    "layout.tp": 3,
                    "layout.dp": 5,
                    "pipeline.schedule": "interleaved",
                    "train.steps": 0,
                    "optimizer.lr": -1.0,
                    "train.freeze": ["nothing"],
                }
            )
        assert {problem.key for problem in caught.value.problems} == {
            "layout.tp",
            "batch.sequences",
            "pipeline.schedule",
            "train.steps",
            "optimizer.lr",
            "train.freeze",
        }
        assert str(caught.value).startswith("the recipe has 6 problems:\n  ")

    def test_preset_and_path_exclude_each_other(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config_to_hf(preset("tiny"))))
        with pytest.raises(RecipeError, match=r'cannot be given with model\.preset = "tiny"'):
            plan({"model.preset": "tiny", "model.path": str(tmp_path)})

    @pytest.mark.parametrize(
        ("text", "rule"),
        [("{", "cannot be used"), ("[1]", "cannot be used"), ('{"model_type": "gpt2"}', "model_type = 'gpt2'")],
    )
    def test_a_config_that_is_no_llama(self, tmp_path: Path, text: str, rule: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(RecipeError, match=r"^model\.path = ") as caught:
            plan({"model.path": str(tmp_path)})
        assert rule in str(caught.value)

    def test_a_path_may_be_a_url(self, tmp_path: Path) -> None:
        config = config_to_hf(preset("tiny")) | {"num_hidden_layers": 3}
        (tmp_path / "config.json").write_text(json.dumps(config))
        for url in (f"file://{tmp_path}", f"local://{tmp_path}/"):
            assert plan({"model.path": url}).config.num_layers == 3

    @pytest.mark.parametrize(
        ("url", "rule"),
        [
            (
                "nowhere://x",
                "must be a checkpoint, as it is a URL; nowhere://x cannot be opened: Protocol not known: nowhere",
            ),
            ("memory://x/", "must be a checkpoint, as it is a URL; memory://x/config.json: No such file or directory"),
            ("dead://x", "must be a checkpoint, as it is a URL; dead://x/config.json cannot be read: no route to x"),
            (
                "file:///no/such",
                "must be a directory in Hugging Face format; /no/such/config.json: No such file or directory",
            ),
        ],
    )
    def test_a_url_that_cannot_be_read(self, url: str, rule: str) -> None:
        fsspec.register_implementation("dead", Dead, clobber=True)
        with pytest.raises(RecipeError) as caught:
            plan({"model.path": url})
        assert str(caught.value) == f'model.path = "{url}": {rule}'

    def test_types_are_checked_when_a_recipe_is_made_in_python(self) -> None:
        with pytest.raises(RecipeError, match=r'layout\.tp = "2": must be an integer'):
            check(Recipe(layout=Layout(tp="2")))  # type: ignore[arg-type]


LEGAL: list[Table] = [
    {},
    {"layout.pp": 4, "pipeline.virtual_stages": 2, "batch.sequences": 9},
    {"layout.pp": 4, "pipeline.virtual_stages": 2, "batch.sequences": 9, "pipeline.nc": 5},
    {"layout.pp": 4, "pipeline.virtual_stages": 2, "batch.sequences": 1},
    {"layout.pp": 4, "pipeline.virtual_stages": 2, "batch.sequences": 13, "pipeline.nc": 2},
    {"layout.pp": 4, "pipeline.virtual_stages": 3},  # 12 stages for 8 layers: some stay empty
    {"layout.tp": 4},  # fewer key-value heads than ranks
    {"layout.tp": 4, "model.num_kv_heads": 1},
    {"layout.tp": 2, "model.vocab_size": 261},
    {"layout.tp": 2, "layout.cp": 2, "batch.seq_len": 63},
    {"batch.seq_len": 1},
    {"layout.cp": 7, "batch.seq_len": 5},
    {"layout.pp": 3},
    {"layout.dp": 3, "batch.sequences": 9},
    {"layout.pp": 8, "model.num_layers": 3},
    {"layout.pp": 2, "pipeline.split": [8, 0]},
    {"layout.pp": 2, "pipeline.virtual_stages": 2, "pipeline.split": [1, 3, 3, 1]},
    {"layout.pp": 2, "pipeline.schedule": "flexible"},
    {"layout.pp": 4, "pipeline.schedule": "1f1b", "pipeline.nc": 4},
    {"layout.pp": 4, "pipeline.schedule": "zb-h1", "pipeline.nc": 4},
    {"layout.pp": 4, "pipeline.schedule": "afab", "pipeline.nc": 16},
    {"layout.zero": 3, "layout.dp": 2, "layout.pp": 2, "pipeline.virtual_stages": 2},
    {"model.head_dim": 10},
    {"model.num_layers": 7, "layout.pp": 2, "pipeline.split": "ends_light"},
    {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.clip_norm_type": math.inf},
    {"optimizer.warmup_steps": 1000, "train.steps": 5},
    {"train.device": "cuda", "layout.tp": 4, "layout.dp": 4},
    {"train.device": "cuda", "layout.pp": 3},
    {"train.freeze": ["tok_embeddings", "layers.0", "layers.1.attention.wq.weight"]},
    {"data.source": "/nowhere/yet", "data.tokenizer": "/nowhere/tokenizer.json"},  # looked at when data is prepared
    {"data.tokenizer": "bpe:512"},
]


class TestLegal:
    @pytest.mark.parametrize("keys", LEGAL)
    def test_odd_but_legal(self, keys: Table) -> None:
        got = plan(keys)
        assert [i for stage in got.stages for i in stage.layers] == list(range(got.config.num_layers))
        assert len(got.stages) == got.grid.pp * got.schedule.v
        assert got.schedule.zero == got.zero
        validate(got.schedule)

    def test_every_preset(self) -> None:
        for name in ("llama3-8b", "llama3-70b", "llama3-405b", "llama3.2-1b", "llama3.2-3b", "small", "tiny"):
            assert plan({"model.preset": name}).config == preset(name)

    def test_layers_are_never_lost(self) -> None:
        """pains T14: 30 layers over 4 stages stay 30."""
        for layers in range(1, 34):
            for pp in range(1, 9):
                for v in (1, 3):
                    got = plan({"model.num_layers": layers, "layout.pp": pp, "pipeline.virtual_stages": v})
                    assert [i for stage in got.stages for i in stage.layers] == list(range(layers))


SMALL = st.sampled_from([1, 2, 4, 8, 3, 6, 12, 9, 5, 0, -1])
INTEGER_KEYS = [
    *(f"layout.{key}" for key in ("tp", "cp", "pp", "dp")),
    *(f"pipeline.{key}" for key in ("virtual_stages", "nc", "micro_batch")),
    *(
        f"model.{key}"
        for key in ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size", "head_dim")
    ),
    "model.vocab_multiple",
    "batch.sequences",
]
FREE_KEYS: dict[str, Any] = {
    "pipeline.schedule": st.sampled_from(["auto", "afab", "1f1b", "interleaved", "flexible", "zb-h1"]),
    "layout.zero": st.sampled_from(["auto", 1, 2, 3]),
    "pipeline.split": st.sampled_from(["even", "ends_light"]) | st.lists(SMALL, max_size=4),
}


@settings(max_examples=400, deadline=None)
@given(st.fixed_dictionaries({}, optional={**dict.fromkeys(INTEGER_KEYS, SMALL), **FREE_KEYS}))
def test_every_recipe_is_a_sound_plan_or_refused(keys: Table) -> None:
    """No other exception, and what is not refused is complete and free of deadlock."""
    try:
        got = plan(keys)
    except RecipeError:
        return
    validate(got.schedule)
    assert got.num_micro_batches * got.recipe.pipeline.micro_batch * got.grid.dp == got.recipe.batch.sequences


def test_recipes_are_immutable() -> None:
    with pytest.raises(AttributeError):
        Recipe().layout.tp = 2  # type: ignore[misc]
    assert hash(msgspec.structs.replace(Recipe()))
