"""The GPUs and TPUs that the planner knows. Peaks come from `hardware.GPUS`, the rest stands here.

Bandwidths are those of the datasheets, one-way per GPU. Vendors print the sum of both directions for NVLink (900 for
an H100 that has 450 GB/s) and what a whole node has between nodes (400 for an H100 that owns 50). What software reaches
of them is the business of a stack's constants.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fourfold.planner.machines.hardware import find_gpu

GB = 1e9  # bytes, as bandwidths are printed
MIB, GIB = 1 << 20, 1 << 30  # bytes, as memory is


class Chip(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of GPU or TPU in the machine that it usually comes in."""

    name: str
    """As one types it: "h100"."""
    title: str
    peaks: dict[str, float]
    """Precision in lower case ("bf16") to dense FLOP/s. What is not there, the chip cannot."""
    hbm_bytes: float
    """As a program sees it, which is less than what is printed on the box (algorithms.md 3.10)."""
    hbm_bandwidth: float
    """Bytes/s."""
    units: int
    """Streaming multiprocessors, compute units or TensorCores, over which the tiles of a matrix product are dealt."""
    domain: int
    """GPUs that NVLink, xGMI or ICI connects."""
    gpus_per_node: int
    link: float
    """Bytes/s one-way per GPU inside the domain."""
    nic: float
    """Bytes/s one-way per GPU between domains."""
    source: str
    """Where the numbers are printed; that of the peaks first."""
    aliases: tuple[str, ...] = ()


def _gpu(
    device: str, source: str, *, hbm_gib: float, hbm_gb_s: float, link_gb_s: float, nic_gb_s: float, **rest: Any
) -> Chip:
    """A chip whose peaks are those of a device in `hardware.GPUS`."""
    gpu = find_gpu(device)
    assert gpu is not None, device
    peaks = {
        "fp32": gpu.float32,
        "fp16": gpu.bfloat16,
        "bf16": gpu.bfloat16,
    }  # the same rate on every chip that has both
    if gpu.float8 is not None:
        peaks["fp8"] = gpu.float8
    if gpu.float8 is not None and gpu.float4 is not None:  # block scales came with 4 bits
        peaks |= {"mxfp8": gpu.float8, "fp4": gpu.float4}
    return Chip(
        peaks=peaks,
        hbm_bytes=hbm_gib * GIB,
        hbm_bandwidth=hbm_gb_s * GB,
        link=link_gb_s * GB,
        nic=nic_gb_s * GB,
        source=f"{gpu.source}. {source}",
        **rest,
    )


_A100 = "NVIDIA A100-SXM4-80GB"
_H100 = "NVIDIA H100 80GB HBM3"
_A100_LINKS = "NVLink 3: 12 links of 25 GB/s each way. DGX A100 datasheet: one 200 Gb/s NIC per GPU"
_H100_LINKS = "NVLink 4: 18 links of 25 GB/s each way. DGX H100 datasheet: one 400 Gb/s NIC per GPU"
_B200_LINKS = "NVLink 5: 18 links of 50 GB/s each way"
_V100_PEAKS = {
    "fp32": 15.7e12,
    "fp16": 125e12,
}  # no bf16; not in hardware.GPUS, whose rows are devices that train in it
_V100 = (
    "NVIDIA V100 datasheet (SXM): 125 TFLOP/s in fp16, no bf16, 900 GB/s HBM2; NVLink 2: 6 links of 25 GB/s each way; "
    "31.7 GiB as PyTorch reports. "
)

CHIPS: tuple[Chip, ...] = (
    Chip(name="v100-32", title="NVIDIA V100-SXM3-32GB, DGX-2", aliases=("v100", "dgx-2"), peaks=_V100_PEAKS,
         hbm_bytes=31.7 * GIB, hbm_bandwidth=900 * GB, units=80, domain=16, gpus_per_node=16, link=150 * GB,
         nic=6.25 * GB, source=_V100 + "DGX-2 datasheet: 16 GPUs on NVSwitch share eight 100 Gb/s NICs"),
    Chip(name="v100-32-dgx1", title="NVIDIA V100-SXM2-32GB, DGX-1", aliases=("dgx-1",), peaks=_V100_PEAKS,
         hbm_bytes=31.7 * GIB, hbm_bandwidth=900 * GB, units=80, domain=8, gpus_per_node=8, link=150 * GB,
         nic=6.25 * GB, source=_V100 + "DGX-1 datasheet: 8 GPUs in a cube mesh share four 100 Gb/s NICs"),
    _gpu(_A100, f"A100 datasheet: 40 GB at 1,555 GB/s; 39.4 GiB as PyTorch reports. {_A100_LINKS}",
         name="a100-40", title="NVIDIA A100-SXM4-40GB", aliases=("a100-40gb",), hbm_gib=39.4, hbm_gb_s=1_555, units=108,
         domain=8, gpus_per_node=8, link_gb_s=300, nic_gb_s=25),
    _gpu(_A100, f"A100 datasheet: 80 GB at 2,039 GB/s; 79.1 GiB: algorithms.md 3.10. {_A100_LINKS}",
         name="a100-80", title="NVIDIA A100-SXM4-80GB", aliases=("a100", "a100-80gb"), hbm_gib=79.1, hbm_gb_s=2_039,
         units=108, domain=8, gpus_per_node=8, link_gb_s=300, nic_gb_s=25),
    _gpu(_H100, f"H100 datasheet: 80 GB at 3.35 TB/s; 79.1 GiB: algorithms.md 3.10. {_H100_LINKS}",
         name="h100", title="NVIDIA H100 SXM 80GB HBM3", aliases=("h100-sxm", "h100-80gb", "h100-hbm3"), hbm_gib=79.1,
         hbm_gb_s=3_350, units=132, domain=8, gpus_per_node=8, link_gb_s=450, nic_gb_s=50),
    _gpu(_H100, "Meta's 96 GB HBM2e part at 500 W (ISCA'25 7.2, TorchTitan's paper): 2.4 TB/s; 95.0 GiB as it logs. "
         f"The same peaks on paper; the power limit is left to calibration. {_H100_LINKS}",
         name="h100-hbm2e", title="NVIDIA H100 SXM 96GB HBM2e, 500 W", aliases=("h100-96gb-hbm2e",), hbm_gib=95.0,
         hbm_gb_s=2_400, units=132, domain=8, gpus_per_node=8, link_gb_s=450, nic_gb_s=50),
    _gpu("NVIDIA H200", f"H200 datasheet: 141 GB at 4.8 TB/s; 139.8 GiB: algorithms.md 3.10. {_H100_LINKS}",
         name="h200", title="NVIDIA H200 SXM 141GB", aliases=("h200-sxm", "h200-141gb"), hbm_gib=139.8, hbm_gb_s=4_800,
         units=132, domain=8, gpus_per_node=8, link_gb_s=450, nic_gb_s=50),
    _gpu("NVIDIA B200", "HGX B200 datasheet: 180 GB at 7.7 TB/s; 178.4 GiB: algorithms.md 3.10; 148 SMs as CUDA "
         f"reports. {_B200_LINKS}. DGX B200 datasheet: one 400 Gb/s NIC per GPU",
         name="b200", title="NVIDIA B200 180GB, HGX", aliases=("b200-180gb",), hbm_gib=178.4, hbm_gb_s=7_700, units=148,
         domain=8, gpus_per_node=8, link_gb_s=900, nic_gb_s=50),
    _gpu("NVIDIA B300", "HGX B300 datasheet: 270 GB at 7.7 TB/s (288 GB on the package); GiB and SMs as CUDA reports "
         f"[2]. {_B200_LINKS}. DGX B300 datasheet: one 800 Gb/s NIC per GPU",
         name="b300", title="NVIDIA B300, HGX", aliases=("b300-288gb",), hbm_gib=267.7, hbm_gb_s=7_700, units=148,
         domain=8, gpus_per_node=8, link_gb_s=900, nic_gb_s=100),
    _gpu("NVIDIA GB200", "GB200 NVL72 datasheet: 186 GB at 8 TB/s; 184.3 GiB and 152 SMs as CUDA reports [2]. "
         f"{_B200_LINKS}, 72 GPUs in 18 trays of 4. One 400 Gb/s NIC (ConnectX-7) per GPU",
         name="gb200", title="NVIDIA GB200 NVL72", aliases=("gb200-nvl72",), hbm_gib=184.3, hbm_gb_s=8_000, units=152,
         domain=72, gpus_per_node=4, link_gb_s=900, nic_gb_s=50),
    _gpu("NVIDIA GB300", "GB300 NVL72 datasheet: 279 GB at 8 TB/s (288 GB on the package); GiB and SMs as CUDA reports "
         f"[2]. {_B200_LINKS}, 72 GPUs in 18 trays of 4. One 800 Gb/s NIC (ConnectX-8) per GPU",
         name="gb300", title="NVIDIA GB300 NVL72", aliases=("gb300-nvl72",), hbm_gib=276.6, hbm_gb_s=8_000, units=152,
         domain=72, gpus_per_node=4, link_gb_s=900, nic_gb_s=100),
    _gpu("AMD Instinct MI300X", "MI300X data sheet: 192 GiB at 5.3 TB/s, 304 compute units; xGMI: a mesh of 7 links of "
         "64 GB/s each way, so that one pair has 64 GB/s only. One 400 Gb/s NIC per GPU",
         name="mi300x", title="AMD Instinct MI300X", aliases=("mi300", "mi300x-192gb"), hbm_gib=191.5, hbm_gb_s=5_300,
         units=304, domain=8, gpus_per_node=8, link_gb_s=448, nic_gb_s=50),
    _gpu("AMD Instinct MI355X", "MI355X data sheet: 288 GB at 8 TB/s, 256 compute units; xGMI: a mesh of 7 links of "
         "76.8 GB/s each way. One 400 Gb/s NIC per GPU",
         name="mi355x", title="AMD Instinct MI355X", aliases=("mi355", "mi355x-288gb"), hbm_gib=287.5, hbm_gb_s=8_000,
         units=256, domain=8, gpus_per_node=8, link_gb_s=537.6, nic_gb_s=50),
    Chip(name="v5p", title="TPU v5p", aliases=("tpu-v5p",), peaks={"bf16": 459e12}, hbm_bytes=96 * GB,
         hbm_bandwidth=2_765 * GB, units=2, domain=8_960, gpus_per_node=4, link=180 * GB, nic=6.25 * GB,
         source="Google Cloud, TPU v5p: 459 TFLOP/s in bf16, 2,765 GB/s, pods of 8,960; Scaling Book: 96 GB, ICI "
         "90 GB/s each way per link, so 180 GB/s on one of three axes, both ways round its ring; DCN 6.25 GB/s a chip"),
)  # fmt: skip
"""By vendor and generation. [2]: reported by users of the chip, not printed by its vendor."""
