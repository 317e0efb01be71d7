"""Lets the script run on an older PyTorch than the one that Fourfold is pinned to.

A machine with a GPU may have no way to get another PyTorch than its own. What is measured here needs little of what
2.13 brought, and this little is put in place: only in the processes of this script, and only where it is missing.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.attention import varlen

PINNED = "2.13"


def mend() -> str | None:
    """Puts in place what is missing. Says so in a sentence, or returns None if this is the PyTorch that is pinned."""
    if torch.__version__.startswith(f"{PINNED}."):
        return None
    _give_groups_a_list()
    if "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters:
        _let_varlen_share_keys()
    return f"this is torch {torch.__version__}; Fourfold is pinned to {PINNED}, so what is measured may differ from it"


def _give_groups_a_list() -> None:
    """FSDP's state has one group of parameters in 2.11, and a list of them later."""
    if "_fsdp_param_groups" not in inspect.getsource(FSDPState):
        FSDPState._fsdp_param_groups = property(  # pyrefly: ignore[no-access]
            lambda self: [] if self._fsdp_param_group is None else [self._fsdp_param_group]
        )


def _let_varlen_share_keys() -> None:
    """The kernel of 2.11 takes fewer heads of keys than of queries without being asked."""
    before = varlen.varlen_attn

    def varlen_attn(*args: Any, enable_gqa: bool = False, **kwargs: Any) -> Any:
        return before(*args, **kwargs)

    varlen.varlen_attn = varlen_attn
