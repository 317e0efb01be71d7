"""What an event is: a kernel by its name, a collective by its arguments or, without them, by the name of its kernel."""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

from fourfold.debugger.reading.trace import Call, Work


class Category(IntEnum):
    """Where an event of a profiler belongs."""

    OTHER = 0
    OPERATOR = 1
    ANNOTATION = 2
    """A range of the host."""
    LAUNCH = 3
    """A call into the device's runtime or driver."""
    DEVICE = 4
    """Kernel, copy or fill."""
    DEVICE_ANNOTATION = 5


_CATEGORIES = {
    "cpu_op": Category.OPERATOR,
    "operator": Category.OPERATOR,
    "user_annotation": Category.ANNOTATION,
    "python_gc": Category.ANNOTATION,
    "gpu_user_annotation": Category.DEVICE_ANNOTATION,
    "kernel": Category.DEVICE,
    "gpu_memcpy": Category.DEVICE,
    "gpu_memset": Category.DEVICE,
    "memcpy": Category.DEVICE,
    "memset": Category.DEVICE,
    "concurrent_kernel": Category.DEVICE,
    "gpu_op": Category.DEVICE,
    "runtime": Category.LAUNCH,
    "driver": Category.LAUNCH,
}


@lru_cache(maxsize=256)
def category(text: object) -> Category:
    """Of an event's `cat`. Runtimes and drivers of all makes are named alike: cuda_runtime, hip_runtime, xpu_driver."""
    name = str(text).lower()
    if name in _CATEGORIES:
        return _CATEGORIES[name]
    return Category.LAUNCH if name.endswith(("_runtime", "_driver")) else Category.OTHER


_LIBRARY = re.compile(r"nccl|rccl|mscclpp|oneccl|gloo|c10d::|hccl|\b(?:mpi|ucc)_", re.IGNORECASE)
_LETTERS = re.compile(r"[^a-z]")
# In this order: an all-gather has "gather" in it, a reduce-scatter "reduce" and "scatter".
_CALLS = (
    ("allreduce", Call.ALL_REDUCE),
    ("reducescatter", Call.REDUCE_SCATTER),
    ("allgather", Call.ALL_GATHER),
    ("alltoall", Call.ALL_TO_ALL),
    ("broadcast", Call.BROADCAST),
    ("barrier", Call.BARRIER),
    ("sendrecv", Call.MESSAGE),
    ("batchisend", Call.MESSAGE),
    ("coalesced", Call.OTHER),
    ("exchange", Call.ALL_REDUCE),
    ("recv", Call.RECV),
    ("receive", Call.RECV),
    ("send", Call.SEND),
)


@lru_cache(maxsize=4096)
def call_of(name: str) -> Call:
    """What a collective of this name does: allreduce, _reduce_scatter_base, nccl:all_gather, ALLTOALL_BASE ..."""
    letters = _LETTERS.sub("", name.lower())
    return next((call for word, call in _CALLS if word in letters), Call.OTHER)


def is_communication(name: str) -> bool:
    """Whether a kernel or range of this name is communication."""
    return _LIBRARY.search(name) is not None


_NO_WORK = re.compile(r"^(?:stream|event|context|device)\s*(?:sync|wait)|cuda_sync|synchroni[sz]e$", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|attention|_attn|sdpa|ck_tile.*fmha|aiter.*mha|scaled_dot_product", re.IGNORECASE)
_GEMM = re.compile(
    r"gemm|gemv|nvjet|cutlass|xmma|wgmma|_mma_|\bcijk_|conv(?:olution)?(?:2d|3d|_)|fprop|dgrad|wgrad|matmul|"
    r"grouped_mm|splitk|(?:^|[^a-z])(?:add|b|badd)?mm(?:backward|$|[^a-z])|aten::linear|linear(?:function|backward)",
    re.IGNORECASE,
)
_NO_GEMM = re.compile(
    r"softmax|layer_?norm|batch_?norm|elementwise|reduce_kernel|nchwto|nhwcto|splitkreduce|reducesplitk|permute",
    re.IGNORECASE,
)


@lru_cache(maxsize=1 << 16)
def work_of(name: str) -> Work | None:
    """What limits a kernel, or an operator of a CPU, by its name; None if it only waits for something."""
    if _NO_WORK.search(name):
        return None
    if _ATTENTION.search(name):
        return Work.ATTENTION
    if _GEMM.search(name) and not _NO_GEMM.search(name):
        return Work.GEMM
    return Work.MEMORY


_ITEMSIZES = {
    "byte": 1, "char": 1, "bool": 1, "uint8": 1, "int8": 1, "short": 2, "half": 2, "bfloat16": 2, "float16": 2,
    "int": 4, "float": 4, "float32": 4, "int32": 4, "long": 8, "double": 8, "int64": 8, "float64": 8,
    "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip


@lru_cache(maxsize=256)
def itemsize(dtype: object) -> int:
    """Bytes of an element of a type that PyTorch names so; 0 if unknown."""
    name = str(dtype).lower().removeprefix("torch.").removeprefix("c10::")
    return 1 if name.startswith("float8") else _ITEMSIZES.get(name, 0)
