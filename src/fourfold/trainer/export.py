"""Weights from a checkpoint to Hugging Face's format and back: one process, and one tensor at a time in memory."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from fourfold.debugger.numerics.sides import Side, Weights
from fourfold.model import huggingface
from fourfold.recipe import ModelConfig, parameter_shapes
from fourfold.trainer.checkpoint.files import Files, LocalFiles, files_at
from fourfold.trainer.checkpoint.format import (
    CONFIG,
    DTYPE,
    FORMAT,
    INDEX,
    STATE,
    TOKENIZER,
    Chunk,
    FileCheck,
    RankReport,
    SavedState,
    StoredTensor,
    encode,
    make_index,
    real_shape,
)
from fourfold.trainer.checkpoint.state import model_of, model_table
from fourfold.trainer.checkpoint.storage import Box, load_boxes
from fourfold.trainer.checkpoint.store import Checkpoint, find_checkpoint, is_checkpoint
from fourfold.trainer.checkpoint.tensors import write_tensors

Reader = Callable[[str, tuple[slice, ...]], Tensor]
SHARD_SIZE = 5 * 10**9  # bytes
# What tokenizers of Llama models consist of. A directory has some of these.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip


def partial_folder(directory: Path) -> Path:
    """Where a model is while it is being written."""
    return directory.with_name(directory.name + ".partial")


@dataclass(frozen=True)
class Converted:
    """What was written: where, from which step, how many parameters, in how many files of how many bytes."""

    path: str
    step: int
    num_parameters: int
    num_files: int
    num_bytes: int

    def __str__(self) -> str:
        files = "1 file" if self.num_files == 1 else f"{self.num_files} files"
        size = f"{self.num_bytes / 1e9:.2f} GB" if self.num_bytes >= 1e9 else f"{self.num_bytes / 1e6:.2f} MB"
        return f"{self.num_parameters:,} parameters, {size} in {files}, written to {self.path}"


def export_checkpoint(
    checkpoint: Checkpoint, directory: Path, *, dtype: torch.dtype = torch.float32, shard_size: int = SHARD_SIZE
) -> Converted:
    """The verb ``fourfold export``: writes a checkpoint's weights in Hugging Face's format. One process, no ranks.

    One tensor at a time is in memory. The tokenizer's files go beside the weights if the checkpoint has them.

    Args:
        checkpoint: from :func:`fourfold.trainer.checkpoint.find_checkpoint`, say.
        directory: to be made.
        dtype: of the files, float32 or bfloat16.
        shard_size: bytes of a file at most; a larger tensor has a file of its own.

    Raises:
        ValueError: ``directory`` exists, or the checkpoint cannot be used (CheckpointError).
        OSError: it cannot be written. Nothing is left.
    """
    if directory.exists():
        raise ValueError(f"{directory} exists already; an export makes a new folder")
    state = checkpoint.state()
    config = model_of(state.model)
    shapes = _stored_shapes(config)
    groups = _shards({name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}, shard_size)
    files = dict(zip(huggingface.file_names(len(groups)), groups, strict=True))
    partial = partial_folder(directory)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _export_weights(checkpoint, partial, files, shapes, dtype)
        _export_description(checkpoint, partial, files, config, dtype)
        LocalFiles(directory.parent).rename(partial.name, directory.name)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    num_values = sum(math.prod(shape) for shape in shapes.values())
    return Converted(str(directory), state.step, num_values, len(files), num_values * dtype.itemsize)


def _export_weights(
    checkpoint: Checkpoint,
    directory: Path,
    files: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> None:
    """Writes the safetensors files; ``files`` has our names of the weights in each."""
    ours = {huggingface.name_to_hf(name): name for name in shapes}
    read = _whole_weights(checkpoint, shapes)

    def tensor_of(their_name: str) -> Tensor:
        return read(ours[their_name]).to(dtype)

    for file, names in files.items():
        of_file = {huggingface.name_to_hf(name): shapes[name] for name in names}
        write_tensors(LocalFiles(directory), file, of_file, tensor_of, dtype=dtype, metadata={"format": "pt"})


def _whole_weights(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> Callable[[str], Tensor]:
    """A reader of a checkpoint's weights by our names, each whole, float32."""
    index = checkpoint.index()

    def read(name: str) -> Tensor:
        box = Box(shapes[name], (0,) * len(shapes[name]), torch.empty(shapes[name]))
        load_boxes(checkpoint.files, index, {name: (f"model.{name}", box)})
        return box.memory

    return read


def side_of_checkpoint(path: Path) -> Side | None:
    """A checkpoint as `fourfold compare` takes it; None if a path is not the folder of one.

    Raises:
        CheckpointError: it is damaged.
    """
    if not path.is_dir() or not is_checkpoint(path):
        return None
    checkpoint = find_checkpoint(path)
    config = model_of(checkpoint.state().model)
    shapes = _stored_shapes(config)
    weights = Weights(checkpoint.path, shapes, _whole_weights(checkpoint, shapes))
    return Side(path, weights=weights, num_layers=config.num_layers, vocab_size=config.vocab_size)


def _export_description(
    checkpoint: Checkpoint,
    directory: Path,
    files: Mapping[str, Sequence[str]],
    config: ModelConfig,
    dtype: torch.dtype,
) -> None:
    """Writes config.json, the index of several files, and the tokenizer's files."""
    hints = json.loads(checkpoint.files.read(CONFIG))
    huggingface.save_config(
        config,
        directory,
        files=files,
        dtype=dtype,
        max_positions=hints.get("max_position_embeddings"),
        bos_token_id=hints.get("bos_token_id"),
        eos_token_id=hints.get("eos_token_id"),
    )
    for name in checkpoint.index().files:
        if name.startswith(f"{TOKENIZER}/"):
            (directory / name.removeprefix(f"{TOKENIZER}/")).write_bytes(checkpoint.files.read(name))
    settings = directory / "tokenizer_config.json"
    if (directory / "tokenizer.json").exists() and not settings.exists():  # without it transformers finds no class
        content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def import_model(directory: Path, place: str, *, shard_size: int = SHARD_SIZE) -> Converted:
    """The verb ``fourfold import``: makes a checkpoint of step 0, without optimizer state, of a Hugging Face directory.

    One tensor at a time is in memory. Weights of any dtype become float32, which is exact for bfloat16 and float16.

    Args:
        directory: with config.json, safetensors, and maybe the files of a tokenizer.
        place: path or URL of the checkpoint's folder, to be made.
        shard_size: bytes of a file at most; a larger tensor has a file of its own.

    Raises:
        ValueError: the directory is not a Llama's, or ``place`` exists.
        OSError: something cannot be read or written. Nothing is left.
    """
    parent, _, name = place.rstrip("/").rpartition("/")
    store = files_at(parent or ("/" if place.startswith("/") else "."))
    if name in store.names():
        raise ValueError(f"{place} exists already; an import makes a new folder")
    try:
        config = huggingface.load_config(directory)
        read = huggingface.open_weights(directory, config)
    except SafetensorError as error:
        raise ValueError(f"the weights of {directory} cannot be read: {error}") from None
    shapes = _stored_shapes(config)
    groups = _shards({name: math.prod(shape) * 4 for name, shape in shapes.items()}, shard_size)
    folder = f"{name}.partial" if store.renames else name
    store.remove(folder)
    try:
        files = store.below(folder)
        reports = [
            _import_file(files, number, {name: shapes[name] for name in names}, read)
            for number, names in enumerate(groups)
        ]
        content = _common_files(directory, config)
        for file, value in content.items():
            files.replace(file, value)
        files.replace(INDEX, make_index(reports, {file: FileCheck.of(value) for file, value in content.items()}))
        if store.renames:
            store.rename(folder, name)
    except BaseException:
        store.remove(folder)
        raise
    num_values = sum(math.prod(shape) for shape in shapes.values())
    return Converted(place, 0, num_values, len(groups), num_values * 4)


def _import_file(files: Files, number: int, shapes: Mapping[str, tuple[int, ...]], read: Reader) -> RankReport:
    """Writes one file of weights of an imported checkpoint."""

    def tensor_of(name: str) -> Tensor:
        name = name.removeprefix("model.")
        return read(name, tuple(map(slice, shapes[name])))

    stored = {f"model.{name}": shape for name, shape in shapes.items()}
    file = f"part-{number:05d}.safetensors"
    written = write_tensors(files, file, stored, tensor_of)
    report = RankReport(number, {}, {file: written.check})
    for name, (begin, end, crc32) in written.ranges.items():
        shape = stored[name]
        chunk = Chunk((0,) * len(shape), shape, file, begin, end, crc32)
        report.tensors[name] = StoredTensor(shape, DTYPE, (chunk,))
    return report


def _stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All weights of a model, without the padding of the vocabulary."""
    return {name: real_shape(name, shape, config) for name, shape in parameter_shapes(config).items()}


def _common_files(directory: Path, config: ModelConfig) -> dict[str, bytes]:
    """What an imported checkpoint holds besides the weights."""
    state = SavedState(FORMAT, 0, 0, {}, 0, 0, model_table(config))
    content = {STATE: encode(state), CONFIG: (directory / CONFIG).read_bytes()}
    present = [name for name in _TOKENIZER_FILES if (directory / name).exists()]
    return content | {f"{TOKENIZER}/{name}": (directory / name).read_bytes() for name in present}


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut into runs of at most ``limit`` bytes where a single one is not larger."""
    groups: list[list[str]] = []
    left = 0
    for name, size in sizes.items():
        if not groups or size > left:
            groups.append([])
            left = limit
        groups[-1].append(name)
        left -= size
    return groups


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB or 500MB, in powers of 1000. Raises ValueError with what is legal."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|TB)", text.strip(), re.IGNORECASE)
    if not matched or float(matched[1]) <= 0:
        raise ValueError(f"--shard-size {text}: must be a number with KB, MB, GB or TB, such as 5GB")
    return int(float(matched[1]) * 1000 ** (1 + ("KB", "MB", "GB", "TB").index(matched[2].upper())))
