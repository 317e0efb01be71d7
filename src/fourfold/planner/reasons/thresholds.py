"""When communication hides behind computation: the inequalities of the Scaling Book, for any chip.

All of them compare FLOPs with bytes through the intensity C / W of a fabric: FLOP/s of a GPU over the bytes/s that it
sends one-way. Matrices are in 16 bits, and computation and communication overlap perfectly; so a layout above a
threshold may be bound by computation, and one below is not.

Corrections over texts that copied them (facts.md 1, rows 15 to 18, and 5.4): one-way bandwidth (an H100 has 450 GB/s
of NVLink, not 900); what a GPU owns of its node's NICs (50 GB/s, not 400); 4 C^2 / W^2 / F for FSDP with TP, not
C^2 / W^2 / 2 F; and that TP inside a node leaves the threshold of data parallelism across nodes where it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.planner.machines.cluster import Cluster


def intensity(peak: float, bandwidth: float) -> float:
    """FLOPs that a GPU does while it sends one byte: C / W."""
    return peak / bandwidth


def fsdp_tokens(peak: float, bandwidth: float, *, axes: int = 1) -> float:
    """Tokens per GPU from which data parallelism, sharded or not, hides: B / N > C / W.

    In forward, a network of two matrices of D x F takes 4 D F FLOPs per token, and 4 D F bytes to gather. A torus has
    `axes` times the bandwidth of one axis.
    """
    return peak / (axes * bandwidth)


def fsdp_tokens_across_nodes(
    peak: float, nic: float, *, gpus_per_node: int, spanned_nodes: float = 1, two_nodes: bool = False
) -> float:
    """Tokens per GPU from which data parallelism across nodes hides: C / (NICs of a node), over `spanned_nodes`.

    The GPUs of a node share what they fetch, by NVLink. So does TP in a node: it cuts bytes and FLOPs alike and changes
    nothing. Only model parallelism (TP and PP) that spans several nodes divides the threshold, by their number.
    `two_nodes`: with only two, each sends half of everything.
    """
    return peak / (gpus_per_node * nic) / spanned_nodes / (2 if two_nodes else 1)


def tp_limit(ffn_dim: int, peak: float, bandwidth: float, *, axes: int = 1) -> float:
    """Ways of tensor parallelism below which its collectives take less time than its products: Y < F W / C.

    That they could hide does not mean that they do: in Llama 3's training they did not (ISCA'25, 3.1).
    """
    return ffn_dim * axes * bandwidth / peak


def fsdp_tp_tokens(
    ffn_dim: int,
    peak: float,
    fsdp_bandwidth: float,
    tp_bandwidth: float | None = None,
    *,
    axes: tuple[int, int] = (1, 1),
) -> float:
    """Tokens per GPU from which FSDP with TP, at the best split, hides: B / N > 4 (C / W_X) (C / W_Y) / (M_X M_Y F).

    For the sum of both, one after another. `axes` of the torus: for FSDP, and for TP.
    """
    tp_bandwidth = fsdp_bandwidth if tp_bandwidth is None else tp_bandwidth
    both = intensity(peak, fsdp_bandwidth) * intensity(peak, tp_bandwidth)
    return 4 * both / (axes[0] * axes[1] * ffn_dim)


def best_fsdp_ways(
    batch_tokens: int,
    gpus: int,
    ffn_dim: int,
    *,
    fsdp_bandwidth: float = 1.0,
    tp_bandwidth: float = 1.0,
    axes: tuple[int, int] = (1, 1),
) -> float:
    """X_opt, the ways of FSDP (the rest is TP) that communicate least: sqrt(B N W_X M_X / (F W_Y M_Y)).

    Only the ratio of the bandwidths counts.
    """
    fabric = fsdp_bandwidth * axes[0] / (tp_bandwidth * axes[1])
    return math.sqrt(batch_tokens * gpus * fabric / ffn_dim)


def attention_seq_len(dim: int) -> int:
    """Tokens from which attention, its whole square, takes more FLOPs than all weights: 8 D.

    Where F = 4 D and every head has keys of its own. A causal mask doubles it; grouped queries lessen it.
    """
    return 8 * dim


# --- Seconds of collectives at full bandwidth, for explanations ---


def gather_seconds(size: float, ranks: int, bandwidth: float) -> float:
    """All-gather or reduce-scatter of `size` bytes (whole) over so many ranks: size (n - 1) / n / W."""
    return size * (ranks - 1) / ranks / bandwidth


def tp_layer_seconds(tokens: int, dim: int, *, tp: int, bandwidth: float, bytes_per_value: int = 2) -> float:
    """The four collectives of one layer's forward over `tokens` of a micro-batch (ISCA'25: all of it exposed).

    An all-gather before and a reduce-scatter after each of attention and the feed-forward network, in bf16.
    """
    return 4 * gather_seconds(bytes_per_value * tokens * dim, tp, bandwidth)


# --- All of it for one cluster ---


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Of one cluster and model. Tokens are per GPU and step; ways are GPUs that share one matrix."""

    intensity_link: float
    """FLOPs per byte inside a domain."""
    intensity_nic: float
    """FLOPs per byte that a GPU's own NIC sends."""
    fsdp_in_domain: float
    """Tokens per GPU for data parallelism inside a domain."""
    fsdp_across: float
    """Tokens per GPU for data parallelism across domains; divide by the domains that TP and PP together span."""
    fsdp_across_top: float
    """The same where it crosses the over-subscribed tier."""
    tp_in_domain: float
    """Ways."""
    tp_across: float
    """Ways, over the NICs of whole domains."""
    fsdp_tp: float
    """Tokens per GPU for FSDP with TP, both inside one domain or torus, one after another."""


def thresholds(cluster: Cluster, *, peak: float, ffn_dim: int) -> Thresholds:
    """What the inequalities say about a cluster, at the dense peak of the precision that is trained in."""
    domain = min(cluster.domain, cluster.gpus)
    across = fsdp_tokens_across_nodes(peak, cluster.nic, gpus_per_node=domain)
    return Thresholds(
        intensity_link=intensity(peak, cluster.link),
        intensity_nic=intensity(peak, cluster.nic),
        fsdp_in_domain=fsdp_tokens(peak, cluster.link),
        fsdp_across=across,
        fsdp_across_top=across * (cluster.oversubscription if cluster.gpus > cluster.tier else 1),
        tp_in_domain=tp_limit(ffn_dim, peak, cluster.link),
        tp_across=tp_limit(ffn_dim, peak, domain * cluster.nic),
        fsdp_tp=fsdp_tp_tokens(ffn_dim, peak, cluster.link),
    )
