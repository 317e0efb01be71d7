"""Critical paths: by hand, and against the longest path through every rank, layer and meeting."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from fourfold.layout import Grid, Kind, generate
from fourfold.layout.actions import COMPUTE, SENDS
from fourfold.simulator.costs import Modelled
from fourfold.simulator.critical import PATH_CLASSES, CriticalPath, critical_path
from fourfold.simulator.engine import simulate
from fourfold.simulator.faults import Faults
from fourfold.simulator.graph import NONE
from fourfold.simulator.scenario import Scenario
from tests.simulator.small_cases import NOTHING, case, even_work, loads, random_case


def path_of(scenario: Scenario) -> CriticalPath:
    played = simulate(scenario)
    path = critical_path(scenario, played)
    assert path.seconds == pytest.approx(played.step_seconds, rel=1e-9)
    assert sum(path.by_class.values()) == pytest.approx(path.seconds)
    assert sum(path.by_pipeline_rank) == pytest.approx(1.0)
    assert sum(path.by_rank.values()) == pytest.approx(1.0)
    assert all(seconds > 0 for step in path.steps for seconds in step.seconds.values())
    return path


def names(scenario: Scenario, path: CriticalPath) -> list[str]:
    return [str(scenario.graph.nodes[step.node].action) for step in path.steps if step.node != NONE]


class TestByHand:
    def test_gradients_of_weights_wait_for_nobody(self) -> None:
        """CP's rank 0 has done I at 6, and W, which has no collective, at 7; rank 1, with more attention, at 9."""
        schedule = generate(pp=1, num_micro_batches=1, kind="zb-h1")
        layer = dict.fromkeys(COMPUTE, replace(NOTHING, compute=1.0, attention=1.0))
        layer[Kind.WEIGHT] = replace(NOTHING, compute=1.0)
        scenario = case(schedule, even_work(schedule, layer=layer), grid=Grid(cp=2), loads=loads([[[1, 3]]]))
        played = simulate(scenario)
        last = next(i for i, node in enumerate(scenario.graph.nodes) if node.kind is Kind.WEIGHT)
        assert played.end[last].ravel().tolist() == [7.0, 9.0]
        assert path_of(scenario).seconds == 9.0

    def test_1f1b_of_two_ranks(self) -> None:
        """Messages make rank 1 wait for 0F2, which rank 0 runs after 0B0: the path goes to and fro twice."""
        schedule = generate(pp=2, num_micro_batches=3, kind="1f1b")
        scenario = case(schedule, even_work(schedule, message=0.25, optimizer=0.5, fixed=0.125))
        path = path_of(scenario)
        first = ["0F0", "0SEND_F0", "1F0", "1B0", "1SEND_B0", "0B0"]
        assert names(scenario, path) == [*first, "0F2", "0SEND_F2", "1F2", "1B2", "1SEND_B2", "0B2"]
        expected = dict.fromkeys(path.by_class, 0.0)
        expected |= {"compute": 1 + 3 + 2 + 1 + 3 + 2, "pp": 1.0, "optimizer": 0.5, "fixed": 0.125}
        assert path.by_class == pytest.approx(expected)
        # Messages are their sender's; what follows the pipeline is the rank's that ended last.
        assert path.by_pipeline_rank[1] == pytest.approx((6 + 0.5) / 13.625)

    def test_a_slow_rank_of_four_dimensions(self) -> None:
        """It computes five times as long: of every computation of its pipeline rank the path has its part."""
        schedule = generate(pp=2, num_micro_batches=4, kind="1f1b")
        grid = Grid(tp=2, cp=2, pp=2, dp=2)
        slow = grid.rank(tp=1, cp=0, pp=0, dp=1)
        scenario = case(schedule, grid=grid, faults=Faults(ranks={slow: 5.0}))
        path = path_of(scenario)
        # Its two warm-up forwards and a backward in hand hide all that the other pipeline rank does.
        assert path.seconds == pytest.approx(5 * 12)
        assert path.by_rank == pytest.approx({slow: 1.0})

    def test_a_slow_link(self) -> None:
        """Messages between two ranks take 6: those of the slow replica are on the path."""
        schedule = generate(pp=2, num_micro_batches=1)
        grid = Grid(pp=2, dp=3)
        link = (grid.rank(pp=0, dp=2), grid.rank(pp=1, dp=2))
        scenario = case(schedule, even_work(schedule, message=1.0), grid=grid, faults=Faults(links={link: 6.0}))
        path = path_of(scenario)
        assert names(scenario, path) == ["0F0", "0SEND_F0", "1F0", "1B0", "1SEND_B0", "0B0"]
        assert path.by_class["pp"] == pytest.approx(12.0)
        assert {step.replica for step in path.steps} == {(2, 0, 0)}

    def test_a_rank_with_long_documents(self) -> None:
        """CP's rank 1 has twice the attention in micro-batch 0 and CP's rank 0 in micro-batch 1."""
        schedule = generate(pp=1, num_micro_batches=2)
        one = replace(NOTHING, compute=1.0, before=0.5, attention=1.0, cp=0.25)
        work = even_work(schedule, layers=3, layer=dict.fromkeys(COMPUTE, one))
        scenario = case(schedule, work, grid=Grid(cp=2), loads=loads([[[1, 2], [2, 1]]]))
        path = path_of(scenario)
        # The first rank to begin is as good as the other; the last layer's attention is the end's own.
        assert path.by_class["attention"] == pytest.approx(4 * 3 * 2.0)
        assert path.by_class["cp"] == pytest.approx(4 * 3 * 0.25)
        rank_of = {scenario.graph.nodes[step.node].micro_batch: step.replica[1] for step in path.steps}
        assert rank_of == {0: 1, 1: 0}

    def test_a_late_host(self) -> None:
        schedule = generate(pp=1, num_micro_batches=2)
        scenario = case(schedule, grid=Grid(tp=2), faults=Faults(cpus={1: 0.5}))
        path = path_of(scenario)
        assert path.by_class["host"] == pytest.approx(4 * 0.5)
        assert path.by_class["compute"] == pytest.approx(6.0)
        assert {step.replica[2] for step in path.steps if "host" in step.seconds} == {1}

    def test_a_slow_meeting_is_waited_for_by_the_whole_tp_group(self) -> None:
        """CP's collective is slow for tp 1 only, but every layer ends with TP's: all end together."""
        schedule = generate(pp=1, num_micro_batches=2)
        layer = replace(NOTHING, compute=1.0, cp=0.25)
        work = even_work(schedule, layers=2, layer=dict.fromkeys(COMPUTE, layer))
        grid = Grid(tp=2, cp=2)
        link = (grid.rank(tp=1, cp=0), grid.rank(tp=1, cp=1))
        scenario = case(schedule, work, grid=grid, faults=Faults(links={link: 5.0}))
        path, played = path_of(scenario), simulate(scenario)
        assert all(np.ptp(end) == 0 for end in played.end)
        assert path.by_class["cp"] == pytest.approx(4 * 2 * 1.25)
        assert {step.replica[2] for step in path.steps if "cp" in step.seconds} == {1}

    def test_a_stage_without_layers(self) -> None:
        """The head alone begins once its weights are there, and meets nobody."""
        schedule = generate(pp=1, v=2, num_micro_batches=1)
        layer = replace(NOTHING, compute=1.0, cp=2.0)
        ends = dict.fromkeys(COMPUTE, (0.0, 0.5))
        changes = {"layer": dict.fromkeys(COMPUTE, layer), "ends": ends, "gather": (0.0, 5.0)}
        path = path_of(case(schedule, even_work(schedule).replace(layers=(1, 0), **changes)))
        assert path.seconds == pytest.approx(5 + 0.5 + 0.5 + 3)
        assert path.by_class["dp"] == pytest.approx(5)

    def test_the_latest_replica_of_a_collective(self) -> None:
        """The reduction begins when the slow replica is ready, on a rank of another replica with a slow link."""
        schedule = generate(pp=1, num_micro_batches=2)
        work = even_work(schedule, gather=(0.5,), reduce=(1.0,))
        scenario = case(schedule, work, grid=Grid(dp=4), faults=Faults(ranks={2: 3.0}))
        path = path_of(scenario)
        assert path.by_class["dp"] == pytest.approx(1.5)
        assert path.by_class["compute"] == pytest.approx(18.0)
        assert path.by_rank[2] >= 18 / 19.5

    def test_gradients_that_leave_early(self) -> None:
        """A reduction of ten that begins when one of two layers is done: of the backward the path has half."""
        schedule = generate(pp=1, num_micro_batches=1)
        path = path_of(case(schedule, even_work(schedule, layers=2, reduce=(10.0,))))
        assert path.by_class["compute"] == pytest.approx(2 + 2)
        assert path.by_class["dp"] == pytest.approx(10)

    def test_weights_that_come_late(self) -> None:
        """A gather of eight for two layers: the last layer waits for its weights."""
        schedule = generate(pp=1, num_micro_batches=1)
        path = path_of(case(schedule, even_work(schedule, layers=2, gather=(8.0,))))
        assert path.by_class["dp"] == pytest.approx(8)
        assert path.by_class["compute"] == pytest.approx(1 + 4)

    def test_needs_the_times_of_nodes(self) -> None:
        scenario = case(generate(pp=2, num_micro_batches=2))
        with pytest.raises(ValueError, match="simulate with keep=True"):
            critical_path(scenario, simulate(scenario, keep=False))


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_path(seed: int) -> None:
    scenario = random_case(random.Random(seed))
    path, longest = path_of(scenario), Longest(scenario)
    assert path.seconds == pytest.approx(longest.seconds, rel=1e-9)
    by_class, computing = longest.split()
    assert path.by_class == pytest.approx(by_class, abs=1e-8)
    if scenario.faults.jitter:  # no two ranks compute alike: there is but one path, up to who sends and gathers
        assert computing_by_rank(path) == pytest.approx(computing)


def computing_by_rank(path: CriticalPath) -> dict[int, float]:
    out: dict[int, float] = defaultdict(float)
    for step in path.steps:
        out[path.rank_of(step)] += step.seconds.get("compute", 0.0) + step.seconds.get("attention", 0.0)
    return {rank: seconds for rank, seconds in out.items() if seconds > 1e-8}


@pytest.mark.parametrize("seed", range(20))
def test_with_contention(seed: int) -> None:
    """What collectives cost beside computations is on the path, too, as dp."""
    path_of(random_case(random.Random(seed), contention=True))


def test_what_is_on_the_path_lengthens_the_step() -> None:
    """A thousandth more of a class, or of a rank's computing, adds a thousandth of its seconds on the path."""
    chance = random.Random(1)
    small = 1e-5
    for _ in range(12):
        scenario = random_case(chance)
        # No reductions: of what goes on after gradients have left, it is not clear whose it would be.
        free = scenario.work.replace(reduce=(0.0,) * scenario.schedule.num_stages)
        scenario = scenario.replace(faults=replace(scenario.faults, jitter=0.05), work=free)
        path = path_of(scenario)
        slower = {"pp": {"message": scenario.work.message * (1 + small)}}
        for name in ("attention", "tp"):
            layers = scenario.work.layer.items()
            longer = {kind: replace(one, **{name: getattr(one, name) * (1 + small)}) for kind, one in layers}
            slower[name] = {"layer": longer}
        for name, changes in slower.items():
            after = simulate(scenario.replace(work=scenario.work.replace(**changes))).step_seconds
            assert (after - path.seconds) / small == pytest.approx(path.by_class[name], abs=1e-3)
        for rank in list(path.by_rank)[:3]:
            ranks = dict(scenario.faults.ranks)
            ranks[rank] = ranks.get(rank, 1.0) * (1 + small)
            after = simulate(scenario.replace(faults=replace(scenario.faults, ranks=ranks))).step_seconds
            assert (after - path.seconds) / small == pytest.approx(computing_by_rank(path).get(rank, 0.0), abs=1e-3)


class Longest:
    """The longest path through all that happens, every rank for itself, layer by layer and meeting by meeting."""

    def __init__(self, scenario: Scenario) -> None:
        self.case, self.grid, self.costs = scenario, scenario.grid, Modelled(scenario)
        grid = self.grid
        self.replicas = [(d, c, t) for d in range(grid.dp) for c in range(grid.cp) for t in range(grid.tp)]
        self.into: dict[tuple, list] = defaultdict(list)  # vertex -> (vertex before, {class: seconds}, rank)
        for i, node in enumerate(scenario.graph.nodes):
            for at in self.replicas:
                if node.kind in COMPUTE:
                    self.computation(i, at)
                elif node.kind in SENDS:
                    for ahead in (node.needs, *node.after):
                        factor = self.link((at, node.pp_rank), (at, node.receiver))
                        self.edge(
                            ("end", ahead, at), ("end", i, at), self.rank(i, at), pp=scenario.work.message * factor
                        )
                else:
                    self.collective(i, at)
                if node.kind not in SENDS:
                    self.edge(("end", i, at), ("all",), self.rank(i, at))
        self.edge(("all",), ("over",), None, optimizer=scenario.work.optimizer, fixed=scenario.work.fixed)
        self.known: dict[tuple, tuple[float, tuple | None]] = {}
        self.seconds = self.when(("over",))

    def edge(self, before: tuple, after: tuple, rank: int | None, **seconds: float) -> None:
        self.into[after].append((before, seconds, rank))

    def rank(self, i: int, at: tuple[int, int, int]) -> int:
        return self.grid.rank(dp=at[0], cp=at[1], tp=at[2], pp=self.case.graph.nodes[i].pp_rank)

    def link(self, one: tuple, other: tuple) -> float:
        """By how much the link between two neighbours in the pipeline is slow."""
        ranks = sorted(self.grid.rank(dp=d, cp=c, tp=t, pp=pp) for (d, c, t), pp in (one, other))
        return self.case.faults.links.get(tuple(ranks), 1.0)

    def group(self, rank: int, *dims: str) -> float:
        """How slow the slowest link in a group is."""
        members = self.grid.group_of(rank, *dims)
        links = self.case.faults.links.items()
        return max([1.0, *(factor for (a, b), factor in links if a in members and b in members)])

    def pieces(self, i: int, at: tuple[int, int, int]) -> dict[str, float]:
        """Seconds of one layer on one rank."""
        case, node, rank = self.case, self.case.graph.nodes[i], self.rank(i, at)
        layer = case.work.layer[node.kind]
        factor = case.faults.ranks.get(rank, 1.0)
        if case.faults.jitter:  # chance is chance
            factor = float(
                np.broadcast_to(self.costs.pieces(node).slower, (self.grid.dp, self.grid.cp, self.grid.tp))[at]
            )
        load = 1.0 if case.loads is None else case.loads.pairs[at[0], node.micro_batch, at[1]] / case.work.pairs
        return {
            "before": layer.before * factor,
            "rest": (layer.compute - layer.before) * factor,
            "attention": layer.attention * load * factor,
            "ends": case.work.ends[node.kind][node.stage] * factor,
            "tp": layer.tp * max(self.group(peer, "tp") for peer in self.grid.group_of(rank, "tp")),
            "cp": layer.cp * self.group(rank, "cp"),
            # FSDP's, where layers have them: all that share weights are slow together, and TP peers wait for them.
            "dp": layer.dp * max(self.group(peer, "cp", "dp") for peer in self.grid.group_of(rank, "tp", "cp", "dp")),
        }

    def peers(self, at: tuple[int, int, int], axis: int) -> list[tuple[int, int, int]]:
        return [other for other in self.replicas if all(other[k] == at[k] for k in range(3) if k != axis)]

    def computation(self, i: int, at: tuple[int, int, int]) -> None:
        node, rank = self.case.graph.nodes[i], self.rank(i, at)
        number = self.case.work.layers[node.stage]
        if node.kind is Kind.WEIGHT:  # right after another computation of its rank, and without anybody else
            mine = self.pieces(i, at)
            self.edge(("end", node.before, at), ("start", i, at), rank, host=self.case.faults.cpus.get(rank, 0.0))
            busy = mine["ends"] + number * (mine["before"] + mine["rest"])
            self.edge(("start", i, at), ("end", i, at), rank, compute=busy)
            return
        self.edge(("zero",), ("ready", i, at), None)
        for other in (node.before, node.needs):
            if other != NONE:
                self.edge(("end", other, at), ("ready", i, at), rank)
        self.edge(("ready", i, at), ("start", i, at), rank, host=self.case.faults.cpus.get(rank, 0.0))
        mine = self.pieces(i, at)
        for peer in self.peers(at, 2):
            self.edge(("start", i, peer), ("met", i, at), self.rank(i, peer))
            theirs = self.pieces(i, peer)
            self.edge(("met", i, at), ("layer", i, at, 0), self.rank(i, peer), compute=theirs["ends"])
            for k in range(number):
                rest = {"compute": theirs["rest"], "attention": theirs["attention"], "tp": mine["tp"], "dp": mine["dp"]}
                self.edge(("gathered", i, peer, k), ("layer", i, at, k + 1), self.rank(i, peer), **rest)
        for k in range(number):
            self.edge(("layer", i, at, k), ("arrived", i, at, k), rank, compute=mine["before"])
            for peer in self.peers(at, 1):
                self.edge(("arrived", i, peer, k), ("gathered", i, at, k), rank, cp=mine["cp"])
        self.edge(("layer", i, at, number), ("end", i, at), rank)
        if node.gate != NONE:
            seconds = self.case.work.gather[node.stage] * self.group(rank, "cp", "dp")
            self.edge(("start", node.gate, at), ("ready", i, at), rank, dp=seconds / max(number, 1))
            for peer in self.peers(at, 2):
                last = self.last_layer(i, at, peer) if number else {}
                self.edge(("end", node.gate, at), ("end", i, at), self.rank(i, peer), **last)

    def last_layer(self, i: int, at: tuple[int, int, int], peer: tuple[int, int, int]) -> dict[str, float]:
        mine, theirs = self.pieces(i, at), self.pieces(i, peer)
        compute = theirs["before"] + theirs["rest"]
        return {"compute": compute, "attention": theirs["attention"]} | {
            name: mine[name] for name in ("tp", "cp", "dp")
        }

    def collective(self, i: int, at: tuple[int, int, int]) -> None:
        node, rank = self.case.graph.nodes[i], self.rank(i, at)
        number = max(self.case.work.layers[node.stage], 1)
        of = self.case.work.gather if node.kind is Kind.GATHER else self.case.work.reduce
        seconds = of[node.stage] * self.group(rank, "cp", "dp")
        self.edge(("zero",), ("start", i, at), None)
        self.edge(("start", i, at), ("end", i, at), rank, dp=seconds)
        for other in self.replicas:
            if other[2] != at[2]:
                continue
            for ahead in node.after:
                self.edge(("end", ahead, other), ("start", i, at), rank)
            if node.kind is Kind.GATHER and node.needs != NONE:  # ZeRO-3: replicas meet before each computation
                self.edge(("end", node.needs, other), ("start", i, at), rank)
            elif node.needs != NONE:
                layers = self.case.work.layers[self.case.graph.nodes[node.needs].stage]
                alone = self.case.graph.nodes[node.needs].kind is Kind.WEIGHT
                peers = [other] if alone else self.peers(other, 2)
                slowest = max(sum(self.last_layer(node.needs, other, peer).values()) for peer in peers)
                early = max(layers - 1, 0) * slowest
                self.edge(("end", node.needs, other), ("start", i, at), rank, early=-early)
                self.edge(("end", node.needs, other), ("end", i, at), rank, dp=seconds / number)

    def when(self, vertex: tuple) -> float:
        if vertex == ("zero",):
            return 0.0
        if vertex not in self.known:
            found = [
                (self.when(before) + sum(seconds.values()), n)
                for n, (before, seconds, _) in enumerate(self.into[vertex])
            ]
            latest, n = max(found)
            self.known[vertex] = latest, self.into[vertex][n]
        return self.known[vertex][0]

    def split(self) -> tuple[dict[str, float], dict[int, float]]:
        """Seconds by class, and those of computing by rank; less what goes on after gradients have left."""
        vertex, cut = ("over",), 0.0
        by_class, computing = dict.fromkeys(PATH_CLASSES, 0.0), defaultdict(float)
        while vertex != ("zero",):
            vertex, seconds, rank = self.known[vertex][1]
            total = sum(seconds.values())
            if total < 0:
                cut -= total
            elif total:
                gone = min(cut, total)
                cut -= gone
                for name, value in seconds.items():
                    by_class[name] += value * (total - gone) / total
                    if name in ("compute", "attention"):
                        computing[rank] += value * (total - gone) / total
        return by_class, {rank: seconds for rank, seconds in computing.items() if seconds > 1e-8}
