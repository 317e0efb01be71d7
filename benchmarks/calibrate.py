"""Fit the planner's constants again, from the calibration half of the measured runs that come with it.

    .venv/bin/python benchmarks/calibrate.py            # writes planner/timing/stacks/*.toml, in a few seconds
    .venv/bin/python benchmarks/calibrate.py --dry-run  # only prints the errors on both halves
    .venv/bin/python benchmarks/calibrate.py --left-out # fits without each source in turn, and predicts it

All stacks and chips are fitted together: see `fourfold.planner.measured.calibrate`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fourfold.planner.jobs import Column, Order, Precision, Recompute, Split
from fourfold.planner.machines.cluster import CHIPS, cluster
from fourfold.planner.measured.calibrate import NINETY, CalibratedStack, calibrated, fit_project, runs_of
from fourfold.planner.measured.fitting import Fit, Report
from fourfold.planner.measured.rows import MeasuredRow, is_calibration, jobs_of
from fourfold.planner.measured.stack_file import chips_text, stack_text
from fourfold.planner.measured.tables import MEASUREMENTS, read
from fourfold.planner.timing import stack as stack_module
from fourfold.planner.timing.stack import TRAITS, Stack

TABLES = ("published.csv", "a100_steps_multi_node.csv", "a100_steps_one_node.csv", "b200_rank_memory.csv")
ALSO = ("bloom-chronicles", "sc21-table2")  # sources of quality B that have all that matters here
SPREAD = 0.10  # standard deviation of log seconds expected of a stack before its runs are seen
COMMON_SPREAD = 0.14  # and of one that has none: what `--left-out` shows, without the sources on power-limited chips
META = "llama3"  # source of what Meta published of its own runs
META_FITTED = ("llama3-8192", "llama3-131k")


@dataclass(frozen=True)
class Family:
    """A stack to be fitted."""

    name: str
    saved_set: str
    description: str
    portable: bool = True  # attention is not written for the chip
    pxn: bool = True  # NCCL 2.12 or later
    pp_inside: bool = False  # order of ranks [TP, CP, PP, DP], innermost first; else [TP, CP, DP, PP]
    fused_attention: bool = True
    compiled: bool = False
    tp_overlap: bool = False
    gradient_bytes: int = 4
    reduce_bytes: int = 4


STACKS = (
    Family("standard", "standard", "What a good present-day PyTorch stack reaches: common to all measured stacks",
           portable=False, pp_inside=True),
    Family("meta", "meta", "The system that trained Llama 3 (ISCA 2025): TP and CP exposed, early frees",
           portable=False, pp_inside=True),
    Family("megatron", "megatron", "Megatron-Core with TransformerEngine: NeMo, Megatron-Bridge, MLPerf",
           portable=False, tp_overlap=True, gradient_bytes=2, reduce_bytes=2),
    Family("megatron-2021", "megatron-2021", "Megatron-LM before fused attention, and its forks", pxn=False,
           fused_attention=False, gradient_bytes=2, reduce_bytes=2),
    Family("megatron-deepspeed", "megatron-2021", "Megatron-DeepSpeed as it trained BLOOM", fused_attention=False,
           pxn=False),
    Family("megatron-flash", "aleph-alpha", "Megatron-like software of 2023 with FlashAttention"),
    Family("deepspeed", "fsdp", "DeepSpeed ZeRO-3 of 2021: every parameter gathered on its own",
           fused_attention=False, gradient_bytes=2, reduce_bytes=2),
    Family("llm-foundry", "fsdp", "PyTorch FSDP: llm-foundry, fms-fsdp", reduce_bytes=2),
    Family("torchtitan", "torchtitan", "TorchTitan: FSDP2 and torch.compile", compiled=True),
    Family("jax", "jax", "MaxText and Pax under XLA", portable=False, compiled=True, reduce_bytes=2),
)  # fmt: skip
NAMES = [family.name for family in STACKS]
LOOSE = {(NAMES.index("deepspeed"), "nic"): 5.0}  # it gathers small tensors one by one
KNOWN = {
    (NAMES.index("megatron-2021"), "dp_hidden"): 0.02,  # gradients are reduced after the last backward
    (NAMES.index("megatron-deepspeed"), "dp_hidden"): 0.02,
    (NAMES.index("jax"), "launch"): 1.5e-4,  # a compiled program launches its kernels, some 20 a layer, without Python
}


def main() -> None:
    """Fit, print errors, write files."""
    parser = argparse.ArgumentParser(description="Fit the planner's constants to the measured runs again.")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--left-out", action="store_true", help="predict each source without having seen it")
    parser.add_argument("--verbose", action="store_true", help="print every step of the fit")
    arguments = parser.parse_args()
    rows = [*measured_rows(), *llama3_rows()]
    fitted = [row for row in rows if is_fitted(row)]
    if arguments.left_out:
        left_out(rows, fitted)
        return
    found = fit_rows(fitted, report=print if arguments.verbose else None)
    show(found, rows)
    if not arguments.dry_run:
        write(found, fitted)


def measured_rows() -> list[MeasuredRow]:
    """Runs of the project's tables with a time, of quality A and of a few more sources."""
    rows = [row for name in TABLES for row in read(MEASUREMENTS / name).rows if row.seconds]
    return [row for row in rows if row.quality in ("A", "") or row.source in ALSO]


def is_fitted(row: MeasuredRow) -> bool:
    """Whether constants may be fitted on it: the calibration half of every table, and two of Meta's three rows."""
    return row.id in META_FITTED if row.source == META else is_calibration(row.group)


def llama3_rows() -> list[MeasuredRow]:
    """405B in production (Herd, table 4). Seconds from TFLOPs per GPU, as 6 (P - V D) + causal attention per token.

    The other convention, 6 P, would make a step of 131,072 tokens 6.5 s: less than its matrix products and messages
    take at the rates of the other two rows, without any attention.
    """
    return [
        _llama3("llama3-8192", gpus=8192, seq_len=8192, cp=1, dp=64, tflops=430),
        _llama3("llama3-16384", gpus=16384, seq_len=8192, cp=1, dp=128, tflops=400),
        _llama3("llama3-131k", gpus=16384, seq_len=131072, cp=16, dp=8, tflops=380),
    ]


def _llama3(name: str, *, gpus: int, seq_len: int, cp: int, dp: int, tflops: float) -> MeasuredRow:
    sequences = 2**24 // seq_len
    zero1 = sequences // dp >= 32  # the paper's rule: with 2 pp micro-batches ZeRO-1 and 1F1B, else ZeRO-2 and AFAB
    model = {"layers": 126, "dim": 16384, "heads": 128, "kv_heads": 8, "head_dim": 128, "ffn_dim": 53248,
             "gated": True, "vocab": 128256, "padded_vocab": 128256, "tied": False, "positions": 0,
             "seq_len": seq_len, "sequences": sequences, "pairs": seq_len * (seq_len + 1) // 2}  # fmt: skip
    layout = {"tp": 8, "cp": cp, "pp": 16, "dp": dp, "v": 8, "nc": 16, "micro_batch": 1, "split": Split.ENDS_LIGHT,
              "order": Order.INTERLEAVED if zero1 else Order.AFAB, "zero": 1 if zero1 else 2, "shards": dp * cp,
              "sequence_parallel": True, "recompute": Recompute.NONE, "recomputed_layers": 0.0}  # fmt: skip
    software = {"precision": Precision.BF16, "gradient_bytes": 4, "reduce_bytes": 4, "fused_attention": True,
                "compiled": False, "cuda_graphs": False, "tp_overlap": False}  # fmt: skip
    per_token = 6 * (405_853_388_800 - 128256 * 16384) + 6 * 126 * seq_len * 16384
    return MeasuredRow(
        id=name,
        source=META,
        quality="A",
        group=name,
        setting=name,
        stack="meta",
        saved_set="meta",
        columns=model | layout | software | cluster("h100", gpus).columns(Precision.BF16),
        precision="bf16",
        gpu="H100-80GB-SXM",
        seconds=per_token * 2**24 / (gpus * tflops * 1e12),
    )


def fit_rows(rows: Sequence[MeasuredRow], report: Report | None = None) -> Fit:
    """All stacks from these rows."""
    traits = {name: [getattr(family, name) for family in STACKS] for name in TRAITS}
    return fit_project(runs_of(rows, NAMES), traits=traits, loose=LOOSE, known=KNOWN, report=report)


def build(found: Fit, index: int, rows: Sequence[MeasuredRow]) -> CalibratedStack:
    """A stack with its band."""
    family = STACKS[index]
    mine = [row for row in rows if row.stack == family.name]
    spread = SPREAD if mine else COMMON_SPREAD
    stack = Stack(
        name=family.name,
        description=family.description,
        saved_set=family.saved_set,
        constants=found.of_stack(index),
        band=(float(np.exp(-NINETY * spread)), float(np.exp(NINETY * spread))),
        fused_attention=family.fused_attention,
        compiled=family.compiled,
        tp_overlap=family.tp_overlap,
        gradient_bytes=family.gradient_bytes,
        reduce_bytes=family.reduce_bytes,
    )
    runs = runs_of(mine, NAMES) if mine else None
    return calibrated(stack, found, index=index, rows=mine, runs=runs, spread=spread)


def write(found: Fit, rows: Sequence[MeasuredRow]) -> None:
    """The files that come with the project."""
    folder = Path(stack_module.__file__).parent / "stacks"
    for index, name in enumerate(NAMES):
        (folder / f"{name}.toml").write_text(stack_text(build(found, index, rows)), encoding="utf-8")
    source = "Fitted by benchmarks/calibrate.py on the runs of all stacks together."
    (folder / "chips.toml").write_text(chips_text(found, source=source, runs=runs_by_chip(rows)), encoding="utf-8")
    print(f"wrote {len(NAMES)} stacks and chips.toml to {folder}")


def runs_by_chip(rows: Sequence[MeasuredRow]) -> dict[str, Column]:
    """Fitted runs of every chip in 16, 8 and 4 bits, by the share that their products depend on."""
    jobs = jobs_of(rows)
    bits = np.select([jobs.precision >= Precision.FP4, jobs.precision >= Precision.FP8], [4, 8], 16)
    return {
        f"matmul_{width}": np.bincount(jobs.chip[bits == width].astype(int), minlength=len(CHIPS))
        for width in (16, 8, 4)
    }


def show(found: Fit, rows: Sequence[MeasuredRow]) -> None:
    """Mean error and bias by source and stack, on both halves."""
    error = np.expm1(found.residuals(runs_of(rows, NAMES)))
    keys = [(row.source, row.stack, "fitted" if is_fitted(row) else "other") for row in rows]
    for key in sorted(set(keys)):
        mine = error[[k == key for k in keys]]
        print(f"{key[0]:28} {key[1]:20} {key[2]:7} {len(mine):5} runs  {_figures(mine)}")


def left_out(rows: Sequence[MeasuredRow], fitted: Sequence[MeasuredRow]) -> None:
    """Errors of every source under constants that were fitted without it: of its own stack, and of the common one."""
    own, common = [], []
    for source in sorted({row.source for row in rows}):
        found = fit_rows([row for row in fitted if row.source != source])
        mine = [row for row in rows if row.source == source]
        own.append(np.expm1(found.residuals(runs_of(mine, NAMES))))
        common.append(np.expm1(found.residuals(runs_of([replace(row, stack="standard") for row in mine], NAMES))))
        print(f"{source:28} {len(mine):5} runs  own stack {_figures(own[-1])}, common stack {_figures(common[-1])}")
    for name, errors in (("own stack", own), ("common stack", common)):
        means = [float(np.mean(np.abs(error))) for error in errors]
        print(f"mean over sources, {name}: {100 * np.mean(means):.1f} % (median {100 * np.median(means):.1f} %)")


def _figures(error: np.ndarray) -> str:
    return f"mean {100 * np.mean(np.abs(error)):5.1f} %  bias {100 * np.mean(error):+6.1f} %"


if __name__ == "__main__":
    main()
