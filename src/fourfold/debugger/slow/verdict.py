"""From what every rank did to an answer: who holds up the others, by what, and what it would help to mend it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fourfold.debugger.reading.trace import Work
from fourfold.debugger.slow.accounts import AWAITED, Accounts, Seconds
from fourfold.debugger.slow.culprits import Culprit, beside_the_graph, culprits_of, mended
from fourfold.debugger.slow.known import mean, median
from fourfold.debugger.slow.links import SlowLink
from fourfold.debugger.slow.meetings import Unseen
from fourfold.debugger.slow.suspects import Suspects, find_suspects, typical
from fourfold.debugger.slow.whatif import Replay
from fourfold.layout import join_ranks

Answer = Literal[
    "slow rank", "slow link", "several", "rotating", "partition", "documents", "no single culprit", "healthy"
]

_MOST_CULPRITS = 64
_LONGER_STAGE = 1.10  # times the other stages, against its expected share
_LONG = 0.05  # of the step: what a long stage, or ranks without a trace, must cost to be the answer
_EVEN = 1.02  # times the mean attention: less is no unevenness
_UNEVEN = 0.10  # the same of documents, which are never even
_WAITS = 0.2  # of the step: with so much waiting for peers of which none stands out, something is wrong all the same
_PEERS = [AWAITED.index(name) for name in ("tp", "cp", "dp")]  # who do the same as a rank
_BESIDE = 0.3  # of the first's excess: with less, on processors that others have as well, a second stands out by chance
_CLEAR = 2.0  # times the threshold: who stands out by so much is named, whatever it costs now
_AT_LEAST = 0.005  # of the step: so much a second culprit must cost, once those before it are mended


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
    """That computes longer than its expected share."""
    uneven: Stage | None = None
    """That computes longer than the others, as expected: their shares differ by plan."""
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
    unseen: Unseen | None = None,
) -> tuple[Verdict, Suspects]:
    """The verdict, and what it rests on.

    Args:
        accounts: what every rank did.
        shares: expected share of the work of each pipeline rank; empty: equal shares.
        links: that are slow.
        replays: of some steps, if they can be replayed; gains are their mean.
        unseen: ranks without a trace for whom others wait.
    """
    suspects, ranks = _one_after_another(accounts, shares)
    step = float(np.mean(accounts.step_seconds))
    culprits = culprits_of(suspects, ranks, accounts, links)
    what_ifs: list[WhatIf] = []
    culprits, healed = _with_gains(culprits, suspects, accounts, replays)
    gains = [culprit.gain for culprit in culprits if culprit.gain is not None]
    gain = sum(gains) if gains else None
    stage = _long_stage(accounts, shares, healed)
    spread, documents_gain = _documents(suspects, accounts, healed)
    if documents_gain > 0:
        what_ifs.append(WhatIf("documents", "every rank had the mean attention", documents_gain))
    uneven = _long_stage(accounts, (), healed) if shares and stage is None else None
    for one, words in ((stage, "no more than its share"), (uneven, "as much to do as the others")):
        if one is not None:
            what_ifs.append(WhatIf(f"stage {one.pp_rank}", f"pipeline rank {one.pp_rank} had {words}", one.gain))
    what_ifs += _class_gains(suspects, accounts, replays, [c.ranks[0] for c in culprits if c.kind == "compute"])
    error = None
    if replays:
        error = float(np.mean([replay.seconds() / replay.measured - 1 for replay in replays]))
    answer, reason = _answer(culprits, suspects, stage, documents_gain, accounts, step, unseen)
    verdict = Verdict(
        answer=answer,
        culprits=tuple(culprits),
        step_seconds=step,
        gain=gain,
        what_ifs=tuple(sorted(what_ifs, key=lambda w: -w.gain)),
        rotating=suspects.rotating if answer == "rotating" else (),
        stage=stage,
        uneven=uneven,
        documents=spread,
        documents_gain=documents_gain,
        replay_error=error,
        reason=reason,
    )
    return verdict, suspects


def _one_after_another(accounts: Accounts, shares: tuple[float, ...]) -> tuple[Suspects, list[int]]:
    """Finds a culprit, takes its rank away, and looks again: what is slow hides what is less slow."""
    first = found = find_suspects(accounts, shares)
    ranks: list[int] = []
    left = accounts
    while found.ranks and len(ranks) < _MOST_CULPRITS:
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


def _with_gains(
    culprits: Sequence[Culprit], suspects: Suspects, accounts: Accounts, replays: Sequence[Replay]
) -> tuple[list[Culprit], list[Replay]]:
    """Culprits with what each would gain after those before it, and the steps with all of them mended."""
    out: list[Culprit] = []
    now = [*replays]
    least = _AT_LEAST * float(np.mean(accounts.step_seconds))
    for culprit in culprits:
        after = [mended(culprit, accounts)(replay) for replay in now]
        # Where a whole step is one computation, FSDP's collectives are in the replay as well: so not their sum.
        gain = max(_gain(now, after), beside_the_graph(culprit, accounts)) if now else None
        weak = accounts.on_processor or culprit.excess < _CLEAR * suspects.threshold[culprit.ranks[0]]
        if out and gain is not None and culprit.kind != "link" and gain < least and weak:
            continue  # it stands out by little, and holds up nobody
        out.append(dataclasses.replace(culprit, gain=gain))
        now = after
    return out, now


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
    usual = float(np.median(others))
    if usual <= 0 or pace[worst] < _LONGER_STAGE * usual:
        return None
    ratio = float(pace[worst] / usual)
    ranks = {r: 1 / ratio for r in range(grid.size) if grid.coordinates(r).pp == worst}
    if replays:
        gain = _gain(replays, [replay.at_speed(ranks) for replay in replays])
    else:
        gain = float(per_stage[worst] * (1 - 1 / ratio))
    return Stage(worst, ratio, gain)


def _documents(suspects: Suspects, accounts: Accounts, replays: Sequence[Replay]) -> tuple[float, float]:
    """Attention of the (dp, cp) with most over the mean, and what even documents would gain."""
    documents = mean(suspects.documents, axis=0)
    # Processors that others have as well make attention uneven, too.
    told = accounts.attention_known and not accounts.on_processor
    if documents.size < 2 or not told or not np.nanmax(documents) > 0:
        return 1.0, 0.0
    spread = float(np.nanmax(documents) / mean(documents))
    if spread < _EVEN:
        return spread, 0.0
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
    unseen: Unseen | None,
) -> tuple[Answer, str]:
    small = all(culprit.excess < _AT_LEAST * step for culprit in culprits)
    if small and unseen is not None and unseen.seconds > _LONG * step:
        who = f"rank{'s' * (len(unseen.ranks) > 1)} {join_ranks(unseen.ranks, 8)}"
        share = unseen.seconds / step
        return (
            "no single culprit",
            f"{who}, of which there is no trace to use, held up others for {share:.0%} of the step",
        )
    if len(culprits) > 1:
        return "several", ""
    if culprits:
        return ("slow link" if culprits[0].kind == "link" else "slow rank"), ""
    if suspects.rotating:
        return "rotating", ""
    stage_gain = stage.gain if stage is not None else 0.0
    if documents_gain > max(_UNEVEN * step, stage_gain):
        return "documents", ""
    if stage_gain > _LONG * step:
        return "partition", ""
    if np.count_nonzero(accounts.present) == 1:
        return "no single culprit", f"one rank of {accounts.grid.size:,} has a trace, and nobody to be compared with"
    if not suspects.compared:
        return "no single culprit", "no rank has peers that do the same"
    waits = mean(accounts.wait[:, :, _PEERS].sum(axis=2))
    if waits > _WAITS * step:
        return "no single culprit", "ranks wait for their peers, and none of them stands out"
    return "healthy", ""
