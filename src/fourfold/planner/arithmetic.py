"""How many parameters a model has, and how many bytes each rank holds, exactly. Integers only.

A layer has 2 dim head_dim (heads + kv_heads) parameters in attention, 3 dim ffn_dim in the feed-forward network and
2 dim in its norms. What is kept in which numbers follows "Scaling Llama 3 Training" (ISCA 2025), 3.1.3 and Figure 4:
fp32 master weights and moments sharded over dp x cp, gathered weights in train.dtype, gradient sums in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fourfold.layout import Kind, Schedule, Stage
from fourfold.layout.actions import ENDS
from fourfold.recipe import ModelConfig, is_frozen, parameter_shapes, split_dimension, stage_shapes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FP32 = 4  # bytes; master weights, gradient sums and optimizer state are float32 in every run


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of a whole model by component. `embedding` and `head` count real token ids, not the padding."""

    embedding: int
    attention: int
    ffn: int
    norms: int
    head: int  # 0 in a tied model

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.attention + self.ffn + self.norms + self.head


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Exact counts: 8,030,261,248 for 8B, 70,553,706,496 for 70B, 405,853,388,800 for 405B."""
    heads = config.num_heads + config.num_kv_heads  # wq and wo each have the first, wk and wv the second
    return ParameterCount(
        embedding=config.vocab_size * config.dim,
        attention=config.num_layers * 2 * config.dim * config.head_dim * heads,
        ffn=config.num_layers * 3 * config.dim * config.ffn_dim,
        norms=(2 * config.num_layers + 1) * config.dim,
        head=0 if config.tied else config.vocab_size * config.dim,
    )


def count_trained(config: ModelConfig, freeze: Sequence[str]) -> int:
    """Parameters of the whole model that `freeze` does not cover, without vocabulary padding."""
    total = 0
    for name, (rows, *rest) in parameter_shapes(config).items():
        if not is_frozen(name, freeze):
            in_vocabulary = name in ("tok_embeddings.weight", "output.weight")
            total += (config.vocab_size if in_vocabulary else rows) * math.prod(rest)
    return total


def on_tensor_rank(name: str, shape: Sequence[int], *, config: ModelConfig, tp: int) -> tuple[int, ...]:
    """Shape of one parameter on one of `tp` ranks."""
    cut = split_dimension(name, config, tp)
    return tuple(size // tp if dimension == cut else size for dimension, size in enumerate(shape))


@dataclass(frozen=True, slots=True)
class StageCount:
    """Parameters of one stage on one tensor-parallel rank."""

    held: int  # gathered: what the stage computes with
    gathered: int  # the same in FSDP's buffers, in which every rank's part is as long as the longest
    at_once: int  # of these, what ZeRO-3 needs at a time: one layer, and what belongs to none
    trained: int  # those of `held` that are not frozen
    held_shard: int  # the part that one FSDP rank keeps between steps, on the rank with most
    trained_shard: int


def count_stages(
    config: ModelConfig, stages: Sequence[Stage], *, tp: int, num_shards: int, freeze: Sequence[str] = ()
) -> tuple[StageCount, ...]:
    """Parameters per stage and rank, padded vocabulary included.

    `num_shards` = dp x cp ranks share each parameter by rows (FSDP); rows that do not divide are rounded up.
    """
    counts = []
    for shapes in stage_shapes(config, stages):
        local = {name: on_tensor_rank(name, shape, config=config, tp=tp) for name, shape in shapes.items()}
        trained = {name: shape for name, shape in local.items() if not is_frozen(name, freeze, tied=config.tied)}
        held_shard = _elements(_shards(local, num_shards))
        layers = [_elements(_shards(layer, num_shards)) for layer in _by_layer(local).values()]
        counts.append(
            StageCount(
                held=_elements(local.values()),
                gathered=num_shards * held_shard,
                at_once=num_shards * (held_shard - sum(layers) + max(layers, default=0)),
                trained=_elements(trained.values()),
                held_shard=held_shard,
                trained_shard=_elements(_shards(trained, num_shards)),
            )
        )
    return tuple(counts)


def _by_layer(local: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Sequence[int]]]:
    layers: dict[str, dict[str, Sequence[int]]] = {}
    for name, shape in local.items():
        if name.startswith("layers."):
            layers.setdefault(name.split(".", 2)[1], {})[name] = shape
    return layers


def _elements(shapes: Iterable[Sequence[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _shards(local: Mapping[str, Sequence[int]], num_shards: int) -> list[tuple[int, ...]]:
    return [(-(-rows // num_shards), *rest) for rows, *rest in local.values()]


@dataclass(frozen=True, slots=True)
class Bytes:
    """What one rank holds besides activations and communication buffers, in bytes; each kind at its own peak."""

    master: int  # fp32 weights, sharded over dp x cp; the optimizer updates these
    weights: int  # gathered weights in the compute dtype
    gradients: int  # fp32 sums of whole stages, before their reduce-scatter; ZeRO-3 has none
    gradient_shards: int  # fp32, after it
    optimizer: int  # fp32 moments, sharded like the master weights

    @property
    def total(self) -> int:
        """Sum of the peaks; the true peak is not above it."""
        return self.master + self.weights + self.gradients + self.gradient_shards + self.optimizer


def moments_per_parameter(optimizer: str, *, momentum: float = 0.0) -> int:
    """fp32 numbers that the optimizer keeps per trained parameter: two for AdamW, one for SGD with momentum."""
    return {"adamw": 2, "sgd": 1 if momentum else 0}[optimizer]


def rank_bytes(
    pp_rank: int,
    *,
    schedule: Schedule,
    counts: Sequence[StageCount],
    dtype: Literal["float32", "bfloat16"],
    num_moments: int,
) -> Bytes:
    """Bytes of one pipeline rank, by playing its FSDP events.

    A stage's weights are whole from GATHER to FREE, its gradients from the first backward to REDUCE. So ZeRO-1 in 1F1B
    order keeps all its stages' gradients whole at once; all-forward-all-backward and ZeRO-2 one stage's (ISCA'25 Figure
    4). ZeRO-3 gathers one layer at a time, and reduces its gradients within the backward that makes them.
    """
    gathered: set[int] = set()
    summing: set[int] = set()
    most_weights = most_gradients = 0
    for kind, stage, _ in schedule.actions[pp_rank]:
        if kind is Kind.GATHER:
            gathered.add(stage)
            most_weights = max(most_weights, sum(counts[s].gathered for s in gathered))
        elif kind is Kind.FREE:
            gathered.discard(stage)
        elif kind in ENDS and stage not in summing:
            summing.add(stage)
            most_gradients = max(most_gradients, sum(counts[s].trained for s in summing))
        elif kind is Kind.REDUCE:
            summing.discard(stage)
    mine = counts[pp_rank :: schedule.pp]
    if schedule.zero == 3:
        most_weights, most_gradients = max(c.at_once for c in mine), 0
    trained_shard = sum(c.trained_shard for c in mine)
    return Bytes(
        master=FP32 * sum(c.held_shard for c in mine),
        weights=DTYPE_BYTES[dtype] * most_weights,
        gradients=FP32 * most_gradients,
        gradient_shards=FP32 * trained_shard,
        optimizer=FP32 * num_moments * trained_shard,
    )
