"""Records the numbers of steps while a run makes them, as fingerprints of what this rank holds.

Of a step these are its loss and gradient norm, its gradients and the weights after it, and with numerics.tensors =
"all" also what every operation gives and the gradient that reaches it. `fourfold compare` reads them. No number of the
run changes by it, and all that is communicated is the norm once more.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fourfold.debugger.numerics.fingerprints import Fingerprinter
from fourfold.debugger.numerics.records import (
    PADDING,
    Kind,
    RankStep,
    recorded_steps,
    step_folder,
    token_numbers,
    write,
)
from fourfold.parallel import LocalBatch, MicroBatch, ParallelModel, StepTotals
from fourfold.parallel.observing import LAYER, Operation, observed
from fourfold.recipe import first_key_head, is_covered

LOSS = "cross_entropy"
OF_OWN_TOKENS = ("embed", "norm", "combine", LAYER)
"""Operations that leave a TP rank its share of the tokens; the others give it columns of all tokens."""


class Numbers:
    """Records the steps that [numerics] names, while it is entered, and writes each as soon as it ends.

    A run that is resumed first removes what an earlier start has written of steps that are made again. All ranks make
    one, enter it, and tell it of every step.

    Args:
        model: of this rank.
        folder: where to write: a run's ``numerics``. All ranks must see the same one.
        after_step: the last step that an earlier start has made.
    """

    def __init__(self, model: ParallelModel, folder: Path, *, after_step: int = 0) -> None:
        self._model = model
        self._folder = folder
        self._after_step = after_step
        self._steps = model.plan.recorded_steps
        settings = model.plan.recipe.numerics
        self._recorder = StepRecorder(model, everything=settings.tensors == "all", keep=settings.keep)

    def __enter__(self) -> Numbers:
        if self._model.groups.rank == 0:
            for step in recorded_steps(self._folder):
                if step > self._after_step:
                    shutil.rmtree(step_folder(self._folder, step))
        if self._steps:
            self._model.groups.barrier()  # nobody writes before the old files are gone
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    @contextmanager
    def step(self, number: int) -> Generator[None]:
        """While a step is made, counted from 1. Of one that fails nothing is written."""
        if number not in self._steps:
            yield
            return
        with self._recorder.step(number) as record:
            yield
        try:
            write(record, self._folder)
        except OSError as error:  # a full disk is no reason to stop training
            print(f"rank {record.rank}: numbers of step {number} could not be written: {error}", flush=True)


class StepRecorder:
    """Records steps of one rank's model, in memory.

    Args:
        model: of this rank.
        everything: what operations give and get, too, not weights and gradients alone.
        keep: leading parts of the names of tensors that are kept whole.
    """

    def __init__(self, model: ParallelModel, *, everything: bool, keep: Sequence[str] = ()) -> None:
        self._model = model
        self._everything = everything
        self._keep = keep
        self._maker = Fingerprinter()
        self._places: dict[str, _Place] = {}  # of weights

    @contextmanager
    def step(self, number: int) -> Generator[RankStep]:
        """Inside of it a step is made: a forward-backward pass, of which all is recorded, and the update.

        All ranks do so together. What is given is whole when the block has ended.
        """
        groups = self._model.groups
        record = RankStep(number, groups.rank, groups.grid)
        witness = _Witness(self, record)
        with ExitStack() as open_things:
            open_things.enter_context(self._model.witnessed(witness))
            if self._everything:
                open_things.enter_context(observed(self._model, witness.look))
            yield record
        self.see_weights(record)

    def see_gradients(self, record: RankStep) -> None:
        """Records this rank's part of every gradient. They must be finished."""
        for weight in self._model.gradients.weights:
            assert isinstance(weight.sharded, DTensor)
            self._see_weight(record, Kind.GRADIENT, weight.name, weight.sharded, weight.gradient)

    @torch.no_grad()
    def see_weights(self, record: RankStep) -> None:
        """Records this rank's part of every weight, frozen ones included. None may be gathered."""
        for stage in self._model.stages.values():
            for name, weight in stage.module.named_parameters():
                assert isinstance(weight, DTensor)
                self._see_weight(record, Kind.WEIGHT, name, weight, weight.to_local())

    def see(
        self, record: RankStep, kind: Kind, name: str, tensor: Tensor, place: _Place, *, micro_batch: int = -1
    ) -> None:
        """Records a tensor that lies at a place in its whole."""
        record.see(
            self._maker,
            kind,
            name,
            tensor,
            rows=place.rows,
            first=place.first,
            width=place.width,
            micro_batch=micro_batch,
            keep=is_covered(name, self._keep),
        )

    def _see_weight(self, record: RankStep, kind: Kind, name: str, weight: DTensor, local: Tensor) -> None:
        if not len(local):
            return
        if name not in self._places:
            self._places[name] = _place_of_weight(weight, local, self._model)
        self.see(record, kind, name, local, self._places[name])


class _Place(NamedTuple):
    """Where a tensor lies in its whole. rows: int64 [r], their numbers; columns first ... of ``width``."""

    rows: Tensor
    first: int
    width: int


def _place_of_weight(weight: DTensor, local: Tensor, model: ParallelModel) -> _Place:
    """Of this rank's part of a weight. FSDP2 cuts the rows of a TP rank's part: all ranks but the last get as many."""
    tp, fsdp = model.groups.tp, model.groups.fsdp
    cut = weight.placements[-1].dim if isinstance(weight.placements[-1], Shard) else None
    rows = weight.shape[0] // (tp.size if cut == 0 else 1)
    first_row = (tp.rank * rows if cut == 0 else 0) + fsdp.rank * -(-rows // fsdp.size)
    width = weight.shape[1:].numel()
    return _Place(
        rows=torch.arange(first_row, first_row + len(local)),
        first=tp.rank * width // tp.size if cut == 1 else 0,
        width=width,
    )


class _Tokens(NamedTuple):
    """Numbers of the tokens of a micro-batch, int64. all: of this CP rank; own: this TP rank's share; first: [1]."""

    all: Tensor
    own: Tensor
    first: Tensor


class _Witness:
    """Looks on while a step's first forward-backward pass is made. A step that is refused makes others afterwards."""

    def __init__(self, recorder: StepRecorder, record: RankStep) -> None:
        self._recorder = recorder
        self._record = record
        self._model = recorder._model
        self._tokens: list[_Tokens] = []
        self._over = False

    def begins(self, micro_batches: Sequence[MicroBatch], batches: Sequence[LocalBatch]) -> None:
        """Numbers the tokens, and notes their positions."""
        if self._over:
            return
        groups = self._model.groups
        sequence = groups.dp.rank * sum(len(rows) for _, rows in micro_batches)
        for number, ((_, rows), batch) in enumerate(zip(micro_batches, batches, strict=True)):
            whole = token_numbers(rows, first_sequence=sequence)
            held = batch.index >= 0
            here = whole[batch.index.clamp(min=0)].where(held, PADDING)
            self._tokens.append(_Tokens(here, here.chunk(groups.tp.size)[groups.tp.rank].clone(), whole[:1].clone()))
            self._record.positions[number] = here[held], batch.positions.cpu()[held]
            sequence += len(rows)

    def look(self, operation: Operation) -> None:
        """Records what an operation gives, and will record the gradient that reaches it."""
        if self._over:
            return
        for name, out in zip(operation.names, operation.outputs, strict=True):
            place, micro_batch = self._place(operation, name, out), operation.micro_batch
            see = partial(self._recorder.see, self._record, name=name, place=place, micro_batch=micro_batch)
            see(Kind.OUTPUT, tensor=out.reshape(1) if operation.kind == LOSS else out)
            # What reaches the loss is a constant, and what reaches a layer's end is what reaches w2.
            if out.requires_grad and operation.kind not in (LOSS, LAYER):
                out.register_hook(partial(self._arriving, see))

    def _arriving(self, see: partial[None], grad: Tensor) -> None:
        see(Kind.ARRIVING, tensor=grad)

    def _place(self, operation: Operation, name: str, out: Tensor) -> _Place:
        tokens = self._tokens[operation.micro_batch]
        if operation.kind == LOSS:
            return _Place(tokens.first, 0, 1)
        features = out[0].numel()
        if operation.kind in OF_OWN_TOKENS:
            return _Place(tokens.own, 0, features)
        tp, config = self._model.groups.tp, self._model.plan.config
        if name.endswith((".wk", ".wv")):  # several ranks may share a head
            head = first_key_head(config, tp=tp.size, rank=tp.rank)
            return _Place(tokens.all, head * config.head_dim, config.num_kv_heads * config.head_dim)
        return _Place(tokens.all, tp.rank * features, tp.size * features)

    def ended(self, totals: StepTotals) -> None:
        """Records the finished gradients, and the step's scalars."""
        if self._over:
            return
        self._over = True
        norm = self._model.gradients.norm(self._model.plan.recipe.optimizer.clip_norm_type)
        self._record.scalars.update(loss=totals.loss, grad_norm=norm)
        self._recorder.see_gradients(self._record)
