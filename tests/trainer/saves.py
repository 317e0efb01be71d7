"""Small models that train, save and load on forked ranks, and everything of them put together to be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.model import fill
from fourfold.parallel import Groups, ParallelModel, WeightSource, connect
from fourfold.recipe import RunPlan, check, split_dimension
from fourfold.trainer.checkpoint import CheckpointStore, Saver, TrainState
from fourfold.trainer.optimizer import make_optimizer
from tests.parallel.harness import SEED, Case, micro_batches

Parts = list[tuple[str, tuple[int, ...], tuple[slice, ...], Tensor]]
"""Name, shape of the whole, place in it, and values of that part."""
STATE = TrainState(step=2, tokens=1536, position={"samples": 24, "tokens": {"a": 1536}}, optimizer_steps=2, skipped=0)


@dataclass
class Rank:
    """One rank of a small run."""

    case: Case
    plan: RunPlan
    groups: Groups
    model: ParallelModel
    optimizer: torch.optim.Optimizer

    def train(self, first: int, last: int) -> list[float]:
        """Steps first, ..., last - 1. Returns their losses."""
        losses = []
        for step in range(first, last):
            batches = micro_batches(self.case, step, self.groups.coordinates.dp)
            losses.append(self.model.forward_backward(batches).loss)
            self.model.gradients.hand_over()
            self.optimizer.step()
            self.model.zero_grad()
        return losses

    def saver(self, store: CheckpointStore, **options: Any) -> Saver:
        """With defaults."""
        options = {"keep": 0, "asynchronous": True, **options}
        return Saver(self.model, self.optimizer, store, self.plan, **options)

    def save(self, place: Path | str, state: TrainState = STATE, **options: Any) -> None:
        """Saves once, to the end."""
        saver = self.saver(CheckpointStore(place), **options)
        saver.save(state)
        saver.wait()
        failure = saver.failure()
        assert failure is None, failure
        self.groups.barrier()

    def parts(self) -> Parts:
        """This rank's part of every weight and moment, by the names that checkpoints have, and where it lies.

        That is worked out by hand from the rank's coordinates. The step counts are there, too.
        """
        found: Parts = []
        held = {id(weight.sharded): weight.local for weight in self.model.gradients.weights}
        for stage in self.model.stages.values():
            for name, sharded in stage.module.named_parameters():
                assert isinstance(sharded, DTensor)
                source = "tok_embeddings.weight" if self.plan.config.tied and name == "output.weight" else name
                place = self._place(name, tuple(sharded.shape))
                with torch.no_grad():
                    found.append((f"model.{source}", tuple(sharded.shape), place, sharded.to_local().clone()))
                local = held.get(id(sharded))
                for key, value in self.optimizer.state.get(local, {}).items() if local is not None else ():
                    if value is not None and value.ndim == 0:
                        found.append((f"step.{source}", (), (), value.clone()))
                    elif value is not None:
                        found.append((f"optimizer.{key}.{source}", tuple(sharded.shape), place, value.clone()))
        return found

    def _place(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """TP cuts evenly along one dimension, FSDP the rows of that into blocks, of which the last may be short."""
        at, grid = self.groups.coordinates, self.plan.grid
        place = [slice(0, size) for size in shape]
        cut = split_dimension(name, self.plan.config, grid.tp)
        if cut is not None:
            share = shape[cut] // grid.tp
            place[cut] = slice(at.tp * share, (at.tp + 1) * share)
        first, last = place[0].start, place[0].stop
        block = -(-(last - first) // (grid.cp * grid.dp))
        number = at.cp + grid.cp * at.dp
        place[0] = slice(min(last, first + number * block), min(last, first + (number + 1) * block))
        return tuple(place)


def plan_of(case: Case, optimizer: Mapping[str, Any] | None = None, **model: Any) -> RunPlan:
    """The plan of a case with an optimizer of its own, AdamW by default."""
    recipe = case.plan().recipe
    settings = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, **(optimizer or {})}
    return check(
        msgspec.structs.replace(
            recipe,
            optimizer=msgspec.structs.replace(recipe.optimizer, **settings),
            model=msgspec.structs.replace(recipe.model, **model),
        )
    )


def build(case: Case, *, plan: RunPlan | None = None, weights: WeightSource | None = None, seed: int = SEED) -> Rank:
    """This rank's model and optimizer, at their beginning."""
    plan = plan or plan_of(case)

    def draw(name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
        rows, columns = (*slices, slice(None))[:2]
        return fill(name, shape, seed, plan.config, rows=rows, columns=columns)

    groups = connect(plan.grid, "cpu")
    model = ParallelModel(plan, groups, weights=weights or draw, device=torch.device("cpu"))
    optimizer = make_optimizer(model.gradients.weights, plan.recipe.optimizer, tied=plan.config.tied)
    return Rank(case, plan, groups, model, optimizer)


def merge(parts: list[Parts]) -> dict[str, Tensor]:
    """What the ranks have, put together. Copies must be equal to the bit, and nothing may be missing."""
    whole: dict[str, Tensor] = {}
    for name, shape, place, value in (part for rank in parts for part in rank):
        out = whole.setdefault(name, torch.full(shape, torch.nan))
        assert torch.equal(torch.where(out[place].isnan(), value, out[place]), value), name
        out[place] = value
    assert not any(value.isnan().any() for value in whole.values())
    return whole


def without_padding(whole: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """As stored; the padded rows must be zero."""
    out = {}
    for name, value in whole.items():
        if name.endswith(("tok_embeddings.weight", "output.weight")) and value.ndim:
            assert not value[vocab_size:].any(), name
            value = value[:vocab_size]
        out[name] = value
    return out


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """To the bit."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name
