"""Finds the newest good checkpoint, and loads it under whatever layout this run has."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from fourfold.parallel import Groups, ParallelModel
from fourfold.recipe import ModelConfig, RecipeError, parameter_shapes
from fourfold.trainer.checkpoint.format import CheckpointError, RankReport, decode, model_problems, real_shape
from fourfold.trainer.checkpoint.state import (
    TrainState,
    boxes_to_load,
    pieces_of,
    set_random_states,
    weights_without_moments,
)
from fourfold.trainer.checkpoint.storage import Box, load_boxes, rank_file
from fourfold.trainer.checkpoint.store import Checkpoint, CheckpointStore, damage


def load_newest(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    store: CheckpointStore,
    groups: Groups,
    *,
    say: Callable[[str], None] = print,
) -> TrainState | None:
    """Goes back to the newest checkpoint that is whole. A collective.

    Every byte is checked first, each rank looking at a share of the files, and all ranks take the same checkpoint.

    Args:
        model: whose weights are replaced.
        optimizer: whose state is replaced. Its learning rate and other settings are the recipe's and stay.
        store: where to look.
        groups: of this rank.
        say: told on rank 0, in a sentence each, which checkpoints are passed over and why, and which one is used.

    Returns:
        Where training stood; None if there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, and none is whole. To begin anew in their place would be a trap.
        RecipeError: the checkpoint is of another model.
    """
    tell = say if groups.rank == 0 else _nothing
    listed = [[c.path.rpartition("/")[2] for c in store.complete()], store.unfinished()] if groups.rank == 0 else []
    complete, unfinished = json.loads(groups.share(json.dumps(listed))[0])
    for name in unfinished:
        tell(f"{store.place}/{name} was never finished, and is passed over")
    damaged = []
    for name in reversed(complete):
        checkpoint = store.checkpoint(name)
        reasons = groups.share(damage(checkpoint, part=groups.rank, parts=groups.world.size) or "")
        reason = next(filter(None, reasons), None)
        if reason is None:
            tell(f"Going on from {checkpoint.path}")
            return load_checkpoint(checkpoint, model, optimizer, say=tell)
        damaged.append(reason)
        tell(f"{reason}; it is passed over")
    if damaged:
        raise CheckpointError(f"no checkpoint in {store.place} is whole; the newest: {damaged[0]}")
    return None


def load_checkpoint(
    checkpoint: Checkpoint,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    *,
    say: Callable[[str], None] = print,
) -> TrainState:
    """Loads weights, moments, step counts and random states of this rank. Not a collective; nothing is verified.

    Raises:
        CheckpointError, OSError: it cannot be read.
        RecipeError: it is of another model.
    """
    plan, rank = model.plan, model.groups.rank
    index, state = checkpoint.index(), checkpoint.state()
    if problems := model_problems(state.model, plan.config, path=checkpoint.path):
        raise RecipeError(problems)
    pieces = pieces_of(model)
    with torch.no_grad():
        for piece in pieces:
            piece.local[len(piece.box.memory) :].zero_()  # the padding of the vocabulary
    boxes = boxes_to_load(pieces, optimizer, plan.recipe.optimizer.name, index.tensors, index.steps)
    load_boxes(checkpoint.files, index, {name: (s, box) for name, (s, box) in boxes.items() if box.memory.numel()})
    if new := weights_without_moments(plan, index.tensors):
        say(f"{checkpoint.path} has no optimizer state for {len(new)} weights, such as {new[0]}: they begin with none")

    report = rank_file(rank, "json")
    random = {}
    if report in index.files:
        random = decode(checkpoint.files.read(report), RankReport, path=f"{checkpoint.path}/{report}").rng
    set_random_states(random, model.device, seed=plan.recipe.train.seed, rank=rank)
    return TrainState(state.step, state.tokens, state.position, state.optimizer_steps, state.skipped)


def open_weights(checkpoint: Checkpoint, config: ModelConfig) -> Callable[[str, tuple[slice, ...]], Tensor]:
    """A reader of parts of weights, ``read(name, slices) -> float32 tensor``, that takes from the files no more.

    Slices (step 1) count in the whole, padded weight; padded rows are zero. As :func:`model.huggingface.open_weights`.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        RecipeError: it is of another model.
    """
    index, shapes = checkpoint.index(), parameter_shapes(config)
    if problems := model_problems(checkpoint.state().model, config, path=checkpoint.path):
        raise RecipeError(problems)

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        shape = real_shape(name, shapes[name], config)
        ranges = [range(*part.indices(size)) for part, size in zip(slices, shapes[name], strict=True)]
        out = torch.zeros([len(r) for r in ranges])
        rows = min(ranges[0].stop, shape[0]) - ranges[0].start
        if rows > 0:
            box = Box(shape, tuple(r.start for r in ranges), out[:rows])
            load_boxes(checkpoint.files, index, {name: (f"model.{name}", box)})
        return out

    return read


def _nothing(text: str) -> None: ...
