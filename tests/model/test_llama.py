"""Properties of the model that need no other library: cutting, tying, the seam, documents, dtypes, fake tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fourfold.layout import shards
from fourfold.model import PLAIN, Batch, Llama, Ops, initialise
from fourfold.recipe import ModelConfig, parameter_shapes, preset

CONFIG = ModelConfig(32, 4, 4, 2, 48, 61, vocab_multiple=16)
ROWS = [[20, 9], [1, 13, 15]]


def model_of(config: ModelConfig = CONFIG, ops: Ops = PLAIN) -> Llama:
    model = Llama(config, ops=ops)
    initialise(model, seed=0)
    return model


def batch_of(rows: list[list[int]], seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch.from_rows(torch.randint(CONFIG.vocab_size, (sum(map(sum, rows)),), generator=generator), rows)


@pytest.mark.parametrize("name", ["tiny", "llama3.2-1b", "llama3-405b"])
def test_parameters_on_meta_are_those_of_the_config(name: str) -> None:
    with torch.device("meta"):
        model = Llama(preset(name))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == parameter_shapes(preset(name))


def test_batch_labels_and_shards() -> None:
    batch = Batch.from_rows(torch.tensor([5, 6, 7, 8, 9, 4]), [[3, 1], [2]])
    assert batch.labels is not None
    assert batch.labels.tolist() == [6, 7, -1, -1, 4, -1]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1]
    part = batch.take(shards([[3, 1], [2]], cp=2, multiple_of=4)[1])
    assert part.labels is not None
    assert part.tokens.tolist() == [6, 7, 4, 0]
    assert part.labels.tolist() == [7, -1, -1, -1]
    assert part.documents.tolist() == [0, 0, 2, -1]
    with pytest.raises(ValueError, match="the rows hold 6 tokens"):
        Batch.from_rows(torch.zeros(7, dtype=torch.int64), [[3, 1], [2]])


def test_stages_in_a_row_are_the_model_bit_for_bit() -> None:
    whole, batch = model_of(), batch_of(ROWS)
    stages = [
        Llama(CONFIG, layers=[], head=False),
        Llama(CONFIG, layers=[0, 1, 2], embedding=False, head=False),
        Llama(CONFIG, layers=[], embedding=False, head=False),
        Llama(CONFIG, layers=[3], embedding=False),
    ]
    x = batch.tokens
    for stage in stages:
        initialise(stage, seed=0)
        x = stage(x, batch)
    loss = whole(batch.tokens, batch)
    assert torch.equal(x, loss)
    assert loss.shape == ()
    loss.backward()
    x.backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            gradient, expected = parameter.grad, gradients.pop(name)
            assert gradient is not None
            assert expected is not None
            assert torch.equal(gradient, expected)
    assert not gradients


def test_loss_is_the_sum_over_labels_and_padding_takes_no_part() -> None:
    model, batch = model_of(), batch_of(ROWS)
    logits = model(batch.tokens, batch.without_labels())
    assert logits.shape == (58, 64)
    assert batch.labels is not None
    terms = -logits[:, :61].double().log_softmax(-1)
    expected = sum(float(terms[i, label].detach()) for i, label in enumerate(batch.labels.tolist()) if label >= 0)
    loss = model(batch.tokens, batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert model.output is not None
    assert model.output.weight.grad is not None
    assert (model.output.weight.grad[61:] == 0).all()
    assert (model.output.weight.grad[:61] != 0).any(1).all()


def test_no_labels_at_all_is_a_loss_of_zero_with_gradients_of_zero() -> None:
    model, batch = model_of(), batch_of([[1, 1, 1]])
    loss = model(batch.tokens, batch)
    assert loss.item() == 0
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert (parameter.grad == 0).all()


def test_documents_do_not_leak() -> None:
    """T44: one token of document 1 changed, and every output of the others is the same bit for bit."""
    model, batch = model_of(), batch_of([[20, 44]]).without_labels()
    before = model(batch.tokens, batch)
    changed = batch.tokens.clone()
    changed[5] = (changed[5] + 1) % CONFIG.vocab_size
    differs = (model(changed, batch) != before).any(1)
    assert differs[5:20].all()
    assert not differs[:5].any()
    assert not differs[20:].any()


def test_tied_ends_are_one_parameter_through_copies_and_moves() -> None:
    config = CONFIG.replace(tied=True)
    with torch.device("meta"):
        meta = Llama(config)
    for model in (
        model_of(config),
        copy.deepcopy(model_of(config)),
        meta,
        meta.to_empty(device="cpu"),
        meta.bfloat16(),
    ):
        assert model.output is not None
        assert model.tok_embeddings is not None
        assert model.output.weight is model.tok_embeddings.weight
        assert "output.weight" in model.state_dict()
        assert "output.weight" not in dict(model.named_parameters())
    head = Llama(config, layers=[], embedding=False)
    assert "output.weight" in dict(head.named_parameters())


def test_every_weight_reaches_the_ops_as_the_parameter_itself() -> None:
    """The seam that parallel/ uses: it must find FSDP's and DTensor's parameters there, not something made of them."""
    seen: set[int] = set()

    def spy(function: Callable[..., Any]) -> Callable[..., Any]:
        def spied(*arguments: Any) -> Any:
            for argument in arguments:
                parts = argument if isinstance(argument, tuple) else (argument,)
                seen.update(id(part) for part in parts if isinstance(part, torch.nn.Parameter))
            return function(*arguments)

        return spied

    ops = Ops(**{field.name: spy(getattr(PLAIN, field.name)) for field in dataclasses.fields(Ops)})
    model, batch = model_of(ops=ops), batch_of(ROWS)
    loss = model(batch.tokens, batch)
    assert torch.equal(loss, model_of()(batch.tokens, batch))
    assert seen == {id(parameter) for parameter in model.parameters()}


def test_bfloat16_keeps_the_hidden_state_in_bfloat16_and_the_loss_in_fp32() -> None:
    batch = batch_of(ROWS)
    expected = model_of()(batch.tokens, batch)
    model = model_of().bfloat16()
    hidden: list[Tensor] = []
    model.layers["2"].register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
    loss = model(batch.tokens, batch)
    assert loss.dtype == torch.float32
    assert hidden[0].dtype == torch.bfloat16
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0)


def test_runs_on_fake_tensors() -> None:
    """The dry run: no data-dependent shape in forward or backward, with context-parallel runs too."""
    batch = batch_of(ROWS)
    part = batch.take(shards(ROWS, cp=2, multiple_of=4)[0])
    gathered = len(batch.tokens)

    def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return PLAIN.attend(q, k.new_zeros(gathered, *k.shape[1:]), v.new_zeros(gathered, *v.shape[1:]), batch)

    for case, ops in ((batch, PLAIN), (part, dataclasses.replace(PLAIN, attend=attend))):
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = Llama(preset("small"), ops=ops)
            loss = model(case.tokens, case)
            loss.backward()
        assert loss.shape == ()
