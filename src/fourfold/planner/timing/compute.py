"""What one rank computes in one layer and one micro-batch, in seconds: matrix products, attention, and the rest.

A product of [M, K] and [K, N] takes 2 M N K FLOPs. Tiles of its result are dealt over the chip's units in waves, and
the last wave is seldom full; each tile has to be started and ended, which a deep K makes up for: K / (K + depth). Big
products sustain a fraction of the dense peak, by chip and numbers (power limits it more than anything else). What is
not a product is limited by memory: bytes over bandwidth. Host time is a floor under all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fourfold.planner.jobs import Column, Jobs, Precision

if TYPE_CHECKING:
    from fourfold.planner.timing.stack import Constants

TILES = ((128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.75))
"""(rows, columns, rate relative to the best) that a library chooses from: small tiles fill the units better, and read
more per FLOP."""
HBM_SHARE = 0.85  # of the printed bandwidth that long streams reach
BACKWARD_ATTENTION = 2.5  # FLOPs of fused attention's backward over forward's: it multiplies Q K^T again
BACKWARD_ATTENTION_RATE = 0.88  # FLOP/s of the same, as FlashAttention 3 was measured by its authors on long sequences
ATTENTION_BLOCK = 128  # queries that one unit works on at a time
HEAD_DIM = 128  # size of heads for which attention's rates are stated
HALF_HEAD = (
    16  # size at which its tensor cores idle half of the time: heads of 64 reach 0.9 of that (FlashAttention 2, A100)
)
SCORE_BYTES = (13, 19)  # forward, backward, per score of unfused attention: soft-max, mask, dropout and both products
EAGER_NORMS = 72  # bytes per channel of two norms of single operations in fp32, each of which reads and writes
FUSED_NORMS = 8  # the same of one kernel each: read 2, write 2
LOSS_BYTES = 12  # per logit, each way: a 16-bit and an fp32 copy, the soft-max
COMPILED = 0.25  # of the excess over the least bytes that a compiler leaves
SHARPNESS = 4  # of `largest`


def largest(one: Column, other: Column) -> Column:
    """The larger of two times, rounded off where they are near: what waits is sometimes this, sometimes that."""
    high = np.maximum(one, other)
    low = np.minimum(one, other)
    ratio = (low / np.maximum(high, 1e-30)) ** 2
    return high * np.sqrt(np.sqrt(1 + ratio * ratio))


def exposed(hidden: Column, cover: Column) -> Column:
    """Seconds by which what runs beside `cover` seconds of other work lengthens it."""
    return largest(hidden, cover) - cover


@dataclass(frozen=True)
class Rates:
    """What the chip and the stack sustain, per job."""

    matmul: Column  # FLOP/s in `precision`, of a big product
    matmul_16: Column  # in 16-bit numbers: the head, and unfused attention
    attention: Column  # FLOP/s of fused attention's forward, on long sequences
    hbm: Column  # bytes/s
    depth: Column  # K at which a product runs at half of its rate
    value: Column  # bytes per number of a product's operands


def rates(jobs: Jobs, constants: Constants) -> Rates:
    """Sustained rates of each job."""
    chip = constants.sustained.rows(jobs.chip)
    low, lower = jobs.precision >= Precision.FP8, jobs.precision >= Precision.FP4
    share = np.where(low, np.where(lower, chip.matmul_4, chip.matmul_8), chip.matmul_16)
    attention = np.where(constants.portable, chip.portable, chip.attention)
    return Rates(
        matmul=jobs.peak * share * constants.matmul,
        matmul_16=jobs.peak_16 * chip.matmul_16 * constants.matmul,
        attention=jobs.peak_16 * attention * constants.attention,
        hbm=jobs.hbm_bandwidth * HBM_SHARE,
        depth=np.asarray(constants.depth),
        value=np.where(low, np.where(lower, 0.5, 1.0), 2.0),
    )


def wave_share(m: Column, n: Column, units: Column) -> Column:
    """Share of the units that is busy with an [m, n] result, times the rate of the tile: that of the best tile."""
    best: Column = np.asarray(0.0)
    for rows, columns, rate in TILES:
        dealt = np.ceil(np.ceil(m / rows) * np.ceil(n / columns) / units) * units
        inside = m * n / (rows * columns)  # what of the last tiles is beyond the edge is no work
        best = np.maximum(best, rate * inside / dealt)
    return np.minimum(best, 1.0)


@dataclass(frozen=True)
class Multiplier:
    """Where matrix products run, and with which numbers."""

    rate: Column  # FLOP/s
    value: Column  # bytes per operand
    units: Column
    depth: Column
    hbm: Column

    def seconds(self, m: Column, n: Column, k: Column) -> Column:
        """[m, k] x [k, n]: FLOPs over the rate that waves and depth leave, or the bytes of all three matrices."""
        busy = wave_share(m, n, self.units) * k / (k + self.depth)
        moved = self.value * k * (m + n) + 2 * m * n
        return np.maximum(2 * m * n * k / (self.rate * busy), moved / self.hbm)

    def linear(self, tokens: Column, outputs: Column, inputs: Column) -> tuple[Column, Column]:
        """(forward, backward) of a linear layer; backward multiplies for its inputs' and its weights' gradients."""
        backward = self.seconds(tokens, inputs, outputs) + self.seconds(outputs, inputs, tokens)
        return self.seconds(tokens, outputs, inputs), backward


def _sum(*pairs: tuple[Column, Column]) -> tuple[Column, Column]:
    forward, backward = pairs[0]
    for pair in pairs[1:]:
        forward, backward = forward + pair[0], backward + pair[1]
    return forward, backward


@dataclass(frozen=True)
class LayerWork:
    """Seconds of one layer and one micro-batch on one rank, (forward, backward) each, without communication."""

    tokens: Column
    projections: tuple[Column, Column]  # qkv and output
    feed_forward: tuple[Column, Column]
    attention: tuple[Column, Column]
    memory_bound: tuple[Column, Column]
    launch: tuple[Column, Column]  # host seconds; not in addition, but a floor

    @property
    def matmul(self) -> tuple[Column, Column]:
        """All linear layers."""
        return _sum(self.projections, self.feed_forward)


@dataclass(frozen=True)
class _Cut:
    """Sizes on one rank: heads and the feed-forward network are cut over TP, tokens over CP."""

    tokens: Column
    heads: Column
    kv_heads: Column
    inner: Column  # width of the feed-forward network
    up: Column  # the same, of gate and up together

    @classmethod
    def of(cls, jobs: Jobs) -> _Cut:
        inner = jobs.ffn_dim / jobs.tp
        return cls(
            tokens=jobs.micro_batch * jobs.seq_len / jobs.cp,
            heads=jobs.heads / jobs.tp,
            kv_heads=np.maximum(jobs.kv_heads / jobs.tp, 1.0),
            inner=inner,
            up=np.where(jobs.gated, 2, 1) * inner,
        )


def layer_work(jobs: Jobs, constants: Constants, at: Rates) -> LayerWork:
    """All of one layer."""
    cut = _Cut.of(jobs)
    products = Multiplier(at.matmul, at.value, jobs.units, at.depth, at.hbm)
    qkv = products.linear(cut.tokens, (cut.heads + 2 * cut.kv_heads) * jobs.head_dim, jobs.dim)
    output = products.linear(cut.tokens, jobs.dim, cut.heads * jobs.head_dim)
    up = products.linear(cut.tokens, cut.up, jobs.dim)
    down = products.linear(cut.tokens, jobs.dim, cut.inner)
    return LayerWork(
        tokens=cut.tokens,
        projections=_sum(qkv, output),
        feed_forward=_sum(up, down),
        attention=_attention(jobs, constants, at, cut),
        memory_bound=_memory_bound(jobs, constants, at, cut),
        launch=_launch(jobs, constants),
    )


def _attention(jobs: Jobs, constants: Constants, at: Rates, cut: _Cut) -> tuple[Column, Column]:
    """Fused: 4 FLOPs per visible pair and channel. Unfused: the full square, its scores through memory many times."""
    sequences = jobs.micro_batch / jobs.cp
    blocks = np.maximum(jobs.micro_batch * cut.heads * jobs.seq_len / jobs.cp / ATTENTION_BLOCK, 1.0)
    busy = blocks / (np.ceil(blocks / jobs.units) * jobs.units)
    wide = (HEAD_DIM + HALF_HEAD) / HEAD_DIM * jobs.head_dim / (jobs.head_dim + HALF_HEAD)
    queries = jobs.seq_len / jobs.cp  # short chunks are as inefficient as short sequences, whatever they see
    long = queries / (queries + constants.reach)
    fused = 4 * jobs.pairs * sequences * cut.heads * jobs.head_dim / (at.attention * busy * wide * long)
    fused_backward = fused * (BACKWARD_ATTENTION / BACKWARD_ATTENTION_RATE)

    scores = 1.0 * jobs.seq_len * jobs.seq_len * sequences * cut.heads
    # Both products are only as deep, or as wide, as one head.
    products = 4 * scores * (jobs.head_dim + at.depth) / at.matmul_16
    passes = [constants.scores * size * scores / at.hbm for size in SCORE_BYTES]
    return (
        np.where(jobs.fused_attention, fused, products + passes[0]),
        np.where(jobs.fused_attention, fused_backward, 2 * products + passes[1]),
    )


def _memory_bound(jobs: Jobs, constants: Constants, at: Rates, cut: _Cut) -> tuple[Column, Column]:
    """Norms, residual sums, rotary positions, the activation function, casts to 8 bits; backward moves twice as much.

    Least bytes, of 16-bit numbers: two norms, two sums (2 reads, 1 write) of dim, rotary (read, write) of q and k, the
    activation's inputs and output. A stack moves `elementwise` times that, of which a compiler spares it the most.
    """
    norms = np.where(jobs.fused_norms | jobs.compiled, FUSED_NORMS, EAGER_NORMS)
    whole = (norms + 12) * jobs.dim / np.where(jobs.sequence_parallel, jobs.tp, 1)
    rotary = np.where(jobs.positions > 0, 0, 4) * (cut.heads + cut.kv_heads) * jobs.head_dim
    least = cut.tokens * (whole + rotary + 2 * (cut.up + cut.inner)) / at.hbm
    moved = least * (1 + np.where(jobs.compiled, COMPILED, 1.0) * (constants.elementwise - 1))
    # Inputs forward, gradients of outputs backward: read 2 bytes, write 1 as it is and 1 transposed.
    cast = np.where(jobs.precision >= Precision.FP8, 4 * constants.cast, 0.0) * cut.tokens / at.hbm
    inputs = 2 * jobs.dim + cut.heads * jobs.head_dim + cut.inner
    outputs = 2 * jobs.dim + (cut.heads + 2 * cut.kv_heads) * jobs.head_dim + cut.up
    return moved + cast * inputs, 2 * moved + cast * outputs


def _launch(jobs: Jobs, constants: Constants) -> tuple[Column, Column]:
    """Host seconds to launch a layer's kernels. Backward has twice as many, but no Python between them."""
    share = np.where(jobs.cuda_graphs, 0.0, np.where(jobs.compiled, 0.5, 1.0))
    share = share * np.where(jobs.precision >= Precision.FP8, 2.0, 1.0)  # casts, maxima and scales are kernels, too
    forward = share * (1 + 0.1 * np.log2(jobs.tp)) * constants.launch  # the slowest of tp hosts is waited for
    return forward, 1.2 * forward


def head_work(jobs: Jobs, at: Rates) -> tuple[Column, Column]:
    """(forward, backward) seconds of the product with the vocabulary, in 16 bits, and of the loss, both cut over TP."""
    tokens = jobs.micro_batch * jobs.seq_len / jobs.cp
    vocab = jobs.padded_vocab / jobs.tp
    products = Multiplier(at.matmul_16, np.asarray(2.0), jobs.units, at.depth, at.hbm)
    loss = LOSS_BYTES * tokens * vocab / at.hbm
    return _sum(products.linear(tokens, vocab, jobs.dim), (loss, loss))


def embedding_work(jobs: Jobs, at: Rates) -> tuple[Column, Column]:
    """(forward, backward) seconds of looking tokens up and of adding their gradients: rows of dim, read and written."""
    rows = 4 * jobs.micro_batch * jobs.seq_len / jobs.cp * jobs.dim / at.hbm
    return rows, 2 * rows
