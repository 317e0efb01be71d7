"""Making and checking token files, as people read it: a bar or lines while it runs, and what came out."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fourfold.data.check import CheckReport
from fourfold.data.tokenize import Job, Totals

LINE_EVERY = 10.0  # seconds, where there is no terminal


class ByteProgress:
    """How many bytes are done, on stderr: one line that moves on a terminal, and elsewhere a line every 10 seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = self._said = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn(what), BarColumn(), DownloadColumn(), TextColumn("{task.fields[note]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._task = self._bar.add_task(what, total=None, note="")

    def update(self, done: int, total: int, note: str = "") -> None:
        """Says how far it is."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, note=note)
        elif now - self._said >= LINE_EVERY:
            self._said = now
            rate = done / (now - self._started)
            left = f", about {(total - done) / rate:,.0f} s left" if rate else ""
            line = f"{self._what}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB{', ' + note if note else ''}{left}"
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> ByteProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def totals_text(job: Job, totals: Totals) -> str:
    """What `tokenize` made, in a few lines."""
    there = f" ({totals.files - totals.made:,} of them were there)" if totals.made < totals.files else ""
    lines = [
        f"{job.out}: {totals.files:,} token file{'s' * (totals.files != 1)}{there}",
        f"  documents  {totals.documents:,}",
        f"  tokens     {totals.tokens:,}, of a vocabulary of {totals.vocab_size:,}",
        f"  text       {totals.input_bytes:,} bytes, {totals.input_bytes / totals.tokens:.2f} per token",
    ]
    lines += [f"  skipped    {skip.count:,} {skip.reason}; the first: {skip.first}" for skip in totals.skipped]
    return "\n".join(lines)


def check_text(report: CheckReport, vocab_size: int | None) -> str:
    """What `check_files` found, but for problems."""
    of = f" of a vocabulary of {vocab_size:,}" if vocab_size is not None else ""
    lines = [
        f"{report.num_files:,} token file{'s' * (report.num_files != 1)}",
        f"  documents  {report.num_documents:,}" + (f"; longest: {report.longest}" if report.longest else ""),
        f"  tokens     {report.num_tokens:,}; the largest id is {report.max_id:,}{of}",
        f"  checksums  compared for {report.num_checksummed:,} of {report.num_files:,} files",
    ]
    return "\n".join(lines)
