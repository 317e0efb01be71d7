"""The variants of the step: who makes it and how, as recipes of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fourfold.planner.run_memory import run_memory
from fourfold.recipe import RunPlan, check, from_table
from gpu.sizes import Sizes

ROOM = 0.9
"""Of the GPU's memory that the planned step may fill: AdamW's temporaries and the compiler's are not planned."""

FOURFOLD, PYTORCH = "Fourfold", "PyTorch"


@dataclass(frozen=True)
class Variant:
    """Who makes the step, what its backward makes again, and whether it is compiled."""

    stack: str
    recompute: str = "none"
    compiled: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.stack}, {self.recompute}{', compiled' if self.compiled else ''}"


VARIANTS = (
    Variant(PYTORCH),
    Variant(FOURFOLD),
    Variant(FOURFOLD, compiled=True),
    Variant(PYTORCH, compiled=True),
    Variant(FOURFOLD, "selective"),
    Variant(FOURFOLD, "full"),
    Variant(FOURFOLD, "selective", compiled=True),
    Variant(FOURFOLD, "norms"),
    Variant(FOURFOLD, "swiglu"),
    Variant(FOURFOLD, "full", compiled=True),
)
"""The most important first."""


def plan_of(sizes: Sizes, num_layers: int, variant: Variant, device: torch.device) -> RunPlan:
    """The checked recipe of a variant: bf16 on one rank, a micro-batch per row, a document per row."""
    train = {"recompute": variant.recompute, "compile": variant.compiled, "dtype": "bfloat16", "device": device.type}
    return check(
        from_table(
            {
                # The plain model knows no scaled frequencies, and decays every weight.
                "model": {**sizes.model, "num_layers": num_layers, "rope_scaling": "none"},
                "layout": {"zero": 1},
                "batch": {"sequences": sizes.rows, "seq_len": sizes.seq_len},
                "train": train,
                "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.01, "decay_all": True},
            }
        )
    )


def layers_that_fit(sizes: Sizes, device: torch.device) -> int:
    """The first of ``sizes.layers`` that the planner finds room for when nothing is computed again, or the last."""
    if device.type != "cuda":
        return sizes.layers[0]
    room = ROOM * torch.cuda.get_device_properties(device).total_memory
    for num_layers in sizes.layers:
        (planned,) = run_memory(plan_of(sizes, num_layers, Variant(FOURFOLD), device))
        if planned.total <= room:
            return num_layers
    return sizes.layers[-1]
