"""The channels of a pipeline: a process group of two ranks for each ordered pair of neighbours.

NCCL runs the point-to-point operations of one group one after the other, whatever their peers. In a group of the whole
pipeline a receive that waits for its sender would hold up sends to others, and plans that are free of deadlock would
deadlock. A group for each channel gives what ``layout.validate`` takes for granted, and nothing more: messages from one
rank to another arrive in the order of posting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

Channels = dict[tuple[int, int], dist.ProcessGroup]
"""(sending pipeline rank, receiving pipeline rank) -> their group."""


def ring_rounds(pp: int) -> list[list[tuple[int, int]]]:
    """All pairs of neighbours on a ring of ``pp``, in rounds in which no rank occurs twice."""
    edges = [(rank, (rank + 1) % pp) for rank in range(pp if pp > 2 else pp - 1)]
    rounds = [edges[0::2], edges[1::2]]
    if pp > 2 and pp % 2:
        rounds = [edges[0:-1:2], edges[1::2], edges[-1:]]
    return [pairs for pairs in rounds if pairs]


def open_channels(pipeline: Sequence[int], me: int) -> Channels:
    """Makes the channels of one pipeline rank. All ranks of the pipeline call it.

    Only the members of a group create it: at 16,384 ranks nobody waits for thousands of groups of others. PyTorch then
    names a group by its ranks and by how many its members have, so in every round every rank must make as many groups:
    one without a partner makes them with itself.

    Args:
        pipeline: global ranks of the pipeline's ranks.
        me: this rank's place among them.
    """
    channels: Channels = {}
    for pairs in ring_rounds(len(pipeline)):
        a, b = next((pair for pair in pairs if me in pair), (me, me))
        for source, destination in ((a, b), (b, a)):
            ranks = sorted({pipeline[source], pipeline[destination]})
            group = dist.new_group(ranks, use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            if a != b:
                channels[source, destination] = group
    return channels
