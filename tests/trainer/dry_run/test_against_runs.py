"""A dry run against the same step on real ranks: what autograd keeps, and what is sent."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fourfold.model import Llama, initialise
from fourfold.parallel import ParallelModel
from fourfold.trainer.dry_run.rank import dry_run
from fourfold.trainer.dry_run.results import Held
from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import Case, make_model, micro_batches

ROWS = ((64,),)
CASES = {
    "pp2 v2": Case(pp=2, v=2, nmb=4, rows=ROWS),
    "tp2 cp2 bf16": Case(tp=2, cp=2, nmb=3, rows=ROWS, dtype="bfloat16"),
    "zero 3 recompute": Case(pp=2, dp=2, zero=3, nmb=4, rows=ROWS, dtype="bfloat16", recompute=["selective", "norms"]),
}


class Kept:
    """Bytes that autograd keeps: a storage counts from the first time that it is saved until nothing saved needs it.

    Weights are left out. Nothing is shared with the dry run's own book: what is saved says itself when it is let go.
    """

    def __init__(self, model: ParallelModel) -> None:
        self.now = self.most = 0
        self._model = model
        self._holders: Counter[int] = Counter()

    def pack(self, tensor: Tensor) -> Any:
        weights = (w for stage in self._model.stages.values() for w in stage.gathered().values())
        storage = tensor.untyped_storage()
        if storage.data_ptr() in {weight.untyped_storage().data_ptr() for weight in weights}:
            return tensor
        return Saved(self, tensor)

    def add(self, pointer: int, size: int) -> None:
        self._holders[pointer] += 1
        if self._holders[pointer] == 1:
            self.now += size
            self.most = max(self.most, self.now)

    def drop(self, pointer: int, size: int) -> None:
        self._holders[pointer] -= 1
        if not self._holders[pointer]:
            self.now -= size


class Saved:
    """One saved tensor."""

    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.kept, self.tensor, self.place = kept, tensor, (storage.data_ptr(), storage.nbytes())
        kept.add(*self.place)

    def __del__(self) -> None:
        self.kept.drop(*self.place)


def unpack(saved: Saved | Tensor) -> Tensor:
    return saved.tensor if isinstance(saved, Saved) else saved


def second_step(case: Case) -> tuple[int, dict[str, int]]:
    """(the most that autograd keeps, calls by group) in the second step of a rank."""
    model = make_model(case)
    kept = Kept(model)
    batches = micro_batches(case, 0, model.groups.coordinates.dp)
    model.forward_backward(batches)
    model.zero_grad()
    before = calls(model)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, unpack):
        model.forward_backward(batches)
    assert kept.now == 0
    return kept.most, dict(calls(model) - before)


def calls(model: ParallelModel) -> Counter[str]:
    """Collectives and messages so far, by group, as the rank's recorder has them."""
    counts: Counter[str] = Counter()
    for line in model.groups.recorder.as_json()["lines"]:
        counts[line["dimension"]] += line["started"]
    return counts


@pytest.mark.parametrize("name", CASES)
def test_every_rank_keeps_and_sends_what_a_real_one_does(name: str) -> None:
    """Activations within 2 %, and as many calls in every group."""
    case = CASES[name]
    measured = fork_ranks(case.world, lambda rank: second_step(case), timeout=120)
    for rank, (kept, counts) in enumerate(measured):
        dry = dry_run(case.plan(), rank)
        assert dry.most[Held.ACTIVATIONS] == pytest.approx(kept, rel=0.02), rank
        found: Counter[str] = Counter()
        for sent in dry.traffic:
            if sent.during != "NORM":  # which these ranks have not come to
                found[sent.group] += sent.count
        assert found == counts, rank


def test_products_are_those_that_pytorch_counts() -> None:
    """A step of the plain model, in one process."""
    case = Case(nmb=1, rows=ROWS)
    model = Llama(case.plan().config)
    initialise(model, 0)
    ((batch, _),) = micro_batches(case, 0, 0)
    with FlopCounterMode(display=False) as counter:
        model(batch.tokens, batch).backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(counted.get(operator, 0) for operator in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert dry_run(case.plan(), 0).flops.products == products
