"""Model shapes against published parameter counts, and config.json in both forms."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fourfold.recipe.model import ModelConfig, RopeScaling, config_from_hf, config_to_hf, parameter_shapes, preset


@pytest.mark.parametrize(
    ("name", "total"),
    [
        # shared/facts.md 5.1; the two tied ones are the totals on Meta's model cards (1.23B and 3.21B), as summed from
        # their safetensors.
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
    ],
)
def test_parameter_totals(name: str, total: int) -> None:
    assert sum(math.prod(shape) for shape in parameter_shapes(preset(name)).values()) == total


def test_presets() -> None:
    assert preset("llama3-405b").rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert preset("llama3-8b").rope_scaling is None
    assert preset("llama3.2-3b").head_dim == 128
    assert preset("llama3.2-3b").tied
    assert (preset("tiny").num_layers, preset("tiny").head_dim, preset("tiny").padded_vocab) == (8, 16, 272)
    with pytest.raises(ValueError, match=r"llama-3.*unknown model; known: llama3-8b"):
        preset("llama-3")


def test_vocabulary_is_padded() -> None:
    assert ModelConfig(8, 1, 1, 1, 8, vocab_size=128_256).padded_vocab == 128_256
    assert ModelConfig(8, 1, 1, 1, 8, vocab_size=129).padded_vocab == 256
    assert ModelConfig(8, 1, 1, 1, 8, vocab_size=260, vocab_multiple=1).padded_vocab == 260


def test_head_dim_follows_unless_given() -> None:
    config = ModelConfig(64, 1, 4, 2, 128, 260)
    assert config.head_dim == 16
    assert config.replace(dim=128).head_dim == 32
    assert config.replace(dim=128, head_dim=64).head_dim == 64
    assert config.replace(head_dim=64).replace(dim=128).head_dim == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0, "vocab_size": -1}, r"num_layers = 0: must be at least 1; vocab_size = -1"),
        ({"num_heads": 5, "num_kv_heads": 5}, r"num_heads = 5: must divide dim = 64"),
        ({"num_heads": 8, "num_kv_heads": 3}, r"num_kv_heads = 3: must divide num_heads = 8; nearest legal: 2, 4"),
        ({"num_heads": 8, "num_kv_heads": 16}, r"num_kv_heads = 16: must divide num_heads = 8; nearest legal: 8"),
        ({"dim": 12, "num_heads": 4}, r"head_dim = 3: rotary embedding needs an even head_dim"),
    ],
)
def test_illegal_values(changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {
        "dim": 64,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 128,
        "vocab_size": 260,
    }
    with pytest.raises(ValueError, match=message):
        ModelConfig(**(values | changes))


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-405b", "llama3.2-1b"])
def test_huggingface_config_round_trip(name: str) -> None:
    assert config_from_hf(config_to_hf(preset(name))) == preset(name)


def test_older_huggingface_config() -> None:
    """The form of transformers 4, as in the config.json that Meta published with Llama 3.2 1B."""
    old = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    }
    assert config_from_hf(old) == preset("llama3.2-1b")
    assert config_from_hf(old | {"rope_scaling": None}).rope_scaling is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, "model_type = 'qwen3': only 'llama'"),
        ({"attention_bias": True, "hidden_act": "gelu"}, "hidden_act = 'gelu'.*attention_bias = True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type = 'yarn'"),
    ],
)
def test_foreign_config_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(config_to_hf(preset("tiny")) | changes)
    incomplete = config_to_hf(preset("tiny"))
    del incomplete["hidden_size"]
    with pytest.raises(ValueError, match="hidden_size: missing"):
        config_from_hf(incomplete)
