"""Collectives against the formulas and figures of facts.md 1, 2.3 and 4.2."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fourfold.planner.timing.collectives import (
    RAILS,
    START,
    all_gather,
    all_reduce,
    group,
    reduce_scatter,
    send,
    sharding_group,
)
from fourfold.planner.timing.stack import load_stack
from tests.planner.jobs_of_tests import job

PERFECT = replace(load_stack("standard").constants, link=np.asarray(1.0), nic=np.asarray(1.0), latency=np.asarray(0.0))


def ranks(size, stride=1, constants=PERFECT, **columns):
    return group(job(dp=1024, **columns), constants, size=np.asarray(size), stride=np.asarray(stride))


class TestGroup:
    def test_within_a_node_there_is_no_nic(self):
        """134 MB of one TP collective on 8 H100 (facts.md 1, row 18): 134.2e6 7/8 / 450e9 = 0.261 ms."""
        assert all_gather(ranks(8), np.asarray(2 * 8192 * 8192)) == pytest.approx(2.61e-4 + START, rel=0.01)

    def test_one_member_per_node_owns_one_nic(self):
        """70B with tp8: 17.6 GB of weights gathered over 16 nodes by NICs of 50 GB/s: 0.33 s (facts.md 1, row 20)."""
        assert all_gather(ranks(16, stride=8), np.asarray(17.6e9)) == pytest.approx(0.33, rel=0.01)

    def test_members_in_a_node_use_their_nics_together(self):
        """8 NICs of 50 GB/s, less what rings share; with tp4, a data-parallel group has 2 of them."""
        node = ranks(64)
        assert node.nic == pytest.approx(50e9 * 8**RAILS)
        assert all_gather(node, np.asarray(1e9)) == pytest.approx(7 / 8 * 1e9 / node.nic, rel=0.01)
        assert ranks(64, stride=4).nic == pytest.approx(50e9 * 2**RAILS)

    def test_before_nccl_2_12_groups_of_part_of_a_node_met_on_one_nic(self):
        """tp4 on A100 nodes with four NICs for 8 GPUs: two members reach half of one GPU's share, four a whole one."""
        old = replace(PERFECT, pxn=np.asarray(False))
        assert ranks(64, stride=4, constants=old).nic == pytest.approx(0.5 * 50e9)
        assert ranks(64, stride=2, constants=old).nic == pytest.approx(50e9)
        for stride in (1, 8):
            assert ranks(64, stride=stride, constants=old).nic == ranks(64, stride=stride).nic

    def test_spans(self):
        assert (ranks(8).inside, ranks(8).domains) == (8, 1)
        assert (ranks(16, stride=4).inside, ranks(16, stride=4).domains) == (2, 8)
        assert (ranks(4, stride=16).inside, ranks(4, stride=16).domains) == (1, 4)

    def test_beyond_the_tier_only_so_many_rings_fit(self):
        """Meta's pods of 3,072 GPUs, oversubscribed 7 to 1 beyond (facts.md, row 13).

        A ring leaves a pod once, for 50 GB/s. Of 3,072 / 7 GPUs' worth of NICs that leave it, 128 rings beside each
        other (tp8 pp16) need 128; 1,024 (tp8 cp8 pp16) would need 1,024, and each gets 3,072 / 7 / 1,024 of its NIC.
        """
        pods = {"tier": 3072, "oversubscription": 7.0}
        inside, few, many = (ranks(size, stride, **pods) for size, stride in ((16, 128), (128, 128), (16, 1024)))
        assert few.nic == inside.nic == 50e9
        assert many.nic == pytest.approx(50e9 * 3072 / 7 / 1024)

    def test_never_slower_than_the_ratio(self):
        assert ranks(2, 4096, tier=3072, oversubscription=3.0).nic == pytest.approx(50e9 / 3)

    def test_dp_around_the_pipeline_or_inside_of_it(self):
        """tp2 pp4 dp4 on nodes of 8: in the order [TP, CP, PP, DP] (facts.md 2.8) the pipeline fills the node and DP
        has one rank in each; in Megatron's [TP, CP, DP, PP] DP's four ranks fill it."""
        jobs = job(tp=2, pp=4, dp=4)
        ours, megatrons = (replace(PERFECT, pp_inside=np.asarray(inside)) for inside in (True, False))
        assert [sharding_group(jobs, c, jobs.dp).inside for c in (ours, megatrons)] == [1, 4]
        size = np.asarray(1e9)
        assert send(jobs, ours, size) == pytest.approx(1e9 / 450e9, rel=0.01)
        assert send(jobs, megatrons, size) == pytest.approx(1e9 / 50e9, rel=0.01)

    def test_shards_lie_over_cp_first(self):
        """tp2 cp2 pp4 dp8, 32 of them on 4 nodes: a stage's 16 ranks of cp x dp are two (cp) in each of 8 nodes."""
        jobs = job(tp=2, cp=2, pp=4, dp=8)
        assert sharding_group(jobs, PERFECT, jobs.cp * jobs.dp).inside == 2

    def test_an_nvl72_rack_is_one_domain(self):
        assert ranks(64, chip="gb200").domains == 1


class TestCollectives:
    def test_all_reduce_is_two_of_the_others(self):
        of = ranks(np.array([2, 8, 64]))
        size = np.asarray(1e8)
        assert all_reduce(of, size) == pytest.approx(all_gather(of, size) + reduce_scatter(of, size))
        assert all_gather(of, size) == pytest.approx(reduce_scatter(of, size))

    def test_one_rank_sends_nothing(self):
        assert all_gather(ranks(1), np.asarray(1e9)) == 0

    def test_more_ranks_and_more_bytes_never_take_less(self):
        sizes = np.array([1, 2, 4, 8, 16, 64, 512])
        seconds = all_gather(ranks(sizes, constants=load_stack("standard").constants), np.asarray(1e8))
        assert np.all(np.diff(seconds) >= 0)
        assert np.all(np.diff(all_gather(ranks(16), np.array([1e3, 1e6, 1e9]))) > 0)

    def test_latency_counts_hops(self):
        slow = replace(PERFECT, latency=np.asarray(1e-3))
        assert all_gather(ranks(9, stride=8, constants=slow), np.asarray(0.0)) == pytest.approx(8e-3 + START)

    def test_the_half_of_a_link_takes_twice(self):
        half = replace(PERFECT, link=np.asarray(0.5))
        size = np.asarray(1e9)
        whole_seconds = all_gather(ranks(8), size) - START
        assert all_gather(ranks(8, constants=half), size) - START == pytest.approx(2 * whole_seconds)


class TestSend:
    def test_boundary_of_405b(self):
        """33.6 MB over 50 GB/s: 0.67 ms (facts.md 2.2)."""
        seconds = send(job("405b", tp=8, pp=16, dp=1), PERFECT, np.asarray(2 * 8192 * 16384 / 8))
        assert seconds == pytest.approx(0.67e-3, rel=0.03)

    def test_in_a_node_by_its_links(self):
        size = np.asarray(1e9)
        assert send(job(pp=2), PERFECT, size) == pytest.approx(1e9 / 450e9, rel=0.01)
