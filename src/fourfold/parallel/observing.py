"""What the operations of a rank's stages get and give, for whoever wants to look.

:class:`fourfold.model.Ops` is where all arithmetic of a stage goes through, but for the residual sums; the one that
ends a layer is what the layer gives. Nobody pays for a look that nobody takes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fourfold.model import Layer, Ops
from fourfold.parallel.model import ParallelModel
from fourfold.parallel.torch_private import in_backward

LAYER = "layer"  # kind of the residual sum that ends one


@dataclass(frozen=True)
class Operation:
    """One operation that has just run in a forward.

    Attributes:
        kind: its name in Ops, or LAYER.
        names: one per output: the weight's without ".weight"; of an operation without weight its module's and its own,
            as in "layers.0.attention.attend"; of a layer the layer's.
        inputs: the tensors that it got, weights left out; of a layer none.
        outputs: what it gave.
        stage: virtual, by global index.
        micro_batch: within the data-parallel group.
    """

    kind: str
    names: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    stage: int
    micro_batch: int


See = Callable[[Operation], None]


@contextmanager
def observed(model: ParallelModel, see: See) -> Generator[None]:
    """While it is open, ``see`` is told of every operation of this rank's stages, each time that a forward runs it.

    A forward that runs again in a backward, to make what was not kept, computes nothing new and is passed over. Hooks
    on the tensors of the first are called in backward all the same.
    """
    with ExitStack() as undo:
        for stage in model.stages.values():
            for path, module in stage.module.named_modules():
                if isinstance(ops := getattr(module, "ops", None), Ops):
                    undo.callback(setattr, module, "ops", ops)
                    watched = _watched(ops, path, module, partial(_tell, model, see))
                    module.ops = watched  # pyrefly: ignore[bad-argument-type] - no module, and none is wanted
                if isinstance(module, Layer):
                    undo.callback(module.register_forward_hook(partial(_layer, model, see, path)).remove)
        yield


def _tell(model: ParallelModel, see: See, kind: str, names: tuple[str, ...], given: Any, made: Any) -> None:
    here = model.groups.position
    inputs = tuple(x for x in given if isinstance(x, Tensor) and not isinstance(x, torch.nn.Parameter))
    see(Operation(kind, names, inputs, made, here.stage, here.micro_batch))


def _layer(model: ParallelModel, see: See, path: str, layer: Layer, given: tuple[Any, ...], out: Tensor) -> None:
    _tell(model, see, LAYER, (path,), (), (out,))


def _watched(ops: Ops, path: str, module: torch.nn.Module, tell: Callable[..., None]) -> Ops:
    """The operations of one module, each of which tells ``(kind, names, arguments, outputs)``."""
    prefix = f"{path}." if path else ""

    def holder(weight: Tensor) -> str:
        found = next(name for name, parameter in module.named_parameters() if parameter is weight)
        return prefix + found.removesuffix(".weight")

    def one(kind: str, name: Callable[..., str]) -> Callable[..., Tensor]:
        operation = getattr(ops, kind)

        def watched(*arguments: Any) -> Tensor:
            out = operation(*arguments)
            if not in_backward():
                tell(kind, (name(*arguments),), arguments, (out,))
            return out

        return watched

    def project(x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        out = ops.project(x, weights)
        if not in_backward():
            tell("project", tuple(holder(weight) for weight in weights), (x,), out)
        return out

    return Ops(
        embed=one("embed", lambda tokens, weight: holder(weight)),
        norm=one("norm", lambda x, weight, eps: holder(weight)),
        project=project,
        rotate=ops.rotate,  # what it gets is what `project` gave, and what it gives is what `attend` gets
        swiglu=one("swiglu", lambda a, b: f"{prefix}swiglu"),
        attend=one("attend", lambda q, k, v, batch: f"{prefix}attend"),
        combine=one("combine", lambda x, weight: holder(weight)),
        cross_entropy=one("cross_entropy", lambda logits, labels, size: f"{prefix}cross_entropy"),
    )
