"""The command line. Each verb parses, calls one function and prints; torch is imported only by those that need it."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress

try:
    from cyclopts import App

    from fourfold import __version__
    from fourfold.cli import comparing, data, diagnosing, dry_running, planning, simulating, training
    from fourfold.cli.errors import RUN_FAILED
except KeyboardInterrupt:  # before there is a `main` that could catch it
    sys.exit(130)

INTERRUPTED = 130
OPEN_FILES = 65_536  # about as many as Linux lets a process map

app = App(
    name="fourfold",
    help="Plan, simulate, train and debug Llama-style models with four kinds of parallelism: TP, CP, PP and FSDP.",
    version=__version__,
    version_flags=["--version"],
    help_format="plaintext",  # markdown would take a quarter of the time of --help to import
)
app.command(planning.plan)
app.command(planning.accuracy)
app.command(planning.calibrate)
app.command(simulating.simulate)
app.command(simulating.figures)
app.command(dry_running.dry_run)
app.command(diagnosing.diagnose)
app.command(comparing.compare)
app.command(training.train)
app.command(training.schedule)
app.command(training.runs)
app.command(training.export)
app.command(training.import_, name="import")

data_app = App(name="data", help="Make token files, and check them.", help_format="plaintext")
data_app.command(data.tokenize)
data_app.command(data.check)
app.command(data_app)


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
        code = INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)
