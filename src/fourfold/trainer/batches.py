"""From rows to micro-batches: what one data-parallel group sees of a step, loaded while the step before it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import overload

import numpy as np
import torch

from fourfold.data.source import Row, TokenSource
from fourfold.data.stream import Position, Stream
from fourfold.model import Batch
from fourfold.parallel import MicroBatch
from fourfold.recipe import Phase, RunPlan


class Loader:
    """The micro-batches of one data-parallel group. All its TP, CP and PP ranks load the same, whole rows.

    With ``data.prefetch`` a thread loads the next steps, on the guess that each goes on where the one before it ends,
    in the same phase. A guess that was wrong, as at the beginning of a phase, costs the time of a load, no more.

    Args:
        stream: of rows. Nothing is read from it before the first step is asked for.
        plan: of the run.
        dp_rank: of the group.
    """

    def __init__(self, stream: Stream, plan: RunPlan, dp_rank: int) -> None:
        self._stream = stream
        self._size = plan.recipe.pipeline.micro_batch
        self._dp_rank = dp_rank
        self._depth = plan.recipe.data.prefetch
        self._ahead: deque[tuple[Position, Phase, Future[list[MicroBatch]]]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")

    def micro_batches(self, position: Position, phase: Phase) -> list[MicroBatch]:
        """Those of the step that begins at ``position``: the group's stretch of the global batch.

        Raises:
            TokenFileError: a token is not in the vocabulary. This, and any other error of loading the step, is raised
                here, also if the thread met it earlier.
        """
        if not self._depth:
            return self._load(position, phase)
        if not self._ahead or self._ahead[0][:2] != (position, phase):
            for _, _, future in self._ahead:
                future.cancel()
            self._ahead.clear()
            self._submit(position, phase)
        while len(self._ahead) <= self._depth:
            last, _, _ = self._ahead[-1]
            self._submit(self._stream.advance(last, phase.seq_len, phase.sequences), phase)
        return self._ahead.popleft()[2].result()

    def _submit(self, position: Position, phase: Phase) -> None:
        self._ahead.append((position, phase, self._thread.submit(self._load, position, phase)))

    def _load(self, position: Position, phase: Phase) -> list[MicroBatch]:
        first = self._dp_rank * phase.sequences_per_dp_group
        try:
            rows = self._stream.rows(position, phase.seq_len, first, first + phase.sequences_per_dp_group)
        except Exception as error:
            error.add_note(f"while data-parallel group {self._dp_rank} loaded the step from sample {position.samples}")
            raise
        return [_micro_batch(rows[i : i + self._size]) for i in range(0, len(rows), self._size)]


class ValidationBatches(Sequence[MicroBatch]):
    """The micro-batches of a validation set that one data-parallel group takes; each is read when it is asked for.

    The set's rows follow each other from its beginning; the last one may be shorter. Micro-batches are dealt to the
    groups in turn. A group that gets none in the last turn has one of a single token without label there, so that all
    groups have as many and none waits for another (pains.md T83); it adds nothing to the loss.

    Args:
        source: the set.
        seq_len: tokens of a row.
        limit: so many rows from the beginning; 0: all.
        plan: of the run.
        dp_rank: of the group.
    """

    def __init__(self, source: TokenSource, *, seq_len: int, limit: int, plan: RunPlan, dp_rank: int) -> None:
        self._source = source
        self._seq_len = seq_len
        self._size = plan.recipe.pipeline.micro_batch
        self._dp, self._dp_rank = plan.grid.dp, dp_rank
        rows = -(-source.num_tokens // seq_len)
        self._num_rows = min(rows, limit) if limit else rows

    def __len__(self) -> int:
        return -(-self._num_rows // (self._size * self._dp))

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...

    @overload
    def __getitem__(self, index: slice) -> list[MicroBatch]: ...

    def __getitem__(self, index: int | slice) -> MicroBatch | list[MicroBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        first = (index * self._dp + self._dp_rank) * self._size
        numbers = range(first, min(first + self._size, self._num_rows))
        if not numbers:
            return _micro_batch([Row(np.zeros(1, dtype=np.int64), np.full(1, -1, dtype=np.int64), (1,))])
        return _micro_batch([self._row(number) for number in numbers])

    def _row(self, number: int) -> Row:
        start = number * self._seq_len
        return self._source.read(start, min(self._seq_len, self._source.num_tokens - start))


def _micro_batch(rows: Sequence[Row]) -> MicroBatch:
    tokens, labels = (np.concatenate([getattr(row, key) for row in rows]) for key in ("tokens", "labels"))
    lengths = [row.lengths for row in rows]
    return Batch.from_rows(torch.from_numpy(tokens), lengths, labels=torch.from_numpy(labels)), lengths
