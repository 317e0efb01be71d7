"""Steps whose loss or gradient norm is not finite: where the first bad value came from, and what becomes of the run.

Loss and norm are the same numbers on every rank, so all ranks come to the same decision without asking each other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from fourfold.layout import Grid, Schedule
from fourfold.parallel import Group, MicroBatch, ParallelModel
from fourfold.parallel.observing import LAYER, Operation, observed
from fourfold.recipe import Train

FORWARD, BACKWARD = 0, 1


class NonFiniteError(RuntimeError):
    """The run ends because of steps that were not finite. The message names the first bad value."""


@dataclass(frozen=True)
class NonFinite:
    """The first non-finite value of a step, in the order of computation.

    Attributes:
        kind: what it is. ``weight``: of a weight, before the step. ``input``, ``output``: of a module in a forward.
            ``arriving``, ``leaving``: the gradient that reaches a module in a backward, or that it passes on.
            ``gradient``: of a finished gradient though all its terms are finite. ``norm``: of the norm though all
            gradients are finite. ``none``: of nothing, when the step was repeated.
        name: of the weight or module; empty for ``norm`` and ``none``.
        rank: global rank that has it, the lowest of several.
        other_ranks: further ranks on which the same is not finite.
        micro_batch: index within the data-parallel group of ``rank``; -1 for a value that belongs to none.
        num_nan, num_inf, num_values: of the tensor on that rank.
        order: place in the computation, comparable between ranks.
    """

    kind: Literal["weight", "input", "output", "arriving", "leaving", "gradient", "norm", "none"]
    name: str = ""
    rank: int = -1
    other_ranks: tuple[int, ...] = ()
    micro_batch: int = -1
    num_nan: int = 0
    num_inf: int = 0
    num_values: int = 0
    order: tuple[int, ...] = ()

    def describe(self, grid: Grid) -> str:
        """A sentence for the user."""
        if self.kind == "none":
            return "the same step was finite when it was repeated: a fault of a machine or of the network"
        if self.kind == "norm":
            return "every gradient is finite, but their norm is too large for float32"
        what = {
            "weight": f"weight {self.name}, already before the step",
            "input": f"input of {self.name} in the forward of micro-batch {self.micro_batch}",
            "output": f"output of {self.name} in the forward of micro-batch {self.micro_batch}",
            "arriving": f"gradient that reaches {self.name} in the backward of micro-batch {self.micro_batch}",
            "leaving": f"gradient that {self.name} passes on in the backward of micro-batch {self.micro_batch}",
            "gradient": f"gradient of {self.name}, when summed over micro-batches and ranks",
        }[self.kind]
        place = ", ".join(f"{name} {index}" for name, index in grid.coordinates(self.rank)._asdict().items())
        counts = " and ".join(f"{n} {name}" for n, name in ((self.num_nan, "NaN"), (self.num_inf, "Inf")) if n)
        others = f"; the same on rank {', '.join(map(str, self.other_ranks))}" if self.other_ranks else ""
        return f"first on rank {self.rank} ({place}): {what}: {counts} of {self.num_values} values{others}"


class NonFinitePolicy:
    """What ``train.non_finite`` asks for: the run stops at such a step, or the step is left out.

    A step that is left out counts as a step, for data and learning rate; the optimizer does not see it.

    Attributes:
        skipped: steps left out so far.
    """

    def __init__(self, settings: Train, *, skipped: int = 0) -> None:
        self.skipped = skipped
        self._settings = settings
        self._in_a_row = 0

    def accepts(self, loss: float, norm: float) -> bool:
        """Whether the optimizer may step: both are finite. Else the caller finds out why and calls :meth:`refuse`."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return False
        self._in_a_row = 0
        return True

    def refuse(self, step: int, loss: float, norm: float, cause: str) -> str:
        """Counts a step that is left out and returns a line that says so, and why.

        Raises:
            NonFiniteError: the policy is to stop, or more than ``train.max_skipped`` steps in a row were left out.
        """
        what = f"step {step}: loss {loss}, gradient norm {norm}: {cause}"
        if self._settings.non_finite == "stop":
            raise NonFiniteError(what)
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row > self._settings.max_skipped:
            raise NonFiniteError(
                f"{what}; {self._in_a_row} steps in a row were not finite, and train.max_skipped is "
                f"{self._settings.max_skipped}"
            )
        return f"{what}; the step is left out"


def find_non_finite(
    model: ParallelModel, micro_batches: Sequence[MicroBatch], *, schedule: Schedule | None = None
) -> NonFinite:
    """Where the first non-finite value of a step comes from; the same answer on all ranks, which must call it together.

    Looks at the weights first. If they are finite, the step is run again and every operation is watched. Gradients are
    forgotten before and after; weights are not touched.

    Args:
        model: as it was in the step, its optimizer not stepped.
        micro_batches: those of the step.
        schedule: that of the step; default as for ``forward_backward``.
    """
    world = model.groups.world
    model.zero_grad()
    try:
        if (found := _first(world, _bad_tensor(model, "weight", lambda weight: weight))) is not None:
            return found
        with Watch(model) as watch:
            model.forward_backward(micro_batches, schedule=schedule)
        if (found := _first(world, watch.found)) is not None:
            return found
        if (found := _first(world, _bad_tensor(model, "gradient", lambda weight: weight.grad))) is not None:
            return found
        norm = model.gradients.norm(model.plan.recipe.optimizer.clip_norm_type)
        return NonFinite("none" if math.isfinite(norm) else "norm")
    finally:
        model.zero_grad()


class Watch:
    """While it is open, every operation of this rank's stages is looked at, forward and backward.

    ``found`` is the first non-finite value in the order (forward before backward, micro-batch, stage, operation), in
    which a value can only follow from earlier ones: the true order of a schedule interleaves micro-batches that do not
    depend on each other. A sum over TP ranks that overflows is found on the ranks that receive it.
    """

    def __init__(self, model: ParallelModel) -> None:
        self.found: NonFinite | None = None
        self._model = model
        self._open = ExitStack()
        self._places: dict[int, dict[str, int]] = {}  # of each operation in its stage's forward, by stage and name

    def __enter__(self) -> Watch:
        self._open.enter_context(observed(self._model, self._look))
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def _look(self, operation: Operation) -> None:
        """Looks at an operation that has just run, and will at its backward."""
        names, stage, micro_batch = operation.names, operation.stage, operation.micro_batch
        joint = ", ".join([names[0], *(name.rpartition(".")[2] for name in names[1:])])
        place = self._place(stage, joint)

        def forward(kind: str, name: str, side: int, x: Tensor) -> None:
            self._record(kind, name, micro_batch, (FORWARD, micro_batch, stage, place, side), x)

        def backward(kind: str, name: str, side: int, x: Tensor) -> None:
            self._record(kind, name, micro_batch, (BACKWARD, micro_batch, -stage, -place, side), x)

        for x in operation.inputs:
            forward("input", joint, 0, x)
        for i, (name, out) in enumerate(zip(names, operation.outputs, strict=True)):
            forward("output", name, 1 + i, out)
        if operation.kind == LAYER:
            return  # what it gets in backward goes on as it is

        def leaving(depth: int, grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
            for grad in grad_inputs:
                if grad is not None:
                    backward("leaving", joint, len(names) + depth, grad)

        for i, (name, out) in enumerate(zip(names, operation.outputs, strict=True)):
            if out.requires_grad:
                out.register_hook(partial(backward, "arriving", name, i))
        for depth, node in enumerate(_nodes_between(operation.inputs, operation.outputs)):
            node.register_hook(partial(leaving, depth))

    def _place(self, stage: int, name: str) -> int:
        places = self._places.setdefault(stage, {})
        return places.setdefault(name, len(places))

    def _record(self, kind: Any, name: str, micro_batch: int, order: tuple[int, ...], x: Tensor) -> None:
        if self.found is None or order < self.found.order:
            bad = _examine(x, NonFinite(kind, name, self._model.groups.rank, (), micro_batch, order=order))
            self.found = bad or self.found


def _nodes_between(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Iterator[Node]:
    """The nodes of the autograd graph that belong to an operation, from its outputs back to its inputs and weights."""
    seen: set[Node | None] = {x.grad_fn for x in inputs}
    ahead: deque[Node | None] = deque(x.grad_fn for x in outputs)
    while ahead:
        node = ahead.popleft()
        if node is None or node in seen or not node.next_functions:  # the last: where a leaf takes its gradient
            continue
        seen.add(node)
        ahead += [behind for behind, _ in node.next_functions]
        yield node


def _bad_tensor(
    model: ParallelModel, kind: Literal["weight", "gradient"], of: Callable[[torch.nn.Parameter], Tensor | None]
) -> NonFinite | None:
    """The first weight of this rank, frozen ones included, of which ``of(weight)`` is there and not finite."""
    for index, stage in model.stages.items():
        for place, (name, weight) in enumerate(stage.module.named_parameters()):
            about = NonFinite(kind, name, model.groups.rank, order=(index, place))
            if (tensor := of(weight)) is not None and (found := _examine(tensor, about)) is not None:
                return found
    return None


def _examine(x: Tensor, about: NonFinite) -> NonFinite | None:
    """``about`` with the counts of ``x``, of a DTensor this rank's part; None if all of it is finite."""
    with torch.no_grad():
        local = x.to_local() if isinstance(x, DTensor) else x
        if not local.is_floating_point() or bool(torch.isfinite(local).all()):
            return None
        num_nan, num_inf = int(local.isnan().sum()), int(local.isinf().sum())
    return replace(about, num_nan=num_nan, num_inf=num_inf, num_values=local.numel())


def _first(world: Group, mine: NonFinite | None) -> NonFinite | None:
    """The earliest of what the ranks have found, and which of them have the same."""
    found = [f for f in _gather(world, mine) if f is not None]
    if not found:
        return None
    first, *others = sorted(found, key=lambda f: (f.order, f.rank))
    return replace(first, other_ranks=tuple(f.rank for f in others if f.order == first.order))


def _gather(world: Group, mine: NonFinite | None) -> list[NonFinite | None]:
    """What every rank has, as JSON in a row of bytes padded with blanks."""
    text = msgspec.json.encode(mine)
    longest = int(world.total([len(text)], dist.ReduceOp.MAX)[0])
    row = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device=world.device)
    rows = world.all_gather(row.unsqueeze(0)).cpu().numpy()
    return [msgspec.json.decode(bytes(row), type=NonFinite | None) for row in rows]
