"""How many floating-point operations training a model takes: the numerator of MFU, in the two conventions in use.

Both count what the model asks for, not what a GPU happens to execute: the padding of the vocabulary and anything that
is computed again (activations, or attention scores inside a flash kernel's backward) count nothing.

A multiplication of a weight with one token is 2 FLOPs forward, 2 for the gradient of its input and 2 for its own: 6.
"6P" takes that for every parameter. The embedding however is looked up and not multiplied, so that 6 (P - V D) is what
all products with weights take; and attention multiplies tokens with tokens. There, a query and a key that it sees take
2 head_dim FLOPs per head in Q K^T and as many in P V; backward two products for each of these. That is 12 heads
head_dim per pair and layer. Only pairs that the masks leave are counted: l (l + 1) / 2 for a document of l tokens, so
that packing four documents of 16 tokens is not taken for one of 64.

These are the conventions under which NVIDIA's published 0.05148, 0.4488 and 2.524 TFLOPs per token for 8B, 70B and 405B
at 8,192 tokens are met.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

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
    sizes = _sizes(config)

    def is_trained(name: str) -> bool:
        return not is_frozen(name, freeze, tied=config.tied)

    first_trained = min((_depth(name, config) for name in sizes if is_trained(name)), default=config.num_layers + 1)

    def flops(name: str, size: int) -> int:
        backward_passes = (_depth(name, config) >= first_trained) + is_trained(name)
        return 2 * size * (1 + backward_passes)

    multiplied = {name: size for name, size in sizes.items() if name != _EMBEDDING}
    multiplied[_HEAD] = sizes[_EMBEDDING]  # also in a tied model, where it is the same numbers
    attention_passes = sum(3 if layer >= first_trained else 1 for layer in range(config.num_layers))
    return ModelFlops(
        per_token_6p=sum(flops(name, size) for name, size in sizes.items()),
        per_token=sum(flops(name, size) for name, size in multiplied.items()),
        per_pair=4 * config.num_heads * config.head_dim * attention_passes,
    )


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
