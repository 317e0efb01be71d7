"""Llama 3 text model as plain PyTorch.

The hidden state is [tokens, dim]: a micro-batch is one flat run of tokens, and rows and documents exist only in
`Batch`. Parameter names are Meta's. Rows of wq and wk are in Hugging Face's order: the two numbers that one rotary
angle turns are rows i and i + head_dim/2.

A model may be cut anywhere between its layers, and `Ops` is the one seam by which a sharded run differs from a plain
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.model.attention import attention
from fourfold.model.batch import Batch
from fourfold.recipe import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class Ops:
    """The places where a sharded run differs from a plain one. Weights come as the parameters themselves.

    n tokens, of which a sharded run may hold a part between layers; H query heads and KV key heads of size d; D = dim.
    """

    embed: Callable[[Tensor, Tensor], Tensor]
    """(tokens int64[n], weight [V, D]) -> hidden state [n, D]"""
    norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [n, D], weight [D], eps) -> RMSNorm of x, dtype of x"""
    project: Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]
    """(x [n, D], weights [out, D]) -> x @ w.T for each: into heads, into the feed-forward width, into the vocabulary"""
    rotate: Callable[[Tensor, Tensor, Rope], tuple[Tensor, Tensor]]
    """(q [n, H, d], k [n, KV, d], rope) -> both after rotary embedding"""
    swiglu: Callable[[Tensor, Tensor], Tensor]
    """(a, b) -> silu(a) * b"""
    attend: Callable[[Tensor, Tensor, Tensor, Batch], Tensor]
    """(q [n, H, d], k [n, KV, d], v [n, KV, d], batch) -> [n, H, d], after rotary embedding"""
    combine: Callable[[Tensor, Tensor], Tensor]
    """(x [n, in], weight [D, in]) -> x @ w.T: back from heads or feed-forward width into the hidden state"""
    cross_entropy: Callable[[Tensor, Tensor, int], Tensor]
    """(logits [n, V], labels int64[n], vocab_size) -> fp32 scalar: the sum over labels that are not -1; columns from
    vocab_size on are padding and take no part"""


def _embed(tokens: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(tokens, weight)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # Rounded before the weight is multiplied, as Meta and Hugging Face do it.
    return (weight * wide.to(x.dtype)).to(x.dtype)


def _project(x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight) for weight in weights)


def _rotate(q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    return rope.rotate(q), rope.rotate(k)


def _swiglu(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def _combine(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def _cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    padding = torch.arange(logits.shape[-1], device=logits.device) >= vocab_size
    logits = logits.float().masked_fill(padding, -math.inf)
    return F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")


PLAIN = Ops(
    embed=_embed,
    norm=_norm,
    project=_project,
    rotate=_rotate,
    swiglu=_swiglu,
    attend=attention,
    combine=_combine,
    cross_entropy=_cross_entropy,
)
"""One process, plain autograd: the reference that every sharded run is compared with."""


class Rope:
    """Rotary tables of one forward pass: cos and sin, fp32 [n, head_dim / 2].

    Made from the positions each time, not kept in buffers: nothing to shard, to cast or to resize. Not a dataclass or
    tuple: FSDP2 would cast what is in it to bf16.
    """

    def __init__(self, positions: Tensor, config: ModelConfig) -> None:
        even = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device)
        frequencies = 1.0 / config.rope_theta ** (even / config.head_dim)
        if config.rope_scaling is not None:
            frequencies = _scale_frequencies(frequencies, config.rope_scaling)
        angles = positions.float()[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def rotate(self, x: Tensor) -> Tensor:
        """x [n, heads, head_dim], turned by the angles of its tokens."""
        return turn(x, self.cos, self.sin)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, d], each pair (i, i + d/2) turned by its angle, whose cos and sin are fp32 [n, d / 2]. Computed in
    fp32, rounded to the dtype of x."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's blend, linear in the number of turns that a frequency makes in the original context."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)


class Weight(nn.Module):
    """Holds one parameter under the name `weight`. What is done with it is for `Ops` to say."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class Attention(nn.Module):
    """Grouped-query self-attention with rotary embedding."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.head_dim, self.ops = config.head_dim, ops
        self.wq = Weight(config.num_heads * config.head_dim, config.dim)
        self.wk = Weight(config.num_kv_heads * config.head_dim, config.dim)
        self.wv = Weight(config.num_kv_heads * config.head_dim, config.dim)
        self.wo = Weight(config.dim, config.num_heads * config.head_dim)

    def forward(self, x: Tensor, rope: Rope, batch: Batch) -> Tensor:
        projected = self.ops.project(x, (self.wq.weight, self.wk.weight, self.wv.weight))
        # How many heads there are is read off the tensors: a sharded run has a part of them.
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)
        q, k = self.ops.rotate(q, k, rope)
        attended = self.ops.attend(q, k, v, batch)
        return self.ops.combine(attended.flatten(-2), self.wo.weight)


class FeedForward(nn.Module):
    """SwiGLU: w1 is the gate, w3 goes up, w2 down."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.w1 = Weight(config.ffn_dim, config.dim)
        self.w2 = Weight(config.dim, config.ffn_dim)
        self.w3 = Weight(config.ffn_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.ops.project(x, (self.w1.weight, self.w3.weight))
        return self.ops.combine(self.ops.swiglu(gate, up), self.w2.weight)


class Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.norm_eps, self.ops = config.norm_eps, ops
        self.attention = Attention(config, ops)
        self.feed_forward = FeedForward(config, ops)
        self.attention_norm = Weight(config.dim)
        self.ffn_norm = Weight(config.dim)

    def forward(self, x: Tensor, rope: Rope, batch: Batch) -> Tensor:
        x = x + self.attention(self.ops.norm(x, self.attention_norm.weight, self.norm_eps), rope, batch)
        return x + self.feed_forward(self.ops.norm(x, self.ffn_norm.weight, self.norm_eps))


class Llama(nn.Module):
    """A Llama 3 model, or a stretch of one. Parameters are uninitialised: see `init.initialise`.

    layers: ids of the layers it has, in the whole model (default all); they are part of the parameter names.
    embedding, head: whether it has the embedding, and the last norm with the output projection.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: Sequence[int] | None = None,
        embedding: bool = True,
        head: bool = True,
        ops: Ops = PLAIN,
    ) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.tok_embeddings = Weight(config.padded_vocab, config.dim) if embedding else None
        layers = range(config.num_layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(layer): Layer(config, ops) for layer in layers})
        self.norm = Weight(config.dim) if head else None
        self.output = None
        if head:
            # Sharing the module, not only the parameter, keeps both ends one through to_empty() and deepcopy.
            tied_here = self.tok_embeddings if config.tied else None
            self.output = tied_here or Weight(config.padded_vocab, config.dim)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: token ids int64[n] if it has the embedding, else the hidden state [n, D] from the layer before.

        Returns the hidden state [n, D]; with the head, the loss summed over the labels (fp32 scalar), or if
        batch.labels is None the logits [n, padded_vocab], of which the columns from vocab_size on mean nothing.
        """
        rope = Rope(batch.positions, self.config)
        if self.tok_embeddings is not None:
            x = self.ops.embed(x, self.tok_embeddings.weight)
        for layer in self.layers.values():
            x = layer(x, rope, batch)
        if self.norm is None or self.output is None:
            return x
        x = self.ops.norm(x, self.norm.weight, self.config.norm_eps)
        (logits,) = self.ops.project(x, (self.output.weight,))
        if batch.labels is None:
            return logits
        return self.ops.cross_entropy(logits, batch.labels, self.config.vocab_size)
