"""What only a GPU can tell: kernels, steps, context-parallel attention and memory, in one call under five minutes.

Writes all figures as JSON and prints a short table of them. docs/measured.md explains both. Exits with 1 if a kernel is
wrong, a variant did other work, or anything failed; what there was no time for is said, and is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

import torch

from gpu import older_torch
from gpu.context import measure_context
from gpu.kernels import check_kernels
from gpu.machine import describe_machine
from gpu.memory import predict_memory
from gpu.part import Figures, Work, run_parts
from gpu.sizes import ON_GPU, TINY
from gpu.tracing import make_no_kernels
from gpu.training import measure_training
from gpu.words import table, wrong

NO_GPU = "gpu.sh: this PyTorch finds no CUDA GPU here; --tiny tries everything at tiny sizes on the CPU"


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="file of all figures (default gpu.json)")
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything (default 240, at most 15%% more)")
    parser.add_argument("--peak", type=float, help="dense bf16 TFLOP/s of the device, if it is not a known one")
    parser.add_argument("--seed", type=int, default=0, help="of documents and numbers (default 0)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU, traced but not compiled")
    options = parser.parse_args(arguments)
    if not options.tiny and not _has_gpu():
        print(NO_GPU, file=sys.stderr)
        return 1
    if (older := older_torch.mend()) is not None:
        print(f"gpu.sh: {older}", file=sys.stderr)

    if options.tiny:
        make_no_kernels()
    device, sizes = (torch.device("cpu"), TINY) if options.tiny else (torch.device("cuda", 0), ON_GPU)
    peak = None if options.peak is None else options.peak * 1e12
    # The weights are about the seconds that each wants.
    parts: list[tuple[str, float, Work]] = [
        ("machine", 10, partial(describe_machine, sizes=sizes, device=device, peak=peak)),
        ("kernels", 45, partial(check_kernels, sizes=sizes, device=device, seed=options.seed)),
        ("memory", 20, partial(predict_memory, sizes=sizes, device=device)),
        ("training", 110, partial(measure_training, sizes=sizes, device=device, peak=peak)),
        ("context", 55, partial(measure_context, sizes=sizes, device=device, seed=options.seed)),
    ]
    found: dict[str, Figures] = {}
    signal.signal(signal.SIGTERM, _end)
    try:
        with tempfile.TemporaryDirectory() as folder:
            seconds = options.seconds - (time.monotonic() - started)
            for name, figures in run_parts(parts, seconds=seconds, folder=Path(folder)):
                found[name] = figures
                options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    except KeyboardInterrupt:
        print("\ngpu.sh: stopped", file=sys.stderr)
        return 130
    print(table(found))
    print(f"{time.monotonic() - started:.0f} s; all figures are in {options.out}")
    return 1 if wrong(found) else 0


def _has_gpu() -> bool:
    """Asked in a process of its own: what has asked may not be forked."""
    process = get_context("fork").Process(target=lambda: os._exit(0 if torch.cuda.is_available() else 1))
    process.start()
    process.join()
    return process.exitcode == 0


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
