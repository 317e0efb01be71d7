"""Hugging Face files: our round trip bit for bit, and transformers as reader and writer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fourfold.model import Batch, Llama, initialise
from fourfold.model.huggingface import load, load_config, name_from_hf, name_to_hf, open_weights, save
from fourfold.recipe import ModelConfig, RopeScaling, parameter_shapes

CONFIG = ModelConfig(32, 3, 4, 2, 48, 61, rope_scaling=RopeScaling(8.0, original_max_positions=64))
TIED = CONFIG.replace(tied=True, rope_scaling=None)


def state_of(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    model = Llama(config)
    initialise(model, seed)
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


def halves(config: ModelConfig) -> list[list[str]]:
    names = list(parameter_shapes(config))
    return [names[:10], names[10:]]


@pytest.mark.parametrize("config", [CONFIG, TIED])
@pytest.mark.parametrize("sharded", [False, True])
def test_round_trip_is_bitwise(tmp_path: Path, config: ModelConfig, sharded: bool) -> None:
    state = state_of(config)
    save(state, config, tmp_path, shards=halves(config) if sharded else None)
    assert load_config(tmp_path) == config
    loaded = load(tmp_path)
    assert_equal(loaded, state)
    Llama(config).load_state_dict(loaded)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    single = ["model.safetensors"]
    assert files == (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] if sharded else single)


def test_files_hold_no_padding_and_no_tied_head(tmp_path: Path) -> None:
    save(state_of(TIED), TIED, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert stored["model.embed_tokens.weight"].shape == (61, 32)
    assert load(tmp_path)["output.weight"].shape == (128, 32)
    assert (load(tmp_path)["output.weight"][61:] == 0).all()


def test_padding_may_differ_between_writer_and_reader(tmp_path: Path) -> None:
    save(state_of(CONFIG), CONFIG, tmp_path)
    other = CONFIG.replace(vocab_multiple=16)
    assert_equal(load(tmp_path, other), state_of(other))


def test_dtype(tmp_path: Path) -> None:
    state = state_of(CONFIG)
    save(state, CONFIG, tmp_path, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert_equal(load(tmp_path), {name: value.bfloat16() for name, value in state.items()})
    assert_equal(load(tmp_path, dtype=torch.float32), {name: value.bfloat16().float() for name, value in state.items()})


def test_names() -> None:
    names = list(parameter_shapes(CONFIG.replace(num_layers=12)))
    assert [name_from_hf(name_to_hf(name)) for name in names] == names
    assert name_to_hf("layers.11.feed_forward.w2.weight") == "model.layers.11.mlp.down_proj.weight"
    for name in ("layers.1.attention.wq.bias", "layers.x.attention.wq.weight", "lm_head.weight", "layer.1"):
        with pytest.raises(ValueError, match=r"is not the name of a parameter"):
            name_to_hf(name)
    with pytest.raises(ValueError, match=r"is not the name of a parameter"):
        name_from_hf("layers.1.self_attn.q_proj.weight")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    state = state_of(CONFIG)
    del state["layers.1.attention.wq.weight"]
    with pytest.raises(ValueError, match=r"missing layers\.1\.attention\.wq\.weight; unknown layers\.7"):
        save(state | {"layers.7": torch.ones(1)}, CONFIG, tmp_path)
    with pytest.raises(ValueError, match=r"norm\.weight: shape \(31,\), but the config says \(32,\)"):
        save(state_of(CONFIG) | {"norm.weight": torch.ones(31)}, CONFIG, tmp_path)
    with pytest.raises(ValueError, match=r"shards: twice norm\.weight"):
        save(state_of(CONFIG), CONFIG, tmp_path, shards=[*halves(CONFIG), ["norm.weight"]])
    assert not (tmp_path / "config.json").exists()
    with pytest.raises(FileNotFoundError, match=r"needs model\.safetensors"):
        load(tmp_path, CONFIG)

    save(state_of(CONFIG), CONFIG, tmp_path)
    with pytest.raises(ValueError, match=r"shape \(61, 32\) in the file, but the config says \(60, 32\)"):
        load(tmp_path, CONFIG.replace(vocab_size=60))
    with pytest.raises(ValueError, match=r"missing layers\.3"):
        load(tmp_path, CONFIG.replace(num_layers=4))
    with pytest.raises(ValueError, match=r"unknown layers\.2"):
        load(tmp_path, CONFIG.replace(num_layers=2))


def test_old_files_with_rotary_frequencies_or_a_tied_head(tmp_path: Path) -> None:
    save(state_of(TIED), TIED, tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(stored, path)
    assert_equal(load(tmp_path), state_of(TIED))


@pytest.mark.parametrize(("config", "sharded"), [(CONFIG, False), (TIED, True)])
def test_transformers_reads_ours_and_we_read_theirs(tmp_path: Path, config: ModelConfig, sharded: bool) -> None:
    from transformers import AutoModelForCausalLM

    state = state_of(config)
    ours_path, theirs_path = tmp_path / "ours", tmp_path / "theirs"
    save(state, config, ours_path, shards=halves(config) if sharded else None, eos_token_id=3)
    model, info = AutoModelForCausalLM.from_pretrained(ours_path, output_loading_info=True, local_files_only=True)
    assert not any(info.values()), info
    assert model.config.eos_token_id == 3
    tokens = torch.arange(40) % 61
    ours = Llama(config)
    ours.load_state_dict(state)
    batch = Batch.from_rows(tokens, [[40]]).without_labels()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens, batch)[:, :61], model(tokens[None]).logits[0], rtol=1e-5, atol=1e-6)

    model.save_pretrained(theirs_path, max_shard_size="20KB" if sharded else "1GB")
    assert (len(list(theirs_path.glob("*.safetensors"))) > 1) == sharded
    assert load_config(theirs_path) == config
    assert_equal(load(theirs_path), state)


@pytest.mark.parametrize("tied", [False, True])
def test_parts_are_read_without_the_whole(tmp_path: Path, tied: bool) -> None:
    """Any rows and columns, the padded vocabulary rows included, equal those of the loaded whole."""
    config = ModelConfig(
        dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=21, vocab_multiple=8, tied=tied
    )
    model = Llama(config)
    initialise(model, seed=3)
    save(model.state_dict(), config, tmp_path)
    whole, read = load(tmp_path, config), open_weights(tmp_path, config)
    assert whole["tok_embeddings.weight"].shape == (24, 16)
    for name in parameter_shapes(config):
        rows, *columns = whole[name].shape
        for start, stop in ((0, rows), (rows // 2, rows), (rows - 2, rows), (0, rows // 2)):
            slices = (slice(start, stop), *(slice(size // 2, None) for size in columns))
            assert torch.equal(read(name, slices), whole[name][slices]), (name, slices)
    with pytest.raises(ValueError, match="shape"):
        open_weights(tmp_path, config.replace(ffn_dim=32))
