"""What a forward pass keeps for its backward."""

from __future__ import annotations

import torch

from fourfold.parallel.batch import LocalBatch
from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import Case, make_model, micro_batches


def saved_tensors(case: Case) -> tuple[int, list[tuple[int, ...]]]:
    """(bytes, shapes) of the distinct tensors that one micro-batch's forward keeps, weights not counted."""
    model = make_model(case)
    ((batch, rows),) = micro_batches(case, 0, 0)
    tp = model.groups.tp.size
    local = LocalBatch.of(batch, rows, cp=1, cp_rank=0, tp=tp, cp_split="head_tail")
    storages: dict[int, int] = {}
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            shapes.append(tuple(tensor.shape))
        return tensor

    (stage,) = model.stages.values()
    stage.gather()
    weights = {weight.untyped_storage().data_ptr() for weight in stage.gathered().values()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = stage.module(local.tokens, local)
    loss.backward()
    return sum(size for pointer, size in storages.items() if pointer not in weights), shapes


def test_a_layer_keeps_what_the_inventory_says() -> None:
    """algorithms.md 3.2: norm inputs and outputs, q, k, v, attention output, gate, up and product, all over tp.

    Plain autograd would also keep the gathered inputs, fp32 copies in the norms, and more around SwiGLU.
    """
    rows = ((64,),)
    few, many = Case(tp=2, nmb=1, layers=2, rows=rows), Case(tp=2, nmb=1, layers=6, rows=rows)
    config = few.plan().config
    tokens, tp = 64, 2
    values = 4 * tokens * config.dim  # inputs and outputs of two norms
    values += 2 * tokens * config.head_dim * (config.num_heads + config.num_kv_heads)  # q, attention output, k, v
    values += tokens * config.num_heads  # log-sum-exp of the attention
    values += 3 * tokens * config.ffn_dim  # gate, up, product
    values += 2 * tokens  # what the norms keep per token
    (small, _), (large, _) = (
        fork_ranks(tp, lambda rank, case=case: saved_tensors(case)[0], timeout=60) for case in (few, many)
    )
    assert (large - small) / 4 == values * 4 / tp


def test_no_rank_holds_logits_of_the_whole_vocabulary() -> None:
    case = Case(tp=2, nmb=1, vocab=4096)
    for _, shapes in fork_ranks(2, lambda rank: saved_tensors(case), timeout=60):
        assert max(size for shape in shapes for size in shape) == 4096 // 2
