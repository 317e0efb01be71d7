"""Inequalities of the Scaling Book against its own numbers, corrected (facts.md 4 and 5.4), and against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from fourfold.planner.machines.cluster import cluster
from fourfold.planner.reasons.thresholds import (
    attention_seq_len,
    best_fsdp_ways,
    fsdp_tokens,
    fsdp_tokens_across_nodes,
    fsdp_tp_tokens,
    gather_seconds,
    intensity,
    thresholds,
    tp_layer_seconds,
    tp_limit,
)
from tests.planner.textbook import all_reduce_seconds, compute_over_communication, p2p_seconds

V5P, ICI, DCN = 4.59e14, 1.8e11, 6.25e9  # FLOP/s, bytes/s of one axis, bytes/s per chip
H100, NVLINK, NIC = 9.9e14, 450e9, 50e9
FFN = {"8b": 14_336, "70b": 28_672, "405b": 53_248}


class TestTpu:
    def test_fsdp(self) -> None:
        assert fsdp_tokens(V5P, ICI) == pytest.approx(2550)
        assert fsdp_tokens(V5P, ICI, axes=3) == pytest.approx(850)

    def test_tp(self) -> None:
        assert tp_limit(FFN["70b"], V5P, ICI) == pytest.approx(11, abs=0.3)

    def test_fsdp_with_tp(self) -> None:
        """facts.md 1, row 17: 453, not 113."""
        found = fsdp_tp_tokens(FFN["70b"], V5P, ICI, axes=(2, 1))
        assert found == pytest.approx(453, abs=1)
        assert found / 4 == pytest.approx(113, abs=1)

    def test_70b_on_a_pod(self) -> None:
        """468 tokens per chip: less than FSDP needs (850), more than FSDP with TP does (453); X_opt 1618."""
        per_chip = 4_194_304 / 8960
        assert per_chip == pytest.approx(468, abs=0.5)
        assert fsdp_tp_tokens(FFN["70b"], V5P, ICI, axes=(2, 1)) < per_chip < fsdp_tokens(V5P, ICI, axes=3)
        assert best_fsdp_ways(4_194_304, 8960, FFN["70b"], axes=(2, 1)) == pytest.approx(1618, abs=3)
        assert compute_over_communication(4_194_304, 8960, FFN["70b"], V5P, ICI, axes=(2, 1)) > 1

    def test_data_parallel_pods(self) -> None:
        """About 75K tokens per pod over DCN."""
        per_chip = fsdp_tokens_across_nodes(V5P, DCN, gpus_per_node=8960)
        assert per_chip * 8960 == pytest.approx(75e3, rel=0.03)

    def test_attention(self) -> None:
        """Once T > 8 D, both take as much: 6 FLOPs for each weight, 12 for each value of a token's keys."""
        dim = 8192
        weights = 3 * dim * 4 * dim + 4 * dim * dim
        assert 12 * attention_seq_len(dim) * dim == 6 * weights


class TestGpu:
    def test_one_way(self) -> None:
        """facts.md 1, row 15: 2200 in a node, not 1100, which is with both directions of NVLink added."""
        assert intensity(H100, NVLINK) == pytest.approx(2200)
        assert intensity(H100, 2 * NVLINK) == pytest.approx(1100)

    def test_what_a_gpu_owns(self) -> None:
        """facts.md 1, row 16."""
        assert intensity(H100, NIC) == pytest.approx(19_800)

    def test_across_nodes(self) -> None:
        assert fsdp_tokens_across_nodes(H100, NIC, gpus_per_node=8) == pytest.approx(2475)
        assert fsdp_tokens_across_nodes(H100, NIC, gpus_per_node=8, two_nodes=True) == pytest.approx(1237, abs=1)
        assert fsdp_tokens_across_nodes(H100, NIC, gpus_per_node=8, spanned_nodes=8) == pytest.approx(309, abs=1)
        assert fsdp_tokens_across_nodes(H100, NIC, gpus_per_node=8, spanned_nodes=16) == pytest.approx(155, abs=1)

    @pytest.mark.parametrize(("model", "limit"), [("8b", 6.5), ("70b", 13), ("405b", 24)])
    def test_tp(self, model: str, limit: float) -> None:
        assert tp_limit(FFN[model], H100, NVLINK) == pytest.approx(limit, abs=0.3)

    def test_tp_at_what_nvlink_reaches(self) -> None:
        """facts.md 5.4: 370 GB/s leave 10.7 ways, where the guide has 26."""
        assert tp_limit(FFN["70b"], H100, 370e9) == pytest.approx(10.7, abs=0.05)
        assert tp_limit(FFN["70b"], H100, 900e9) == pytest.approx(26, abs=0.1)

    def test_fsdp_with_tp_in_a_node(self) -> None:
        """facts.md 5.4: 675 tokens per GPU if both add up, not 45."""
        assert fsdp_tp_tokens(FFN["70b"], H100, NVLINK) == pytest.approx(675, abs=1)

    def test_eight_ways_of_tp_give_what_the_node_gives(self) -> None:
        """facts.md 4.1: alpha_X / Y with Y = 8 is the egress of the node: TP inside it changes nothing."""
        assert intensity(H100, NIC) / 8 == pytest.approx(fsdp_tokens_across_nodes(H100, NIC, gpus_per_node=8))

    def test_b200(self) -> None:
        """facts.md 4.2: 2500 and 5625 (and 72 GPUs of GB200 share 3.6 TB/s)."""
        assert fsdp_tokens(2.25e15, 900e9) == pytest.approx(2500)
        assert fsdp_tokens_across_nodes(2.25e15, NIC, gpus_per_node=8) == pytest.approx(5625)

    def test_of_a_cluster(self) -> None:
        found = thresholds(cluster("h100", 16_384), peak=H100, ffn_dim=FFN["405b"])
        assert found.intensity_link == pytest.approx(2200)
        assert found.intensity_nic == pytest.approx(19_800)
        assert found.fsdp_in_domain == pytest.approx(2200)
        assert found.fsdp_across == found.fsdp_across_top == pytest.approx(2475)
        assert found.tp_in_domain == pytest.approx(24.2, abs=0.1)
        assert found.tp_across == pytest.approx(53_248 / 2475)
        rack = thresholds(cluster("gb200", 576), peak=2.5e15, ffn_dim=FFN["405b"])
        assert rack.fsdp_across == pytest.approx(2.5e15 / 3.6e12)

    def test_of_a_tiered_cluster(self, tmp_path) -> None:
        path = tmp_path / "own.toml"
        path.write_text('[cluster]\nchip = "h100"\ntier_gpus = 3072\noversubscription = 7\n')
        inside, across = (thresholds(cluster(path, n), peak=H100, ffn_dim=FFN["405b"]) for n in (3072, 16_384))
        assert inside.fsdp_across_top == inside.fsdp_across
        assert across.fsdp_across_top == pytest.approx(7 * 2475)


class TestBruteForce:
    """The formulas are minima of sums of times that one can write down."""

    @pytest.mark.parametrize(("w_x", "w_y"), [(50e9, 450e9), (450e9, 450e9), (1.8e11, 3.6e11)])
    def test_the_best_split(self, w_x: float, w_y: float) -> None:
        batch, gpus, ffn_dim, dim = 4_194_304, 8192, FFN["70b"], 8192
        ways = np.linspace(1, gpus, 2_000_001)
        seconds = 4 * batch * dim / (ways * w_y) + 4 * dim * ffn_dim / (gpus / ways * w_x)
        best = best_fsdp_ways(batch, gpus, ffn_dim, fsdp_bandwidth=w_x, tp_bandwidth=w_y)
        assert ways[np.argmin(seconds)] == pytest.approx(best, rel=1e-3)

        compute = 4 * batch * dim * ffn_dim / gpus / H100
        limit = fsdp_tp_tokens(ffn_dim, H100, w_x, w_y)
        assert (batch / gpus > limit) == (compute > seconds.min())
        assert (compute / seconds.min()) ** 2 == pytest.approx(batch / gpus / limit, rel=1e-3)

    def test_the_ratio_at_the_best_split(self) -> None:
        batch, gpus, ffn_dim, dim = 4_194_304, 8960, FFN["70b"], 8192
        x = best_fsdp_ways(batch, gpus, ffn_dim, axes=(2, 1))
        seconds = 4 * batch * dim / (x * ICI) + 4 * dim * ffn_dim / (gpus / x * 2 * ICI)
        compute = 4 * batch * dim * ffn_dim / gpus / V5P
        found = compute_over_communication(batch, gpus, ffn_dim, V5P, ICI, axes=(2, 1))
        assert found == pytest.approx(compute / seconds, rel=1e-9)


class TestSeconds:
    def test_collectives(self) -> None:
        assert gather_seconds(8e9, 4, 1e9) == 6
        assert all_reduce_seconds(8e9, 4, 1e9) == 12

    def test_tp_of_405b_is_no_microseconds(self) -> None:
        """facts.md 1, row 18: 134 MB, 0.26 ms each, four in a layer's forward are 1.04 ms, of 70B (width 8192)."""
        found = tp_layer_seconds(8192, 8192, tp=8, bandwidth=NVLINK)
        assert pytest.approx(134e6, rel=2e-3) == 2 * 8192 * 8192
        assert found == pytest.approx(1.04e-3, rel=0.01)

    def test_hops_of_figure_9(self) -> None:
        """facts.md 2.2: 33.6 MB over 50 GB/s are 0.67 ms."""
        assert p2p_seconds(8192, 16_384, tp=8, bandwidth=NIC) == pytest.approx(0.67e-3, rel=0.01)
