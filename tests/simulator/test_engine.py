"""The engine against published tables, the layout's own player, the planner, and a brute-force oracle."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fourfold.layout import Action, Grid, Kind, Schedule, compile_program, generate
from fourfold.layout.actions import COMPUTE, RECEIVES
from fourfold.simulator.engine import simulate
from fourfold.simulator.faults import Faults
from fourfold.simulator.graph import compile_graph
from fourfold.simulator.scenario import Scenario
from fourfold.simulator.work import Layer, Work
from tests.simulator.small_cases import NOTHING, case, loads


def work(
    schedule: Schedule, *, message: float = 0.0, layers: int = 1, dp: float = 0.0, parts: dict[str, float] | None = None
) -> Work:
    """Every stage alike: forward 1, backward 2; `parts` instead of that, per layer."""
    forward = replace(NOTHING, **(parts or {"compute": 1.0 / layers}))
    both = {name: 2 * getattr(forward, name) for name in ("compute", "before", "attention", "tp", "cp", "dp")}
    weight = replace(NOTHING, compute=forward.compute)
    backward = Layer(**both)
    first_half = replace(backward, compute=backward.compute - weight.compute, before=0.5 * backward.before)
    number = schedule.num_stages
    none = (0.0,) * number
    return Work(
        layers=(layers,) * number,
        layer={Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.INPUT: first_half, Kind.WEIGHT: weight},
        ends=dict.fromkeys(COMPUTE, none),
        pairs=1.0,
        message=message,
        gather=(dp,) * number,
        reduce=(2 * dp,) * number,
        contention=0.0,
        optimizer=0.0,
        fixed=0.0,
    )


class TestPublished:
    """facts.md 2.2."""

    @pytest.mark.parametrize(
        ("pp", "v", "nmb", "nc", "bubble"),
        [
            (3, 2, 6, 3, 0.1667),
            (4, 2, 10, 5, 0.1500),
            (4, 7, 12, 4, 0.0357),
            (4, 7, 12, 6, 0.0357),
            (4, 7, 12, 12, 0.0357),
            (4, 7, 12, None, 0.0357),
            (16, 8, 32, 16, 0.0586),
            (16, 8, 16, 16, 0.1172),
            (4, 2, 3, None, 0.6667),
        ],
    )
    def test_bubbles(self, pp: int, v: int, nmb: int, nc: int | None, bubble: float) -> None:
        kind = "afab" if nc is None else "flexible"
        schedule = generate(pp=pp, v=v, num_micro_batches=nmb, kind=kind, nc=nc)
        played = simulate(case(schedule))
        assert played.bubble_over_compute == pytest.approx(bubble, abs=5e-5)
        assert played.bubble_over_total == pytest.approx(bubble / (1 + bubble), abs=5e-5)

    @pytest.mark.parametrize(
        ("hop", "percent"),
        [(0.0, (3.57, 3.57, 3.57)), (0.05, (4.64, 3.69, 3.69)), (0.10, (5.71, 3.81, 3.81)), (0.20, (7.86, 4.05, 4.05))],
    )
    def test_exposed_messages(self, hop: float, percent: tuple[float, float, float]) -> None:
        for kind, nc, expected in zip(("flexible", "flexible", "afab"), (4, 6, None), percent, strict=True):
            schedule = generate(pp=4, v=7, num_micro_batches=12, kind=kind, nc=nc)
            played = simulate(case(schedule, work(schedule, message=hop)))
            assert 100 * played.bubble_over_compute == pytest.approx(expected, abs=0.005)


def test_the_same_as_the_layouts_player() -> None:
    """Action by action, wherever no message waits for the line."""
    chance = random.Random(5)
    for _ in range(60):
        pp, v = chance.randint(1, 5), chance.randint(1, 3)
        nmb = chance.randint(1, 9)
        schedule = generate(pp=pp, v=v, num_micro_batches=nmb, kind=chance.choice(["afab", "flexible"]))
        hop = chance.choice([0.0, 0.1, 0.4])
        played = simulate(case(schedule, work(schedule, message=hop)))
        timeline = compile_program(schedule).play(message=hop)
        assert played.step_seconds == pytest.approx(timeline.step_time)
        for i, node in enumerate(played.graph.nodes):
            if node.kind in COMPUTE:
                assert (played.start[i].item(), played.end[i].item()) == pytest.approx(timeline.span(node.action))


class TestReceives:
    def test_head_of_line(self) -> None:
        """PyTorch issue 188833 (pains.md P44): with all messages of a rank in one queue the bubble is larger than the
        formula says; on channels of their own it is not."""
        schedule = generate(pp=4, v=2, num_micro_batches=8)
        formula = 3 / 16
        assert simulate(case(schedule)).bubble_over_compute == pytest.approx(formula)
        assert simulate(case(schedule, receives="in-order")).bubble_over_compute > 1.05 * formula

    def test_one_queue_never_deadlocks_in_order(self) -> None:
        chance = random.Random(2)
        for _ in range(40):
            schedule = generate(
                pp=chance.randint(2, 6), v=chance.randint(1, 3), num_micro_batches=chance.randint(1, 12)
            )
            in_order, free = (simulate(case(schedule, receives=way)) for way in ("in-order", "asynchronous"))
            assert in_order.step_seconds >= free.step_seconds - 1e-9

    def test_a_deadlock_names_the_pair(self) -> None:
        """Two ranks that both receive first and send then: the textbook deadlock of blocking messages."""
        good = generate(pp=2, v=1, num_micro_batches=2, kind="afab")
        lists = [list(actions) for actions in good.actions]
        for actions in lists:
            actions.sort(key=lambda action: action.kind not in RECEIVES)  # stable
        with pytest.raises(ValueError, match=r"deadlock: pipeline ranks 0 and 1 wait for each other: .*SEND_"):
            compile_graph(replace(good, actions=tuple(map(tuple, lists))), receives="as-posted")

    def test_a_send_without_its_data(self) -> None:
        """nc < pp as one would naively order it waits for itself for ever, whatever the messages do."""
        good = generate(pp=2, v=1, num_micro_batches=1)
        lists = [list(actions) for actions in good.actions]
        first = next(i for i, action in enumerate(lists[0]) if action.kind is Kind.FORWARD)
        last = next(i for i, action in enumerate(lists[0]) if action.kind is Kind.BACKWARD)
        lists[0][first], lists[0][last] = lists[0][last], lists[0][first]
        with pytest.raises(ValueError, match="deadlock"):
            compile_graph(replace(good, actions=tuple(map(tuple, lists))))

    def test_unknown(self) -> None:
        with pytest.raises(
            ValueError, match="receives = 'sometimes': must be one of asynchronous, in-order, as-posted"
        ):
            compile_graph(generate(pp=2, num_micro_batches=2), receives="sometimes")  # type: ignore[arg-type]


def test_a_line_carries_one_message_after_another() -> None:
    """Two stages, hops as long as two forwards: of AFAB's messages each waits for the one before it."""
    schedule = generate(pp=2, v=1, num_micro_batches=3, kind="afab")
    played = simulate(case(schedule, work(schedule, message=2.0)))
    ends = [played.end[played.graph.where[node.action]].item() for node in played.graph.nodes if node.kind == "SEND_F"]
    assert ends == [3.0, 5.0, 7.0]


class TestShards:
    def test_only_the_first_gather_and_the_last_reduction_show(self) -> None:
        """Four stages of one rank, each gather 0.5 and each reduction 1: the first gather, and the last reduction."""
        schedule = generate(pp=1, v=4, num_micro_batches=4)
        played = simulate(case(schedule, work(schedule, dp=0.5)))
        assert played.step_seconds == pytest.approx(4 * 4 * 3 + 0.5 + 1.0)
        assert float(played.spent["dp"].sum()) == pytest.approx(1.5)

    def test_layers_come_and_go_one_after_another(self) -> None:
        """One stage of four layers: a quarter of the gather before it begins, a quarter of the reduction after."""
        schedule = generate(pp=1, v=1, num_micro_batches=1)
        played = simulate(case(schedule, work(schedule, layers=4, dp=0.4)))
        assert played.step_seconds == pytest.approx(3 + 0.1 + 0.2)

    def test_contention(self) -> None:
        """While a collective runs beside it, a computation is slowed by that share of the time."""
        schedule = generate(pp=1, v=2, num_micro_batches=1)
        costs = replace(work(schedule, dp=0.5), contention=0.2)
        played = simulate(case(schedule, costs))
        # 0.5 gather, then F 1 beside 0.5 of the second gather; F 1; B 2; B 2 beside the first reduction of 1; 1 more.
        assert played.step_seconds == pytest.approx(0.5 + (1 + 0.1) + 1 + 2 + (2 + 0.2) + 1)

    def test_contention_of_its_own_gradients(self) -> None:
        """One stage of four layers: three quarters of the reduction run beside the backward, and slow it by a fifth."""
        schedule = generate(pp=1, v=1, num_micro_batches=1)
        costs = replace(work(schedule, layers=4), reduce=(1.0,), contention=0.2)
        # F 1, B 2; 0.75 of the reduction beside it costs 0.15; the first layer's quarter follows alone.
        assert simulate(case(schedule, costs)).step_seconds == pytest.approx(1 + 2 + 0.15 + 0.25)

    def test_computation_hides_a_share_of_what_is_beside_it(self) -> None:
        """Two stages, reductions of 3, half of the computation beside them hides: of the first, 1 beside 0B0 of 2."""
        schedule = generate(pp=1, v=2, num_micro_batches=1)
        costs = replace(work(schedule), reduce=(3.0, 3.0), hidden=0.5)
        assert simulate(case(schedule, costs)).step_seconds == pytest.approx(1 + 1 + 2 + 2 + (3 - 1) + 3)


def test_messages_of_a_rank_in_one_queue_by_hand() -> None:
    """1F1B on two ranks, messages of 5: on lines of its own the first gradient goes as soon as it is made, at 9. In one
    queue it is behind 0F1's output, whose sender began a tick before: that is on its way from 6 to 11."""
    schedule = generate(pp=2, num_micro_batches=2, kind="1f1b")
    costs = work(schedule, message=5.0)
    ends = {}
    for way in ("asynchronous", "in-order"):
        played = simulate(case(schedule, costs, receives=way))
        ends[way] = [
            played.end[played.graph.where[Action.parse(text)]].item()
            for text in ("0SEND_F0", "0SEND_F1", "1B0", "1SEND_B0")
        ]
    assert ends == {"asynchronous": [6.0, 11.0, 9.0, 14.0], "in-order": [6.0, 11.0, 9.0, 16.0]}


def test_every_rank_accounts_for_the_whole_step() -> None:
    chance = random.Random(8)
    for _ in range(20):
        case = random_case(chance)
        played = simulate(case)
        total = sum(played.spent.values())
        assert np.allclose(total, played.step_seconds, rtol=1e-12)
        assert min(float(seconds.min()) for seconds in played.spent.values()) > -1e-12


def random_case(chance: random.Random) -> Scenario:
    tp, cp, pp, dp = (chance.choice(sizes) for sizes in ((1, 2), (1, 2, 3), (1, 2, 3), (1, 2)))
    grid = Grid(tp=tp, cp=cp, pp=pp, dp=dp)
    zero = chance.choice([1, 2])
    schedule = generate(
        pp=grid.pp,
        v=chance.choice([1, 2]),
        num_micro_batches=chance.randint(1, 5),
        kind=chance.choice(["afab", "flexible"]),
        zero=zero,
    )
    layers = chance.randint(1, 3)
    parts = {"compute": 0.6, "before": 0.15, "attention": 0.3, "tp": 0.05, "cp": 0.07, "dp": 0.0}
    costs = work(schedule, message=chance.choice([0.0, 0.2]), layers=layers, dp=chance.choice([0.0, 0.3]), parts=parts)
    costs = replace(costs, optimizer=0.3, fixed=0.1)
    shape = (grid.dp, schedule.num_micro_batches, grid.cp)
    pairs = np.array([chance.randint(1, 5) for _ in range(int(np.prod(shape)))]).reshape(shape)
    costs = replace(costs, pairs=3.0)
    ranks = {chance.randrange(grid.size): chance.choice([1.5, 2.0, 0.5]) for _ in range(chance.randint(0, 2))}
    cpus = {chance.randrange(grid.size): 0.25 for _ in range(chance.randint(0, 1))}
    faults = Faults(ranks=ranks, cpus=cpus)
    return case(schedule, costs, grid=grid, loads=loads(pairs), faults=faults, all_ranks=True)


class Oracle:
    """A step rank by rank, layer by layer, meeting by meeting: every end by its definition, without any array."""

    def __init__(self, case: Scenario) -> None:
        self.case, self.grid, self.costs = case, case.grid, case.work
        self.lists = [
            [a for a in actions if a.kind in COMPUTE or a.kind in (Kind.GATHER, Kind.REDUCE)]
            for actions in case.schedule.actions
        ]
        self.computations = [[a for a in actions if a.kind in COMPUTE] for actions in self.lists]
        self.step = cache(self.step)  # type: ignore[method-assign]
        self.message = cache(self.message)  # type: ignore[method-assign]
        self.event = cache(self.event)  # type: ignore[method-assign]

    def peers(self, rank: int, *dims: str) -> tuple[int, ...]:
        return self.grid.group_of(rank, *dims)

    def position(self, pp: int, action) -> int:
        return self.computations[pp].index(action)

    def total(self) -> float:
        last = 0.0
        for rank in range(self.grid.size):
            pp = self.grid.coordinates(rank).pp
            last = max(last, self.step(rank, len(self.computations[pp]) - 1, None))
            for number, action in enumerate(self.lists[pp]):
                if action.kind in (Kind.GATHER, Kind.REDUCE):
                    last = max(last, self.event(rank, number)[1])
        return last + self.costs.optimizer + self.costs.fixed

    def begin(self, rank: int, i: int) -> float:
        """When a rank's i-th computation begins."""
        at = self.grid.coordinates(rank)
        action = self.computations[at.pp][i]
        ready = self.step(rank, i - 1, None) if i else 0.0
        schedule = self.case.schedule
        forward = action.kind is Kind.FORWARD
        neighbour = action.stage - 1 if forward else action.stage + 1
        if 0 <= neighbour < schedule.num_stages:
            producer = action._replace(stage=neighbour)
            other = self.grid.rank(tp=at.tp, cp=at.cp, pp=schedule.rank_of(neighbour), dp=at.dp)
            if other == rank:
                ready = max(ready, self.step(rank, self.position(at.pp, producer), None))
            else:
                ready = max(ready, self.message(other, producer, rank))
        gate = self.gate(rank, i)
        if gate is not None:
            begun, ended = self.event(rank, gate)
            ready = max(ready, begun + (ended - begun) / max(self.costs.layers[action.stage], 1))
        return ready + self.case.faults.cpus.get(rank, 0.0)

    def gate(self, rank: int, i: int) -> int | None:
        pp = self.grid.coordinates(rank).pp
        action = self.computations[pp][i]
        if any(earlier.stage == action.stage for earlier in self.computations[pp][:i]):
            return None
        return next(n for n, a in enumerate(self.lists[pp]) if a.kind is Kind.GATHER and a.stage == action.stage)

    def message(self, sender: int, producer, receiver: int) -> float:
        """When the result of a computation has arrived: messages between two ranks travel one after another."""
        pp, towards = self.grid.coordinates(sender).pp, self.grid.coordinates(receiver).pp
        earlier = None
        for action in self.computations[pp][: self.position(pp, producer)]:
            if self.destination(action) == towards:
                earlier = action
        made = self.step(sender, self.position(pp, producer), None)
        free = self.message(sender, earlier, receiver) if earlier is not None else 0.0
        return max(made, free) + self.costs.message

    def destination(self, action) -> int | None:
        schedule = self.case.schedule
        stage = action.stage + (1 if action.kind is Kind.FORWARD else -1)
        if not 0 <= stage < schedule.num_stages or schedule.rank_of(stage) == schedule.rank_of(action.stage):
            return None
        return schedule.rank_of(stage)

    def step(self, rank: int, i: int, layer: int | None) -> float:
        """End of the i-th computation, or of its layers up to one; layer -1: when its TP group has met at the start."""
        at = self.grid.coordinates(rank)
        action = self.computations[at.pp][i]
        number = self.costs.layers[action.stage]
        if layer is None:
            end = self.step(rank, i, number - 1)
            gate = self.gate(rank, i)
            if gate is not None:
                end = max(end, self.event(rank, gate)[1] + self.one_layer(rank, action))
            return end
        if layer == -1:
            return max(self.begin(peer, i) for peer in self.peers(rank, "tp"))
        costs = self.costs.layer[action.kind]

        def after_gather(member: int) -> float:
            ready = []
            for peer in self.peers(member, "cp"):
                ready.append(self.step(peer, i, layer - 1) + costs.before * self.factor(peer))
            return max(ready) + costs.cp

        ends = []
        for member in self.peers(rank, "tp"):
            rest = (costs.compute - costs.before) * self.factor(member) + self.attention(member, action)
            ends.append(after_gather(member) + rest)
        return max(ends) + costs.tp

    def factor(self, rank: int) -> float:
        return self.case.faults.ranks.get(rank, 1.0)

    def attention(self, rank: int, action) -> float:
        at = self.grid.coordinates(rank)
        load = self.case.loads.pairs[at.dp, action.micro_batch, at.cp] / self.costs.pairs
        return self.costs.layer[action.kind].attention * load * self.factor(rank)

    def one_layer(self, rank: int, action) -> float:
        """What a layer takes this rank's TP group, its collectives included."""
        costs = self.costs.layer[action.kind]
        own = [costs.compute * self.factor(peer) + self.attention(peer, action) for peer in self.peers(rank, "tp")]
        return max(own) + costs.tp + costs.cp

    def event(self, rank: int, number: int) -> tuple[float, float]:
        """(begin, end) of a collective of FSDP, which the rank's list has at this place."""
        pp = self.grid.coordinates(rank).pp
        action = self.lists[pp][number]
        layers = max(self.costs.layers[action.stage], 1)
        seconds = (self.costs.gather if action.kind is Kind.GATHER else self.costs.reduce)[action.stage]
        ready, made = [], []
        for peer in self.peers(rank, "cp", "dp"):
            earlier = [n for n in range(number) if self.lists[pp][n].kind in (Kind.GATHER, Kind.REDUCE)]
            ready.append(self.event(peer, earlier[-1])[1] if earlier else 0.0)
            if action.kind is Kind.REDUCE:
                last = [a for a in self.lists[pp][:number] if a.kind in COMPUTE][-1]
                end = self.step(peer, self.position(pp, last), None)
                ready.append(end - (layers - 1) * self.one_layer(peer, last))
                made.append(end)
        begin = max(ready)
        end = begin + seconds
        return begin, max(end, max(made) + seconds / layers) if made else end


@pytest.mark.parametrize("seed", range(24))
def test_oracle(seed: int) -> None:
    case = random_case(random.Random(seed))
    assert simulate(case).step_seconds == pytest.approx(Oracle(case).total(), rel=1e-9)


def test_links() -> None:
    """A slow link of TP, of CP and between pipeline ranks, by hand."""
    schedule = generate(pp=2, v=1, num_micro_batches=1)
    grid = Grid(tp=2, cp=2, pp=2)
    parts = {"compute": 1.0, "tp": 0.1, "cp": 0.2}
    costs = work(schedule, message=0.5, parts=parts)
    whole = 3 * 2 * 1.3 + 2 * 0.5  # two stages, forward and twice that backward; two hops
    for link, more in (((0, 1), 3 * 2 * 0.1), ((1, 3), 3 * 2 * 0.2), ((2, 6), 2 * 2 * 0.5), ((4, 5), 3 * 2 * 0.1)):
        made = case(schedule, costs, grid=grid, faults=Faults(links={link: 3.0}))
        assert simulate(made).step_seconds == pytest.approx(whole + more)


def test_jitter_is_repeatable_and_has_mean_one() -> None:
    schedule = generate(pp=1, v=1, num_micro_batches=64)
    one, same, other = (
        simulate(case(schedule, grid=Grid(dp=32), faults=Faults(jitter=0.1, seed=seed))) for seed in (1, 1, 2)
    )
    assert one.step_seconds == same.step_seconds != other.step_seconds
    assert float(one.spent["compute"].mean()) == pytest.approx(3 * 64, rel=0.01)


def test_keeping_nothing_changes_nothing() -> None:
    case = random_case(random.Random(3))
    kept, not_kept = simulate(case), simulate(case, keep=False)
    assert kept.step_seconds == not_kept.step_seconds
    assert all(np.array_equal(kept.spent[name], not_kept.spent[name]) for name in kept.spent)
    assert not not_kept.start
