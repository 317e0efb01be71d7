"""What the device is, and how fast it is at what all else is made of: matrix products and copies."""

from __future__ import annotations

import platform

import torch

from fourfold.planner import find_gpu
from gpu.clock import seconds_of
from gpu.part import Part
from gpu.sizes import Sizes

REPEATS = 10


def peak_of(device: torch.device, given: float | None) -> float | None:
    """Dense bf16 FLOP/s of a device: as given, or what the table of peaks knows; None if it does not."""
    if given is not None or device.type != "cuda":
        return given
    known = find_gpu(torch.cuda.get_device_name(device))
    return None if known is None else known.bfloat16


def describe_machine(part: Part, sizes: Sizes, device: torch.device, *, peak: float | None) -> None:
    """The part: names and versions, and two rates that this very device reaches."""
    part.facts |= {"device": "CPU", "python": platform.python_version(), "torch": torch.__version__}
    part.facts["peak"] = peak_of(device, peak)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        part.facts |= {
            "device": properties.name,
            "cuda": torch.version.cuda,
            "bytes": properties.total_memory,
            "units": properties.multi_processor_count,
        }
    part.save()

    def multiply() -> dict[str, float]:
        a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device).bfloat16() for _ in range(2))
        out = torch.empty_like(a)
        seconds = seconds_of(lambda: torch.mm(a, b, out=out), device, repeats=REPEATS, warm_up=3)
        return {"matrix": sizes.matrix, "flops_per_second": 2 * sizes.matrix**3 / seconds}

    def copy() -> dict[str, float]:
        source = torch.randint(256, (sizes.copied,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds = seconds_of(lambda: target.copy_(source), device, repeats=REPEATS, warm_up=3)
        return {"bytes": sizes.copied, "bytes_per_second": 2 * sizes.copied / seconds}  # read and written

    part.item("bf16 matrix product", multiply)
    part.item("copy", copy)
