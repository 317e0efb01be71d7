"""What ranks measure together, with logs and sleeps of known length."""

from __future__ import annotations

import time

import pytest
import torch

from fourfold.layout import Action, Kind, play
from fourfold.layout.actions import COMPUTE
from fourfold.model import Batch
from fourfold.parallel import LoggedAction, MicroBatch, StepTotals, connect
from fourfold.planner import count_parameters
from fourfold.recipe import RunPlan, check, from_table
from fourfold.trainer import meter as module
from fourfold.trainer.meter import Meter, pipeline_times
from fourfold.trainer.metrics import StepMetrics
from fourfold.trainer.ranks import fork_ranks

UNIT = 1.0  # seconds of a forward in logs that are written and not lived through; a backward takes two
CPU = torch.device("cpu")


def plan_of(**sections: dict[str, object]) -> RunPlan:
    return check(from_table(sections))


def micro_batch(*rows: list[int]) -> MicroBatch:
    tokens = torch.zeros(sum(map(sum, rows)), dtype=torch.int64)
    return Batch.from_rows(tokens, rows), rows


def end(meter: Meter, log: tuple[LoggedAction, ...], micro_batches: list[MicroBatch], **changed: int) -> StepMetrics:
    given = {"step": 1, "num_tokens": 128, "tokens": 128, "samples": 8, "skipped": 0} | changed
    return meter.end(StepTotals(5.5, 120, log), micro_batches, grad_norm=1.0, lr=0.1, **given)


def played_log(plan: RunPlan, pp_rank: int, began: int) -> tuple[LoggedAction, ...]:
    """The log of a pipeline rank whose computations take exactly what the plan says: it waits whenever it must."""
    timeline = play(plan.schedule, forward=UNIT, backward=2 * UNIT)
    now, log = 0.0, []
    for action in plan.schedule.actions[pp_rank]:
        if action.kind in COMPUTE:
            start, stop = timeline.span(action)
            nanoseconds = (began + int(1e9 * now), began + int(1e9 * stop), int(1e9 * (start - now)))
            log.append(LoggedAction(action, *nanoseconds))
            now = stop
    return tuple(log)


def test_four_ranks_agree_on_a_step() -> None:
    """pp2 dp2: the idle share is that of the plan; the parts are means, the step is the longest rank's."""
    plan = plan_of(layout={"pp": 2, "dp": 2}, batch={"sequences": 8, "seq_len": 16}, pipeline={"schedule": "1f1b"})
    documents = ([16], [4, 12])  # of each row in a data-parallel group

    def work(rank: int) -> list[StepMetrics]:
        groups = connect(plan.grid, "cpu")
        place = groups.coordinates
        meter, found = Meter(plan, groups, CPU), []
        meter.begin()
        log = played_log(plan, place.pp, time.monotonic_ns())
        with meter.part("data"):
            time.sleep(0.02 * rank)
        with meter.part("forward_backward"):
            time.sleep(0.15)
        time.sleep(0.05)
        found.append(end(meter, log, [micro_batch(documents[place.dp])] * 4))
        with meter.part("checkpoint"):  # after the metrics of the step that it saves: it delays the next one
            time.sleep(0.04)
        found.append(end(meter, (), [micro_batch(documents[place.dp])] * 4, step=2, samples=16, skipped=1))
        return found

    by_rank = fork_ranks(4, work, timeout=60)
    assert all(found == by_rank[0] for found in by_rank)
    first, second = by_rank[0]
    assert 0.26 <= first.step_seconds < 1  # of rank 3
    assert 0.03 <= first.data_seconds < 0.1  # (0 + 20 + 40 + 60) / 4 ms
    assert 0.15 <= first.forward_backward_seconds < 0.5
    assert (first.optimizer_seconds, first.checkpoint_seconds) == (0.0, 0.0)
    assert first.other_seconds >= 0.05
    assert first.tokens_per_second == 128 / first.step_seconds
    # 1F1B, pp2, 4 micro-batches: each rank works 12 units of the 15 that the pipeline takes (r = 1/4, f = 1/5).
    assert plan.num_micro_batches == 4
    assert first.idle_share is not None
    assert first.idle_share * first.step_seconds == pytest.approx(3 * UNIT, abs=0.2)
    assert first.idle_share_max is not None
    assert first.idle_share_max * first.step_seconds == pytest.approx(3 * UNIT, abs=0.2)
    assert first.attention_pairs == 4 * 136 + 4 * (10 + 78)
    scores = plan.config.num_layers * plan.config.num_heads * plan.config.head_dim * first.attention_pairs
    products = count_parameters(plan.config).total - plan.config.vocab_size * plan.config.dim
    assert first.model_flops_per_second * first.step_seconds == pytest.approx(6 * products * 128 + 12 * scores)
    assert (first.mfu_6p, first.mfu_attention) == (None, None)  # of a CPU nobody knows the peak
    assert 10**7 < first.peak_memory_bytes < 10**11
    assert (second.step, second.samples, second.skipped) == (2, 16, 1)
    assert 0.04 <= second.checkpoint_seconds <= second.step_seconds
    assert second.idle_share == pytest.approx(0)


def test_waiting_and_the_end_of_a_log() -> None:
    log = (
        LoggedAction(Action(Kind.FORWARD, 0, 0), 1_000_000_000, 3_000_000_000, 500_000_000),
        LoggedAction(Action(Kind.BACKWARD, 0, 0), 3_000_000_000, 9_000_000_000, 1_500_000_000),
    )
    assert pipeline_times(log, 1_000_000_000) == (2.0, 8.0)
    assert pipeline_times((), 1_000_000_000) == (0.0, 0.0)


def test_mfu_of_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device is called is all that is pretended here; the numbers are those of the table."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 << 30)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    plan = plan_of(train={"dtype": "bfloat16"}, batch={"sequences": 8, "seq_len": 16})

    def work(rank: int) -> StepMetrics:
        meter = Meter(plan, connect(plan.grid, "cpu"), torch.device("cuda", 0))
        meter.begin()
        with meter.part("forward_backward"):
            time.sleep(0.01)
        return end(meter, (), [micro_batch([16])] * 8)

    (found,) = fork_ranks(1, work, timeout=60)
    assert found.mfu_6p == pytest.approx(6 * 329_280 * 128 / found.step_seconds / 989.4e12)
    assert found.mfu_attention == pytest.approx(found.model_flops_per_second / 989.4e12)
    assert found.peak_memory_bytes == 5 << 30
    assert (found.idle_share, found.idle_share_max) == (None, None)  # the host does not wait for what a GPU waits for


def test_an_unknown_gpu_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X9000")
    assert module.gpu_of(torch.device("cuda", 0)) is None
    assert module.gpu_of(CPU) is None
