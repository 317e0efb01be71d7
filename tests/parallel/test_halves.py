"""What the first half of a backward keeps for the second, and what the two communicate."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourfold.parallel.batch import LocalBatch
from fourfold.parallel.halves import WeightHalves
from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import Case, make_model, micro_batches
from tests.parallel.test_collectives import spied_step


class Watched(TorchDispatchMode):
    """Sees every storage that an operation makes while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self, *, but: set[int]) -> int:
        """Bytes of those that stay alive, but for some. gloo's threads let go of what they have sent a moment later."""
        found = []
        for _ in range(10):
            left = (size for key, (held, size) in self._seen.items() if key not in but and not held.expired())
            found.append(sum(left))
            time.sleep(0.01)
        return min(found)


def alive_bytes(case: Case) -> list[int]:
    """Bytes alive after the forward, the first half and the second half of one micro-batch, without weights."""
    model = make_model(case)
    ((batch, rows),) = micro_batches(case, 0, 0)
    local = LocalBatch.of(batch, rows, cp=1, cp_rank=0, tp=model.groups.tp.size, cp_split="head_tail")
    (stage,) = model.stages.values()
    stage.gather()
    weights = {weight.untyped_storage()._cdata for weight in stage.gathered().values()}
    found = []
    with Watched() as watched:
        edge = get_gradient_edge(stage.module(local.tokens, local))
        found.append(watched.alive(but=weights))
        with stage.halves.keeping() as kept:
            torch.autograd.backward([edge], [torch.ones(())])
        del edge
        found.append(watched.alive(but=weights))
    assert all(weight.grad is None for weight in stage.module.parameters())
    stage.add_gradients(kept)
    assert not kept
    found.append(watched.alive(but=weights))
    return found


def test_between_the_halves_only_what_the_second_needs_is_alive() -> None:
    """Per layer the inputs of the matrix products (two norms' outputs, attention's, SwiGLU's product) and the gradients
    of their outputs (q, k, v, gate, up, and twice the hidden state), all over tp; and the gradients of the norms."""
    few, many = (Case(tp=2, nmb=1, layers=layers, rows=((64,),)) for layers in (2, 6))
    config, tokens, tp = few.plan().config, 64, 2
    inputs = 2 * config.dim + config.num_heads * config.head_dim + config.ffn_dim
    outputs = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim + 2 * config.ffn_dim + 2 * config.dim
    numbers = tokens * (inputs + outputs) // tp + 2 * config.dim
    small, large = (fork_ranks(tp, lambda rank, case=case: alive_bytes(case), timeout=60)[0] for case in (few, many))
    forward, between, after = ((more - less) / 4 for more, less in zip(large, small, strict=True))
    assert between == 4 * numbers
    assert between < 1.1 * forward
    assert after == 4 * 2 * config.dim  # the norms' gradients, which their weights have taken over


def input_between_halves(case: Case) -> bool:
    """Whether the input of a stage is still there between the halves of its backward, on the last pipeline rank."""
    model = make_model(case)
    ((batch, rows),) = micro_batches(case, 0, 0)
    if model.groups.pp.rank == 0:
        return False
    local = LocalBatch.of(batch, rows, cp=1, cp_rank=0, tp=1, cp_split="head_tail")
    (stage,) = model.stages.values()
    stage.gather()
    x = torch.randn(local.num_tokens, model.plan.config.dim, requires_grad=True)
    held = StorageWeakRef(x.untyped_storage())
    edge = get_gradient_edge(stage.module(x, local))
    with stage.halves.keeping() as kept:
        torch.autograd.backward([edge], [torch.ones(())])
    del x, edge
    assert kept
    return not held.expired()


def test_the_first_half_lets_go_of_the_input_and_with_it_of_its_gradient() -> None:
    """What is kept must not lead back to them through the graph."""
    assert not any(fork_ranks(2, lambda rank: input_between_halves(Case(pp=2, nmb=1, rows=((64,),))), timeout=60))


@pytest.mark.parametrize(("schedule", "collectives"), [("1f1b", 10), ("zb-h1", 12)])
def test_collectives_of_tensor_parallelism_per_layer(schedule: str, collectives: int) -> None:
    """Four forward and six backward; in halves the gradients of what two products put out are gathered twice."""

    def count(layers: int) -> int:
        case = Case(tp=2, nmb=2, layers=layers, schedule=schedule, zero=1)
        seen = fork_ranks(case.world, lambda rank: spied_step(case), timeout=60)[0]
        return sum(name in ("all_gather_single", "all_to_all_single") for name, _ in seen)

    assert count(3) - count(2) == 2 * collectives  # two micro-batches


def test_zero_3_reduces_layer_by_layer_and_gathers_nothing_for_the_second_half() -> None:
    case = Case(pp=2, dp=2, nmb=3, layers=4, schedule="zb-h1", zero=3)
    for seen in fork_ranks(case.world, lambda rank: spied_step(case), timeout=60):
        count = Counter(name for name, _ in seen)
        groups = 2 + 1  # two layers, and the embedding or the head
        assert count["reduce_scatter_single"] + count["reduce_scatter_tensor"] == 3 * groups
        assert count["all_gather_single"] == 2 * 3 * groups


def test_zero_3_reduces_a_layer_as_soon_as_its_gradients_are_made() -> None:
    """Between the reduce-scatters of two layers are gathers for products that are to come. Only that for the embedding,
    whose gradient is the last to be made, comes before that of layer 0."""
    case = Case(tp=2, dp=2, nmb=2, layers=3, schedule="zb-h1", zero=3)
    names = [name for name, _ in fork_ranks(case.world, lambda rank: spied_step(case), timeout=60)[0]]
    reduces = [name.startswith("reduce_scatter") for name in names]
    assert sum(reduces) == 2 * 4
    assert sum(both == (True, True) for both in pairwise(reduces)) == 2  # one in each of two micro-batches


def test_an_error_inside_of_a_first_half_does_not_make_the_next_backward_one() -> None:
    halves, seen = WeightHalves(), []

    def stop() -> None:
        seen.append(halves.put_off)
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"), halves.keeping():
        stop()
    assert seen == [True]
    assert not halves.put_off
