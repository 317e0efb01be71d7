"""Training jobs as columns: what the planner's formulas read. One row is one model on one cluster under one layout.

Every formula of the planner (memory, time) is written once, over columns, and so serves a sweep over a hundred thousand
layouts of one job as well as a table of measured runs of different models on different machines. A column is a
NumPy array of one value per job, or a 0-d array where all jobs agree; formulas broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fourfold.recipe import ModelConfig

Column = NDArray[Any]


class Precision(IntEnum):
    """Numbers that matrices are multiplied in. Attention and everything else stay in 16 bits below FP8, too."""

    FP32 = 0
    FP16 = 1
    BF16 = 2
    FP8 = 3
    MXFP8 = 4
    FP4 = 5

    @property
    def bits(self) -> int:
        """Of one number."""
        return (32, 16, 16, 8, 8, 4)[self]


class Order(IntEnum):
    """Kinds of pipeline schedules, as `layout.generate` names them (lower case, "1f1b" for ONE_F_ONE_B)."""

    AFAB = 0
    ONE_F_ONE_B = 1
    INTERLEAVED = 2
    FLEXIBLE = 3
    ZB_H1 = 4


class Recompute(IntEnum):
    """What backward computes again instead of having kept it."""

    NONE = 0
    SELECTIVE = 1
    """What costs next to nothing: the attention core where it is not fused (its scores are never kept where it is),
    norms and the product of SwiGLU."""
    MATMULS = 2
    """Every other matrix product, and all that is cheap (TorchTitan's selective checkpointing per operation)."""
    FEED_FORWARD = 3
    """All but the projections of attention (JAX: save qkv and out_proj)."""
    FULL = 4
    """The whole layer from its input."""


class Split(IntEnum):
    """Layers over stages, as `layout.partition` does it."""

    EVEN = 0
    ENDS_LIGHT = 1


ORDER_NAMES = {
    Order.AFAB: "afab",
    Order.ONE_F_ONE_B: "1f1b",
    Order.INTERLEAVED: "interleaved",
    Order.FLEXIBLE: "flexible",
    Order.ZB_H1: "zb-h1",
}
RECOMPUTE_NAMES = {
    Recompute.NONE: "none",
    Recompute.SELECTIVE: "selective",
    Recompute.MATMULS: "matmuls",
    Recompute.FEED_FORWARD: "feed-forward",
    Recompute.FULL: "full",
}


TRAINED_IN: dict[Literal["float32", "bfloat16"], Precision] = {"float32": Precision.FP32, "bfloat16": Precision.BF16}
"""What the trainer computes in, by `train.dtype`."""


@dataclass(frozen=True)
class Jobs:
    """Columns. Bytes per second are one-way per GPU; FLOP/s are dense peaks."""

    # The model
    layers: Column
    dim: Column
    heads: Column
    kv_heads: Column
    head_dim: Column
    ffn_dim: Column
    gated: Column  # bool: SwiGLU with three matrices, else two
    vocab: Column  # ids that mean something
    padded_vocab: Column  # rows of the embedding as stored
    tied: Column  # bool
    positions: Column  # learned positions, rows of dim; 0: rotary or none

    # The batch
    seq_len: Column
    sequences: Column  # per step, all ranks
    pairs: Column  # (query, visible key) pairs per sequence: seq_len (seq_len + 1) / 2 if causal, fewer with documents

    # The layout
    tp: Column
    cp: Column
    pp: Column
    dp: Column
    v: Column  # virtual stages per rank
    nc: Column  # consecutive micro-batches per virtual stage
    micro_batch: Column  # sequences
    order: Column  # Order
    split: Column  # Split
    zero: Column  # 0 (nothing sharded) to 3
    shards: Column  # ranks that share a copy of what ZeRO shards: dp cp, less in hybrid sharding
    sequence_parallel: Column  # bool: activations between TP's regions are cut over TP
    recompute: Column  # Recompute
    recomputed_layers: Column  # share of the layers to which `recompute` applies, 0 to 1

    # The numbers
    precision: Column  # Precision
    gradient_bytes: Column  # per parameter, of the sums: 4 or 2
    reduce_bytes: Column  # per parameter, as they travel in the reduce-scatter: 4 or 2

    # The software
    fused_attention: Column  # bool: flash or the like; scores never in memory
    compiled: Column  # bool: torch.compile or XLA
    cuda_graphs: Column  # bool
    tp_overlap: Column  # bool: TP's collectives run under matrix products

    # The hardware
    chip: Column  # row of `cluster.CHIPS`
    peak: Column  # FLOP/s of `precision`
    peak_16: Column  # FLOP/s of 16-bit numbers
    units: Column  # streaming multiprocessors, over which tiles of a product are dealt
    hbm_bytes: Column  # as a program sees it
    hbm_bandwidth: Column  # bytes/s
    domain: Column  # GPUs that NVLink (or the like) connects, as far as the job uses them
    link: Column  # bytes/s one-way per GPU inside the domain
    nic: Column  # bytes/s one-way per GPU between domains
    tier: Column  # GPUs that full bandwidth connects; beyond, `nic` is divided by `oversubscription`
    oversubscription: Column

    # Software again, for what measured runs of 2023 differ by
    fused_norms: Column = field(default_factory=lambda: np.asarray(True))  # bool: one kernel each; else eager, in fp32

    @property
    def gpus(self) -> Column:
        """GPUs of each job."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def micro_batches(self) -> Column:
        """Micro-batches per step and data-parallel group. Measured runs exist in which the last one is not full."""
        return np.maximum(1, np.ceil(self.sequences / (self.dp * self.micro_batch) - 1e-9)).astype(np.int64)

    @property
    def tokens(self) -> Column:
        """Tokens per step."""
        return self.sequences * self.seq_len

    def __len__(self) -> int:
        """Number of jobs."""
        shape = np.broadcast_shapes(*(getattr(self, field.name).shape for field in fields(self)))
        return shape[0] if shape else 1

    def take(self, rows: Any) -> Self:
        """The jobs at these indices, or where a mask is true; columns in which all jobs agree stay as they are."""
        return type(self)(**{name: c[rows] if c.ndim else c for name, c in self._columns()})

    def row(self, index: int) -> Self:
        """One job, all of its columns 0-d."""
        return type(self)(**{name: c[index] if c.ndim else c for name, c in self._columns()})

    def replace(self, **columns: Any) -> Self:
        """A copy with other columns."""
        values = dict(self._columns()) | {name: np.asarray(value) for name, value in columns.items()}
        return type(self)(**values)

    @classmethod
    def of(cls, **columns: Any) -> Self:
        """Jobs from numbers and arrays."""
        return cls(**{name: np.asarray(value) for name, value in columns.items()})

    @classmethod
    def concatenate(cls, several: Sequence[Jobs]) -> Self:
        """All jobs of several, one after another."""
        return cls(
            **{
                field.name: np.concatenate(
                    [np.broadcast_to(getattr(jobs, field.name), (len(jobs),)) for jobs in several]
                )
                for field in fields(cls)
            }
        )

    def _columns(self) -> list[tuple[str, Column]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def model_columns(config: ModelConfig) -> dict[str, Any]:
    """The columns that say what the model is."""
    return {
        "layers": config.num_layers,
        "dim": config.dim,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "ffn_dim": config.ffn_dim,
        "gated": True,
        "vocab": config.vocab_size,
        "padded_vocab": config.padded_vocab,
        "tied": config.tied,
        "positions": 0,
    }


def layer_parameters(jobs: Jobs) -> tuple[Column, Column]:
    """(matrices, norms) of one layer: parameters that TP cuts, and those that every TP rank has whole.

    2 dim head_dim (heads + kv_heads) in attention, 3 dim ffn_dim in a gated feed-forward network, else 2 dim ffn_dim.
    """
    attention = 2 * jobs.dim * jobs.head_dim * (jobs.heads + jobs.kv_heads)
    feed_forward = np.where(jobs.gated, 3, 2) * jobs.dim * jobs.ffn_dim
    return attention + feed_forward, 2 * jobs.dim


def model_parameters(jobs: Jobs) -> Column:
    """Parameters of the whole model, without the padding of the vocabulary."""
    matrices, norms = layer_parameters(jobs)
    tables = np.where(jobs.tied, 1, 2) * jobs.vocab + jobs.positions
    return jobs.layers * (matrices + norms) + tables * jobs.dim + jobs.dim
