"""Processes that tokenize, one core each.

A worker and its parent talk over a pipe that nobody else holds. So when either dies, even by kill -9, the other finds
the pipe broken: a worker stops at its next word, and the parent says that a worker died.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fourfold.data.documents import DocumentReader, InputError, Skips, batches
from fourfold.data.shards import Record, Shard, shard_prefix
from fourfold.data.sidecar import Sidecar
from fourfold.data.tokenizers import Tokenizer, TokenizerError, open_tokenizer
from fourfold.data.writer import TokenFileWriter

NO_TOKEN = "without a token"  # a reason for which a document is skipped


class WorkerError(RuntimeError):
    """A worker died, or found a mistake of ours, whose traceback is the message."""


class _Did(NamedTuple):
    """A worker's word on a batch: bytes of input since its last word, and what they gave."""

    input: int
    documents: int
    tokens: int


class Progress(NamedTuple):
    """How far this run is: bytes of input, done and in all, and what they gave."""

    done: int
    total: int
    documents: int
    tokens: int

    def after(self, did: _Did) -> Progress:
        """When one more batch is done."""
        return Progress(self.done + did.input, self.total, self.documents + did.documents, self.tokens + did.tokens)


class _Failed(NamedTuple):
    """A worker's last word. `error` is the user's to mend; else `trace` is of a mistake of ours."""

    error: InputError | TokenizerError | OSError | None
    trace: str


def make_shards(
    folder: Path, record: Record, todo: Mapping[int, Shard], num_workers: int, progress: Callable[[Progress], None]
) -> Iterator[tuple[int, Sidecar]]:
    """Makes the token files of shards, by number, and yields each as it is done, in whatever order.

    Raises:
        InputError, TokenizerError, OSError: what a worker met.
        WorkerError: a worker failed. Nothing that it had not finished is lost but its own shard.
    """
    queue = deque(todo.items())
    total = sum(part.size for shard in todo.values() for part in shard)
    now = Progress(0, total, 0, 0)
    pool = [_Worker(folder, record) for _ in range(min(num_workers, len(todo)))]
    try:
        for worker in pool:
            worker.begin(*queue.popleft())
        busy = {worker.pipe: worker for worker in pool}
        while busy:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # pyrefly: ignore  # only connections were given
                word = worker.hear()
                if isinstance(word, Sidecar):
                    yield worker.shard, word
                    if queue:
                        worker.begin(*queue.popleft())
                    else:
                        del busy[worker.pipe]
                else:
                    now = now.after(word)
                    progress(now)
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    """A process, as its parent sees it."""

    def __init__(self, folder: Path, record: Record) -> None:
        context = multiprocessing.get_context("spawn")  # a forked child would hold the pipes of its siblings
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(theirs, folder, record), daemon=True)
        self.shard = -1
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent alone answers it
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        theirs.close()

    def begin(self, number: int, shard: Shard) -> None:
        """Hands it its next shard."""
        self.shard = number
        with suppress(ConnectionError):  # it is gone, and its last word says why
            self.pipe.send((number, shard))

    def hear(self) -> _Did | Sidecar:
        """Its next word. Raises what `make_shards` raises."""
        try:
            word = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            rule = "for want of memory, perhaps: fewer --workers need less"
            raise WorkerError(f"a worker was ended from outside (exit code {self.process.exitcode}), {rule}") from None
        if isinstance(word, _Failed):
            raise word.error if word.error is not None else WorkerError(word.trace)
        return word

    def stop(self) -> None:
        """Ends it, whatever it does."""
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection, folder: Path, record: Record) -> None:
    """What a worker does: shard after shard, until it is stopped or its parent is gone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each; read by the library when it is first used
    with suppress(EOFError, ConnectionError):  # the parent is gone
        try:
            tokenizer = open_saved(folder, record)
            while True:
                number, shard = pipe.recv()
                prefix = shard_prefix(folder, number)
                pipe.send(make_shard(prefix, shard, record, tokenizer, lambda *did: pipe.send(_Did(*did))))
        except (EOFError, ConnectionError):
            raise
        except (InputError, TokenizerError, OSError) as error:
            pipe.send(_Failed(error, ""))
        except Exception:
            pipe.send(_Failed(None, traceback.format_exc()))


def make_shard(
    prefix: Path, shard: Shard, record: Record, tokenizer: Tokenizer, did: Callable[[int, int, int], None]
) -> Sidecar:
    """Makes one token file; `did` hears of bytes, documents and tokens after every batch."""
    skips, input_bytes = Skips(), 0
    end = [] if record.eos is None else [np.array([record.eos], dtype=np.int32)]
    with TokenFileWriter(prefix, record.tokenizer, record.vocab_size) as writer:
        for part in shard:
            reader = DocumentReader(part, skips=skips, field=record.field, skip_bad=record.skip_bad)
            position = 0
            for texts in batches(reader):
                documents, before = [], writer.num_tokens
                for document in tokenizer.encode_batch(texts):
                    if len(document):
                        documents.append(np.concatenate([document, *end]) if end else document)
                    else:
                        skips.add(NO_TOKEN, part.path)
                writer.write(documents)
                did(reader.position - position, len(documents), writer.num_tokens - before)
                position = reader.position
            did(part.size - position, 0, 0)
            input_bytes += reader.input_bytes
        return writer.finish(input_bytes=input_bytes, skipped=skips.found())


def open_saved(folder: Path, record: Record) -> Tokenizer:
    """The tokenizer that a run has put beside its token files. InputError if that has changed."""
    name = str(folder / record.tokenizer.file) if record.tokenizer.file else record.tokenizer.name
    tokenizer = open_tokenizer(name, called=record.tokenizer.name)
    if tokenizer.sha256 != record.tokenizer.sha256:
        raise InputError(name, "is not the tokenizer that the token files beside it were made with")
    return tokenizer
