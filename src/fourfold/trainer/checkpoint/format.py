"""What the JSON files of a checkpoint hold, and the rules that make one whole. No torch.

A checkpoint is a folder. Each rank writes the tensors that it owns into one safetensors file and says in a JSON file of
its own what they are; rank 0 merges these into ``index.json``, which is written last. docs/formats.md lists all files.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from fourfold.recipe import ModelConfig, Problem

FORMAT = 1
INDEX, STATE, RECIPE, CONFIG, TOKENIZER = "index.json", "state.json", "recipe.toml", "config.json", "tokenizer"
_S = TypeVar("_S", bound=msgspec.Struct)
DTYPE = "float32"  # of every tensor: master weights and optimizer state, whatever the computation runs in


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or could not be made. The message says which and why."""


class Chunk(msgspec.Struct, frozen=True):
    """A box of a tensor, and the bytes that hold it.

    Attributes:
        offsets: where it begins in the whole tensor, per dimension.
        sizes: its extent.
        file: name of the safetensors file.
        begin: of the first byte in that file.
        end: after the last byte.
        crc32: of those bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    end: int
    crc32: int


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor, row-major and little-endian, and the chunks that fill it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


class FileCheck(msgspec.Struct, frozen=True):
    """How a file is recognised as whole: its size in bytes, and the crc32 of its first ``head`` bytes.

    Of a safetensors file that is the header, since each chunk has a checksum of its own; of any other file it is all.
    """

    bytes: int
    head: int
    crc32: int

    @staticmethod
    def of(content: bytes) -> FileCheck:
        """Of a file that is checked as a whole."""
        return FileCheck(len(content), len(content), zlib.crc32(content))


class RankReport(msgspec.Struct, frozen=True):
    """What one rank wrote, ``rank-NNNNN.json``.

    Attributes:
        tensors: by name, each with the one chunk that this rank has of it.
        files: the safetensors file.
        steps: optimizer steps that each trained weight has had.
        rng: states of the rank's random generators by device type, base64.
    """

    rank: int
    tensors: dict[str, StoredTensor]
    files: dict[str, FileCheck]
    steps: dict[str, int] = {}
    rng: dict[str, str] = {}


class Index(msgspec.Struct, frozen=True):
    """Everything that is in a checkpoint, ``index.json``. A folder that has one is complete.

    ``crc32`` is that of this very file with 0 in its place.
    """

    format: int
    crc32: int
    tensors: dict[str, StoredTensor]
    files: dict[str, FileCheck]
    steps: dict[str, int]


class SavedState(msgspec.Struct, frozen=True):
    """Where training stood, ``state.json``.

    Attributes:
        step: optimizer steps done or skipped; 0 before the first.
        tokens: trained on.
        position: where the data stream stands, in its own form.
        optimizer_steps: of them, those in which the weights moved.
        skipped: and those that were skipped because they were not finite.
        model: the model's hyper-parameters.
        layout: what the run was laid out as; for people, since loading does not ask.
        data: fingerprint of the data, in the form of the data's own room.
        versions: of fourfold and torch.
    """

    format: int
    step: int
    tokens: int
    position: dict[str, Any]
    optimizer_steps: int
    skipped: int
    model: dict[str, Any]
    layout: dict[str, int] = {}
    data: dict[str, Any] = {}
    versions: dict[str, str] = {}


def encode(value: msgspec.Struct) -> bytes:
    """JSON of one of the structures above, indented where a person may read it."""
    text = msgspec.json.encode(value)
    return (msgspec.json.format(text, indent=2) if isinstance(value, SavedState) else text) + b"\n"


def decode(content: bytes, kind: type[_S], *, path: str) -> _S:
    """The structure in a JSON file. Raises CheckpointError naming ``path`` if there is another thing in it."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def make_index(reports: Sequence[RankReport], files: Mapping[str, FileCheck]) -> bytes:
    """The content of index.json. ``files``: those that belong to no rank, and the ranks' own reports.

    Raises:
        CheckpointError: the ranks disagree on a tensor, or the chunks of one do not fill it exactly.
    """
    tensors: dict[str, StoredTensor] = {}
    steps: dict[str, int] = {}
    everything = dict(files)
    for report in reports:
        everything |= report.files
        for name, tensor in report.tensors.items():
            known = tensors.get(name, StoredTensor(tensor.shape, tensor.dtype, ()))
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(f"{name}: rank {report.rank} has another shape or dtype than the ranks before it")
            tensors[name] = StoredTensor(known.shape, known.dtype, known.chunks + tensor.chunks)
        for name, count in report.steps.items():
            if steps.setdefault(name, count) != count:
                raise CheckpointError(f"{name}: rank {report.rank} counts {count} steps, others {steps[name]}")
    for name, tensor in tensors.items():
        require_filled(name, tensor)
    index = Index(FORMAT, 0, dict(sorted(tensors.items())), dict(sorted(everything.items())), steps)
    return encode(msgspec.structs.replace(index, crc32=zlib.crc32(encode(index))))


def read_index(content: bytes, *, path: str) -> Index:
    """The index in the content of index.json.

    Raises:
        CheckpointError: it is damaged, or of a later version of the format.
    """
    index = decode(content, Index, path=path)
    if index.format > FORMAT:
        raise CheckpointError(f"{path} has format {index.format}; this version of Fourfold reads up to {FORMAT}")
    if zlib.crc32(encode(msgspec.structs.replace(index, crc32=0))) != index.crc32:
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    return index


def require_filled(name: str, tensor: StoredTensor) -> None:
    """Raises CheckpointError unless the chunks cover every element of the tensor once, with the bytes that it takes.

    The borders of all chunks cut the tensor into cells, each of which lies wholly inside or outside of any chunk.
    """
    ends = [tuple(o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in tensor.chunks]
    itemsize = np.dtype(tensor.dtype).itemsize
    for chunk, end in zip(tensor.chunks, ends, strict=True):
        inside = len(end) == len(tensor.shape) and all(
            0 <= o < e <= size for o, e, size in zip(chunk.offsets, end, tensor.shape, strict=True)
        )
        if not inside or chunk.end - chunk.begin != math.prod(chunk.sizes) * itemsize:
            raise CheckpointError(f"{name}: the chunk at {chunk.offsets} of {chunk.file} does not fit the tensor")
    borders = [
        sorted({0, size, *(chunk.offsets[d] for chunk in tensor.chunks), *(end[d] for end in ends)})
        for d, size in enumerate(tensor.shape)
    ]
    place = [{border: i for i, border in enumerate(axis)} for axis in borders]
    covered = np.zeros([len(axis) - 1 for axis in borders], dtype=np.int32)
    for chunk, end in zip(tensor.chunks, ends, strict=True):
        covered[tuple(slice(at[o], at[e]) for at, o, e in zip(place, chunk.offsets, end, strict=True))] += 1
    if not (covered == 1).all():
        what = "overlap" if (covered > 1).any() else "leave a part out"
        raise CheckpointError(f"{name}: its {len(tensor.chunks)} chunks {what}")


_SHAPE_KEYS = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size", "head_dim", "tied")


def model_problems(saved: Mapping[str, Any], config: ModelConfig, *, path: str) -> list[Problem]:
    """What differs between a saved model and ``config`` so that the weights do not fit, by key of the recipe.

    The padding of the vocabulary may differ: padded rows are not stored. So may what is not in the shape of a weight,
    such as the rotary frequencies, which change when a context is made longer.
    """
    return [
        Problem(f"model.{key}", getattr(config, key), f"must be that of the checkpoint {path}", (saved.get(key),))
        for key in _SHAPE_KEYS
        if saved.get(key) != getattr(config, key)
    ]


def real_shape(name: str, shape: Iterable[int], config: ModelConfig) -> tuple[int, ...]:
    """The shape of a parameter without the padding of the vocabulary, as it is stored."""
    rows, *rest = shape
    return (config.vocab_size if name in ("tok_embeddings.weight", "output.weight") else rows, *rest)
