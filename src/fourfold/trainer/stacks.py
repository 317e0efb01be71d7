"""Where the threads of this process stand, seen from one of them."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType

import torch

import fourfold.parallel

_LIBRARIES = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"))
# Every wait for other ranks ends in these files: whoever waits wants to know who called them.
_WAITING = tuple(str(Path(fourfold.parallel.__file__).parent / name) for name in ("groups.py", "recorder.py"))


def stacks() -> dict[str, list[str]]:
    """Name of each other thread -> its frames as "file:line function", outermost first. The main thread comes first."""
    frames = sys._current_frames()  # not private: documented, only for such purposes
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not main)
    me = threading.current_thread()
    return {
        thread.name: [_line(*at) for at in _walk(frames[thread.ident])]
        for thread in threads
        if thread is not me and thread.ident in frames
    }


def where() -> str:
    """The innermost frame of the main thread that is neither PyTorch's nor Python's own, nor our waiting for others."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "its main thread has ended"
    walked = _walk(frame)
    own = [at for at in walked if not _is_library(at[0].f_code.co_filename)]
    return _line(*(own or walked)[-1])


def _walk(frame: FrameType) -> list[tuple[FrameType, int]]:
    """Frames and line numbers, outermost first."""
    return list(traceback.walk_stack(frame))[::-1]


def _line(frame: FrameType, number: int) -> str:
    return f"{frame.f_code.co_filename}:{number} {frame.f_code.co_qualname}"


def _is_library(file: str) -> bool:
    installed = "site-packages" in file or "dist-packages" in file
    of_python = file.startswith("<") or (file.startswith(_LIBRARIES[1]) and not installed)
    return of_python or file.startswith(_LIBRARIES[0]) or file in _WAITING
