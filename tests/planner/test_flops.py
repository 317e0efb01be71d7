"""FLOPs against hand arithmetic, against NVIDIA's published figures, and against PyTorch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fourfold.model import Batch, Llama
from fourfold.planner import causal_pairs, count_parameters, model_flops
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
