"""Tensors in safetensors files: written in one pass with checksums, read by byte range.

The file is eight bytes with the length of a JSON header, the header, and the tensors one after the other. Nothing in it
is ever executed, and any tool that knows the format can read it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.trainer.checkpoint.files import Files
from fourfold.trainer.checkpoint.format import Chunk, FileCheck

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Written:
    """What a file of tensors became: its check, and per tensor the first byte, the one after the last, the crc32."""

    check: FileCheck
    ranges: dict[str, tuple[int, int, int]]


def write_tensors(
    files: Files,
    file: str,
    shapes: Mapping[str, Sequence[int]],
    tensor_of: Callable[[str], Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Writes one safetensors file, in the order of ``shapes``.

    Args:
        files: where to.
        file: its name.
        shapes: of the tensors by name.
        tensor_of: gives a tensor of ``dtype`` by name, on any device; asked for one after the other, so that no more
            than one need be in memory.
        dtype: float32 or bfloat16.
        metadata: texts for the header.
    """
    header, starts = _header(shapes, dtype, metadata)
    ranges: dict[str, tuple[int, int, int]] = {}

    def parts() -> Iterator[bytes | memoryview]:
        yield header
        for name, start in starts.items():
            tensor = tensor_of(name).detach()
            assert tensor.dtype == dtype and tuple(tensor.shape) == tuple(shapes[name])
            content = memory_of(tensor.to("cpu").contiguous())
            ranges[name] = (start, start + len(content), zlib.crc32(content))
            yield content
            del tensor, content  # before the next one is made

    files.write(file, parts())
    size = max((end for _, end, _ in ranges.values()), default=len(header))
    return Written(FileCheck(size, len(header), zlib.crc32(header)), ranges)


def _header(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int]]:
    """The bytes before the first tensor, and where in the file each tensor begins."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets, end = {}, 0
    for name, shape in shapes.items():
        offsets[name], end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors lie aligned
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on CPU. They are the tensor's own memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_box(files: Files, chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int], out: Tensor) -> None:
    """Copies a box of a stored float32 chunk into ``out``, a tensor of that shape on any device.

    Whole rows of the chunk are read and no others; straight into ``out`` if that is contiguous memory of this process.

    Args:
        files: of the checkpoint.
        chunk: what is stored.
        offsets: of the box in the chunk, per dimension.
        sizes: of the box.
        out: the destination.
    """
    row = math.prod(chunk.sizes[1:]) * 4
    begin = chunk.begin + offsets[0] * row
    whole_rows = tuple(sizes[1:]) == tuple(chunk.sizes[1:])
    if whole_rows and out.device.type == "cpu" and out.is_contiguous():
        files.read_into(chunk.file, begin, memory_of(out))
        return
    rows = torch.empty((sizes[0], *chunk.sizes[1:]))
    files.read_into(chunk.file, begin, memory_of(rows))
    out.copy_(rows[(slice(None), *(slice(o, o + s) for o, s in zip(offsets[1:], sizes[1:], strict=True)))])
