"""Jobs for the planner's tests: one Llama or GPT on one chip, any column replaced."""

from __future__ import annotations

from typing import Any

from fourfold.planner.jobs import Jobs, Order, Precision, Recompute, Split
from fourfold.planner.machines.cluster import cluster

LLAMAS = {"8b": (32, 4096, 14336, 32, 8), "70b": (80, 8192, 28672, 64, 8), "405b": (126, 16384, 53248, 128, 8)}


def job(model: str = "8b", chip: str = "h100", precision: Precision = Precision.BF16, **columns: Any) -> Jobs:
    """One Llama 3 on so many GPUs as the layout has; arrays among `columns` make several jobs of it."""
    layers, dim, ffn_dim, heads, kv_heads = LLAMAS[model]
    layout = {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "seq_len": 8192, "sequences": 1} | columns
    seq_len = layout["seq_len"]
    gpus = layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"]
    hardware = cluster(chip, int(gpus) if getattr(gpus, "ndim", 0) == 0 else 1024).columns(precision)
    values = {
        "layers": layers, "dim": dim, "heads": heads, "kv_heads": kv_heads, "head_dim": 128, "ffn_dim": ffn_dim,
        "gated": True, "vocab": 128256, "padded_vocab": 128256, "tied": False, "positions": 0,
        "pairs": seq_len * (seq_len + 1) // 2, "v": 1, "nc": layout["pp"], "micro_batch": 1,
        "order": Order.ONE_F_ONE_B, "split": Split.EVEN, "zero": 1, "shards": layout["dp"] * layout["cp"],
        "sequence_parallel": True, "recompute": Recompute.NONE, "recomputed_layers": 1.0, "precision": precision,
        "gradient_bytes": 4, "reduce_bytes": 4, "fused_attention": True, "compiled": False, "cuda_graphs": False,
        "tp_overlap": False,
    }  # fmt: skip
    return Jobs.of(**(values | hardware | layout))
