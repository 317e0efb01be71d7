"""One optimizer step of the same model by two stacks: Fourfold's own path, and a plain PyTorch Llama.

Both hold fp32 master weights, multiply in bf16, add gradients of micro-batches in fp32, clip, and update with AdamW.
The plain one is that of ``_torch_stack``: modules of PyTorch, ``fully_shard`` for mixed precision, ``is_causal``
attention, and where it is compiled, each layer and the loss as one, as TorchTitan does it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from _torch_stack import StageModule, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fourfold.model import Batch
from fourfold.parallel import Groups, MicroBatch, ParallelModel
from fourfold.recipe import RunPlan
from fourfold.trainer.optimizer import make_optimizer


class Stack(Protocol):
    """A model, its optimizer and its data."""

    def forward_backward(self) -> tuple[float, float]:
        """All micro-batches, and the gradient's norm: (loss per label, norm)."""
        ...

    def update(self) -> None:
        """The optimizer's step, with gradients clipped to a norm of 1, which are forgotten afterwards."""
        ...


def draw_weight(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Initial values that depend on the name alone, drawn on the device: fp32, ones for norms."""
    if len(shape) == 1:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device) * 0.02


def draw_rows(plan: RunPlan) -> tuple[Tensor, Tensor]:
    """Tokens and labels, int64 [micro-batches, seq_len]. Every token has a label."""
    batch = plan.recipe.batch
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(plan.config.vocab_size, (batch.sequences, batch.seq_len + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Fourfold:
    """What the trainer's loop does with a model, without its bookkeeping."""

    def __init__(self, plan: RunPlan, groups: Groups, device: torch.device) -> None:
        def initial(name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
            return draw_weight(name, shape, device)[slices]

        self.model = ParallelModel(plan, groups, weights=initial, device=device)
        self.optimizer = make_optimizer(self.model.gradients.weights, plan.recipe.optimizer, tied=False)
        one_document = [[plan.recipe.batch.seq_len]]
        self.micro_batches: list[MicroBatch] = [
            (Batch.from_rows(row, one_document, labels=following), one_document)
            for row, following in zip(*draw_rows(plan), strict=True)
        ]
        self._norm = 0.0

    def forward_backward(self) -> tuple[float, float]:
        """See :class:`Stack`."""
        totals = self.model.forward_backward(self.micro_batches)
        self._norm = self.model.gradients.norm()
        return totals.loss, self._norm

    def update(self) -> None:
        """See :class:`Stack`."""
        self.model.gradients.clip(self._norm, 1.0)
        self.model.gradients.hand_over()
        self.optimizer.step()
        self.model.zero_grad()


class Plain:
    """The same of PyTorch's own parts, on one GPU."""

    def __init__(self, plan: RunPlan, device: torch.device, *, compiled: bool) -> None:
        config, settings = plan.config, plan.recipe.optimizer
        with device:
            layers = range(config.num_layers)
            self.module = StageModule(config, layers, embedding=True, head=True, seq_len=plan.recipe.batch.seq_len)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(draw_weight(name, tuple(parameter.shape), device))
        mesh = init_device_mesh(device.type, (1,))
        # The angles would be rounded to bf16 if inputs were cast.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in self.module.layers.values():
            if compiled:
                layer.compile()
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(self.module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self._loss = torch.compile(_loss) if compiled else _loss
        self._rows = [rows.to(device) for rows in draw_rows(plan)]
        self._norm = torch.zeros(())
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=settings.lr, betas=settings.betas)

    def forward_backward(self) -> tuple[float, float]:
        """See :class:`Stack`."""
        tokens, labels = self._rows
        losses = []
        for number, (row, following) in enumerate(zip(tokens, labels, strict=True)):
            last = number == len(tokens) - 1
            self.module.set_requires_gradient_sync(last)  # pyrefly: ignore[not-callable]
            self.module.set_is_last_backward(last)  # pyrefly: ignore[not-callable]
            loss = self._loss(self.module(row[None]), following) / labels.numel()
            loss.backward()
            losses.append(loss.detach())
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        self._norm = whole(torch.nn.utils.get_total_norm(grads))
        return torch.stack(losses).sum().item(), self._norm.item()

    def update(self) -> None:
        """See :class:`Stack`."""
        torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), 1.0, self._norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="sum")


def time_steps(
    stack: Stack, num_steps: int, *, wait: Callable[[], None], between: Callable[[str], None]
) -> list[tuple[float, float]]:
    """(Seconds of forward and backward, of the update) of every step.

    ``wait`` returns when the device has done what it was given. ``between("forward_backward")`` and
    ``between("update")`` are called after each, when its time has been taken.
    """
    times = []
    for _ in range(num_steps):
        wait()
        start = time.perf_counter()
        stack.forward_backward()
        wait()
        middle = time.perf_counter()
        between("forward_backward")
        resumed = time.perf_counter()
        stack.update()
        wait()
        times.append((middle - start, time.perf_counter() - resumed))
        between("update")
    return times
