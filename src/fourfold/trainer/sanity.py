"""What must hold in every step of every layout, checked in the first steps of every run.

Each check compares what several ranks hold, and names those that differ. A fault here is Fourfold's, or the machine's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fourfold.parallel import TIED_EMBEDDING, TIED_HEAD, Group, MicroBatch, ParallelModel

ABSENT = -1  # of a rank that has nothing to compare


class SanityError(RuntimeError):
    """An invariant of training is broken."""


def check_inputs(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> None:
    """All ranks of one data-parallel group have the same rows."""
    mine = _checksum(
        tensor for batch, _ in micro_batches for tensor in (batch.tokens, batch.labels) if tensor is not None
    )
    for group in (model.groups.tp, model.groups.cp, model.groups.pp):
        _agree(group, mine, "the tokens of the batch")


def check_gradients(model: ParallelModel) -> None:
    """Before the optimizer steps: every trained weight has a finished gradient, and no weight is gathered."""
    for weight in model.gradients.weights:
        if weight.sharded.grad is None:
            raise SanityError(f"{weight.name} is trained but received no gradient")
    for index, stage in model.stages.items():
        if gathered := stage.gathered():
            raise SanityError(f"stage {index}: weights are still gathered: {', '.join(gathered)}")
        if not stage.sums_gradients():
            raise SanityError(f"stage {index}: FSDP would average gradients instead of adding them")
    replicated = _checksum(weight.gradient for weight in model.gradients.weights if weight.replicated)
    _agree(model.groups.tp, replicated, "the gradients of replicated weights")


def check_weights(model: ParallelModel) -> None:
    """After the optimizer has stepped: copies of a weight are bitwise equal over tp, over pp (tied) and dp x cp."""
    weights = model.gradients.weights
    _agree(model.groups.tp, _checksum(w.local for w in weights if w.replicated), "replicated weights")
    if model.plan.config.tied:
        ends = {w.name: _checksum([w.local]) for w in weights if w.name in (TIED_EMBEDDING, TIED_HEAD)}
        if len(set(ends.values())) > 1:
            raise SanityError("embedding and tied head differ")
        _agree(model.groups.pp, next(iter(ends.values()), ABSENT), "embedding and tied head")
    for index, stage in model.stages.items():
        for part in stage.fsdp_modules():
            part.unshard()
            mine = _checksum(stage.gathered().values())
            part.reshard()
            _agree(model.groups.fsdp, mine, f"the gathered weights of stage {index}")


def check_learning_rate(model: ParallelModel, optimizer: torch.optim.Optimizer, wanted: float) -> None:
    """Every rank's optimizer uses the learning rate that the schedule gives."""
    used = {group["lr"] for group in optimizer.param_groups}
    if used != {wanted}:
        raise SanityError(f"the optimizer's learning rates are {sorted(used)}, the schedule says {wanted}")
    _agree(model.groups.world, zlib.crc32(repr(wanted).encode()), "the learning rate")


def _checksum(tensors: Iterable[Tensor]) -> int:
    """Of the bits of all tensors in order; a number >= 0."""
    value = 0
    for tensor in tensors:
        # A copy: NumPy would pin the memory of a gathered weight, which FSDP2 must be able to free.
        value = zlib.crc32(tensor.detach().clone().cpu().view(torch.uint8).numpy().data, value)
    return value


def _agree(group: Group, mine: int, what: str) -> None:
    if group.size == 1:
        return
    values = group.all_gather(torch.tensor([mine], dtype=torch.int64, device=group.device)).tolist()
    present = {rank: value for rank, value in zip(group.ranks, values, strict=True) if value != ABSENT}
    if len(set(present.values())) > 1:
        first = next(iter(present.values()))
        others = [rank for rank, value in present.items() if value != first]
        raise SanityError(f"{what} should be equal on ranks {list(present)}, but differ on {others}")
