"""The table of peaks against what the chips are made of: units, operations per clock, and clock."""

from __future__ import annotations

import re

import pytest

from fourfold.planner import GPUS, Gpu, find_gpu

# (multiprocessors or compute units, dense bf16 FLOPs per clock of one with fp32 accumulation, boost clock in GHz),
# from the vendors' architecture whitepapers.
CHIPS = {
    "NVIDIA A100-SXM4-80GB": (108, 2048, 1.410),
    "NVIDIA A10": (72, 1024, 1.695),
    "NVIDIA A30": (56, 2048, 1.440),
    "NVIDIA A40": (84, 1024, 1.740),
    "NVIDIA RTX A6000": (84, 1024, 1.800),
    "NVIDIA L4": (58, 1024, 2.040),
    "NVIDIA L40": (142, 512, 2.490),
    "NVIDIA L40S": (142, 1024, 2.490),
    "NVIDIA H100 80GB HBM3": (132, 4096, 1.830),
    "NVIDIA H100 PCIe": (114, 4096, 1.620),
    "NVIDIA H200": (132, 4096, 1.830),
    "NVIDIA GH200 480GB": (132, 4096, 1.830),
    "NVIDIA GeForce RTX 3090": (82, 512, 1.695),
    "NVIDIA GeForce RTX 4090": (128, 512, 2.520),
    "NVIDIA GeForce RTX 5090": (170, 512, 2.407),
    "AMD Instinct MI210": (104, 1024, 1.700),
    "AMD Instinct MI250X": (110, 1024, 1.700),  # one of its two dies
    "AMD Instinct MI300X": (304, 2048, 2.100),
    "AMD Instinct MI325X": (304, 2048, 2.100),
    "AMD Instinct MI355X": (256, 4096, 2.400),
}


@pytest.mark.parametrize("name", CHIPS)
def test_what_the_chip_can_do(name: str) -> None:
    """pains T91: an A100 at half its peak doubled every MFU."""
    units, per_clock, clock = CHIPS[name]
    gpu = find_gpu(name)
    assert gpu is not None
    assert gpu.bfloat16 == pytest.approx(units * per_clock * clock * 1e9, rel=0.01)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.pattern)
def test_rates_of_one_chip_fit_together(gpu: Gpu) -> None:
    """Tensor cores multiply TF32 at half the rate of bf16: a sparse number in one of both columns stands out."""
    assert gpu.float32 < 0.51 * gpu.bfloat16
    if gpu.tf32 is not None:
        assert gpu.bfloat16 / gpu.tf32 == pytest.approx(2, rel=0.05)
        assert gpu.float32 <= gpu.tf32
    if gpu.float8 is not None:
        assert gpu.float8 / gpu.bfloat16 == pytest.approx(2, rel=0.02)
    if gpu.float4 is not None:
        assert gpu.float8 is not None
        assert 1.99 < gpu.float4 / gpu.float8 < 4.01
    assert len(gpu.source) > 10


@pytest.mark.parametrize("sparse", [624, 1_513, 1_671, 1_979, 1_978.9, 733, 4_500, 5_000, 2_614.9, 5_033])
def test_no_sparse_rate(sparse: float) -> None:
    """pains P29: what vendors print first."""
    assert all(gpu.bfloat16 != pytest.approx(sparse * 1e12, rel=0.005) for gpu in GPUS)


def test_the_case_of_the_doubled_peak() -> None:
    """pains P29: 420 TFLOP/s on an H200 are 42 %, not 21."""
    gpu = find_gpu("NVIDIA H200")
    assert gpu is not None
    assert 420e12 / gpu.peak("bfloat16") == pytest.approx(0.42, abs=0.005)


def test_float32_is_tf32_only_where_pytorch_may_use_it() -> None:
    gpu, amd = find_gpu("NVIDIA A100-SXM4-40GB"), find_gpu("AMD Instinct MI355X")
    assert gpu is not None
    assert amd is not None
    assert (gpu.peak("float32"), gpu.peak("float32", tf32=True)) == (19.5e12, 156e12)
    assert gpu.peak("bfloat16", tf32=True) == 312e12
    assert amd.peak("float32", tf32=True) == amd.float32  # it has no TF32


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "NVIDIA H100",  # three chips have this in their names
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A10G",
        "NVIDIA H300",
        "Tesla V100-SXM2-16GB",  # no bf16
    ],
)
def test_unknown_devices_have_no_peak(name: str) -> None:
    assert find_gpu(name) is None


def test_a_name_means_one_row() -> None:
    for name in CHIPS:
        assert sum(re.fullmatch(gpu.pattern, name) is not None for gpu in GPUS) == 1
