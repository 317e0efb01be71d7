"""What communication adds: volumes of ZeRO's modes, overlap, groups of hybrid sharding, messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fourfold.planner.jobs import Order
from fourfold.planner.timing import exposure
from fourfold.planner.timing.compute import layer_work, rates
from fourfold.planner.timing.stack import load_stack
from tests.planner.jobs_of_tests import job

PERFECT = replace(
    load_stack("standard").constants,
    link=np.asarray(1.0),
    nic=np.asarray(1.0),
    latency=np.asarray(0.0),
    contention=np.asarray(0.0),
    dp_hidden=np.asarray(1e-9),
)
NOTHING = np.asarray(0.0)


def work(jobs):
    return layer_work(jobs, PERFECT, rates(jobs, PERFECT))


class TestTensorParallel:
    def test_four_collectives_of_a_layer(self):
        """405B at 8K, tp 8: 4 x 268 MB x 7/8 over 450 GB/s = 2.09 ms (facts.md 1, rows 18 and 19)."""
        jobs = job("405b", tp=8)
        assert exposure.tensor_parallel(jobs, PERFECT, work(jobs)).forward == pytest.approx(2.09e-3, rel=0.03)

    def test_none_alone_and_less_when_overlapped(self):
        alone, cut = job("405b"), job("405b", tp=8)
        assert exposure.tensor_parallel(alone, PERFECT, work(alone)).forward == 0
        hidden = exposure.tensor_parallel(job("405b", tp=8, tp_overlap=True), PERFECT, work(cut))
        shown = exposure.tensor_parallel(cut, PERFECT, work(cut))
        assert hidden.forward == pytest.approx(shown.forward * (1 - PERFECT.tp_hidden))

    def test_all_reduces_move_what_gathers_and_scatters_do(self):
        with_it, without = job("405b", tp=8), job("405b", tp=8, sequence_parallel=False)
        one, other = (exposure.tensor_parallel(jobs, PERFECT, work(jobs)) for jobs in (with_it, without))
        assert one.forward == other.forward
        assert one.backward >= other.backward


class TestContextParallel:
    def test_gathered_keys_and_values(self):
        """131K, cp 16, tp 8: 67 MB per GPU and layer at 50 GB/s, 1.26 ms (facts.md 2.7)."""
        jobs = job("405b", tp=8, cp=16, seq_len=131072)
        cp = exposure.context_parallel(jobs, PERFECT, work(jobs))
        assert cp.forward == pytest.approx(1.26e-3, rel=0.03)
        assert cp.backward == pytest.approx(2 * cp.forward)


def test_context_parallel_attention_as_published():
    """ISCA'25 figure 13, all-gather CP inside a node of H100 (HBM3): what of one GPU's FLOP/s each of cp GPUs reaches,
    gathering included. No constant was fitted on it."""
    constants = load_stack("standard").constants
    figure = {2: (78.8, 85.7, 90.5, 90.7, 98.2, 98.1), 4: (53.7, 73.6, 85.0, 92.1, 95.7, 97.3)}
    off = []
    for cp, measured in figure.items():
        for seq_len, percent in zip((4096, 8192, 16384, 32768, 65536, 131072), measured, strict=True):
            seconds = []
            for ranks in (1, cp):
                jobs = job("405b", tp=8, cp=ranks, seq_len=seq_len, domain=64)  # so that CP stays on NVLink, as there
                layer = layer_work(jobs, constants, rates(jobs, constants))
                exposed = exposure.context_parallel(jobs, constants, layer)
                seconds.append(float(sum(layer.attention) + exposed.forward + exposed.backward))
            off.append(abs(100 * seconds[0] / cp / seconds[1] - percent))
    assert max(off) < 8
    assert np.mean(off) < 4


class TestZero:
    def test_parameters_of_a_rank(self):
        """405B with tp8 pp16: 3.17e9 (facts.md 2.5), and one vocabulary table."""
        of_layers = 405_853_388_800 - 2 * 128256 * 16384
        assert exposure.rank_parameters(job("405b", tp=8, pp=16)) == pytest.approx(
            of_layers / 128 + 128256 * 16384 / 8, rel=1e-3
        )

    def test_step_of_zero1(self):
        """70B, tp8 dp16: scattering fp32 gradients takes 0.66 s, gathering bf16 weights 0.33 s (facts.md 1, row 20)."""
        shards = exposure.step_shards(job("70b", tp=8, dp=16), PERFECT, NOTHING, NOTHING)
        assert shards.forward == pytest.approx(0.33, rel=0.02)
        assert shards.backward == pytest.approx(0.66, rel=0.02)

    def test_no_sharding_reduces_all(self):
        """An all-reduce of bf16 gradients takes as long as gathering bf16 weights twice: 0.66 s (facts.md 6, Q4)."""
        shards = exposure.step_shards(job("70b", tp=8, dp=16, zero=0, reduce_bytes=2), PERFECT, NOTHING, NOTHING)
        assert shards.forward == 0
        assert shards.backward == pytest.approx(0.656, rel=0.02)

    def test_zero2_scatters_every_round_but_afab_once(self):
        common = {"tp": 8, "pp": 4, "dp": 16, "sequences": 16 * 16, "zero": 2}
        rounds = exposure.step_shards(job("405b", **common), PERFECT, NOTHING, NOTHING).backward
        once = exposure.step_shards(job("405b", **common, order=Order.AFAB), PERFECT, NOTHING, NOTHING).backward
        assert rounds / once == pytest.approx(4, rel=0.01)  # 16 micro-batches in rounds of 4

    def test_zero3_in_layers_only(self):
        jobs = job("70b", dp=64, zero=3)
        assert exposure.step_shards(jobs, PERFECT, NOTHING, NOTHING).backward == 0
        bare = exposure.layer_shards(jobs, PERFECT, NOTHING, NOTHING)
        assert bare.backward / bare.forward == pytest.approx(3, rel=0.01)  # weights in 16 bits, gradients in 32
        assert exposure.layer_shards(jobs, PERFECT, np.asarray(10.0), np.asarray(10.0)).forward < 1e-6

    def test_hybrid_sharding_gathers_in_the_node(self):
        whole = exposure.layer_shards(job("8b", dp=64, zero=3), PERFECT, NOTHING, NOTHING)
        hybrid = exposure.layer_shards(job("8b", dp=64, zero=3, shards=8), PERFECT, NOTHING, NOTHING)
        assert hybrid.forward < whole.forward

    def test_what_is_hidden_slows_what_hides_it(self):
        jobs, slowed = job("70b", dp=64, zero=3), replace(PERFECT, contention=np.asarray(0.2))
        free = exposure.layer_shards(jobs, PERFECT, np.asarray(10.0), np.asarray(10.0))
        paid = exposure.layer_shards(jobs, slowed, np.asarray(10.0), np.asarray(10.0))
        gather = exposure.layer_shards(jobs, PERFECT, NOTHING, NOTHING).forward
        assert paid.forward - free.forward == pytest.approx(0.2 * gather)


def test_optimizer_reads_and_writes_its_shard():
    """8B on 8 GPUs: 30 bytes of 1e9 parameters each over 3.35 TB/s x 0.85 = 10.6 ms."""
    jobs = job("8b", dp=8)
    seconds = exposure.optimizer(jobs, replace(PERFECT, optimizer=np.asarray(1.0)), rates(jobs, PERFECT))
    assert seconds == pytest.approx(30 * 8.03e9 / 8 / (3.35e12 * 0.85), rel=0.01)


def test_message_only_with_a_pipeline():
    jobs = job("405b", tp=8, pp=16)
    assert exposure.message(jobs, PERFECT, np.asarray(8192)) == pytest.approx(0.67e-3, rel=0.03)
    assert exposure.message(job("405b", tp=8), PERFECT, np.asarray(8192)) == 0
