"""The table of numbers has the rows of a run and no others. That they are true is for tests/parallel/test_precision."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.planner import Precision, precisions
from fourfold.recipe import check, from_table


def table(**sections: dict[str, Any]) -> dict[str, Precision]:
    rows = precisions(check(from_table(sections)))
    assert len({row.what for row in rows}) == len(rows)
    return {row.what: row for row in rows}


ALL = {"layout": {"tp": 2, "cp": 2, "pp": 2, "dp": 2}, "batch": {"sequences": 16}, "train": {"dtype": "bfloat16"}}


def test_one_rank_sends_nothing() -> None:
    rows = table(train={"dtype": "bfloat16"}, model={"num_heads": 2, "num_kv_heads": 2})
    assert all(row.travels == "" for row in rows.values())
    for what in rows:
        assert not what.startswith(("TP", "CP", "FSDP", "weights that", "both ends", "dK"))


def test_what_a_dimension_adds() -> None:
    every = table(**ALL)
    for dimension, what in (
        ("tp", "TP reduce-scatter"),
        ("tp", "weights that all TP ranks hold"),
        ("cp", "CP gather of keys and values"),
        ("cp", "CP sum of dK, dV"),
    ):
        assert what not in table(**ALL | {"layout": ALL["layout"] | {dimension: 1}})
        assert what in every
    assert "FSDP reduce-scatter" not in table(**ALL | {"layout": {"tp": 2, "pp": 2}})
    assert every["residual stream"].travels == "bf16"
    assert table(**ALL | {"layout": {"tp": 2}})["residual stream"].travels == ""


def test_all_sums_over_ranks_and_micro_batches_are_fp32() -> None:
    """facts.md 2.10. bf16 is summed in only along the residual stream, and by a kernel."""
    summed = {what: row.summed for what, row in table(**ALL).items() if row.summed}
    assert {what for what, dtype in summed.items() if dtype == "bf16"} == {
        "residual stream", "gradients of activations", "dK, dV over query heads of one key head",
    }  # fmt: skip
    assert summed["FSDP reduce-scatter"] == summed["TP reduce-scatter"] == summed["sum over micro-batches"] == "fp32"


def test_a_run_in_float32_holds_nothing_less() -> None:
    rows = table(**ALL | {"train": {"dtype": "float32"}})
    assert {dtype for row in rows.values() for dtype in row[1:4]} <= {"", "fp32", "fp64"}
    assert not any("rounded" in row.note for row in rows.values())


@pytest.mark.parametrize(("zero", "there"), [(1, False), (2, True), (3, False)])
def test_sums_of_shards(zero: int, there: bool) -> None:
    """ZeRO-2 reduces every round: with one there is nothing to add to."""
    layout = {"pp": 2, "dp": 2, "zero": zero}
    pipeline = {"schedule": "flexible", "virtual_stages": 2, "nc": 2}
    several = table(layout=layout, pipeline=pipeline, batch={"sequences": 8})
    one = table(layout=layout, pipeline=pipeline, batch={"sequences": 4})
    assert ("sum over reductions, sharded" in several) == there
    assert "sum over reductions, sharded" not in one


def test_ordered_sums_and_tied_ends_are_said() -> None:
    rows = table(**ALL | {"train": {"ordered": True}, "model": {"tied": True}})
    assert rows["FSDP reduce-scatter"].note == "in the order of ranks"
    assert rows["both ends of the tied embedding"] == ("both ends of the tied embedding", "fp32", "fp32", "fp32", "")
