"""Tables of measured runs that have their own columns: A100 step times, runs out of memory, bytes of B200 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from fourfold.planner.jobs import Order, Precision, Recompute, Split
from fourfold.planner.machines.chips import MIB
from fourfold.planner.machines.cluster import Cluster, find_chip
from fourfold.planner.measured import wording
from fourfold.planner.measured.rows import Cells, Measured, MeasuredRow, Unscored, hashed_group, header, read_cells

STEPS = ("# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length",
         "tensor parallelism", "data parallelism", "pipeline parallelism")  # fmt: skip
"""Columns that configure a row of the A100 tables."""

OUTCOMES = ("layers", "hidden", "ffn_hidden", "heads", "vocab", "seq_len", "global_batch", "micro_batch", "tp", "pp",
            "dp")  # fmt: skip
"""Columns that a row of out_of_memory.csv cannot do without."""

LLAMAS = {
    "llama3-8b": (4096, 14336, 32, 8),
    "llama3-70b": (8192, 28672, 64, 8),
    "llama3-405b": (16384, 53248, 128, 16),
}
"""dim, ffn_dim, heads and kv_heads of the models in the B200 table: its 405B had 16 KV heads."""


def read_steps(path: str | Path) -> Measured:
    """Step times of GPT models under Megatron-DeepSpeed on A100 nodes of 8 with four NICs of 200 Gb/s (vTrain's data).

    Full recomputation, 1F1B, no flash attention, gradients and weights in fp16, a vocabulary of about 50K.
    """
    path = Path(path)
    several = "parameters (billion)" in header(path)
    kind: Literal["a100_multi_node", "a100_one_node"] = "a100_multi_node" if several else "a100_one_node"
    rows = tuple(_step(cells, number, kind) for number, cells in enumerate(read_cells(path), start=1))
    return Measured(kind, rows)


def _step(cells: Cells, number: int, kind: str) -> MeasuredRow:
    values = {name: _required(cells, name) for name in STEPS}
    tp, dp, pp = (values[f"{name} parallelism"] for name in ("tensor", "data", "pipeline"))
    gpus, dim, heads = (values[name] for name in ("# GPUs", "hidden size", "attention heads"))
    seq_len = values["sequence length"]
    columns = {
        "layers": values["# layers"],
        "dim": dim,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": dim // heads,
        "ffn_dim": 4 * dim,
        "gated": False,
        "vocab": 50_257,
        "padded_vocab": -(-50_257 // (128 * tp)) * 128 * tp,
        "tied": True,
        "positions": seq_len,
        "seq_len": seq_len,
        "sequences": values["global batch"],
        "tp": tp,
        "cp": 1,
        "pp": pp,
        "dp": dp,
        "micro_batch": values["micro batch"],
        "zero": 0,
        "sequence_parallel": False,
        "recompute": Recompute.FULL,
        "recomputed_layers": 1.0,
        "precision": Precision.FP16,
        "gradient_bytes": 2,
        "reduce_bytes": 2,
        "fused_attention": False,
    }
    columns = _defaults(columns) | _hardware("a100-80", gpus=gpus, precision=Precision.FP16, nic=12.5e9)
    source = f"vtrain-{'multi' if kind == 'a100_multi_node' else 'one'}-node"
    return MeasuredRow(
        id=f"{source}-{number:04d}",
        source=source,
        quality="A",
        group=hashed_group(list(values.values())),
        setting=f"{source}: {values['# layers']} layers of {dim}, {values['global batch']} x {seq_len}, {gpus} A100",
        stack="megatron-2021",
        saved_set="megatron-2021",
        columns=columns,
        precision="fp16",
        gpu="A100-80GB-SXM",
        seconds=_measured(cells, "iteration time (ms)") / 1000,
    )


def read_out_of_memory(path: str | Path) -> Measured:
    """Layouts that ran out of memory, with fewer columns than published.csv."""
    rows: list[MeasuredRow] = []
    unscored: list[Unscored] = []
    for number, cells in enumerate(read_cells(Path(path)), start=1):
        name = f"out-of-memory-{cells.text('trial_id', str(number))}-{number}"
        gpu = wording.chip(cells.text("gpu"))
        precision = wording.precision(cells.text("precision"))
        if gpu is None or precision is None:
            unscored.append(Unscored(name, f"no numbers of {cells.text('gpu')} in {cells.text('precision')}"))
            continue
        rows.append(_outcome(cells, name, gpu=gpu, precision=precision))
    return Measured("out_of_memory", tuple(rows), tuple(unscored))


def _outcome(cells: Cells, name: str, *, gpu: str, precision: Precision) -> MeasuredRow:
    values = {column: _required(cells, column) for column in OUTCOMES}
    software = wording.framework(cells.text("framework", "Aleph Alpha"))
    kind, share = wording.recompute(cells.text("recompute"))
    cp = cells.count("cp", 1) or 1
    stage, shards = wording.sharding(cells.text("sharding"), ranks=values["dp"] * cp, node=8)
    columns = {
        "layers": values["layers"],
        "dim": values["hidden"],
        "heads": values["heads"],
        "kv_heads": cells.count("kv_heads", values["heads"]),
        "head_dim": cells.count("head_dim", values["hidden"] // values["heads"]),
        "ffn_dim": values["ffn_hidden"],
        "gated": cells.flag("gated_mlp", True),
        "vocab": values["vocab"],
        "padded_vocab": -(-values["vocab"] // values["tp"]) * values["tp"],
        "tied": cells.flag("tied_embeddings", False),
        "seq_len": values["seq_len"],
        "sequences": values["global_batch"],
        "tp": values["tp"],
        "cp": cp,
        "pp": values["pp"],
        "dp": values["dp"],
        "micro_batch": values["micro_batch"],
        "zero": stage,
        "shards": shards,
        "sequence_parallel": values["tp"] > 1 and cells.flag("sequence_parallel", False),
        "recompute": kind,
        "recomputed_layers": share if kind is not Recompute.NONE else 0.0,
        "precision": precision,
        "gradient_bytes": software.gradient_bytes,
        "reduce_bytes": software.reduce_bytes,
        "fused_attention": wording.fused_attention(cells.text("attention_impl"), default=software.flash),
        "fused_norms": wording.fused_norms(cells.text("attention_impl"), default=software.fused_norms),
    }
    gpus = values["tp"] * cp * values["pp"] * values["dp"]
    columns = _defaults(columns) | _hardware(gpu, gpus=gpus, precision=precision)
    return MeasuredRow(
        id=name,
        source="out-of-memory",
        quality="",
        group=hashed_group([columns[key] for key in sorted(columns)]),
        setting="",
        stack=software.stack,
        saved_set=wording.saved_set(software, chip=gpu),
        columns=columns,
        precision=cells.text("precision"),
        gpu=cells.text("gpu"),
        fits=cells.text("outcome").lower() not in ("oom", "out of memory"),
    )


def read_rank_memory(path: str | Path) -> Measured:
    """Peak bytes of every rank of Megatron-Core on one node of 8 B200; dense models only (SimuMax's data)."""
    rows: list[MeasuredRow] = []
    unscored: list[Unscored] = []
    for number, cells in enumerate(read_cells(Path(path)), start=1):
        name = cells.text("case", f"row {number}")
        if cells.text("model").lower() not in LLAMAS:
            unscored.append(Unscored(name, "mixture of experts"))
        else:
            rows.append(_rank_memory(cells, name))
    return Measured("rank_memory", tuple(rows), tuple(unscored))


def _rank_memory(cells: Cells, name: str) -> MeasuredRow:
    dim, ffn_dim, heads, kv_heads = LLAMAS[cells.text("model").lower()]
    tp, pp, dp, layers = (_required(cells, column) for column in ("tp", "pp", "dp", "layers"))
    cp = cells.count("cp", 1) or 1
    v = cells.count("vpp", 1) or 1
    seq_len = cells.count("seq", 4096) or 4096
    columns = {
        "layers": layers,
        "dim": dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim // heads,
        "ffn_dim": ffn_dim,
        "gated": True,
        "vocab": 128_256,
        "padded_vocab": -(-128_256 // (128 * tp)) * 128 * tp,
        "tied": False,
        "seq_len": seq_len,
        "sequences": _required(cells, "micro_batches") * dp,
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "dp": dp,
        "v": v,
        "micro_batch": 1,
        "order": Order.INTERLEAVED if v > 1 else Order.ONE_F_ONE_B,
        "zero": 1,
        "sequence_parallel": tp > 1,
        "recompute": Recompute.NONE,
        "precision": Precision.BF16,
        "gradient_bytes": 4,
        "reduce_bytes": 4,
        "fused_attention": True,
    }
    gpus = tp * cp * pp * dp
    columns = _defaults(columns) | _hardware("b200", gpus=gpus, precision=Precision.BF16)
    allocated = [cells.number(f"allocated_mb_rank{rank}") for rank in range(gpus)]
    bytes_ = tuple(value * MIB for value in allocated if value is not None)
    milliseconds = cells.number("step_ms")
    return MeasuredRow(
        id=name,
        source="simumax-b200",
        quality="A",
        group=hashed_group([columns[key] for key in sorted(columns)]),
        setting=f"simumax-b200: {cells.text('model')} of {layers} layers, {columns['sequences']} x {seq_len}",
        stack="megatron",
        saved_set="megatron",
        columns=columns,
        precision="bf16",
        gpu="B200-180GB",
        seconds=milliseconds / 1000 if milliseconds else None,
        memory=max(bytes_, default=None),
        memory_kind="allocated",
        rank_bytes=bytes_,
    )


def _required(cells: Cells, column: str) -> int:
    value = cells.count(column)
    if value is None:
        raise ValueError(f"{cells.where}, column {column}: is empty or missing")
    return value


def _measured(cells: Cells, column: str) -> float:
    value = cells.positive(column)
    if value is None:
        raise ValueError(f"{cells.where}, column {column}: is empty or missing")
    return value


def _defaults(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns on which these tables agree, and those that follow from others."""
    common = {
        "v": 1,
        "nc": columns["pp"],
        "order": Order.ONE_F_ONE_B,
        "split": Split.EVEN,
        "shards": columns["dp"] * columns["cp"],
        "positions": 0,
        "recomputed_layers": 0.0,
        "fused_norms": True,
        "compiled": False,
        "cuda_graphs": False,
        "tp_overlap": False,
        "pairs": columns["seq_len"] * (columns["seq_len"] + 1) // 2,
    }
    return common | columns


def _hardware(name: str, *, gpus: int, precision: Precision, nic: float | None = None) -> dict[str, Any]:
    chip = find_chip(name)
    return Cluster(
        name=chip.name,
        chip=chip,
        gpus=gpus,
        domain=chip.domain,
        gpus_per_node=chip.gpus_per_node,
        link=chip.link,
        nic=nic or chip.nic,
        tier=gpus,
    ).columns(precision)
