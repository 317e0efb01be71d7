"""Writing token files: what the sidecar says is so, and a file is whole or absent."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from fourfold.data import sidecar
from fourfold.data.indexed import TokenFile, TokenFileError
from fourfold.data.sidecar import Skipped, read_sidecar
from fourfold.data.writer import TokenFileWriter, write_atomically
from tests.data.files import BYTES, write_tokens


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_sidecar_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "BLOCK", 8)
    with TokenFileWriter(tmp_path / "x", BYTES, 300) as writer:
        writer.write([np.array([1, 2]), np.array([299])])
        writer.write([])
        writer.write([np.array([7, 7, 7], dtype=np.uint8), np.array([], dtype=np.int32)])
        writer.finish(input_bytes=11, skipped=[Skipped(reason="empty", count=2, first="a.txt")])
    found = read_sidecar(tmp_path / "x")
    assert found is not None
    data = np.array([1, 2, 299, 7, 7, 7], dtype="<u2").tobytes()
    assert (tmp_path / "x.bin").read_bytes() == data
    assert found.crc32 == (zlib.crc32(data[:8]), zlib.crc32(data[8:]))
    assert (found.documents, found.tokens, found.max_id, found.vocab_size) == (4, 6, 299, 300)
    assert (found.bin_bytes, found.input_bytes, found.skipped[0].count) == (12, 11, 2)
    assert TokenFile(tmp_path / "x").lengths.tolist() == [2, 1, 3, 0]
    assert names(tmp_path) == ["x.bin", "x.idx", "x.json"]


@pytest.mark.parametrize("ids", [[256], [-1]])
def test_an_id_beyond_the_vocabulary_is_refused_and_leaves_nothing(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(ValueError, match=f"id {ids[0]} is not in a vocabulary of 256"):
        write_tokens(tmp_path / "x", [[1], ids])
    assert names(tmp_path) == []


def test_without_documents_there_is_only_a_sidecar(tmp_path: Path) -> None:
    write_tokens(tmp_path / "x", [[1]])
    assert write_tokens(tmp_path / "x", []).documents == 0
    assert names(tmp_path) == ["x.json"]


def write_and_die(prefix: Path, killed_at: int) -> int:
    """In a process of its own that kills itself before it changes the killed_at-th name; returns its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = count()

    def deadly(change: Callable[..., object]) -> Callable[..., object]:
        def change_or_die(*arguments: object, **options: object) -> object:
            return os._exit(9) if next(calls) == killed_at else change(*arguments, **options)

        return change_or_die

    Path.replace, Path.unlink = deadly(Path.replace), deadly(Path.unlink)  # type: ignore[method-assign]
    write_tokens(prefix, [[4, 5]])
    os._exit(0)


def test_whenever_it_is_killed_the_index_is_there_only_with_all_the_rest(tmp_path: Path) -> None:
    states, code, killed_at = [], 9, 0
    while code:
        prefix = tmp_path / str(killed_at) / "x"
        prefix.parent.mkdir()
        write_tokens(prefix, [[1, 2, 3]])  # an older file, which is replaced
        code = write_and_die(prefix, killed_at)
        if prefix.with_suffix(".idx").exists():
            file, side = TokenFile(prefix), read_sidecar(prefix)
            assert side is not None
            states.append(file.read(0, file.num_tokens).tolist())
            assert side.tokens == file.num_tokens
        else:
            states.append([])
        killed_at += 1
    assert sorted(states, key=[[1, 2, 3], [], [4, 5]].index) == states
    assert states[0] == [1, 2, 3]
    assert states[-1] == [4, 5]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_tokens(tmp_path / "x", [[1]])
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "y", b"1")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b'{"format": "fourfold-tokens", "version": 2}', "version must be 1, not 2"),
        (b'{"format": "fourfold-tokens", "version": 1}', "is damaged: Object missing required field"),
        (b'{"format": "fourfold-tokens", ', "is damaged"),
    ],
)
def test_a_damaged_sidecar(tmp_path: Path, content: bytes, rule: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(TokenFileError, match=rule):
        read_sidecar(tmp_path / "x")


def test_a_file_of_that_name_that_is_not_ours(tmp_path: Path) -> None:
    assert read_sidecar(tmp_path / "x") is None
    for content in (b"[]", b'{"format": "other"}', b"3", b'{"text": "JSON lines"}\n{"text": "of Megatron"}\n'):
        (tmp_path / "x.json").write_bytes(content)
        assert read_sidecar(tmp_path / "x") is None
