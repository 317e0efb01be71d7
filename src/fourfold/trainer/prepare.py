"""Before ranks exist: the folder of a run, its data, and what the person who starts it should know."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from fourfold.data import sources
from fourfold.data.fingerprint import compare
from fourfold.data.writer import write_atomically
from fourfold.debugger.numerics.records import FOLDER
from fourfold.planner import consequences
from fourfold.recipe import Problem, RecipeError, RunPlan, load, to_table, to_toml
from fourfold.recipe.errors import show
from fourfold.report.text import print_consequences
from fourfold.report.tokens import ByteProgress
from fourfold.trainer import runs
from fourfold.trainer.checkpoint import CheckpointError, CheckpointStore, model_problems
from fourfold.trainer.export import partial_folder
from fourfold.trainer.sinks import check_sinks

PROBE = ".probe"  # a file that is written and removed, to see whether a place can be written to


@dataclass(frozen=True)
class Prepared:
    """What all ranks share; it can be sent to them.

    Attributes:
        plan: of the run.
        data: where the tokens are.
        folder: of the run.
        new: whether the folder was made for it just now.
        resumes: whether training goes on from a checkpoint.
    """

    plan: RunPlan
    data: sources.Prepared
    folder: Path
    new: bool
    resumes: bool

    @property
    def store(self) -> CheckpointStore:
        """Where the run's checkpoints are."""
        return CheckpointStore(_place(self.plan, self.folder))


def _place(plan: RunPlan, folder: Path) -> str:
    """Folder or URL of the checkpoints of the run in ``folder``."""
    return plan.recipe.checkpoint.dir or str(folder / "checkpoints")


def prepare(plan: RunPlan, *, weights_from: str, resume: bool) -> Prepared:
    """Makes the run's folder, or finds it, and its data; prints the consequences. What fails leaves nothing behind.

    Args:
        plan: of the run.
        weights_from: where the initial weights come from, for the person who starts the run.
        resume: go on with the run of this name, if there is one.

    Raises:
        RecipeError: what only this machine can say is wrong: data, folders, packages.
    """
    recipe = plan.recipe
    check_sinks(recipe)
    parent = Path(recipe.output.dir)
    first = not parent.exists()
    folder, new = _folder(parent, recipe.output.name, resume=resume)
    begun = False
    try:
        resumes = _has_checkpoints(_place(plan, folder), resume=resume)
        news = [f"Changed since it last ran: {change}" for change in _changes(folder, plan)] if resumes else []
        if not resumes:
            news += _begin_anew(folder, _place(plan, folder))
        runs.begin(folder, plan)  # from now on nobody else resumes this run
        begun = True
        print_consequences(consequences(plan))
        longest = max(phase.seq_len for phase in plan.phases)
        with ByteProgress("checking tokens") as bar:
            data = sources.prepare_sources(
                recipe.data,
                folder,
                vocab_size=plan.config.vocab_size,
                seq_len=longest,
                progress=lambda name, done, total: bar.update(done, total, name),
            )
        prepared = Prepared(plan, data, folder, new, resumes)
        if resumes:
            news += _data_changes(prepared)
        write_atomically(folder / "recipe.toml", _recipe_of(folder, plan).encode())  # it may be the only copy
        _say(prepared, weights_from, news)
    except BaseException as error:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        elif begun:
            with suppress(OSError):
                runs.end(folder, "failed", str(error))
        if first:
            with suppress(OSError):  # another run may have begun in it
                parent.rmdir()
        if not isinstance(error, OSError) or isinstance(error, BrokenPipeError):
            raise
        raise _cannot_write(recipe.output.dir, error) from None
    return prepared


def _folder(parent: Path, name: str, *, resume: bool) -> tuple[Path, bool]:
    """The folder of the run, and whether it was made here."""
    try:
        if not resume:
            return new_folder(parent, name), True
        folder = parent / name
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(str(parent), error) from None
    if not new:
        _refuse_if_running(folder)
    return folder, new


def _refuse_if_running(folder: Path) -> None:
    told, here = runs.summarize_run(folder), socket.gethostname()
    # A job that was started again, on another machine since one has failed, has no other process that trains.
    if told.state != "running" or (told.host != here and runs.belongs_to(folder, runs.job_id())):
        return
    rule = f"is running already, as process {told.pid} on {told.host}; two would overwrite each other's files"
    if told.host != here:
        rule += f". If that machine has failed, remove {folder / 'run.json'}"
    raise RecipeError([Problem("output.name", folder.name, rule)])


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


def _cannot_write(directory: str, error: OSError) -> RecipeError:
    rule = f"cannot be written to: {error.filename}: {error.strerror}"
    return RecipeError([Problem("output.dir", directory, rule)])


def _has_checkpoints(place: str, *, resume: bool) -> bool:
    """Whether there is something to go on from. A new run does not begin among another's checkpoints."""
    if place.startswith("memory:"):
        rule = "is in the memory of one process, and every rank is a process of its own"
        raise RecipeError([Problem("checkpoint.dir", place, rule)])
    try:
        store = CheckpointStore(place)
        complete = store.complete()
        store.files.replace(PROBE, b"")  # better now than in an hour
        store.files.remove(PROBE)
    except OSError as error:
        rule = f"cannot be used: {error}"
        raise RecipeError([Problem("checkpoint.dir", place, rule)]) from None
    if complete and not resume:
        rule = f"holds checkpoints of another run, up to step {complete[-1].step}; go on with it by --resume"
        raise RecipeError([Problem("checkpoint.dir", place, rule)])
    return bool(complete)


def _begin_anew(folder: Path, place: str) -> list[str]:
    """Sees to it that a run without a checkpoint loses nothing by beginning at its first step.

    Returns:
        What to tell about it.

    Raises:
        RecipeError: it has had checkpoints: a wrong path, or a disk that is not there, must not end weeks of work.
    """
    before = runs.summarize_run(folder)
    if not before.step:
        return []
    try:
        every = load(folder / "recipe.toml").checkpoint.every
    except RecipeError:
        every = 0
    # A second save waits for the first one.
    if before.state in ("finished", "stopped") or (every and before.step >= 2 * every):
        rule = f"has made {before.step} steps and saved them, but there is no checkpoint in {place}"
        raise RecipeError([Problem("output.name", folder.name, f"{rule}; to begin anew, take another name")])
    number = 1
    while (folder / f"metrics-{number}.jsonl").exists():
        number += 1
    for name in ("metrics", "validation"):
        with suppress(FileNotFoundError):
            (folder / f"{name}.jsonl").rename(folder / f"{name}-{number}.jsonl")
    return [f"It had made {before.step} steps, but no checkpoint, and begins anew; see metrics-{number}.jsonl"]


def _recipe_of(folder: Path, plan: RunPlan) -> str:
    """The recipe under the name that the run has got: training it again with --resume finds this folder."""
    recipe = plan.recipe
    return to_toml(msgspec.structs.replace(recipe, output=msgspec.structs.replace(recipe.output, name=folder.name)))


def _changes(folder: Path, plan: RunPlan) -> Iterator[str]:
    """What the recipe says otherwise than the one this run had before."""
    try:
        before, now = _flat(to_table(load(folder / "recipe.toml"))), _flat(to_table(plan.recipe))
    except RecipeError:  # of another version: no reason not to go on
        return
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            values = (show(v[key]) if key in v else "not set" for v in (before, now))
            yield f"{key}: {' -> '.join(values)}"


def _flat(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in table.items() for key, value in keys.items()}


def _data_changes(prepared: Prepared) -> list[str]:
    """What has changed in the data since the newest checkpoint, which must be of this model.

    Raises:
        RecipeError: it is of another model, or the data are others under the same name.
    """
    newest = prepared.store.complete()[-1]
    try:
        saved = newest.state()
    except (CheckpointError, OSError):  # it is damaged: what is loaded will be another
        return []
    if problems := model_problems(saved.model, prepared.plan.config, path=newest.path):
        raise RecipeError(problems)
    return compare(saved.data, prepared.data.fingerprint) if saved.data else []


def _say(prepared: Prepared, weights_from: str, news: list[str]) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    data = prepared.data
    documents, tokens = (sum(getattr(s, key) for s in data.sources) for key in ("num_documents", "num_tokens"))
    entries = f", {data.vocab_size:,} entries" if data.vocab_size is not None else ""
    entropy = data.unigram_entropy
    known = f"; unigram entropy {entropy:.3f} nats per token" if entropy is not None else ""
    steps, ranks = prepared.plan.profiled_steps, prepared.plan.profiled_ranks
    what = "Profiler, with memory" if prepared.plan.recipe.profile.memory else "Profiler"
    recorded = [f"{what}: {len(steps)} steps from {steps[0]} on, on {len(ranks)} ranks, to profile/"] if steps else []
    numbered = len(prepared.plan.recorded_steps)
    recorded += [f"Numbers: of {numbered} {'step' if numbered == 1 else 'steps'}, to {FOLDER}/"] if numbered else []
    lines = chain(
        [f"\nData: {documents:,} documents, {tokens:,} tokens{entries}{known}"],
        data.notes,
        news,
        recorded,
        [f"Weights: {'of the checkpoint' if prepared.resumes else weights_from}", f"Run folder: {prepared.folder}\n"],
    )
    console.print("\n".join(lines))


def clear(prepared: Prepared) -> None:
    """What a run that did not end well leaves is no half model, and no folder if it made no step.

    A folder that was there before is never removed: it holds checkpoints, or is not a run's at all. Nor is one in which
    a rank has left what filled its memory.
    """
    shutil.rmtree(partial_folder(prepared.folder / "model"), ignore_errors=True)
    if prepared.new and not made_a_step(prepared.folder) and not has_snapshots(prepared.folder):
        shutil.rmtree(prepared.folder, ignore_errors=True)


def has_snapshots(folder: Path) -> bool:
    """Whether ranks of this run have left snapshots of their memory."""
    return any((folder / "profile").glob("memory-*.pickle"))


def made_a_step(folder: Path) -> bool:
    """Whether there are metrics of this run."""
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0
