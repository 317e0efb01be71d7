"""Verdicts over whole records: order is called order, whatever the layouts, and what is more is found where it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.debugger.numerics.compare import compare_records
from fourfold.debugger.numerics.comparison import Comparison, Verdict
from fourfold.debugger.numerics.ordered import OrderedReference
from fourfold.debugger.numerics.records import Kind, RankStep, write
from fourfold.layout import Coordinates, Grid
from tests.debugger.numerics.layouts import LR, plan_of, source_of
from tests.debugger.numerics.made import Made, Name, slightly, whole_step
from tests.parallel.harness import Case, micro_batches

WQ: Name = (Kind.OUTPUT, "layers.1.attention.wq")
# All of the same four sequences in a step.
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "cp": 2, "pp": 2, "dp": 2, "nmb": 2},
    {"cp": 3, "nmb": 4, "cp_split": "per_document"},
    {"nmb": 2, "micro_batch": 2},
    {"tp": 4, "nmb": 4},  # ranks that share a key head
]


def steps_of(case: Case, number: int) -> list[RankStep]:
    """What a layout computes, made in one process."""
    plan = plan_of(case)
    reference = OrderedReference(plan, source_of(plan), everything=True)
    records: list[RankStep] = []
    for step in range(number):
        groups = [micro_batches(case, step, group) for group in range(case.dp)]
        records += reference.step(groups, phase=plan.phases[0], lr=LR).records
    return records


@pytest.mark.parametrize(("dtype", "layouts"), [("float32", LAYOUTS[::2]), ("bfloat16", LAYOUTS[1::2])])
def test_layouts_differ_by_order(dtype: str, layouts: list[dict[str, Any]]) -> None:
    """Also in a second step, after AdamW has made of an error in the last bit one of a thousandth of the weights."""
    alone = steps_of(Case(nmb=4, dtype=dtype), 2)
    limits = (1e-5, 1e-2) if dtype == "float32" else (0.05, 0.5)
    for layout in layouts:
        found = compare_records(steps_of(Case(dtype=dtype, **layout), 2), alone)
        assert found.verdict in (Verdict.SAME, Verdict.ORDER), (layout, found.beyond)
        assert found.findings == ()
        for step, limit in zip(found.steps, limits, strict=True):
            assert max(kind.error for kind in step.kinds if kind.kind != "weight") < limit, (layout, step)


def compare(a: Made, b: Made | None = None, **options: object) -> Comparison:
    return compare_records(a.records(), (b or Made()).records(), **options)  # type: ignore[arg-type]


def changed(name: Name, by: float, rows: slice = slice(None)) -> dict[Name, torch.Tensor]:
    tensors = whole_step()
    tensors[name] = tensors[name].clone()
    tensors[name][rows] = slightly(tensors[name][rows], by)
    return tensors


def test_the_same_is_the_same() -> None:
    found = compare(Made(Grid(tp=2, cp=2, dp=2), per_dp_group=1))
    assert found.verdict is Verdict.SAME
    assert found.same
    assert (found.first, found.findings, found.notes) == (None, (), ())
    assert not found.by_rank
    assert [(kind.kind, kind.tensors, kind.equal) for kind in found.steps[0].kinds] == [
        ("output", 15, 15), ("arriving", 15, 15), ("gradient", 13, 13), ("weight", 13, 13), ("scalar", 2, 2),
    ]  # fmt: skip


def test_minus_zero_is_zero() -> None:
    tensors = {name: torch.where(x.abs() < 0.5, 0.0, x) for name, x in whole_step().items()}
    negative = {name: torch.where(x == 0, -0.0, x) for name, x in tensors.items()}
    assert compare(Made(tensors=negative), Made(tensors=tensors)).same


def test_the_place_of_a_difference() -> None:
    """Token 5 of sequence 3 is with data-parallel group 1, in its second micro-batch, and on context rank 1."""
    grid = Grid(tp=2, cp=2, dp=2)
    one = Made(grid, changed(WQ, 1e-2, slice(3 * 12 + 5, 3 * 12 + 6)))
    for found in (compare(one), compare(one, Made(grid))):
        at = found.beyond
        assert at is not None
        assert found.verdict is Verdict.BUG
        assert (at.step, at.kind, at.name, at.token) == (1, "output", "layers.1.attention.wq", (3, 5))
        assert at.place == Coordinates(tp=0, cp=1, pp=0, dp=1)
        assert (at.rank, at.micro_batch, at.num_different) == (6, 1, 1)


def test_an_error_is_told_in_roundings() -> None:
    tensors = whole_step()
    tensors[WQ] = tensors[WQ] * (1 + 2.0**-10)  # exactly this far off
    at = compare(Made(tensors=tensors)).beyond
    assert at is not None
    assert at.error == pytest.approx(2.0**-10, rel=0.1)  # estimated
    assert at.units == pytest.approx(at.error * 2.0**24)  # of float32


def test_the_first_in_the_order_of_execution_is_told() -> None:
    tensors = whole_step()
    for kind, name in ((Kind.WEIGHT, "norm.weight"), (Kind.ARRIVING, "layers.0.attention.wo"), (Kind.ARRIVING, "norm")):
        tensors[kind, name] = tensors[kind, name] * 1.5
    first = compare(Made(tensors=tensors)).first
    assert first is not None
    assert (first.kind, first.name) == ("arriving", "norm")


def test_a_small_difference_before_a_large_one() -> None:
    tensors = changed(WQ, 2e-7)
    tensors[Kind.GRADIENT, "norm.weight"] = 1.1 * tensors[Kind.GRADIENT, "norm.weight"]
    found = compare(Made(tensors=tensors))
    assert found.verdict is Verdict.BUG
    assert found.first is not None
    assert found.beyond is not None
    assert (found.first.name, found.beyond.name) == (WQ[1], "norm.weight")


def test_where_all_that_goes_in_is_the_same_one_sum_is_judged() -> None:
    """In a bf16 run, gradients of other layouts may be a hundredth apart; those of the same ranks may not."""
    tensors = {name: x.bfloat16() if name[0] in (Kind.OUTPUT, Kind.ARRIVING) else x for name, x in whole_step().items()}
    name: Name = (Kind.GRADIENT, "layers.1.attention.wo.weight")
    others = {**tensors, name: slightly(tensors[name], 2e-3)}
    assert compare(Made(Grid(tp=2), others), Made(tensors=tensors)).verdict is Verdict.ORDER
    assert compare(Made(tensors=others), Made(tensors=tensors)).verdict is Verdict.BUG
    nearly = {**tensors, name: slightly(tensors[name], 1e-6)}
    assert compare(Made(tensors=nearly), Made(tensors=tensors)).verdict is Verdict.ORDER


def test_a_tensor_that_one_rank_lacks() -> None:
    grid = Grid(dp=2)
    one, two = Made(grid).records(), Made(grid).records()
    one[1].seen.remove(next(seen for seen in one[1].seen if (seen.kind, seen.name) == WQ))
    found = compare_records(one, two, by_rank=True)
    assert found.beyond is not None
    assert (found.verdict, found.beyond.only_in, found.beyond.rank) == (Verdict.BUG, "second", 1)
    found = compare_records(one, two)
    assert found.beyond is not None
    assert (found.verdict, found.beyond.only_in, found.beyond.token) == (Verdict.BUG, "second", (2, 0))


def test_what_only_one_run_records_is_a_note() -> None:
    weights = {name: x for name, x in whole_step().items() if name[0] in (Kind.GRADIENT, Kind.WEIGHT)}
    found = compare(Made(), Made(tensors=weights))
    assert found.verdict is Verdict.SAME
    assert found.notes == ("Only the first run has the output of tok_embeddings and 29 more tensors.",)


def test_a_scalar_that_is_wrong() -> None:
    found = compare(Made(scalars={"loss": 3.3, "grad_norm": 1.5}))
    assert found.beyond is not None
    assert (found.verdict, found.beyond.kind, found.beyond.name) == (Verdict.BUG, "scalar", "loss")
    assert compare(Made(scalars={"loss": 3.0 + 1e-7, "grad_norm": 1.5})).verdict is Verdict.ORDER


def test_replicas_that_differ_are_a_bug_though_the_first_of_them_is_right() -> None:
    name = (Kind.WEIGHT, "norm.weight")
    found = compare(Made(Grid(tp=2), changes={(*name, 1): lambda x: x + 1}))
    assert found.verdict is Verdict.BUG
    assert found.first is None


def several_steps(errors: dict[int, float], grid: Grid, *, by: Kind = Kind.GRADIENT) -> list[RankStep]:
    """Steps whose tensors of a kind, and all of the steps after, are so far off."""
    records: list[RankStep] = []
    for step, error in errors.items():
        tensors = {
            name: slightly(x, error) if error and [*Kind].index(name[0]) >= [*Kind].index(by) * (step == 1) else x
            for name, x in whole_step(step).items()
        }
        records += Made(grid, tensors, step=step).records()
    return records


def test_what_follows_from_a_difference_may_grow() -> None:
    plain = several_steps({1: 0, 2: 0, 3: 0}, Grid())
    found = compare_records(several_steps({1: 1e-6, 2: 4e-6, 3: 2e-5}, Grid(tp=2)), plain)
    assert found.verdict is Verdict.ORDER
    found = compare_records(several_steps({1: 1e-6, 2: 4e-6, 3: 0.3}, Grid(tp=2)), plain)
    assert found.verdict is Verdict.BUG
    assert found.first is not None
    assert found.beyond is not None
    assert (found.first.step, found.beyond.step) == (1, 3)


def test_a_step_whose_beginning_is_not_known_is_not_judged() -> None:
    no_embedding = (Kind.OUTPUT, "tok_embeddings")
    one, two = several_steps({5: 0.3}, Grid(), by=Kind.OUTPUT), several_steps({5: 0}, Grid())
    assert compare_records(one, two).verdict is Verdict.UNKNOWN
    for records in (one, two):
        for record in records:
            record.seen[:] = [seen for seen in record.seen if (seen.kind, seen.name) != no_embedding]
    found = compare_records(one, two)
    assert found.verdict is Verdict.UNKNOWN
    assert "record the step before" in found.reason


def test_equal_embeddings_show_that_a_step_began_alike() -> None:
    tensors = {**whole_step(), WQ: slightly(whole_step()[WQ], 0.1)}
    assert compare(Made(tensors=tensors, step=7), Made(step=7)).verdict is Verdict.BUG


def test_steps_are_those_of_both(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder, steps in zip(folders, ((1, 2, 4), (2, 3, 4)), strict=True):
        for step in steps:
            for record in Made(step=step).records():
                write(record, folder)
    found = compare_records(*folders)
    assert [step.step for step in found.steps] == [2, 4]
    assert found.notes == (
        "Only the first run has records of step 1.",
        "Only the second run has records of step 3.",
    )
    assert [step.step for step in compare_records(*folders, steps=(3, 9)).steps] == [4]
    with pytest.raises(ValueError, match="steps 3-3: none of them was recorded in both runs; recorded in both: 2, 4"):
        compare_records(*folders, steps=(3, 3))
    next(folders[0].glob("step-000002/*")).unlink()
    with pytest.raises(ValueError, match="no step was recorded in both"):
        compare_records(folders[0], tmp_path / "c")


def test_damage_and_other_layouts_are_refused(tmp_path: Path) -> None:
    write(Made().records()[0], tmp_path)
    with pytest.raises(ValueError, match="ranks of tp1 cp1 pp1 dp1 have no like among those of tp2 cp1 pp1 dp1"):
        compare_records(tmp_path, Made(Grid(tp=2)).records(), by_rank=True)
    file = next(tmp_path.glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"rank-00000.*is not a file of recorded numbers"):
        compare_records(tmp_path, tmp_path)


def test_ranks_are_compared_with_their_likes_where_they_hold_the_same() -> None:
    grid = Grid(tp=2, cp=2)
    name = "layers.0.attention.attend"
    found = compare(Made(grid, changes={(Kind.OUTPUT, name, 3): lambda x: 1.25 * x}), Made(grid))
    assert found.by_rank
    assert found.beyond is not None
    assert (found.beyond.rank, found.beyond.place) == (3, Coordinates(tp=1, cp=1, pp=0, dp=0))
    assert not compare(replace(Made(grid), per_dp_group=4), Made(grid)).by_rank
