"""A folder, or a URL, of checkpoints: which are complete, which are whole, which go; and tensors in their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fourfold.trainer.checkpoint import Checkpoint, CheckpointError, CheckpointStore, damage, find_checkpoint
from fourfold.trainer.checkpoint.files import Files, LocalFiles, files_at
from fourfold.trainer.checkpoint.format import (
    FORMAT,
    STATE,
    Chunk,
    FileCheck,
    RankReport,
    SavedState,
    StoredTensor,
    encode,
    make_index,
)
from fourfold.trainer.checkpoint.tensors import read_box, write_tensors

VALUES = {"model.a": torch.arange(12.0).reshape(4, 3), "model.b": torch.tensor([3.0, -1.0])}


@pytest.fixture(params=["folder", "file", "local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place that does not exist yet: a path, and URLs with and without a short cut."""
    kinds = {
        "folder": str(tmp_path / "c"),
        "file": f"file://{tmp_path}/c",
        "local": f"local://{tmp_path}/c",
        "memory": "memory://test/c",
    }
    yield kinds[request.param]
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def write_rank(files: Files, rank: int, tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> RankReport:
    """A rank's file. Rank 1 has the rows from the middle on."""
    file = f"rank-{rank:05d}.safetensors"
    written = write_tensors(files, file, {name: t.shape for name, t in tensors.items()}, tensors.__getitem__)
    report = RankReport(rank, {}, {file: written.check})
    for name, (begin, end, crc32) in written.ranges.items():
        rows, *rest = tensors[name].shape
        where = (shapes[name][0] - rows if rank else 0, *(0 for _ in rest))
        box = Chunk(where, (rows, *rest), file, begin, end, crc32)
        report.tensors[name] = StoredTensor(shapes[name], "float32", (box,))
    return report


def publish(store: CheckpointStore, step: int, token: str = "1a-1") -> Checkpoint:
    """A checkpoint of two ranks without a model."""
    folder = store.begin(step, token)
    files = store.files.below(folder)
    shapes = {name: tuple(value.shape) for name, value in VALUES.items()}
    halves = [{n: v[: len(v) // 2] for n, v in VALUES.items()}, {n: v[len(v) // 2 :] for n, v in VALUES.items()}]
    reports = [write_rank(files, rank, half, shapes) for rank, half in enumerate(halves)]
    state = encode(SavedState(FORMAT, step, 10 * step, {}, step, 0, {}))
    files.replace(STATE, state)
    return store.publish(folder, make_index(reports, {STATE: FileCheck.of(state)}))


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.complete()]


def test_a_store_begins_empty_and_counts_complete_ones_in_order(place: str) -> None:
    store = CheckpointStore(place)
    assert store.complete() == []
    assert store.newest_good() == (None, [])
    for step in (20, 3, 100):
        publish(store, step)
    write_rank(store.files.below(store.begin(200, "1a-9")), 0, VALUES, {n: tuple(v.shape) for n, v in VALUES.items()})
    assert steps(store) == [3, 20, 100]
    assert len(store.unfinished()) == 1
    newest, damaged = store.newest_good()
    assert newest is not None
    assert (newest.step, newest.state().tokens, damaged) == (100, 1000, [])
    assert store.files.read("latest").decode().strip() == newest.path.rpartition("/")[2]
    store.remove_unfinished()
    assert store.unfinished() == []
    assert steps(store) == [3, 20, 100]


def test_names_on_a_disk(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.begin(7, "1a-1") == "step-00000007.1a-1.partial"
    assert publish(store, 7).path == str(tmp_path / "step-00000007")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000007"]
    assert (tmp_path / "latest").read_text() == "step-00000007\n"
    assert publish(store, 123_456_789).path.endswith("step-123456789")


def test_a_step_saved_again_is_never_missing(place: str) -> None:
    store = CheckpointStore(place)
    for number in range(1, 4):
        newest = publish(store, 7, f"1a-{number}")
        assert store.complete()[-1] == newest
        store.retain(newest, 3)
        assert store.complete() == [newest]


def test_retention_keeps_the_newest_steps(place: str) -> None:
    store = CheckpointStore(place)
    for number in range(1, 6):
        newest = publish(store, number)
        store.retain(newest, 2)
        assert steps(store) == [max(1, number - 1), number][-min(number, 2) :]
    assert store.unfinished() == []
    store.retain(publish(store, 6), 0)
    assert steps(store) == [4, 5, 6]
    store.retain(publish(store, 7), 1)
    assert steps(store) == [7]


def test_retention_leaves_later_steps_alone(place: str) -> None:
    store = CheckpointStore(place)
    publish(store, 4)
    publish(store, 12)  # damaged, say, so that the run went back to 4
    store.retain(publish(store, 5), 1)
    assert steps(store) == [5, 12]


def test_a_removal_broken_off_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    publish(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "remove", lambda self, name: None)
        store.retain(publish(store, 2), 1)
    assert steps(store) == [2]
    assert store.unfinished() == ["step-00000001.partial"]
    store.remove_unfinished()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000002"]


def test_damage_to_any_byte_is_found_and_named(tmp_path: Path) -> None:
    checkpoint = publish(CheckpointStore(tmp_path), 1)
    assert damage(checkpoint) is None
    random = Random(3)
    files = sorted(p for p in Path(checkpoint.path).rglob("*") if p.is_file())
    assert {p.suffix for p in files} == {".json", ".safetensors"}
    for file in files:
        content = file.read_bytes()
        for place in (0, 8, len(content) // 2, len(content) - 2, *random.sample(range(len(content) - 1), 10)):
            file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            reason = damage(checkpoint)
            assert reason is not None
            assert file.name in reason or file.name == "index.json", reason
            assert checkpoint.path in reason
        file.write_bytes(content[:-2])  # of the index the last byte is a line end, which nothing hangs on
        assert damage(checkpoint)
        file.unlink()
        reason = damage(checkpoint)
        assert reason is not None
        assert file.name in reason
        file.write_bytes(content)
    assert damage(checkpoint) is None


def test_the_parts_of_a_verification_cover_all_files(place: str) -> None:
    checkpoint = publish(CheckpointStore(place), 1)
    for file in checkpoint.index().files:
        content = checkpoint.files.read(file)
        checkpoint.files.replace(file, content[:-1] + bytes([content[-1] ^ 1]))
        for parts in (1, 2, 3, 7):
            found = [damage(checkpoint, part=part, parts=parts) for part in range(parts)]
            assert len([reason for reason in found if reason]) == 1
            assert file in next(filter(None, found))
        checkpoint.files.replace(file, content)


def test_the_newest_good_one_is_found_in_its_folder_a_store_or_a_run(place: str) -> None:
    store = CheckpointStore(f"{place}/checkpoints")
    good, bad = publish(store, 1), publish(store, 2)
    bad.files.replace("rank-00001.safetensors", b"half")
    newest, damaged = store.newest_good()
    assert newest == good
    assert len(damaged) == 1
    assert "step-00000002" in damaged[0]
    assert "rank-00001.safetensors has 4 bytes instead of" in damaged[0]
    for where in (place, f"{place}/checkpoints", f"{place}/checkpoints/", good.path):
        assert find_checkpoint(where).path.rstrip("/") == good.path
    assert find_checkpoint(place, verify=False) == bad
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors has 4 bytes"):
        find_checkpoint(bad.path)
    with pytest.raises(CheckpointError, match="is no checkpoint and holds none"):
        find_checkpoint(f"{place}/elsewhere")


def test_a_url_of_an_unknown_kind_is_an_error_with_its_name() -> None:
    with pytest.raises(OSError, match="nowhere://x cannot be opened"):
        CheckpointStore("nowhere://x")
    with pytest.raises(CheckpointError, match="nowhere://x"):
        find_checkpoint("nowhere://x")


def test_the_files_of_tensors_are_plain_safetensors(tmp_path: Path) -> None:
    tensors = {"x": torch.randn(5, 3), "y": torch.randn(4), "z": torch.randn(2, 2, 2)}
    for dtype in (torch.float32, torch.bfloat16):
        of_type = {name: value.to(dtype) for name, value in tensors.items()}
        shapes = {name: value.shape for name, value in of_type.items()}
        write_tensors(LocalFiles(tmp_path), "f", shapes, of_type.__getitem__, dtype=dtype, metadata={"format": "pt"})
        read = load_file(tmp_path / "f")
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], value) for name, value in of_type.items())
    write_tensors(LocalFiles(tmp_path), "none", {}, tensors.__getitem__)
    assert load_file(tmp_path / "none") == {}


def test_any_box_is_read(place: str) -> None:
    files, value = files_at(place), torch.randn(9, 7, 3)
    written = write_tensors(files, "f", {"x": value.shape}, lambda name: value)
    begin, end, crc32 = written.ranges["x"]
    whole = Chunk((0, 0, 0), (9, 7, 3), "f", begin, end, crc32)
    random = Random(2)
    for _ in range(30):
        offsets = [random.randrange(size) for size in value.shape]
        sizes = [random.randint(1, size - o) for o, size in zip(offsets, value.shape, strict=True)]
        if random.random() < 0.3:
            offsets[1:], sizes[1:] = [0, 0], [7, 3]
        wanted = value[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        out = torch.full([s + 1 for s in sizes], torch.nan)  # a part of something larger: not contiguous
        part = out[tuple(slice(s) for s in sizes)]
        read_box(files, whole, offsets, sizes, part)
        assert torch.equal(part, wanted)
        assert int(out.isnan().sum()) == out.numel() - wanted.numel()
    with pytest.raises(EOFError, match="f ends"):
        read_box(files, Chunk((0,), (10**4,), "f", begin, end, 0), (0,), (10**4,), torch.empty(10**4))
