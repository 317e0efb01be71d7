"""Money, checkpoints and failures against the sources' figures and against a simulation of failures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fourfold.planner.machines.cluster import cluster
from fourfold.planner.reasons.cost import (
    DAY,
    HOUR,
    checkpoint_bytes,
    checkpointing,
    daly,
    goodput,
    gpus_for_state,
    mean_time_between_failures,
    minimum_gpus,
    run_cost,
    young,
)
from fourfold.recipe import preset
from tests.planner.textbook import seconds_at_mfu

MTBF = 3.1 * HOUR  # of Llama 3's cluster: facts.md 1, row 24


class TestMoney:
    def test_twice_the_gpus_cost_the_same(self) -> None:
        one = run_cost(seconds=seconds_at_mfu(6e23, gpus=1000, peak=1e15, mfu=0.5), gpus=1000)
        two = run_cost(seconds=seconds_at_mfu(6e23, gpus=2000, peak=1e15, mfu=0.5), gpus=2000)
        assert one.dollars == pytest.approx(two.dollars)
        assert one.days == pytest.approx(2 * two.days)
        assert one.gpu_hours == pytest.approx(6e23 / 0.5e15 / 3600)

    def test_goodput_costs(self) -> None:
        whole, less = (run_cost(seconds=DAY, gpus=8, goodput=g, dollars_per_gpu_hour=3) for g in (1.0, 0.9))
        assert (whole.days, whole.gpu_hours, whole.dollars) == (1, 192, 576)
        assert less.dollars == pytest.approx(640)

    @pytest.mark.parametrize("wrong", [0, -1, 1.1, math.nan])
    def test_refusals(self, wrong: float) -> None:
        with pytest.raises(ValueError, match=r"goodput = .*: must be above 0 and at most 1"):
            run_cost(seconds=1, gpus=1, goodput=wrong)


class TestFailures:
    def test_rate_of_llama3(self) -> None:
        """facts.md 1, row 24: 419 in 54 days on 16,384 GPUs are 7.8 a day, one in 3.1 hours; 17 % per GPU and year."""
        between = mean_time_between_failures(16_384)
        assert between / HOUR == pytest.approx(3.1, abs=0.01)
        assert DAY / between == pytest.approx(7.8, abs=0.05)
        assert 365.25 * DAY / between / 16_384 == pytest.approx(0.17, abs=0.005)
        assert DAY / mean_time_between_failures(128) == pytest.approx(0.061, abs=0.001)  # facts.md 5.7
        assert mean_time_between_failures(128) / DAY == pytest.approx(16.5, abs=0.1)

    def test_rate_of_the_guide_is_nine_times_too_low(self) -> None:
        """2 % per GPU and year would be 0.9 failures a day at 16,384 GPUs, and 0.007 at 128."""
        guide = 0.02 / 365.25
        assert DAY / mean_time_between_failures(16_384, failures_per_gpu_day=guide) == pytest.approx(0.9, abs=0.01)
        assert DAY / mean_time_between_failures(128, failures_per_gpu_day=guide) == pytest.approx(0.007, abs=2e-4)
        assert 419 / 54 / (16_384 * guide) == pytest.approx(9, abs=0.5)

    @pytest.mark.parametrize(("stall", "minutes", "waste"), [(10, 7.9, 0.04), (60, 19, 0.10), (120, 27, 0.15)])
    def test_young(self, stall: float, minutes: float, waste: float) -> None:
        """facts.md 3.5."""
        interval = young(stall, MTBF)
        assert interval / 60 == pytest.approx(minutes, abs=0.5)
        assert 1 - goodput(interval=interval, stall=stall, between_failures=MTBF) == pytest.approx(waste, abs=0.006)

    @pytest.mark.parametrize(("stall", "seconds"), [(5, 330), (60, 1120)])
    def test_daly(self, stall: float, seconds: float) -> None:
        """algorithms.md 3.9."""
        assert daly(stall, MTBF) == pytest.approx(seconds, abs=5)

    def test_daly_where_saving_takes_longer_than_living(self) -> None:
        assert daly(3 * MTBF, MTBF) == MTBF

    def test_500_steps_are_too_many(self) -> None:
        """facts.md 3.5: 500 steps of 6.2 s are 52 min, where a save of 60 s should come every 19."""
        assert pytest.approx(52, abs=0.5) == 500 * 6.2 / 60
        losses = [1 - goodput(interval=i, stall=60, between_failures=MTBF) for i in (daly(60, MTBF), 500 * 6.2)]
        assert losses[1] > 1.4 * losses[0]

    def test_restarts(self) -> None:
        """algorithms.md 3.9: 10 minutes alone cost 5.4 %."""
        without, with_restart = (goodput(interval=1e3, stall=5, between_failures=MTBF, restart=r) for r in (0, 600))
        assert without - with_restart == pytest.approx(0.054, abs=0.001)
        assert goodput(interval=10, stall=20, between_failures=30) == 0

    def test_goodput_of_a_simulated_run(self) -> None:
        """Failures drawn one by one: what was done since the last save is done again."""
        stall, restart, interval = 60.0, 300.0, 1200.0
        lives = np.random.default_rng(3).exponential(MTBF, 20_000)
        saved = np.floor(np.maximum(0, lives - restart) / (interval + stall)) * interval
        found = goodput(interval=interval, stall=stall, between_failures=MTBF, restart=restart)
        assert saved.sum() / lives.sum() == pytest.approx(found, abs=0.015)


class TestCheckpointing:
    def test_405b(self) -> None:
        found = checkpointing(preset("llama3-405b"), cluster("h100", 16_384), step_seconds=6.3)
        assert found.bytes == 12 * 405_853_388_800
        assert 1e6 < found.bytes_per_gpu < 4e9  # facts.md 3.4: 1 MB to 4 GB per GPU
        assert found.bytes_per_gpu == pytest.approx(0.297e9, rel=0.01)
        assert found.stall_seconds == 5
        assert found.interval_seconds == pytest.approx(330, abs=6)
        assert found.interval_steps == round(found.interval_seconds / 6.3)
        assert found.goodput == pytest.approx(1 - found.lost_to_saves - found.lost_to_failures)
        assert 0.9 < found.goodput < 0.95  # 2407.21783, 3.3.4: more than 90 % effective

    def test_a_known_stall(self) -> None:
        config, machine = preset("llama3-405b"), cluster("h100", 16_384)
        found = checkpointing(config, machine, step_seconds=6.3, stall=60)
        assert found.interval_seconds == pytest.approx(1120, abs=10)

    def test_a_slow_step(self) -> None:
        found = checkpointing(preset("llama3-8b"), cluster("h100", 8), step_seconds=1e9)
        assert found.interval_steps == 1

    def test_host_memory(self) -> None:
        """pains P23: a synchronous save staged hundreds of GB on a node and killed the job."""
        found = checkpointing(preset("llama3-405b"), cluster("h100", 16), step_seconds=100)
        assert found.host_bytes_per_node == pytest.approx(12 * 405.85e9 / 2, rel=1e-3)
        line = found.host_line(2 * 2**40)
        assert line == found.host_line()  # a DGX H100's
        assert "takes 2,268 GiB on each node; in 2,048 GiB that does not fit" in line
        many = checkpointing(preset("llama3-405b"), cluster("h100", 16_384), step_seconds=6)
        assert many.host_line(2 * 2**40).endswith("takes 2 GiB on each node; in 2,048 GiB that fits.")


def test_checkpoint_bytes() -> None:
    """facts.md 1, row 23: 70B take 0.84 TB, not 1.12; 14 bytes with a 16-bit copy."""
    assert checkpoint_bytes(70_000_000_000) == 0.84e12
    assert checkpoint_bytes(70_000_000_000, copy_16_bit=True) == 0.98e12
    assert checkpoint_bytes(70_553_706_496) == pytest.approx(0.847e12, rel=1e-3)


class TestMinimum:
    def test_the_teaching_figure(self) -> None:
        """facts.md 5.3: 140 GB + 560 GB + 20.97 TB of 70B, 271 GPUs of 80 GB."""
        found = minimum_gpus(preset("llama3-70b"), batch_tokens=4_000_000, hbm_bytes=80e9)
        assert found.weights == pytest.approx(140e9, rel=0.01)
        assert found.optimizer == pytest.approx(560e9, rel=0.01)
        assert found.activations == pytest.approx(20.97e12, rel=1e-3)
        assert found.total == pytest.approx(21.67e12, rel=1e-3)
        assert found.gpus == 271

    def test_three_per_layer(self) -> None:
        """facts.md 4.1: the book's text says 3 checkpoints per layer, its number is that of 4; 3 give 15.7 TB."""
        found = minimum_gpus(preset("llama3-70b"), batch_tokens=4_000_000, hbm_bytes=80e9, saved_per_layer=3)
        assert found.activations == pytest.approx(15.7e12, rel=2e-3)

    def test_state_alone(self) -> None:
        """facts.md 4.2, quiz 5.2: at least 9 GPUs for 70B with 10 bytes a parameter; with all that is kept, 16."""
        assert gpus_for_state(70_000_000_000, hbm_bytes=80e9, bytes_per_parameter=10) == 9
        assert gpus_for_state(70_553_706_496, hbm_bytes=80e9) == 16
