"""The book of storages, by a hand-made step."""

from __future__ import annotations

from fourfold.trainer.dry_run.ledger import BEFORE, Ledger
from fourfold.trainer.dry_run.results import Held


def step() -> Ledger:
    """Weights of 100; a forward that keeps 10 of the 15 it makes; a receive whose buffer of 3 another forward keeps."""
    ledger = Ledger()
    ledger.open(100, Held.MASTER)
    ledger.action("0F0")
    kept, moment = ledger.open(10), ledger.open(5)
    ledger.close(moment)
    ledger.action("1RECV_F0")
    buffer = ledger.open(3, Held.MESSAGES)
    ledger.action("1F0")
    buffer = ledger.turn(buffer, Held.ACTIVATIONS)
    ledger.action("1B0")
    ledger.close(buffer)
    gradient = ledger.open(20)
    ledger.close(kept)
    gradient.kind = Held.SUMS  # known only now
    return ledger


def test_what_lives_on_is_kept_and_what_does_not_is_for_the_moment() -> None:
    reading = step().read()
    most = {kind: num_bytes for kind, num_bytes in reading.most.items() if num_bytes}
    assert most == {
        Held.MASTER: 100, Held.ACTIVATIONS: 13, Held.TRANSIENTS: 5, Held.MESSAGES: 3, Held.SUMS: 20,
    }  # fmt: skip


def test_peak_says_when_and_of_what() -> None:
    peak = step().read().peak
    assert (peak.bytes, peak.action) == (130, "1B0")
    assert (peak.held[Held.ACTIVATIONS], peak.held[Held.SUMS]) == (10, 20)
    kept = step().read().most_after(Held.ACTIVATIONS)
    assert (kept.action, kept.held[Held.ACTIVATIONS]) == ("1F0", 13)


def test_a_storage_that_changes_its_size() -> None:
    ledger = Ledger()
    account = ledger.open(8, Held.GATHERED)
    for size in (0, 32, 0):
        ledger.resize(account, size)
    ledger.close(account)
    reading = ledger.read()
    assert reading.most[Held.GATHERED] == 32
    assert reading.held.sum(axis=0).tolist() == [8, 0, 32, 0, 0]


def test_what_was_before_a_step_is_forgotten_but_for_what_is_there() -> None:
    ledger = step()
    ledger.forget()
    reading = ledger.read()
    assert reading.actions == (BEFORE,)
    assert {kind: n for kind, n in reading.most.items() if n} == {Held.MASTER: 100, Held.SUMS: 20}
