"""Products against hand computation and the stairs of waves; attention and bytes against counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fourfold.planner.jobs import Precision, Recompute
from fourfold.planner.timing import compute
from fourfold.planner.timing.compute import (
    Multiplier,
    embedding_work,
    exposed,
    head_work,
    largest,
    layer_work,
    rates,
    wave_share,
)
from fourfold.planner.timing.stack import load_stack
from tests.planner.jobs_of_tests import job

STANDARD = load_stack("standard").constants
UNITS = np.asarray(132)


def work(jobs, constants=STANDARD):
    return layer_work(jobs, constants, rates(jobs, constants))


class TestWaves:
    def test_full_waves_are_all_of_the_rate(self):
        assert wave_share(np.asarray(128 * 12), np.asarray(256 * 11), UNITS) == pytest.approx(1.0)

    def test_one_tile_more_than_a_wave_takes_two(self):
        """133 tiles on 132 units take as long as 264: the stairs of algorithms.md 3.5."""
        rows = np.arange(1, 265) * 128
        seconds = rows / wave_share(rows, np.asarray(256), UNITS)  # time in units of one row at full rate
        assert seconds[131] == pytest.approx(132 * 128)
        # Smaller tiles spare some of the second wave, but far from all.
        assert seconds[132] > 1.3 * seconds[131]
        assert seconds[263] == pytest.approx(2 * seconds[131])
        assert np.all(np.diff(seconds) > -1e-6)

    def test_never_above_one(self):
        m, n = np.meshgrid(np.arange(1, 5000, 37), np.arange(1, 5000, 41))
        share = wave_share(m, n, UNITS)
        assert share.max() <= 1
        assert share.min() > 0


class TestMultiplier:
    at = Multiplier(
        rate=np.asarray(1e12), value=np.asarray(2.0), units=np.asarray(1), depth=np.asarray(0.0), hbm=np.asarray(1e30)
    )

    def test_a_teraflop_at_a_teraflop_per_second_takes_a_second(self):
        assert self.at.seconds(
            np.asarray(12800), np.asarray(2560), np.asarray(1e12 / (2 * 12800 * 2560))
        ) == pytest.approx(1)

    def test_bytes_where_they_take_longer(self):
        """[1, k] x [k, n] reads k n numbers of 2 bytes for 2 k n FLOPs: memory decides."""
        slow = replace(self.at, hbm=np.asarray(1e9), rate=np.asarray(1e18))
        assert slow.seconds(np.asarray(1.0), np.asarray(1000.0), np.asarray(1000.0)) == pytest.approx(
            2.004e6 / 1e9, rel=1e-3
        )

    def test_half_rate_at_the_depth(self):
        deep = replace(self.at, depth=np.asarray(512.0))
        sizes = np.asarray(1280), np.asarray(2560), np.asarray(512)
        assert deep.seconds(*sizes) == pytest.approx(2 * self.at.seconds(*sizes))

    def test_backward_of_a_linear_layer_is_two_products(self):
        forward, backward = self.at.linear(np.asarray(1280), np.asarray(1280), np.asarray(1280))
        assert backward == pytest.approx(2 * forward)


class TestLargest:
    def test_far_apart_it_is_the_larger_and_near_it_is_more(self):
        assert largest(np.asarray(1.0), np.asarray(100.0)) == pytest.approx(100, rel=1e-6)
        assert largest(np.asarray(1.0), np.asarray(1.0)) == pytest.approx(2**0.25)
        assert largest(np.asarray(0.0), np.asarray(0.0)) == 0

    def test_what_is_covered_is_hidden(self):
        assert exposed(np.asarray(1.0), np.asarray(10.0)) < 0.001
        assert exposed(np.asarray(10.0), np.asarray(0.0)) == 10
        assert exposed(np.asarray(10.0), np.asarray(1.0)) == pytest.approx(9, rel=1e-3)


class TestLayer:
    def test_a_big_layer_runs_near_the_sustained_rate(self):
        """6 FLOPs per parameter and token over the seconds of forward and backward."""
        jobs = job("405b", micro_batch=8, sequences=8)
        done = 6 * (2 * 16384 * 128 * (128 + 8) + 3 * 16384 * 53248) * 8 * 8192 / sum(work(jobs).matmul)
        sustained = rates(jobs, STANDARD).matmul
        assert 0.9 * sustained < done < sustained

    def test_the_sustained_rate_is_below_the_dense_peak(self):
        for chip in ("a100", "h100", "h200", "b200", "gb200", "gb300"):
            jobs = job(chip=chip)
            assert 0.4 * jobs.peak < rates(jobs, STANDARD).matmul < 0.9 * jobs.peak

    def test_causal_attention_is_what_its_pairs_say(self):
        """Half the pairs, half the time; the forward of one sequence of 8B at 8K is 4 x 33.6M pairs x 4096 FLOPs."""
        whole = job(pairs=8192 * 8192)
        half = job(pairs=8192 * 8192 // 2)
        assert work(whole).attention[0] == pytest.approx(2 * work(half).attention[0])
        flops = 4 * (8192 * 8193 // 2) * 4096
        assert 0.3 < flops / work(job()).attention[0] / 989.4e12 < 0.7  # 300 to 690 TFLOP/s, as Hopper's kernels reach

    def test_backward_of_fused_attention(self):
        forward, backward = work(job()).attention
        assert backward / forward == pytest.approx(2.5 / 0.88)

    def test_unfused_attention_moves_every_score(self):
        jobs = job(fused_attention=False, chip="a100", seq_len=2048)
        least = compute.SCORE_BYTES[0] * 2048 * 2048 * 32 / 2.039e12 * float(STANDARD.scores)
        assert work(jobs).attention[0] > least
        assert work(jobs).attention[0] > 2 * work(job(chip="a100", seq_len=2048)).attention[0]

    def test_cutting_over_tp_and_cp(self):
        one, cut = work(job("405b")), work(job("405b", tp=8))
        assert cut.attention[0] == pytest.approx(one.attention[0] / 8, rel=0.05)
        assert one.matmul[0] / 8 < cut.matmul[0] < one.matmul[0] / 5
        assert work(job("405b", cp=2)).tokens == 4096

    def test_sequence_parallelism_cuts_norms(self):
        with_it = work(job("405b", tp=8)).memory_bound[0]
        assert with_it < work(job("405b", tp=8, sequence_parallel=False)).memory_bound[0]

    def test_eager_norms_and_compilers(self):
        fused, eager = work(job()).memory_bound[0], work(job(fused_norms=False)).memory_bound[0]
        assert eager > 1.5 * fused
        assert work(job(fused_norms=False, compiled=True)).memory_bound[0] < fused

    def test_eight_bits_are_faster_to_multiply_and_have_to_be_cast(self):
        bf16, fp8 = work(job("405b")), work(job("405b", precision=Precision.FP8))
        assert 0.45 < fp8.matmul[0] / bf16.matmul[0] < 0.65
        assert fp8.memory_bound[0] > bf16.memory_bound[0]
        assert fp8.attention[0] == pytest.approx(bf16.attention[0])

    def test_no_host_time_in_graphs(self):
        assert work(job(cuda_graphs=True)).launch == (0, 0)
        assert 1e-4 < work(job()).launch[0] < 3e-3

    def test_nothing_depends_on_recomputation(self):
        assert work(job(recompute=Recompute.FULL)).matmul == work(job()).matmul


class TestEnds:
    def test_head_of_405b_is_two_thirds_of_a_layer(self):
        """2.10e9 weights against 3.19e9 (facts.md 2.3): 0.66 of a layer's products."""
        jobs = job("405b", micro_batch=4, sequences=4)
        at = rates(jobs, STANDARD)
        assert 0.6 < sum(head_work(jobs, at)) / sum(work(jobs).matmul) < 0.75

    def test_embedding_is_next_to_nothing(self):
        jobs = job("405b")
        assert sum(embedding_work(jobs, rates(jobs, STANDARD))) < 0.01 * sum(work(jobs).matmul)


def test_columns_broadcast():
    jobs = job("70b", tp=np.array([1, 2, 4, 8]))
    assert work(jobs).matmul[0].shape == (4,)
    alone = [work(job("70b", tp=tp)).matmul[0] for tp in (1, 2, 4, 8)]
    assert work(jobs).matmul[0] == pytest.approx(np.array(alone))
