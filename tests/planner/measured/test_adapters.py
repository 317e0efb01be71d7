"""The A100, B200 and out-of-memory tables: every row read, and rows as the files print them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.planner.jobs import Precision, Recompute, model_parameters
from fourfold.planner.machines.cluster import CHIPS
from fourfold.planner.measured.adapters import STEPS
from fourfold.planner.measured.rows import jobs_of
from fourfold.planner.measured.tables import MEASUREMENTS, read


def test_several_nodes() -> None:
    measured = read(MEASUREMENTS / "a100_steps_multi_node.csv")
    assert (measured.kind, len(measured.rows), measured.unscored) == ("a100_multi_node", 109, ())
    first = measured.rows[0]
    assert (first.seconds, first.stack) == (3.5665, "megatron-2021")
    c = first.columns
    assert [c[name] for name in ("layers", "dim", "heads", "seq_len", "sequences", "micro_batch")] == [
        30, 3072, 32, 2048, 512, 8]  # fmt: skip
    assert [c[name] for name in ("tp", "dp", "pp", "zero", "ffn_dim")] == [1, 64, 1, 0, 12_288]
    assert (c["nic"], c["domain"]) == (12.5e9, 8)  # 4 x 200 Gb/s among 8
    assert (c["recompute"], c["fused_attention"], c["precision"]) == (Recompute.FULL, False, Precision.FP16)


def test_models_are_as_large_as_the_table_says() -> None:
    rows = read(MEASUREMENTS / "a100_steps_multi_node.csv").rows
    billions = {round(count / 1e9, 1) for count in model_parameters(jobs_of(rows)).tolist()}
    assert len(billions) == 4
    for said, counted in zip((3.6, 18.4, 39.1, 175), sorted(billions), strict=True):
        assert counted == pytest.approx(said, rel=0.02)


def test_groups_of_competing_layouts() -> None:
    rows = read(MEASUREMENTS / "a100_steps_multi_node.csv").rows
    assert len({row.setting for row in rows}) == 4
    assert len({row.group for row in rows}) == len({tuple(sorted(row.columns.items())) for row in rows}) > 100


def test_one_node() -> None:
    measured = read(MEASUREMENTS / "a100_steps_one_node.csv")
    assert (measured.kind, len(measured.rows)) == ("a100_one_node", 1440)
    assert measured.rows[0].seconds == 0.372160408
    assert set(jobs_of(measured.rows).gpus.tolist()) == {2, 4, 8}


def test_out_of_memory() -> None:
    measured = read(MEASUREMENTS / "out_of_memory.csv")
    assert (measured.kind, len(measured.rows), measured.unscored) == ("out_of_memory", 321, ())
    assert {row.fits for row in measured.rows} == {False}
    assert {row.stack for row in measured.rows} == {"megatron-flash"}
    c = measured.rows[0].columns
    assert [c[name] for name in ("dim", "ffn_dim", "micro_batch", "dp", "zero", "shards")] == [
        5120, 13_824, 8, 32, 1, 32]  # fmt: skip


def test_rank_memory() -> None:
    measured = read(MEASUREMENTS / "b200_rank_memory.csv")
    assert len(measured.rows) + len(measured.unscored) == 22
    assert {row.reason for row in measured.unscored} == {"mixture of experts"}
    first = measured.rows[0]
    assert len(first.rank_bytes) == 8
    assert first.memory == 68149.19873046875 * 2**20
    assert (first.memory_kind, first.seconds) == ("allocated", 0.843)
    assert CHIPS[int(first.columns["chip"])].name == "b200"
    assert [first.columns[name] for name in ("tp", "pp", "dp", "sequences")] == [1, 2, 4, 16]
    long = next(row for row in measured.rows if "cp8" in row.id)
    assert [long.columns[name] for name in ("cp", "seq_len", "shards")] == [8, 32_768, 8]


def test_an_empty_cell_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(f"{','.join(STEPS)},iteration time (ms)\n8,16,1,1024,16,,1024,1,8,1,99\n")
    with pytest.raises(ValueError, match=r"steps.csv, line 2, column # layers: is empty or missing"):
        read(path)
    path.write_text(f"{','.join(STEPS)},iteration time (ms)\n8,16,1,1024,16,24,1024,1,8,1,0\n")
    with pytest.raises(ValueError, match=r"line 2, column iteration time \(ms\): 0 must be greater than 0"):
        read(path)
