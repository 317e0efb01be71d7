"""Who held how many bytes when: a book of storages, read after the step.

What a storage is for is often known only later. A tensor that a forward makes is kept for backward if it is still there
when the forward has ended, and was for the moment if it is not; the buffer of a receive becomes the input that a stage
keeps. So the book has a line for every change, on an account, and what each account was for is said at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.trainer.dry_run.results import Held, Peak

BEFORE = "before the step"


class Account:
    """A storage's bytes while they are for one thing. ``kind`` is None as long as nobody has said what."""

    __slots__ = ("begun", "bytes", "closed", "kind", "number")

    def __init__(self, number: int, begun: int, num_bytes: int, kind: Held | None) -> None:
        self.number = number
        self.bytes = num_bytes
        self.kind = kind
        self.begun = begun  # the action in which it was opened
        self.closed = -1  # the action in which it was closed

    @property
    def purpose(self) -> Held:
        """What it was for, once the step is over."""
        if self.kind is not None:
            return self.kind
        return Held.TRANSIENTS if self.closed == self.begun else Held.ACTIVATIONS


class Ledger:
    """The book of one rank's step. Sizes are bytes."""

    def __init__(self) -> None:
        self._accounts: list[Account] = []
        self._lines: list[tuple[int, int]] = []  # account, bytes more or less
        self._actions: list[str] = [BEFORE]
        self._begins: list[int] = [0]  # the line with which each action begins

    def action(self, name: str) -> None:
        """From now on the rank does this."""
        self._actions.append(name)
        self._begins.append(len(self._lines))

    def open(self, num_bytes: int, kind: Held | None = None) -> Account:
        """A storage is there."""
        account = Account(len(self._accounts), len(self._actions), num_bytes, kind)
        self._accounts.append(account)
        self._lines.append((account.number, num_bytes))
        return account

    def close(self, account: Account) -> None:
        """It is gone."""
        if account.closed < 0:
            account.closed = len(self._actions)
            self._lines.append((account.number, -account.bytes))

    def resize(self, account: Account, num_bytes: int) -> None:
        """It has another size."""
        self._lines.append((account.number, num_bytes - account.bytes))
        account.bytes = num_bytes

    def turn(self, account: Account, kind: Held) -> Account:
        """What it holds is for something else from now on. Returns the account on which it goes on."""
        self.close(account)
        return self.open(account.bytes, kind)

    def forget(self) -> None:
        """Begins anew with what is there now."""
        there = [account for account in self._accounts if account.closed < 0]
        self._accounts, self._lines = there, []
        self._actions, self._begins = [BEFORE], [0]
        for number, account in enumerate(there):
            account.number, account.begun = number, 0
            self._lines.append((number, account.bytes))

    def read(self) -> Reading:
        """What the book says, at the end of the step."""
        kinds = [*Held]
        purpose = np.array([kinds.index(account.purpose) for account in self._accounts], dtype=np.int64)
        accounts, changes = np.array(self._lines, dtype=np.int64).reshape(-1, 2).T
        held = np.zeros((len(kinds), len(changes)), dtype=np.int64)
        held[purpose[accounts], np.arange(len(changes))] = changes
        np.cumsum(held, axis=1, out=held)
        return Reading(held, tuple(self._actions), np.array(self._begins, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Reading:
    """What was held after every line of a ledger.

    Attributes:
        held: int64 [kinds, lines], bytes.
        actions: names, in order.
        begins: the line with which each begins.
    """

    held: np.ndarray
    actions: tuple[str, ...]
    begins: np.ndarray

    @property
    def most(self) -> dict[Held, int]:
        """Each kind at its own peak."""
        return dict(zip(Held, self.held.max(axis=1).tolist(), strict=True))

    @property
    def peak(self) -> Peak:
        """Of all kinds together."""
        return self._at(int(self.held.sum(axis=0).argmax()))

    def most_after(self, kind: Held) -> Peak:
        """The end of an action after which most is held for one thing."""
        ends = np.append(self.begins[1:], self.held.shape[1]) - 1
        return self._at(int(ends[self.held[list(Held).index(kind), ends].argmax()]))

    def _at(self, line: int) -> Peak:
        column = self.held[:, line]
        action = self.actions[int(np.searchsorted(self.begins, line, side="right")) - 1]
        return Peak(int(column.sum()), action, dict(zip(Held, column.tolist(), strict=True)))
