"""The vocabulary of a pipeline schedule: what one pipeline rank does, one action after the other.

An action is written as PyTorch's own schedules write it: stage, kind, micro-batch. ``3F7`` is the forward of stage 3 on
micro-batch 7, ``3SEND_F7`` hands its output to stage 4, ``3RECV_B7`` awaits the gradient that stage 4 sends back, and
``3REDUCE`` is the gradient reduce-scatter of stage 3.

A backward is one action, B, or in zero-bubble schedules two: I makes the gradient of the stage's input, for which the
stage before waits, and W the gradients of the weights, later, when the rank would have to wait itself.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does. Sends and receives are postings: they return at once."""

    FORWARD = "F"
    BACKWARD = "B"  # whole
    INPUT = "I"  # its first half: the gradient of the stage's input
    WEIGHT = "W"  # its second half: the gradients of the stage's weights
    SEND_FORWARD = "SEND_F"  # post the send of this stage's output to the next stage
    RECV_FORWARD = "RECV_F"  # post the receive of this stage's input from the previous stage
    SEND_BACKWARD = "SEND_B"  # post the send of the gradient of this stage's input to the previous stage
    RECV_BACKWARD = "RECV_B"  # post the receive of the gradient of this stage's output from the next stage
    GATHER = "GATHER"  # FSDP all-gather of the stage's weights
    REDUCE = "REDUCE"  # FSDP reduce-scatter of the stage's gradients
    FREE = "FREE"  # drop the gathered weights


SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
MESSAGES = SENDS | RECEIVES
COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT})
BACKS = frozenset({Kind.BACKWARD, Kind.INPUT})  # computations that make the gradient of a stage's input
ENDS = frozenset({Kind.BACKWARD, Kind.WEIGHT})  # computations after which nothing of a micro-batch is kept any more

NO_MICRO_BATCH = -1  # of an FSDP event, which belongs to a stage and not to a micro-batch

# Of each send and receive: the direction, and how far the sending stage is from the action's own.
_DIRECTIONS = {
    Kind.SEND_FORWARD: (Kind.FORWARD, 0),
    Kind.RECV_FORWARD: (Kind.FORWARD, -1),
    Kind.SEND_BACKWARD: (Kind.BACKWARD, 0),
    Kind.RECV_BACKWARD: (Kind.BACKWARD, 1),
}

_PATTERN = re.compile(r"(0|[1-9][0-9]*)([A-Z_]+)(|0|[1-9][0-9]*)")


class Action(NamedTuple):
    """One entry of a rank's list. ``stage`` is the global index of a virtual stage: chunk * pp + pipeline rank."""

    kind: Kind
    stage: int
    micro_batch: int = NO_MICRO_BATCH

    def __str__(self) -> str:
        suffix = "" if self.micro_batch == NO_MICRO_BATCH else str(self.micro_batch)
        return f"{self.stage}{self.kind.value}{suffix}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``. Raises ValueError on anything else."""
        match = _PATTERN.fullmatch(text)
        kind = next((kind for kind in Kind if match and kind.value == match[2]), None)
        if match is None or kind is None or (kind in COMPUTE | MESSAGES) != bool(match[3]):
            raise ValueError(
                f"action {text!r}: must be STAGE KIND MICRO_BATCH without spaces, as in 3F7, or for an FSDP event "
                f"STAGE KIND, as in 3REDUCE; KIND one of {', '.join(Kind)}"
            )
        return cls(kind, int(match[1]), int(match[3]) if match[3] else NO_MICRO_BATCH)

    @property
    def message(self) -> tuple[str, int, int]:
        """What a send or a receive moves: (direction, sending stage, micro-batch), the same at both ends.

        The direction is F for outputs and B for gradients, also where an I makes them.
        """
        kind, shift = _DIRECTIONS[self.kind]
        return (kind, self.stage + shift, self.micro_batch)

    @property
    def send(self) -> Action:
        """Of a send or a receive: the send, at the message's other end or this one."""
        direction, stage, micro_batch = self.message
        return Action(Kind.SEND_FORWARD if direction == Kind.FORWARD else Kind.SEND_BACKWARD, stage, micro_batch)

    @property
    def result(self) -> tuple[str, int, int]:
        """Of a forward, a backward or its first half: the message that its neighbour needs."""
        return (Kind.FORWARD if self.kind is Kind.FORWARD else Kind.BACKWARD, self.stage, self.micro_batch)
