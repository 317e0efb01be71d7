"""What is written is read back; what is damaged, missing or foreign is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fourfold.debugger.numerics.fingerprints import Fingerprinter
from fourfold.debugger.numerics.records import (
    PADDING,
    Kind,
    RankStep,
    Seen,
    read,
    read_step,
    recorded_steps,
    step_folder,
    token_numbers,
    write,
)
from fourfold.layout import Grid

GRID = Grid(tp=2, cp=1, pp=1, dp=1)
MAKER = Fingerprinter()


def record(rank: int = 0, step: int = 7) -> RankStep:
    """Two tensors that share row numbers, one of them kept whole, and a weight."""
    made = RankStep(step, rank, GRID, {"loss": 2.5, "grad_norm": 0.1})
    rows = torch.tensor([3, PADDING, 5])
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(rank))
    made.see(MAKER, Kind.OUTPUT, "layers.0.attention.wq", x, rows=rows, first=8 * rank, width=16, micro_batch=1)
    made.see(MAKER, Kind.ARRIVING, "output", x.bfloat16(), rows=rows, micro_batch=1, keep=True)
    made.see(MAKER, Kind.WEIGHT, "norm.weight", x[0, 0], rows=torch.arange(4))
    made.positions[1] = torch.tensor([3, 5]), torch.tensor([0, 1])
    return made


def same(a: Seen, b: Seen) -> bool:
    plain = ("kind", "name", "dtype", "first", "features", "width", "micro_batch")
    pairs: list[tuple[Tensor, Tensor]] = [(a.rows, b.rows), *zip(a.fingerprint, b.fingerprint, strict=True)]
    if a.values is not None and b.values is not None:
        pairs.append((a.values, b.values))
    return (
        all(getattr(a, name) == getattr(b, name) for name in plain)
        and (a.values is None) == (b.values is None)
        and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
    )


def test_what_is_seen() -> None:
    first, second, third = record(1).seen
    assert (first.first, first.features, first.width, first.dtype, first.values) == (8, 8, 16, "float32", None)
    assert (second.first, second.features, second.width, second.dtype) == (0, 8, 8, "bfloat16")
    assert second.values is not None
    assert second.values.shape == (3, 8)
    assert (third.features, third.width, third.micro_batch) == (1, 1, -1)


def test_round_trip(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(record(rank), tmp_path)
    write(replace(record(), step=11), tmp_path)
    assert recorded_steps(tmp_path) == [7, 11]
    for made, back in zip([record(0), record(1)], read_step(tmp_path, 7), strict=True):
        assert (made.step, made.rank, made.grid, made.scalars) == (back.step, back.rank, back.grid, back.scalars)
        assert all(same(a, b) for a, b in zip(made.seen, back.seen, strict=True))
        assert back.positions.keys() == {1}
        assert all(torch.equal(a, b) for a, b in zip(made.positions[1], back.positions[1], strict=True))
    assert not list(tmp_path.rglob("*.partial"))


def test_row_numbers_that_tensors_share_are_there_once(tmp_path: Path) -> None:
    write(record(), tmp_path)
    (file,) = step_folder(tmp_path, 7).iterdir()
    with safe_open(file, framework="pt") as opened:
        assert sorted(name for name in opened.keys() if name.startswith("rows/")) == ["rows/0", "rows/1"]  # noqa: SIM118


def test_nothing_was_seen(tmp_path: Path) -> None:
    write(RankStep(1, 0, Grid(tp=1, cp=1, pp=1, dp=1), {"loss": 1.0}), tmp_path)
    (back,) = read_step(tmp_path, 1)
    assert (back.seen, back.positions, back.scalars) == ([], {}, {"loss": 1.0})


class TestRefusals:
    """A sentence that names the file."""

    def file(self, tmp_path: Path) -> Path:
        write(record(), tmp_path)
        return step_folder(tmp_path, 7) / "rank-00000.safetensors"

    def test_cut_off(self, tmp_path: Path) -> None:
        file = self.file(tmp_path)
        whole = file.read_bytes()
        for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            with pytest.raises(ValueError, match=r"rank-00000\.safetensors: is not a file of recorded numbers"):
                read(file)

    def test_of_something_else(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        save_file({"norm.weight": torch.ones(3)}, file)
        with pytest.raises(ValueError, match=r"model\.safetensors: is not a file of recorded numbers"):
            read(file)

    def test_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"rank-00003\.safetensors"):
            read(tmp_path / "rank-00003.safetensors")

    def changed(self, tmp_path: Path, **about: object) -> Path:
        file = self.file(tmp_path)
        with safe_open(file, framework="pt") as opened:
            told = json.loads(opened.metadata()["fourfold"])
        save_file(load_file(file), file, {"fourfold": json.dumps(told | about)})
        return file

    def test_of_a_later_version(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="format 99; this version reads 1"):
            read(self.changed(tmp_path, format=99))

    def test_what_is_listed_is_not_there(self, tmp_path: Path) -> None:
        listed = [{"kind": "output", "name": "norm", "rows": 9, "count": 1, "kept": False}]
        with pytest.raises(ValueError, match="is not a file of recorded numbers"):
            read(self.changed(tmp_path, seen=listed))

    def test_a_rank_is_missing(self, tmp_path: Path) -> None:
        write(record(1), tmp_path)
        with pytest.raises(ValueError, match="step-000007: no numbers of rank 0"):
            read_step(tmp_path, 7)


def test_numbers_of_tokens() -> None:
    assert token_numbers([[2, 1], [4]], first_sequence=5).tolist() == [
        *(5 * 2**32 + i for i in range(3)),
        *(6 * 2**32 + i for i in range(4)),
    ]
