"""Which micro-batches each data-parallel group sees, loaded ahead or not, and that a fault of loading is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from fourfold.data.indexed import TokenFileError
from fourfold.data.source import Row, TokenSource
from fourfold.data.stream import Position, Stream
from fourfold.parallel import MicroBatch
from fourfold.recipe import RunPlan, check, from_table
from fourfold.trainer.batches import Loader, ValidationBatches
from tests.data.token_files import numbered_source, write_token_file

MANY = tuple(int(n) for n in np.random.default_rng(0).integers(1, 40, 60))
PHASES = [{"after_tokens": 8 * 16 * 2, "sequences": 16}, {"after_tokens": 2000, "seq_len": 32}]


def plan(*, dp: int = 1, micro_batch: int = 1, prefetch: int = 0) -> RunPlan:
    return check(
        from_table(
            {
                "layout": {"dp": dp},
                "pipeline": {"micro_batch": micro_batch},
                "batch": {"sequences": 8, "seq_len": 16, "phases": PHASES},
                "data": {"prefetch": prefetch},
            }
        )
    )


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    sources = [numbered_source(tmp_path, "a", *MANY), numbered_source(tmp_path, "b", *MANY, first=5000)]
    return Stream(sources, [0.75, 0.25], chunk=32, seed=3)


def flat(micro_batches: list[MicroBatch]) -> list[tuple[list[int], list[int], list[list[int]]]]:
    """Row by row: tokens, labels, lengths."""
    rows = []
    for batch, lengths in micro_batches:
        assert batch.labels is not None
        assert batch.tokens.dtype == batch.labels.dtype == torch.int64
        ends = np.cumsum([sum(row) for row in lengths])
        tokens, labels = (np.split(tensor.numpy(), ends[:-1]) for tensor in (batch.tokens, batch.labels))
        rows += [(t.tolist(), n.tolist(), list(row)) for t, n, row in zip(tokens, labels, lengths, strict=True)]
    return rows


def row_of(row: Row) -> tuple[list[int], list[int], list[int]]:
    return row.tokens.tolist(), row.labels.tolist(), list(row.lengths)


def steps(stream: Stream, made: RunPlan, number: int) -> list[list[list[MicroBatch]]]:
    """The first steps of every group, through the phases, as a training loop asks for them."""
    loaders = [Loader(stream, made, rank) for rank in range(made.grid.dp)]
    position, tokens, found = Position(), 0, []
    for _ in range(number):
        phase = made.phase_at(tokens)
        found.append([loader.micro_batches(position, phase) for loader in loaders])
        assert all(len(batches) == phase.num_micro_batches for batches in found[-1])
        position = stream.advance(position, phase.seq_len, phase.sequences)
        tokens += phase.num_tokens
    return found


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (2, 1), (4, 2), (1, 4), (8, 1)])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_the_global_batch_is_the_same_for_every_layout_and_prefetch(
    stream: Stream, dp: int, micro_batch: int, prefetch: int
) -> None:
    made = plan(dp=dp, micro_batch=micro_batch, prefetch=prefetch)
    position, tokens, shapes = Position(), 0, set()
    for groups in steps(stream, made, 12):
        phase = made.phase_at(tokens)
        wanted = stream.rows(position, phase.seq_len, 0, phase.sequences)
        assert flat(list(chain(*groups))) == [row_of(row) for row in wanted]
        position = stream.advance(position, phase.seq_len, phase.sequences)
        tokens += phase.num_tokens
        shapes.add((phase.sequences, phase.seq_len))
    assert shapes == {(8, 16), (16, 16), (16, 32)}


def test_positions_and_documents_restart_in_a_micro_batch_of_rows(stream: Stream) -> None:
    made = plan(micro_batch=2)
    batch, lengths = Loader(stream, made, 0).micro_batches(Position(), made.phases[0])[0]
    lengths_in_order = [n for row in lengths for n in row]
    assert batch.positions.tolist() == [i for n in lengths_in_order for i in range(n)]
    assert batch.documents.tolist() == [d for d, n in enumerate(lengths_in_order) for _ in range(n)]


class Watched:
    """A stream that tells which thread loads what, and can be made to fail."""

    def __init__(self, stream: Stream, fault: Callable[[Position], Exception | None] = lambda position: None) -> None:
        self.stream, self.fault = stream, fault
        self.loads: list[tuple[int, str]] = []
        self.loaded = threading.Semaphore(0)
        self.advance = stream.advance

    def rows(self, position: Position, seq_len: int, first: int, stop: int) -> list[Row]:
        self.loads.append((position.samples, threading.current_thread().name))
        self.loaded.release()
        error = self.fault(position)
        if error is not None:
            raise error
        return self.stream.rows(position, seq_len, first, stop)


def test_nothing_is_loaded_before_the_first_step_is_known_and_then_ahead(stream: Stream) -> None:
    # pains.md T75: a loader that starts before the state is loaded starts at the wrong place.
    watched, made = Watched(stream), plan(prefetch=2)
    loader = Loader(watched, made, 0)  # type: ignore[arg-type]
    assert watched.loads == []
    start = stream.advance(Position(), 16, 80)
    loader.micro_batches(start, made.phases[0])
    for _ in range(3):
        assert watched.loaded.acquire(timeout=10)
    assert [samples for samples, _ in watched.loads] == [80, 88, 96]
    assert all(name.startswith("loader") for _, name in watched.loads)
    # The next step is there already, and one more is loaded.
    loader.micro_batches(stream.advance(start, 16, 8), made.phases[0])
    assert watched.loaded.acquire(timeout=10)
    assert [samples for samples, _ in watched.loads] == [80, 88, 96, 104]


def test_without_prefetch_there_is_no_thread(stream: Stream) -> None:
    watched, made = Watched(stream), plan(prefetch=0)
    loader = Loader(watched, made, 0)  # type: ignore[arg-type]
    loader.micro_batches(Position(), made.phases[0])
    assert watched.loads == [(0, threading.current_thread().name)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_fault_is_raised_in_the_step_that_needs_it(stream: Stream, prefetch: int) -> None:
    def fault(position: Position) -> Exception | None:
        return OSError("the disk is gone") if position.samples == 16 else None

    made = plan(dp=2, prefetch=prefetch)
    loader = Loader(Watched(stream, fault), made, 1)  # type: ignore[arg-type]
    position = Position()
    for _ in range(2):
        loader.micro_batches(position, made.phases[0])
        position = stream.advance(position, 16, 8)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        loader.micro_batches(position, made.phases[0])
    assert caught.value.__notes__ == ["while data-parallel group 1 loaded the step from sample 16"]


def test_an_id_beyond_the_vocabulary_ends_the_step_by_file_and_offset(tmp_path: Path) -> None:
    prefix = write_token_file(tmp_path / "bad", [list(range(100)), [3, 700, 3], list(range(100))])
    stream = Stream([TokenSource("bad", [prefix], vocab_size=260)], [1.0], chunk=32, seed=0)
    made = plan(prefetch=1)
    loader = Loader(stream, made, 0)
    with pytest.raises(TokenFileError, match=r"bad\.bin, byte 404: token 101 \(document 1\) is 700"):
        loader.micro_batches(Position(), made.phases[0])


@pytest.mark.parametrize(("lengths", "limit"), [((30, 50, 7), 0), ((30, 50, 7), 3), ((5,), 0), ((64,), 100)])
@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 8)])
def test_validation_covers_the_set_once_and_every_group_has_as_many(
    tmp_path: Path, lengths: tuple[int, ...], limit: int, dp: int, micro_batch: int
) -> None:
    # pains.md T83: 87 tokens in rows of 16 are 6 rows, the last of 7; dp4 gets 2, 2, 1 and 1 of them.
    source, made = numbered_source(tmp_path, "v", *lengths), plan(dp=dp, micro_batch=micro_batch)
    groups = [ValidationBatches(source, seq_len=16, limit=limit, plan=made, dp_rank=rank) for rank in range(dp)]
    assert len({len(group) for group in groups}) == 1
    rows = [row for turn in zip(*groups, strict=True) for batches in turn for row in flat([batches])]
    fillers = [row for row in rows if row == ([0], [-1], [1])]
    rows = [row for row in rows if row not in fillers]
    assert len(fillers) < dp
    total = min(sum(lengths), limit * 16 or sum(lengths))
    assert [token for tokens, _, _ in rows for token in tokens] == list(range(total))
    labels = [label for _, numbers, _ in rows for label in numbers]
    ends = np.cumsum(lengths) - 1
    assert labels == [-1 if token in ends else token + 1 for token in range(total)]
    assert [len(row[0]) for row in rows] == [16] * (total // 16) + ([total % 16] if total % 16 else [])
    for group in groups:
        assert len(group[0:2]) == min(2, len(group))
        with pytest.raises(IndexError):
            group[len(group)]
