"""What is summed where, in which dtype and how often, and under which name it appears in a trace."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from fourfold.layout import Doing, Grid, parse_label
from fourfold.layout.actions import RECEIVES
from fourfold.model import Batch
from fourfold.parallel import connect
from fourfold.parallel.batch import LocalBatch
from fourfold.trainer.ranks import fork_ranks
from tests.parallel.harness import Case, compare, make_model, micro_batches, reference, run, sequential, train_rank


def test_sums_are_made_in_fp32_in_the_order_of_ranks() -> None:
    """256 + 1 + 1 + 1 is 260 in bf16 (259 rounded) if the sum is made in fp32, and 256 if each addition is rounded."""

    def work(rank: int) -> tuple[torch.Tensor, ...]:
        group = connect(Grid(tp=4), "cpu").tp
        mine = torch.full((4, 3), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        order = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])[rank].repeat(4)
        return group.reduce_scatter(mine), group.all_reduce(mine), group.all_reduce(order), group.all_gather(order[:1])

    for scattered, reduced, ordered, gathered in fork_ranks(4, work, timeout=60):
        assert scattered.dtype == reduced.dtype == torch.bfloat16
        assert scattered.shape == (1, 3)
        assert (scattered == 260).all()
        assert (reduced == 260).all()
        # fp32, left to right: ((1e8 + 1) - 1e8) + 1 = 1, where another order gives 0 or 2.
        assert (ordered == 1).all()
        assert gathered.tolist() == [1e8, 1, -1e8, 1]


def spied_step(case: Case) -> list[tuple[str, torch.dtype]]:
    """(name, dtype) of every collective of the second step, on one rank."""
    seen: list[tuple[str, torch.dtype]] = []
    names = ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor", "all_gather_single", "all_to_all_single")

    def spy(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
            seen.append((name, tensor.dtype))
            return real(*args, **kwargs)

        return call

    model = make_model(case)
    group = model.groups.coordinates.dp
    model.forward_backward(micro_batches(case, 0, group))
    model.zero_grad()
    for name in names:
        setattr(dist, name, spy(name))  # this process is a fork and ends with the test
    model.forward_backward(micro_batches(case, 1, group))
    model.gradients.norm()
    return seen


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_no_collective_adds_in_bf16(zero: int) -> None:
    case = Case(tp=2, pp=2, dp=2, v=2, nmb=3, kv=1, tied=True, zero=zero, dtype="bfloat16")
    for seen in fork_ranks(case.world, lambda rank: spied_step(case), timeout=60):
        summing = [(name, dtype) for name, dtype in seen if name.startswith(("all_reduce", "reduce_scatter"))]
        assert any(name.startswith("reduce_scatter") for name, _ in summing)
        assert {dtype for _, dtype in summing} <= {torch.float32, torch.float64}
        assert ("all_to_all_single", torch.bfloat16) in seen  # TP sums travel in bf16 and are added in fp32


def test_bf16_is_near_the_reference() -> None:
    """Per tensor within the rounding of bf16 activations. A sum in the wrong dtype would not show here: see above."""
    case = Case(tp=2, cp=2, pp=2, v=2, nmb=3, dtype="bfloat16", steps=2)
    compare(run(case), reference(sequential(case)), tolerance=6e-2)


def test_a_frequent_token_keeps_learning_in_bf16() -> None:
    """Two thousand gradients of eight entries are summed in fp32; in bf16 the sums were 5 % off."""
    case = Case(tp=2, dtype="bfloat16", rows=((2048,),), vocab=8, nmb=1, layers=2, steps=1)
    got, want = run(case).gradients[0], reference(sequential(case)).gradients[0]
    for name in ("tok_embeddings.weight", "output.weight"):
        error = torch.linalg.vector_norm(got[name][:8] - want[name]) / torch.linalg.vector_norm(want[name])
        assert error < 2e-2, (name, error)


@pytest.mark.parametrize(
    ("zero", "reduces_per_stage", "gathers_per_stage"),
    [(1, 1, 1), (2, 2, 1), (3, 5, 10)],  # nmb 5 in rounds of 3 and 2; ZeRO-3 gathers for each forward and backward
)
def test_fsdp_communicates_as_the_schedule_says(zero: int, reduces_per_stage: int, gathers_per_stage: int) -> None:
    case = Case(pp=2, v=2, dp=2, nmb=5, nc=3, schedule="flexible", zero=zero, layers=4)
    for rank, seen in enumerate(fork_ranks(case.world, lambda rank: spied_step(case), timeout=60)):
        count = Counter(name for name, _ in seen)
        reduces = count["reduce_scatter_single"] + count["reduce_scatter_tensor"]
        stages = [s for s in case.plan().stages if s.index % 2 == case.plan().grid.coordinates(rank).pp]
        # An FSDP group per stage, or for ZeRO-3 one per layer and one for embedding or head.
        groups = len(stages) if zero < 3 else sum(len(s.layers) + (s.embedding or s.head) for s in stages)
        assert reduces == reduces_per_stage * groups
        assert count["all_gather_single"] == gathers_per_stage * groups


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, dp=2, v=2, nmb=5, nc=3, schedule="flexible", zero=2),
        Case(pp=2, dp=2, nmb=5, schedule="zb-h1", zero=3),
    ],
    ids=lambda case: case.schedule,
)
def test_the_log_is_the_plan(case: Case) -> None:
    """What the executor did is what the schedule lists, in the same order on every rank."""

    def work(rank: int) -> Any:
        model = make_model(case)
        return model.groups.pp.rank, model.forward_backward(micro_batches(case, 0, rank // 2)).log

    plan = case.plan().schedule
    for pp_rank, log in fork_ranks(case.world, work, timeout=60):
        assert tuple(entry.action for entry in log) == plan.actions[pp_rank]
        assert all(a.start <= a.end <= b.start for a, b in pairwise(log))
        assert all(0 <= entry.wait <= entry.end - entry.start for entry in log)
        assert sum(entry.wait for entry in log) > 0


def test_every_action_and_collective_is_labelled() -> None:
    case = Case(tp=2, cp=2, pp=2, v=2, nmb=3, zero=1)

    def work(rank: int) -> list[str]:
        model = make_model(case)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model.forward_backward(micro_batches(case, 0, 0))
        return [event.name for event in profiler.events() if event.name.startswith("ff:")]

    schedule, grid = case.plan().schedule, case.plan().grid
    doings = {Doing.COUNT.range, Doing.FLUSH.range, Doing.SUM.range}
    found, waits = [], []
    for names in fork_ranks(case.world, work, timeout=60):
        assert doings == {name for name in names if parse_label(name) is None}
        labels = [label for name in names if (label := parse_label(name)) is not None]
        found.append([label for label in labels if "wait" not in label.kind.lower()])
        waits.append([label for label in labels if "wait" in label.kind.lower()])
    for rank, labels in enumerate(found):
        # A message is waited for in the computation that takes it, a collective under the number of its start.
        taken = Counter((x.kind.removeprefix("WAIT_"), x.stage, x.micro_batch) for x in waits[rank] if x.kind != "wait")
        received = [a for a in schedule.actions[grid.coordinates(rank).pp] if a.kind in RECEIVES]
        assert taken == Counter((a.kind.value.removeprefix("RECV_"), a.stage, a.micro_batch) for a in received)
        started = Counter(x._replace(kind="wait") for x in labels if x.kind in ("all_gather", "reduce_scatter"))
        waited = Counter(x for x in waits[rank] if x.kind == "wait")
        assert waited == Counter({x: n for x, n in started.items() if x.dimension != "fsdp"})
        actions = [(x.kind, x.stage, x.micro_batch) for x in labels if x.dimension == "pp"]
        plan = schedule.actions[grid.coordinates(rank).pp]
        expected = [(str(a.kind), a.stage, a.micro_batch) for a in plan]
        events = {"GATHER", "REDUCE", "FREE"}
        assert sorted(actions) == sorted(a for a in expected if a[0] not in events)
        fsdp = [(x.kind, x.stage) for x in labels if x.dimension == "fsdp" and x.kind in events]
        assert sorted(fsdp) == sorted((k, s) for k, s, _ in expected if k in events)
        for dimension in ("tp", "cp"):
            mine = [x for x in labels if x.dimension == dimension]
            assert all(x.group == min(grid.group_of(rank, dimension)) for x in mine)
            assert sorted(x.sequence for x in mine) == list(range(len(mine)))
            in_stages = [x for x in mine if x.stage >= 0]
            assert {(x.stage, x.micro_batch) for x in in_stages} <= {(s, m) for k, s, m in expected if k in "FB"}
            # Members agree on what their n-th collective is.
            other = next(r for r in grid.group_of(rank, dimension) if r != rank)
            theirs = [x for x in found[other] if x.dimension == dimension]
            assert sorted(mine, key=lambda x: x.sequence) == sorted(theirs, key=lambda x: x.sequence)
        # Per layer and micro-batch 4 TP collectives forward and 6 backward, and one CP collective each way.
        layers = sum(len(s.layers) for s in case.plan().stages if s.index % 2 == grid.coordinates(rank).pp)
        per_micro_batch = Counter(x.kind for x in labels if x.dimension == "cp")
        assert per_micro_batch == {"all_gather": layers * case.nmb, "reduce_scatter": layers * case.nmb}


@pytest.mark.parametrize("cp_split", ["head_tail", "per_document"])
def test_nothing_leaks_between_documents(cp_split: str) -> None:
    """Another token in document 1 changes no bit of the loss of document 2 (trl PR 6843)."""
    case = Case(cp=2, tp=2, nmb=1, rows=((20, 43),), cp_split=cp_split)

    def work(rank: int) -> tuple[float, float, float]:
        model = make_model(case)
        ((batch, rows),) = micro_batches(case, 0, 0)
        assert batch.labels is not None
        batch.labels[:20] = -1
        losses = [model.forward_backward([(batch, rows)]).loss]
        batch.tokens[11] = (batch.tokens[11] + 1) % case.vocab
        losses.append(model.forward_backward([(batch, rows)]).loss)
        batch.tokens[30] = (batch.tokens[30] + 1) % case.vocab
        losses.append(model.forward_backward([(batch, rows)]).loss)
        return losses[0], losses[1], losses[2]

    for before, after, own in fork_ranks(case.world, work, timeout=60):
        assert before == after
        assert before != own  # the probe sees a change where there is one


def test_weights_do_not_depend_on_the_layout() -> None:
    """Also those of chunks on one rank, which elsewhere were drawn alike (OLMo-core, 2026)."""
    case = Case(tp=2, pp=2, v=2, dp=2, nmb=2, steps=0, tied=True)
    got = {}
    for outcome in fork_ranks(case.world, lambda rank: train_rank(case), timeout=60):
        got.update(outcome.weights)
    want = reference(replace(sequential(case), steps=0)).weights
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name][: len(want[name])], want[name]) for name in want)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_outputs_are_freed_before_backward(recompute: str) -> None:
    """A stage's output lives until it is sent; its backward needs only the graph behind it."""
    case = Case(pp=2, nmb=4, schedule="afab", recompute=recompute)

    def work(rank: int) -> list[bool]:
        model = make_model(case)
        outputs: list[StorageWeakRef] = []
        alive: list[bool] = []
        backward = torch.autograd.backward

        def look(*args: Any, **kwargs: Any) -> None:
            if not alive:
                time.sleep(0.3)  # the last send ends when the other rank has taken it
                alive.extend(not output.expired() for output in outputs)
            backward(*args, **kwargs)

        torch.autograd.backward = look  # this process is a fork and ends with the test
        for stage in model.stages.values():
            stage.module.register_forward_hook(
                lambda module, args, out: outputs.append(StorageWeakRef(out.untyped_storage()))
            )
        model.forward_backward(micro_batches(case, 0, 0))
        return alive

    assert fork_ranks(2, work, timeout=60)[0] == [False] * 4


@pytest.mark.parametrize("case", [Case(pp=2, nmb=2, zero=1), Case(pp=2, dp=2, v=2, nmb=2, zero=2), Case(dp=2, zero=3)])
def test_several_passes_add_up(case: Case) -> None:
    """Three passes of two micro-batches give the gradients of one pass of six: nothing is scaled at a pass's end."""
    six = replace(case, nmb=6, steps=1)

    def work(rank: int) -> dict[str, torch.Tensor]:
        model = make_model(case)
        grid = model.groups.grid
        batches = micro_batches(six, 0, grid.coordinates(rank).dp)
        local = [LocalBatch.of(b, rows, cp=1, cp_rank=0, tp=1, cp_split="head_tail") for b, rows in batches]
        every = [b for group in range(case.dp) for b, _ in micro_batches(six, 0, group)]
        scale = 1 / sum(int((b.labels >= 0).sum()) for b in every if b.labels is not None)
        for start in (0, 2, 4):
            model.pipeline.step(case.plan().schedule, local[start : start + 2], gradient_scale=scale)
        model.gradients.finish()
        return {name: grad for name, grad in model.whole_weights(gradients=True) if grad is not None}

    got = {name: grad for part in fork_ranks(case.world, work, timeout=60) for name, grad in part.items()}
    for name, want in reference(sequential(six)).gradients[0].items():
        error = torch.linalg.vector_norm(got[name][: len(want)] - want) / torch.linalg.vector_norm(want)
        assert error < 1e-5, name


def test_positions_travel_with_their_tokens() -> None:
    """Two documents of eight, cp 2: rank 0 looks up the rotary entries of its tokens, not 0, 1, 2 (Megatron 5243)."""
    tokens = torch.arange(16)
    rows = [[8, 8]]
    batch = Batch.from_rows(tokens, rows)
    parts = [LocalBatch.of(batch, rows, cp=2, cp_rank=rank, tp=3, cp_split="head_tail") for rank in (0, 1)]
    assert [part.num_tokens for part in parts] == [9, 9]  # eight each, padded to a multiple of tp
    assert parts[0].tokens.tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 0]
    assert parts[0].positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert parts[0].documents.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, -1]
    assert parts[1].positions.tolist() == [4, 5, 6, 7, 0, 1, 2, 3, 0]
    assert parts[1].labels is not None
    assert parts[1].labels.tolist() == [5, 6, 7, -1, 9, 10, 11, 12, -1]
    assert parts[0].key_order.tolist() == [0, 1, 2, 3, 9, 10, 11, 12, 13, 14, 15, 16, 4, 5, 6, 7]
