"""From what every rank did to an answer: who holds up the others, by what, and what it would help to mend it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fourfold.debugger.reading.trace import Work
from fourfold.debugger.slow.accounts import HOST, Accounts, Seconds
from fourfold.debugger.slow.known import mean, median
from fourfold.debugger.slow.links import SlowLink
from fourfold.debugger.slow.suspects import CLASSES, Level, Suspects, find_suspects, typical
from fourfold.debugger.slow.whatif import Replay

Kind = Literal["compute", "cpu", "link"]
Answer = Literal[
    "slow rank", "slow link", "several", "rotating", "partition", "documents", "no single culprit", "healthy"
]

MOST_CULPRITS = 64
_LONGER_STAGE = 1.10  # times the other stages, against its expected share
_MATTERS = 0.05  # of the step: what documents or a long stage must cost to be the answer
_WAITS = 0.2  # of the step: with so much waiting for peers of which none stands out, something is wrong all the same
_BESIDE = 0.3  # of the first's excess: with less, on processors that others have as well, a second stands out by chance
_CLEAR = 2.0  # times the threshold: who stands out by so much is named, whatever it costs now
_GROUP = 3  # ranks: fewer that pause alike may be chance
_AT_LEAST = 0.005  # of the step: so much a second culprit must cost, once those before it are mended
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


@dataclass(frozen=True)
class WhatIf:
    """The step with something otherwise: what, in words, and its gain in seconds."""

    what: str
    sentence: str
    gain: float


@dataclass(frozen=True)
class Stage:
    """A pipeline rank that computes longer than its share: `ratio` times, on all replicas."""

    pp_rank: int
    ratio: float
    gain: float


@dataclass(frozen=True)
class Verdict:
    """The answer. `gain` is that of all culprits together, in seconds; None where nothing could be replayed."""

    answer: Answer
    culprits: tuple[Culprit, ...]
    step_seconds: float
    gain: float | None
    what_ifs: tuple[WhatIf, ...]
    rotating: tuple[tuple[int, int], ...] = ()
    stage: Stage | None = None
    documents: float = 1.0
    """Attention of the (dp, cp) with most, over the mean."""
    documents_gain: float = 0.0
    replay_error: float | None = None
    """Of the replayed computations, relative to the measured."""
    reason: str = ""
    """Why there is no single culprit."""


def judge(
    accounts: Accounts,
    *,
    shares: tuple[float, ...] = (),
    links: Sequence[SlowLink] = (),
    replays: Sequence[Replay] = (),
) -> tuple[Verdict, Suspects]:
    """The verdict, and what it rests on.

    Args:
        accounts: what every rank did.
        shares: expected share of the work of each pipeline rank; empty: equal shares.
        links: that are slow.
        replays: of some steps, if they can be replayed; gains are their mean.
    """
    suspects, ranks = _one_after_another(accounts, shares)
    step = float(np.mean(accounts.step_seconds))
    culprits = _with_groups([_slow_rank(suspects, rank, accounts) for rank in ranks], accounts, links)
    culprits = sorted([*culprits, *map(_slow_link, links)], key=lambda culprit: -culprit.excess)
    what_ifs: list[WhatIf] = []
    culprits, mended = _with_gains(culprits, suspects, accounts, replays)
    gain = _gain(replays, mended) if replays and culprits else None
    stage = _long_stage(accounts, shares, mended)
    spread, documents_gain = _documents(suspects, accounts, mended)
    if documents_gain > 0:
        what_ifs.append(WhatIf("documents", "every rank had the mean attention", documents_gain))
    if stage is not None:
        what_ifs.append(
            WhatIf(f"stage {stage.pp_rank}", f"pipeline rank {stage.pp_rank} had no more than its share", stage.gain)
        )
    what_ifs += _class_gains(suspects, accounts, replays, [c.ranks[0] for c in culprits if c.kind == "compute"])
    error = None
    if replays:
        error = float(np.mean([replay.seconds() / replay.measured - 1 for replay in replays]))
    answer, reason = _answer(culprits, suspects, stage, documents_gain, accounts, step)
    verdict = Verdict(
        answer,
        tuple(culprits),
        step,
        gain,
        tuple(sorted(what_ifs, key=lambda w: -w.gain)),
        suspects.rotating if answer == "rotating" else (),
        stage,
        spread,
        documents_gain,
        error,
        reason,
    )
    return verdict, suspects


def _one_after_another(accounts: Accounts, shares: tuple[float, ...]) -> tuple[Suspects, list[int]]:
    """Finds a culprit, takes its rank away, and looks again: what is slow hides what is less slow."""
    first = found = find_suspects(accounts, shares)
    ranks: list[int] = []
    left = accounts
    while found.ranks and len(ranks) < MOST_CULPRITS:
        rank = found.ranks[0]
        if ranks and accounts.on_processor and found.per_rank[rank] < _BESIDE * first.per_rank[ranks[0]]:
            break
        ranks.append(rank)
        left = _without(left, rank)
        found = find_suspects(left, shares)
    return dataclasses.replace(first, ranks=tuple(ranks)), ranks


def _without(accounts: Accounts, rank: int) -> Accounts:
    columns = {}
    for name in ("work", "host", "transfer", "wait"):
        column = getattr(accounts, name).copy()
        column[:, rank] = np.nan
        columns[name] = column
    return dataclasses.replace(accounts, **columns)


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


def _with_groups(culprits: list[Culprit], accounts: Accounts, links: Sequence[SlowLink]) -> list[Culprit]:
    """Pauses that all ranks of an FSDP group have in common are no host's: layers wait for weights on a slow link."""
    present = accounts.present
    pausing = {culprit.ranks[0]: culprit for culprit in culprits if culprit.cause == "launches"}
    for group in accounts.grid.groups("cp", "dp"):
        members = [rank for rank in group if present[rank]]
        if len(members) < _GROUP or not pausing.keys() >= {*members}:
            continue
        culprits = [culprit for culprit in culprits if culprit not in [pausing[rank] for rank in members]]
        if not any({*link.ranks} <= {*group} for link in links):
            each = [pausing[rank] for rank in members]
            excess, factor = (float(np.mean([getattr(one, name) for one in each])) for name in ("excess", "factor"))
            culprits.append(Culprit("link", group, "group", factor, excess, None))
    return culprits


def _slow_link(link: SlowLink) -> Culprit:
    cause = {1: "network card", 2: "link"}.get(len(link.ranks), "group")
    return Culprit("link", link.ranks, cause, link.factor, link.excess, None)


Change = Callable[[Replay], Replay]


def _with_gains(
    culprits: Sequence[Culprit], suspects: Suspects, accounts: Accounts, replays: Sequence[Replay]
) -> tuple[list[Culprit], list[Replay]]:
    """Culprits with what each would gain after those before it, and the steps with all of them mended."""
    out: list[Culprit] = []
    now = [*replays]
    least = _AT_LEAST * float(np.mean(accounts.step_seconds))
    for culprit in culprits:
        after = [_mended(culprit, accounts)(replay) for replay in now]
        gain = _gain(now, after) if now else None
        weak = accounts.on_processor or culprit.excess < _CLEAR * suspects.threshold[culprit.ranks[0]]
        if out and gain is not None and culprit.kind != "link" and gain < least and weak:
            continue  # it stands out by little, and holds up nobody
        out.append(dataclasses.replace(culprit, gain=gain))
        now = after
    return out, now


def _mended(culprit: Culprit, accounts: Accounts) -> Change:
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
    if len(culprit.ranks) == 2:
        one, other = culprit.ranks
        if accounts.grid.coordinates(one).pp != accounts.grid.coordinates(other).pp:
            return lambda replay: replay.at_link_speed((one, other), 1 / culprit.factor)
    busy = {
        rank: float(mean((accounts.work[:, rank].sum(axis=1)) + accounts.transfer[:, rank, :3].sum(axis=1)))
        for rank in culprit.ranks
    }
    return lambda replay: replay.at_speed(
        {rank: max(1 - culprit.excess / seconds, 0.0) for rank, seconds in busy.items() if seconds > 0}
    )


def _gain(before: Sequence[Replay], after: Sequence[Replay]) -> float:
    return float(np.mean([a.seconds() - b.seconds() for a, b in zip(before, after, strict=True)]))


def _long_stage(accounts: Accounts, shares: tuple[float, ...], replays: Sequence[Replay]) -> Stage | None:
    """A pipeline rank that computes longer than its share on all replicas."""
    grid = accounts.grid
    if grid.pp < 2:
        return None
    own: Seconds = accounts.shaped(accounts.work.sum(axis=2))
    per_stage = median(typical(own, (1, 3, 4))[:, 0, :, 0, 0], axis=0)
    if np.isnan(per_stage).any():
        return None
    expected = np.array(shares) if len(shares) == grid.pp else np.full(grid.pp, 1 / grid.pp)
    pace = per_stage / expected
    worst = int(np.argmax(pace))
    others = np.delete(pace, worst)
    ratio = float(pace[worst] / np.median(others))
    if ratio < _LONGER_STAGE:
        return None
    ranks = {r: 1 / ratio for r in range(grid.size) if grid.coordinates(r).pp == worst}
    if replays:
        gain = _gain(replays, [replay.at_speed(ranks) for replay in replays])
    else:
        gain = float(per_stage[worst] * (1 - 1 / ratio))
    return Stage(worst, ratio, gain)


def _documents(suspects: Suspects, accounts: Accounts, replays: Sequence[Replay]) -> tuple[float, float]:
    """Attention of the (dp, cp) with most over the mean, and what even documents would gain."""
    documents = mean(suspects.documents, axis=0)
    if documents.size < 2 or not accounts.attention_known or not np.nanmax(documents) > 0:
        return 1.0, 0.0
    spread = float(np.nanmax(documents) / mean(documents))
    if replays:
        return spread, max(_gain(replays, [replay.even_documents() for replay in replays]), 0.0)
    per_step = (
        np.nanmax(suspects.documents, axis=(1, 2)) / np.nansum(suspects.documents, axis=(1, 2)) * documents.size - 1
    )
    attention = mean(accounts.work[:, :, Work.ATTENTION], axis=1)
    return spread, float(np.mean(per_step * attention))


def _class_gains(
    suspects: Suspects, accounts: Accounts, replays: Sequence[Replay], ranks: Sequence[int]
) -> list[WhatIf]:
    """What each class of work of the slow ranks costs by itself."""
    out = []
    for kind in Work if replays and ranks else ():
        share = {}
        for rank in ranks:
            busy = float(mean(accounts.work[:, rank].sum(axis=1)))
            share[rank] = 1 - max(float(suspects.by_class(rank)[kind]), 0.0) / busy if busy else 1.0
        name = kind.name.lower()
        gain = _gain(replays, [replay.at_speed(share) for replay in replays])
        if gain > 0:
            out.append(WhatIf(name, f"{_WORDS[kind]} of slow ranks took as long as on their peers", gain))
    return out


_WORDS = {
    Work.GEMM: "matrix products",
    Work.ATTENTION: "attention",
    Work.MEMORY: "element-wise work and copies",
}


def _answer(
    culprits: Sequence[Culprit],
    suspects: Suspects,
    stage: Stage | None,
    documents_gain: float,
    accounts: Accounts,
    step: float,
) -> tuple[Answer, str]:
    if len(culprits) > 1:
        return "several", ""
    if culprits:
        return ("slow link" if culprits[0].kind == "link" else "slow rank"), ""
    if suspects.rotating:
        return "rotating", ""
    known = {"partition": stage.gain if stage is not None else 0.0, "documents": documents_gain}
    most: Answer = max(known, key=lambda name: known[name])  # type: ignore[assignment]
    if known[most] > _MATTERS * step:
        return most, ""
    if np.count_nonzero(accounts.present) == 1:
        return "no single culprit", f"one rank of {accounts.grid.size:,} has a trace, and nobody to be compared with"
    if not suspects.compared:
        return "no single culprit", "no rank has peers that do the same"
    waits = mean(accounts.wait[:, :, [0, 1, 3]].sum(axis=2))
    if waits > _WAITS * step:
        return "no single culprit", "ranks wait for their peers, and none of them stands out"
    return "healthy", ""
