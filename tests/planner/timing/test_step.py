"""The closed form of a step against schedules that are played, partitions that are counted, and published runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from fourfold.layout import generate, partition, play
from fourfold.planner.imbalance import Documents, Imbalance
from fourfold.planner.jobs import ORDER_NAMES, Jobs, Order, Precision, Recompute, Split
from fourfold.planner.timing.stack import load_stack
from fourfold.planner.timing.step import bubble_chunks, parts, stage_layers, step_time
from tests.planner.jobs_of_tests import job

STANDARD = load_stack("standard")
FAST_LINKS = replace(
    STANDARD,
    constants=replace(
        STANDARD.constants, latency=np.asarray(1e-12), p2p=np.asarray(0.0), fixed=np.asarray(0.0), slow=np.asarray(0.0)
    ),
)


def seconds(jobs: Jobs, stack=STANDARD) -> float:
    return float(step_time(jobs, stack).seconds)


class TestStages:
    @pytest.mark.parametrize("split", [Split.EVEN, Split.ENDS_LIGHT])
    def test_layers_of_ranks_are_those_of_partition(self, split):
        for layers, pp, v in product((1, 6, 7, 26, 30, 32, 80, 96, 105, 126), (1, 2, 3, 4, 8, 16), (1, 2, 4, 7, 8)):
            stages = partition(layers, pp=pp, v=v, split=split.name.lower())
            of_rank = [sum(len(stage.layers) for stage in stages[rank::pp]) for rank in range(pp)]
            first, last, middle = stage_layers(job(layers=layers, pp=pp, v=v, split=split))
            if layers < pp:  # some ranks have none: nobody trains so
                continue
            assert (first, last) == (of_rank[0], of_rank[-1]), (layers, pp, v)
            assert middle == max(of_rank[1:-1] or of_rank) or pp == 2, (layers, pp, v)


class TestBubble:
    @pytest.mark.parametrize("order", [Order.AFAB, Order.ONE_F_ONE_B, Order.INTERLEAVED, Order.FLEXIBLE])
    def test_as_played(self, order):
        """Equal stages, F = 1, B = 2: idle chunks of a rank are idle time over v (F + B)."""
        for pp, v, micro_batches in product((2, 3, 4, 8), (1, 2, 4), (1, 2, 3, 4, 6, 8, 12, 16)):
            if (order is Order.ONE_F_ONE_B and v > 1) or (order is Order.INTERLEAVED and v == 1):
                continue
            schedule = generate(pp=pp, v=v, num_micro_batches=micro_batches, kind=ORDER_NAMES[order])
            timeline = play(schedule, forward=1.0, backward=2.0)
            idle = timeline.step_time - timeline.compute.max()
            chunks = bubble_chunks(job(pp=pp, v=v, sequences=micro_batches, order=order))
            assert idle / 3 == pytest.approx(float(chunks)), (pp, v, micro_batches)

    def test_of_production(self):
        """16 stages of 8 chunks: 5.9 % of computing time with 32 micro-batches, 11.7 % with 16 (facts.md 2.3)."""
        for micro_batches, share in ((32, 0.0586), (16, 0.1172)):
            jobs = job(
                "405b",
                layers=128,
                tp=8,
                pp=16,
                v=8,
                sequences=micro_batches,
                order=Order.INTERLEAVED,
                vocab=1,
                padded_vocab=8,
            )
            time = step_time(jobs, FAST_LINKS)
            computing = sum(
                time.breakdown()[name] for name in ("matmul", "attention", "memory_bound", "launch", "tp", "head")
            )
            assert time.bubble / computing == pytest.approx(share, rel=0.04)

    def test_zero_bubble_has_less_of_it(self):
        usual = step_time(job(pp=8, sequences=16), STANDARD)
        zero = step_time(job(pp=8, sequences=16, order=Order.ZB_H1), STANDARD)
        assert (
            0.5 < zero.bubble / usual.bubble < 0.85
        )  # F + B - 2 W of F + B, where W is half of the products' backward


class TestStep:
    def test_breakdown_sums_to_the_step(self):
        columns = {"tp": np.array([1, 8, 4, 2]), "pp": np.array([1, 16, 4, 2]), "dp": np.array([8, 1, 2, 4])}
        for zero, recompute in product((0, 1, 2, 3), Recompute):
            jobs = job("70b", **columns, v=np.array([1, 5, 2, 1]), sequences=64, zero=zero, recompute=recompute)
            time = step_time(jobs, STANDARD)
            assert sum(time.breakdown().values()) == pytest.approx(time.seconds)
            assert all(np.all(part > -1e-9) for name, part in time.breakdown().items() if name != "head")

    def test_shares_of_a_layer_sum_to_one(self):
        p = parts(job("405b", tp=8, cp=2, dp=4, zero=3, recompute=Recompute.FULL), STANDARD)
        names = ("matmul", "attention", "memory_bound", "launch", "recompute", "tp", "cp", "dp", "imbalance")
        assert sum(getattr(p, name) for name in names) == pytest.approx(1)

    def test_a_second_is_a_second(self):
        """What is added per step is added as seconds, and inflated like the rest."""
        longer = replace(STANDARD, constants=replace(STANDARD.constants, fixed=STANDARD.constants.fixed + 1.0))
        jobs = job(dp=64, sequences=64)
        inflation = float(parts(jobs, STANDARD).inflation)
        assert seconds(jobs, longer) - seconds(jobs) == pytest.approx(inflation)

    def test_recomputation_costs_in_order(self):
        kinds = (Recompute.NONE, Recompute.SELECTIVE, Recompute.MATMULS, Recompute.FULL)
        times = [seconds(job("70b", tp=8, dp=8, sequences=64, recompute=kind)) for kind in kinds]
        assert times == sorted(times)
        assert 1.25 < times[-1] / times[0] < 1.36  # a third of forward and backward
        half = seconds(job("70b", tp=8, dp=8, sequences=64, recompute=Recompute.FULL, recomputed_layers=0.5))
        assert half == pytest.approx((times[0] + times[-1]) / 2, rel=0.01)

    def test_zero3_is_never_faster_than_zero1(self):
        for dp, micro_batch in product((8, 64, 512), (1, 4)):
            common = {"dp": dp, "micro_batch": micro_batch, "sequences": 4 * dp * micro_batch}
            assert seconds(job("70b", **common, zero=1)) <= seconds(job("70b", **common, zero=3))

    def test_fsdp_is_bound_by_the_network_below_its_threshold(self):
        """70B on 1,024 H100 with ZeRO-3: 8,192 tokens per GPU and gather hide it (2,475 needed), 1,024 do not."""
        many = step_time(job("70b", dp=1024, sequences=1024, zero=3), STANDARD)
        few = step_time(job("70b", dp=1024, sequences=1024, seq_len=1024, zero=3), STANDARD)
        assert many.dp / many.seconds < 0.3
        assert few.dp / few.seconds > 0.5

    def test_more_work_takes_longer(self):
        batches = step_time(job("70b", tp=8, pp=4, sequences=np.array([4, 8, 16, 32])), STANDARD).seconds
        assert np.all(np.diff(batches) > 0)
        sequences = [seconds(job(seq_len=length)) for length in (1024, 4096, 16384)]
        assert sequences == sorted(sequences)

    def test_chips_in_order(self):
        times = [seconds(job(chip=chip, dp=8, sequences=32)) for chip in ("v100", "a100", "h100", "b200")[1:]]
        assert times == sorted(times, reverse=True)
        assert seconds(job("70b", tp=8, precision=Precision.FP8)) < seconds(job("70b", tp=8))

    def test_uneven_stages_are_bound_by_the_longest(self):
        """9 layers on 4 ranks: the rank with 3 decides, as with 12 layers on 4."""
        nine, twelve = (job("405b", layers=layers, tp=8, pp=4, sequences=256, padded_vocab=8) for layers in (9, 12))
        assert seconds(nine, FAST_LINKS) == pytest.approx(seconds(twelve, FAST_LINKS), rel=0.02)

    def test_documents_and_their_imbalance(self):
        """Fewer pairs, and all wait for the rank that has most of them."""
        documents = Imbalance(Documents.parse("mean=1024,dist=exponential"), 131072)
        jobs = job("405b", tp=8, cp=16, dp=2, seq_len=131072, sequences=2)
        masked = jobs.replace(pairs=documents.pairs_per_sequence)
        even = step_time(masked, STANDARD)
        real = step_time(masked, STANDARD, imbalance=documents)
        assert even.seconds < real.seconds < step_time(jobs, STANDARD).seconds
        assert real.imbalance / real.attention == pytest.approx(float(documents.factor(masked)) - 1)

    def test_given_parts_are_used(self):
        jobs = job("70b", tp=8, sequences=8)
        assert step_time(jobs, STANDARD, parts(jobs, STANDARD)).seconds == step_time(jobs, STANDARD).seconds


class TestLlama3:
    """405B on H100 with 16M tokens a step: Herd table 4, facts.md 2.8."""

    @staticmethod
    def production(gpus: int, seq_len: int = 8192, cp: int = 1) -> Jobs:
        dp = gpus // (8 * 16 * cp)
        sequences = 2**24 // seq_len
        first = sequences // dp >= 32
        return job(
            "405b", tp=8, cp=cp, pp=16, dp=dp, v=8, seq_len=seq_len, sequences=sequences, split=Split.ENDS_LIGHT,
            order=Order.INTERLEAVED if first else Order.AFAB, zero=1 if first else 2,
        )  # fmt: skip

    @pytest.mark.parametrize("name", ["standard", "meta"])
    def test_16384_gpus_at_8k_take_6_2_to_6_5_seconds(self, name):
        """400 TFLOPs per GPU: 6.23 s by 6 P, 6.46 s with causal attention. Neither stack was fitted on this row."""
        assert 0.95 * 6.2 < seconds(self.production(16384), load_stack(name)) < 1.05 * 6.5

    @pytest.mark.parametrize(("name", "within"), [("meta", 0.05), ("standard", 0.08)])
    def test_131k_reaches_380_tflops(self, name, within):
        """By the convention 6 (P - V D) + causal attention: 4.05 TFLOPs per token (facts.md 5.2)."""
        per_token = 6 * (405_853_388_800 - 128256 * 16384) + 6 * 126 * 131072 * 16384
        reached = per_token * 2**24 / 16384 / seconds(self.production(16384, 131072, 16), load_stack(name)) / 1e12
        assert reached == pytest.approx(380, rel=within)

    def test_8192_gpus_reach_430(self):
        per_token = 6 * (405_853_388_800 - 128256 * 16384) + 6 * 126 * 8192 * 16384
        reached = per_token * 2**24 / 8192 / seconds(self.production(8192), load_stack("meta")) / 1e12
        assert reached == pytest.approx(430, rel=0.05)

    def test_tp_and_cp_are_exposed(self):
        time = step_time(self.production(16384, 131072, 16), load_stack("meta"))
        assert 0.05 < time.tp / time.seconds < 0.15
        assert 0.03 < time.cp / time.seconds < 0.1  # ISCA: 7.64 % exposed, waiting included

    def test_flexible_order_gains_a_percent_over_1f1b(self):
        """ISCA figure 9: 401.7 against 398.5 TFLOPs, 0.8 %, with 26 layers on pp = 4, v = 7 and 12 micro-batches."""
        shape = {"layers": 26, "tp": 8, "pp": 4, "dp": 4, "v": 7, "sequences": 48, "split": Split.ENDS_LIGHT}
        interleaved = seconds(job("405b", **shape, order=Order.INTERLEAVED, nc=4), load_stack("meta"))
        flexible = seconds(job("405b", **shape, order=Order.FLEXIBLE, nc=6), load_stack("meta"))
        assert 0.002 < interleaved / flexible - 1 < 0.05


GPT3 = {"layers": 96, "dim": 12288, "heads": 96, "kv_heads": 96, "head_dim": 128, "ffn_dim": 4 * 12288, "gated": False,
        "vocab": 51200, "padded_vocab": 51200, "tied": True, "positions": 2048, "seq_len": 2048, "zero": 0,
        "gradient_bytes": 2, "reduce_bytes": 2, "fused_attention": False, "chip": "a100",
        "precision": Precision.FP16}  # fmt: skip


class TestGpt3:
    """peers-measured.md 2.1; J4 is of a source that no constant was fitted on."""

    def test_j4_without_and_with_sequence_parallelism(self):
        """Korthikanti table 5: 175B on 64 A100, tp8 pp8 v3, 64 sequences: 18.13 s with everything computed again,
        13.75 s with sequence parallelism and only the core of attention computed again."""
        layout = {"tp": 8, "pp": 8, "v": 3, "sequences": 64, "order": Order.INTERLEAVED}
        stack = load_stack("megatron-2021")
        full = job(**GPT3, **layout, sequence_parallel=False, recompute=Recompute.FULL)
        selective = job(**GPT3, **layout, sequence_parallel=True, recompute=Recompute.SELECTIVE)
        assert seconds(full, stack) == pytest.approx(18.13, rel=0.05)
        assert seconds(selective, stack) == pytest.approx(13.75, rel=0.05)

    @pytest.mark.parametrize(("micro_batch", "measured"), [(2, 55.11), (3, 56.18), (4, 58.24)])
    def test_j5(self, micro_batch, measured):
        """vTrain: 175B on 512 A100, tp8 dp8 pp8, 1,536 sequences, all computed again."""
        jobs = job(
            **GPT3, tp=8, pp=8, dp=8, sequences=1536, micro_batch=micro_batch, sequence_parallel=False,
            recompute=Recompute.FULL, nic=12.5e9,
        )  # fmt: skip
        assert seconds(jobs, load_stack("megatron-2021")) == pytest.approx(measured, rel=0.05)


def test_a_hundred_thousand_layouts_a_second():
    """Far more, in fact: the sweep has to walk memory, too."""
    import time

    count = 50_000
    random = np.random.default_rng(0)
    columns = {name: 2 ** random.integers(0, 4, count) for name in ("tp", "cp", "pp", "dp", "v", "micro_batch")}
    jobs = job("405b", **columns, sequences=2048, zero=random.integers(0, 4, count))
    step_time(jobs, STANDARD)
    start = time.process_time()
    step_time(jobs, STANDARD)
    assert count / (time.process_time() - start) > 200_000
