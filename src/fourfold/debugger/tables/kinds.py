"""What the operations of a table do, by their names."""

from __future__ import annotations

from enum import Enum
from functools import cache


class Role(Enum):
    """What an operation waits for, and with whom it meets."""

    FORWARD = "forward-compute"
    BACKWARD = "backward-compute"
    FORWARD_SEND = "forward-send"
    FORWARD_RECV = "forward-recv"
    BACKWARD_SEND = "backward-send"
    BACKWARD_RECV = "backward-recv"
    GATHER = "params-all-gather"
    """FSDP's or the distributed optimizer's, among the replicas of a stage."""
    REDUCE = "grads-reduce-scatter"
    EMBEDDING = "embedding-grads-all-reduce"
    """Between the stages that share the embedding, in each replica."""
    NORM = "optimizer-clip-main-grad"
    """The global norm: all workers meet."""
    COLLECTIVE = "collective"
    """Another one, such as layernorm-grads-all-reduce in a TP group, whose other ranks are not in the table."""
    ALONE = "alone"
    """A worker's own: optimizer, gc."""


COMPUTATIONS = (Role.FORWARD, Role.BACKWARD)
SENDS = (Role.FORWARD_SEND, Role.BACKWARD_SEND)
RECVS = (Role.FORWARD_RECV, Role.BACKWARD_RECV)
MESSAGES = SENDS + RECVS
OVER_REPLICAS = (Role.GATHER, Role.REDUCE)
OPTIONAL = (Role.COLLECTIVE, Role.ALONE)
"""What a worker may do in one step and not in another: no other waits for it."""
COMPUTED = (*COMPUTATIONS, Role.ALONE)
"""What takes a worker's own time; all else is communication."""

_BY_NAME = {r.value: r for r in Role if r not in OPTIONAL} | {"grads-all-reduce": Role.REDUCE}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "barrier")


@cache
def role(name: str) -> Role:
    """The role of an operation that a table calls so."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    return Role.COLLECTIVE if name.endswith(_COLLECTIVES) else Role.ALONE


def kind(name: str) -> str:
    """The name under which an operation's slowdown is given: both ends of a message are one."""
    if role(name) in MESSAGES:
        return f"{name.partition('-')[0]}-pp-comm"
    return name
