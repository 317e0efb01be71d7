"""The token file format against its definition: megatron-core reads what we write, and we read what it writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from fourfold.data.indexed import TokenFile
from tests.data.files import write_tokens

DOCUMENTS = [[5, 6, 7], [1], [9, 8, 7, 6], [2, 2]]


def documents_of(file: TokenFile) -> list[list[int]]:
    return [file.read(file.document_start(i), int(length)).tolist() for i, length in enumerate(file.lengths)]


@pytest.mark.parametrize("vocab_size", [65_536, 65_537])
def test_megatron_reads_what_we_write(tmp_path: Path, vocab_size: int) -> None:
    documents = [*DOCUMENTS, [vocab_size - 1, 0]]
    write_tokens(tmp_path / "x", documents, vocab_size)
    theirs = IndexedDataset(str(tmp_path / "x"))
    assert [sequence.tolist() for sequence in theirs] == documents
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert theirs.index.dtype is (np.uint16 if vocab_size <= 65_536 else np.int32)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_we_read_what_megatron_writes(tmp_path: Path, dtype: type[np.number]) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "x.idx"))
    file = TokenFile(tmp_path / "x")
    assert documents_of(file) == DOCUMENTS
    assert (file.num_documents, file.num_tokens, file.dtype) == (4, 10, np.dtype(dtype))
    assert not file.read(0, 10).flags.writeable


@pytest.mark.parametrize("multimodal", [False, True])
def test_documents_of_several_sequences_and_of_none(tmp_path: Path, multimodal: bool) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.int32, multimodal=multimodal)
    for sequences in ([[1, 2], [3]], [], [[4]], [[5], [], [6, 7]], []):
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(str(tmp_path / "x.idx"))
    file = TokenFile(tmp_path / "x")
    assert documents_of(file) == [[1, 2, 3], [], [4], [5, 6, 7], []]
    assert [file.document_at(i) for i in range(7)] == [0, 0, 0, 2, 3, 3, 3]
    assert file.starts_between(0, 100).tolist() == [0, 3, 4]
