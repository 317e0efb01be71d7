"""What is slow, and by what: a rank's computing, its host, or a link; and a step in which that is mended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fourfold.debugger.reading.trace import Work
from fourfold.debugger.slow.accounts import AWAITED, HOST, Accounts
from fourfold.debugger.slow.known import mean
from fourfold.debugger.slow.links import SlowLink
from fourfold.debugger.slow.suspects import CLASSES, Level, Suspects, typical
from fourfold.debugger.slow.whatif import Replay

Kind = Literal["compute", "cpu", "link"]
Change = Callable[[Replay], Replay]

_INNER = [AWAITED.index(name) for name in ("tp", "cp")]  # what ranks wait for within a computation
_GROUP = 3  # ranks: fewer that pause alike may be chance
_ALIKE = 0.6  # of the largest relative excess: a class of work with so much is slow as well


@dataclass(frozen=True)
class Culprit:
    """What holds up the others.

    Attributes:
        kind: whether it computes longer, its host comes late, or a link is slow though all are there.
        ranks: one; of a link its ends, or the members of its group.
        cause: what exactly: of "compute" "all work", "matrix products", "attention" or "memory-bound work"; of "cpu"
            "garbage collection", "data loader", "optimizer" or "launches"; of "link" "link", "network card" or "group".
        factor: its computing time over that of its peers; of a late host that with its pauses; of a link, of what goes
            over it.
        excess: seconds per step that it takes longer than its peers.
        gain: seconds by which the step would be shorter, were it as its peers and all culprits before it mended; None:
            the step could not be replayed.
        by_class: seconds of the excess by class of work and pause (`suspects.CLASSES`).
        pausing: of a link, the ranks of an FSDP group whose layers wait for what goes over it.
        levels: how the search came to it.
    """

    kind: Kind
    ranks: tuple[int, ...]
    cause: str
    factor: float
    excess: float
    gain: float | None
    by_class: dict[str, float] = field(default_factory=dict)
    levels: tuple[Level, ...] = ()
    pausing: tuple[int, ...] = ()


def culprits_of(
    suspects: Suspects, ranks: Sequence[int], accounts: Accounts, links: Sequence[SlowLink]
) -> list[Culprit]:
    """What is wrong with these ranks and links, the worst first."""
    found = [_slow_rank(suspects, rank, accounts) for rank in ranks]
    of_links = [_slow_link(link, accounts) for link in links]
    pausing = {culprit.ranks[0]: culprit for culprit in found if culprit.cause == "launches"}
    for members in _alike(pausing, accounts):
        each = [pausing[rank] for rank in members]
        found = [culprit for culprit in found if culprit not in each]
        excess, factor = (float(np.mean([getattr(one, name) for one in each])) for name in ("excess", "factor"))
        behind = next((i for i, link in enumerate(of_links) if {*link.ranks} <= {*members}), None)
        if behind is None:
            of_links.append(Culprit("link", members, "group", factor, excess, None, pausing=members))
        else:
            link = of_links[behind]
            of_links[behind] = dataclasses.replace(link, excess=link.excess + excess, pausing=members)
    return sorted([*found, *of_links], key=lambda culprit: -culprit.excess)


def _alike(pausing: Collection[int], accounts: Accounts) -> Iterator[tuple[int, ...]]:
    """FSDP groups all of whose ranks pause: no host does that. Their layers wait for weights from a slow link."""
    present = accounts.present
    for group in accounts.grid.groups("cp", "dp"):
        members = tuple(rank for rank in group if present[rank])
        if len(members) >= _GROUP and all(rank in pausing for rank in members):
            yield members


def _slow_rank(suspects: Suspects, rank: int, accounts: Accounts) -> Culprit:
    by_class = dict(zip(CLASSES, suspects.by_class(rank).tolist(), strict=True))
    of_host = sum(max(by_class[name], 0.0) for name in HOST)
    of_work = sum(max(by_class[kind.name.lower()], 0.0) for kind in Work)
    excess = float(suspects.per_rank[rank])
    kind: Kind = "cpu" if of_host > of_work else "compute"
    cause = _pause(by_class) if kind == "cpu" else _work(rank, by_class, accounts)
    # Pauses of the host are held against the computing that they hold up.
    usual = float(mean(accounts.work[:, rank].sum(axis=1))) - sum(by_class[kind.name.lower()] for kind in Work)
    factor = 1 + (of_host if kind == "cpu" else of_work) / usual if usual > 0 else np.inf
    return Culprit(kind, (rank,), cause, factor, excess, None, by_class, suspects.levels(rank))


_PAUSES = {
    "garbage": "garbage collection",
    "loader": "data loader",
    "optimizer": "optimizer",
    "launch": "launches",
}


def _pause(by_class: dict[str, float]) -> str:
    return _PAUSES[max(HOST, key=lambda name: by_class[name])]


def _work(rank: int, by_class: dict[str, float], accounts: Accounts) -> str:
    """Which work is slow."""
    if not accounts.attention_known:
        return "all work"
    measured = mean(accounts.work[:, rank], axis=0)
    names = [kind.name.lower() for kind in Work]
    relative = {
        name: by_class[name] / max(measured[i] - by_class[name], 1e-12) if measured[i] > 0 else 0.0
        for i, name in enumerate(names)
    }
    most = max(relative.values())
    slow = [name for name in names if relative[name] >= _ALIKE * most and by_class[name] > 0]
    if set(slow) >= {name for name in names if measured[names.index(name)] > 0} or {"gemm", "attention"} <= set(slow):
        return "all work"
    if slow == ["memory"]:
        return "memory-bound work"
    if slow == ["attention"]:
        return "attention"
    return "matrix products" if "gemm" in slow else "all work"


def _slow_link(link: SlowLink, accounts: Accounts) -> Culprit:
    cause = {1: "network card", 2: "link"}.get(len(link.ranks), "group")
    # What computing hides of it costs nothing.
    shown = max(float(mean(accounts.transfer[:, rank].sum(axis=1))) for rank in link.ranks)
    excess = min(link.excess, shown) if shown > 0 else link.excess
    return Culprit("link", link.ranks, cause, link.factor, excess, None)


def mended(culprit: Culprit, accounts: Accounts) -> Change:
    """The change of a step that makes a culprit as its peers."""
    if culprit.kind == "cpu" and not (accounts.on_processor and culprit.cause == "launches"):
        return lambda replay: replay.in_time(culprit.ranks)
    if culprit.kind == "cpu":  # it is interrupted anywhere
        rank = culprit.ranks[0]
        own = float(mean(accounts.own[:, rank]))
        return lambda replay: replay.at_speed({rank: max(1 - culprit.excess / own, 0.0)}, with_pauses=True)
    if culprit.kind == "compute":
        rank = culprit.ranks[0]
        busy = float(mean(accounts.work[:, rank].sum(axis=1)))
        excess = sum(culprit.by_class[kind.name.lower()] for kind in Work)
        share = 1 - excess / busy if busy > 0 else 1.0
        return lambda replay: replay.at_speed({rank: min(max(share, 0.0), 1.0)}, with_pauses=accounts.on_processor)
    return lambda replay: _on_normal_link(culprit, accounts, replay).in_time(culprit.pausing)


def beside_the_graph(culprit: Culprit, accounts: Accounts) -> float:
    """Seconds per step that a link costs in FSDP's collectives at the ends of a step, which replays do not have."""
    if culprit.kind != "link":
        return 0.0
    shown = accounts.transfer[:, :, AWAITED.index("dp")]
    usual = np.broadcast_to(typical(accounts.shaped(shown), (1, 3, 4)), accounts.shaped(shown).shape)
    more = mean(shown - usual.reshape(shown.shape), axis=0)[list(culprit.ranks)]
    return max(float(np.nan_to_num(more).min()), 0.0)


def _on_normal_link(culprit: Culprit, accounts: Accounts, replay: Replay) -> Replay:
    """Messages between stages take less; of TP's and CP's collectives, what their ranks do around them."""
    if len(culprit.ranks) == 2:
        one, other = culprit.ranks
        if accounts.grid.coordinates(one).pp != accounts.grid.coordinates(other).pp:
            return replay.at_link_speed((one, other), 1 / culprit.factor)
    busy = {
        rank: float(mean(accounts.work[:, rank].sum(axis=1) + accounts.transfer[:, rank, _INNER].sum(axis=1)))
        for rank in culprit.ranks
    }
    excess = culprit.excess if not culprit.pausing else 0.0
    return replay.at_speed({rank: max(1 - excess / seconds, 0.0) for rank, seconds in busy.items() if seconds > 0})
