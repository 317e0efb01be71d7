"""A backward in two halves: the gradients of weights are put off until the schedule says W.

In a whole backward a function of :mod:`fourfold.parallel.tensor` makes the gradients of its input and of its weights.
In the first half of one, I, it gives autograd only that of its input, and leaves with :class:`WeightHalves` what the
other needs. W makes the very same products, and lets autograd carry them to the weights on the way that they would have
taken.

What is kept from I to W is what a weight's gradient is made of: the input of a matrix product, and the gradient of its
output, before TP's gathers. The rest of the graph is gone after I.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.parallel.groups import Pending

GATHERED_AHEAD = 2  # functions for which W gathers while it multiplies for one before: each holds all tokens once


class Half(NamedTuple):
    """What W does for one function. It holds no more than it needs, for it may live for long.

    Attributes:
        weights: as the function got them.
        gather: starts the gather of what lies split over TP, or gives what is there.
        make: the gradient of each weight, from what was gathered.
    """

    weights: Sequence[Tensor]
    gather: Callable[[], Pending]
    make: Callable[[Tensor], Sequence[Tensor]]

    def add(self, gathered: Tensor) -> None:
        """Adds the gradients to those that the weights have."""
        torch.autograd.backward(self.weights, self.make(gathered))


class WeightHalves:
    """Where the functions of one rank's stages leave the second halves of their backwards."""

    def __init__(self) -> None:
        self._kept: list[Half] | None = None

    @contextmanager
    def keeping(self) -> Generator[list[Half]]:
        """A backward within is a first half. Afterwards the list holds the second, in the order of the backward."""
        kept: list[Half] = []
        self._kept = kept
        try:
            yield kept
        finally:
            self._kept = None

    @property
    def put_off(self) -> bool:
        """Whether the backward that runs now is a first half."""
        return self._kept is not None

    def put(self, half: Half) -> None:
        """Leaves a second half."""
        assert self._kept is not None
        self._kept.append(half)


@torch.no_grad()
def run_halves(kept: list[Half], after_each: Callable[[], None]) -> None:
    """Adds the gradients of all of ``kept``, which is empty afterwards; ``after_each`` is called after every function.

    TP's gathers run while the product before them does.
    """
    waiting = deque(kept)
    kept.clear()
    gathering: deque[Pending] = deque()
    while waiting:
        while len(gathering) < min(1 + GATHERED_AHEAD, len(waiting)):
            gathering.append(waiting[len(gathering)].gather())
        waiting.popleft().add(gathering.popleft().wait())
        after_each()
