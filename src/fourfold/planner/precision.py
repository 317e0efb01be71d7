"""In which numbers a run holds, sends and sums what: one row for each kind, and only for kinds that the run has.

What is computed is rounded to the dtype of computation; what is added up over micro-batches, ranks or tokens is added
in float32 (facts.md 2.10). Where it is not, a row says so: a bfloat16 run rounds the residual stream at each addition,
and a weight's gradient once per micro-batch and rank, when autograd hands it over. The rows follow the code in
`fourfold.parallel`, sum by sum; `tests/parallel/test_precision.py` has a sum for each that would come out otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fourfold.recipe import RunPlan

SHORT = {"float32": "fp32", "bfloat16": "bf16"}
"""Names of `train.dtype` in the table."""
FP32, FP64 = "fp32", "fp64"


class Precision(NamedTuple):
    """One row. An empty text: there is nothing of the kind."""

    what: str
    held: str
    """In memory; of a sum, its result."""
    travels: str
    """From rank to rank."""
    summed: str
    """While it is added up."""
    note: str = ""


def precisions(plan: RunPlan) -> tuple[Precision, ...]:
    """The table of a run: weights, forward, backward, then what follows the last backward."""
    return (*_weights(plan), *_forward(plan), *_backward(plan), *_end(plan))


def _weights(plan: RunPlan) -> Iterator[Precision]:
    number, grid = SHORT[plan.recipe.train.dtype], plan.grid
    yield Precision("master weights", FP32, "", "")
    yield Precision("weights as multiplied", number, number if grid.dp * grid.cp > 1 else "", "")


def _forward(plan: RunPlan) -> Iterator[Precision]:
    number, grid = SHORT[plan.recipe.train.dtype], plan.grid
    rounds = number != FP32
    yield Precision("matrix products", number, "", FP32, "rounded once, in the kernel" if rounds else "")
    between = number if grid.pp > 1 else ""
    yield Precision("residual stream", number, between, number, "rounded at every addition" if rounds else "")
    yield Precision("norms' statistics", FP32, "", FP32)
    yield Precision("rotary angles and rotation", FP32, "", "", f"its result {number}" if rounds else "")
    yield Precision("softmax of attention", FP32, "", FP32)
    if grid.tp > 1:
        note = "each rank's part rounded before, the sum after" if rounds else ""
        yield Precision("TP reduce-scatter", number, number, FP32, note)
    if grid.cp > 1:
        yield Precision("CP gather of keys and values", number, number, "")
    yield Precision("logits", number, "", "")
    yield Precision("softmax and loss of a token", FP32, FP32 if grid.tp > 1 else "", FP32)
    yield Precision("loss of the batch", FP64, FP64 if grid.size > 1 else "", FP64, "of a micro-batch's tokens fp32")


def _backward(plan: RunPlan) -> Iterator[Precision]:
    number, grid, config = SHORT[plan.recipe.train.dtype], plan.grid, plan.config
    rounds, once = number != FP32, "rounded once per micro-batch and rank"
    yield Precision("gradients of activations", number, number if grid.pp * grid.tp > 1 else "", number)
    if config.num_heads // grid.tp > max(config.num_kv_heads // grid.tp, 1):
        note = "by the kernel; FlashAttention adds rounded ones in fp32" if rounds else ""
        yield Precision("dK, dV over query heads of one key head", number, "", number, note)
    if grid.cp > 1:
        note = "each rank's part rounded before, the sum after" if rounds else ""
        yield Precision("CP sum of dK, dV", number, number, FP32, note)
    yield Precision("a micro-batch's gradient of a weight", number, "", FP32, once if rounds else "")
    gathered = number if grid.tp > 1 else ""
    yield Precision("embedding rows over tokens", number, gathered, FP32, once if rounds else "")
    if max(phase.num_micro_batches for phase in plan.phases) > 1:
        note = "of shards, each reduced by itself" if plan.zero == 3 else ""
        yield Precision("sum over micro-batches", FP32, "", FP32, note)
    if grid.dp * grid.cp > 1:
        note = "in the order of ranks" if plan.recipe.train.ordered else ""
        yield Precision("FSDP reduce-scatter", FP32, FP32, FP32, note)
    schedules = [phase.schedule for phase in plan.phases if phase.zero == 2]
    if any(count > schedule.v for schedule in schedules for count in schedule.reduce_scatters):
        yield Precision("sum over reductions, sharded", FP32, "", FP32)


def _end(plan: RunPlan) -> Iterator[Precision]:
    grid = plan.grid
    if grid.tp > 1:
        yield Precision("weights that all TP ranks hold", FP32, FP32, FP32)
    if plan.config.tied:
        yield Precision("both ends of the tied embedding", FP32, FP32 if grid.pp > 1 else "", FP32)
    yield Precision("gradient norm", FP64, FP64 if grid.size > 1 else "", FP64, "within a rank's part of a weight fp32")
    optimizer = plan.recipe.optimizer
    if optimizer.name == "adamw":
        yield Precision("AdamW's moments and update", FP32, "", FP32)
    else:
        yield Precision("SGD's momentum and update" if optimizer.momentum else "SGD's update", FP32, "", FP32)
