"""One rank among those that torchrun, or PyTorch's elastic launcher, has started."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.parallel import WeightSource, connect
from fourfold.recipe import Problem, RecipeError, RunPlan, check
from fourfold.trainer import runs
from fourfold.trainer.ending import answering_for
from fourfold.trainer.loop import Outcome, train
from fourfold.trainer.prepare import Prepared, prepare
from fourfold.trainer.weights import describe_weights, initial_weights


def train_rank(prepared: Prepared, weights: WeightSource, device: torch.device) -> Outcome:
    """The work of one rank whose default process group is up."""
    groups = connect(prepared.plan.grid, device.type, ordered=prepared.plan.recipe.train.ordered)
    if prepared.resumes:  # all of them come from the checkpoint: drawing a large model takes minutes
        weights = _zeros
    return train(prepared, groups=groups, weights=weights, device=device)


def _zeros(name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
    return torch.zeros([len(range(*s.indices(n))) for s, n in zip(slices, shape, strict=True)])


def join(plan: RunPlan, device_type: str, *, resume: bool) -> tuple[int, bool]:
    """One rank among those that torchrun, or PyTorch's elastic launcher, has started.

    After an elastic restart the run goes on from its newest good checkpoint, whether or not that was asked for.

    Returns:
        The exit code, and whether a signal has stopped the run.
    """
    torch.set_num_threads(1 if device_type == "cpu" else torch.get_num_threads())
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device_type == "cuda" else "cpu")
    world = int(os.environ["WORLD_SIZE"])
    if world != plan.grid.size:
        rule = f"tp x cp x pp x dp = {plan.grid.size} must equal the number of processes, {world}"
        raise RecipeError([Problem("layout", None, rule)])
    weights = initial_weights(plan, verify=os.environ["RANK"] == "0")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        device_id=device if device_type == "cuda" else None,
        timeout=timedelta(seconds=plan.recipe.timeouts.collective),
        **_elastic_store(),
    )
    # Rank 0 may tokenize and check for longer than a collective may take.
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    assert isinstance(patient, dist.ProcessGroup)
    restarted = torch.tensor([int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))])
    dist.all_reduce(restarted, dist.ReduceOp.MAX, group=patient)  # a machine that was replaced counts from 0
    if dist.get_rank() != 0:
        prepared = _receive(patient)
        outcome = train_rank(prepared, weights, device)
        _leave()
        return (128 + outcome.stopped_by if outcome.stopped_by and not outcome.saved else 0), bool(outcome.stopped_by)
    prepared = _prepare_for_all(plan, patient, resume=resume, restarted=bool(restarted.item()))
    with answering_for(prepared) as ending:
        outcome = train_rank(prepared, weights, device)
        _leave()  # nobody waits for the export, which may take longer than a collective may
        return ending(outcome), bool(outcome.stopped_by)


def _elastic_store() -> dict[str, Any]:
    """A fresh corner of the elastic launcher's store, as arguments of ``init_process_group``.

    The launcher shares one store between all its restarts, in which the ranks would find the addresses of dead ones
    (pytorch issue 135712). On several machines their restarts are counted apart: there the environment must have
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 instead.
    """
    environ = os.environ
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    shared = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), world, is_master=False)
    corner = dist.PrefixStore(f"fourfold/{environ['TORCHELASTIC_RESTART_COUNT']}", shared)
    return {"store": corner, "rank": rank, "world_size": world}


def _prepare_for_all(plan: RunPlan, group: dist.ProcessGroup, *, resume: bool, restarted: bool) -> Prepared:
    """Rank 0 prepares the run, and tells the others, also what is wrong: or they would wait for ever."""
    shared: list[Any] = [None, None]
    try:
        begun = _begun_before(plan) if restarted else None
        shared[0] = prepare(begun or plan, weights_from=describe_weights(plan), resume=resume or begun is not None)
    except RecipeError as error:
        shared[1] = error.problems
        raise
    finally:
        dist.broadcast_object_list(shared, src=0, group=group)
    return shared[0]


def _receive(group: dist.ProcessGroup) -> Prepared:
    shared: list[Any] = [None, None]
    dist.broadcast_object_list(shared, src=0, group=group)
    prepared, problems = shared
    if prepared is None:
        raise RecipeError(problems or [Problem("", None, "rank 0 could not prepare the run")])
    return prepared


def _leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def _begun_before(plan: RunPlan) -> RunPlan | None:
    """After an elastic restart the plan under the name that this job has given its run; None if there is none yet.

    The name in the recipe may be that of another run, which is not to be touched.
    """
    output, job = plan.recipe.output, runs.job_id()
    name = runs.name_of_job(Path(output.dir), job) if job is not None else None
    if name is None:
        return None
    return check(msgspec.structs.replace(plan.recipe, output=msgspec.structs.replace(output, name=name)))
