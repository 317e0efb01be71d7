"""Jobs that cannot run: what binds is named, and every change that is offered works."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.planner.machines.cluster import cluster
from fourfold.planner.search.contradictions import contradiction
from fourfold.planner.search.infeasible import Infeasible, explain_infeasible, fits_at_all
from fourfold.planner.search.judge import allocatable_bytes
from fourfold.planner.search.problem import Problem
from fourfold.planner.search.search import search
from fourfold.planner.search.space import space


def problem(model: str, gpus: int, sequences: int, *, gpu: str = "h100", seq_len: int = 8192, **limits: Any) -> Problem:
    machine = cluster(gpu, gpus)
    return Problem.of(model=model, cluster=machine, seq_len=seq_len, sequences=sequences, limits=limits)


def check_changes(found: Infeasible, *kinds: str) -> dict[str, str]:
    """Words by kind; every change fits."""
    words = {}
    for change in found.changes:
        plan = search(change.problem, top=1)
        assert plan.best is not None, change
        assert change.candidate.fits
        words.setdefault(change.kind, str(change))
    assert set(kinds) <= set(words)
    return words


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"schedule": ("1f1b",), "virtual_stages": (4,)}, "1f1b has one virtual stage per rank"),
    ({"schedule": ("zb-h1",), "virtual_stages": (4,)}, "zb-h1 has one virtual stage per rank; nearest legal"),
    ({"schedule": ("interleaved",), "virtual_stages": (1,)}, "with one virtual stage per rank it is 1f1b"),
    ({"schedule": ("interleaved",), "nc": (3,), "pp": (4,)}, "and pp = 4: there nc is pp"),
    ({"schedule": ("1f1b", "interleaved"), "nc": (8,), "pp": (4,)}, "and pp = 4: there nc is pp"),
    ({"schedule": ("flexible",), "nc": (3,), "pp": (4,)}, "nc below pp runs as afab"),
    ({"tp": (8,), "pp": (16,)}, "tp 8 x pp 16 = 128: must divide the 64 GPUs"),
    ({"tp": (8,), "cp": (1,), "pp": (2,), "dp": (2,)}, "tp 8 x cp 1 x pp 2 x dp 2 = 32: must be the 64 GPUs"),
    ({"pp": (64,)}, "must be at most the layers and two ends: 34"),
    ({"cp": (3,)}, "2 cp must divide the 8192 tokens of a sequence; nearest legal: 2"),
    ({"dp": (3,)}, "must divide the 512 sequences of a step; nearest legal: 2"),
    ({"pp": (4,), "virtual_stages": (12,)}, "48 stages are more than the 32 layers"),
    ({"micro_batch": (3,)}, "must divide the 512 sequences of a step; nearest legal: 2"),
]


@pytest.mark.parametrize(("limits", "words"), CONTRADICTIONS)
def test_contradictory_limits_are_named(limits: dict[str, Any], words: str) -> None:
    """By the rule that they break; and whatever is named leaves no layout."""
    job = problem("llama3-8b", 64, 512, **limits)
    assert not len(space(job, hopeful=False))
    start = time.process_time()
    found = explain_infeasible(job)
    assert time.process_time() - start < 2  # a quarter of it, on a machine of its own
    assert words in found.constraint
    assert found.headline == "No layout is legal."
    assert all(change.kind == "limit" and change.changed for change in found.changes)


def test_contradictions_are_none_of_legal_jobs() -> None:
    """Whatever one limit a layout of the space gives, something is legal, and no rule speaks against it."""
    job = problem("llama3-8b", 64, 48)
    columns = space(job, hopeful=False).columns
    for name, column in (("tp", "tp"), ("cp", "cp"), ("pp", "pp"), ("dp", "dp"), ("virtual_stages", "v"), ("nc", "nc"),
                         ("micro_batch", "micro_batch")):  # fmt: skip
        for value in np.unique(columns[column]).tolist():
            assert contradiction(job.replace(limits={name: (value,)})) is None, (name, value)


def test_nc_below_pp_runs_as_afab() -> None:
    found = explain_infeasible(problem("llama3-70b", 128, 512, nc=(3,), pp=(4,)))
    assert found.constraint.startswith("nc = 3 with pp = 4: with nc below pp, ranks run all forwards")
    assert found.headline == "Nothing fits."
    assert {"nc": 4} in [change.changed for change in found.changes]


def test_batch_that_is_suggested_is_fast() -> None:
    """510 sequences on 1,000 GPUs leave them dp 10 and a third of the speed of 500 with dp 250 and 500."""
    found = explain_infeasible(problem("llama3-8b", 1000, 512))
    batch = next(change for change in found.changes if change.kind == "batch")
    assert batch.changed == {"sequences": 500}
    near = search(problem("llama3-8b", 1000, 510), top=1).best
    assert near is not None
    assert batch.candidate.step_seconds < 0.7 * near.step_seconds


def test_gpus_that_are_suggested_have_room() -> None:
    """405B on a node: TP stays in it, and the allocator may lose what it has lost at most."""
    job = problem("llama3-405b", 8, 2048)
    change = next(change for change in explain_infeasible(job).changes if change.kind == "gpus")
    one = change.candidate
    assert change.changed == {"gpus": change.problem.gpus}
    assert one.tp <= 8
    assert one.memory_bytes * job.stack.allocator_band[1] <= allocatable_bytes(job) * job.stack.allocator


class TestTooFewGpus:
    def test_70b_on_a_node(self) -> None:
        """18 bytes per parameter are 1.27 TB, and a node has 0.68 TB. Two nodes have 1.36."""
        job = problem("llama3-70b", 8, 64)
        plan = search(job)
        assert plan.candidates == ()
        assert plan.infeasible is not None
        assert plan.infeasible.constraint.startswith("memory: ")
        assert "master weights and moments" in plan.infeasible.constraint
        words = check_changes(plan.infeasible, "gpus", "gpu")
        assert words["gpus"].startswith("16 GPUs instead of 8: ")
        # facts.md 4.2: 180 GB of a B200 make 1.4 TB of a node; the H200's 1.1 TB are too few.
        assert words["gpu"].startswith("b200 instead of h100: ")

    def test_a_card_tuned_on_a_larger_one(self) -> None:
        """Pains P19: a recipe for 141 GB runs out of memory by a few GiB on 80 GB."""
        limits = {"tp": (8,), "pp": (1,), "cp": (1,), "zero": (1,), "recompute": ("none",), "micro_batch": (1,)}
        assert search(problem("llama3-70b", 128, 512, gpu="h200", **limits)).best is not None
        small = search(problem("llama3-70b", 128, 512, **limits))
        assert small.best is None
        assert small.infeasible is not None
        assert "an h100 has room for 75.8" in small.infeasible.constraint


PLAN_A: dict[str, Any] = {
    **{"tp": (8,), "pp": (1,), "cp": (1,), "dp": (16,), "zero": (1,)},
    **{"recompute": ("none",), "micro_batch": (1,)},
}


class TestFixedLayout:
    """facts.md 5.5, plan A: 70B with tp 8 pp 1 dp 16, ZeRO-1, no recomputation: 82 GB with fp32 gradients."""

    def test_does_not_fit(self) -> None:
        found = explain_infeasible(problem("llama3-70b", 128, 512, **PLAN_A))
        assert found.leanest is not None
        assert 75 < found.leanest.memory_bytes / 1e9 < 90
        assert "gradients" in found.constraint
        words = check_changes(found, "limit", "gpu", "seq", "gradients")
        assert "recomputation" in words["limit"] or "instead of" in words["limit"]

    def test_16_bit_gradients_fit(self) -> None:
        """facts.md 5.5: 64 GB."""
        changes = explain_infeasible(problem("llama3-70b", 128, 512, **PLAN_A)).changes
        lean = next(change for change in changes if change.kind == "gradients")
        assert lean.candidate.memory_bytes / 1e9 == pytest.approx(64, rel=0.08)

    def test_each_limit_that_helps_is_named(self) -> None:
        changes = explain_infeasible(problem("llama3-70b", 128, 512, **PLAN_A)).changes
        limits = [change.words for change in changes if change.kind == "limit"]
        assert any(words.startswith("recomputation selective instead of none") for words in limits)
        assert any(words.startswith("zero ") for words in limits)


class TestNoLayout:
    def test_part_of_a_node(self) -> None:
        found = explain_infeasible(problem("llama3-8b", 12, 512))
        assert found.constraint == "gpus = 12: must fill nodes of 8 GPUs; nearest legal: 8, 16"
        assert found.leanest is None
        assert {change.words for change in found.changes} == {"8 GPUs instead of 12", "16 GPUs instead of 12"}

    def test_batch(self) -> None:
        """11 sequences on 64 GPUs of at most tp 8, without CP and pipeline: dp must be 11 or 1."""
        job = problem("llama3-8b", 64, 11, tp=(8,), cp=(1,), pp=(1,))
        found = explain_infeasible(job)
        assert found.constraint.startswith("no layout: 64 GPUs")
        words = check_changes(found, "batch", "limit")
        assert words["batch"].startswith("8 sequences per step (65,536 tokens) instead of 11")

    def test_limit_that_empties_the_space_is_named(self) -> None:
        """tp 3 cuts no heads; pp 4 could be."""
        found = explain_infeasible(problem("llama3-8b", 16, 64, tp=(3,), pp=(4,)))
        assert found.constraint.startswith("tp = 3: must divide heads, ")
        assert found.constraint.endswith("; nearest legal: 2")
        assert [change.changed for change in found.changes if "tp" in change.changed]

    def test_impossible_whatever_one_does(self) -> None:
        found = explain_infeasible(problem("llama3-8b", 1, 1, seq_len=131_072))
        assert found.constraint.startswith("memory: ")
        check_changes(found, "gpus")


def test_other_gpus_keep_the_network_of_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text('[cluster]\nchip = "h100"\nnic_gb_s = 12.5\n')
    job = Problem.of(model="llama3-70b", cluster=cluster(file, 8), seq_len=8192, sequences=64)
    change = next(change for change in explain_infeasible(job).changes if change.kind == "gpu")
    there, usual = change.problem.cluster, cluster("b200", 8)
    assert (there.chip, there.nic, there.link) == (usual.chip, 12.5e9, usual.link)


def test_quick_answer_agrees_with_the_search() -> None:
    for gpus in (8, 16):
        job = problem("llama3-70b", gpus, 96)
        assert fits_at_all(job) == bool(search(job, top=1).candidates)
