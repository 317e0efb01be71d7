"""Words of tables as numbers: those of published.csv by hand, and others as a source might put them."""

from __future__ import annotations

import pytest

from fourfold.planner.jobs import Order, Precision, Recompute
from fourfold.planner.machines.cluster import find_chip
from fourfold.planner.measured import wording
from fourfold.planner.memory.saved import load_rules
from fourfold.planner.timing.stack import stack_names


def test_every_framework_has_a_stack_and_every_chip_a_row() -> None:
    assert {framework.stack for framework in wording.FRAMEWORKS} <= set(stack_names())
    for _, name in wording.CHIPS:
        if name is not None:
            assert find_chip(name).name == name


@pytest.mark.parametrize(
    ("name", "year", "stack"),
    [
        ("NeMo (Megatron-Core)", 2024, "megatron"),
        ("Megatron-Bridge/NeMo 26.04.01", 2026, "megatron"),
        ("NeMo (MLPerf)", 2025, "megatron"),
        ("Megatron-LM", 2021, "megatron-2021"),
        ("Megatron-LM", 2022, "megatron-2021"),
        ("Megatron-LM", 2025, "megatron"),
        ("Megatron-LM", None, "megatron"),
        ("Megatron-DeepSpeed", 2022, "megatron-deepspeed"),
        ("Aleph Alpha (AA-Scaling, Megatron-style)", 2023, "megatron-flash"),
        ("InternEvo", 2024, "megatron-flash"),
        ("Zero Bubble (Megatron-LM fork)", 2023, "megatron-flash"),
        ("Meta internal", 2024, "meta"),
        ("llm-foundry/Composer (PyTorch FSDP)", 2023, "llm-foundry"),
        ("fms-fsdp (PyTorch FSDP)", 2024, "llm-foundry"),
        ("TorchTitan (FSDP2)", 2025, "torchtitan"),
        ("NeMo AutoModel (PyTorch FSDP2)", 2025, "torchtitan"),
        ("MaxText (JAX)", 2024, "jax"),
        ("nanotron", 2025, "standard"),
        ("DeepSpeed ZeRO-3", 2021, "deepspeed"),
        ("something new", None, "standard"),
        ("", None, "standard"),
    ],
)
def test_framework(name: str, year: int | None, stack: str) -> None:
    assert wording.framework(name, year=year).stack == stack


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("A100-80GB-SXM", "a100-80"),
        ("A100-40GB-SXM", "a100-40"),
        ('A100-80GB-SXM ("Ampere")', "a100-80"),
        ("A800-80GB-SXM", "a100-80"),
        ("A100 80GB, 400 W", "a100-80"),
        ("A100-SXM4-80GB, 240 nodes", "a100-80"),
        ("A100-40GB-PCIe", None),
        ("H100-80GB-SXM (700W)", "h100"),
        ("H100-96GB-HBM2e (500W, 2.4 TB/s)", "h100-hbm2e"),
        ("H100-80GB-PCIe", None),
        ("H200-141GB-SXM", "h200"),
        ("B200-180GB", "b200"),
        ("GB200 (B200-186GB)", "gb200"),
        ("GB300 (B300-288GB)", "gb300"),
        ("B300-288GB", "b300"),
        ("MI300X-192GB", "mi300x"),
        ("V100-32GB-SXM3", "v100-32"),
        ("TPU v5p", "v5p"),
        ("TPU v4", None),
        ("", None),
    ],
)
def test_chip(words: str, name: str | None) -> None:
    assert wording.chip(words) == name


@pytest.mark.parametrize(
    ("words", "stage", "shards"),
    [
        ("none (DDP)", 0, 256),
        ("dist-opt (ZeRO-1)", 1, 256),
        ("ZeRO-1 (BF16 optimizer)", 1, 256),
        ("ZeRO-1 (group size 8)", 1, 8),
        ("FSDP SHARD_GRAD_OP (ZeRO-2)", 2, 256),
        ("ZeRO-2", 2, 256),
        ("ZeRO 1", 1, 256),
        ("ZeRO stage 3", 3, 256),
        ("zero_3", 3, 256),
        ("zero3", 3, 256),
        ("FSDP full-shard (ZeRO-3)", 3, 256),
        ("FSDP2 full-shard (ZeRO-3)", 3, 256),
        ("FSDP full-shard (Megatron-FSDP)", 3, 256),
        ("FSDP 8 (intra-node) x DP 16 (HSDP)", 3, 8),
        ("FSDP 128 x DP 4 (HSDP)", 3, 128),
        ("FSDP 512", 3, 256),  # no more than there are
        ("FSDP2 (64)", 3, 64),
        ("HSDP", 3, 8),
        ("ZeRO-3 (MiCS groups of 128)", 3, 128),
    ],
)
def test_sharding(words: str, stage: int, shards: int) -> None:
    assert wording.sharding(words, ranks=256, node=8) == (stage, shards)


def test_silent_sharding_is_what_the_framework_does() -> None:
    assert wording.sharding("", ranks=64, node=8, default=3) == (3, 64)


@pytest.mark.parametrize(
    ("words", "kind", "share"),
    [
        ("", Recompute.NONE, 1),
        ("none", Recompute.NONE, 1),
        ("0", Recompute.NONE, 1),
        ("no activation checkpointing", Recompute.NONE, 1),
        ("none (all kept)", Recompute.NONE, 1),
        ("n/a", Recompute.NONE, 1),
        ("not used", Recompute.NONE, 1),
        ("activation checkpointing", Recompute.FULL, 1),
        ("full", Recompute.FULL, 1),
        ("on", Recompute.FULL, 1),
        ("full on 5 of 32 layers", Recompute.FULL, 5 / 32),
        ("selective AC 1/3", Recompute.FULL, 1 / 3),
        ("every other block", Recompute.FULL, 1 / 2),
        ("selective (attention core)", Recompute.SELECTIVE, 1),
        ("norm, act", Recompute.SELECTIVE, 1),
        ("selective per-op SAC", Recompute.MATMULS, 1),
        ("selective op-level (torchtitan SAC, toml default)", Recompute.MATMULS, 1),
        ("custom remat: save qkv/out_proj", Recompute.FEED_FORWARD, 1),
        ("remat save_qkv_proj", Recompute.FEED_FORWARD, 1),
        ("remat SAVE_DOT_ONLY", Recompute.SELECTIVE, 1),
        ("remat minimal_flash", Recompute.SELECTIVE, 1),
    ],
)
def test_recompute(words: str, kind: Recompute, share: float) -> None:
    assert wording.recompute(words) == (kind, share)


@pytest.mark.parametrize(
    ("words", "bytes_per_second"),
    [
        ("DGX H100 (Eos/DGX Cloud): 8x 400 Gb/s NDR InfiniBand per node", 50e9),
        ("DGX H100 standard: 8x ConnectX-7 400 Gb/s NDR IB per node (fabric not restated in source)", 50e9),
        ("RoCE 1600 Gbps per node (section title)", 25e9),
        ("400 Gb/s per node", 6.25e9),
        ("800 Gb/s per node", 12.5e9),
        ("400 Gb/s RDMA per GPU", 50e9),
        ("Jean Zay: 4x 100 Gb/s Omni-Path per node", 6.25e9),
        ("A3 Mega: GPUDirect-TCPXO, 8x 200 Gb/s per node", 25e9),
        ("3.2 Tbps RDMA per node", 50e9),
        ("50 GB/s per GPU", 50e9),
        ("400 GB/s per node", 50e9),
        ("not in sheet", None),
        ("", None),
    ],
)
def test_network_is_one_way_per_gpu(words: str, bytes_per_second: float | None) -> None:
    assert wording.network(words, gpus_per_node=8) == bytes_per_second


def test_network_of_a_node_of_four() -> None:
    assert wording.network("4x 400 Gb/s per node", gpus_per_node=4) == 50e9


def test_links_are_half_of_what_vendors_print() -> None:
    assert wording.links("NVLink4/NVSwitch, 900 GB/s bidir per GPU (H100 SXM spec)") == 450e9
    assert wording.links("NVLink5, 1.8 TB/s bidir per GPU; NVL72 domain of 72 GPUs") == 900e9
    assert wording.links("NVLink") is None


def test_oversubscription() -> None:
    assert wording.oversubscription("400 Gb/s RoCE per GPU, 3-layer Clos (7:1 oversub at top)") == 7
    assert wording.oversubscription("fat tree") == 1


@pytest.mark.parametrize(
    ("words", "year", "precision"),
    [
        ("bf16 (amp)", None, Precision.BF16),
        ("bf16/fp16", None, Precision.BF16),
        ("fp16", None, Precision.FP16),
        ("fp8 rowwise, bf16 all-gather", None, Precision.FP8),
        ("mxfp8 (32x32 blocks)", None, Precision.MXFP8),
        ("nvfp4 (bf16 tail)", None, Precision.FP4),
        ("", 2020, Precision.FP16),
        ("", 2024, Precision.BF16),
        ("int8", None, None),
    ],
)
def test_precision(words: str, year: int | None, precision: Precision | None) -> None:
    assert wording.precision(words, year=year) == precision


@pytest.mark.parametrize(
    ("words", "default", "fused"),
    [
        ("TE/cuDNN fused", False, True),
        ("flash_attentionv1.0.8", False, True),
        ("fused", True, False),  # Megatron's fused softmax
        ("Megatron fused softmax (no flash)", True, False),
        ("unfused (pre-flash)", True, False),
        ("torch unfused", True, False),
        ("", True, True),
        ("", False, False),
    ],
)
def test_fused_attention(words: str, default: bool, fused: bool) -> None:
    assert wording.fused_attention(words, default=default) is fused


def test_vocabulary_of_a_name() -> None:
    assert wording.vocabulary("Llama-3.1-405B") == wording.vocabulary("llama3-8b") == 128_256
    assert wording.vocabulary("Llama-2-7B") == 32_000
    assert wording.vocabulary("GPT-14.6B") == 51_200


def test_flags_and_schedules() -> None:
    assert wording.overlaps_tp("overlap_grad_sync, ub_tp_comm_overlap, overlap_p2p")
    assert wording.overlaps_tp("TP comm overlap (userbuffers)")
    assert wording.overlaps_tp("AsyncTP")
    assert not wording.overlaps_tp("no AsyncTP")
    assert not wording.overlaps_tp("ub_tp_comm_overlap=false")
    assert not wording.overlaps_tp("overlap grad/param, full CUDA graph; TP comm overlap off")
    assert wording.order("1F1B interleaved", pp=8, v=5) is Order.INTERLEAVED
    assert wording.order("", pp=8, v=1) is Order.ONE_F_ONE_B
    assert wording.order("zero-bubble", pp=8, v=1) is Order.ZB_H1
    assert wording.order("GPipe", pp=8, v=1) is Order.AFAB


def test_memory_of_notes() -> None:
    assert wording.memory("Table 1; memory in GiB", framework="TorchTitan (FSDP2)") == (2.0**30, "reserved")
    assert wording.memory("max allocated, GiB", framework="") == (2.0**30, "allocated")
    assert wording.memory("memory in GB", framework="") == (1e9, "reserved")
    assert wording.memory("step over 1092 logged values", framework="NeMo (MLPerf)") == (2.0**30, "allocated")


@pytest.mark.parametrize(
    ("framework", "year", "chip", "saved_set"),
    [
        ("NeMo (MLPerf)", 2025, "h100", "megatron"),
        ("TorchTitan (FSDP2)", 2024, "h100", "torchtitan-2024"),
        ("TorchTitan (FSDP2)", 2025, "b200", "torchtitan"),
        ("TorchTitan (FSDP2)", 2025, "h100-hbm2e", "torchtitan-2024"),
        ("Aleph Alpha", 2023, "a100-80", "aleph-alpha"),
        ("anything", 2025, "h100", "standard"),
    ],
)
def test_saved_set(framework: str, year: int, chip: str, saved_set: str) -> None:
    assert wording.saved_set(wording.framework(framework, year=year), chip=chip) == saved_set


def test_every_framework_has_a_saved_set() -> None:
    for software in wording.FRAMEWORKS:
        load_rules(software.saved_set)
