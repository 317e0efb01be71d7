"""Why ranks wait: by hand, and all waits against what the engine says that ranks spent."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fourfold.layout import Grid, Kind, generate
from fourfold.layout.actions import COMPUTE
from fourfold.simulator.causes import Causes, causes, duration, idle_by_phase
from fourfold.simulator.engine import simulate
from fourfold.simulator.faults import Faults
from fourfold.simulator.scenario import Scenario
from tests.simulator.small_cases import case, even_work, loads, random_case


def named(scenario: Scenario, replica: tuple[int, int, int] = (0, 0, 0)) -> tuple[dict[str, str], Causes]:
    """Sentences of the computations that wait."""
    played = simulate(scenario)
    found = causes(scenario, played, replica=replica)
    nodes = scenario.graph.nodes
    assert {*found.before} == {i for i, node in enumerate(nodes) if node.kind in COMPUTE}
    assert all((cause.wait > 0) == bool(cause.sentence) for cause in (*found.before.values(), *found.at_end))
    return {str(nodes[i].action): cause.sentence for i, cause in found.before.items() if cause.wait}, found


class TestByHand:
    def test_warm_up_and_cool_down(self) -> None:
        """Four ranks, 1F1B: the step is 27, rank 0 waits 6 for the first gradient and 1 for each of the last."""
        scenario = case(generate(pp=4, num_micro_batches=6, kind="1f1b"))
        sentences, found = named(scenario)
        assert sentences["0B0"] == "waits for 1B0 of pipeline rank 1, which ends at 10.000 s (warm-up)"
        assert sentences["3F0"] == "waits for 2F0 of pipeline rank 2, which ends at 3.000 s (warm-up)"
        assert sentences["0B5"] == "waits for 1B5 of pipeline rank 1, which ends at 25.000 s (cool-down)"
        assert [name for name in sentences if name.startswith("0")] == ["0B0", "0B3", "0B4", "0B5"]
        assert [cause.wait for cause in found.at_end] == [0, 2, 4, 6]
        assert found.at_end[3].sentence == "waits for pipeline rank 0, which ends last, at 27.000 s (cool-down)"
        waits = {str(scenario.graph.nodes[i].action): cause.wait for i, cause in found.before.items()}
        assert (waits["0B0"], waits["0B3"], waits["3F0"]) == (6, 1, 3)
        # (pp - 1) (F + B) = 9 of each rank, as the textbook says; warm-up: 3 less per rank, from 2 (pp - 1) on.
        assert idle_by_phase(simulate(scenario)).tolist() == [[6, 5, 4, 3], [0, 0, 0, 0], [3, 4, 5, 6]]

    def test_a_slow_rank_is_behind_what_others_wait_for(self) -> None:
        """Rank 5 is pipeline rank 2 of the first replica, and tp 1: whoever waits in the full pipeline waits for it."""
        schedule = generate(pp=4, num_micro_batches=6, kind="1f1b")
        grid = Grid(pp=4, tp=2, dp=2)
        scenario = case(schedule, even_work(schedule, message=0.1), grid=grid, faults=Faults(ranks={5: 1.5}))
        sentences, found = named(scenario, (0, 0, 1))
        behind = "; behind it: rank 5 computes 1.5 times as long as normal"
        assert sentences["0B2"].endswith(behind)
        assert sentences["3F3"] == f"waits for 2F3 of pipeline rank 2, which ends at 15.900 s{behind}"
        assert sentences["0B0"].endswith(" (warm-up)")
        assert found.at_end[3].sentence.endswith(
            "(cool-down); what delays the step most: rank 5 computes 1.5 times as long as normal"
        )
        assert found.at_end[3].behind == ""  # it has been delayed itself
        behind = {str(scenario.graph.nodes[i].action): cause.behind for i, cause in found.before.items()}
        assert behind["0B2"] == "rank 5 computes 1.5 times as long as normal"
        assert behind["0B0"] == ""
        sentences, found = named(scenario, (1, 0, 0))
        assert "rank 5" not in " ".join(sentences.values())
        assert found.at_end[0].sentence == (
            "waits for its gradients, which are reduced until 35.300 s, as those of the slowest replica (rank 0) "
            "come 7.1 s later; what delays the step most: rank 5 computes 1.5 times as long as normal"
        )
        assert found.at_end[0].behind == "rank 5 computes 1.5 times as long as normal"

    def test_the_stage_with_the_head(self) -> None:
        schedule = generate(pp=4, num_micro_batches=8, kind="1f1b")
        ends = dict.fromkeys(COMPUTE, (0.0, 0.0, 0.0, 0.5))
        sentences, _ = named(case(schedule, even_work(schedule, ends=ends)))
        assert sentences["0B2"].endswith("; behind it: 3B2, which has the head in it, takes 1.25 times the usual 2 s")

    def test_messages(self) -> None:
        """A message of 4: 1F0 waits 1 for 0F0 and 4 more, and the next ones travel on a line of their own."""
        schedule = generate(pp=2, num_micro_batches=2, kind="afab")
        sentences, _ = named(case(schedule, even_work(schedule, message=4.0)))
        assert sentences["1F0"] == "waits for the message of 0F0 of pipeline rank 0, which is on its way"
        grid, faults = Grid(pp=2, dp=2), Faults(links={(0, 1): 8.0})
        sentences, _ = named(case(schedule, even_work(schedule, message=0.5), grid=grid, faults=faults))
        assert sentences["1F0"].endswith("which is on its way; the link of ranks 0 and 1 is 8 times as slow")

    def test_queues(self) -> None:
        """In one queue per rank, a gradient is behind the outputs that were sent before it."""
        schedule = generate(pp=3, num_micro_batches=6)
        sentences, _ = named(case(schedule, even_work(schedule, message=2.0), receives="in-order"))
        assert sentences["1B1"] == "waits for the message of 2B1 of pipeline rank 2, which queues behind others"
        assert sentences["0B1"].endswith("and 2 s for its message; behind it: messages of pipeline rank 2 queue up")

    def test_weights_and_hosts(self) -> None:
        schedule = generate(pp=1, num_micro_batches=1)
        scenario = case(
            schedule, even_work(schedule, gather=(2.0,), reduce=(1.0,)), grid=Grid(dp=2), faults=Faults(cpus={1: 0.25})
        )
        sentences, found = named(scenario, (1, 0, 0))
        gathered = "waits for the weights of stage 0, which are being gathered"
        assert sentences["0F0"] == f"{gathered}, then for its host, which launches it 250 ms late"
        assert sentences["0B0"] == "waits for its host, which launches it 250 ms late"
        assert found.at_end[0].sentence == "waits for its gradients, which are reduced until 6.5000 s"

    def test_a_late_host_of_a_tp_peer(self) -> None:
        """Rank 1 is tp 1 of the first stage: its peer computes no longer than usual, but ends as late as rank 1."""
        schedule = generate(pp=2, num_micro_batches=6, kind="1f1b")
        scenario = case(schedule, grid=Grid(pp=2, tp=2), faults=Faults(cpus={1: 0.5}))
        sentences, _ = named(scenario)
        assert sentences["1F3"].endswith("; behind it: the host of rank 1 is late")

    def test_documents(self) -> None:
        """CP's rank 1 has a long document in micro-batch 4: in the backward CP's rank 0 waits for it, and others do."""
        schedule = generate(pp=2, num_micro_batches=6, kind="1f1b")
        work = even_work(schedule)
        layer = {kind: one.scaled(0.5) for kind, one in work.layer.items()}
        layer = {kind: type(one)(**{**vars(one), "attention": one.compute}) for kind, one in layer.items()}
        pairs = np.ones((1, 6, 2))
        pairs[0, 4, 1] = 4.0
        scenario = case(schedule, work.replace(layer=layer), grid=Grid(pp=2, cp=2), loads=loads(pairs))
        sentences, _ = named(scenario)
        assert sentences["0B4"].endswith("; behind it: rank 3 has 3.20 times the mean attention in micro-batch 4")

    def test_one_rank_waits_for_nothing(self) -> None:
        sentences, found = named(case(generate(pp=1, v=2, num_micro_batches=3)))
        assert not sentences
        assert found.at_end == ((0.0, "", ""),)

    def test_needs_the_times_of_nodes(self) -> None:
        scenario = case(generate(pp=2, num_micro_batches=2))
        played = simulate(scenario, keep=False)
        for question in (lambda: causes(scenario, played), lambda: idle_by_phase(played)):
            with pytest.raises(ValueError, match="simulate with keep=True"):
                question()


@pytest.mark.parametrize("seed", range(30))
def test_waits_are_what_ranks_spent(seed: int) -> None:
    """Before computations and at the end: all in which a rank does not compute, to the last bit of it."""
    scenario = random_case(random.Random(seed), contention=seed % 3 == 0)
    played = simulate(scenario)
    assert idle_by_phase(played).sum(axis=0) == pytest.approx(played.idle.mean(axis=(0, 2, 3)))
    grid = scenario.grid
    for replica in ((0, 0, 0), (grid.dp - 1, grid.cp - 1, grid.tp - 1)):
        _, found = named(scenario, replica)
        dp, cp, tp = replica
        assert idle_by_phase(played, replica).sum(axis=0) == pytest.approx(played.idle[dp, :, cp, tp])
        for pp_rank, own in enumerate(scenario.graph.on_rank):
            waits = sum(found.before[i].wait for i in own) + found.at_end[pp_rank].wait
            busy = sum(float((played.end[i] - played.start[i])[replica]) for i in own)
            assert waits + busy == pytest.approx(played.pipeline_seconds)
            idle = float(played.idle[dp, pp_rank, cp, tp])
            assert waits >= idle - 1e-9 * played.step_seconds


def test_frozen_stages_drain_only() -> None:
    """The first of two ranks has no backward: it waits at the end, for as long as the other still computes."""
    schedule = generate(pp=2, num_micro_batches=3, kind="1f1b", num_frozen_stages=1)
    scenario = case(schedule)
    idle = idle_by_phase(simulate(scenario))
    assert idle[:, 0].tolist() == [0, 0, 10 - 3]
    assert Kind.BACKWARD not in {node.kind for node in scenario.graph.nodes if node.stage == 0}


def test_durations() -> None:
    assert [duration(seconds) for seconds in (1234.5, 12.345, 1.0, 0.99996, 0.0123, 4.56e-5, 0.0)] == [
        "1,234 s",
        "12.3 s",
        "1 s",
        "1 s",
        "12.3 ms",
        "45.6 us",
        "0 s",
    ]
