"""Small scenarios for the simulator's tests: by hand, and by chance with all that a step can have."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from fourfold.layout import Grid, Kind, Schedule, generate, partition
from fourfold.layout.actions import COMPUTE
from fourfold.simulator.faults import Faults
from fourfold.simulator.graph import compile_graph
from fourfold.simulator.loads import Loads
from fourfold.simulator.scenario import Scenario
from fourfold.simulator.work import Layer, Work

NOTHING = Layer(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def even_work(schedule: Schedule, *, layers: int = 1, **changes: Any) -> Work:
    """Every layer takes 1 forward and 2 backward, in equal halves where it is split; all else is free."""
    number = schedule.num_stages
    none = (0.0,) * number
    one, two = replace(NOTHING, compute=1.0), replace(NOTHING, compute=2.0)
    work = Work(
        layers=(layers,) * number,
        layer={Kind.FORWARD: one, Kind.BACKWARD: two, Kind.INPUT: one, Kind.WEIGHT: one},
        ends=dict.fromkeys(COMPUTE, none),
        pairs=1.0,
        message=0.0,
        gather=none,
        reduce=none,
        contention=0.0,
        optimizer=0.0,
        fixed=0.0,
    )
    return work.replace(**changes)


def case(schedule: Schedule, work: Work | None = None, **changes: Any) -> Scenario:
    """A scenario, by default of one pipeline with even work."""
    receives = changes.pop("receives", "asynchronous")
    work = work or even_work(schedule)
    given: dict[str, Any] = {"grid": Grid(pp=schedule.pp)} | changes
    return Scenario(
        graph=compile_graph(schedule, receives=receives),
        work=work,
        stages=partition(sum(work.layers), pp=schedule.pp, v=schedule.v, split=list(work.layers)),
        **given,
    )


def loads(pairs: Any) -> Loads:
    """Of pairs [dp, micro-batches, cp]."""
    return Loads(pairs=np.asarray(pairs), strategy="head_tail", seq_len=8, micro_batch=1, mix="")


def random_schedule(chance: random.Random) -> Schedule:
    """Any kind, with frozen stages now and then."""
    kind = chance.choice(["afab", "flexible", "flexible", "zb-h1"])
    pp, v = chance.randint(1, 3), 1 if kind == "zb-h1" else chance.choice([1, 2])
    frozen = chance.choice([0, 0, 0, 1]) if pp * v > 1 and kind != "zb-h1" else 0
    return generate(
        pp=pp,
        v=v,
        num_micro_batches=chance.randint(1, 4),
        kind=kind,
        zero=chance.choice([1, 2, 2, 3]),
        num_frozen_stages=frozen,
    )


def random_case(chance: random.Random, *, contention: bool = False) -> Scenario:
    """Layers, ends, documents, slow ranks, links and hosts, jitter: whatever may be; at most 24 ranks."""
    schedule = random_schedule(chance)
    grid = Grid(tp=chance.choice([1, 2]), cp=chance.choice([1, 2]), pp=schedule.pp, dp=chance.choice([1, 2]))
    number = schedule.num_stages

    def some(most: float) -> float:
        return chance.choice([0.0, 1.0, 1.0]) * chance.uniform(0.1, 1.0) * most

    def layer(attention: float, cp: float) -> Layer:
        compute = chance.uniform(0.5, 1.5)
        return Layer(compute, chance.uniform(0.0, 0.9) * compute, attention, some(0.2), cp, some(0.1))

    def each(most: float) -> tuple[float, ...]:
        return tuple(some(most) for _ in range(number))

    attention, meeting = some(0.8), some(0.3)
    passes = {kind: layer(attention, meeting) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT)}
    moves = schedule.zero < 3
    work = Work(
        layers=(2, *(chance.choice([0, 1, 2, 3]) for _ in range(number - 1))),
        layer=passes | {Kind.WEIGHT: replace(NOTHING, compute=chance.uniform(0.2, 0.8))},
        ends={kind: each(0.5) for kind in COMPUTE},
        pairs=3.0,
        message=some(0.4),
        gather=each(1.5) if moves else (0.0,) * number,
        reduce=each(3.0) if moves else (0.0,) * number,
        contention=0.15 if contention else 0.0,
        optimizer=0.3,
        fixed=0.1,
    )
    shape = (grid.dp, schedule.num_micro_batches, grid.cp)
    pairs = np.array([chance.randint(1, 9) for _ in range(int(np.prod(shape)))]).reshape(shape)
    return case(
        schedule,
        work,
        grid=grid,
        loads=chance.choice([None, loads(pairs)]),
        faults=random_faults(chance, grid),
        receives=chance.choice(["asynchronous", "in-order"]),
        all_ranks=True,
    )


def random_faults(chance: random.Random, grid: Grid) -> Faults:
    """Up to two slow ranks, a slow link, a late host, jitter."""
    ranks = {chance.randrange(grid.size): chance.uniform(0.6, 2.0) for _ in range(chance.randint(0, 2))}
    cpus = {chance.randrange(grid.size): chance.uniform(0.1, 0.5) for _ in range(chance.randint(0, 1))}
    links = {}
    if grid.size > 1 and chance.random() < 0.5:
        one = chance.randrange(grid.size)
        at = grid.coordinates(one)
        near = {*grid.group_of(one, "tp"), *grid.group_of(one, "cp", "dp")}
        if at.pp + 1 < grid.pp:
            near.add(grid.rank(tp=at.tp, cp=at.cp, pp=at.pp + 1, dp=at.dp))
        others = sorted(near - {one})
        if others:
            other = chance.choice(others)
            links[min(one, other), max(one, other)] = chance.uniform(1.5, 4.0)
    return Faults(ranks, links, cpus, jitter=chance.choice([0.0, 0.05]), seed=chance.randrange(100))
