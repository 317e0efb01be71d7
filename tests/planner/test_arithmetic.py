"""Parameters and bytes against published totals, hand arithmetic, and the sum over ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fourfold.layout import generate, partition
from fourfold.planner import (
    StageCount,
    count_parameters,
    count_stages,
    count_trained,
    moments_per_parameter,
    on_tensor_rank,
    rank_bytes,
)
from fourfold.recipe import ModelConfig, parameter_shapes, preset

LLAMA3 = ("llama3-8b", "llama3-70b", "llama3-405b")


class TestWholeModel:
    @pytest.mark.parametrize(
        ("name", "total"),
        [
            ("llama3-8b", 8_030_261_248),  # facts.md 5.1; also the parameter counts of the published checkpoints
            ("llama3-70b", 70_553_706_496),
            ("llama3-405b", 405_853_388_800),
            ("llama3.2-1b", 1_235_814_400),  # safetensors index of the published checkpoints
            ("llama3.2-3b", 3_212_749_824),
        ],
    )
    def test_published_totals(self, name: str, total: int) -> None:
        assert count_parameters(preset(name)).total == total

    @pytest.mark.parametrize(
        ("name", "attention_a_layer", "ffn_a_layer", "vocabulary", "norms"),
        [
            ("llama3-8b", 41.94e6, 176.16e6, 1.051e9, 0.27e6),
            ("llama3-70b", 150.99e6, 704.64e6, 2.101e9, 1.32e6),
            ("llama3-405b", 570.43e6, 2617.25e6, 4.203e9, 4.15e6),
        ],
    )
    def test_components(
        self, name: str, attention_a_layer: float, ffn_a_layer: float, vocabulary: float, norms: float
    ) -> None:
        config = preset(name)
        count = count_parameters(config)
        assert count.attention / config.num_layers == pytest.approx(attention_a_layer, rel=1e-4)
        assert count.ffn / config.num_layers == pytest.approx(ffn_a_layer, rel=1e-4)
        assert count.embedding + count.head == pytest.approx(vocabulary, rel=1e-3)
        assert count.norms == pytest.approx(norms, rel=2e-2)

    def test_ffn_share(self) -> None:
        shares = [count_parameters(preset(n)).ffn / count_parameters(preset(n)).total for n in LLAMA3]
        assert shares == pytest.approx([0.702, 0.799, 0.813], abs=5e-4)

    @pytest.mark.parametrize("tied", [True, False])
    def test_the_formula_is_the_sum_of_the_shapes(self, tied: bool) -> None:
        config = ModelConfig(48, 3, 6, 2, 72, 261, head_dim=10, tied=tied)
        shapes = sum(math.prod(shape) for shape in parameter_shapes(config).values())
        padding = (config.padded_vocab - config.vocab_size) * config.dim * (1 if tied else 2)
        assert count_parameters(config).total == shapes - padding == count_trained(config, ())

    def test_trained(self) -> None:
        config = preset("tiny")
        embedding = 260 * 64
        assert count_trained(config, ["tok_embeddings"]) == count_parameters(config).total - embedding
        assert count_trained(config, ["tok_embeddings", "layers", "norm"]) == embedding  # the head, as large


class TestOnOneTensorRank:
    @pytest.mark.parametrize(
        ("name", "tp", "shape"),
        [
            ("tok_embeddings.weight", 4, (68, 64)),  # 272 rows
            ("output.weight", 4, (68, 64)),
            ("layers.3.attention.wq.weight", 4, (16, 64)),
            ("layers.3.attention.wk.weight", 2, (16, 64)),
            ("layers.3.attention.wk.weight", 4, (32, 64)),  # 2 key-value heads on 4 ranks: whole
            ("layers.3.attention.wv.weight", 4, (32, 64)),
            ("layers.3.attention.wo.weight", 4, (64, 16)),
            ("layers.3.feed_forward.w1.weight", 4, (32, 64)),
            ("layers.3.feed_forward.w2.weight", 4, (64, 32)),
            ("layers.3.feed_forward.w3.weight", 4, (32, 64)),
            ("layers.3.ffn_norm.weight", 4, (64,)),
            ("norm.weight", 4, (64,)),
        ],
    )
    def test_shapes(self, name: str, tp: int, shape: tuple[int, ...]) -> None:
        config = preset("tiny")
        assert on_tensor_rank(name, parameter_shapes(config)[name], config=config, tp=tp) == shape

    @pytest.mark.parametrize("tp", [1, 2, 4])
    @pytest.mark.parametrize(("pp", "v"), [(1, 1), (3, 1), (2, 3), (4, 4)])
    def test_ranks_sum_to_the_model(self, tp: int, pp: int, v: int) -> None:
        """Times tp, less what is held tp times: norms, and wk and wv when heads are fewer than ranks."""
        config = preset("tiny")
        stages = partition(config.num_layers, pp=pp, v=v)
        held = tp * sum(count.held for count in count_stages(config, stages, tp=tp, num_shards=1))
        whole = sum(math.prod(shape) for shape in parameter_shapes(config).values())
        norms = count_parameters(config).norms
        kv = 2 * 8 * 32 * 64 if tp == 4 else 0
        assert held == whole + (tp - 1) * (norms + kv)

    def test_a_tied_model_holds_both_ends(self) -> None:
        """Also where they are in one process: the trainer makes a copy there, too."""
        config = preset("tiny").replace(tied=True)
        for pp in (1, 2):
            held = sum(count.held for count in count_stages(config, partition(8, pp=pp), tp=1, num_shards=1))
            assert held == count_parameters(config).total + (272 - config.vocab_size) * 64 + 272 * 64

    def test_shards_round_up_by_rows(self) -> None:
        """8 norms' worth by hand: on 5 ranks a norm of 64 gives 13 at most, wq (64 x 64) 13 rows."""
        config = preset("tiny").replace(num_layers=1, vocab_size=16)
        (count,) = count_stages(config, partition(1, pp=1), tp=1, num_shards=5)
        rows_times_columns = 3 * 13 + (13 + 7 + 7 + 13) * 64 + (26 + 26) * 64 + 13 * 128 + 2 * 4 * 64
        assert count.held_shard == rows_times_columns

    def test_frozen_parameters_are_held_not_trained(self) -> None:
        config = preset("tiny")
        (count,) = count_stages(config, partition(8, pp=1), tp=1, num_shards=1, freeze=["layers"])
        assert count.held - count.trained == sum(
            math.prod(shape) for name, shape in parameter_shapes(config).items() if name.startswith("layers.")
        )

    @pytest.mark.parametrize(("num_layers", "split"), [(7, [3, 4]), (7, [2, 5])])
    def test_uneven_stages_are_counted_each(self, num_layers: int, split: list[int]) -> None:
        """pains T19: exact, per stage. A tiny layer by hand: 3 x 64 x 128 + 64 x (2 x 64 + 2 x 32) + 2 x 64."""
        config = preset("tiny").replace(num_layers=num_layers)
        first, last = count_stages(config, partition(num_layers, pp=2, split=split), tp=1, num_shards=1)
        layer, vocabulary = 36_992, 272 * 64
        assert (first.held, last.held) == (split[0] * layer + vocabulary, split[1] * layer + vocabulary + 64)


def bytes_405b(*, num_micro_batches: int, kind: str, zero: int) -> list[Any]:
    """The production layout: tp8 pp16 v8, 126 layers, 128 ranks to shard over (facts.md 2.5)."""
    config = preset("llama3-405b")
    stages = partition(126, pp=16, v=8, split="ends_light")
    counts = count_stages(config, stages, tp=8, num_shards=128)
    schedule = generate(pp=16, v=8, num_micro_batches=num_micro_batches, kind=kind, zero=zero)
    return [rank_bytes(r, schedule=schedule, counts=counts, dtype="bfloat16", num_moments=2) for r in range(16)]


class TestBytes:
    def test_405b_parameters_on_a_gpu(self) -> None:
        config = preset("llama3-405b")
        counts = count_stages(config, partition(126, pp=16, v=8, split="ends_light"), tp=8, num_shards=128)
        per_rank = [sum(c.held for c in counts[r::16]) for r in range(16)]
        assert sum(per_rank) / 16 == pytest.approx(3.17e9, rel=1e-3)
        assert len(set(per_rank[1:15])) == 1
        assert per_rank[1] == pytest.approx(3.188e9, rel=1e-3)  # 8 layers of 3.188e9 over 8
        assert per_rank[0] == pytest.approx(7 / 8 * 3.188e9 + 128_256 * 16_384 / 8, rel=1e-3)

    def test_405b_zero1_interleaved(self) -> None:
        """facts.md 2.5: 6.34 GB weights, 12.7 GB gradients, 0.30 GB of master and moments; 19.3 GB in all."""
        ranks = bytes_405b(num_micro_batches=32, kind="interleaved", zero=1)
        assert sum(b.weights for b in ranks) / 16 == pytest.approx(6.34e9, rel=2e-3)
        assert sum(b.gradients for b in ranks) / 16 == pytest.approx(12.7e9, rel=2e-3)
        assert sum(b.master + b.optimizer for b in ranks) / 16 == pytest.approx(0.30e9, rel=2e-2)
        assert sum(b.total - b.gradient_shards for b in ranks) / 16 == pytest.approx(19.3e9, rel=5e-3)

    @pytest.mark.parametrize(("kind", "zero", "nmb"), [("afab", 2, 16), ("afab", 1, 16), ("interleaved", 2, 32)])
    def test_405b_one_stage_of_gradients_at_a_time(self, kind: str, zero: int, nmb: int) -> None:
        """Figure 4: AFAB behaves alike in ZeRO-1 and 2; 1.6 GB is one of 8 chunks; about 8.3 GB in all."""
        middle = bytes_405b(num_micro_batches=nmb, kind=kind, zero=zero)[7]
        assert middle.gradients == pytest.approx(1.6e9, rel=1e-2)
        assert middle.total == pytest.approx(8.3e9, rel=2e-2)

    def test_405b_zero3_gathers_one_layer_at_a_time(self) -> None:
        """Which is a stage's, here; and gradients are reduced as they are made."""
        middle = bytes_405b(num_micro_batches=16, kind="interleaved", zero=3)[7]
        assert middle.weights == pytest.approx(6.376e9 / 8, rel=1e-3)
        assert middle.gradients == 0

    def test_70b_on_one_pipeline_rank(self) -> None:
        """facts.md 5.5, tp8 dp16, fp32 gradients: 17.6 weights, 35.3 gradients, 6.6 master and moments: 59.5 GB."""
        config = preset("llama3-70b")
        counts = count_stages(config, partition(80, pp=1), tp=8, num_shards=16)
        schedule = generate(pp=1, num_micro_batches=4, kind="1f1b", zero=1)
        held = rank_bytes(0, schedule=schedule, counts=counts, dtype="bfloat16", num_moments=2)
        assert held.weights / 1e9 == pytest.approx(17.6, abs=0.1)
        assert held.gradients / 1e9 == pytest.approx(35.3, abs=0.1)
        assert (held.master + held.optimizer) / 1e9 == pytest.approx(6.6, abs=0.1)
        assert (held.total - held.gradient_shards) / 1e9 == pytest.approx(59.5, abs=0.2)

    @pytest.mark.parametrize("zero", [1, 2, 3])
    def test_bytes_per_parameter(self, zero: int) -> None:
        """algorithms.md 3.1, bf16: 6 + 12/F for ZeRO-1; ZeRO-2 keeps one stage's gradients whole, ZeRO-3 none."""
        n, shards = 1_000_000, 8
        counts = [
            StageCount(n, gathered=n, at_once=n // 2, trained=n, held_shard=n // shards, trained_shard=n // shards)
        ] * 4
        schedule = generate(pp=2, v=2, num_micro_batches=8, kind="interleaved", zero=zero)
        held = rank_bytes(0, schedule=schedule, counts=counts, dtype="bfloat16", num_moments=2)
        mine = 2 * n
        assert held.master + held.optimizer == 12 * mine / shards
        assert held.gradient_shards == 4 * mine / shards
        assert held.weights == (2 * n // 2 if zero == 3 else 2 * mine)
        assert held.gradients == {1: 4 * mine, 2: 4 * n, 3: 0}[zero]
        assert held.total == sum(getattr(held, kind) for kind in held.__slots__)

    def test_compute_dtype_changes_gathered_weights_only(self) -> None:
        counts = count_stages(preset("tiny"), partition(8, pp=1), tp=1, num_shards=2)
        schedule = generate(pp=1, num_micro_batches=2, kind="1f1b")
        full, half = (
            rank_bytes(0, schedule=schedule, counts=counts, dtype=dtype, num_moments=2)
            for dtype in ("float32", "bfloat16")
        )
        assert full.weights == 2 * half.weights == 4 * counts[0].held
        assert (full.master, full.gradients, full.gradient_shards, full.optimizer) == (
            half.master,
            half.gradients,
            half.gradient_shards,
            half.optimizer,
        )

    def test_moments(self) -> None:
        assert moments_per_parameter("adamw") == 2
        assert moments_per_parameter("sgd") == 0
        assert moments_per_parameter("sgd", momentum=0.9) == 1

    def test_frozen_stages_have_no_gradients(self) -> None:
        freeze = ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"]
        counts = count_stages(preset("tiny"), partition(8, pp=2), tp=1, num_shards=1, freeze=freeze)
        schedule = generate(pp=2, num_micro_batches=4, kind="1f1b", num_frozen_stages=1)
        first = rank_bytes(0, schedule=schedule, counts=counts, dtype="float32", num_moments=2)
        assert (first.gradients, first.gradient_shards, first.optimizer) == (0, 0, 0)
        assert first.weights == first.master == 4 * counts[0].held
