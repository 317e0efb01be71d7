"""What is in a checkpoint, seen from a running model: which boxes of which tensors are where in this rank's memory."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold import __version__
from fourfold.parallel import TIED_EMBEDDING, TIED_HEAD, ParallelModel
from fourfold.recipe import ModelConfig, RunPlan, is_frozen, parameter_shapes
from fourfold.trainer.checkpoint.format import FORMAT, CheckpointError, SavedState, real_shape
from fourfold.trainer.checkpoint.storage import Box, offsets_of

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""The optimizer's state per weight, by the recipe's name of the optimizer: tensors of the weight's shape."""


@dataclass(frozen=True)
class TrainState:
    """Where training stands between two steps.

    Attributes:
        step: steps done, skipped ones included.
        tokens: trained on.
        position: of the data stream, as JSON.
        optimizer_steps: steps in which the weights moved.
        skipped: steps that were not finite, and were skipped.
    """

    step: int
    tokens: int
    position: dict[str, Any]
    optimizer_steps: int
    skipped: int


@dataclass(frozen=True)
class Piece:
    """This rank's part of one weight.

    Attributes:
        name: of the weight in the model.
        source: of the tensor that is stored: the head of a tied model is stored as the embedding that it is.
        box: in the weight as stored, that is without the padding of the vocabulary. It may be empty.
        local: the whole local part, of which the box is the first rows.
        parameter: what the optimizer updates; None if the weight is frozen.
        owned: whether this rank saves it. Of equal copies one rank does.
    """

    name: str
    source: str
    box: Box
    local: Tensor
    parameter: torch.nn.Parameter | None
    owned: bool

    def box_in(self, tensor: Tensor) -> Box:
        """The same box in another tensor of the local part's shape, such as a moment."""
        return Box(self.box.shape, self.box.offsets, tensor.detach()[: len(self.box.memory)])


def pieces_of(model: ParallelModel) -> list[Piece]:
    """All weights of this rank, frozen ones included. Call it while no weight is gathered."""
    config, tied = model.plan.config, model.plan.config.tied
    trained = {id(weight.sharded): weight.local for weight in model.gradients.weights}
    pieces = []
    for stage in model.stages.values():
        assert not stage.gathered()
        for name, weight in stage.module.named_parameters():
            assert isinstance(weight, DTensor)
            source = TIED_EMBEDDING if tied and name == TIED_HEAD else name
            shape = real_shape(source, weight.shape, config)
            with torch.no_grad():
                local = weight.to_local().detach()
            offsets = offsets_of(weight)
            rows = max(0, min(len(local), shape[0] - offsets[0]))
            replicated = weight.placements[-1].is_replicate()
            owned = name == source and rows > 0 and local.numel() > 0 and (not replicated or model.groups.tp.rank == 0)
            pieces.append(Piece(name, source, Box(shape, offsets, local[:rows]), local, trained.get(id(weight)), owned))
    return pieces


def boxes_to_save(pieces: list[Piece], optimizer: torch.optim.Optimizer, name: str) -> dict[str, Box]:
    """What this rank saves, by name: its weights and their moments, as far as the optimizer has made some.

    ``name`` is the recipe's of the optimizer.
    """
    boxes = {}
    for piece in pieces:
        if not piece.owned:
            continue
        boxes[f"model.{piece.source}"] = piece.box
        state = _state_of(piece, optimizer)
        for key in MOMENTS[name]:
            if state.get(key) is not None:  # SGD without momentum keeps a None
                boxes[f"optimizer.{key}.{piece.source}"] = piece.box_in(state[key])
    return boxes


def steps_to_save(pieces: list[Piece], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Optimizer steps of each weight that this rank saves; none for an optimizer that does not count."""
    counts = {piece.source: _state_of(piece, optimizer).get("step") for piece in pieces if piece.owned}
    return {name: int(count) for name, count in counts.items() if count is not None}


def _state_of(piece: Piece, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return optimizer.state.get(piece.parameter, {}) if piece.parameter is not None else {}


def boxes_to_load(
    pieces: list[Piece],
    optimizer: torch.optim.Optimizer,
    name: str,
    stored: Mapping[str, object],
    steps: dict[str, int],
) -> dict[str, tuple[str, Box]]:
    """The boxes to be filled, by name, each with the name of its source.

    Moments are made anew, and a weight whose moments are not all stored starts without.

    Args:
        pieces: of this rank.
        optimizer: whose state is replaced.
        name: of the optimizer in the recipe.
        stored: names of the tensors in the checkpoint.
        steps: of each weight in the checkpoint.
    """
    boxes = {}
    optimizer.state.clear()
    for piece in pieces:
        boxes[f"model.{piece.name}"] = f"model.{piece.source}", piece.box
        keys = [f"optimizer.{key}.{piece.source}" for key in MOMENTS[name]]
        if piece.parameter is None or not all(key in stored for key in keys):
            continue
        state: dict[str, Any] = {}
        for key, source in zip(MOMENTS[name], keys, strict=True):
            state[key] = torch.zeros_like(piece.local)
            boxes[f"optimizer.{key}.{piece.name}"] = source, piece.box_in(state[key])
        if piece.source in steps:
            state["step"] = torch.tensor(float(steps[piece.source]))
        optimizer.state[piece.parameter] = state
    return boxes


def weights_without_moments(plan: RunPlan, stored: Mapping[str, object]) -> list[str]:
    """Names of the trained weights that a checkpoint has no moments for, of the whole model."""
    recipe, config = plan.recipe, plan.config
    if recipe.optimizer.name == "sgd" and not recipe.optimizer.momentum:
        return []
    return [
        name
        for name in parameter_shapes(config)
        if not is_frozen(name, recipe.train.freeze, tied=config.tied)
        and not all(f"optimizer.{key}.{name}" in stored for key in MOMENTS[recipe.optimizer.name])
    ]


def saved_state(state: TrainState, plan: RunPlan, data: Mapping[str, Any]) -> SavedState:
    """The content of state.json."""
    grid = plan.grid
    layout = {"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "dp": grid.dp}
    layout |= {"virtual_stages": plan.recipe.pipeline.virtual_stages, "zero": plan.zero}
    return SavedState(
        format=FORMAT,
        step=state.step,
        tokens=state.tokens,
        position=state.position,
        optimizer_steps=state.optimizer_steps,
        skipped=state.skipped,
        model=model_table(plan.config),
        layout=layout,
        data=dict(data),
        versions={"fourfold": __version__, "torch": str(torch.__version__)},
    )


def model_table(config: ModelConfig) -> dict[str, Any]:
    """A model's hyper-parameters as they are saved."""
    return asdict(config)


def model_of(table: Mapping[str, Any]) -> ModelConfig:
    """The model whose hyper-parameters were saved. Raises CheckpointError if they are not those of a model."""
    try:
        return msgspec.convert(dict(table), ModelConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the checkpoint's model is not one: {error}") from None


def random_states(device: torch.device) -> dict[str, str]:
    """The states of this rank's random generators, base64."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {kind: base64.b64encode(state.numpy().tobytes()).decode() for kind, state in states.items()}


def set_random_states(states: Mapping[str, str], device: torch.device, *, seed: int, rank: int) -> None:
    """Sets the generators to saved states, or if there are none for this rank, by its number and ``train.seed``."""
    for kind in ("cpu", *(("cuda",) if device.type == "cuda" else ())):
        if kind in states:
            state = torch.frombuffer(bytearray(base64.b64decode(states[kind])), dtype=torch.uint8)
            torch.set_rng_state(state) if kind == "cpu" else torch.cuda.set_rng_state(state, device)
        else:
            own = int.from_bytes(hashlib.sha256(f"{seed}/{rank}".encode()).digest()[:8], "big")
            torch.manual_seed(own) if kind == "cpu" else torch.cuda.manual_seed(own)
