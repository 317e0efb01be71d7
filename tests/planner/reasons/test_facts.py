"""Every number of facts.md 5 and 6 that is arithmetic, by the planner's own functions.

What its sources, a study guide and the Scaling Book, have wrong there: test_wrong_numbers.py.
"""

from __future__ import annotations

import pytest

from fourfold.layout import generate, partition, play
from fourfold.planner.arithmetic import Bytes, count_parameters, count_stages, rank_bytes
from fourfold.planner.flops import flops_per_token
from fourfold.planner.memory.saved import load_rules, sizes
from fourfold.planner.reasons.cost import (
    DAY,
    FAILURES_PER_GPU_DAY,
    minimum_gpus,
    run_cost,
)
from fourfold.planner.reasons.thresholds import (
    best_fsdp_ways,
    fsdp_tokens_across_nodes,
    fsdp_tp_tokens,
    gather_seconds,
    tp_limit,
)
from fourfold.recipe import ModelConfig, preset
from tests.planner.jobs_of_tests import job
from tests.planner.textbook import all_reduce_seconds, compute_over_communication, seconds_at_mfu

H100, V5P = 9.9e14, 4.59e14  # FLOP/s as the texts round them
NVLINK, NIC, ICI = 450e9, 50e9, 1.8e11  # bytes/s one-way
TOTAL_70B = 6 * 70e9 * 15e12  # FLOPs
MODELS = ("llama3-8b", "llama3-70b", "llama3-405b")


def static(config: ModelConfig, *, tp: int, pp: int, dp: int, gradient_bytes: int = 4) -> float:
    """GB of a GPU under ZeRO-1: 16-bit weights, gradients, master weights and moments. Without gradient shards."""
    counts = count_stages(config, partition(config.num_layers, pp=pp), tp=tp, num_shards=dp)
    schedule = generate(pp=pp, num_micro_batches=2 * pp, kind="1f1b", zero=1)
    ranks: list[Bytes] = [
        rank_bytes(r, schedule=schedule, counts=counts, dtype="bfloat16", num_moments=2) for r in range(pp)
    ]
    return max(b.weights + b.gradients * gradient_bytes / 4 + b.master + b.optimizer for b in ranks) / 1e9


def activations(config: ModelConfig, *, rows: int, seq_len: int, tp: int = 1) -> float:
    """GB of all layers without recomputation, flash attention, sequence parallelism (algorithms.md 3.2)."""
    model = {name: getattr(config, name) for name in ("dim", "ffn_dim", "head_dim")}
    jobs = job(heads=config.num_heads, kv_heads=config.num_kv_heads, tp=tp, seq_len=seq_len, micro_batch=rows, **model)
    return float(sizes(jobs, load_rules("standard")).activations) * config.num_layers / 1e9


class TestParameters:
    """5.1."""

    @pytest.mark.parametrize(
        ("name", "attention", "ffn", "vocabulary", "norms", "total", "ffn_share"),
        [
            ("llama3-8b", 1.342, 5.637, 1.051, 0.27, 8_030_261_248, 70.2),
            ("llama3-70b", 12.080, 56.371, 2.101, 1.32, 70_553_706_496, 79.9),
            ("llama3-405b", 71.874, 329.773, 4.203, 4.15, 405_853_388_800, 81.3),
        ],
    )
    def test_by_component(
        self, name: str, attention: float, ffn: float, vocabulary: float, norms: float, total: int, ffn_share: float
    ) -> None:
        count = count_parameters(preset(name))
        assert count.attention / 1e9 == pytest.approx(attention, abs=5e-4)
        assert count.ffn / 1e9 == pytest.approx(ffn, abs=5e-4)
        assert (count.embedding + count.head) / 1e9 == pytest.approx(vocabulary, abs=6e-4)
        assert count.norms / 1e6 == pytest.approx(norms, abs=6e-3)
        assert count.total == total
        assert 100 * count.ffn / count.total == pytest.approx(ffn_share, abs=0.06)

    @pytest.mark.parametrize(
        ("name", "attention", "ffn"),
        [("llama3-8b", 41.94, 176.16), ("llama3-70b", 150.99, 704.64), ("llama3-405b", 570.43, 2617.25)],
    )
    def test_per_layer(self, name: str, attention: float, ffn: float) -> None:
        config = preset(name)
        count = count_parameters(config)
        assert count.attention / config.num_layers / 1e6 == pytest.approx(attention, abs=0.01)
        assert count.ffn / config.num_layers / 1e6 == pytest.approx(ffn, abs=0.01)


class TestFlops:
    """5.2."""

    @pytest.mark.parametrize(
        ("name", "six_p", "short", "long"),
        [
            ("llama3-8b", 0.0482, 0.0515, 0.1481),
            ("llama3-70b", 0.423, 0.4492, 0.9324),
            ("llama3-405b", 2.435, 2.524, 4.046),
        ],
    )
    def test_tflop_per_token(self, name: str, six_p: float, short: float, long: float) -> None:
        assert flops_per_token(preset(name), 8192)["6p"] / 1e12 == pytest.approx(six_p, rel=1e-3)
        assert flops_per_token(preset(name), 8192)["causal"] / 1e12 == pytest.approx(short, rel=1e-3)
        assert flops_per_token(preset(name), 131_072)["causal"] / 1e12 == pytest.approx(long, rel=1e-3)

    @pytest.mark.parametrize(("name", "nvidia"), list(zip(MODELS, (0.05148, 0.4488, 2.524), strict=True)))
    def test_nvidia(self, name: str, nvidia: float) -> None:
        """7: what NVIDIA's TFLOP/s over its tokens/s imply."""
        assert flops_per_token(preset(name), 8192)["causal"] / 1e12 == pytest.approx(nvidia, rel=1e-3)

    def test_attention_of_405b_at_131k(self) -> None:
        found = flops_per_token(preset("llama3-405b"), 131_072)
        assert found["causal"] / found["no_attention"] - 1 == pytest.approx(0.67, abs=0.005)

    def test_70b_on_one_gpu(self) -> None:
        per_token = flops_per_token(preset("llama3-70b"), 8192)["6p"]
        assert per_token / H100 == pytest.approx(0.42e-3, rel=0.02)
        assert seconds_at_mfu(TOTAL_70B, gpus=1, peak=H100, mfu=1) / DAY / 365.25 == pytest.approx(202, abs=1)

    def test_405b_by_its_model_card(self) -> None:
        """30.84M GPU-hours are 342 TFLOP/s, 85 % of 400; 15.6T tokens at 400 would be 67 days."""
        config = preset("llama3-405b")
        total = 15.6e12 * flops_per_token(config, 8192)["6p"]
        assert total / (30.84e6 * 3600) / 1e12 == pytest.approx(342, abs=1)
        assert total / (16_384 * 400e12) / DAY == pytest.approx(67, abs=0.2)


class TestThresholdsAndBubbles:
    """5.4. More of them: test_thresholds.py."""

    @pytest.mark.parametrize(
        ("pp", "nmb", "over_total", "over_compute"),
        [(2, 8, 11.1, 12.5), (4, 16, 15.8, 18.75), (8, 32, 17.9, 21.9), (16, 64, 19.0, 23.4)],
    )
    def test_bubbles(self, pp: int, nmb: int, over_total: float, over_compute: float) -> None:
        timeline = play(generate(pp=pp, num_micro_batches=nmb, kind="1f1b", messages=False))
        assert 100 * timeline.bubble_over_total == pytest.approx(over_total, abs=0.06)
        assert 100 * timeline.bubble_over_compute == pytest.approx(over_compute, abs=0.06)

    def test_fsdp_at_128_gpus(self) -> None:
        """31,250 tokens per GPU are far above 2,475: no conclusion from bandwidth."""
        assert 12 * fsdp_tokens_across_nodes(H100, NIC, gpus_per_node=8) < 31_250

    def test_405b_on_16384(self) -> None:
        """4.2: 1,024 tokens per GPU against 155 with pp16."""
        limit = fsdp_tokens_across_nodes(H100, NIC, gpus_per_node=8, spanned_nodes=16)
        assert limit < 16_777_216 / 16_384
        assert limit == pytest.approx(155, abs=1)
        per_gpu = count_parameters(preset("llama3-405b")).total / 128
        assert gather_seconds(4 * per_gpu, 128, NIC) == pytest.approx(0.25, abs=0.005)
        assert gather_seconds(2 * per_gpu, 128, NIC) == pytest.approx(0.13, abs=0.005)

    def test_quiz_of_the_book(self) -> None:
        """4.2, quiz 5.2: 70B on 4,096 GPUs at 45 %: 40 days; 976 tokens per GPU: too few for ZeRO-3, not for pp8."""
        seconds = seconds_at_mfu(TOTAL_70B, gpus=4096, peak=H100, mfu=0.45)
        assert seconds / DAY == pytest.approx(40, abs=0.1)
        per_gpu = 4e6 / 4096
        across = fsdp_tokens_across_nodes(H100, NIC, gpus_per_node=8)
        assert across / 8 < per_gpu < across
        assert 10 * 70e9 / 8 == 87.5e9  # bytes a GPU with tp8 alone, more than it has


class TestMemory:
    """5.5: 70B, tp8."""

    def test_plan_a(self) -> None:
        config = preset("llama3-70b")
        assert static(config, tp=8, pp=1, dp=16, gradient_bytes=2) == pytest.approx(41.9, abs=0.1)
        assert static(config, tp=8, pp=1, dp=16) == pytest.approx(59.5, abs=0.1)
        assert activations(config, rows=1, seq_len=8192, tp=8) == pytest.approx(22.5, abs=0.1)
        assert static(config, tp=8, pp=1, dp=16) + activations(config, rows=1, seq_len=8192, tp=8) > 80

    def test_plan_b(self) -> None:
        config = preset("llama3-70b")
        assert static(config, tp=8, pp=2, dp=8, gradient_bytes=2) == pytest.approx(24.3, abs=0.1)
        assert static(config, tp=8, pp=2, dp=8) == pytest.approx(33.1, abs=0.1)

    def test_megatrons_rule(self) -> None:
        """6 + 12 / dp bytes per parameter, 18 unsharded."""
        config = preset("llama3-70b")
        parameters = count_parameters(config).total / 8
        assert static(config, tp=8, pp=1, dp=16) == pytest.approx(parameters * (6 + 12 / 16) / 1e9, rel=1e-3)
        assert static(config, tp=8, pp=1, dp=1) == pytest.approx(parameters * 18 / 1e9, rel=1e-3)

    @pytest.mark.parametrize(("name", "per_value"), list(zip(MODELS, (34, 33.5, 31.75), strict=True)))
    def test_saved_bytes_per_value(self, name: str, per_value: float) -> None:
        """Facts leave out one number per token of every head and norm."""
        config = preset(name)
        values = 8192 * config.dim * config.num_layers
        assert activations(config, rows=1, seq_len=8192) * 1e9 / values == pytest.approx(per_value, abs=0.04)


class TestTables:
    """5.3, 5.7, 5.9 to 5.11."""

    @pytest.mark.parametrize(
        ("gpus", "mfu", "days", "million_dollars"),
        [
            (16_000, 0.40, 11.51, 8.84),
            (8_000, 0.45, 20.46, 7.86),
            (2_000, 0.50, 73.65, 7.07),
            (128, 0.50, 1150.8, 7.07),
        ],
    )
    def test_cost(self, gpus: int, mfu: float, days: float, million_dollars: float) -> None:
        found = run_cost(seconds=seconds_at_mfu(TOTAL_70B, gpus=gpus, peak=H100, mfu=mfu), gpus=gpus)
        assert found.days == pytest.approx(days, rel=1e-3)
        assert found.dollars / 1e6 == pytest.approx(million_dollars, rel=1e-3)
        assert found.gpu_hours == pytest.approx(1.768e6 / mfu, rel=1e-3)

    def test_70b_by_its_model_card(self) -> None:
        """7.0M GPU-hours are about 25 % effective."""
        pure = run_cost(seconds=seconds_at_mfu(TOTAL_70B, gpus=1, peak=H100, mfu=1), gpus=1)
        assert pure.gpu_hours / 7.0e6 == pytest.approx(0.25, abs=0.005)

    def test_minimum(self) -> None:
        found = minimum_gpus(preset("llama3-70b"), batch_tokens=4_000_000, hbm_bytes=80e9)
        assert found.gpus == 271
        seconds = seconds_at_mfu(TOTAL_70B, gpus=271, peak=H100, mfu=0.4)
        assert seconds / DAY == pytest.approx(681, abs=2)

    @pytest.mark.parametrize(
        ("name", "gpus", "gb"), [("llama3-8b", 32, 2.5), ("llama3-70b", 128, 5.5), ("llama3-405b", 16_384, 0.25)]
    )
    def test_fsdp_state(self, name: str, gpus: int, gb: float) -> None:
        """5.9, by its 10 bytes per parameter; 8B do not fit one GPU by 0.3 GB."""
        parameters = count_parameters(preset(name)).total
        assert 10 * parameters / gpus / 1e9 == pytest.approx(gb, rel=0.02)
        if name == "llama3-8b":
            assert 10 * parameters / 1e9 == pytest.approx(80.3, abs=0.05)


class TestExercises:
    """6."""

    def test_q1(self) -> None:
        """512 GPUs, 70B, 4M tokens."""
        config = preset("llama3-70b")
        per_gpu = 4e6 / 512
        assert per_gpu == pytest.approx(7812, abs=1)
        assert per_gpu > fsdp_tokens_across_nodes(H100, NIC, gpus_per_node=8)
        per_group = 4e6 / 8192 / 64
        assert per_group == pytest.approx(7.6, abs=0.05)  # no whole number of sequences: 512 of them make 8
        seconds = seconds_at_mfu(TOTAL_70B, gpus=512, peak=H100, mfu=0.4)
        assert seconds == pytest.approx(3.11e7, rel=2e-3)
        assert seconds / DAY == pytest.approx(359.6, abs=0.1)
        held = static(config, tp=8, pp=1, dp=64)
        assert held == pytest.approx(54.6, abs=0.1)
        assert held + activations(config, rows=1, seq_len=8192, tp=8) == pytest.approx(77, abs=0.2)
        moved = 6 * count_parameters(config).total / 8  # fp32 gradients out, 16-bit weights in
        assert moved / 1e9 == pytest.approx(52.9, abs=0.1)
        assert gather_seconds(moved, 64, NIC) == pytest.approx(1.04, abs=0.005)
        assert seconds_at_mfu(6 * 70e9 * 4e6, gpus=512, peak=H100, mfu=0.4) == pytest.approx(8.3, abs=0.05)

    def test_q2(self) -> None:
        """8B on 32 GPUs under the distributed optimizer, which is ZeRO-1: does not fit at 4 rows, nor at 1."""
        config = preset("llama3-8b")
        state = count_parameters(config).total / 32 / 1e9
        assert (16 * state, 18 * state) == (pytest.approx(4.0, abs=0.05), pytest.approx(4.5, abs=0.05))
        assert 4e6 / 32 == 125_000
        held = static(config, tp=1, pp=1, dp=32)
        assert held == pytest.approx(51, abs=0.3)
        one = activations(config, rows=1, seq_len=8192)
        assert one == pytest.approx(36.5, abs=0.1)
        assert activations(config, rows=4, seq_len=8192) == pytest.approx(146, abs=0.3)
        assert held + one == pytest.approx(88, abs=0.5)  # out of memory; under ZeRO-3 18 bytes / 32 are left
        assert 18 * state + one == pytest.approx(41, abs=0.3)
        assert 2 * 4 * 8192 * config.dim * config.num_layers / 1e9 == pytest.approx(8.6, abs=0.05)  # full recompute
        logits = 4 * 8192 * config.vocab_size
        assert (logits / 1e9, 2 * logits / 1e9) == (pytest.approx(4.2, abs=0.01), pytest.approx(8.4, abs=0.01))

    def test_q3(self) -> None:
        """405B on 16,384 GPUs."""
        config = preset("llama3-405b")
        total = 6 * 405e9 * 15e12
        assert total == pytest.approx(3.645e25)
        assert seconds_at_mfu(total, gpus=16_000, peak=H100, mfu=0.35) / DAY == pytest.approx(76.1, abs=0.1)
        assert total / (16_384 * 400e12) / DAY == pytest.approx(64.4, abs=0.1)
        per_group = 16_777_216 // 8192 // 128
        assert per_group == 16
        timeline = play(generate(pp=16, v=8, num_micro_batches=per_group, kind="afab", messages=False))
        assert 100 * timeline.bubble_over_compute == pytest.approx(11.7, abs=0.05)
        assert tp_limit(config.ffn_dim, H100, NVLINK) == pytest.approx(24, abs=0.3)
        per_gpu = count_parameters(config).total / 128 / 1e9
        parts = (2 * per_gpu, 4 * per_gpu, 12 * per_gpu / 128)
        assert parts == (pytest.approx(6.34, abs=0.01), pytest.approx(12.68, abs=0.01), pytest.approx(0.30, abs=0.01))
        assert sum(parts) == pytest.approx(19.3, abs=0.05)

    def test_q4(self) -> None:
        """128 GPUs, 70B, tp8 dp16: 0.66 s of all-reduce behind 17.7 s of backward."""
        mine = 2 * 70e9 / 8
        assert mine == 17.5e9
        assert all_reduce_seconds(mine, 16, NIC) * NIC == pytest.approx(32.8e9, rel=1e-3)
        assert 8 * all_reduce_seconds(mine, 16, NIC) * NIC == pytest.approx(262e9, rel=3e-3)  # of a node
        assert all_reduce_seconds(mine, 16, NIC) == pytest.approx(0.656, abs=1e-3)
        assert gather_seconds(2 * mine, 16, NIC) + gather_seconds(mine, 16, NIC) == pytest.approx(0.98, abs=5e-3)
        backward = 4 * 250_000 * 8.75e9 / (H100 * 0.5)
        assert backward == pytest.approx(17.7, abs=0.05)
        assert backward / all_reduce_seconds(mine, 16, NIC) == pytest.approx(27, abs=0.1)

    def test_book_6_1(self) -> None:
        """70B on 4 pods: 117 tokens a chip, half of what it takes; 11 days become 22."""
        tokens, chips = 4_194_304, 35_840
        assert tokens / chips == pytest.approx(117, abs=0.1)
        assert fsdp_tp_tokens(28_672, V5P, ICI, axes=(2, 1)) == pytest.approx(453, abs=1)
        share = compute_over_communication(tokens, chips, 28_672, V5P, ICI, axes=(2, 1))
        assert share == pytest.approx(0.51, abs=0.005)
        assert 44 / 4 / share == pytest.approx(22, abs=0.5)
        assert tokens / 4 == pytest.approx(1.05e6, rel=2e-3)

    def test_book_6_2(self) -> None:
        """405B on 8 pods at 40 %: 32 days; 234 tokens a chip against 244."""
        parameters = count_parameters(preset("llama3-405b")).total
        assert 6 * parameters == pytest.approx(2.43e12, rel=3e-3)
        total = 6 * parameters * 15e12
        assert total == pytest.approx(3.65e25, rel=2e-3)
        assert seconds_at_mfu(total, gpus=8 * 8960, peak=V5P, mfu=0.4) / DAY == pytest.approx(32, abs=0.3)
        per_chip = 16_777_216 / (8 * 8960)
        assert per_chip == pytest.approx(234, abs=0.1)
        assert fsdp_tp_tokens(53_248, V5P, ICI, axes=(2, 1)) == pytest.approx(244, abs=0.5)


def test_failures_of_llama3() -> None:
    years = 1 / FAILURES_PER_GPU_DAY / 365.25
    assert years == pytest.approx(5.8, abs=0.05)


def test_best_ways_of_the_book() -> None:
    """4.1: X_opt 1618, rounded to 2,048 ways of FSDP and 4 of TP."""
    assert best_fsdp_ways(4_194_304, 8960, 28_672, axes=(2, 1)) == pytest.approx(1618, abs=3)
