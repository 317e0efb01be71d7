"""Initial weights: any part equals the same part of the whole, and no two parts repeat."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from fourfold.model import Llama, fill, initialise
from fourfold.recipe import ModelConfig, preset

CONFIG = ModelConfig(48, 3, 4, 2, 200, 261, vocab_multiple=128)
WQ = "layers.1.attention.wq.weight"


@pytest.mark.parametrize("name", [WQ, "layers.2.feed_forward.w2.weight", "tok_embeddings.weight", "norm.weight"])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_parts_equal_the_whole_bit_for_bit(name: str, num_parts: int) -> None:
    shape = {"tok_embeddings.weight": (CONFIG.padded_vocab, 48), "norm.weight": (48,)}.get(name, (200, 130))
    whole = fill(name, shape, 5, CONFIG)
    assert tuple(whole.shape) == shape
    bounds = np.linspace(0, shape[0], num_parts + 1).astype(int)
    rows = [fill(name, shape, 5, CONFIG, rows=slice(a, b)) for a, b in pairwise(bounds)]
    assert torch.equal(torch.cat(rows), whole)
    if len(shape) == 2:
        bounds = np.linspace(0, shape[1], num_parts + 1).astype(int)
        columns = [fill(name, shape, 5, CONFIG, columns=slice(a, b)) for a, b in pairwise(bounds)]
        assert torch.equal(torch.cat(columns, dim=1), whole)
        assert torch.equal(fill(name, shape, 5, CONFIG, rows=slice(60, 67), columns=slice(3, 9)), whole[60:67, 3:9])
    assert fill(name, shape, 5, CONFIG, rows=slice(7, 7)).shape[0] == 0


def test_nothing_repeats() -> None:
    """T114: with torch's own init on sharded CPU tensors, the halves of a weight were equal."""
    shape = (128, 64)
    whole = fill(WQ, shape, 5, CONFIG)
    others = [
        whole[64:],
        fill(WQ, shape, 6, CONFIG)[:64],
        fill("layers.0.attention.wq.weight", shape, 5, CONFIG)[:64],
        fill("layers.1.attention.wk.weight", shape, 5, CONFIG)[:64],
        fill("layers.11.attention.wq.weight", shape, 5, CONFIG)[:64],
    ]
    for other in others:
        assert not (whole[:64] == other).any(dim=1).all()
        correlation = torch.corrcoef(torch.stack((whole[:64].flatten(), other.flatten())))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(64 * 64)
    assert whole.unique().numel() > 0.99 * whole.numel()


def test_first_numbers_stay_what_they_are() -> None:
    """A change here makes every run, and every checkpoint comparison, start elsewhere."""
    first = fill("tok_embeddings.weight", (512, 64), 0, preset("small"))[0, :3]
    torch.testing.assert_close(first, torch.tensor(FIRST_NUMBERS), rtol=1e-6, atol=0)


FIRST_NUMBERS = [-0.005497862584888935, -0.017167245969176292, -0.00731476116925478]


def test_distribution() -> None:
    shape = (1000, 300)
    for name, std in ((WQ, 0.02), ("layers.0.attention.wo.weight", 0.02 / math.sqrt(6)), ("output.weight", 0.02)):
        values = fill(name, shape, 0, CONFIG.replace(vocab_size=1000))
        # Of n normal numbers the mean is off by std / sqrt(n), the standard deviation by std / sqrt(2 n): five times
        # that.
        assert abs(values.mean()) < 5 * std / math.sqrt(values.numel())
        assert abs(values.std() - std) < 5 * std / math.sqrt(2 * values.numel())
    assert torch.equal(
        fill("layers.0.feed_forward.w2.weight", shape, 0, CONFIG).std().round(decimals=4),
        torch.tensor(0.02 / math.sqrt(6)).round(decimals=4),
    )
    assert torch.equal(fill("layers.0.ffn_norm.weight", (48,), 0, CONFIG), torch.ones(48))


def test_padded_vocabulary_is_zero_and_changes_nothing() -> None:
    shape = (CONFIG.padded_vocab, 48)
    padded = fill("output.weight", shape, 0, CONFIG)
    assert torch.equal(padded[261:], torch.zeros(CONFIG.padded_vocab - 261, 48))
    assert torch.equal(padded[:261], fill("output.weight", (261, 48), 0, CONFIG.replace(vocab_multiple=1)))
    assert torch.equal(padded[250:300], fill("output.weight", shape, 0, CONFIG, rows=slice(250, 300)))
    assert (fill("output.weight", shape, 0, CONFIG, rows=slice(300, 384)) == 0).all()


def test_a_stage_starts_as_the_same_part_of_the_model() -> None:
    """Also the head of a tied model in a stage of its own: it is the embedding."""
    for tied in (False, True):
        config = CONFIG.replace(tied=tied)
        whole = Llama(config)
        initialise(whole, seed=3)
        state = whole.state_dict()
        stages = [Llama(config, layers=[0], head=False), Llama(config, layers=[1, 2], embedding=False)]
        for stage in stages:
            initialise(stage, seed=3)
            assert all(torch.equal(value, state[name]) for name, value in stage.state_dict().items())
        assert {name for stage in stages for name in stage.state_dict()} == state.keys()
        assert torch.equal(state["output.weight"], state["tok_embeddings.weight"]) == tied
