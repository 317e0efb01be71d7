"""Runs one training step of one rank for dry, and reads what it held and sent."""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.layout import Doing, attention_pairs, shards
from fourfold.layout.actions import SENDS
from fourfold.model import Batch, Ops
from fourfold.model.attention import varlen
from fourfold.model.llama import Attention, FeedForward
from fourfold.parallel import ParallelModel, connect
from fourfold.parallel.tensor import attend
from fourfold.parallel.torch_private import held_by_fsdp, pretended_ranks, pretended_tensors
from fourfold.recipe import RunPlan
from fourfold.trainer.dry_run.results import DryRank, GroupTraffic, Held
from fourfold.trainer.dry_run.watcher import Watcher
from fourfold.trainer.optimizer import make_optimizer

CPU = torch.device("cpu")


def runs_on_gpu(plan: RunPlan) -> bool:
    """Whose attention kernel runs: a GPU's unless the recipe says CPU, or leaves it open and names no GPU."""
    device = plan.recipe.train.device
    return device == "cuda" or (device == "auto" and plan.recipe.cluster.gpu is not None)


def dry_run(plan: RunPlan, rank: int) -> DryRank:
    """One step of one rank, in the plan's first phase, as it is once the optimizer has its moments.

    Every row of the batch is one document. Where the recipe compiles, what is compiled runs as it is written.

    It runs in a process of its own: PyTorch keeps what it has worked out for a rank, such as where its shards begin,
    and would take it for that of any other rank that this process becomes, or forks.

    Raises:
        ValueError: there is no such rank.
    """
    plan.grid.coordinates(rank)
    fork = get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork, initializer=torch.set_num_threads, initargs=(1,)) as apart:
        return apart.submit(_dry_run, plan, rank).result()


def _dry_run(plan: RunPlan, rank: int) -> DryRank:
    began, coordinates = time.monotonic(), plan.grid.coordinates(rank)
    recipe, on_gpu = plan.recipe, runs_on_gpu(plan)
    eager = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, compile=False))
    plan = replace(plan, recipe=eager)
    watcher = Watcher(pairs=_pairs(plan, coordinates.cp) if on_gpu else None)
    tensors = pretended_tensors()

    def weights(name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
        with tensors:
            return torch.empty([len(range(*cut.indices(size))) for cut, size in zip(slices, shape, strict=True)])

    with pretended_ranks(rank, plan.grid.size):
        groups = connect(plan.grid, "cpu", ordered=recipe.train.ordered, recorder=watcher.recorder)
        # Not among pretended tensors: groups of ranks are made of real ones.
        model = ParallelModel(plan, groups, weights=weights, device=CPU)
        _observe(model, watcher, on_gpu=on_gpu)
        with tensors, _without_collections(), watcher.watching(lambda kind, stage: _end(watcher, model, kind, stage)):
            _step(model, watcher, on_gpu=on_gpu)
    reading = watcher.ledger.read()
    kept = reading.most_after(Held.ACTIVATIONS)
    return DryRank(
        rank=rank,
        at=coordinates,
        stages=tuple(model.stages),
        parameters=sum(_on_tensor_rank(parameter, plan.grid.tp) for parameter in _parameters(model)),
        most=reading.most | {Held.ACTIVATIONS: kept.held[Held.ACTIVATIONS]},
        peak=reading.peak,
        kept=kept,
        traffic=tuple(_traffic(watcher, recipe.cluster.gpus_per_node)),
        flops=watcher.flops.total(),
        seconds=time.monotonic() - began,
    )


@contextmanager
def _without_collections() -> Generator[None]:
    """As in a training step: what only the collector of garbage would free stays."""
    were_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if were_on:
            gc.enable()


def _micro_batch(plan: RunPlan) -> tuple[Batch, list[tuple[int, ...]]]:
    """A micro-batch of one data-parallel group: every row is one document."""
    rows: list[tuple[int, ...]] = [(plan.phases[0].seq_len,)] * plan.recipe.pipeline.micro_batch
    return Batch.from_rows(torch.zeros(sum(map(sum, rows)), dtype=torch.int64), rows), rows


def _pairs(plan: RunPlan, cp_rank: int) -> int:
    """(query, visible key) pairs of a micro-batch on one context-parallel rank, per head."""
    _, rows = _micro_batch(plan)
    cut = shards(rows, cp=plan.grid.cp, strategy=plan.recipe.layout.cp_split, multiple_of=plan.grid.tp)
    return attention_pairs(rows, cut[cp_rank])


def _observe(model: ParallelModel, watcher: Watcher, *, on_gpu: bool) -> None:
    """Lets the watcher know which part of a backward is a forward made again, and gives attention the right kernel."""
    on_a_gpu = partial(attend, cp=model.groups.cp, kernel=varlen)
    for stage in model.stages.values():
        for module in stage.module.modules():
            if on_gpu and isinstance(ops := getattr(module, "ops", None), Ops):
                module.ops = replace(ops, attend=on_a_gpu)
            if isinstance(module, Attention | FeedForward):
                module.register_forward_pre_hook(lambda module, inputs: watcher.flops.forwards(True))
                module.register_forward_hook(
                    lambda module, inputs, out: watcher.flops.forwards(False), always_call=True
                )


def _step(model: ParallelModel, watcher: Watcher, *, on_gpu: bool) -> None:
    """What the training loop does in a step."""
    plan, settings, doing = model.plan, model.plan.recipe.optimizer, model.groups.recorder.doing
    weights = model.gradients.weights
    optimizer = make_optimizer(weights, settings, tied=plan.config.tied)
    if on_gpu:  # where PyTorch's default is to update many tensors at once, which needs more memory for a moment
        for group in optimizer.param_groups:
            group["foreach"] = True
    watcher.name([_local(parameter) for parameter in _parameters(model)], Held.MASTER)
    for weight in weights:
        weight.local.grad = torch.zeros_like(weight.local)
    optimizer.step()  # makes the moments, which are there from the second step on
    model.zero_grad()
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    watcher.name([value for value in state if value.ndim], Held.OPTIMIZER)
    watcher.begin()
    micro_batch = _micro_batch(plan)
    model.forward_backward([micro_batch] * plan.num_micro_batches)
    with doing(Doing.NORM):
        norm = model.gradients.norm(settings.clip_norm_type)
    with doing(Doing.STEP):
        model.gradients.clip(norm, settings.clip_norm or norm)
        model.gradients.hand_over()
        optimizer.step()
    model.zero_grad()


def _end(watcher: Watcher, model: ParallelModel, kind: str, stage: int) -> None:
    """At the end of an action: here the network takes no time; and what FSDP holds of the stage is named."""
    if kind in SENDS:
        model.pipeline.flush()
        watcher.sent()
    if stage in model.stages:
        held = held_by_fsdp(model.stages[stage].module)
        for what, tensors in ((Held.GATHERED, held.weights), (Held.SUMS, held.sums), (Held.SHARDS, held.shards)):
            watcher.name(tensors, what)


def _parameters(model: ParallelModel) -> Iterator[DTensor]:
    for stage in model.stages.values():
        for parameter in stage.module.parameters():
            assert isinstance(parameter, DTensor)
            yield parameter


def _local(parameter: DTensor) -> Tensor:
    with torch.no_grad():
        return parameter.to_local()


def _on_tensor_rank(parameter: DTensor, tp: int) -> int:
    """Elements of a parameter that one rank computes with."""
    return parameter.numel() if parameter.placements[-1].is_replicate() else parameter.numel() // tp


def _traffic(watcher: Watcher, gpus_per_node: int) -> Iterator[GroupTraffic]:
    for alike, (count, num_bytes) in watcher.traffic.items():
        nodes = {rank // gpus_per_node for rank in alike.ranks}
        link = "none" if len(alike.ranks) == 1 else "node" if len(nodes) == 1 else "network"
        group, kind, dtype, during, ranks = alike
        yield GroupTraffic(group, kind, dtype, during, count, num_bytes, ranks, link)
