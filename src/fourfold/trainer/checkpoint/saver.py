"""Saves checkpoints beside the training."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.parallel import ParallelModel
from fourfold.recipe import RunPlan, config_to_hf, to_toml
from fourfold.trainer.checkpoint.files import Files
from fourfold.trainer.checkpoint.format import (
    CONFIG,
    RECIPE,
    STATE,
    TOKENIZER,
    CheckpointError,
    FileCheck,
    RankReport,
    decode,
    encode,
    make_index,
)
from fourfold.trainer.checkpoint.state import (
    TrainState,
    boxes_to_save,
    pieces_of,
    random_states,
    saved_state,
    steps_to_save,
)
from fourfold.trainer.checkpoint.storage import Box, rank_file, save_boxes
from fourfold.trainer.checkpoint.store import Checkpoint, CheckpointStore

_POLL = 0.02, 1.0  # seconds between two looks at whether the other ranks have written, at first and at most


@dataclass(frozen=True)
class _Snapshot:
    """All that one save writes, as it was when ``save`` was called."""

    step: int
    folder: str
    boxes: dict[str, Box]
    report: RankReport
    state: bytes


class Saver:
    """Saves a model, its optimizer and where training stands. Every rank makes one, which is a collective; the rest is
    not.

    ``save`` copies what this rank owns into memory of its own, and a thread writes it while training goes on. A save
    that fails, of a full disk for instance, leaves nothing and does not end the run; the next one tries again.

    Args:
        model: saved are its weights.
        optimizer: saved is its state.
        store: where to. What broken saves have left there is removed.
        plan: of the run.
        keep: so many newest steps stay; 0 keeps all.
        asynchronous: False: ``save`` returns when the rank's files are written, on rank 0 when all is published.
        data: fingerprint of the data, JSON, to be kept with each checkpoint.
        tokenizer_files: kept with each checkpoint, so that an export is ready for use.
        patience: seconds that rank 0 waits for the files of the others before it gives a save up.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        store: CheckpointStore,
        plan: RunPlan,
        *,
        keep: int,
        asynchronous: bool,
        data: Mapping[str, Any] | None = None,
        tokenizer_files: Sequence[Path] = (),
        patience: float = 900.0,
    ) -> None:
        self._optimizer = optimizer
        self._store = store
        self._plan = plan
        self._keep = keep
        self._asynchronous = asynchronous
        self._data = data or {}
        self._tokenizer_files = tokenizer_files
        self._patience = patience
        self._groups = model.groups
        self._device = model.device
        self._pieces = pieces_of(model)
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._given_up: list[str] = []  # folders of saves that failed
        self._count = 0
        if self._groups.rank == 0:
            store.remove_unfinished()
        # Names the folders of this process's attempts, and sorts them by time: no file of a dead run can be among ours.
        self._token = self._groups.share(f"{time.time_ns() // 10**6:x}")[0]

    def save(self, state: TrainState) -> float:
        """Saves everything as it is now. Returns the seconds for which training had to wait.

        They are the time to copy, after that to the end of the save before if it still runs; without ``asynchronous``,
        all of it. Every rank calls it after the same step.
        """
        started = time.perf_counter()
        self.wait()
        snapshot = self._snapshot(state)
        if self._asynchronous:
            self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(snapshot)
        return time.perf_counter() - started

    def wait(self) -> None:
        """Waits until the last save has ended on this rank: its files are written, and on rank 0 all is published."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def failure(self) -> str | None:
        """Why the last save that ended on this rank failed, told once; None if it did not."""
        failure, self._failure = self._failure, None
        return failure

    def _snapshot(self, state: TrainState) -> _Snapshot:
        self._count += 1
        boxes = {}
        for name, box in boxes_to_save(self._pieces, self._optimizer, self._plan.recipe.optimizer.name).items():
            buffer = self._buffers.get(name)
            if buffer is None:  # at the first save; from then on the memory is there
                buffer = torch.empty(box.memory.shape, pin_memory=self._device.type == "cuda")
                self._buffers[name] = buffer
            buffer.copy_(box.memory, non_blocking=True)
            boxes[name] = Box(box.shape, box.offsets, buffer)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        report = RankReport(
            rank=self._groups.rank,
            tensors={},
            files={},
            steps=steps_to_save(self._pieces, self._optimizer),
            rng=random_states(self._device),
        )
        folder = self._store.begin(state.step, f"{self._token}-{self._count}")
        return _Snapshot(state.step, folder, boxes, report, encode(saved_state(state, self._plan, self._data)))

    def _write(self, snapshot: _Snapshot) -> None:
        """The thread's work."""
        files = self._store.files.below(snapshot.folder)
        try:
            save_boxes(snapshot.boxes, files, snapshot.report)
            newest = self._publish(files, snapshot) if self._groups.rank == 0 else None
        except Exception as error:
            self._failure = f"the checkpoint of step {snapshot.step} was not saved: {_say(error)}"
            self._give_up(files, snapshot, _say(error))
            return
        try:
            if newest is not None:
                self._store.retain(newest, self._keep)
                while self._given_up:  # every rank is past that save by now, and may have left something after all
                    self._store.files.remove(self._given_up.pop())
        except OSError as error:
            self._failure = f"the checkpoint of step {snapshot.step} was saved, but old ones stay: {error}"

    def _publish(self, files: Files, snapshot: _Snapshot) -> Checkpoint:
        """Makes one checkpoint of what all ranks have written. Rank 0 only."""
        reports = {rank_file(rank, "json"): content for rank, content in enumerate(self._await_reports(files))}
        common = self._common_files(snapshot.state)
        for name, content in common.items():
            files.replace(name, content)
        decoded = [decode(report, RankReport, path=f"{files.root}/{name}") for name, report in reports.items()]
        checks = {name: FileCheck.of(content) for name, content in (reports | common).items()}
        return self._store.publish(snapshot.folder, make_index(decoded, checks))

    def _await_reports(self, files: Files) -> list[bytes]:
        """What every rank reports, in the order of ranks, once all have written.

        Raises:
            CheckpointError: a rank could not write, or they take too long.
        """
        ranks = range(self._groups.world.size)
        deadline, (pause, longest) = time.monotonic() + self._patience, _POLL
        while True:
            names = set(files.names())
            for rank in ranks:
                if rank_file(rank, "failed") in names:
                    reason = files.read(rank_file(rank, "failed")).decode(errors="replace")
                    raise CheckpointError(f"rank {rank}: {reason}")
            missing = [rank for rank in ranks if rank_file(rank, "json") not in names]
            if not missing:
                return [files.read(rank_file(rank, "json")) for rank in ranks]
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"after {self._patience:.0f} s there is nothing of {len(missing)} ranks, rank {missing[0]} first"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, longest)

    def _common_files(self, state: bytes) -> dict[str, bytes]:
        """What is in a checkpoint besides tensors, by name."""
        described = config_to_hf(self._plan.config)
        # Readers take the longest sequence from here: as long as trained on, at least.
        longest = max(phase.seq_len for phase in self._plan.phases)
        described["max_position_embeddings"] = max(described["max_position_embeddings"], longest)
        return {
            STATE: state,
            RECIPE: to_toml(self._plan.recipe).encode(),
            CONFIG: (json.dumps(described, indent=2) + "\n").encode(),
            **{f"{TOKENIZER}/{file.name}": file.read_bytes() for file in self._tokenizer_files},
        }

    def _give_up(self, files: Files, snapshot: _Snapshot, reason: str) -> None:
        """Leaves nothing of a failed save, and tells rank 0. What fails here fails for the reason that is known."""
        try:
            if self._groups.rank == 0:
                self._given_up.append(snapshot.folder)
                self._store.files.remove(snapshot.folder)
            else:
                files.remove(rank_file(self._groups.rank, "safetensors"))  # first: the word needs room, too
                files.replace(rank_file(self._groups.rank, "failed"), reason.encode())
        except OSError:
            pass


def _say(error: Exception) -> str:
    """An error in a line; one that is not of the world outside with its type, since it is ours."""
    return str(error) if isinstance(error, OSError | CheckpointError) else f"{type(error).__name__}: {error}"
