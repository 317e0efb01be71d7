"""How many floating-point operations training a model takes: the numerator of MFU, in every convention in use.

What Fourfold reports counts what the model asks for, not what a GPU happens to execute: the padding of the vocabulary
and anything that is computed again (activations, or attention scores inside a flash kernel's backward) count nothing.

A multiplication of a weight with one token is 2 FLOPs forward, 2 for the gradient of its input and 2 for its own: 6.
"6P" takes that for every parameter. The embedding however is looked up and not multiplied, so that 6 (P - V D) is what
all products with weights take; and attention multiplies tokens with tokens. There, a query and a key that it sees take
2 head_dim FLOPs per head in Q K^T and as many in P V; backward two products for each of these. That is 12 heads
head_dim per pair and layer. Only pairs that the masks leave are counted: l (l + 1) / 2 for a document of l tokens, so
that packing four documents of 16 tokens is not taken for one of 64.

These are the conventions under which NVIDIA's published 0.05148, 0.4488 and 2.524 TFLOPs per token for 8B, 70B and 405B
at 8,192 tokens are met. Logs in the wild use others; at 8,192 tokens they differ by 12 % for an 8B model, at 131,072 by
1.7 times. `training_flops` has them all by name, so that a published figure can be compared with one of its own kind.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fourfold.layout import Stage
from fourfold.planner.jobs import Column, Jobs, layer_parameters, model_parameters
from fourfold.recipe import ModelConfig, is_frozen, parameter_shapes

_EMBEDDING, _HEAD = "tok_embeddings.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of forward and backward. Integers, since they are exact."""

    per_token_6p: int
    """6 P; less where parameters are frozen."""
    per_token: int
    """Of the products with weights alone, 6 (P - V D), or 6 P in a tied model, whose embedding is the head as well."""
    per_pair: int
    """Of a query and a key that it sees, over all layers: 12 layers heads head_dim."""

    def of_6p(self, tokens: int) -> int:
        """FLOPs of so many tokens by the convention 6P, which knows no attention."""
        return self.per_token_6p * tokens

    def of(self, tokens: int, pairs: int) -> int:
        """FLOPs of so many tokens that see so many keys in all."""
        return self.per_token * tokens + self.per_pair * pairs


def model_flops(config: ModelConfig, freeze: Sequence[str] = ()) -> ModelFlops:
    """What training takes per token and per pair; `freeze` as in the recipe.

    A frozen parameter has no gradient of its own, and what lies before the first trained layer has no backward at all.
    """
    return _flops_of({-1, *range(config.num_layers + 1)}, config, freeze)


def stage_flops(config: ModelConfig, stages: Sequence[Stage], freeze: Sequence[str] = ()) -> tuple[ModelFlops, ...]:
    """What each virtual stage takes of :func:`model_flops`: they sum to it."""
    ends = [{-1} if stage.embedding else set() for stage in stages]
    heads = [{config.num_layers} if stage.head else set() for stage in stages]
    return tuple(
        _flops_of(end | {*stage.layers} | head, config, freeze)
        for end, stage, head in zip(ends, stages, heads, strict=True)
    )


def _flops_of(depths: Set[int], config: ModelConfig, freeze: Sequence[str]) -> ModelFlops:
    """What the parameters at these depths take, as :func:`_depth` counts them."""
    sizes = _sizes(config)

    def is_trained(name: str) -> bool:
        return not is_frozen(name, freeze, tied=config.tied)

    first_trained = min((_depth(name, config) for name in sizes if is_trained(name)), default=config.num_layers + 1)

    def flops(name: str, size: int) -> int:
        backward_passes = (_depth(name, config) >= first_trained) + is_trained(name)
        return 2 * size * (1 + backward_passes)

    multiplied = {name: size for name, size in sizes.items() if name != _EMBEDDING}
    multiplied[_HEAD] = sizes[_EMBEDDING]  # also in a tied model, where it is the same numbers
    layers = depths & {*range(config.num_layers)}
    attention_passes = sum(3 if layer >= first_trained else 1 for layer in layers)
    return ModelFlops(
        per_token_6p=sum(flops(name, size) for name, size in sizes.items() if _depth(name, config) in depths),
        per_token=sum(flops(name, size) for name, size in multiplied.items() if _depth(name, config) in depths),
        per_pair=4 * config.num_heads * config.head_dim * attention_passes,
    )


CONVENTIONS = {
    "model": "6 (P - V D), and attention for the pairs that the masks leave: what Fourfold reports",
    "6p": "6 P: every parameter, the embedding too; no attention",
    "causal": "6 (P - V D), and half of the square of attention (Megatron-Bridge, Fast-LLM)",
    "full": "6 (P - V D), and the whole square of attention (Megatron-LM, NeMo, nanotron, MaxText, TorchTitan)",
    "full_mha": "full, as if keys and values had as many heads as queries (NVIDIA's Nemotron pages until v25.04)",
    "full_positions": "full, and 6 for every learned position (MosaicML)",
    "no_attention": "6 (P - V D) (NVIDIA's fine-tuning tables)",
    "palm_6n": "6 P, and the whole square of attention (PaLM's appendix B, Aleph Alpha, IBM)",
    "hardware_full": "forward of every layer twice, as with full recomputation (SC'21, BLOOM, DeepSpeed, InternEvo)",
    "hardware_selective": "full, and the forward of attention twice, as with selective recomputation (Korthikanti HFU)",
}
"""What each convention counts, and who uses it. P parameters, V D those of the embedding."""


def training_flops(jobs: Jobs) -> dict[str, Column]:
    """FLOPs of one step of every job, all GPUs together, by the name of the convention."""
    matrices, norms = layer_parameters(jobs)
    pairs_per_token = jobs.pairs / jobs.seq_len
    model = _Model(
        parameters=1.0 * model_parameters(jobs),
        embedding=np.where(jobs.tied, 0, jobs.vocab) * jobs.dim + jobs.positions * jobs.dim,
        linear=jobs.layers * matrices,
        norms=jobs.layers * norms + jobs.dim,
        head=jobs.vocab * jobs.dim,
        per_pair=4 * jobs.layers * jobs.heads * jobs.head_dim,
        missing_heads=2 * jobs.layers * jobs.dim * jobs.head_dim * (jobs.heads - jobs.kv_heads),
        positions=jobs.positions * jobs.dim,
    )
    return {name: flops * jobs.tokens for name, flops in _per_token(model, jobs.seq_len, pairs_per_token).items()}


def model_flops_per_step(jobs: Jobs) -> Column:
    """FLOPs of one step, all GPUs together, in the convention "model": the numerator of every MFU that we print."""
    matrices, norms = layer_parameters(jobs)
    products = jobs.layers * (matrices + norms) + jobs.dim + jobs.vocab * jobs.dim
    return 6.0 * products * jobs.tokens + 12.0 * jobs.layers * jobs.heads * jobs.head_dim * jobs.pairs * jobs.sequences


def flops_per_token(config: ModelConfig, seq_len: int, lengths: Sequence[int] | None = None) -> dict[str, float]:
    """FLOPs per token by the name of the convention; `lengths` of the documents in a sequence, if it is not one."""
    sizes = _sizes(config)
    embedding, head = sizes[_EMBEDDING], sizes.get(_HEAD, sizes[_EMBEDDING])
    norms = (2 * config.num_layers + 1) * config.dim
    parameters = sum(sizes.values())
    model = _Model(
        parameters=parameters,
        embedding=0 if config.tied else embedding,
        linear=parameters - norms - embedding - (0 if config.tied else head),
        norms=norms,
        head=head,
        per_pair=4 * config.num_layers * config.num_heads * config.head_dim,
        missing_heads=2 * config.num_layers * config.dim * config.head_dim * (config.num_heads - config.num_kv_heads),
        positions=0,
    )
    pairs = causal_pairs([seq_len] if lengths is None else lengths) / seq_len
    return {name: float(flops) for name, flops in _per_token(model, seq_len, pairs).items()}


def mfu(flops: Any, seconds: Any, gpus: Any, peak: Any) -> Any:
    """Share of the dense peak that model FLOPs amount to, 0 to 1.

    Warns above 1: no machine is faster than its peak, so that the peak or the count is another one. (6P may be above 1
    honestly only where an embedding is most of the model, as it counts products that nobody computes.)
    """
    share = flops / (seconds * gpus * peak)
    if np.any(np.asarray(share) > 1):
        warnings.warn(
            f"MFU of {float(np.max(share)):.2f}: more than the peak of {float(np.min(peak)) / 1e12:g} TFLOP/s; is the "
            "peak that of another precision or chip, or do the FLOPs count recomputation?",
            stacklevel=2,
        )
    return share


class _Model(NamedTuple):
    """Sizes that the conventions combine; columns or numbers."""

    parameters: Any
    embedding: Any  # those that are looked up and never multiplied
    linear: Any  # of matrices in layers
    norms: Any
    head: Any  # multiplied in the head, tied or not
    per_pair: Any  # FLOPs forward of a query and a key, over all layers
    missing_heads: Any  # parameters that keys and values would have more with as many heads as queries
    positions: Any


def _per_token(model: _Model, seq_len: Any, pairs: Any) -> dict[str, Any]:
    """FLOPs per token. `pairs` that a token sees on average; a full square is seq_len of them."""
    products = 6.0 * (model.parameters - model.embedding)
    square = 3.0 * model.per_pair * seq_len
    full = products + square
    return {
        "model": products + 3.0 * model.per_pair * pairs,
        "6p": 6.0 * model.parameters,
        "causal": products + square / 2,
        "full": full,
        "full_mha": full + 6.0 * model.missing_heads,
        "full_positions": full + 6.0 * model.positions,
        "no_attention": products,
        "palm_6n": 6.0 * model.parameters + square,
        "hardware_full": 4.0 * (2.0 * model.linear + model.per_pair * seq_len) + 6.0 * (model.head + model.norms),
        "hardware_selective": full + model.per_pair * seq_len,
    }


def causal_pairs(lengths: Iterable[int]) -> int:
    """(Query, visible key) pairs of documents of these lengths: a token sees itself and what its document had before.

    ``lengths`` are those of documents as they are packed: what goes on in the next row is a document of its own there.
    """
    tokens = np.fromiter(lengths, dtype=np.int64)
    return int((tokens * (tokens + 1) // 2).sum())


def _sizes(config: ModelConfig) -> dict[str, int]:
    """Elements of every parameter, without the padding of the vocabulary."""
    return {
        name: math.prod((config.vocab_size, *rest) if name in (_EMBEDDING, _HEAD) else (rows, *rest))
        for name, (rows, *rest) in parameter_shapes(config).items()
    }


def _depth(name: str, config: ModelConfig) -> int:
    """The layer that a parameter belongs to: -1 the embedding, num_layers the head and the norm before it."""
    if name == _EMBEDDING:
        return -1
    return int(name.split(".", 2)[1]) if name.startswith("layers.") else config.num_layers
