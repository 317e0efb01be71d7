"""Files shaped like those of PyTorch's profiler on a GPU, of any size, for `trace_reading.py`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

_OPERATORS = ("aten::linear", "aten::matmul", "aten::mm", "aten::add", "aten::mul", "aten::copy_", "aten::silu",
              "autograd::engine::evaluate_function: MmBackward0")  # fmt: skip
_KERNELS = (
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, "
    "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int, at::native::BinaryFunctor<float, "
    "float, float, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul>)",
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)"
    "::{lambda()#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}>",
)
_PER_STEP = 2_000  # operators
_OPERATOR = (
    """
  {
    "ph": "X", "cat": "cpu_op", "name": "%s", "pid": 4711, "tid": 4711,
    "ts": %s, "dur": 18.250,
    "args": {
      "External id": %d,"Record function id": %d, "Sequence number": %d, "Fwd thread id": 0, """
    '"Input Dims": [[4096, 1024], [1024, 4096]], "Input type": ["c10::BFloat16", "c10::BFloat16"], '
    """"Ev Idx": %d
    }
  },"""
)
_LAUNCH = """
  {
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4711, "tid": 4711,
    "ts": %s, "dur": 4.125,
    "args": {
      "External id": %d,      "cbid": 211, "correlation": %d
    }
  },
  {
    "ph": "s", "id": %d, "pid": 4711, "tid": 4711, "ts": %s,
    "cat": "ac2g", "name": "ac2g"
  },"""
_KERNEL = (
    """
  {
    "ph": "X", "cat": "kernel", "name": "%s", "pid": 0, "tid": %d,
    "ts": %s, "dur": %s,
    "args": {
      "External id": %d,      "queued": 0, "device": 0, "context": 1,      "stream": %d, "correlation": %d,      """
    '"registers per thread": 40,      "shared memory": 400,      "blocks per SM": 4.740741,      '
    '"warps per SM": 75.851852,      "grid": [512, 1, 1],      "block": [512, 1, 1],      '
    """"est. achieved occupancy %%": 75%s
    }
  },
  {
    "ph": "f", "id": %d, "pid": 0, "tid": %d, "ts": %s,
    "cat": "ac2g", "name": "ac2g", "bp": "e"
  },"""
)
_STEP = """
  {
    "ph": "X", "cat": "user_annotation", "name": "ProfilerStep#%d", "pid": 4711, "tid": 4711,
    "ts": %s, "dur": %s,
    "args": {
      "External id": 1,"Record function id": 1, "Ev Idx": 1
    }
  },"""
_EVERY = 20  # operators, of which one is a collective
_OPERATOR_NS, _BEGIN = 50_000, 4_458_676_416_788_066


def write_file(path: Path, megabytes: float, rank: int, world: int) -> int:
    """Writes one rank's file of about so many MB (10^6 bytes of text), gzip if its name says so; returns the bytes."""
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": world,
               "ranks": [*range(world)]}]  # fmt: skip
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}], "distributedInfo": {
        "backend": "nccl", "rank": rank, "world_size": world, "pg_count": 1, "pg_config": groups}}  # fmt: skip
    tail = ('\n  {\n    "name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": 0\n  }\n  ],\n'
            f'  "traceName": "{path.name}",\n  "displayTimeUnit": "ms",\n'
            '  "baseTimeNanoseconds": 1711964646000000000\n}\n')  # fmt: skip
    size = 0
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as file:
        start = json.dumps(head)[:-1] + ', "traceEvents": ['
        size += file.write(start.encode())
        for text in _steps(rank, world):
            size += file.write(text.encode())
            if size >= megabytes * 1e6:
                break
        size += file.write(tail.encode())
    return size


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _steps(rank: int, world: int) -> Iterator[str]:
    """Text of the events, some dozens at a time."""
    collective = (
        ', "Collective name": "allreduce", "In msg nelems": 2049000, "Out msg nelems": 2049000, '
        f'"Group size": {world}, "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", '
        '"Process Group Name": "0", "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1, 2, 3]", '
        '"Seq": '
    )
    number = 0
    for step in range(1 << 20):
        begin = _BEGIN + step * (_PER_STEP + 10) * _OPERATOR_NS
        yield _STEP % (step + 1, _us(begin), _us(_PER_STEP * _OPERATOR_NS))
        for first in range(0, _PER_STEP, _EVERY):
            lines = []
            for i in range(first, first + _EVERY):
                number += 1
                at = begin + i * _OPERATOR_NS + number % 777
                meets = i == first
                name, stream = (("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 40)
                                if meets else (_KERNELS[i % len(_KERNELS)], 7))  # fmt: skip
                took = _us(20_000 + (number * 7919 + rank * 104729) % 20_000)
                extra = f"{collective}{number // _EVERY + 1}" if meets else ""
                runs = _us(at + 30_000)
                lines += [
                    _OPERATOR % (_OPERATORS[i % len(_OPERATORS)], _us(at), number, number, number, number),
                    _LAUNCH % (_us(at + 9_000), number, number, number, _us(at + 9_000)),
                    _KERNEL % (name, stream, runs, took, number, stream, number, extra, number, stream, runs),
                ]
            yield "".join(lines)
