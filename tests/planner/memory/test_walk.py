"""Memory by walking the schedule: every rank, against brute force, published tables and what others got wrong."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from fourfold.layout import Schedule, Stage, compile_program, generate, partition
from fourfold.layout.actions import Kind
from fourfold.planner.arithmetic import count_parameters, count_stages, rank_bytes
from fourfold.planner.jobs import Jobs, Order, Recompute
from fourfold.planner.machines.chips import GIB
from fourfold.planner.memory.peak import peak_memory
from fourfold.planner.memory.saved import load_rules, sizes
from fourfold.planner.memory.walk import RankMemory, stage_bytes, walk, walk_row
from fourfold.planner.run_memory import Trainer, job_of, run_memory
from fourfold.recipe import RunPlan, check, from_table
from fourfold.recipe.model import PRESETS
from tests.planner.jobs_of_tests import job
from tests.planner.memory.test_peak import Software, production


def walked(
    jobs: Jobs, *, kind: str, nc: int | None = None, split: Any = "even", saved_set: str = "standard"
) -> tuple[RankMemory, ...]:
    """All ranks of one job under a schedule."""
    pp, v = int(jobs.pp), int(jobs.v)
    schedule = generate(
        pp=pp, v=v, num_micro_batches=int(jobs.micro_batches), kind=kind, nc=nc, zero=max(1, int(jobs.zero))
    )
    stages = partition(int(jobs.layers), pp=pp, v=v, split=split)
    return walk(jobs, schedule, stages, None, Software(saved_set))


def plan(**sections: dict[str, Any]) -> RunPlan:
    table: dict[str, Any] = {
        "model": {"dim": 64, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 160, "vocab_size": 512},
        "batch": {"sequences": 8, "seq_len": 64},
    }
    for name, section in sections.items():
        table[name] = table.get(name, {}) | section
    return check(from_table(table))


# The production layout


def test_j1_rank_by_rank() -> None:
    """128 live chunks on ranks 0 to 7, then 127 to 113; 63.5 GiB of activations on ranks 1 to 7, 55.6 on rank 0, which
    has a layer less."""
    ranks = walked(production(), kind="interleaved", split="ends_light")
    assert [rank.in_flight for rank in ranks] == [128] * 8 + [127, 125, 123, 121, 119, 117, 115, 113]
    gib = [rank.activations / GIB for rank in ranks]
    assert gib[0] == pytest.approx(55.6, abs=0.1)
    assert gib[1:8] == pytest.approx([63.5] * 7, abs=0.1)
    assert max(ranks, key=lambda rank: rank.total).pp_rank == 1
    assert [rank.num_layers for rank in ranks] == [7, *[8] * 14, 7]
    assert [rank.embedding for rank in ranks] == [True, *[False] * 15]
    assert [rank.head for rank in ranks] == [*[False] * 15, True]


def test_j1_total_with_static_gradients() -> None:
    ranks = walked(production(), kind="interleaved", split="ends_light", saved_set="megatron")
    rank = ranks[1]
    assert (rank.total - rank.transients - rank.buffers) / GIB == pytest.approx(81.6, abs=0.1)
    assert rank.reserved == pytest.approx(1.03 * rank.total)


def test_figure_10_balanced_ends() -> None:
    """405B's layers on pp 8: each rank has 0.66 GB less than the one before, two micro-batches of 0.33 GB; a layer less
    on both ends makes rank 1 the fullest (facts.md 2.4)."""

    def peaks(layers: int, split: str) -> list[float]:
        jobs = job("405b", layers=layers, tp=8, pp=8, v=6, dp=2, sequences=64, order=Order.INTERLEAVED)
        return [rank.total / 1e9 for rank in walked(jobs, kind="flexible", nc=16, split=split, saved_set="meta")]

    even, light = peaks(48, "even"), peaks(46, "ends_light")
    assert [a - b for a, b in pairwise(even[1:7])] == pytest.approx([0.66] * 5, abs=0.01)
    assert even[1:7] == pytest.approx(light[1:7])
    assert even.index(max(even)) == 0
    assert light.index(max(light)) == 1
    assert max(even) - max(light) == pytest.approx(5, abs=4)
    assert light[0] < light[6]
    assert light[7] < light[6] < even[7]


def test_figure_4_lifetimes_of_gradients() -> None:
    """v = 4, two rounds: ZeRO-1 has all 4 chunks' sums at once, ZeRO-2 and all-forward-all-backward one."""

    def chunks(kind: str, zero: int) -> float:
        jobs = job("8b", pp=4, v=4, sequences=8, zero=zero, dp=1, shards=10**9)
        rank = walked(jobs, kind=kind)[1]
        return rank.gradients / (4 * float(sizes(jobs, load_rules("standard")).layer) * 2)

    assert chunks("interleaved", 1) == pytest.approx(4)
    assert chunks("interleaved", 2) == pytest.approx(1)
    assert chunks("afab", 1) == pytest.approx(1)
    assert chunks("afab", 2) == pytest.approx(1)


# Independent walks


@pytest.mark.parametrize(
    ("kind", "pp", "v", "m", "nc", "layers", "zero"),
    [
        ("1f1b", 4, 1, 6, None, 13, 1),
        ("interleaved", 3, 2, 6, None, 11, 1),
        ("interleaved", 3, 2, 7, None, 11, 2),
        ("flexible", 2, 3, 9, 4, 14, 1),
        ("flexible", 4, 2, 8, 6, 30, 2),
        ("afab", 4, 2, 3, None, 18, 1),
        ("afab", 2, 1, 4, None, 5, 3),
        ("zb-h1", 4, 1, 6, None, 13, 1),
        ("zb-h1", 2, 1, 9, None, 5, 2),
        ("zb-h1", 4, 1, 3, None, 9, 3),
    ],
)
def test_against_a_walk_with_dictionaries(
    kind: str, pp: int, v: int, m: int, nc: int | None, layers: int, zero: int
) -> None:
    """The same events followed one by one, the plain way."""
    order = Order.ZB_H1 if kind == "zb-h1" else Order.ONE_F_ONE_B  # of others nothing here depends on it
    jobs = job("8b", layers=layers, pp=pp, v=v, sequences=m, zero=zero, shards=4, cp=2, order=order)
    rules = load_rules("standard")
    schedule = generate(pp=pp, v=v, num_micro_batches=m, kind=kind, nc=nc, zero=zero)
    stages = partition(layers, pp=pp, v=v)
    held = stage_bytes(jobs, stages, rules)
    ranks = walk(jobs, schedule, stages, None, Software())
    for rank in ranks:
        assert rank.total == pytest.approx(_peak_of(rank.pp_rank, schedule, held, zero, rank.weights)), rank


def _peak_of(pp_rank: int, schedule: Schedule, held: Any, zero: int, gathered: float) -> float:
    alive: dict[Any, float] = defaultdict(float)
    alive["always"] = held.buffers + sum(held.optimizer[pp_rank :: schedule.pp])
    peak = 0.0
    for kind, stage, micro_batch in schedule.actions[pp_rank]:
        moment = 0.0
        if kind is Kind.GATHER and zero < 3:
            alive["weights", stage] = held.weights[stage]
        elif kind is Kind.FORWARD:
            alive["saved", stage, micro_batch] = held.activations[stage] + held.logits[stage]
            alive["kv", stage, micro_batch] = held.gathered_kv[stage]
            moment = held.in_forward[stage]
        elif kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT):
            if kind is not Kind.INPUT:
                alive["sum", stage] = held.sums[stage]
            moment = held.in_backward[stage]
        elif kind is Kind.REDUCE:
            alive["shard", stage] = held.shards[stage]
        peak = max(peak, sum(alive.values()) + moment + (gathered if zero == 3 else 0))
        if kind in (Kind.BACKWARD, Kind.INPUT):
            del alive["kv", stage, micro_batch]
        if kind in (Kind.BACKWARD, Kind.WEIGHT):
            del alive["saved", stage, micro_batch]
        elif kind is Kind.REDUCE:
            del alive["sum", stage]
        elif kind is Kind.FREE:
            alive.pop(("weights", stage), None)
    return peak


@pytest.mark.parametrize(
    ("v", "kind", "m", "chunks"),
    [
        (2, "interleaved", 4, 8),  # P6: never more than there are, not 11
        (2, "interleaved", 8, 11),
        (1, "1f1b", 2, 2),
        (1, "1f1b", 16, 4),
        (1, "afab", 16, 16),
        (7, "flexible", 12, 31),  # facts.md 2.2
    ],
)
def test_in_flight_on_rank_0(v: int, kind: str, m: int, chunks: int) -> None:
    jobs = job("8b", layers=56, pp=4, v=v, sequences=m)
    rank = walked(jobs, kind=kind)[0]
    assert rank.in_flight == chunks
    per_chunk = float(sizes(jobs, load_rules("standard")).activations) * 56 / (4 * v)
    assert rank.activations == pytest.approx(chunks * per_chunk)


def test_the_peak_says_when_it_is() -> None:
    jobs = job("8b", layers=16, pp=4, sequences=8)
    schedule = generate(pp=4, num_micro_batches=8, kind="1f1b", zero=1)
    timeline = compile_program(schedule).play(forward=2.0, backward=5.0)
    ranks = walk(jobs, schedule, partition(16, pp=4), timeline, Software())
    for rank in ranks:
        index = [str(action) for action in timeline.program.actions].index(rank.at)
        assert rank.seconds == timeline.start[index]
        assert timeline.program.pp_rank[index] == rank.pp_rank
        assert sum(rank.parts.values()) == pytest.approx(rank.total)


def test_zero_bubble_holds_on_every_rank_what_the_first_does() -> None:
    """And on the last as many logits, or their gradients."""
    jobs = job("8b", layers=32, pp=4, sequences=8, order=Order.ZB_H1)
    ranks, usual = walked(jobs, kind="zb-h1"), walked(jobs, kind="1f1b")
    assert [rank.in_flight for rank in ranks] == [4] * 4
    assert [rank.activations for rank in ranks[:3]] == pytest.approx([usual[0].activations] * 3)
    assert [rank.logits for rank in ranks] == [0, 0, 0, 4 * usual[3].logits]


# Stages that differ


def test_uneven_stages_are_counted_one_by_one() -> None:
    """P1: 8 layers as 1, 2, 2, 3, whose heaviest stage an average puts 31 % too low."""
    jobs = job("8b", layers=8, pp=4, sequences=4)
    ranks = walked(jobs, kind="1f1b", split=[1, 2, 2, 3])
    assert [rank.num_layers for rank in ranks] == [1, 2, 2, 3]
    size = sizes(jobs, load_rules("standard"))
    layer, embedding, head = float(size.layer), float(size.embedding), float(size.head)
    expected = [layer + embedding, 2 * layer, 2 * layer, 3 * layer + head]
    assert [rank.weights for rank in ranks] == pytest.approx([2 * p for p in expected])


@pytest.mark.parametrize("split", [[3, 4], [2, 5]])
def test_weights_of_seven_layers_are_exact(split: list[int]) -> None:
    """T19: to the byte."""
    config = PRESETS["llama3-8b"].replace(num_layers=7)
    jobs = job("8b", layers=7, pp=2, sequences=2)
    stages = partition(7, pp=2, split=split)
    counts = count_stages(config, stages, tp=1, num_shards=1)
    ranks = walked(jobs, kind="1f1b", split=split)
    assert [rank.weights for rank in ranks] == [2 * count.held for count in counts]
    assert sum(count.held for count in counts) == count_parameters(config).total


def test_layers_that_do_not_divide_are_all_there() -> None:
    """P7: 30 layers on 4 ranks are not 28."""
    ranks = walked(job("8b", layers=30, pp=4, sequences=4), kind="1f1b")
    assert sum(rank.num_layers for rank in ranks) == 30


def test_ends_are_heavier_and_a_layer_moved_helps() -> None:
    """P9, T16, T20: a large vocabulary on a small model makes the ends heaviest; one layer less there evens it out."""
    small = job("8b", layers=12, dim=1024, heads=8, kv_heads=8, ffn_dim=2816, vocab=50304, padded_vocab=50304, pp=4,
                sequences=4, seq_len=1024)  # fmt: skip
    even = [rank.total for rank in walked(small, kind="1f1b")]
    moved = [rank.total for rank in walked(small, kind="1f1b", split=[2, 4, 4, 2])]
    assert min(even[0], even[3]) > 1.25 * max(even[1], even[2])
    assert max(moved) < max(even)


def test_8b_on_four_ranks_can_be_balanced() -> None:
    """T16: the largest predicted peak is less than 1.15 of the smallest, on a split that the walk tells apart."""
    jobs = job("8b", pp=4, dp=8, sequences=64, zero=1, recompute=Recompute.NONE)
    best = min(
        max(totals) / min(totals)
        for first in (5, 6, 7, 8)
        for second in (7, 8)
        for last in (7, 8, 9, 10, 11, 12)
        if (third := 32 - first - second - last) > 0
        for totals in [[r.total for r in walked(jobs, kind="1f1b", split=[first, second, third, last])]]
    )
    even = [rank.total for rank in walked(jobs, kind="1f1b")]
    assert best < 1.15 < max(even) / min(even)


def test_tied_embedding_is_held_once_on_one_rank_and_at_both_ends_of_several() -> None:
    tied: dict[str, Any] = {"layers": 8, "tied": True, "sequences": 4}
    table = 128256 * 4096
    (one,) = walked(job("8b", **tied), kind="1f1b")
    untied = walked(job("8b", **(tied | {"tied": False})), kind="1f1b")[0]
    assert untied.weights - one.weights == 2 * table
    first, last = walked(job("8b", pp=2, **tied), kind="1f1b")
    assert last.weights == first.weights + 2 * 4096  # the last norm


def test_logits_pile_up_where_all_forwards_come_first() -> None:
    jobs = job("8b", layers=8, pp=2, sequences=6)
    one = 2 * 8192 * 128256
    assert walked(jobs, kind="1f1b")[1].logits == one
    assert walked(jobs, kind="afab")[1].logits == 6 * one


# Runs of the trainer


@pytest.mark.parametrize(
    ("layout", "pipeline"),
    [
        ({"pp": 2, "dp": 2}, {"virtual_stages": 2}),
        ({"tp": 2, "pp": 4}, {}),
        ({"pp": 2, "dp": 2, "zero": 3}, {}),
        ({"cp": 2, "dp": 2, "zero": 2}, {"virtual_stages": 2, "micro_batch": 2}),
    ],
)
def test_a_recipe_agrees_with_rank_bytes(layout: dict[str, Any], pipeline: dict[str, Any]) -> None:
    """Weights, optimizer and gradients of a recipe: never more than the exact count of each kind's own peak."""
    what = plan(layout=layout, pipeline=pipeline, train={"dtype": "bfloat16"})
    counts = count_stages(what.config, what.stages, tp=what.grid.tp, num_shards=what.grid.dp * what.grid.cp)
    ranks = run_memory(what)
    for rank in ranks:
        held = rank_bytes(rank.pp_rank, schedule=what.schedule, counts=counts, dtype="bfloat16", num_moments=2)
        assert rank.optimizer == held.master + held.optimizer
        assert rank.gradients <= held.gradients + held.gradient_shards
        assert rank.in_flight == what.schedule.in_flight_peak[rank.pp_rank]
        assert rank.activations > 0
        if what.zero < 3:
            assert rank.weights <= held.weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_recipe_agrees_with_its_columns(dtype: str, zero: int) -> None:
    """The planner says of a layout what is said of a recipe of the trainer's, but for the rounding of shards."""
    pipeline = {} if zero == 3 else {"virtual_stages": 2}
    what = plan(layout={"pp": 2, "dp": 2, "zero": zero}, pipeline=pipeline, train={"dtype": dtype})
    _agrees(what)
    if zero < 3:
        _agrees(plan(layout={"pp": 2, "dp": 2, "zero": zero}, pipeline={"schedule": "zb-h1"}, train={"dtype": dtype}))


def _agrees(what: RunPlan) -> None:
    jobs, ranks = job_of(what, what.phases[0]), run_memory(what)
    assert walk_row(jobs, Trainer()) == pytest.approx([rank.total for rank in ranks], rel=1e-3)
    worst, found = max(ranks, key=lambda rank: rank.total), peak_memory(jobs, Trainer())
    assert float(found.allocated) == pytest.approx(worst.total, rel=1e-3)
    assert float(found.optimizer) == pytest.approx(worst.optimizer, rel=1e-3)
    assert float(found.weights) == pytest.approx(worst.weights, rel=1e-3)


def test_frozen_weights_have_no_gradient() -> None:
    what = plan(layout={"pp": 2}, train={"freeze": ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"]})
    first, last = run_memory(what)
    assert what.schedule.num_frozen_stages == 1
    assert first.gradients == first.activations == 0
    assert last.gradients > 0


def test_each_stage_recomputes_what_the_recipe_says() -> None:
    """Of two ranks the first runs its layers again: it is as in a recipe that does so everywhere, the other as ever."""
    layout = {"layout": {"pp": 2}, "train": {"dtype": "bfloat16"}}
    none, full, mixed = (
        run_memory(plan(**layout | {"train": {"dtype": "bfloat16", "recompute": kinds}}))
        for kinds in ("none", "full", ["full", "none"])
    )
    assert mixed == (full[0], none[1])
    assert full[0].activations < 0.3 * none[0].activations
    # The worst moment is the last backward, of 64 tokens: four layers' inputs; cosines and sines of heads of 16.
    assert full[0].at == "0B7"
    assert full[0].activations == 4 * 64 * 64 * 2 + 64 * 16 * 4


@pytest.mark.parametrize(
    ("recompute", "dropped"), [("norms", 4 * 64), ("swiglu", 2 * 160), ("selective", 4 * 64 + 320)]
)
def test_what_goes_for_next_to_nothing(recompute: str, dropped: int) -> None:
    """Bytes per token of eight layers: two hidden states, and the product of SwiGLU. The head's norm has one more."""
    train = {"dtype": "bfloat16"}
    (kept,), (less,) = (run_memory(plan(train=train | extra)) for extra in ({}, {"recompute": recompute}))
    head = 2 * 64 * (recompute != "swiglu")
    assert kept.activations - less.activations == 64 * (8 * dropped + head)


def test_the_fullest_phase_of_a_run_counts() -> None:
    short = plan(batch={"sequences": 8, "seq_len": 64})
    longer = plan(batch={"sequences": 8, "seq_len": 64, "phases": [{"after_tokens": 1024, "seq_len": 256}]})
    assert run_memory(longer)[0].activations > 2 * run_memory(short)[0].activations


def test_walk_row_makes_the_schedule_of_the_columns() -> None:
    jobs = production()
    ranks = walked(jobs, kind="interleaved", split="ends_light")
    assert walk_row(jobs, Software()) == pytest.approx([rank.total for rank in ranks])


def test_an_empty_stage_is_no_trouble() -> None:
    stages = (Stage(0, (), embedding=True, head=False), Stage(1, (0, 1), embedding=False, head=True))
    schedule = generate(pp=2, num_micro_batches=2, kind="1f1b")
    first, last = walk(job("8b", layers=2, pp=2, sequences=2), schedule, stages, None, Software())
    assert first.activations == 0
    assert first.num_layers == 0
    assert last.total > first.total
