"""Sees every operator of a dry run: which storages come and go, what is multiplied, what travels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.layout import Doing, Kind
from fourfold.parallel import Recorder
from fourfold.parallel.recorder import Entry, Line, Way
from fourfold.parallel.torch_private import is_pretended, watched_resizes
from fourfold.planner.rank_flops import RankFlops
from fourfold.trainer.dry_run.ledger import Account, Ledger
from fourfold.trainer.dry_run.results import Held

aten, c10d = torch.ops.aten, torch.ops.c10d

ANSWER = 1
"""What every question after a number in a tensor is answered with: how many labels there are, what the loss is."""

TRAVELS: dict[Any, Callable[..., Sequence[Tensor]]] = {
    c10d._allgather_base_.default: lambda out, *rest: [out],
    c10d.alltoall_base_.default: lambda out, given, *rest: [given],
    c10d._reduce_scatter_base_.default: lambda out, given, *rest: [given],
    c10d.allreduce_.default: lambda tensors, *rest: tensors,
    c10d.send.default: lambda tensors, *rest: tensors,
    c10d.recv_.default: lambda tensors, *rest: tensors,
}
"""Of each collective and message, what its bytes are counted of."""

BACK = (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


class Alike(NamedTuple):
    """What makes collectives or messages alike."""

    group: str
    kind: str
    dtype: str
    during: str
    ranks: tuple[int, ...]


class DryRecorder(Recorder):
    """A recorder that passes on what the rank does, and knows which collective was started last."""

    def __init__(self, begins: Callable[[str, int, int], None]) -> None:
        super().__init__(None)
        self._begins = begins
        self._watched: list[Line] = []

    def action(self, kind: str) -> None:
        super().action(kind)
        if self.position.stage >= 0:  # else a part of what is done beside the schedule
            self._begins(kind, self.position.stage, self.position.micro_batch)

    @contextmanager
    def doing(self, doing: Doing) -> Generator[None]:
        self._begins(doing.value, -1, -1)
        with super().doing(doing):
            yield

    def line(self, dimension: str, ranks: Sequence[int], way: Way = "") -> Line:
        line = super().line(dimension, ranks, way)
        self._watched.append(line)
        return line

    def last(self) -> tuple[Line, Entry]:
        """The collective or message that was started last."""
        return max(((line, line.entries[-1]) for line in self._watched if line.entries), key=lambda x: x[1].started)


class Watcher(TorchDispatchMode):
    """While it is entered, every operator is written down. Enter it inside of pretended tensors.

    Attributes:
        ledger: of storages.
        traffic: [count, bytes] of collectives and messages that are alike.
        recorder: for the rank's groups.
    """

    def __init__(self, *, on_gpu: bool, pairs: int) -> None:
        """
        Args:
            on_gpu: whether the rank's attention kernel is a GPU's.
            pairs: of a query and a key that it sees, per head, in each call of that kernel.
        """
        super().__init__()
        self._counted = counted_on_gpu() if on_gpu else COUNTED
        self.ledger = Ledger()
        self.traffic: dict[Alike, list[int]] = {}
        self.recorder = DryRecorder(self._begins)
        self._pairs = pairs
        self._accounts: dict[int, tuple[Account, weakref.ref[Any]]] = {}  # by the address of a storage
        self._inputs: dict[tuple[int, int], int] = {}  # addresses of received inputs, by stage and micro-batch
        self._at_end: Callable[[int], None] = lambda stage: None
        self._here = ("", -1)
        self._loading = self._again = False
        self._flops = {False: [0, 0], True: [0, 0]}  # by whether they are made again: products, attention

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return ANSWER
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._see(out)
        elif isinstance(out, list | tuple):
            for each in out:
                if isinstance(each, Tensor):
                    self._see(each)
        if (what := TRAVELS.get(func)) is not None:
            self._travels(func, what(*args))
        elif (count := self._counted.get(func)) is not None:
            count(self, args)
        return out

    # --- Storages ---

    @contextmanager
    def watching(self, at_end: Callable[[int], None]) -> Generator[None]:
        """``at_end`` is called with its stage when an action has ended, to say what things are for."""
        self._at_end = at_end
        with watched_resizes(self._resized), self:
            yield
            self._at_end(self._here[1])

    def _see(self, tensor: Tensor) -> None:
        if not is_pretended(tensor):  # a DTensor holds one that is
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._accounts:
            self._open(storage, None)

    def _open(self, storage: torch.UntypedStorage, kind: Held | None) -> None:
        address = storage._cdata
        account = self.ledger.open(storage.nbytes(), kind)
        self._accounts[address] = account, weakref.ref(storage, partial(self._gone, address))

    def _gone(self, address: int, reference: Any) -> None:
        account, _ = self._accounts.pop(address)
        self.ledger.close(account)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (known := self._accounts.get(storage._cdata)) is not None:
            self.ledger.resize(known[0], storage.nbytes())

    def name(self, tensors: Sequence[Tensor], kind: Held) -> None:
        """Says what these tensors are for: all the time, or if that was known to be something else, from now on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = self._accounts.get(storage._cdata)
            if known is None:
                self._open(storage, kind)
            elif known[0].kind is None:
                known[0].kind = kind
            elif known[0].kind is not kind:
                self._turn(storage._cdata, kind)

    def begin(self) -> None:
        """The step begins now; what was before does not count."""
        self.ledger.forget()
        self.traffic.clear()
        self._flops = {False: [0, 0], True: [0, 0]}
        self._loading = True

    def _turn(self, address: int, kind: Held) -> None:
        account, reference = self._accounts[address]
        self._accounts[address] = self.ledger.turn(account, kind), reference

    def _begins(self, doing: str, stage: int, micro_batch: int) -> None:
        """The rank begins an action, or something beside its schedule."""
        self._at_end(self._here[1])
        if self._loading and stage >= 0:  # what is there before the first action is its input
            for account, _ in self._accounts.values():
                account.kind = account.kind or Held.INPUTS
            self._loading = False
        self._here = doing, stage
        name = f"{stage}{doing}{'' if micro_batch < 0 else micro_batch}" if stage >= 0 else doing
        self.ledger.action(name)
        if doing == Kind.FORWARD and (address := self._inputs.pop((stage, micro_batch), None)) is not None:
            self._turn(address, Held.ACTIVATIONS)

    # --- What travels ---

    def _travels(self, func: Any, tensors: Sequence[Tensor]) -> None:
        line, entry = self.recorder.last()
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        alike = Alike(line.dimension, entry.kind, dtype, self._here[0], line.ranks)
        count = self.traffic.setdefault(alike, [0, 0])
        count[0] += 1
        count[1] += sum(tensor.nbytes for tensor in tensors)
        if func is c10d.send.default or func is c10d.recv_.default:
            self._message(tensors[0], sent=func is c10d.send.default)

    def _message(self, tensor: Tensor, *, sent: bool) -> None:
        """A message counts until its send is posted: when the network is done with it nobody can know here."""
        address = tensor.untyped_storage()._cdata
        account, _ = self._accounts[address]
        if account.kind is not None:  # a gradient that the ends of a tied model exchange
            return
        account.kind = Held.MESSAGES
        if sent:
            self.ledger.close(account)
        elif self._here[0] == Kind.RECV_FORWARD:
            position = self.recorder.position
            self._inputs[position.stage, position.micro_batch] = address

    # --- What is computed ---

    def computes(self, forward: bool) -> None:
        """A part of a layer's forward begins, or has ended; in a backward it runs for the second time."""
        self._again = forward and self._here[0] in BACK

    @property
    def flops(self) -> RankFlops:
        """So far."""
        (products, attention), again = self._flops[False], self._flops[True]
        return RankFlops(products + again[0], attention + again[1], sum(again))

    def product(self, a: Tensor, b: Tensor) -> None:
        """[..., m, k] x [..., k, n] takes 2 m k n for each of its rows and columns."""
        self._flops[self._again][0] += 2 * a.numel() * b.shape[-1]

    def square(self, q: Tensor, k: Tensor, times: int) -> None:
        """Causal attention of q [b, heads, m, d] and k [b, heads, n, d], whose last queries see everything."""
        batch, heads, m, d = q.shape
        self._attention(batch * (m * k.shape[2] - m * (m - 1) // 2), heads, d, times)

    def runs(self, q: Tensor, times: int) -> None:
        """Attention of q [n, heads, d] in runs."""
        self._attention(self._pairs, q.shape[1], q.shape[2], times)

    def _attention(self, pairs: int, heads: int, d: int, times: int) -> None:
        """Q K^T and its product with V take 4 d per pair forward, and twice that backward."""
        self._flops[self._again][1] += 4 * times * pairs * heads * d


FORWARD, BACKWARD = 1, 2  # of attention, in FLOPs; that a fused kernel multiplies Q K^T again is not counted

Count = Callable[[Watcher, Sequence[Any]], None]

COUNTED: dict[Any, Count] = {
    aten.mm.default: lambda watcher, args: watcher.product(args[0], args[1]),
    aten.addmm.default: lambda watcher, args: watcher.product(args[1], args[2]),
    aten.addmm_.default: lambda watcher, args: watcher.product(args[1], args[2]),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        lambda watcher, args: watcher.square(args[0], args[1], FORWARD)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        lambda watcher, args: watcher.square(args[1], args[2], BACKWARD)
    ),
}


def counted_on_gpu() -> dict[Any, Count]:
    """With the kernel for runs, whose operators exist once it is imported."""
    import torch.nn.attention.varlen

    kernel = torch.ops.torch_attn
    return COUNTED | {
        kernel._varlen_attn.default: lambda watcher, args: watcher.runs(args[0], FORWARD),
        kernel._varlen_attn_backward.default: lambda watcher, args: watcher.runs(args[1], BACKWARD),
    }
