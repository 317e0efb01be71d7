"""What a layer, the embedding and the head hold in memory, in bytes per micro-batch: the inventory.

Values are counted, not whole formulas fitted: two norms keep input and output, attention keeps q, k, v and its output,
the feed-forward network what its matrices made (algorithms.md 3.2). Software differs in which of them it keeps, in the
numbers it keeps them in, and in what is alive for a moment only: that is `MemoryRules`, a part of every stack.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Literal, Self

import msgspec
import numpy as np

from fourfold.planner.jobs import Column, Jobs, Precision, Recompute
from fourfold.planner.machines.chips import CHIPS, MIB
from fourfold.recipe.errors import nearest_name, show

TRANSPOSING = ("h100", "h100-hbm2e", "h200")  # chips


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that autograd keeps per token of a layer, for 16-bit numbers; the defaults are what is needed, no more."""

    norm_inputs: float = 4.0
    """Per hidden unit: two inputs."""
    norm_outputs: float = 4.0
    """Per hidden unit: the inputs of the projections into attention and feed-forward network."""
    eager_norms: float = 12.0
    """Per hidden unit more, where norms are not a kernel each: fp32 copies of two inputs and what came of them."""
    attention: float = 4.0
    """Per query head and its size: queries after rotary embedding, and the output."""
    key_value: float = 4.0
    """Per KV head and its size: keys and values."""
    gate_up: float = 4.0
    """Per feed-forward unit of a gated network; half of it in a network of two matrices."""
    product: float = 2.0
    """Per feed-forward unit: the input of the last projection."""
    dropout: float = 0.0
    """Per hidden unit: two masks of one byte, if there is dropout: 2."""
    scores: float = 5.0
    """Per (query, key) pair and head, where attention is not fused: softmax, dropout mask, what came through it."""


class MemoryRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What software does with memory. The defaults are those of the set "standard"."""

    saved_set: str = "standard"
    source: str
    kept: Kept = Kept()
    share: float = 1.0
    """Of the inventory that is really kept: 0.62 in Meta's own graph (facts.md 2.4: 0.33 GB of 0.53 per 405B layer)."""
    gathered_inputs: bool = False
    """Whether the inputs of projections are kept whole on every TP rank although sequence parallelism cuts them."""
    gathered_kv: bool = True
    """Whether the keys and values that CP gathers are kept for backward, instead of gathered again."""
    repeated_kv: float = 0.0
    """Of a rank's own tokens under CP, the share by which keys grow that attention has once for each of its runs: 0.5,
    where a row is one document, of which a rank has one chunk near the head and one near the tail."""
    stage_outputs: bool = False
    """Whether a stage's output lives until its backward, which needs its shape only."""
    rotary: float = 0.0
    """Per token of a stage and number of a head: cosines and sines, fp32, where they are kept once for all layers."""
    selective: tuple[Literal["scores", "norms", "product"], ...] = ("scores", "norms", "product")
    """What "selective" recomputes."""
    selective_within: bool = False
    """Whether a layer that is recomputed as a whole recomputes these, too, once it is there again."""

    scores_transient: float = 4.0
    """Bytes per (query, key) pair and head while attention that is not fused runs backward, beyond what was kept."""
    logits_kept: float = 2.0
    """Bytes per logit from the head's forward to its backward."""
    logits_peak: float = 14.0
    """Bytes per logit at the worst moment of the loss, with what is kept."""
    whole_logits: bool = False
    """Whether every TP rank has the logits of the whole vocabulary for the loss, instead of its share."""
    head_gradient: float = 2.0
    """Bytes per weight of the head while its gradient is made, beside the sum that it is added to."""
    wide_embedding: bool = False
    """Whether a 16-bit embedding's gradient is summed over tokens in fp32, and then rounded."""

    static_gradients: bool = False
    """One buffer for all gradient sums through the whole step, instead of from first backward to reduction."""
    lasting_shards: bool = False
    """Whether reduced gradients count all the time: their blocks are free between steps, but too small to be used."""
    weight_gradients: Literal["stage", "largest", "shapes", "none"] = "largest"
    """Gradients of single micro-batches before they are added to the sums: of all weights of the stage at the end of
    its backward, of the largest matrix only, in one lasting buffer per shape of matrix (TransformerEngine), or none."""
    reduction_copy: bool = False
    """Whether a stage's gradients are copied into one buffer, in the numbers that travel, to be reduced (FSDP2)."""
    prefetched_layers: float = 1.0
    """ZeRO-3: layers whose weights are gathered ahead of the one at work."""
    fp8_weights: float = 2.0
    """Bytes per weight as the matrix products read it, in a job in FP8 or less."""
    fp8_transposed: float = 0.0
    """Bytes per weight more on chips whose FP8 products want a transposed copy for backward: `TRANSPOSING`."""
    fp8_kept: Kept | None = None
    """What such a job keeps, where it differs."""
    messages: float = 2.0
    """Boundary tensors in buffers of receives and sends, where there is a pipeline."""

    workspace: float = 64 * MIB
    """Allocated by libraries for good: cuBLAS, rotary tables, masks."""


@cache
def _rules() -> dict[str, MemoryRules]:
    text = (resources.files("fourfold.planner.memory") / "saved_sets.toml").read_text(encoding="utf-8")
    return {name: msgspec.convert(table, MemoryRules) for name, table in tomllib.loads(text).items()}


def load_rules(name: str) -> MemoryRules:
    """A saved set by name. ValueError naming the nearest."""
    rules = _rules()
    if name not in rules:
        nearest = nearest_name(name, tuple(rules)) or "standard"
        raise ValueError(f"saved_set = {show(name)}: must be one of {', '.join(rules)}; nearest legal: {show(nearest)}")
    return rules[name]


@dataclass(frozen=True)
class Sizes:
    """Columns. Parameters on one TP rank, and bytes of one micro-batch on one rank."""

    weight_bytes: Column  # per parameter, as gathered
    master_bytes: Column  # per parameter, before sharding: fp32 weights and two moments
    layer: Column  # parameters
    embedding: Column  # parameters, learned positions with them
    head: Column  # parameters, last norm with them
    activations: Column  # kept per layer, the mean over layers; 405B at 8,192 tokens, tp 8, no recomputation: 0.496 GiB
    gathered_kv: Column  # kept per layer, beyond a rank's own keys and values
    message: Column  # one boundary tensor
    output: Column  # kept per stage
    norm: Column  # kept by the last norm and the head's projection
    logits: Column  # kept by the loss
    layer_transient: Column  # alive for a moment of a layer's backward, beyond what was kept
    head_transient: Column  # the same around the head and the loss, forward or backward
    embedding_transient: Column
    matrix: Column  # parameters of the largest matrix
    shapes: Column  # parameters of one matrix of each shape

    def take(self, rows: Column) -> Self:
        """Those of these jobs; columns in which all agree stay as they are."""
        columns = {field.name: np.asarray(getattr(self, field.name)) for field in fields(self)}
        return type(self)(**{name: column[rows] if column.ndim else column for name, column in columns.items()})


def sizes(jobs: Jobs, rules: MemoryRules) -> Sizes:
    """All that memory is made of, for every job."""
    number = np.where(jobs.precision == Precision.FP32, 4, 2)
    low = jobs.precision >= Precision.FP8
    tokens = jobs.micro_batch * jobs.seq_len / jobs.cp
    cut = np.where(jobs.sequence_parallel, jobs.tp, 1)  # of what lies between TP's regions
    whole = tokens * jobs.dim * number
    hidden = whole / cut
    kv_heads = np.maximum(jobs.kv_heads, jobs.tp) / jobs.tp  # per rank: shared where there are fewer than ranks
    width = tokens * jobs.ffn_dim * number / jobs.tp
    joined = np.where(jobs.gated, 2, 1)  # matrices into the feed-forward network

    qkv = jobs.dim * jobs.head_dim * (jobs.heads / jobs.tp + 2 * kv_heads)
    out = jobs.dim * jobs.head_dim * jobs.heads / jobs.tp
    up, down = joined * jobs.dim * jobs.ffn_dim / jobs.tp, jobs.dim * jobs.ffn_dim / jobs.tp
    table = jobs.padded_vocab * jobs.dim / jobs.tp
    layer = qkv + out + up + down + 2 * jobs.dim
    matrix = np.maximum(up, qkv)

    full, selective, recomputed = _kept(jobs, rules)
    kept = full + jobs.recomputed_layers * (recomputed - full)
    # Keys and values of the other CP ranks.
    others = jobs.cp - 1 + rules.repeated_kv * (jobs.cp > 1)
    gathered = 2 * tokens * others * kv_heads * jobs.head_dim * number
    kept_kv = np.where(rules.gathered_kv & (jobs.recompute <= Recompute.SELECTIVE), gathered, 0.0)
    # The residual's gradient is there all the time. The worst moment is that of the activation function, whose inputs'
    # gradient is as wide as what it kept, or that of the gathered input and its gradient whole.
    whole_pair = np.where(jobs.sequence_parallel & (jobs.tp > 1), 2 * whole, 0.0)
    backward = hidden + np.maximum(joined * width, whole_pair - width)
    scores = np.where(jobs.fused_attention, 0.0, rules.scores_transient * number / 2 * _pairs(jobs))
    backward = np.maximum(backward, hidden + scores)
    # Of layers that differ the worst is one that is recomputed: all of it is there again, if not what goes for nothing.
    within = rules.selective_within & (jobs.recompute == Recompute.FULL)
    again = np.where(within, selective, full)
    transient = backward + (again - recomputed) * (jobs.recomputed_layers > 0) + (gathered - kept_kv)
    of_norm = 2.0 - ("norms" in rules.selective) * (within | (jobs.recompute == Recompute.SELECTIVE))

    logit_16 = tokens * jobs.padded_vocab / (1 if rules.whole_logits else jobs.tp)
    logit = logit_16 * (number / 2)
    wide = rules.wide_embedding & (number == 2)
    head_backward = 2 * logit + rules.head_gradient * table + hidden + whole_pair
    return Sizes(
        weight_bytes=np.where(low, rules.fp8_weights + rules.fp8_transposed * _transposing()[jobs.chip], number),
        # fp32 weights are held beside their gathered copy, as fully_shard does; nothing is gathered without shards.
        master_bytes=np.where((number == 4) & (jobs.zero == 0), 8, 12),
        layer=layer,
        embedding=table + jobs.positions * jobs.dim,
        head=np.where(jobs.tied & (jobs.pp == 1), 0.0, table) + jobs.dim,
        activations=kept,
        gathered_kv=kept_kv,
        message=hidden,
        output=hidden * rules.stage_outputs + np.where(jobs.positions > 0, 0.0, rules.rotary * tokens * jobs.head_dim),
        norm=of_norm * hidden,
        logits=rules.logits_kept * logit,
        layer_transient=transient,
        # What the loss makes of them is fp32 in any case.
        head_transient=np.maximum(
            (rules.logits_peak - rules.logits_kept) * logit_16, head_backward - rules.logits_kept * logit
        ),
        embedding_transient=(number + 4 * wide) * table + (2 + wide) * whole,
        matrix=matrix,
        shapes=qkv + out + up + down,
    )


def _kept(jobs: Jobs, rules: MemoryRules) -> tuple[Column, Column, Column]:
    """Bytes per layer and micro-batch: of a layer of which nothing is recomputed, of which what "selective" does is,
    and of one as the job says."""
    number = np.where(jobs.precision == Precision.FP32, 2.0, 1.0)  # beside 16 bits
    scale = number * jobs.micro_batch * jobs.seq_len / jobs.cp
    hidden = scale * jobs.dim / np.where(jobs.sequence_parallel, jobs.tp, 1)
    heads = scale * jobs.heads * jobs.head_dim / jobs.tp
    kv = scale * np.maximum(jobs.kv_heads, jobs.tp) / jobs.tp * jobs.head_dim
    width = scale * jobs.ffn_dim / jobs.tp
    gated = np.where(jobs.gated, 1.0, 0.5)
    tokens = jobs.micro_batch * jobs.seq_len / jobs.cp
    # fp32: log-sum-exp of every query head if attention is fused, and one number per token of each norm.
    sums = np.where(jobs.fused_attention, 4 * tokens * jobs.heads / jobs.tp, 0.0)
    statistics = sums + 8 * tokens / np.where(jobs.sequence_parallel, jobs.tp, 1)

    def inventory(kept: Kept) -> tuple[Column, ...]:
        into = scale * jobs.dim if rules.gathered_inputs else hidden
        return (
            (kept.norm_inputs + kept.dropout + kept.eager_norms * ~(jobs.fused_norms | jobs.compiled)) * hidden,
            kept.norm_outputs * into,
            kept.attention * heads + kept.key_value * kv + statistics,
            kept.gate_up * gated * width,
            kept.product * width,
            np.where(jobs.fused_attention, 0.0, kept.scores * number * _pairs(jobs)),
        )

    parts = inventory(rules.kept)
    if rules.fp8_kept is not None:
        low = jobs.precision >= Precision.FP8
        parts = tuple(np.where(low, b, a) for a, b in zip(parts, inventory(rules.fp8_kept), strict=True))
    _, norm_outputs, _, _, product, scores = parts
    full: Column = np.asarray(rules.share * sum(parts))
    dropped = (
        ("scores" in rules.selective) * scores
        + ("norms" in rules.selective) * norm_outputs
        + ("product" in rules.selective) * product * jobs.gated
    )
    # TorchTitan keeps every other matrix product: q, v, gate, down; and what attention made. JAX here: q, k, v, out.
    core = 2 * heads + statistics
    selective: Column = np.asarray(rules.share * (sum(parts) - dropped))
    of_recompute = (
        (Recompute.SELECTIVE, selective),
        (Recompute.MATMULS, 4 * hidden + 2 * heads + 2 * kv + core + 2 * width),
        (Recompute.FEED_FORWARD, 4 * hidden + 2 * heads + 4 * kv + core),
        (Recompute.FULL, 2 * hidden),
    )
    kept: Column = full
    for recompute, size in of_recompute:
        kept = np.where(jobs.recompute == recompute, size, kept)
    return full, selective, kept


@cache
def _transposing() -> Column:
    """Per row of `cluster.CHIPS`, whether its FP8 products read both operands along the summed dimension only."""
    return np.array([chip.name in TRANSPOSING for chip in CHIPS])


def _pairs(jobs: Jobs) -> Column:
    """(query, key) pairs of one rank's heads and micro-batch, all of the square: a score each, if not fused."""
    return jobs.micro_batch * jobs.seq_len * (jobs.seq_len / jobs.cp) * jobs.heads / jobs.tp
