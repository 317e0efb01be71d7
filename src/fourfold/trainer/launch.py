"""From a recipe to running ranks: forked, started by PyTorch's elastic launcher, or already started by torchrun."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fourfold.parallel import WeightSource, missing_compiler
from fourfold.recipe import Problem, RecipeError, RunPlan, check, load
from fourfold.trainer import runs
from fourfold.trainer.ending import answering_for
from fourfold.trainer.join import join, train_rank
from fourfold.trainer.prepare import prepare
from fourfold.trainer.ranks import RankFailure, Stopped, fork_ranks
from fourfold.trainer.weights import describe_weights, initial_weights


def run(plan: RunPlan, recipe_file: Path, overrides: Sequence[str], *, resume: bool = False) -> int:
    """The verb ``fourfold train`` after its recipe, of which ``plan`` was made, is found legal: starts ranks, or joins.

    Args:
        plan: of the run.
        recipe_file, overrides: what the plan was made of, for processes that must make it again.
        resume: go on with the run of this name from its newest good checkpoint, if it has one.

    Returns:
        The exit code: 0 if training ended, or was stopped by SIGTERM and its state is saved; else 128 + the number of
        the signal.

    Raises:
        RecipeError: what only this machine can say is wrong, before a process is started or a file written.
        RankFailure: a rank failed.
    """
    device = _device_type(plan)
    if plan.recipe.train.compile and (lack := missing_compiler(device)) is not None:
        raise RecipeError([Problem("train.compile", True, f"cannot be had on this machine: {lack}", (False,))])
    if "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return join(plan, device, resume=resume)[0]
    if device == "cuda":
        _check_gpus(plan, torch.cuda.device_count())
        return launch_elastic(plan, recipe_file, overrides, device, resume=resume)
    weights = initial_weights(plan)  # here and not on each rank: the ranks share this process's memory
    with _ended_by_sigterm():
        return _run_forked(plan, weights, resume=resume)


def _run_forked(plan: RunPlan, weights: WeightSource, *, resume: bool) -> int:
    prepared = prepare(plan, weights_from=describe_weights(plan), resume=resume)
    timeouts = plan.recipe.timeouts
    with answering_for(prepared) as ending:
        try:
            outcomes = fork_ranks(
                plan.grid.size,
                lambda rank: train_rank(prepared, weights, torch.device("cpu")),
                grace=timeouts.grace,
                collective_timeout=timeouts.collective,
            )
        except Stopped as stopped:
            return ending(stopped.results[0], stopped.signal, killed=stopped.killed)
        return ending(outcomes[0])


@contextmanager
def _ended_by_sigterm() -> Generator[None]:
    """While there are no ranks to be asked to stop, SIGTERM ends this process as an exception: it cleans up."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def launch_elastic(
    plan: RunPlan, recipe_file: Path, overrides: Sequence[str], device: str, *, resume: bool = False
) -> int:
    """Starts the ranks through PyTorch's elastic launcher: CUDA does not survive a fork.

    Returns:
        The exit code, as :func:`run`.

    Raises:
        RankFailure: a rank failed; the message begins with the first one's.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.grid.size,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=uuid4().hex,
        max_restarts=0,
        shutdown_timeout=math.ceil(plan.recipe.timeouts.grace),
    )
    try:
        codes = elastic_launch(config, _elastic_rank)(recipe_file, list(overrides), device, resume)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # A dictionary if the rank wrote its traceback, a sentence if it died by a signal.
        message = failure.message
        if isinstance(message, dict):
            rank, message = message["extraInfo"].get("rank", rank), message["extraInfo"]["py_callstack"]
        raise RankFailure(rank, f"rank {rank} failed\n{message}") from None
    except SignalException as stop:
        directory = Path(plan.recipe.output.dir)
        name = runs.name_of_job(directory, config.run_id)
        # Rank 0 writes "stopped" when all is saved, and nothing if it was killed before.
        stopped = name is not None and runs.summarize_run(directory / name).state == "stopped"
        return 0 if stopped and stop.sigval == signal.SIGTERM else 128 + stop.sigval
    return max(codes.values())


@record
def _elastic_rank(recipe_file: Path, overrides: list[str], device: str, resume: bool) -> int:
    code, stopped = join(check(load(recipe_file, overrides)), device, resume=resume)
    if stopped:
        # A launcher that was told to stop waits for the end of this process and takes no result any more, for which
        # PyTorch would have this process wait: both until the launcher kills.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code


def _device_type(plan: RunPlan) -> str:
    device = plan.recipe.train.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise RecipeError([Problem("train.device", "cuda", "this machine has no CUDA device", ("auto", "cpu"))])
    return device


def _check_gpus(plan: RunPlan, num_gpus: int) -> None:
    if plan.grid.size > num_gpus:
        rule = (
            f"tp x cp x pp x dp = {plan.grid.size} ranks need as many GPUs, this machine has {num_gpus}; "
            "on several machines, use torchrun"
        )
        raise RecipeError([Problem("layout", None, rule)])
