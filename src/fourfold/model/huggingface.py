"""Weights and config in Hugging Face's format, both ways. Values are never changed but by a dtype that is asked for.

A directory holds config.json and either model.safetensors, or several files and model.safetensors.index.json. Rows of
wq and wk are in Hugging Face's order here already, so names are all that differs, and the padding of the vocabulary:
cut off in the files, added when reading. The head of a tied model is not stored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fourfold.recipe import ModelConfig, config_from_hf, config_to_hf, parameter_shapes

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_VOCABULARY = ("tok_embeddings.weight", "output.weight")
_TOP_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}


def name_to_hf(name: str) -> str:
    """Hugging Face's name of a parameter. Raises ValueError if Llama has no such parameter."""
    return _translate(name, _TOP_NAMES, _LAYER_NAMES, prefix="layers.", new_prefix="model.layers.")


def name_from_hf(name: str) -> str:
    """Our name of a parameter of LlamaForCausalLM. Raises ValueError if Llama has no such parameter."""
    top, layer = ({theirs: ours for ours, theirs in names.items()} for names in (_TOP_NAMES, _LAYER_NAMES))
    return _translate(name, top, layer, prefix="model.layers.", new_prefix="layers.")


def _translate(name: str, top: Mapping[str, str], layer: Mapping[str, str], *, prefix: str, new_prefix: str) -> str:
    if name in top:
        return top[name]
    index, _, rest = name.removeprefix(prefix).partition(".")
    if not (name.startswith(prefix) and index.isdigit() and rest in layer):
        raise ValueError(f"{name!r} is not the name of a parameter of a Llama model")
    return f"{new_prefix}{index}.{layer[rest]}"


def save(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    directory: Path | str,
    *,
    dtype: torch.dtype | None = None,
    shards: Sequence[Collection[str]] | None = None,
    max_positions: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> None:
    """Write a whole model, plain tensors under our names, so that transformers' from_pretrained(directory) reads it.

    dtype: of the files; default that of each tensor. shards: our names in each file, for several files and an index;
    default one file.
    Only the tensors of one file are asked of `state` at a time. The other arguments go into config.json.

    Raises ValueError if a parameter is missing, unknown, of the wrong shape, or not in exactly one shard.
    """
    names = [name for name in state if not (config.tied and name == "output.weight")]
    if shards is None:
        files = {_SINGLE_FILE: names}
    else:
        shards = [[name for name in shard if not (config.tied and name == "output.weight")] for shard in shards]
        _require_same([name for shard in shards for name in shard], parameter_shapes(config), what="shards")
        files = dict(zip(file_names(len(shards)), shards, strict=True))
    _require_same(names, parameter_shapes(config), what="state")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for file, members in files.items():
        save_file_of({name: state[name] for name in members}, config, directory / file, dtype=dtype)
    save_config(
        config,
        directory,
        files=files,
        dtype=dtype or state[names[0]].dtype,
        max_positions=max_positions,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
    )


def file_names(num_files: int) -> list[str]:
    """What the files of weights are called, as Hugging Face counts them."""
    if num_files == 1:
        return [_SINGLE_FILE]
    return [f"model-{i:05d}-of-{num_files:05d}.safetensors" for i in range(1, num_files + 1)]


def save_file_of(
    tensors: Mapping[str, Tensor], config: ModelConfig, path: Path, *, dtype: torch.dtype | None = None
) -> None:
    """Write one file of weights: some of a model's, under our names. Several processes may write a file each."""
    exported = {name_to_hf(name): _exported(tensor, name, config, dtype) for name, tensor in tensors.items()}
    save_file(exported, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves it to its owner alone, unlike the files beside it


def save_config(
    config: ModelConfig,
    directory: Path,
    *,
    files: Mapping[str, Collection[str]],
    dtype: torch.dtype,
    max_positions: int | None = None,
    min_positions: int = 0,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> None:
    """Write config.json, and for several files (each with our names of what it holds) the index."""
    if len(files) > 1:
        shapes = parameter_shapes(config)
        num_values = sum(
            math.prod(_exported_shape(name, shapes[name], config)) for names in files.values() for name in names
        )
        weight_map = {name_to_hf(name): file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": num_values * dtype.itemsize}, "weight_map": weight_map}
        _write_json(directory / _INDEX_FILE, index)
    values = config_to_hf(
        config,
        max_positions=max_positions,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        dtype=str(dtype).removeprefix("torch."),
    )
    values["max_position_embeddings"] = max(values["max_position_embeddings"], min_positions)
    _write_json(directory / "config.json", values)


def _exported_shape(name: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    return (config.vocab_size, *shape[1:]) if name in _VOCABULARY else shape


def _exported(tensor: Tensor, name: str, config: ModelConfig, dtype: torch.dtype | None) -> Tensor:
    expected = parameter_shapes(config)[name]
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but the config says {expected}")
    if name in _VOCABULARY:
        tensor = tensor[: config.vocab_size]
    return tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()


def load(
    directory: Path | str, config: ModelConfig | None = None, *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Read a whole model: our names -> tensors on CPU, as `Llama.load_state_dict` takes them. Vocabulary padded with
    zero rows.

    config: default that of config.json. dtype: default that of the files. Of a tied model, output.weight is the
    embedding itself.
    Raises ValueError if a parameter is missing, unknown or of the wrong shape, FileNotFoundError if there are no
    weights.
    """
    directory = Path(directory)
    config = load_config(directory) if config is None else config
    shapes = parameter_shapes(config)
    state: dict[str, Tensor] = {}
    for their_name, tensor in _read(directory):
        if _ignored(their_name, config):
            continue
        name = name_from_hf(their_name)
        state[name] = _imported(tensor, name, shapes.get(name), config, dtype)
    _require_same(list(state), shapes, what=str(directory))
    if config.tied:
        state["output.weight"] = state["tok_embeddings.weight"]
    return state


def open_weights(directory: Path | str, config: ModelConfig) -> Callable[[str, tuple[slice, ...]], Tensor]:
    """A reader of parts of weights, ``read(our name, slices) -> float32 tensor``, that takes from the files no more.

    Slices (step 1) count in the whole, padded weight; padded rows are zero. The files stay open with the reader.
    Raises as :func:`load`, at once and not when a weight is read.
    """
    directory = Path(directory)
    shapes = parameter_shapes(config)
    stored: dict[str, Any] = {}
    for file in _files(directory):
        tensors = safe_open(file, framework="pt")
        for their_name in tensors.keys():  # noqa: SIM118 - not a mapping
            if not _ignored(their_name, config):
                stored[name_from_hf(their_name)] = tensors.get_slice(their_name)
    _require_same(list(stored), shapes, what=str(directory))
    for name, part in stored.items():
        _require_shape(name, tuple(part.get_shape()), _exported_shape(name, shapes[name], config))

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        ranges = [range(*part.indices(size)) for part, size in zip(slices, shapes[name], strict=True)]
        rows = _exported_shape(name, shapes[name], config)[0]
        first, last = min(ranges[0].start, rows), min(ranges[0].stop, rows)
        values = stored[name][(slice(first, last), *(slice(r.start, r.stop) for r in ranges[1:]))]
        out = torch.zeros([len(r) for r in ranges])
        out[: last - first] = values
        return out

    return read


def load_config(directory: Path | str, *, vocab_multiple: int = 128) -> ModelConfig:
    """The model that the config.json of a directory describes. Raises ValueError if it is not a Llama."""
    return config_from_hf(json.loads((Path(directory) / "config.json").read_text()), vocab_multiple=vocab_multiple)


def _read(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for file in _files(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX_FILE
    names = [_SINGLE_FILE]
    if not (directory / _SINGLE_FILE).exists() and index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        if not (directory / name).exists():
            raise FileNotFoundError(
                f"{directory / name}: no such file; {directory} needs {_SINGLE_FILE} or {_INDEX_FILE}"
            )
    return [directory / name for name in names]


def _ignored(their_name: str, config: ModelConfig) -> bool:
    """Old files repeat the rotary frequencies in every layer, or store the head of a tied model."""
    return their_name.endswith("rotary_emb.inv_freq") or (config.tied and their_name == "lm_head.weight")


def _require_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ValueError(f"{name}: shape {found} in the file, but the config says {wanted}")


def _imported(
    tensor: Tensor, name: str, shape: tuple[int, ...] | None, config: ModelConfig, dtype: torch.dtype | None
) -> Tensor:
    stored = None if shape is None else _exported_shape(name, shape, config)
    if stored is not None:
        _require_shape(name, tuple(tensor.shape), stored)
    tensor = tensor.to(dtype or tensor.dtype)
    if shape == stored or shape is None:
        return tensor
    padded = tensor.new_zeros(shape)
    padded[: config.vocab_size] = tensor
    return padded


def _require_same(names: Sequence[str], shapes: Mapping[str, object], *, what: str) -> None:
    missing, unknown = sorted(shapes.keys() - set(names)), sorted(set(names) - shapes.keys())
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    problems = [
        f"{kind} {', '.join(found[:5])}{' ...' if len(found) > 5 else ''}"
        for kind, found in (("missing", missing), ("unknown", unknown), ("twice", twice))
        if found
    ]
    if problems:
        raise ValueError(f"parameters of {what}: {'; '.join(problems)}")


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
