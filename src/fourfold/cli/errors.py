"""How every verb ends that a user's mistake or a broken run has ended: one line on stderr, and an exit code."""

from __future__ import annotations

import os
import sys

USER_ERROR, RUN_FAILED = 2, 1  # exit codes


def fail(error: object, code: int, *, rank: str | None = None) -> int:
    """Prints an error. ``rank``: of torchrun's, whose own it is; None: all ranks find the same, and one says it."""
    if isinstance(error, OSError) and error.filename is not None:
        error = f"{error.filename}: {error.strerror}"
    if rank is not None:
        print(f"error: rank {rank}: {error}", file=sys.stderr)
    elif os.environ.get("RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr)
    return code
