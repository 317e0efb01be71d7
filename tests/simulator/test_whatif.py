"""What would help: by hand, and on smaller clusters that must take as long."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fourfold.layout import Grid, Kind, generate
from fourfold.layout.actions import COMPUTE
from fourfold.simulator.critical import critical_path
from fourfold.simulator.engine import simulate
from fourfold.simulator.faults import Faults
from fourfold.simulator.scenario import Scenario
from fourfold.simulator.whatif import Gain, collapsed, what_if
from tests.simulator.small_cases import NOTHING, case, even_work, loads, random_case


def gains_of(scenario: Scenario) -> dict[str, Gain]:
    played = simulate(scenario)
    gains = what_if(scenario, played)
    assert [gain.seconds for gain in gains] == sorted((gain.seconds for gain in gains), reverse=True)
    for gain in gains:
        assert gain.step_seconds + gain.seconds == pytest.approx(played.step_seconds)
        assert gain.share == pytest.approx(gain.seconds / played.step_seconds)
        assert gain.sentence.startswith(f"If {gain.condition}, the step would take ")
    assert len({gain.what for gain in gains}) == len(gains)
    return {gain.what: gain for gain in gains}


class TestByHand:
    def test_classes(self) -> None:
        """Two stages, one micro-batch: there and back, and everything is in the way."""
        schedule = generate(pp=2, num_micro_batches=1)
        layer = replace(NOTHING, compute=1.0, attention=0.5, tp=0.25, cp=0.125)
        work = even_work(schedule, layer=dict.fromkeys(COMPUTE, layer), message=2.0, optimizer=0.75, fixed=0.5)
        gains = gains_of(case(schedule, work))
        assert {what: gain.seconds for what, gain in gains.items()} == pytest.approx(
            {"pp": 4.0, "attention": 2.0, "tp": 1.0, "optimizer": 0.75, "fixed": 0.5, "cp": 0.5}
        )
        whole = 4 * 1.875 + 4 + 1.25
        assert gains["pp"].sentence == (
            f"If messages between pipeline ranks took no time, the step would take 8.75 s: {4 / whole:.1%} shorter."
        )

    def test_what_is_hidden_gains_nothing(self) -> None:
        """The gather of the second stage and the reduction of the first to be done run beside computations."""
        schedule = generate(pp=1, v=2, num_micro_batches=4)
        gains = gains_of(case(schedule, even_work(schedule, gather=(0.5, 0.5), reduce=(1.0, 1.0))))
        assert gains["dp"].seconds == pytest.approx(0.5 + 1.0)
        hidden = even_work(schedule, gather=(0.0, 0.5), reduce=(0.0, 1.0))
        assert "dp" not in gains_of(case(schedule, hidden))

    def test_a_slow_rank_hides_another(self) -> None:
        """Rank 1 is the slower; without it the step is rank 0's, and without rank 0 nothing is won."""
        schedule = generate(pp=1, num_micro_batches=2)
        grid = Grid(dp=3)
        gains = gains_of(case(schedule, grid=grid, faults=Faults(ranks={0: 1.5, 1: 2.0})))
        assert gains["rank 1"].seconds == pytest.approx(12 - 9)
        assert gains["rank 0"].seconds == 0
        assert gains["all slow"].seconds == pytest.approx(12 - 6)
        assert gains["rank 0"].sentence == "If rank 0 ran at normal speed, the step would take as long: 12 s."

    def test_links_and_hosts(self) -> None:
        schedule = generate(pp=2, num_micro_batches=1)
        faults = Faults(links={(0, 1): 3.0}, cpus={1: 0.25}, ranks={2: 1.125})
        gains = gains_of(case(schedule, even_work(schedule, message=1.0), grid=Grid(pp=2, dp=2), faults=faults))
        assert gains["link 0-1"].seconds == pytest.approx(4.0)
        assert gains["cpu 1"].seconds == pytest.approx(0.5)
        assert gains["rank 2"].seconds == 0.0
        assert gains["all slow"].seconds == pytest.approx(4.5)

    def test_documents(self) -> None:
        """CP's ranks have 1 and 3 pairs: with 2 each a forward and a backward are shorter by one each."""
        schedule = generate(pp=1, num_micro_batches=1)
        layer = replace(NOTHING, compute=1.0, attention=1.0)
        work = even_work(schedule, layer=dict.fromkeys(COMPUTE, layer))
        gains = gains_of(case(schedule, work, grid=Grid(cp=2, tp=2), loads=loads([[[1, 3]]])))
        assert gains["documents"].seconds == pytest.approx(2.0)
        assert gains["attention"].seconds == pytest.approx(6.0)
        alike = gains_of(case(schedule, work, grid=Grid(cp=2, tp=2), loads=loads([[[2, 2]]])))
        assert "documents" not in alike

    def test_jitter(self) -> None:
        schedule = generate(pp=2, num_micro_batches=4)
        gains = gains_of(case(schedule, grid=Grid(pp=2, tp=2, dp=4), faults=Faults(jitter=0.1)))
        assert gains["jitter"].step_seconds == pytest.approx(simulate(case(schedule)).step_seconds)

    def test_chance_is_the_same_in_all(self) -> None:
        """With one thing free, every computation still varies as it did."""
        schedule = generate(pp=2, num_micro_batches=4)
        work = even_work(schedule, message=0.5)
        scenario = case(schedule, work, grid=Grid(pp=2, dp=8), faults=Faults(ranks={3: 1.25}, jitter=0.1))
        free = simulate(scenario.replace(work=work.without("pp")))
        assert gains_of(scenario)["pp"].step_seconds == pytest.approx(free.step_seconds)

    def test_without_having_played(self) -> None:
        scenario = random_case(random.Random(4))
        assert [gain.what for gain in what_if(scenario)] == [
            gain.what for gain in what_if(scenario, simulate(scenario))
        ]


@pytest.mark.parametrize("seed", range(40))
def test_a_smaller_cluster_takes_as_long(seed: int) -> None:
    chance = random.Random(seed)
    scenario = random_case(chance, contention=chance.random() < 0.3)
    grid = scenario.grid
    scenario = scenario.replace(faults=replace(scenario.faults, jitter=0.0))
    larger = scenario.replace(grid=grid, all_ranks=False)
    small = collapsed(larger)
    assert small.lanes.size <= larger.lanes.size
    assert simulate(small).step_seconds == pytest.approx(simulate(scenario).step_seconds, rel=1e-12)


def test_a_large_cluster_is_a_small_one() -> None:
    schedule = generate(pp=4, num_micro_batches=4)
    grid = Grid(tp=8, cp=2, pp=4, dp=128)
    slow, other = grid.rank(tp=3, cp=1, pp=2, dp=77), grid.rank(tp=7, pp=3, dp=5)
    neighbour = grid.rank(tp=3, cp=1, pp=3, dp=77)
    faults = Faults(ranks={slow: 1.5, other: 1.25}, links={(slow, neighbour): 3.0}, cpus={other: 0.125})
    work = even_work(schedule, message=0.25, layers=2, gather=(0.5,) * 4, reduce=(1.0,) * 4)
    scenario = case(schedule, work, grid=grid, faults=faults)
    small = collapsed(scenario)
    assert small.grid == Grid(tp=3, cp=2, pp=4, dp=3)
    assert simulate(small).step_seconds == pytest.approx(simulate(scenario).step_seconds, rel=1e-12)
    named = {gain.what for gain in what_if(scenario)}
    assert {f"rank {slow}", f"rank {other}", f"link {slow}-{neighbour}", f"cpu {other}"} <= named
    without = collapsed(scenario.replace(faults=Faults()))
    assert without.lanes == Grid(pp=4)


def test_no_gain_is_larger_than_its_part_of_the_path() -> None:
    """What is made free cannot save more than it has on the critical path."""
    for seed in range(12):
        scenario = random_case(random.Random(seed))
        played = simulate(scenario)
        path = critical_path(scenario, played)
        # Gradients leave as many layers early as a layer takes, and so later if its parts are free.
        reduces = any(scenario.work.reduce) and max(scenario.work.layers) > 1
        for gain in what_if(scenario, played):
            if gain.what in path.by_class and not reduces:
                assert gain.seconds <= path.by_class[gain.what] * (1 + 1e-9)


def test_kinds_of_backward() -> None:
    schedule = generate(pp=2, num_micro_batches=4, kind="zb-h1")
    scenario = case(schedule, even_work(schedule, message=0.25))
    assert Kind.WEIGHT in {node.kind for node in scenario.graph.nodes}
    assert gains_of(scenario)["pp"].seconds > 0
