"""What backward makes again instead of having kept it; ``train.recompute`` says so for every virtual stage.

A norm keeps its input and one number per token, and SwiGLU its two inputs. What they give is one pass over these, bit
for bit, and yet a matrix product that follows would keep it as well. So such a tensor knows its :class:`Origin`, and
the product keeps that: nothing that is not kept already. That is all of "norms", "swiglu" and "selective".

"full" does so, too, and keeps of a layer its input alone. The layer's forward runs a second time when its backward
begins, with its collectives, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fourfold.model import Llama
from fourfold.recipe.schema import Recompute


class Origin(NamedTuple):
    """How a tensor can be made: bit for bit ``make(*parts)``."""

    make: Callable[..., Tensor]
    parts: tuple[Tensor, ...]


def remember(tensor: Tensor, make: Callable[..., Tensor], *parts: Tensor) -> Tensor:
    """The tensor, which knows from now on that it is ``make(*parts)``. They live as long as it does."""
    tensor.origin = Origin(make, parts)  # pyrefly: ignore[missing-attribute]
    return tensor


def origin_of(tensor: Tensor) -> Origin:
    """What to keep of a tensor that backward needs: what it is made of if it knows, else itself."""
    return getattr(tensor, "origin", None) or Origin(_itself, (tensor,))


def knows_origin(tensor: Tensor) -> bool:
    """Whether it was remembered what a tensor is made of."""
    return hasattr(tensor, "origin")


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class Policy:
    """What one virtual stage makes again.

    Attributes:
        norms, swiglu: whether the products behind them keep what these keep anyway.
        layers: whether a layer keeps its input only.
        again: whether a layer's forward is running for the second time.
    """

    def __init__(self, kind: Recompute) -> None:
        self.norms = kind in ("norms", "selective", "full")
        self.swiglu = kind in ("swiglu", "selective", "full")
        self.layers = kind == "full"
        self.again = False

    def apply(self, module: Llama) -> None:
        """Makes the layers of a stage run again in backward, if they shall. Before they are sharded: FSDP's gathers
        and frees then stay around a layer's forward and backward, and none is between its second forward and these."""
        for layer in module.layers.values() if self.layers else ():
            layer.forward = partial(  # pyrefly: ignore[bad-assignment]
                checkpoint,
                layer.forward,
                use_reentrant=False,
                preserve_rng_state=False,  # nothing here is random
                context_fn=self._contexts,
            )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._second()

    @contextmanager
    def _second(self) -> Generator[None]:
        self.again = True
        try:
            yield
        finally:
            self.again = False
