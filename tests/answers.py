"""What a verb has printed, where it answers, and where it refuses."""

from __future__ import annotations

import pytest


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """The answer; nothing else was said."""
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that says why."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").rstrip("\n")
