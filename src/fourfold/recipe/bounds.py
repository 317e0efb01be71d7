"""What a single number of a recipe may be: one table, from key to lowest and highest value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from fourfold.recipe.errors import Problem

Values = Mapping[str, Any]


class Bound(NamedTuple):
    """low <= value <= high, or without equality where an end is open. Infinite only if asked for."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def problem(self, key: str, value: float) -> Problem | None:
        """What is wrong with a value, if anything. Not-a-number and infinity are never legal."""
        above_low = value > self.low if self.low_open else value >= self.low
        below_high = value < self.high if self.high_open else value <= self.high
        if above_low and below_high and math.isfinite(value):
            return None
        rule = f"must be {'greater than' if self.low_open else 'at least'} {self.low:g}"
        if self.high != math.inf:
            rule += f" and {'less than' if self.high_open else 'at most'} {self.high:g}"
        elif not math.isfinite(value):
            rule += " and finite"
        if not above_low and not self.low_open and not math.isnan(value):
            return Problem(key, value, rule, (self.low,))
        if not below_high and not self.high_open and not math.isnan(value):
            return Problem(key, value, rule, (self.high,))
        return Problem(key, value, rule)


POSITIVE = Bound(0, low_open=True)
NOT_NEGATIVE = Bound(0)
COUNT = Bound(1)
FRACTION = Bound(0, 1)
DECAY = Bound(0, 1, high_open=True)

BOUNDS: dict[str, Bound] = {
    **dict.fromkeys((f"layout.{d}" for d in ("tp", "cp", "pp", "dp")), COUNT),
    **dict.fromkeys((f"model.{d}" for d in ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")), COUNT),
    "model.vocab_size": COUNT,
    "model.vocab_multiple": COUNT,
    "model.head_dim": NOT_NEGATIVE,
    "model.rope_theta": Bound(1, low_open=True),
    "model.norm_eps": POSITIVE,
    "model.rope_scaling.factor": COUNT,
    "model.rope_scaling.low_freq_factor": POSITIVE,
    "model.rope_scaling.high_freq_factor": POSITIVE,
    "model.rope_scaling.original_max_positions": COUNT,
    "pipeline.virtual_stages": COUNT,
    "pipeline.nc": COUNT,
    "pipeline.micro_batch": COUNT,
    "batch.sequences": COUNT,
    "batch.seq_len": COUNT,
    "data.seed": NOT_NEGATIVE,
    "data.prefetch": NOT_NEGATIVE,
    "optimizer.lr": POSITIVE,
    "optimizer.betas": DECAY,
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.momentum": DECAY,
    "optimizer.warmup_steps": NOT_NEGATIVE,
    "optimizer.decay_steps": COUNT,
    "optimizer.min_lr_ratio": FRACTION,
    "optimizer.clip_norm": NOT_NEGATIVE,
    "train.steps": COUNT,
    "train.seed": NOT_NEGATIVE,
    "train.sanity_steps": NOT_NEGATIVE,
    "train.z_loss": NOT_NEGATIVE,
    "train.max_skipped": NOT_NEGATIVE,
    "train.gc_every": COUNT,
    "checkpoint.every": NOT_NEGATIVE,
    "checkpoint.keep": NOT_NEGATIVE,
    "timeouts.step_factor": NOT_NEGATIVE,
    **dict.fromkeys((f"timeouts.{t}" for t in ("step_minimum", "startup", "abort", "collective", "grace")), POSITIVE),
    "cluster.gpus_per_node": COUNT,
    "output.action_log_every": NOT_NEGATIVE,
}


def broken_bounds(values: Values) -> list[Problem]:
    """Every value outside its bound; a list of numbers is judged number by number and reported once."""
    problems = []
    for key, bound in BOUNDS.items():
        value = values.get(key)
        if value is None:
            continue
        found = [bound.problem(key, single) for single in (value if isinstance(value, tuple) else (value,))]
        first = next((p for p in found if p is not None), None)
        if first is not None:
            problems.append(first if not isinstance(value, tuple) else Problem(key, value, f"each {first.rule}"))
    return problems
