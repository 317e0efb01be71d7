"""Seconds of collectives: latency per hop of a ring, and bytes over the narrowest link on the way.

A group of n ranks, `stride` apart in the order of ranks, has k of its members in one NVLink domain. Inside, bytes move
at the GPU's link. Where the group leaves the domain, its members there use nearly all of their NICs at once. The ring
is pipelined, so that the slower of both counts. All-gather and reduce-scatter of M bytes over n ranks take n - 1 hops
and (n - 1) / n M / bandwidth; an all-reduce is one of each. (algorithms.md 3.4)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fourfold.planner.jobs import Column, Jobs

if TYPE_CHECKING:
    from fourfold.planner.timing.stack import Constants

NODE = 8  # GPUs
RAILS = 0.85  # k members of a group in a domain reach k ** RAILS times the bandwidth of one NIC: paths collide
OLD_RAILS = 0.25  # of its NICs that a group of part of a node reached before NCCL 2.12 (2022): groups met
LINK_LATENCY = 0.15  # of a hop inside the domain, relative to one between domains
START = 10e-6  # seconds from launch to the first byte


@dataclass(frozen=True)
class Group:
    """A process group, and how its ranks are connected."""

    size: Column
    inside: Column  # members per NVLink domain
    link: Column  # bytes/s per member
    nic: Column  # bytes/s out of a domain, all members in it together
    latency: Column  # seconds per hop between domains

    @property
    def domains(self) -> Column:
        """NVLink domains that the group spans."""
        return self.size / self.inside


def group(jobs: Jobs, constants: Constants, *, size: Column, stride: Column) -> Group:
    """A group of `size` ranks, `stride` apart."""
    inside = np.clip(jobs.domain / stride, 1, size)
    return _group(jobs, constants, size=size, inside=inside, stride=stride, span=size * stride)


def sharding_group(jobs: Jobs, constants: Constants, size: Column) -> Group:
    """`size` of the dp x cp ranks that share a stage's weights: all, or as many neighbours as hybrid sharding says.

    CP's ranks are `tp` apart; those of DP lie around them, or around the pipeline if that lies inside of DP.
    """
    of_cp = np.minimum(jobs.cp, size)
    of_dp = np.maximum(size / jobs.cp, 1)
    stride = dp_stride(jobs, constants)
    inside = np.clip(jobs.domain / jobs.tp, 1, of_cp) * np.clip(jobs.domain / stride, 1, of_dp)
    return _group(jobs, constants, size=size, inside=inside, stride=stride, span=of_dp * stride)


def dp_stride(jobs: Jobs, constants: Constants) -> Column:
    """From one rank of DP to the next: the order of ranks is [TP, CP, PP, DP], innermost first, or [TP, CP, DP, PP]."""
    return jobs.tp * jobs.cp * np.where(constants.pp_inside, jobs.pp, 1)


def _group(jobs: Jobs, constants: Constants, *, size: Column, inside: Column, stride: Column, span: Column) -> Group:
    """A ring passes from one tier of full bandwidth to the next once, and beside it the rings of the `stride` ranks in
    between, at least those of a domain: what is oversubscribed is slower only where so many rings need more of it."""
    part_of_node = (inside > 1) & (inside < np.minimum(jobs.domain, NODE))
    nics = np.where(constants.pxn | ~part_of_node, inside**RAILS, inside * OLD_RAILS)
    crowded = np.maximum(stride, jobs.domain) * jobs.oversubscription / jobs.tier
    slower = np.where(span > jobs.tier, np.clip(crowded, 1, jobs.oversubscription), 1)
    nic = nics * jobs.nic * constants.nic / slower
    return Group(
        size=size, inside=inside, link=jobs.link * constants.link, nic=nic, latency=np.asarray(constants.latency)
    )


def all_gather(ranks: Group, size: Column) -> Column:
    """Seconds until every member has all `size` bytes, of which it had 1 / n; 0 in a group of one."""
    n, domains = ranks.size, ranks.domains
    within = (n - 1) / n * size / ranks.link
    between = (domains - 1) / domains * size / ranks.nic
    hops = (domains - 1) + LINK_LATENCY * (n - domains)
    return np.where(n > 1, START + ranks.latency * hops + np.maximum(within, between), 0.0)


def reduce_scatter(ranks: Group, size: Column) -> Column:
    """Seconds until every member has its 1 / n of the sum of `size` bytes: the way of an all-gather, backwards."""
    return all_gather(ranks, size)


def all_reduce(ranks: Group, size: Column) -> Column:
    """Seconds until every member has the sum of `size` bytes."""
    return reduce_scatter(ranks, size) + all_gather(ranks, size)


def send(jobs: Jobs, constants: Constants, size: Column) -> Column:
    """Seconds of `size` bytes to the next pipeline rank: by the link if the whole pipeline is in one domain.

    All of a stage's ranks send at once, each by its own NIC.
    """
    stride = np.where(constants.pp_inside, jobs.tp * jobs.cp, jobs.gpus // jobs.pp)
    near = np.where(constants.pp_inside, stride * jobs.pp, 2 * stride) <= jobs.domain
    latency = np.where(near, LINK_LATENCY, 1.0) * constants.latency
    return START + latency + size / np.where(near, jobs.link * constants.link, jobs.nic * constants.nic)
