"""What the dry run and the planner say that the step will take, before anything takes it.

The dry run needs no GPU, but a process without ranks of its own: it pretends some.
"""

from __future__ import annotations

from functools import partial

import torch

from fourfold.planner.run_memory import run_memory
from fourfold.trainer.dry_run.rank import dry_run
from gpu.part import Figures, Part
from gpu.sizes import Sizes
from gpu.variants import FOURFOLD, VARIANTS, Variant, layers_that_fit, plan_of


def predict_memory(part: Part, sizes: Sizes, device: torch.device) -> None:
    """The part: an item per recompute kind. Compiled or not is all the same to both."""
    num_layers = layers_that_fit(sizes, device)
    for variant in VARIANTS:
        if variant.stack == FOURFOLD and not variant.compiled:
            part.item(variant.name, partial(_predict, sizes, num_layers, variant, device))


def _predict(sizes: Sizes, num_layers: int, variant: Variant, device: torch.device) -> Figures:
    """Bytes at the peak of each: in all, where, and of what."""
    plan = plan_of(sizes, num_layers, variant, device)
    (planned,), run = run_memory(plan), dry_run(plan, 0)
    return {
        "recompute": variant.recompute,
        "planner": {
            "bytes": float(planned.total),
            "action": planned.at,
            "held": {kind: float(size) for kind, size in planned.parts.items()},
        },
        "dry_run": {
            "bytes": run.peak.bytes,
            "action": run.peak.action,
            "held": {str(kind): size for kind, size in run.peak.held.items()},
        },
    }
