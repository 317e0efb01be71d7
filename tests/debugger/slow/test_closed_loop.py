"""Faults planted in simulated steps of 16 ranks, written as traces, read, and found again.

A sample of benchmarks/diagnose.py, which has every rank and more of them: 1 % jitter, clocks of hosts that are wrong by
up to 60 ms, and documents of every length. What was planted is read from the truth.json beside the traces.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fourfold.debugger.slow import Diagnosis
from fourfold.debugger.slow.links import find_slow_links

GAIN_MATTERS = 0.02  # of the step


@pytest.fixture(scope="module")
def benchmark_script() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    try:
        import diagnose

        return diagnose
    finally:
        sys.path.pop(0)


def find_links(found: Diagnosis) -> set[tuple[str, tuple[int, ...]]]:
    """All groups that are slow."""
    assert found.meetings is not None
    links = find_slow_links(found.meetings, found.layout.grid, num_steps=len(found.steps), step_seconds=0.2)
    return {group for link in links for group in link.groups}


class Loop:
    """Plants, writes, reads."""

    def __init__(self, script: ModuleType, folder: Path) -> None:
        self.script = script
        self.bench = script.Bench(16, folder)

    def run(self, kind: str, factor: float, slow: tuple[str, ...], seed: int) -> tuple[Diagnosis, float]:
        """The diagnosis, and what the step takes longer for what was planted."""
        case = self.script.Case(kind, factor, slow, (), seed)
        return self.bench.run(case)

    def planted(self) -> tuple[set[tuple[str, tuple[int, ...]]], dict[int, float]]:
        """Culprits, and seconds of excess per step of ranks, from truth.json."""
        faults = json.loads((self.bench.folder / "truth.json").read_text())["faults"]
        culprits = {("compute", (int(rank),)) for rank in faults["ranks"]}
        culprits |= {("cpu", (int(rank),)) for rank in faults["cpus"]}
        culprits |= {("link", (one, other)) for one, other, _ in faults["links"]}
        excess = {}
        for rank, factor in faults["ranks"].items():
            at = self.bench.grid.coordinates(int(rank))
            excess[int(rank)] = (factor - 1) * self.bench.computing[at.pp]
        for rank, seconds in faults["cpus"].items():
            at = self.bench.grid.coordinates(int(rank))
            excess[int(rank)] = seconds * self.bench.launches[at.pp]
        return culprits, excess

    def check(self, found: Diagnosis, cost: float) -> None:
        """Who and what, by how much, and what it would gain."""
        culprits, excess = self.planted()
        assert {(culprit.kind, culprit.ranks) for culprit in found.verdict.culprits} == culprits
        for culprit in found.verdict.culprits:
            if culprit.kind != "link":
                assert culprit.excess == pytest.approx(excess[culprit.ranks[0]], rel=0.10)
        if culprits and cost > GAIN_MATTERS * self.bench.step_seconds:
            assert found.verdict.gain == pytest.approx(cost, rel=0.15)


@pytest.fixture(scope="module")
def loop(benchmark_script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Loop:
    return Loop(benchmark_script, tmp_path_factory.mktemp("loop") / "traces")


@pytest.mark.parametrize(("rank", "factor"), [(0, 1.3), (5, 1.5), (10, 1.3), (15, 1.5)])
def test_a_slow_gpu(loop: Loop, rank: int, factor: float) -> None:
    found, cost = loop.run("compute", factor, (f"rank={rank}:{factor}",), 100 + rank)
    assert found.verdict.answer == "slow rank"
    assert found.verdict.culprits[0].factor == pytest.approx(factor, rel=0.03)
    loop.check(found, cost)


@pytest.mark.parametrize(("rank", "factor"), [(3, 1.3), (6, 1.5), (13, 1.3)])
def test_a_late_host(loop: Loop, rank: int, factor: float) -> None:
    found, cost = loop.run("cpu", factor, (loop.bench._late(rank, factor),), 200 + rank)
    assert found.verdict.answer == "slow rank"
    assert found.verdict.culprits[0].cause == "launches"
    loop.check(found, cost)


@pytest.mark.parametrize(("ends", "factor"), [((2, 3), 1.3), ((12, 14), 1.5), ((5, 1), 1.5)], ids=["tp", "cp", "pp"])
def test_a_slow_link(loop: Loop, ends: tuple[int, int], factor: float) -> None:
    found, cost = loop.run("link", factor, (f"link={min(ends)}-{max(ends)}:{factor}",), 300 + ends[0])
    assert found.verdict.answer == "slow link"
    assert found.verdict.culprits[0].factor == pytest.approx(factor, rel=0.10)
    loop.check(found, cost)


def test_a_link_over_which_weights_go(loop: Loop) -> None:
    """Its ranks are also of one FSDP group, and each stage has but two of these: no host is to blame for the waits."""
    found, cost = loop.run("link", 1.5, ("link=8-10:1.5",), 308)
    assert cost > GAIN_MATTERS * loop.bench.step_seconds
    assert found.verdict.answer == "slow link"
    (culprit,) = found.verdict.culprits
    assert (culprit.kind, culprit.ranks) == ("link", (8, 10))
    assert culprit.factor == pytest.approx(1.5, rel=0.02)
    assert ("fsdp", (0, 2, 8, 10)) in find_links(found)


def test_two_slow_gpus(loop: Loop) -> None:
    found, cost = loop.run("two", 1.5, ("rank=4:1.5", "rank=11:1.3"), 400)
    assert found.verdict.answer == "several"
    loop.check(found, cost)


def test_a_slow_gpu_and_a_late_host(loop: Loop) -> None:
    found, cost = loop.run("two", 1.5, ("rank=7:1.5", loop.bench._late(8, 1.5)), 401)
    assert found.verdict.answer == "several"
    loop.check(found, cost)


@pytest.mark.parametrize("seed", [500, 501])
def test_nothing_is_slow(loop: Loop, seed: int) -> None:
    found, _ = loop.run("healthy", 1.0, (), seed)
    assert found.verdict.answer == "healthy"
    assert found.verdict.culprits == ()
    truth = json.loads((loop.bench.folder / "truth.json").read_text())
    assert found.clocks is not None
    ahead = [truth["clock_offsets_ns"][rank // 4] for rank in range(16)]
    assert found.clocks.wrong.tolist() == pytest.approx([ns - ahead[0] for ns in ahead], abs=5_000)
    # What lies between the last kernel and the next step counts as the next step's.
    assert found.accounts.step_seconds[1:] == pytest.approx(truth["step_seconds"][1:], rel=0.01)
    assert found.verdict.replay_error == pytest.approx(0, abs=0.02)


class TestDocuments:
    """One replica has whole rows of one document, and the other such of 64 tokens."""

    MIX = "lengths=8192x6,64x768"

    @pytest.fixture(autouse=True)
    def _uneven(self, benchmark_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(benchmark_script, "MIX", self.MIX)

    @pytest.mark.parametrize("seed", [600, 601])
    def test_that_are_very_uneven_are_no_culprit(self, loop: Loop, seed: int) -> None:
        found, _ = loop.run("healthy", 1.0, (), seed)
        assert found.verdict.documents == pytest.approx(2, rel=0.05)
        assert found.verdict.culprits == ()
        assert found.verdict.answer in ("documents", "healthy")
        assert found.verdict.documents_gain > 0

    def test_do_not_hide_a_slow_rank(self, loop: Loop) -> None:
        found, cost = loop.run("compute", 1.5, ("rank=9:1.5",), 602)
        culprits, _ = loop.planted()
        assert {(culprit.kind, culprit.ranks) for culprit in found.verdict.culprits} == culprits
        assert found.verdict.culprits[0].factor == pytest.approx(1.5, rel=0.05)
        assert found.verdict.gain == pytest.approx(cost, rel=0.15)
