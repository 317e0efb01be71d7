"""Records of any layout come together to the same whole tensors."""

from __future__ import annotations

import pytest
import torch

from fourfold.debugger.numerics.alignment import merge, pair, pairs
from fourfold.debugger.numerics.fingerprints import Fingerprinter
from fourfold.debugger.numerics.records import PADDING, Kind, RankStep
from fourfold.layout import Grid
from tests.debugger.numerics.made import TOKENS, Made, slightly, whole_step

GRIDS = [Grid(), Grid(tp=2), Grid(cp=2), Grid(dp=2), Grid(tp=2, cp=2, dp=2), Grid(tp=4, cp=3)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_ranks_come_together_to_the_whole(grid: Grid) -> None:
    tensors = whole_step()
    wholes, replicas = merge(Made(grid, tensors, per_dp_group=1).records())
    assert replicas == []
    assert wholes.keys() == tensors.keys()
    for (kind, name), rows in wholes.items():
        alone = Fingerprinter().of(tensors[kind, name])
        assert torch.equal(rows.fingerprint.checksum, alone.checksum), name
        assert torch.allclose(rows.fingerprint.square, alone.square, rtol=1e-5)
        assert torch.allclose(rows.fingerprint.sketch, alone.sketch, atol=1e-5)
        of_tokens = kind in (Kind.OUTPUT, Kind.ARRIVING)
        assert torch.equal(rows.numbers, TOKENS if of_tokens else torch.arange(len(tensors[kind, name])))
        assert bool(rows.whole.all())


def test_execution_order_is_that_of_the_model() -> None:
    order = [*merge(Made().records())[0]]
    kinds = [kind for kind, _ in order]
    assert kinds == sorted(kinds, key=[*Kind].index)
    outputs = [name for kind, name in order if kind is Kind.OUTPUT]
    assert outputs[:3] == ["tok_embeddings", "layers.0.attention_norm", "layers.0.attention.wq"]
    assert outputs[-1] == "output"
    assert [name for kind, name in order if kind is Kind.ARRIVING] == outputs[::-1]


@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
def test_the_error_is_that_of_the_tensors(grid: Grid) -> None:
    """Estimated from sketches of another layout, it is the true one within a third."""
    tensors = whole_step()
    others = {name: slightly(x, 1e-3) for name, x in tensors.items()}
    for each in pairs(merge(Made(grid, others, 1).records())[0], merge(Made(Grid(), tensors).records())[0]):
        x, y = others[each.kind, each.name], tensors[each.kind, each.name]
        true = float((x - y).norm() / y.norm())
        assert each.relative() == pytest.approx(true, rel=0.35), each.name
        assert not each.exact
        assert each.scale()[0] == pytest.approx(1, abs=1e-3)


def test_replicas_that_differ_are_told() -> None:
    name = (Kind.GRADIENT, "layers.1.attention_norm.weight")
    made = Made(Grid(tp=2, dp=2), changes={(*name, 1): lambda x: 2 * x})
    (found,) = merge(made.records())[1]
    assert (found.kind, found.name, found.ranks, found.num_rows) == (*name, (0, 1), 8)
    assert found.error == pytest.approx(1.0, rel=1e-6)


def see(record: RankStep, kind: Kind, name: str, x: torch.Tensor, rows: torch.Tensor, **places: int) -> None:
    record.see(Fingerprinter(), kind, name, x, rows=rows, **places)


def test_a_loss_is_the_sum_over_context_ranks_and_one_of_the_tensor_ranks() -> None:
    records = [RankStep(1, rank, Grid(tp=2, cp=2)) for rank in range(4)]
    for record, loss in zip(records, (1.0, 1.0, 2.5, 2.5), strict=True):
        see(record, Kind.OUTPUT, "cross_entropy", torch.tensor([loss]), TOKENS[:1], micro_batch=0)
    alone = RankStep(1, 0, Grid())
    see(alone, Kind.OUTPUT, "cross_entropy", torch.tensor([3.5]), TOKENS[:1], micro_batch=0)
    whole, replicas = merge(records)
    (together,) = pairs(whole, merge([alone])[0])
    assert replicas == []
    assert together.relative() < 1e-7
    records[1].seen.clear()
    see(records[1], Kind.OUTPUT, "cross_entropy", torch.tensor([1.1]), TOKENS[:1], micro_batch=0)
    assert [found.ranks for found in merge(records)[1]] == [(0, 1)]


def test_losses_of_other_micro_batches_are_compared_in_sum() -> None:
    one, two = RankStep(1, 0, Grid()), RankStep(1, 0, Grid())
    see(one, Kind.OUTPUT, "cross_entropy", torch.tensor([3.5]), TOKENS[:1], micro_batch=0)
    for number, loss in enumerate((1.5, 2.0)):
        see(two, Kind.OUTPUT, "cross_entropy", torch.tensor([loss]), TOKENS[number * 12 :][:1], micro_batch=number)
    (together,) = pairs(merge([one])[0], merge([two])[0])
    assert together.same


def test_gradients_at_shared_key_heads_are_added() -> None:
    """Two ranks of four share a head: each has what its own query heads say."""
    name, x = "layers.0.attention.wk", torch.randn(12, 4, 8)
    records = [RankStep(1, rank, Grid(tp=4)) for rank in range(4)]
    for record in records:
        first = record.rank // 2 * 8
        see(record, Kind.ARRIVING, name, x[:, record.rank], TOKENS[:12], first=first, width=16, micro_batch=0)
    alone = RankStep(1, 0, Grid())
    whole = torch.cat((x[:, 0] + x[:, 1], x[:, 2] + x[:, 3]), dim=1)
    see(alone, Kind.ARRIVING, name, whole, TOKENS[:12], micro_batch=0)
    (together,) = pairs(merge(records)[0], merge([alone])[0])
    assert not bool(together.a.whole.any())
    assert together.relative() < 1e-6


def test_padding_is_nobodys_row() -> None:
    padded, plain = RankStep(1, 0, Grid()), RankStep(1, 0, Grid())
    x = torch.randn(5, 4)
    rows = torch.tensor([3, PADDING, 1, PADDING, 2])
    see(padded, Kind.OUTPUT, "norm", x, rows, micro_batch=0)
    see(plain, Kind.OUTPUT, "norm", x[[2, 4, 0]], torch.tensor([1, 2, 3]), micro_batch=0)
    (together,) = pairs(merge([padded])[0], merge([plain])[0])
    assert together.same
    assert together.a.numbers.tolist() == [1, 2, 3]


def test_rows_that_one_run_lacks() -> None:
    one, two = RankStep(1, 0, Grid()), RankStep(1, 0, Grid())
    x = torch.randn(6, 4)
    for kind, name in ((Kind.OUTPUT, "norm"), (Kind.WEIGHT, "output.weight")):
        see(one, kind, name, x, torch.arange(6))
        see(two, kind, name, x[:4], torch.arange(4))
    of_tokens, of_weight = pairs(merge([one])[0], merge([two])[0])
    assert (of_tokens.only_a.tolist(), of_tokens.only_b.tolist()) == ([4, 5], [])
    assert of_tokens.missing
    assert not of_tokens.same
    assert of_weight.same  # it may be padding of the vocabulary


def test_kept_values_make_the_error_exact() -> None:
    x = torch.randn(6, 8)
    records = [[RankStep(1, rank, Grid(tp=2)) for rank in range(2)], [RankStep(1, 0, Grid())]]
    for run, factor in zip(records, (1.01, 1.0), strict=True):
        for record in run:
            share = 8 // len(run)
            part = factor * x[:, record.rank * share :][:, :share]
            record.see(
                Fingerprinter(), Kind.WEIGHT, "norm.weight", part, rows=torch.arange(6), first=record.rank * share,
                width=8, keep=True,
            )  # fmt: skip
    (together,) = pairs(*(merge(run)[0] for run in records))
    assert together.exact
    assert together.relative() == pytest.approx(0.01, rel=1e-5)


def test_what_is_not_finite_is_infinitely_far() -> None:
    x = torch.randn(4, 4)
    y = x.clone()
    y[2, 1] = float("nan")
    one, two = RankStep(1, 0, Grid()), RankStep(1, 0, Grid())
    see(one, Kind.OUTPUT, "norm", y, torch.arange(4))
    see(two, Kind.OUTPUT, "norm", x, torch.arange(4))
    (whole_a,), (whole_b,) = (merge([record])[0].values() for record in (one, two))
    assert pair(whole_a, whole_b).relative() == float("inf")
    assert pair(whole_b, whole_a).relative() == float("inf")
    assert pair(whole_a, whole_a).same
