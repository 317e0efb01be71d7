"""The cost of context-parallel attention: tiles against a mask drawn in full, hand computations, published facts."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from fourfold.layout.documents import describe, shards
from fourfold.simulator.figures.cp_attention import (
    BLOCK,
    LINK,
    SLOWER,
    TILE,
    Gpu,
    Heads,
    all_gather,
    gather_bandwidth,
    gather_seconds,
    kernel,
    one_gpu,
    relative_hfu,
    ring,
)

ONE = Heads(query=1)
ROWS = ([1024], [300, 212], [1, 130, 600, 37, 256], [64] * 8, [512, 512])


def unit_gpu(units: int = 1) -> Gpu:
    """A GPU on which a pair of a whole tile takes 1 / (128 x 128) s, so a block of 64 keys half a second."""
    return Gpu(attention=units * 4.0 * 128 * TILE * 128, units=units, hbm=1e30)


class TestTiles:
    @pytest.mark.parametrize("documents", ROWS)
    @pytest.mark.parametrize("cp", [1, 2, 3])
    @pytest.mark.parametrize("backward", [False, True])
    def test_blocks_of_the_mask_that_hold_a_pair(self, documents: list[int], cp: int, backward: bool) -> None:
        """Every (tile, block) in which something is visible costs the same; counted in a mask that is drawn in full."""
        ids, positions = describe([documents])
        mask = (ids[:, None] == ids) & (positions[:, None] >= positions)
        for shard in shards([documents], cp=cp):
            blocks = 0
            for run in shard.runs:
                queries = shard.index[run.query_start :][: run.query_length]
                part = mask[queries][:, run.key_start : run.key_start + run.key_length]
                part = part.T if backward else part
                assert part.sum(axis=int(not backward)).all()  # nothing of the run is beyond the mask
                for top in range(0, part.shape[0], TILE):
                    # As far as any of the tile reaches, from the other end if it looks from keys to queries.
                    seen = np.flatnonzero(part[top : top + TILE].any(axis=0))
                    blocks += -(-len(seen) // BLOCK)
            sizes = np.array([(run.query_length, run.key_length) for run in shard.runs])
            # On one unit, tiles follow each other; no document is only elsewhere.
            seconds = kernel(unit_gpu(), ONE, sizes, backward=backward) if blocks else 0.0
            assert seconds / (2.5 if backward else 1) == pytest.approx(blocks * BLOCK / TILE, abs=1e-2)

    def test_waves_by_hand(self) -> None:
        """Four full tiles of 256 keys, two seconds each: on 1, 2, 3, 4 units."""
        run = np.array([[512, 256]])
        ends = [kernel(unit_gpu(units), ONE, run, causal=False) for units in (1, 2, 3, 4)]
        assert ends == pytest.approx([8, 4, 4, 2])

    def test_launch_order_by_hand(self) -> None:
        """Causal, 512 tokens: tiles of 1, 2, 3, 4 s on two units. They start at 0, 0, 1, 2 and end at 1, 2, 4, 6."""
        assert kernel(unit_gpu(2), ONE, np.array([[512, 512]])) == pytest.approx(6)

    def test_shared_evenly_by_hand(self) -> None:
        """The same ten seconds over two units; and no unit is quicker than the longest tile, of 4 s."""
        for units, end in ((2, 5), (4, 4)):
            gpu = dataclasses.replace(unit_gpu(units), evenly=True)
            assert kernel(gpu, ONE, np.array([[512, 512]])) == pytest.approx(end)

    def test_a_tile_that_reads_and_writes(self) -> None:
        """128 queries in, 128 outputs out, of 128 channels with 2 bytes: 65,536 bytes."""
        gpu = Gpu(attention=1e30, units=4, hbm=4 * 65_536)
        assert kernel(gpu, ONE, np.array([[100, 100]])) == pytest.approx(1)

    def test_tiles_without_queries(self) -> None:
        """10 documents of which the longest run needs 3 tiles: 30 launched, 3 + 1 of them at work."""
        gpu, heads = unit_gpu(2), Heads(query=3)
        runs = np.array([[300, 300], [5, 40]])
        with_list = kernel(gpu, heads, runs, documents=10)
        assert with_list - kernel(gpu, heads, runs, documents=1) == pytest.approx((30 - 6) * 3 * 0.3e-6 / 2)

    def test_nothing_to_do(self) -> None:
        assert kernel(unit_gpu(), ONE, np.zeros((0, 2), dtype=np.int64)) == 0


class TestGather:
    """Times of NCCL's table for an H100 node: 6.6 and 0.6 us, 87.7 GB/s; 8.4 and 3.4 us."""

    def test_by_hand(self) -> None:
        assert gather_seconds(2, 1 << 20) == pytest.approx(6.6e-6 + 0.6e-6 + (1 << 19) / 87.7e9)
        latency, transfer = SLOWER * (8.4e-6 + 3 * 3.4e-6), (1 << 24) / LINK
        assert gather_seconds(4, 1 << 24) == pytest.approx((latency**2 + transfer**2) ** 0.5)
        assert gather_seconds(1, 1 << 24) == 0

    def test_protocols_change_between_4k_and_8k_tokens(self) -> None:
        """Where Figure 12 has its step: bandwidth doubles with every doubling after, but not there."""
        for cp in (2, 4):
            rates = [gather_bandwidth(Heads(), 4096 << doubling, cp=cp) for doubling in range(3)]
            assert rates[1] / rates[0] < 1.15
            assert rates[2] / rates[1] > 1.7

    def test_large_messages_reach_the_link(self) -> None:
        assert gather_bandwidth(Heads(), 1 << 28, cp=4) == pytest.approx(0.75 * LINK, rel=0.01)

    def test_longer_and_wider_takes_longer(self) -> None:
        sizes = [gather_seconds(4, 1 << power) for power in range(10, 32)]
        assert all(low < high for low, high in pairwise(sizes))
        assert gather_seconds(2, 1 << 24) < gather_seconds(4, 1 << 24) < gather_seconds(8, 1 << 24)


class TestAttention:
    GPU = Gpu.of("h100")

    def test_chips(self) -> None:
        slow = Gpu.of("h100-hbm2e")
        assert (self.GPU.attention, self.GPU.units) == (335e12, 132)
        assert 0.9 < slow.attention / self.GPU.attention < 1
        assert slow.hbm < self.GPU.hbm

    def test_long_rows_reach_the_rate(self) -> None:
        """335 TFLOP/s over 4 FLOPs per pair, channel and head; blocks on the diagonal are half empty."""
        pairs = 131_072 * 131_073 // 2
        assert one_gpu(self.GPU, Heads(), [131_072]) == pytest.approx(4 * pairs * 16 * 128 / 335e12, rel=0.02)

    def test_four_gpus_are_3_89_times_as_fast(self) -> None:
        """ISCA'25, section 7: attention over 131,072 tokens on four GPUs against one. Figure 13 is read to a point of
        100, which of four GPUs is 0.04, and 3.89 is rounded."""
        faster = one_gpu(self.GPU, Heads(), [131_072]) / all_gather(self.GPU, Heads(), [131_072], cp=4).total
        assert faster == pytest.approx(3.89, abs=0.045)

    def test_documents_leave_ranks_waiting(self) -> None:
        """One document of 32K first: the slowest of four ranks has 2.80 times the mean (algorithms.md 3.7), and a tenth
        more for short documents, whose tiles are half empty."""
        documents = [32_768, *[1024] * 96]
        even = sum(length * (length + 1) // 2 for length in documents) / 4 * 4 * 16 * 128 / 335e12
        assert 2.8 * even < all_gather(self.GPU, Heads(), documents, cp=4).kernels < 1.15 * 2.8 * even

    def test_one_rank_communicates_nothing(self) -> None:
        alone = one_gpu(self.GPU, Heads(), [4096])
        assert all_gather(self.GPU, Heads(), [4096], cp=1).total == alone
        assert relative_hfu([4096], cp=1, seconds=alone, alone=alone) == 1
        assert ring(self.GPU, Heads(), 4096, cp=1).communication == 0

    def test_backward_is_longer(self) -> None:
        """2.5 times the FLOPs; at 65,536 tokens some 5 % of the time are tiles that end late, and transfers."""
        flops = 4 * (65_536**2 / 2) * 16 * 128 / 4
        for backward, times in ((False, 1), (True, 2.5)):
            seconds = all_gather(self.GPU, Heads(), [65_536], cp=4, backward=backward).total
            assert seconds == pytest.approx(times * flops / 335e12, rel=0.08)
        forward, back = (ring(self.GPU, Heads(), 65_536, cp=4, backward=backward).total for backward in (False, True))
        assert back == pytest.approx(2.5 * forward, rel=0.05)


class TestRing:
    GPU = Gpu.of("h100")

    def test_steps_cover_the_triangle(self) -> None:
        """On a slow GPU, where nothing else counts: pairs of all ranks' steps are those of the row, and of tiles on the
        diagonal, half of which is beyond it."""
        for cp in (2, 4, 8):
            slow = Gpu(attention=1e6, units=1, hbm=1e30)
            pairs = ring(slow, ONE, 8192, cp=cp).total * 1e6 / (4 * 128) * cp
            assert pairs == pytest.approx(8192**2 / 2 + 8192 * TILE / 2, rel=1e-6)

    def test_short_steps_wait_for_the_transfer(self) -> None:
        """1,024 tokens on four ranks: kernels of some us, messages of 23.6 us; the last step sends nothing."""
        seconds = ring(self.GPU, Heads(), 1024, cp=4)
        assert 2 * 10e-6 < seconds.communication < 3 * 24e-6
        assert ring(self.GPU, Heads(), 131_072, cp=4).communication == 0

    def test_lengths_that_cannot_be_cut(self) -> None:
        with pytest.raises(ValueError, match="seq_len = 1001: must be a multiple of 2 cp = 8; nearest legal: 1000"):
            ring(self.GPU, Heads(), 1001, cp=4)
        with pytest.raises(ValueError, match="seq_len = 3: must be a multiple of 2 cp = 8; nearest legal: 8"):
            ring(self.GPU, Heads(), 3, cp=4)
