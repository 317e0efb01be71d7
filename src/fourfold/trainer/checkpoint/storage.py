"""PyTorch's Distributed Checkpoint (DCP) over our own files.

DCP does the arithmetic: which box of a weight a rank holds, which boxes of the stored chunks it needs, whatever the
layouts are. What it writes by itself is pickled; here every byte goes through :mod:`tensors` and JSON. Each rank saves
and loads alone (``no_dist``), so nothing here is a collective, and saving may run in a thread beside the training.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from fourfold.trainer.checkpoint.files import Files
from fourfold.trainer.checkpoint.format import DTYPE, CheckpointError, Chunk, Index, RankReport, StoredTensor, encode
from fourfold.trainer.checkpoint.tensors import read_box, write_tensors


@dataclass(frozen=True)
class Box:
    """A part of a tensor, and this rank's memory for it.

    Attributes:
        shape: of the whole tensor as stored.
        offsets: of the box in it.
        memory: the box itself, float32; a view of what it is saved from or loaded into.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    memory: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box in DCP's words."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.memory.shape)


def offsets_of(weight: DTensor) -> tuple[int, ...]:
    """Where the local part of a weight begins in the whole, sharded over TP and FSDP."""
    (item,) = create_default_local_save_plan({"weight": weight}, True).items
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.offsets)


def save_boxes(boxes: Mapping[str, Box], files: Files, report: RankReport) -> None:
    """Writes this rank's boxes and its report: ``rank-NNNNN.safetensors``, then ``rank-NNNNN.json``.

    ``report`` lacks what is found out here, tensors and files. Raises OSError.
    """
    _expect_no_dist()
    try:
        # The state dictionary is empty: the planner has the boxes.
        dcp.save({}, storage_writer=_Writer(files, report), planner=_SavePlanner(boxes), no_dist=True)
    except CheckpointException as wrapped:  # DCP's own, no Exception, with a page of text
        raise next(iter(wrapped.failures.values()))[0] from None


def load_boxes(files: Files, index: Index, boxes: Mapping[str, tuple[str, Box]]) -> None:
    """Fills boxes with stored values.

    Args:
        files: of the checkpoint.
        index: of the checkpoint.
        boxes: by any name, each with the name of the stored tensor: the two ends of a tied model have one.

    Raises:
        OSError, EOFError: a file cannot be read.
        CheckpointError: a tensor is not there, or has another shape.
    """
    for source, box in boxes.values():
        stored = index.tensors.get(source)
        if stored is None:
            raise CheckpointError(f"{files.root} has no {source}")
        if stored.shape != box.shape or stored.dtype != DTYPE:
            raise CheckpointError(f"{files.root}: {source} is {stored.dtype} {stored.shape}, not {DTYPE} {box.shape}")
    wanted = {source for source, _ in boxes.values()}
    _expect_no_dist()
    reader = _Reader(files, {name: tensor for name, tensor in index.tensors.items() if name in wanted})
    try:
        dcp.load({}, storage_reader=reader, planner=_LoadPlanner(boxes), no_dist=True)
    except CheckpointException as wrapped:
        raise next(iter(wrapped.failures.values()))[0] from None


def _expect_no_dist() -> None:
    """DCP warns of what is asked for here. A filter for all threads: the one that saves cannot have its own."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def rank_file(rank: int, suffix: str) -> str:
    """The name of a file that one rank writes."""
    return f"rank-{rank:05d}.{suffix}"


class _SavePlanner(SavePlanner):
    """Saves all boxes that it is given. Who owns what was settled before, so there is nothing to agree on."""

    def __init__(self, boxes: Mapping[str, Box]) -> None:
        self._boxes = boxes

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None: ...

    def create_local_plan(self) -> SavePlan:
        properties = TensorProperties(dtype=torch.float32)
        return SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, torch.Size(box.offsets)),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk=box.chunk, properties=properties, size=torch.Size(box.shape)),
                )
                for name, box in self._boxes.items()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})  # index.json is the metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._boxes[write_item.index.fqn].memory


class _Writer(StorageWriter):
    """Writes one rank's plan into one safetensors file, and finishes with the rank's report."""

    def __init__(self, files: Files, report: RankReport) -> None:
        self._files = files
        self._report = report

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = {item.index.fqn: item for item in plan.items}
        sizes = {name: _data(item).chunk.sizes for name, item in items.items()}

        def tensor_of(name: str) -> Tensor:
            tensor = planner.resolve_data(items[name])
            assert isinstance(tensor, Tensor)
            return tensor

        file = rank_file(self._report.rank, "safetensors")
        written = write_tensors(self._files, file, sizes, tensor_of)
        results = []
        for name, (begin, end, crc32) in written.ranges.items():
            data = _data(items[name])
            chunk = Chunk(tuple(data.chunk.offsets), tuple(data.chunk.sizes), file, begin, end, crc32)
            stored = StoredTensor(tuple(data.size), DTYPE, (chunk,))
            self._report.tensors[name] = stored
            results.append(WriteResult(items[name].index, end - begin, stored))
        self._report.files[file] = written.check
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._files.replace(rank_file(self._report.rank, "json"), encode(self._report))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # it is made with its files, never found by a name


class _LoadPlanner(LoadPlanner):
    """Loads into boxes; a box may have another name than what is stored."""

    def __init__(self, boxes: Mapping[str, tuple[str, Box]]) -> None:
        self._boxes = boxes
        self._metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, (source, box) in self._boxes.items():
            stored = self._metadata.state_dict_metadata[source]
            assert isinstance(stored, TensorStorageMetadata)
            found = create_read_items_for_chunk_list(source, stored, [box.chunk])
            items += [dataclasses.replace(item, dest_index=MetadataIndex(name)) for item in found]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise NotImplementedError("only tensors are stored")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        _, box = self._boxes[read_item.dest_index.fqn]
        ends = (o + s for o, s in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return box.memory[tuple(map(slice, read_item.dest_offsets, ends))]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...


class _Reader(StorageReader):
    """Reads what a plan needs, file by file in the order of the bytes."""

    def __init__(self, files: Files, tensors: Mapping[str, StoredTensor]) -> None:
        self._files = files
        self._tensors = tensors

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _to_dcp(tensor) for name, tensor in self._tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def chunk_of(item: ReadItem) -> Chunk:
            assert item.storage_index.index is not None
            return self._tensors[item.storage_index.fqn].chunks[item.storage_index.index]

        def place(item: ReadItem) -> tuple[str, int]:
            return chunk_of(item).file, chunk_of(item).begin

        with torch.no_grad():
            for item in sorted(plan.items, key=place):
                out = planner.resolve_tensor(item)
                read_box(self._files, chunk_of(item), item.storage_offsets, item.lengths, out)
                planner.commit_tensor(item, out)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _to_dcp(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(tensor.shape), chunks)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
