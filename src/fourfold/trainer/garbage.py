"""Python's cyclic garbage, collected by hand: on all ranks in the same step.

Left alone, each rank's collector runs when it has counted enough objects, in another step than its neighbours', and
every one of those pauses holds up all ranks. Together they cost one.
"""

from __future__ import annotations

import gc
from types import TracebackType

from fourfold.layout import Doing
from fourfold.parallel import Recorder


class Garbage:
    """Switches Python's collector off while it is entered. Enter it when model and optimizer are built.

    Args:
        every: steps from one collection to the next.
        recorder: of the rank, which logs collections.
    """

    def __init__(self, every: int, recorder: Recorder) -> None:
        self._every = every
        self._recorder = recorder

    def __enter__(self) -> Garbage:
        gc.collect()
        gc.freeze()  # what lives now lives to the end: no collection needs to look at it
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.unfreeze()
        gc.enable()

    def step_ended(self, step: int) -> None:
        """Collects if it is time to, after ``step``, counted from 1."""
        if step % self._every == 0:
            with self._recorder.doing(Doing.GC):
                gc.collect()
