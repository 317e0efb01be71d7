"""The same logits and gradients as two other implementations: transformers' and Meta's own.

In our model the documents share a micro-batch; in the references each has a forward pass of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.model import Batch, Llama
from fourfold.model.huggingface import name_to_hf
from fourfold.recipe import ModelConfig, RopeScaling, config_to_hf, parameter_shapes

TOLERANCE = 1e-5
# Rows of documents; the long one reaches positions where scaled frequencies tell.
ROWS = [[40, 1, 7], [300], [3, 12]]
GQA = ModelConfig(64, 2, 4, 2, 192, 96, vocab_multiple=32)
PADDED = GQA.replace(vocab_size=90, num_heads=8, num_kv_heads=2)
SCALED = GQA.replace(rope_scaling=RopeScaling())
TIED = GQA.replace(num_kv_heads=4, tied=True)
SHORT_SCALED = PADDED.replace(rope_scaling=RopeScaling(32.0, 1.0, 4.0, 64), rope_theta=1000.0, tied=True)


def random_state(config: ModelConfig) -> dict[str, Tensor]:
    """Weights large enough that every part of the model matters to the logits; padded rows are zero as always."""
    generator = torch.Generator().manual_seed(1)
    state = {}
    for name, shape in parameter_shapes(config).items():
        scale = 1.0 if name == "tok_embeddings.weight" else 1 / math.sqrt(shape[-1])
        values = torch.randn(shape, generator=generator) * scale
        state[name] = 1 + values if len(shape) == 1 else values
        if name in ("tok_embeddings.weight", "output.weight"):
            state[name][config.vocab_size :] = 0
    return state


def ours(config: ModelConfig) -> tuple[Llama, Batch]:
    model = Llama(config)
    state = random_state(config)
    if config.tied:
        state["output.weight"] = state["tok_embeddings.weight"]
    model.load_state_dict(state)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(config.vocab_size, (sum(map(sum, ROWS)),), generator=generator)
    return model, Batch.from_rows(tokens, ROWS)


def documents(tokens: Tensor) -> list[Tensor]:
    return list(tokens.split([length for row in ROWS for length in row]))


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture(scope="module")
def huggingface() -> Any:
    """Function: config -> LlamaForCausalLM with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def build(config: ModelConfig) -> Any:
        model = LlamaForCausalLM(LlamaConfig(**config_to_hf(config)))
        state = {name_to_hf(name): value for name, value in random_state(config).items()}
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in state:
                state[name] = state[name][: config.vocab_size]
        if config.tied:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state)
        return model

    return build


@pytest.mark.parametrize("config", [GQA, PADDED, SCALED, TIED, SHORT_SCALED])
def test_logits_equal_transformers(huggingface: Any, config: ModelConfig) -> None:
    model, batch = ours(config)
    reference = huggingface(config)
    with torch.no_grad():
        logits = model(batch.tokens, batch.without_labels())[:, : config.vocab_size]
        expected = torch.cat([reference(document[None]).logits[0] for document in documents(batch.tokens)])
    assert error(logits, expected) < TOLERANCE


def test_scaled_frequencies_matter_in_these_tests(huggingface: Any) -> None:
    model, batch = ours(GQA)
    with torch.no_grad():
        logits = model(batch.tokens, batch.without_labels())
        expected = torch.cat([huggingface(SCALED)(document[None]).logits[0] for document in documents(batch.tokens)])
    assert error(logits, expected) > 100 * TOLERANCE


def test_loss_and_gradients_equal_transformers(huggingface: Any) -> None:
    model, batch = ours(SHORT_SCALED)
    reference = huggingface(SHORT_SCALED)
    loss = model(batch.tokens, batch)
    loss.backward()
    expected_loss = torch.stack(
        [
            F.cross_entropy(reference(document[None]).logits[0, :-1], document[1:], reduction="sum")
            for document in documents(batch.tokens)
        ]
    ).sum()
    expected_loss.backward()
    assert error(loss.detach(), expected_loss.detach()) < TOLERANCE
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient, wanted = parameter.grad, expected[name_to_hf(name)].grad
        gradient = gradient[: SHORT_SCALED.vocab_size] if name == "tok_embeddings.weight" else gradient
        assert ((gradient - wanted).norm() / wanted.norm()).item() < TOLERANCE, name


@pytest.fixture(scope="module")
def meta_transformer() -> Iterator[Any]:
    """Function: config, permuted -> Meta's reference model with the same weights.

    Its layers are fairscale's and want process groups, even of one rank; a fake one starts no threads.
    """
    import torch.distributed as dist
    from fairscale.nn.model_parallel import initialize as fairscale
    from llama_models.llama3.args import ModelArgs
    from llama_models.llama3.model import Transformer
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    fairscale.initialize_model_parallel(1)

    def build(config: ModelConfig, *, permuted: bool = True) -> Any:
        arguments = ModelArgs(
            dim=config.dim,
            n_layers=config.num_layers,
            n_heads=config.num_heads,
            n_kv_heads=config.num_kv_heads,
            vocab_size=config.padded_vocab,
            multiple_of=config.ffn_dim,  # it rounds 8/3 dim up to a multiple of this
            norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            use_scaled_rope=config.rope_scaling is not None,
            max_batch_size=1,
            max_seq_len=512,
        )
        model = Transformer(arguments)
        state = random_state(config)
        state.setdefault("output.weight", state["tok_embeddings.weight"])
        for name, value in state.items():
            if permuted and name.endswith(("wq.weight", "wk.weight")):
                # Meta turns rows 2i and 2i + 1 of a head by one angle, we turn i and i + head_dim / 2.
                halves = value.unflatten(0, (-1, 2, config.head_dim // 2))
                state[name] = halves.transpose(1, 2).flatten(0, 2)
        model.load_state_dict(state)
        return model

    yield build
    fairscale.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("config", [GQA, PADDED, SCALED, TIED])
def test_logits_equal_meta(meta_transformer: Any, config: ModelConfig) -> None:
    model, batch = ours(config)
    reference = meta_transformer(config)
    with torch.no_grad():
        logits = model(batch.tokens, batch.without_labels())
        expected = torch.cat([reference(document[None], 0)[0] for document in documents(batch.tokens)])
    assert error(logits, expected) < TOLERANCE


def test_row_order_matters_in_these_tests(meta_transformer: Any) -> None:
    """T85: a wrong order of rows is an error small enough to miss with a loose tolerance."""
    model, batch = ours(GQA)
    reference = meta_transformer(GQA, permuted=False)
    with torch.no_grad():
        logits = model(batch.tokens, batch.without_labels())
        expected = torch.cat([reference(document[None], 0)[0] for document in documents(batch.tokens)])
    assert error(logits, expected) > 100 * TOLERANCE
