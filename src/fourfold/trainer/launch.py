"""From a recipe to running ranks: forked, started by PyTorch's elastic launcher, or already started by torchrun."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fourfold.model import fill, huggingface
from fourfold.parallel import WeightSource, connect
from fourfold.recipe import Problem, RecipeError, RunPlan, check, load
from fourfold.trainer import runs
from fourfold.trainer.checkpoint import Checkpoint, CheckpointError, find_checkpoint, is_checkpoint, open_weights
from fourfold.trainer.export import export_checkpoint
from fourfold.trainer.loop import Outcome, train
from fourfold.trainer.prepare import Prepared, clear, made_a_step, prepare
from fourfold.trainer.ranks import RankFailure, Stopped, fork_ranks


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
    if "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return _join(plan, device, resume=resume)[0]
    if device == "cuda":
        _check_gpus(plan, torch.cuda.device_count())
        return launch_elastic(plan, recipe_file, overrides, device, resume=resume)
    weights = initial_weights(plan)  # here and not on each rank: the ranks share this process's memory
    with _ended_by_sigterm():
        return _run_forked(plan, weights, resume=resume)


def _run_forked(plan: RunPlan, weights: WeightSource, *, resume: bool) -> int:
    prepared = prepare(plan, weights_from=describe_weights(plan), resume=resume)
    timeouts = plan.recipe.timeouts
    with _answering_for(prepared) as ending:
        try:
            outcomes = fork_ranks(
                plan.grid.size,
                lambda rank: _train(prepared, weights, torch.device("cpu")),
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


@contextmanager
def _answering_for(prepared: Prepared) -> Generator[Callable[..., int]]:
    """The process that prepared a run keeps its run.json true, exports its model, and leaves nothing half-written.

    Yields a function to be called with how the ranks ended, which returns the exit code.
    """
    saved = False

    def ending(outcome: Outcome | None, stopped_by: int = 0, *, killed: bool = False) -> int:
        nonlocal saved
        saved = outcome is not None and outcome.saved
        # A signal may have come when the last step was done: then the ranks do not know of it.
        if outcome is not None:
            stopped_by = stopped_by or outcome.stopped_by
            outcome = replace(outcome, stopped_by=stopped_by)
            if not stopped_by:
                _export(prepared, outcome)
        summarize(prepared, outcome, killed=killed)
        name = f"by {signal.Signals(stopped_by).name}" if stopped_by else None
        runs.end(prepared.folder, "stopped" if stopped_by else "finished", name)
        return 0 if not stopped_by or (stopped_by == signal.SIGTERM and saved) else 128 + stopped_by

    try:
        yield ending
    except KeyboardInterrupt:  # while the model was written: that is made up for when the run is resumed
        runs.end(prepared.folder, "stopped", "by SIGINT")
        raise
    except SystemExit as stop:  # the same, by SIGTERM
        runs.end(prepared.folder, "stopped", "by SIGTERM")
        raise SystemExit(0 if saved else stop.code) from None
    except BaseException as error:
        runs.end(prepared.folder, "failed", str(error))
        raise
    finally:
        clear(prepared)


def _export(prepared: Prepared, outcome: Outcome) -> None:
    """Writes the finished model. One of an earlier end of this run stays only if training did not go on."""
    model = prepared.folder / "model"
    if model.exists() and outcome.last is None:
        return
    shutil.rmtree(model, ignore_errors=True)
    export_checkpoint(_checkpoint_of(prepared, outcome), model)


def _checkpoint_of(prepared: Prepared, outcome: Outcome) -> Checkpoint:
    """Where the run ended. A later one may be there, damaged, that was passed over when the run was resumed."""
    return next(c for c in reversed(prepared.store.complete()) if c.step == outcome.state.step)


def summarize(prepared: Prepared, outcome: Outcome | None, *, killed: bool = False) -> None:
    """Prints how the run ended, for the reader who comes back to it. ``outcome`` None: the ranks could not say."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if outcome is None or outcome.state.step == 0:
        why = "The ranks were killed" if killed else "Stopped before the first step"
        kept = f" Metrics: {prepared.folder / 'metrics.jsonl'}" if made_a_step(prepared.folder) else ""
        complete = prepared.store.complete()
        saved = f"the newest checkpoint is {complete[-1].path}" if complete else "nothing was saved"
        console.print(f"\n{why}; {saved}.{kept}")
        return
    steps, entropy, last = prepared.plan.recipe.train.steps, prepared.data.unigram_entropy, outcome.last
    how = "Stopped" if outcome.stopped_by else "Finished"
    lines = [f"\n{how} after {outcome.state.step} of {steps} steps, {outcome.state.tokens:,} tokens"]
    if last is None:
        lines[0] += "; none of them now: there was nothing left to do."
    else:
        lines[0] += (
            f"; {outcome.tokens:,} of them now in {outcome.seconds:.0f} s "
            f"({outcome.tokens / outcome.seconds:,.0f} tokens/s)."
        )
        known = "."
        if entropy is not None:
            relation = "below" if last.loss < entropy else "above"
            known = f", {abs(entropy - last.loss):.2f} nats {relation} the unigram entropy {entropy:.3f}."
        lines.append(f"Last loss {last.loss:.4f}{known}")
    lines.append(f"Metrics:    {prepared.folder / 'metrics.jsonl'}")
    lines.append(f"Checkpoint: {_checkpoint_of(prepared, outcome).path}")
    if outcome.stopped_by:
        lines.append(f"Go on with: fourfold train {prepared.folder / 'recipe.toml'} --resume")
    else:
        lines.append(f"Model:      {prepared.folder / 'model'} (Hugging Face format)")
    console.print("\n".join(lines))


def initial_weights(plan: RunPlan, *, verify: bool = True) -> WeightSource:
    """Weights of the directory that ``model.path`` names, if it has any, else random ones from ``train.seed``.

    ``verify``: read a checkpoint through first; one process of a job is enough.

    Raises:
        RecipeError: the directory's weights cannot be read, or are not those of the model.
    """
    path, config, seed = plan.recipe.model.path, plan.config, plan.recipe.train.seed
    if has_weights(plan):
        assert path is not None
        try:
            if is_checkpoint(path):
                read = open_weights(find_checkpoint(path, verify=verify), config)
            else:
                read = huggingface.open_weights(path, config)
        except RecipeError:
            raise
        except (CheckpointError, ValueError, OSError, SafetensorError) as error:
            raise RecipeError([Problem("model.path", path, f"its weights cannot be used: {error}")]) from None
        return lambda name, shape, slices: read(name, slices)

    def draw(name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
        rows, columns = (*slices, slice(None))[:2]
        return fill(name, shape, seed, config, rows=rows, columns=columns)

    return draw


def has_weights(plan: RunPlan) -> bool:
    """Whether training starts from the weights of ``model.path``.

    Raises:
        RecipeError: the directory has weights in another format: training from random ones instead would be a trap.
    """
    path = plan.recipe.model.path
    if path is None:
        return False
    if is_checkpoint(path) or any(Path(path).glob("*.safetensors")):
        return True
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in Path(path).glob(pattern))
    if others:
        rule = f"must hold weights as safetensors, or none; found {others[0]}"
        raise RecipeError([Problem("model.path", path, rule)])
    return False


def describe_weights(plan: RunPlan) -> str:
    """Where initial weights come from, in words."""
    return f"from {plan.recipe.model.path}" if has_weights(plan) else f"random, seed {plan.recipe.train.seed}"


def _train(prepared: Prepared, weights: WeightSource, device: torch.device) -> Outcome:
    """The work of one rank whose default process group is up."""
    plan = prepared.plan
    groups = connect(plan.grid, device.type)
    return train(prepared, groups=groups, weights=weights, device=device)


def _join(plan: RunPlan, device_type: str, *, resume: bool) -> tuple[int, bool]:
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
    if dist.get_rank() != 0:
        prepared = _receive()
        outcome = _train(prepared, weights, device)
        _leave()
        return (128 + outcome.stopped_by if outcome.stopped_by and not outcome.saved else 0), bool(outcome.stopped_by)
    prepared = _prepare_for_all(plan, resume=resume)
    with _answering_for(prepared) as ending:
        outcome = _train(prepared, weights, device)
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


def _prepare_for_all(plan: RunPlan, *, resume: bool) -> Prepared:
    """Rank 0 prepares the run, and tells the others, also what is wrong: or they would wait for ever."""
    shared: list[Any] = [None, None]
    try:
        begun = _begun_before(plan)
        shared[0] = prepare(begun or plan, weights_from=describe_weights(plan), resume=resume or begun is not None)
    except RecipeError as error:
        shared[1] = error.problems
        raise
    finally:
        dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _receive() -> Prepared:
    shared: list[Any] = [None, None]
    dist.broadcast_object_list(shared, src=0)
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
    name = runs.name_of_job(Path(output.dir), job) if _restarted() and job is not None else None
    if name is None:
        return None
    return check(msgspec.structs.replace(plan.recipe, output=msgspec.structs.replace(output, name=name)))


def _restarted() -> bool:
    """Whether PyTorch's elastic launcher started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@record
def _elastic_rank(recipe_file: Path, overrides: list[str], device: str, resume: bool) -> int:
    code, stopped = _join(check(load(recipe_file, overrides)), device, resume=resume)
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
