"""At tiny sizes ``torch.compile`` traces, as it does everywhere, and makes no kernels: C++ takes a minute for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def make_no_kernels() -> None:
    """From now on this process runs what ``torch.compile`` has traced, forward and backward, operator by operator."""
    compiler = torch.compile

    def trace(model: Callable[..., Any] | None = None, **settings: Any) -> Any:
        settings.pop("options", None)  # of the kernels' compiler
        return compiler(model, **{"backend": "aot_eager", **settings})  # pyrefly: ignore[no-matching-overload]

    torch.compile = trace  # pyrefly: ignore[bad-assignment]
