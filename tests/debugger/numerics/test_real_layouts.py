"""Real ranks under different layouts, as the trainer records them, differ by order; with a fault they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from fourfold.debugger.numerics.compare import compare_records
from fourfold.debugger.numerics.comparison import Pattern, Verdict
from fourfold.debugger.numerics.records import RankStep
from fourfold.parallel import ParallelModel, connect
from fourfold.trainer.numerics import StepRecorder
from fourfold.trainer.optimizer import make_optimizer
from fourfold.trainer.ranks import fork_ranks
from tests.debugger.numerics import faults
from tests.debugger.numerics.layouts import plan_of, source_of
from tests.parallel.harness import Case, micro_batches

STEPS = 1
UNEVEN = ((63,), (40, 20), (2,) * 31, (3,) * 21)  # the first two have 120 labels, the others 73
# All of the same four sequences in a step.
LAYOUTS = [
    Case(tp=2, dp=2, nmb=2),
    Case(pp=2, cp=2, v=2, nmb=4),
    Case(dp=2, zero=3, micro_batch=2, nmb=1),
]


def record(case: Case, *, everything: bool = True) -> list[RankStep]:
    """Steps of a layout, in the back end's own order of sums."""
    ranks = fork_ranks(case.world, lambda rank: _rank(case, everything), timeout=120)
    return [step for steps in ranks for step in steps]


@cache
def alone(case: Case) -> list[RankStep]:
    return record(case)


def _rank(case: Case, everything: bool) -> list[RankStep]:
    plan = plan_of(case)
    groups = connect(plan.grid, "cpu")
    model = ParallelModel(plan, groups, weights=source_of(plan), device=torch.device("cpu"))
    optimizer = make_optimizer(model.gradients.weights, plan.recipe.optimizer, tied=plan.config.tied)
    recorder, records = StepRecorder(model, everything=everything), []
    for step in range(STEPS):
        with recorder.step(step + 1) as record:
            model.forward_backward(micro_batches(case, step, groups.coordinates.dp))
            model.gradients.clip(model.gradients.norm(), plan.recipe.optimizer.clip_norm)
            model.gradients.hand_over()
            optimizer.step()
            model.zero_grad()
        records.append(record)
    return records


@pytest.mark.parametrize(("dtype", "layouts"), [("float32", LAYOUTS[:2]), ("bfloat16", LAYOUTS[1:])])
def test_layouts_differ_by_order(dtype: str, layouts: list[Case]) -> None:
    recorded = [alone(Case(nmb=4, dtype=dtype)), *(record(replace(case, dtype=dtype)) for case in layouts)]
    for i, one in enumerate(recorded):
        found = compare_records(one, recorded[i - 1])
        assert found.verdict is Verdict.ORDER, (i, found.beyond)
        assert (found.findings, found.notes) == ((), ())
        assert [kind.tensors for kind in found.steps[0].kinds] == [52, 47, 39, 39, 2]


@pytest.mark.parametrize(
    ("plant", "case", "everything", "pattern"),
    [
        (faults.norm_gradients_not_summed, Case(tp=2, nmb=4), False, Pattern.REPLICAS),
        (faults.divided_by_the_local_count, Case(dp=2, nmb=2, rows=UNEVEN), True, Pattern.LOCAL_COUNT),
        (faults.divided_by_the_local_count, Case(dp=2, nmb=2, rows=UNEVEN), False, Pattern.LOCAL_COUNT),
        (faults.documents_see_each_other, Case(tp=2, nmb=4), True, Pattern.DOCUMENTS),
        (faults.key_gradients_not_summed, Case(cp=2, nmb=4), False, Pattern.KEY_GRADIENT),
        (faults.stale_buffer, Case(pp=2, nmb=4), True, Pattern.STALE),
        (faults.gradients_averaged, Case(dp=2, nmb=2), False, Pattern.FACTOR),
    ],
)
def test_a_fault_of_one_layout_is_named(
    plant: Callable[[pytest.MonkeyPatch], None],
    case: Case,
    everything: bool,
    pattern: Pattern,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the run of one rank, which does not have it."""
    right = alone(Case(nmb=4, rows=case.rows))
    plant(monkeypatch)
    found = compare_records(record(case, everything=everything), right)
    assert found.verdict is Verdict.BUG
    assert pattern in [finding.pattern for finding in found.findings]
