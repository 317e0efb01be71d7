"""FLOPs against hand arithmetic, against NVIDIA's published figures, and against PyTorch's own counter."""

from __future__ import annotations

import csv
import dataclasses
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fourfold.layout import partition
from fourfold.model import Batch, Llama
from fourfold.planner import causal_pairs, count_parameters, model_flops, stage_flops
from fourfold.planner.flops import (
    CONVENTIONS,
    flops_per_token,
    mfu,
    model_flops_per_step,
    training_flops,
)
from fourfold.planner.jobs import Jobs
from fourfold.planner.measured.tables import MEASUREMENTS
from fourfold.recipe import ModelConfig, preset

TINY = preset("tiny")  # 8 layers, width 64, 4 heads of 16, 2 key-value heads, FFN 128, vocabulary 260


class TestByHand:
    def test_tiny(self) -> None:
        """pains T88: 64 tokens in one document."""
        layer = 64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 128 + 2 * 64
        parameters = 2 * 260 * 64 + 8 * layer + 64
        found = model_flops(TINY)
        assert found.of_6p(64) == 6 * parameters * 64 == 126_443_520
        scores = 8 * 4 * 16 * 64 * 65 // 2  # layers, heads, head_dim, pairs
        assert found.of(64, causal_pairs([64])) == 6 * (parameters - 260 * 64) * 64 + 12 * scores == 132_833_280

    def test_packed_documents(self) -> None:
        """pains T90: four documents of 16 tokens are not one of 64."""
        assert causal_pairs([64]) == 2080
        assert causal_pairs([16] * 4) == 544
        one, four = (model_flops(TINY).of(64, causal_pairs(lengths)) for lengths in ([64], [16] * 4))
        assert one - four == 12 * 8 * 64 * (2080 - 544)

    def test_pairs_are_those_of_the_mask(self) -> None:
        lengths = [5, 1, 9, 1]
        document = torch.arange(4).repeat_interleave(torch.tensor(lengths))
        mask = (document[:, None] == document) & torch.ones(16, 16, dtype=torch.bool).tril()
        assert causal_pairs(lengths) == int(mask.sum())
        assert causal_pairs([]) == 0
        assert causal_pairs([131_072]) == 131_072 * 131_073 // 2

    def test_a_wide_ffn(self) -> None:
        """pains P28: the FFN is not four times the width."""
        config = preset("llama3-8b")
        wider = model_flops(ModelConfig(**{**_fields(config), "ffn_dim": config.ffn_dim + 1}))
        assert wider.per_token - model_flops(config).per_token == 6 * 32 * 3 * 4096


class TestPublished:
    @pytest.mark.parametrize(
        ("name", "nvidia", "six_p", "long"),
        [  # NVIDIA's performance summaries, by TFLOPs/s over tokens/s (facts.md 7); 6P and 131,072 tokens: facts.md 5.2
            ("llama3-8b", 0.05148, 0.0482, 0.1481),
            ("llama3-70b", 0.4488, 0.423, 0.9324),
            ("llama3-405b", 2.524, 2.435, 4.046),
        ],
    )
    def test_tflops_per_token(self, name: str, nvidia: float, six_p: float, long: float) -> None:
        found = model_flops(preset(name))
        assert found.of(8192, causal_pairs([8192])) / 8192e12 == pytest.approx(nvidia, rel=1e-3)
        assert found.of(131_072, causal_pairs([131_072])) / 131_072e12 == pytest.approx(long, rel=1e-3)
        assert found.of_6p(1) / 1e12 == pytest.approx(six_p, rel=1e-3)

    def test_causal_is_half(self) -> None:
        """pains P30: llama2-7b at 8,192 tokens, 1,721 TFLOPs a step of 4 rows if counted in full and 1,510 if not."""
        llama2 = ModelConfig(
            dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_dim=11_008, vocab_size=32_000,
        )  # fmt: skip
        found, tokens = model_flops(llama2), 4 * 8192
        assert found.of(tokens, 4 * causal_pairs([8192])) / 1e12 == pytest.approx(1510, rel=2e-3)
        assert found.of(tokens, 4 * 8192**2) / 1e12 == pytest.approx(1721, rel=2e-3)


class TestCounted:
    """Against the operations that autograd really runs. PyTorch counts full squares for attention: so do we, here."""

    @pytest.mark.parametrize("freeze", [(), ("tok_embeddings",), ("tok_embeddings", "layers.0"), ("layers.3",)])
    @pytest.mark.parametrize("tied", [False, True])
    def test_every_product(self, freeze: tuple[str, ...], tied: bool) -> None:
        if tied and freeze == ("tok_embeddings",):
            freeze = ("layers.0", "layers.1")
        config = ModelConfig(
            dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=256, vocab_multiple=128, tied=tied
        )
        counted = count(config, freeze, num_tokens=24)
        # Norms are no products, but the conventions count their parameters too, with 2, 4 or 6 FLOPs for each.
        norms = 24 * count_parameters(config).norms
        assert 2 * norms <= model_flops(config, freeze).of(24, 24**2) - counted <= 6 * norms

    def test_frozen_embedding_saves_nothing_but_its_own_gradient(self) -> None:
        assert model_flops(TINY, ("tok_embeddings",)).per_token == model_flops(TINY).per_token
        assert model_flops(TINY, ("tok_embeddings",)).of_6p(1) == model_flops(TINY).of_6p(1) - 4 * 260 * 64


PUBLISHED = MEASUREMENTS / "published.csv"
CODES = {  # of measurements/README.md
    "PALM_6N": "palm_6n",
    "FULL": "full",
    "FULL_MHA": "full_mha",
    "FULL_POS": "full_positions",
    "CAUSAL": "causal",
    "NOATTN": "no_attention",
    "HW_FULL": "hardware_full",
    "HW_SEL": "hardware_selective",
}


class TestConventions:
    @pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "llama3-405b", "tiny"])
    def test_configs_and_columns_agree(self, name: str) -> None:
        config = preset(name)
        jobs = jobs_of(config, seq_len=4096, sequences=np.array([1, 16]))
        found = training_flops(jobs)
        assert set(found) == set(CONVENTIONS)
        for convention, per_token in flops_per_token(config, 4096).items():
            np.testing.assert_allclose(found[convention], per_token * np.array([4096, 65_536]), rtol=1e-12)
        exact = model_flops(config).of(4096, causal_pairs([4096]))
        np.testing.assert_allclose(model_flops_per_step(jobs), np.array([1, 16]) * exact, rtol=1e-12)
        np.testing.assert_allclose(model_flops_per_step(jobs), found["model"], rtol=1e-12)

    def test_tied(self) -> None:
        """6 P of a tied model is what its products take: the embedding is multiplied, as the head."""
        tied = preset("tiny").replace(tied=True)
        found = flops_per_token(tied, 64)
        assert found["no_attention"] == found["6p"] == model_flops(tied).per_token_6p
        np.testing.assert_allclose(
            model_flops_per_step(jobs_of(tied, 64)), model_flops(tied).of(64, causal_pairs([64]))
        )

    def test_the_padding_of_the_vocabulary_counts_nothing(self) -> None:
        jobs = jobs_of(TINY, 64)
        padded = training_flops(jobs.replace(padded_vocab=512))
        assert {name: float(flops) for name, flops in training_flops(jobs).items()} == padded

    def test_two_matrices_or_three(self) -> None:
        """pains P28: an FFN of 3.5 times the width with three matrices, or of four times with two."""
        jobs = jobs_of(TINY, 64)
        two = jobs.replace(gated=False)
        difference = model_flops_per_step(jobs) - model_flops_per_step(two)
        assert difference == 6 * 64 * TINY.num_layers * TINY.dim * TINY.ffn_dim

    def test_documents(self) -> None:
        """pains T90: only "model" knows of them."""
        one, four = flops_per_token(TINY, 64), flops_per_token(TINY, 64, [16] * 4)
        assert {name for name in one if one[name] != four[name]} == {"model"}
        assert (one["model"] - four["model"]) * 64 == 12 * 8 * 64 * (2080 - 544)
        jobs = jobs_of(TINY, 64)
        packed = model_flops_per_step(jobs.replace(pairs=544))
        assert packed == pytest.approx(four["model"] * 64)

    @pytest.mark.parametrize(("seq_len", "full", "causal"), [(8192, 1721, 1510), (129_000, 125_000, 73_000)])
    def test_llama2_of_maxtext(self, seq_len: int, full: float, causal: float) -> None:
        """pains T88 and P30: TFLOPs of 4 rows of llama2-7b, before and after half of attention was dropped."""
        llama2 = ModelConfig(
            dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_dim=11_008, vocab_size=32_000,
        )  # fmt: skip
        found = flops_per_token(llama2, seq_len)
        assert 4 * seq_len * found["full"] / 1e12 == pytest.approx(full, rel=3e-3)
        assert 4 * seq_len * found["causal"] / 1e12 == pytest.approx(causal, rel=3e-3)

    def test_the_spread_of_conventions(self) -> None:
        """measurements/README.md: 12 % for 8B and 7 % for 70B at 8K, 1.7 times for 8B at 128K."""
        assert ratio("llama3-8b", 8192) == pytest.approx(1.12, abs=0.01)
        assert ratio("llama3-70b", 8192) == pytest.approx(1.07, abs=0.01)
        assert ratio("llama3-8b", 131_072) == pytest.approx(1.7, abs=0.04)

    def test_405b_takes_as_long_as_one_counts(self) -> None:
        """algorithms.md 3.5: 16M tokens at 400 TFLOP/s on 16,384 GPUs take 6.23, 6.46 or 6.75 s."""
        tokens = 2048 * 8192
        found = {
            name: flops * tokens / (16_384 * 400e12)
            for name, flops in flops_per_token(preset("llama3-405b"), 8192).items()
        }
        assert found["6p"] == pytest.approx(6.23, abs=0.01)
        assert found["model"] == pytest.approx(6.46, abs=0.01)
        assert found["palm_6n"] == pytest.approx(6.75, abs=0.01)

    def test_no_overflow(self) -> None:
        """16M tokens of 405B are 4e19 FLOPs, more than 64-bit integers hold."""
        jobs = jobs_of(preset("llama3-405b"), 8192, sequences=2048)
        assert float(model_flops_per_step(jobs)) == pytest.approx(4.234e19, rel=1e-3)
        assert float(training_flops(jobs)["6p"]) == pytest.approx(4.085e19, rel=1e-3)

    def test_published_figures_by_their_own_convention(self) -> None:
        """714 published TFLOP/s and MFU, each by the convention that measurements/README.md found for it."""
        ratios = defaultdict(list)
        with PUBLISHED.open(newline="") as file:
            for row in csv.DictReader(file):
                for code, found in published_ratios(row):
                    ratios[code].append(found)
        assert {code: len(found) for code, found in ratios.items()} == {
            "CAUSAL": 77, "FULL": 171, "FULL_POS": 85, "FULL_MHA": 39, "NOATTN": 12, "PALM_6N": 243, "HW_FULL": 84,
            "HW_SEL": 3, "model_tflops_causal": 714, "model_tflops_full": 714,
        }  # fmt: skip
        for code, found in ratios.items():
            np.testing.assert_allclose(found, 1, rtol=5e-4, err_msg=code)


class TestRates:
    def test_mfu(self) -> None:
        """pains P29: 420 TFLOP/s on an H200 are 42 % of its dense peak."""
        assert mfu(420e12, 1.0, 1, 989.4e12) == pytest.approx(0.4245, abs=1e-4)

    def test_more_than_the_peak_is_doubted(self) -> None:
        """pains T91."""
        with pytest.warns(UserWarning, match=r"MFU of 1\.38: more than the peak of 312 TFLOP/s"):
            mfu(np.array([100e12, 430e12]), 1.0, 1, 312e12)


def ratio(name: str, seq_len: int) -> float:
    """All of attention over half of it."""
    found = flops_per_token(preset(name), seq_len)
    return found["full"] / found["causal"]


def jobs_of(config: ModelConfig, seq_len: int, sequences: object = 1) -> Jobs:
    """A job of which only the model and the batch are set."""
    return any_job(
        layers=config.num_layers, dim=config.dim, heads=config.num_heads, kv_heads=config.num_kv_heads,
        head_dim=config.head_dim, ffn_dim=config.ffn_dim, gated=True, vocab=config.vocab_size,
        padded_vocab=config.padded_vocab, tied=config.tied, positions=0, seq_len=seq_len, sequences=sequences,
        pairs=causal_pairs([seq_len]),
    )  # fmt: skip


def any_job(**columns: object) -> Jobs:
    return Jobs.of(**dict.fromkeys((field.name for field in dataclasses.fields(Jobs)), 1) | columns)


def published_ratios(row: dict[str, str]) -> list[tuple[str, float]]:
    """(convention, our TFLOP/s over the row's, as far from 1 as README.md says): empty where a row does not tell."""
    sizes = ("layers", "hidden", "heads", "ffn_hidden", "vocab", "seq_len", "tokens_per_s_per_gpu")
    code = row["best_convention"]
    if row["n_experts"] or code not in CODES or not all(row[name] for name in sizes):
        return []
    layers, dim, heads, ffn_dim, vocab, seq_len = (int(float(row[name])) for name in sizes[:-1])
    job = any_job(
        layers=layers, dim=dim, heads=heads, kv_heads=int(row["kv_heads"] or heads),
        head_dim=int(row["head_dim"] or dim // heads), ffn_dim=ffn_dim, gated=row["gated_mlp"] == "1", vocab=vocab,
        tied=row["tied_embeddings"] == "1", positions=seq_len if code == "FULL_POS" else 0, seq_len=seq_len,
        sequences=1, pairs=causal_pairs([seq_len]),
    )  # fmt: skip
    rate = float(row["tokens_per_s_per_gpu"]) / seq_len / 1e12
    found = {name: float(flops) * rate for name, flops in training_flops(job).items()}
    by_mfu = row["measured_mfu"] and (code == "PALM_6N" or not row["measured_tflops_per_gpu"])
    if by_mfu or not row["measured_tflops_per_gpu"]:
        share = float(row["measured_mfu"] or row["measured_hfu"]) / 100
        published = share * float(row["mfu_peak_tflops"])
    else:
        published = float(row["measured_tflops_per_gpu"])
    ratios = [(code, found[CODES[code]] / published / float(row["best_convention_ratio"]))]
    for column, name in (("model_tflops_causal", "causal"), ("model_tflops_full", "full")):
        if row[column]:
            ratios.append((column, found[name] / float(row[column])))
    return ratios


def count(config: ModelConfig, freeze: tuple[str, ...], *, num_tokens: int) -> int:
    """FLOPs of the matrix products of one forward and backward, attention as two products of all with all."""
    model = Llama(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name == f or name.startswith(f"{f}.") for f in freeze))
    tokens = torch.randint(config.vocab_size, (num_tokens,))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, Batch.from_rows(tokens, [[num_tokens]])).backward()
    return counter.get_total_flops()


def _fields(config: ModelConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


class TestStages:
    """Of each virtual stage."""

    @pytest.mark.parametrize("freeze", [(), ("tok_embeddings", "layers.0", "layers.1"), ("layers.3",), ("output",)])
    @pytest.mark.parametrize(
        ("pp", "v", "split"), [(1, 1, "even"), (2, 2, "even"), (4, 1, "ends_light"), (3, 2, "even")]
    )
    def test_they_sum_to_the_model(self, freeze: tuple[str, ...], pp: int, v: int, split: str) -> None:
        whole = model_flops(TINY, freeze)
        parts = stage_flops(TINY, partition(TINY.num_layers, pp=pp, v=v, split=split), freeze)
        assert len(parts) == pp * v
        for key in ("per_token", "per_token_6p", "per_pair"):
            assert sum(getattr(part, key) for part in parts) == getattr(whole, key)

    def test_by_hand(self) -> None:
        first, last = stage_flops(TINY, partition(8, pp=2, v=1, split=(5, 3)))
        layer = 64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 128 + 2 * 64
        assert (first.per_token, last.per_token) == (6 * 5 * layer, 6 * (3 * layer + 64 + 260 * 64))
        assert (first.per_pair, last.per_pair) == (12 * 5 * 4 * 16, 12 * 3 * 4 * 16)
