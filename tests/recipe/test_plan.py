"""What a plan derives from a legal recipe: the model, schedule and ZeRO mode, frozen stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.recipe import RecipeError, RunPlan, check, config_to_hf, from_table, preset

Table = dict[str, Any]


def plan(keys: Table) -> RunPlan:
    """{"layout.tp": 2} -> the plan of the tiny model with tp = 2."""
    table: Table = {}
    for full, value in keys.items():
        section, key = full.split(".")
        table.setdefault(section, {})[key] = value
    return check(from_table(table))


class TestModel:
    def test_overrides_of_a_preset(self) -> None:
        config = plan({"model.preset": "llama3.2-1b", "model.num_layers": 2, "model.tied": False}).config
        assert (config.num_layers, config.tied, config.dim, config.head_dim) == (2, False, 2048, 64)

    def test_head_dim_follows_the_width_unless_given(self) -> None:
        assert plan({"model.dim": 128}).config.head_dim == 32
        assert plan({"model.dim": 128, "model.head_dim": 16}).config.head_dim == 16

    def test_rope_scaling_over_the_preset(self) -> None:
        scaled = plan({"model.preset": "llama3-405b", "model.rope_scaling": {"factor": 16.0}}).config.rope_scaling
        assert scaled is not None
        assert (scaled.factor, scaled.low_freq_factor, scaled.original_max_positions) == (16.0, 1.0, 8192)
        assert plan({"model.preset": "llama3-405b", "model.rope_scaling": "none"}).config.rope_scaling is None
        assert plan({"model.rope_scaling": {}}).config.rope_scaling is not None

    def test_a_hugging_face_directory(self, tmp_path: Path) -> None:
        config = preset("llama3.2-1b")
        (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
        assert plan({"model.path": str(tmp_path)}).config == config
        assert plan({"model.path": str(tmp_path), "model.num_layers": 2}).config.num_layers == 2


class TestAuto:
    @pytest.mark.parametrize(
        ("keys", "kind", "zero"),
        [
            # facts.md section 9, check 5: pp = 16
            ({"layout.pp": 16, "pipeline.virtual_stages": 8, "batch.sequences": 32}, "interleaved", 1),
            ({"layout.pp": 16, "pipeline.virtual_stages": 8, "batch.sequences": 31}, "afab", 2),
            ({"layout.pp": 16, "pipeline.virtual_stages": 8, "batch.sequences": 16}, "afab", 2),
            ({"layout.pp": 16, "batch.sequences": 32}, "1f1b", 1),
            ({"layout.pp": 16, "batch.sequences": 64, "layout.dp": 2}, "1f1b", 1),
            ({"layout.pp": 16, "batch.sequences": 62, "layout.dp": 2}, "afab", 2),
            ({"batch.sequences": 1}, "afab", 2),
            ({"batch.sequences": 2}, "1f1b", 1),
            # an explicit choice of one leaves the rule for the other
            ({"layout.pp": 4, "batch.sequences": 4, "layout.zero": 1}, "afab", 1),
            ({"layout.pp": 4, "batch.sequences": 8, "layout.zero": 3}, "1f1b", 3),
            ({"layout.pp": 4, "batch.sequences": 4, "pipeline.schedule": "1f1b"}, "1f1b", 2),
            ({"layout.pp": 4, "batch.sequences": 8, "pipeline.schedule": "afab"}, "afab", 1),
            ({"layout.pp": 4, "batch.sequences": 12, "pipeline.nc": 6}, "flexible", 1),
            ({"layout.pp": 4, "batch.sequences": 6, "pipeline.nc": 5}, "flexible", 2),
        ],
    )
    def test_the_rule_of_the_paper(self, keys: Table, kind: str, zero: int) -> None:
        got = plan({"model.num_layers": 128, **keys})
        assert (got.schedule.kind, got.zero) == (kind, zero)
        assert got.schedule.fallback is None

    def test_the_reason_has_the_numbers(self) -> None:
        few = plan({"layout.pp": 16, "batch.sequences": 16}).zero_reason
        many = plan({"layout.pp": 16, "batch.sequences": 32}).zero_reason
        assert few.startswith("ZeRO-2: bs = 16 sequences per DP group < 2 x pp = 32")
        assert many.startswith("ZeRO-1: bs = 32 sequences per DP group >= 2 x pp = 32")
        assert plan({"layout.zero": 3}).zero_reason == "ZeRO-3: set by layout.zero"

    def test_large_micro_batches_may_not_fill_the_pipeline(self) -> None:
        """bs decides the rule, but micro-batches run: 8 sequences in 2 micro-batches on 4 stages fall back."""
        got = plan({"layout.pp": 4, "batch.sequences": 8, "pipeline.micro_batch": 4})
        assert (got.zero, got.num_micro_batches, got.schedule.kind) == (1, 2, "afab")
        assert got.schedule.fallback is not None

    def test_counts(self) -> None:
        got = plan({"layout.dp": 2, "batch.sequences": 24, "pipeline.micro_batch": 3})
        assert (got.sequences_per_dp_group, got.num_micro_batches, got.grid.size) == (12, 4, 2)


class TestFreeze:
    @pytest.mark.parametrize(
        ("freeze", "tied", "frozen_stages"),
        [
            ([], False, 0),
            (["tok_embeddings"], False, 0),
            (["tok_embeddings", "layers.0", "layers.1"], False, 1),  # pp4: 2 layers a stage
            (["tok_embeddings", "layers.0", "layers.1", "layers.2"], False, 1),
            (["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"], False, 2),
            (["layers.2", "layers.3"], False, 0),  # a gradient must pass to the stage before
            (["tok_embeddings", "layers"], False, 3),
            (["tok_embeddings", "layers"], True, 3),
            (["tok_embeddings.", "layers.0.", "layers.1."], True, 1),
        ],
    )
    def test_leading_frozen_stages(self, freeze: list[str], tied: bool, frozen_stages: int) -> None:
        got = plan({"layout.pp": 4, "train.freeze": freeze, "model.tied": tied})
        assert got.schedule.num_frozen_stages == frozen_stages

    def test_a_prefix_ends_at_a_dot(self) -> None:
        got = plan(
            {"model.num_layers": 12, "layout.pp": 12, "train.freeze": ["tok_embeddings", "layers.0", "layers.1"]}
        )
        assert got.schedule.num_frozen_stages == 2
        with pytest.raises(RecipeError, match=r"matches no parameter"):
            plan({"train.freeze": ["layers.0.att"]})

    def test_tied_has_no_output(self) -> None:
        with pytest.raises(RecipeError, match=r'train\.freeze = "output": matches no parameter'):
            plan({"model.tied": True, "train.freeze": ["output"]})
