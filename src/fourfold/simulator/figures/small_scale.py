"""The paper's small experiments: Llama 3 405B with fewer layers at 8,192 tokens, on few nodes (ISCA'25 section 7)."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np

from fourfold.planner.flops import model_flops_per_step
from fourfold.planner.jobs import Jobs, Order, Recompute, Split
from fourfold.planner.machines.cluster import cluster
from fourfold.planner.search.exact import Exact
from fourfold.planner.search.problem import Problem
from fourfold.planner.timing.stack import Stack, load_stack
from fourfold.recipe import preset

TP = 8
SEQ_LEN = 8192
HOP = (
    "A message to the next pipeline rank takes its bytes / tp over 50 GB/s, the whole rate of a GPU's NIC, where "
    "stack `meta`, fitted to production on 16,384 GPUs, reaches 73 %."
)

SHARE = (
    "A (micro-batch, layer) pair holds 0.33 GB because Figures 9 and 10 say so: stack `meta` keeps 62 % of the full "
    "inventory of activations, a share read off the slope of Figure 10 and a gap of Figure 9 (facts.md 2.4). Agreement "
    "in what a pair adds is no finding; how many pairs each rank has, and what else it holds, is."
)


@cache
def small_stack() -> Stack:
    """Stack `meta`, but messages at the full rate of the NIC: its constant is that of production on 16,384 GPUs."""
    stack = load_stack("meta")
    return dataclasses.replace(stack, constants=dataclasses.replace(stack.constants, nic=np.asarray(1.0)))


def small_job(
    *,
    layers: int,
    pp: int,
    v: int,
    dp: int,
    micro_batches: int,
    nc: int | None = None,
    split: Split = Split.ENDS_LIGHT,
    zero: int = 1,
    recomputed_layers: float = 0.0,
) -> Jobs:
    """One experiment on tp 8 x pp x dp GPUs.

    `nc`: None: all forwards first. `recomputed_layers`: share of the layers that are computed again in backward.
    """
    problem = Problem.of(
        model=preset("llama3-405b").replace(num_layers=layers),
        cluster=cluster("h100", TP * pp * dp),
        seq_len=SEQ_LEN,
        sequences=micro_batches * dp,
        stack=small_stack(),
    )
    return problem.jobs(
        tp=TP,
        cp=1,
        pp=pp,
        dp=dp,
        v=v,
        nc=nc or micro_batches,
        micro_batch=1,
        order=Order.AFAB if nc is None else Order.FLEXIBLE,
        split=split,
        zero=zero,
        recompute=Recompute.FULL if recomputed_layers else Recompute.NONE,
    ).replace(recomputed_layers=recomputed_layers)


def tflops(job: Jobs, exact: Exact) -> float:
    """TFLOP/s per GPU of a played step; FLOPs as in `planner.flops.model_flops_per_step`."""
    return float(model_flops_per_step(job) / exact.seconds / job.gpus) / 1e12
