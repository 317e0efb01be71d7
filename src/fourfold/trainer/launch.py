"""From a recipe to running ranks: forked, started by PyTorch's elastic launcher, or already started by torchrun."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

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
from fourfold.planner import consequences
from fourfold.recipe import Problem, RecipeError, RunPlan, check, load, to_toml
from fourfold.report.text import print_consequences
from fourfold.trainer.data import Rows, check_vocabulary
from fourfold.trainer.export import partial_folder
from fourfold.trainer.loop import Outcome, train
from fourfold.trainer.ranks import RankFailure, Stopped, fork_ranks
from fourfold.trainer.text import TokenSet, entries_of, load_tokens


@dataclass(frozen=True)
class Prepared:
    """What all ranks share: the plan, the tokens, and the folder of the run."""

    plan: RunPlan
    tokens: TokenSet
    folder: Path


def run(plan: RunPlan, recipe_file: Path, overrides: Sequence[str]) -> int:
    """The verb ``fourfold train`` after its recipe, of which ``plan`` was made, is found legal: starts ranks, or joins.

    Returns:
        The exit code: 0, or 128 + the number of the signal that stopped the run.

    Raises:
        RecipeError: what only this machine can say is wrong, before a process is started or a file written.
        RankFailure: a rank failed.
    """
    device = _device_type(plan)
    if "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return _join(plan, device)
    if device == "cuda":
        _check_gpus(plan, torch.cuda.device_count())
        return launch_elastic(plan.grid.size, recipe_file, overrides, device)
    weights = initial_weights(plan)  # here and not on each rank: the ranks share this process's memory
    prepared = prepare(plan)
    try:
        outcomes = fork_ranks(plan.grid.size, lambda rank: _train(prepared, weights, torch.device("cpu")))
    except Stopped as stopped:
        summarize(prepared, stopped.results[0], killed=stopped.killed)
        return 128 + stopped.signal
    finally:
        _clear(prepared.folder)
    summarize(prepared, outcomes[0])
    return 0


def launch_elastic(num_ranks: int, recipe_file: Path, overrides: Sequence[str], device: str) -> int:
    """Starts the ranks through PyTorch's elastic launcher: CUDA does not survive a fork.

    Returns:
        The exit code, as :func:`run`.

    Raises:
        RankFailure: a rank failed; the message begins with the first one's.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=uuid4().hex,
        max_restarts=0,
    )
    try:
        codes = elastic_launch(config, _elastic_rank)(recipe_file, list(overrides), device)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # A dictionary if the rank wrote its traceback, a sentence if it died by a signal.
        message = failure.message
        text = message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message
        raise RankFailure(rank, f"rank {rank} failed\n{text}") from None
    except SignalException as stop:
        return 128 + stop.sigval
    return max(codes.values())


def prepare(plan: RunPlan) -> Prepared:
    """Reads the text, prints the consequences, makes the run's folder: in this order, so that errors leave nothing."""
    recipe = plan.recipe
    check_vocabulary(entries_of(recipe.data.tokenizer), plan)  # before a tokenizer is trained for nothing
    tokens = load_tokens(recipe.data.source, recipe.data.tokenizer)
    check_vocabulary(tokens.vocab_size, plan)
    Rows(tokens, seq_len=recipe.batch.seq_len, seed=recipe.data.seed)
    print_consequences(consequences(plan))
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"\nText: {len(tokens.lengths):,} documents, {len(tokens.tokens):,} tokens, {tokens.vocab_size} entries; "
        f"unigram entropy {tokens.unigram_entropy:.3f} nats per token\n"
        f"{_skipped(tokens)}"
        f"Weights: {f'from {recipe.model.path}' if has_weights(plan) else f'random, seed {recipe.train.seed}'}"
    )
    folder = None
    try:
        folder = new_folder(Path(recipe.output.dir), recipe.output.name)
        (folder / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
        console.print(f"Run folder: {folder}\n")
    except BaseException as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        rule = f"cannot be written to: {error.filename}: {error.strerror}"
        raise RecipeError([Problem("output.dir", recipe.output.dir, rule)]) from None
    return Prepared(plan, tokens, folder)


def _skipped(tokens: TokenSet) -> str:
    if not tokens.skipped:
        return ""
    return f"Skipped {len(tokens.skipped):,} files that are not UTF-8 text, such as {tokens.skipped[0]}\n"


def new_folder(parent: Path, name: str) -> Path:
    """Makes ``parent/name``, or ``name-2``, ``name-3`` ... if that run exists already."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _clear(folder: Path) -> None:
    """What a run that did not end well leaves is no half model, and no folder if it made no step."""
    shutil.rmtree(partial_folder(folder / "model"), ignore_errors=True)
    if not _made_a_step(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _made_a_step(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def summarize(prepared: Prepared, outcome: Outcome | None, *, killed: bool = False) -> None:
    """Prints how the run ended, for the reader who comes back to it. ``outcome`` None: the ranks could not say."""
    console = Console(soft_wrap=True, highlight=False)
    if outcome is None or outcome.last is None:
        why = "The ranks were killed" if killed else "Stopped before the first step"
        kept = f" Metrics: {prepared.folder / 'metrics.jsonl'}" if _made_a_step(prepared.folder) else ""
        console.print(f"\n{why}; no model was written.{kept}")
        return
    last = outcome.last
    recipe, entropy = prepared.plan.recipe, prepared.tokens.unigram_entropy
    relation = "below" if last.loss < entropy else "above"
    how = "Stopped" if outcome.stopped_by else "Finished"
    console.print(
        f"\n{how} after {last.step} of {recipe.train.steps} steps, {last.tokens:,} tokens in {outcome.seconds:.0f} s "
        f"({last.tokens / outcome.seconds:,.0f} tokens/s).\n"
        f"Last loss {last.loss:.4f}, {abs(entropy - last.loss):.2f} nats {relation} the unigram entropy "
        f"{entropy:.3f}.\n"
        f"Metrics: {prepared.folder / 'metrics.jsonl'}\n"
        f"Model:   {prepared.folder / 'model'} (Hugging Face format)"
    )


def initial_weights(plan: RunPlan) -> WeightSource:
    """Weights of the directory that ``model.path`` names, if it has any, else random ones from ``train.seed``.

    Raises:
        RecipeError: the directory's weights cannot be read, or are not those of the model.
    """
    path, config, seed = plan.recipe.model.path, plan.config, plan.recipe.train.seed
    if has_weights(plan):
        assert path is not None
        try:
            read = huggingface.open_weights(path, config)
        except (ValueError, OSError, SafetensorError) as error:
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
    if any(Path(path).glob("*.safetensors")):
        return True
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in Path(path).glob(pattern))
    if others:
        rule = f"must hold weights as safetensors, or none; found {others[0]}"
        raise RecipeError([Problem("model.path", path, rule)])
    return False


def _train(prepared: Prepared, weights: WeightSource, device: torch.device) -> Outcome:
    """The work of one rank whose default process group is up."""
    plan = prepared.plan
    groups = connect(plan.grid, device.type)
    return train(plan, prepared.tokens, prepared.folder, groups=groups, weights=weights, device=device)


def _join(plan: RunPlan, device_type: str) -> int:
    """One rank among those that torchrun, or PyTorch's elastic launcher, has started."""
    torch.set_num_threads(1 if device_type == "cpu" else torch.get_num_threads())
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device_type == "cuda" else "cpu")
    world = int(os.environ["WORLD_SIZE"])
    if world != plan.grid.size:
        rule = f"tp x cp x pp x dp = {plan.grid.size} must equal the number of processes, {world}"
        raise RecipeError([Problem("layout", None, rule)])
    weights = initial_weights(plan)
    shared: list[Any] = [None, None]  # what rank 0 prepared, and what is wrong if it could not
    if os.environ["RANK"] == "0":
        try:
            shared[0] = prepare(plan)
        except RecipeError as error:  # told to all, or they would wait for this rank
            shared[1] = error.problems
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo", device_id=device if device_type == "cuda" else None
    )
    dist.broadcast_object_list(shared, src=0)
    prepared, problems = shared
    if problems is not None:
        raise RecipeError(problems)
    try:
        outcome = _train(prepared, weights, device)
    finally:
        if dist.get_rank() == 0:
            _clear(prepared.folder)
    if dist.get_rank() == 0:
        summarize(prepared, outcome)
    dist.barrier()
    dist.destroy_process_group()
    return 128 + outcome.stopped_by if outcome.stopped_by else 0


@record
def _elastic_rank(recipe_file: Path, overrides: list[str], device: str) -> int:
    return _join(check(load(recipe_file, overrides)), device)


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
