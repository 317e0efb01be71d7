"""The plain run: one process, the whole global batch, the plain model, PyTorch's own autograd.

It shares no sum with any layout: what lies between it and the ordered reference is how large order alone is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fourfold.debugger.numerics.fingerprints import Fingerprinter
from fourfold.debugger.numerics.optimizer import recipes_optimizer
from fourfold.debugger.numerics.ordered.reference import DTYPES, MicroBatch, ReferenceStep
from fourfold.debugger.numerics.ordered.weights import Source
from fourfold.debugger.numerics.records import Kind, RankStep
from fourfold.layout import Grid
from fourfold.model import PLAIN, Batch, Llama
from fourfold.recipe import RunPlan, is_frozen

ALONE = Grid(tp=1, cp=1, pp=1, dp=1)


class PlainRun:
    """The model, its optimizer and its steps. Arguments as for `OrderedReference`."""

    def __init__(self, plan: RunPlan, source: Source) -> None:
        self.plan = plan
        self.model = Llama(plan.config).to(DTYPES[plan.recipe.train.dtype])
        config, freeze = plan.config, plan.recipe.train.freeze
        self.masters: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            shape = tuple(parameter.shape)
            trained = not is_frozen(name, freeze, tied=config.tied)
            parameter.requires_grad_(trained)
            whole = source(name, shape, (slice(None),) * len(shape))
            self.masters[name] = nn.Parameter(whole, requires_grad=trained)
        trained_ones = [(n, w.ndim, [w]) for n, w in self.masters.items() if w.requires_grad]
        self._optimizer = recipes_optimizer(plan, trained_ones)
        self._maker = Fingerprinter()
        self._number = 0

    def step(self, groups: Sequence[Sequence[MicroBatch]], *, lr: float) -> ReferenceStep:
        """One optimizer step over the micro-batches of every data-parallel group."""
        self._number += 1
        batches = [batch for group in groups for batch, _ in group]
        valid = max(sum(int((batch.labels >= 0).sum()) for batch in batches if batch.labels is not None), 1)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])
        loss = sum(self._forward_backward(batch, 1.0 / valid) for batch in batches) / valid
        gradients = {name: master.grad for name, master in self.masters.items() if master.grad is not None}
        kind, limit = self.plan.recipe.optimizer.clip_norm_type, self.plan.recipe.optimizer.clip_norm
        each = torch.stack([torch.linalg.vector_norm(grad, kind).double() for grad in gradients.values()])
        norm = each.amax().item() if math.isinf(kind) else each.square().sum().sqrt().item()
        record = RankStep(self._number, 0, ALONE, {"loss": loss, "grad_norm": norm})
        self._see(record, Kind.GRADIENT, gradients)
        for grad in gradients.values():
            if 0 < limit < norm:
                grad.mul_(limit / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._see(record, Kind.WEIGHT, self.masters)
        return ReferenceStep(loss, norm, [record])

    def _forward_backward(self, batch: Batch, scale: float) -> float:
        """Adds the gradients of a micro-batch to the masters', in fp32. Returns its loss, summed over labels."""
        assert batch.labels is not None
        size, z_loss = self.plan.config.vocab_size, self.plan.recipe.train.z_loss
        logits = self.model(batch.tokens, batch.without_labels())
        loss = PLAIN.cross_entropy(logits, batch.labels, size)
        objective = loss
        if z_loss:
            log_total = logits[:, :size].float().logsumexp(1)
            objective = loss + z_loss * torch.where(batch.labels >= 0, log_total.square(), 0.0).sum()
        (objective * scale).backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                master = self.masters[name]
                master.grad = parameter.grad.float() if master.grad is None else master.grad + parameter.grad.float()
                parameter.grad = None
        return loss.item()

    def _see(self, record: RankStep, kind: Kind, tensors: dict[str, Tensor] | dict[str, nn.Parameter]) -> None:
        for name, tensor in tensors.items():
            record.see(self._maker, kind, name, tensor, rows=torch.arange(len(tensor)))
