"""A pipeline's channels: every pair of ring neighbours, both ways, each in the order of posting."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from fourfold.layout import Grid
from fourfold.parallel import connect
from fourfold.parallel.channels import ring_rounds
from fourfold.trainer.ranks import fork_ranks


@pytest.mark.parametrize("pp", range(1, 18))
def test_every_neighbour_once_and_no_rank_twice_in_a_round(pp: int) -> None:
    rounds = ring_rounds(pp)
    pairs = [frozenset(pair) for pair in chain.from_iterable(rounds)]
    assert sorted(map(sorted, pairs)) == sorted(
        map(sorted, {frozenset((r, (r + 1) % pp)) for r in range(pp) if pp > 1})
    )
    assert len(pairs) == len(set(pairs))
    for members in (list(chain.from_iterable(pairs)) for pairs in rounds):
        assert len(members) == len(set(members))


@pytest.mark.parametrize("grid", [Grid(pp=2), Grid(pp=3, tp=2), Grid(pp=5)])
def test_messages_arrive_in_order_on_every_channel(grid: Grid) -> None:
    """All sends are posted before any receive, to all neighbours at once: nothing may hold up anything else."""

    def work(rank: int) -> list[tuple[int, list[float]]]:
        groups = connect(grid, "cpu")
        me = groups.pp.rank
        neighbours = sorted({(me + 1) % grid.pp, (me - 1) % grid.pp})
        sent = [groups.send(torch.tensor([10.0 * rank + n]), peer) for peer in neighbours for n in range(3)]
        received = []
        for peer in reversed(neighbours):
            buffers = [torch.empty(1) for _ in range(3)]
            works = [groups.receive(buffer, peer) for buffer in buffers]
            for pending in works:
                pending.wait()
            received.append((groups.pp.ranks[peer], [buffer.item() for buffer in buffers]))
        for pending in sent:
            pending.wait()
        return received

    for rank, received in enumerate(fork_ranks(grid.size, work, timeout=60)):
        assert all(values == [10.0 * peer, 10.0 * peer + 1, 10.0 * peer + 2] for peer, values in received)
        assert {grid.coordinates(peer).tp for peer, _ in received} == {grid.coordinates(rank).tp}
