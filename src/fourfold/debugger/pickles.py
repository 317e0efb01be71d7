"""Pickles of strangers, which may run whatever code they hold: read without running any."""

from __future__ import annotations

import gc
import pickle
from typing import Any, BinaryIO


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers, numbers and strings, and nothing that is named."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module_name}.{global_name}, which is not run")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside of it")


def unpickled(file: BinaryIO) -> Any:
    """What a pickle holds, if that is dicts, lists, tuples, numbers and strings; else any exception at all.

    Python's search for garbage is put off, which takes two thirds of the time otherwise.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return _PlainUnpickler(file).load()
    finally:
        if enabled:
            gc.enable()
