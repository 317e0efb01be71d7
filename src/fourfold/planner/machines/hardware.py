"""Peak rates of GPUs: the denominator of MFU. A device that is not listed has none, and its runs no MFU.

The only table of peaks there is: the planner's chips (`cluster.CHIPS`) take theirs from here.

The rates are dense. Vendors print those of 2:4 sparse matrices first, which are twice as high and which training cannot
reach. A name has to match in full, as `torch.cuda.get_device_name` gives it: an "H100" may be one of three chips that
differ by 30%, and a slice of one ("... MIG 3g.40gb") is none of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

T = 1e12  # FLOP/s


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU. Rates are FLOP/s of dense matrix products that accumulate in float32."""

    pattern: str
    """Regular expression for the whole device name."""
    bfloat16: float
    tf32: float | None
    """float32 matrices multiplied by tensor cores in reduced precision; None where the chip cannot."""
    float32: float
    source: str
    """Where the rates are printed, and what was halved."""
    float8: float | None = None
    """8-bit floating point (e4m3), scaled per tensor or per block. None where the chip cannot."""
    float4: float | None = None
    """4-bit floating point with block scales (NVFP4, MXFP4). None where the chip cannot."""

    def peak(self, dtype: Literal["float32", "bfloat16"], *, tf32: bool = False) -> float:
        """FLOP/s of a computation in ``dtype``; ``tf32``: whether PyTorch may multiply float32 matrices in TF32."""
        if dtype == "bfloat16":
            return self.bfloat16
        return self.tf32 if tf32 and self.tf32 is not None else self.float32


def find_gpu(device_name: str) -> Gpu | None:
    """The GPU with this name, or None: no name is guessed at."""
    return next((gpu for gpu in GPUS if re.fullmatch(gpu.pattern, device_name)), None)


GPUS = (
    Gpu(r"(NVIDIA )?A(100|800)-(SXM4|SXM|PCIE|PCIe)-[48]0GB|NVIDIA A(100|800) 80GB PCIe",
        312 * T, 156 * T, 19.5 * T, "NVIDIA A100 Tensor Core GPU datasheet, columns without sparsity"),
    Gpu(r"NVIDIA A10", 125 * T, 62.5 * T, 31.2 * T, "NVIDIA A10 datasheet, columns without sparsity"),
    Gpu(r"NVIDIA A30", 165 * T, 82 * T, 10.3 * T, "NVIDIA A30 datasheet, columns without sparsity"),
    Gpu(r"NVIDIA A40", 149.7 * T, 74.8 * T, 37.4 * T, "NVIDIA A40 datasheet, columns without sparsity"),
    Gpu(r"NVIDIA RTX A6000", 154.8 * T, 77.4 * T, 38.7 * T,
        "NVIDIA Ampere GA102 architecture whitepaper, RTX A6000, columns without sparsity"),
    Gpu(r"NVIDIA L4", 121 * T, 60 * T, 30.3 * T, "NVIDIA L4 datasheet; 242 and 120 with sparsity halved", 242 * T),
    Gpu(r"NVIDIA L40", 181 * T, 90.5 * T, 90.5 * T, "NVIDIA L40 datasheet, columns without sparsity", 362 * T),
    Gpu(r"NVIDIA L40S", 362 * T, 183 * T, 91.6 * T, "NVIDIA L40S datasheet, columns without sparsity", 733 * T),
    Gpu(r"NVIDIA H(100 80GB HBM3|800)", 989.4 * T, 494.7 * T, 66.9 * T,
        "NVIDIA H100 Tensor Core GPU architecture whitepaper, H100 SXM5, columns without sparsity", 1_978.9 * T),
    Gpu(r"NVIDIA H100 PCIe", 756 * T, 378 * T, 51.2 * T,
        "NVIDIA H100 Tensor Core GPU architecture whitepaper, H100 PCIe, columns without sparsity", 1_513 * T),
    Gpu(r"NVIDIA H100 NVL", 835.5 * T, 417.5 * T, 60 * T,
        "NVIDIA H100 datasheet, H100 NVL; 1,671 and 835 with sparsity halved", 1_670.5 * T),
    Gpu(r"NVIDIA H20", 148 * T, 74 * T, 44 * T, "NVIDIA H20 datasheet", 296 * T),
    Gpu(r"NVIDIA H200", 989.4 * T, 494.7 * T, 66.9 * T,
        "NVIDIA H200 datasheet, H200 SXM; 1,979 and 989 with sparsity halved (the compute of an H100 SXM)",
        1_978.9 * T),
    Gpu(r"NVIDIA H200 NVL", 835.5 * T, 417.5 * T, 60 * T,
        "NVIDIA H200 datasheet, H200 NVL; 1,671 and 835 with sparsity halved", 1_670.5 * T),
    Gpu(r"NVIDIA GH200 (480GB|120GB|144G HBM3e)", 989.4 * T, 494.7 * T, 66.9 * T,
        "NVIDIA GH200 datasheet; 1,979 and 989 with sparsity halved", 1_978.9 * T),
    Gpu(r"NVIDIA B200", 2_250 * T, 1_100 * T, 75 * T,
        "NVIDIA Blackwell datasheet, HGX B200 (1,000 W); 4.5, 2.2, 9 and 18 PFLOPS with sparsity halved",
        4_500 * T, 9_000 * T),
    Gpu(r"NVIDIA GB200", 2_500 * T, 1_250 * T, 80 * T,
        "NVIDIA Blackwell datasheet, one GPU of GB200 NVL72 (1,200 W); 5, 2.5, 10 and 20 PFLOPS with sparsity halved. "
        "The 2,250 that is also quoted for it is the rate of the same chip in an HGX B200 (1,000 W); NVIDIA's own "
        "benchmark pages divide by 2,450",
        5_000 * T, 10_000 * T),
    Gpu(r"NVIDIA B300( SXM6( AC)?)?", 2_250 * T, 1_100 * T, 75 * T,
        "NVIDIA Blackwell Ultra datasheet, HGX B300; 4.5, 2.2 and 9 PFLOPS with sparsity halved; FP4 108 PFLOPS "
        "without sparsity over 8 GPUs",
        4_500 * T, 13_500 * T),
    Gpu(r"NVIDIA GB300", 2_500 * T, 1_250 * T, 80 * T,
        "NVIDIA Blackwell Ultra datasheet, one GPU of GB300 NVL72; 5, 2.5 and 10 PFLOPS with sparsity halved; FP4 "
        "1,080 PFLOPS without sparsity over 72 GPUs",
        5_000 * T, 15_000 * T),
    Gpu(r"NVIDIA GeForce RTX 3090", 71 * T, 35.6 * T, 35.6 * T,
        "NVIDIA Ampere GA102 architecture whitepaper, BF16 with FP32 accumulate, column without sparsity"),
    Gpu(r"NVIDIA GeForce RTX 4090", 165.2 * T, 82.6 * T, 82.6 * T,
        "NVIDIA Ada architecture whitepaper, BF16 with FP32 accumulate, column without sparsity", 330.3 * T),
    Gpu(r"NVIDIA GeForce RTX 5090", 209.5 * T, 104.8 * T, 104.8 * T,
        "NVIDIA RTX Blackwell architecture whitepaper, BF16 with FP32 accumulate, column without sparsity",
        419 * T, 1_676 * T),
    Gpu(r"AMD Instinct MI210", 181 * T, None, 45.3 * T, "AMD Instinct MI210 product page, matrix rates"),
    Gpu(r"AMD Instinct MI250X( OAM)?", 191.5 * T, None, 47.9 * T,
        "AMD Instinct MI250X product page, matrix rates, halved: PyTorch sees each of the two dies as a device"),
    Gpu(r"AMD Instinct MI3(00|25)X( OAM| VF)?", 1_307.4 * T, 653.7 * T, 163.4 * T,
        "AMD Instinct MI300X and MI325X data sheets, matrix rates without sparsity", 2_614.9 * T),
    Gpu(r"AMD Instinct MI355X( OAM| VF)?", 2_516.6 * T, None, 157.3 * T,
        "AMD Instinct MI355X data sheet, matrix rates without sparsity", 5_033.2 * T, 10_066.3 * T),
)  # fmt: skip
"""Sorted by vendor and generation."""
