"""Every private name of PyTorch that Fourfold uses, checked on torch 2.13.0. The pin in constraints.txt guards them."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # the first DTensor imports it, which takes 0.8 s: once here, not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _dump_fr_trace_json  # pyrefly: ignore[missing-module-attribute]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Function
from torch.autograd import profiler as autograd_profiler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

MEMORY_ENTRIES = 1_000_000
"""Of the allocator's history so many are kept, the last: each takes some kilobytes of the host's memory. A micro-batch
makes some hundreds in a layer."""


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The dimensions of a mesh as one, which stays related to the mesh it came from."""
    return mesh._flatten(name)


def profiler_runs() -> bool:
    """Whether a PyTorch profiler records at this moment (an execution trace observer alone does not count)."""
    return autograd_profiler._is_profiler_enabled


def in_backward() -> bool:
    """Whether autograd calls: a forward that runs now runs for the second time."""
    return torch._C._current_graph_task_id() != -1


def record_memory() -> None:
    """From now on PyTorch's CUDA allocator keeps what it is asked for and where in the program, and every named range.

    Ranges count on all threads, since autograd runs on one of its own. Stacks of what is freed are left out: they say
    where a block died, not why it lived.
    """
    torch.cuda.memory._record_memory_history(
        context="alloc",
        stacks="python",
        max_entries=MEMORY_ENTRIES,
        clear_history=True,
        global_record_annotations=True,
    )


def write_memory(path: Path) -> None:
    """Writes as a pickle what was kept since :func:`record_memory`, and what the allocator holds."""
    torch.cuda.memory._dump_snapshot(str(path))


def forget_memory() -> None:
    """Ends what :func:`record_memory` began."""
    torch.cuda.memory._record_memory_history(enabled=None)


class LabelledAllGather(DefaultAllGather):
    """FSDP2's all-gather under a name in traces; ``labelled(kind)`` opens the named, recorded range."""

    def __init__(self, labelled: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._labelled = labelled

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        with self._labelled("all_gather"):
            return super().__call__(*args, **kwargs)


class LabelledReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter under a name in traces. ``add`` sums over the first dimension what has travelled, one
    block per rank; None leaves that to the back end."""

    def __init__(
        self, labelled: Callable[[str], AbstractContextManager[Any]], *, add: Callable[[Tensor], Tensor] | None
    ) -> None:
        self._labelled = labelled
        self._add = add

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work:
        with self._labelled("reduce_scatter"):
            if self._add is None:
                return super().__call__(output_tensor, input_tensor, group, op, async_op)
            arrived = torch.empty_like(input_tensor)
            work = dist.all_to_all_single(arrived, input_tensor, group=group, async_op=True)
            assert work is not None
            work.wait()
            output_tensor.copy_(self._add(arrived.view(group.size(), -1)))
            return work


def reduce_gradients(stage: nn.Module) -> None:
    """Reduce-scatters now what ``stage``'s backwards have accumulated in its FSDP groups.

    FSDP2 reduces inside a backward; a schedule wants to say when. These are the steps that FSDP2 runs at the end of a
    backward with gradient sync on, and that ``torch.distributed.pipelining`` runs for its REDUCE_GRAD action.
    """
    assert isinstance(stage, FSDPModule)
    stage.set_is_last_backward(True)
    stage.set_requires_gradient_sync(True)
    finish_backward(stage)
    stage.set_is_last_backward(False)
    stage.set_requires_gradient_sync(False)


def finish_backward(stage: nn.Module) -> None:
    """What FSDP2 does at the end of every backward, for gradients that weights have been given outside of one.

    It adds them to its sums and, with gradient sync on, reduce-scatters these.
    """
    root = fully_shard.state(stage)  # type: ignore[attr-defined]
    for group in _groups(stage):
        group.post_backward()
    root._root_post_backward_final_callback()


def groups_to_finish(stage: nn.Module) -> list[tuple[Any, list[Tensor]]]:
    """The FSDP groups of a stage that have trained weights, each with these: for :func:`finish_whole_groups`."""
    found = []
    for group in _groups(stage):
        weights = [parameter.unsharded_param for parameter in group.fsdp_params]
        trained = [weight for weight in weights if weight.requires_grad]
        if trained:
            found.append((group, trained))
    return found


def finish_whole_groups(unfinished: list[tuple[Any, list[Tensor]]]) -> None:
    """As :func:`finish_backward`, but only of those groups whose weights have all been given a gradient, and takes them
    from the list. Called after every function, so a group that is not reached yet must cost next to nothing."""
    for entry in [*unfinished]:
        group, trained = entry
        if all(weight.grad is not None for weight in trained):
            group.post_backward()
            unfinished.remove(entry)


def _groups(stage: nn.Module) -> Iterator[Any]:
    root = fully_shard.state(stage)  # type: ignore[attr-defined]
    return (group for state in root._state_ctx.all_states for group in state._fsdp_param_groups)


class LocalPart(Function):
    """This rank's part of a weight, ``apply(weight) -> Tensor``: ``weight.to_local()`` at a third of the time.

    ``to_local`` works out anew in every backward how the gradient is laid out. Here it is laid out as the weight is,
    and a step calls this for every weight and micro-batch. A backward that puts the gradient off comes by twice: the
    first time with none.
    """

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.spec = weight._spec
        ctx.set_materialize_grads(False)
        return weight._local_tensor.view_as(weight._local_tensor)  # autograd marks what it returns, so a new object

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        return None if grads[0] is None else DTensor(grads[0].contiguous(), ctx.spec, requires_grad=False)


def missing_compiler(device: str) -> str | None:
    """What ``torch.compile`` lacks on this machine to make kernels for "cpu" or "cuda", in words; None: nothing."""
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "it needs the header Python.h, in Linux distributions a package such as python3-dev"
    if device == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "on CUDA it needs the package triton"
        found = [name for name in (os.environ.get("CC", "gcc"), "clang") if shutil.which(name)]
        return None if found else "on CUDA it needs Triton, which needs a C compiler: gcc, clang, or what CC names"
    from torch._inductor.cpp_builder import get_cpp_compiler  # half a second, for those who compile

    try:
        get_cpp_compiler()
    except Exception:  # of a class that changes from version to version
        return "on CPU it needs a C++ compiler that runs here: g++, or what CXX names"
    return None


def sums_gradients(part: FSDPModule) -> bool:
    """Whether an FSDP group adds gradients instead of averaging them."""
    groups = fully_shard.state(part)._fsdp_param_groups  # type: ignore[attr-defined]
    return all(group.gradient_divide_factor == 1.0 and group.force_sum_reduction_for_comms for group in groups)


def flight_recorder(last: int) -> list[dict[str, Any]]:
    """The last entries of PyTorch's flight recorder: what this process has put on any back end, oldest first.

    PyTorch 2.13 records 2,000 calls unless TORCH_FR_BUFFER_SIZE, which is read when the first group is made, says
    otherwise. Under gloo the ``state`` of an entry is always scheduled; ``retired`` says that it has ended, or failed.
    """
    entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
    return entries[-last:]


def whole_tensor(tensor: DTensor) -> Tensor:
    """The whole of a tensor that is sharded over TP and FSDP, as a copy. A collective of all its ranks.

    PyTorch logs once per call that the two gathers could be one; they cannot, FSDP and TP shards interleave.
    """
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    former = logger.level
    logger.setLevel(logging.ERROR)
    try:
        # full_tensor aliases the weight where a group has one member.
        with torch.no_grad():
            return tensor.full_tensor().clone()
    finally:
        logger.setLevel(former)


# --- For dry runs ---

OperatorMode = TorchDispatchMode
"""While it is entered, every operator goes through its ``__torch_dispatch__``."""

QUESTION = torch.ops.aten._local_scalar_dense.default
"""The operator behind ``item`` and all that asks for a number in a tensor."""

WHERE = torch.ops.prim.device.default
"""The operator by which PyTorch asks where a tensor is, more often than all others together."""

TRAVELS: dict[Any, Callable[..., Sequence[Tensor]]] = {
    torch.ops.c10d._allgather_base_.default: lambda out, *rest: [out],
    torch.ops.c10d.alltoall_base_.default: lambda out, given, *rest: [given],
    torch.ops.c10d._reduce_scatter_base_.default: lambda out, given, *rest: [given],
    torch.ops.c10d.allreduce_.default: lambda tensors, *rest: tensors,
    torch.ops.c10d.send.default: lambda tensors, *rest: tensors,
    torch.ops.c10d.recv_.default: lambda tensors, *rest: tensors,
}
"""Operators of collectives and messages, and of their arguments those whose bytes count: what is gathered, scattered,
summed or moved."""

ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""The kernel of a CPU, forward and backward: q [b, heads, m, d] and k [b, heads, n, d] are the first two arguments, or
the second and third."""


def varlen_attention() -> tuple[Any, Any]:
    """The same of the kernel of a GPU, q [m, heads, d]. Its operators exist once it is imported."""
    import torch.nn.attention.varlen

    kernel = torch.ops.torch_attn
    return kernel._varlen_attn.default, kernel._varlen_attn_backward.default


def storage_of(tensor: Tensor) -> tuple[int, torch.UntypedStorage]:
    """A tensor's storage, after its address."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage


@contextmanager
def pretended_ranks(rank: int, size: int) -> Generator[None]:
    """This process as one rank of a job of which no other exists: collectives return at once, with nothing in them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the back end

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def pretended_tensors() -> FakeTensorMode:
    """While it is entered, tensors have a shape, a dtype and a storage of so many bytes, and no numbers."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def pretended_device(tensor: Any) -> torch.device:
    """Where a pretended tensor would be: the answer to ``WHERE``, on a short way."""
    return tensor.fake_device


def is_pretended(value: object) -> bool:
    """Whether it is a tensor without numbers."""
    return isinstance(value, FakeTensor)


@contextmanager
def watched_resizes(resized: Callable[[int, int], None]) -> Generator[None]:
    """Calls ``resized(address, bytes)`` after a storage has changed its size, as FSDP2's of gathered weights do.

    No operator tells of it; PyTorch's own memory tracker does it this way.
    """
    resize = torch.UntypedStorage.resize_

    def watched(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        resized(storage._cdata, storage.nbytes())
        return out

    torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


class HeldByFsdp(NamedTuple):
    """Tensors that FSDP2 holds of a stage at a moment, each this rank's part over TP."""

    weights: list[Tensor]  # buffers of gathered ones, of no size while they are not
    sums: list[Tensor]  # of gradients, before they are reduced
    shards: list[Tensor]  # of gradients, after it


def held_by_fsdp(stage: nn.Module) -> HeldByFsdp:
    """What FSDP2 holds of a stage beside the shards of its weights; nothing before the stage's first forward."""
    held = HeldByFsdp([], [], [])

    def local(gradient: Tensor | None) -> list[Tensor]:
        return [] if gradient is None else [gradient._local_tensor if isinstance(gradient, DTensor) else gradient]

    for group in _groups(stage):
        for parameter in group.fsdp_params:
            held.weights.extend(parameter.all_gather_outputs)
            whole = getattr(parameter, "_unsharded_param", None)
            held.sums.extend(
                local(parameter.unsharded_accumulated_grad) + local(whole.grad if whole is not None else None)
            )
            held.shards.extend(local(parameter.sharded_param.grad))
    return held
