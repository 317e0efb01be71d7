"""Sees every operator of a dry run: which storages come and go, what is multiplied, what travels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.layout import Doing, Kind
from fourfold.parallel import Recorder
from fourfold.parallel.recorder import Entry, Line, Way
from fourfold.parallel.torch_private import (
    ATTENTION,
    QUESTION,
    TRAVELS,
    WHERE,
    OperatorMode,
    is_pretended,
    pretended_device,
    storage_of,
    varlen_attention,
    watched_resizes,
)
from fourfold.planner.rank_flops import RankFlops
from fourfold.trainer.dry_run.ledger import Account, Ledger
from fourfold.trainer.dry_run.results import Held

ANSWER = 1
"""What every question after a number in a tensor is answered with: how many labels there are, what the loss is."""

KEEPS: dict[str, str] = {Kind.FORWARD: Kind.RECV_FORWARD, Kind.INPUT: Kind.RECV_BACKWARD}
"""Computations that keep what they have received: for backward, or of a backward in halves for the second one."""

BACK = (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
FORWARD, BACKWARD = 4, 8
"""FLOPs of attention per pair and number of a head: Q K^T and the product with V, then twice that."""


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


class Watcher(OperatorMode):
    """While it is entered, every operator is written down. Enter it inside of pretended tensors.

    Attributes:
        ledger: of storages.
        traffic: [count, bytes] of collectives and messages that are alike.
        flops: of operators.
        recorder: for the rank's groups.
    """

    def __init__(self, *, pairs: int | None) -> None:
        """``pairs``: see :class:`Flops`."""
        super().__init__()
        self.ledger = Ledger()
        self.traffic: dict[Alike, list[int]] = {}
        self.flops = Flops(pairs=pairs)
        self.recorder = DryRecorder(self._begins)
        self._accounts: dict[int, tuple[Account, weakref.ref[Any]]] = {}  # by the address of a storage
        self._received: dict[tuple[str, int, int], int] = {}  # addresses, by the receive that was posted
        self._sent: list[int] = []  # addresses of outputs whose send is posted in this action
        self._at_end: Callable[[str, int], None] = lambda kind, stage: None
        self._here = ("", -1)
        self._loading = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is WHERE:
            return pretended_device(args[0])
        if func is QUESTION:
            return ANSWER
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._see(out)
        elif isinstance(out, list | tuple):
            for each in out:
                if isinstance(each, Tensor):
                    self._see(each)
        if (moved := TRAVELS.get(func)) is not None:
            self._travels(moved(*args))
        else:
            self.flops.count(func, args)
        return out

    # --- Storages ---

    @contextmanager
    def watching(self, at_end: Callable[[str, int], None]) -> Generator[None]:
        """``at_end`` is called with its kind and stage when an action has ended, to say what things are for."""
        self._at_end = at_end
        with watched_resizes(self._resized), self:
            yield
            self._at_end(*self._here)

    def _see(self, tensor: Tensor) -> None:
        if not is_pretended(tensor):  # a DTensor holds one that is
            return
        address, storage = storage_of(tensor)
        if address not in self._accounts:
            self._open(address, storage, None)

    def _open(self, address: int, storage: torch.UntypedStorage, kind: Held | None) -> None:
        account = self.ledger.open(storage.nbytes(), kind)
        self._accounts[address] = account, weakref.ref(storage, partial(self._gone, address))

    def _gone(self, address: int, reference: Any) -> None:
        account, _ = self._accounts.pop(address)
        self.ledger.close(account)

    def _resized(self, address: int, num_bytes: int) -> None:
        if address in self._accounts:
            self.ledger.resize(self._accounts[address][0], num_bytes)

    def name(self, tensors: Sequence[Tensor], kind: Held) -> None:
        """Says what these tensors are for: all the time, or if that was known to be something else, from now on."""
        for address, storage in map(storage_of, tensors):
            if address not in self._accounts:
                self._open(address, storage, kind)
                continue
            account, _ = self._accounts[address]
            if account.kind is None:
                account.kind = kind
            elif account.kind is not kind:
                self._turn(address, kind)

    def sent(self) -> None:
        """What was posted is sent. An output that is still there is kept by somebody."""
        for address in self._sent:
            if address in self._accounts:
                self._turn(address, Held.ACTIVATIONS)
        self._sent.clear()

    def begin(self) -> None:
        """The step begins now; what was before does not count."""
        self.ledger.forget()
        self.traffic.clear()
        self.flops.forget()
        self._loading = True

    def _turn(self, address: int, kind: Held) -> None:
        account, reference = self._accounts[address]
        self._accounts[address] = self.ledger.turn(account, kind), reference

    def _begins(self, doing: str, stage: int, micro_batch: int) -> None:
        """The rank begins an action, or something beside its schedule."""
        self._at_end(*self._here)
        if self._loading and stage >= 0:  # what is there before the first action is its input
            for account, _ in self._accounts.values():
                account.kind = account.kind or Held.INPUTS
            self._loading = False
        self._here = doing, stage
        self.flops.backward = doing in BACK
        name = f"{stage}{doing}{'' if micro_batch < 0 else micro_batch}" if stage >= 0 else doing
        self.ledger.action(name)
        address = self._received.pop((KEEPS.get(doing, ""), stage, micro_batch), None)
        if address is not None:
            self._turn(address, Held.ACTIVATIONS)

    # --- What travels ---

    def _travels(self, tensors: Sequence[Tensor]) -> None:
        line, entry = self.recorder.last()
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        alike = Alike(line.dimension, entry.kind, dtype, self._here[0], line.ranks)
        count = self.traffic.setdefault(alike, [0, 0])
        count[0] += 1
        count[1] += sum(tensor.nbytes for tensor in tensors)
        if line.way:
            self._message(tensors[0], sent=line.way == "send")

    def _message(self, tensor: Tensor, *, sent: bool) -> None:
        """A receive that was posted, or an output whose send is posted now."""
        address, _ = storage_of(tensor)
        account, _ = self._accounts[address]
        if account.kind is not None:  # a gradient that the ends of a tied model exchange
            return
        account.kind = Held.MESSAGES
        if sent:
            self._sent.append(address)
        else:
            position = self.recorder.position
            self._received[self._here[0], position.stage, position.micro_batch] = address


class Flops:
    """Counts what operators compute.

    Args:
        pairs: of a query and a key that it sees, per head, in each call of a GPU's attention kernel, which does not
            tell; None where attention is a CPU's.

    Attributes:
        backward: whether the rank is in a backward.
    """

    def __init__(self, *, pairs: int | None) -> None:
        aten = torch.ops.aten
        self.backward = self._again = False
        self._count: dict[Any, Callable[[Sequence[Any]], None]] = {
            aten.mm.default: lambda args: self._product(args[0], args[1]),
            aten.addmm.default: lambda args: self._product(args[1], args[2]),
            aten.addmm_.default: lambda args: self._product(args[1], args[2]),
        }
        if pairs is None:
            forward, backward = ATTENTION
            self._count[forward] = lambda args: self._attention(args[0], _pairs(args[0], args[1]), FORWARD)
            self._count[backward] = lambda args: self._attention(args[1], _pairs(args[1], args[2]), BACKWARD)
        else:
            forward, backward = varlen_attention()
            self._count[forward] = lambda args: self._attention(args[0].transpose(0, 1), pairs, FORWARD)
            self._count[backward] = lambda args: self._attention(args[1].transpose(0, 1), pairs, BACKWARD)
        self.forget()

    def forget(self) -> None:
        """Begins anew."""
        self._done = {False: [0, 0], True: [0, 0]}  # by whether it is made again: products, attention

    def count(self, operator: Any, args: Sequence[Any]) -> None:
        """One call."""
        if (count := self._count.get(operator)) is not None:
            count(args)

    def forwards(self, runs: bool) -> None:
        """A part of a layer's forward begins, or has ended. In a backward it runs for the second time."""
        self._again = runs and self.backward

    def total(self) -> RankFlops:
        """So far."""
        (products, attention), again = self._done[False], self._done[True]
        return RankFlops(products + again[0], attention + again[1], sum(again))

    def _product(self, a: Tensor, b: Tensor) -> None:
        self._done[self._again][0] += 2 * a.numel() * b.shape[-1]

    def _attention(self, q: Tensor, pairs: int, each: int) -> None:
        """q [..., heads, m, d]. That a fused backward multiplies Q K^T again is not counted."""
        self._done[self._again][1] += each * pairs * q.shape[-3] * q.shape[-1]


def _pairs(q: Tensor, k: Tensor) -> int:
    """Of causal attention of q [b, heads, m, d] and k [b, heads, n, d]: the last query sees all, each before it one
    less."""
    batch, _, m, _ = q.shape
    return batch * (m * k.shape[-2] - m * (m - 1) // 2)
