"""Between the last backward and the optimizer: the gradient sums that FSDP does not make, the norm, and clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.parallel.data import ShardedStage
from fourfold.parallel.groups import Groups
from fourfold.parallel.stage import TIED_EMBEDDING, TIED_HEAD


@dataclass(frozen=True)
class TrainedWeight:
    """One trained weight as this rank holds it.

    Attributes:
        name: in the model.
        sharded: the parameter, a DTensor over (dp x cp, tp).
        local: the part in this rank's memory, which the optimizer updates: DTensors would cost its first step
            0.4 s of sharding propagation for nothing.
        replicated: whether every TP rank has the same.
        counted: whether this rank's part counts in the global norm; copies count once.
    """

    name: str
    sharded: nn.Parameter
    local: nn.Parameter
    replicated: bool
    counted: bool

    @property
    def gradient(self) -> Tensor:
        """The local part of the fp32 gradient. Raises RuntimeError if there is none."""
        grad = self.sharded.grad
        if grad is None:
            raise RuntimeError(f"{self.name} is trained but received no gradient")
        assert isinstance(grad, DTensor)
        with torch.no_grad():
            return grad.to_local()


def trained_weights(stages: Mapping[int, ShardedStage], groups: Groups, *, tied: bool) -> list[TrainedWeight]:
    """All trained weights of this rank, by stage. Call it while no weight is gathered."""
    found = []
    for stage in stages.values():
        assert not stage.gathered()
        for name, parameter in stage.module.named_parameters():
            if not parameter.requires_grad:
                continue
            assert isinstance(parameter, DTensor)
            replicated = parameter.placements[-1].is_replicate()
            with torch.no_grad():
                local = nn.Parameter(parameter.to_local().detach())
            counted = (groups.tp.rank == 0 or not replicated) and not (tied and name == TIED_HEAD)
            found.append(TrainedWeight(name, parameter, local, replicated, counted))
    return found


class Gradients:
    """The gradients of one rank's trained weights."""

    def __init__(self, weights: list[TrainedWeight], groups: Groups, *, tied: bool) -> None:
        self.weights = weights
        self.groups = groups
        self._tied = tied

    def finish(self) -> None:
        """Makes the sums that are still missing, in fp32. Before, replicated weights have partial sums."""
        with torch.no_grad():
            self._sum_replicated()
            if self._tied:
                self._sum_tied()

    def _sum_replicated(self) -> None:
        """One all-reduce over TP for all replicated weights: norms, and wk and wv where TP ranks share a KV head."""
        grads = [weight.gradient for weight in self.weights if weight.replicated]
        if self.groups.tp.size == 1 or not grads:
            return
        total = self.groups.tp.all_reduce(torch.cat([grad.reshape(-1) for grad in grads]))
        for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def _sum_tied(self) -> None:
        """Adds the gradients of embedding and tied head, first stage plus last stage at both ends."""
        ends = {w.name: w.gradient for w in self.weights if w.name in (TIED_EMBEDDING, TIED_HEAD)}
        if len(ends) == 2:
            first, last = ends[TIED_EMBEDDING], ends[TIED_HEAD]
            first.add_(last)
            last.copy_(first)
        elif ends:
            ((name, own),) = ends.items()
            other = self._exchange(own, first=name == TIED_EMBEDDING)
            own.copy_(own + other if name == TIED_EMBEDDING else other + own)

    def _exchange(self, own: Tensor, *, first: bool) -> Tensor:
        """Swaps tensors of one shape between the first and the last pipeline rank."""
        groups, other = self.groups, torch.empty_like(own)
        peer = groups.grid.pp - 1 if first else 0
        with groups.pp.labelled("exchange"):
            for work in (groups.send(own.contiguous(), peer), groups.receive(other, peer)):
                work.wait()
        return other

    def norm(self, kind: float = 2.0) -> float:
        """The norm of all gradients of the model together, 2 or inf; the same number on every rank."""
        parts = [weight.gradient for weight in self.weights if weight.counted and weight.local.numel()]
        norms = [torch.linalg.vector_norm(part, kind).double() for part in parts]
        each = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
        if math.isinf(kind):
            largest = each.amax().item()
            # A maximum over ranks keeps or loses a NaN as the back end compares: it travels as a flag.
            undefined, largest = self.groups.world.total([float(math.isnan(largest)), largest], dist.ReduceOp.MAX)
            return math.nan if undefined else largest
        return math.sqrt(self.groups.world.total([each.square().sum().item()])[0])

    def clip(self, norm: float, limit: float) -> None:
        """Scales all gradients so that their norm, which is ``norm`` now, is at most ``limit``."""
        if norm > limit:
            for weight in self.weights:
                weight.gradient.mul_(limit / norm)

    def hand_over(self) -> None:
        """Gives the optimizer its gradients: those of the local parts."""
        for weight in self.weights:
            weight.local.grad = weight.gradient
