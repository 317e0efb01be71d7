"""The answer in words: one paragraph that a tired person at 3 a.m. can act on."""

from __future__ import annotations

from fourfold.debugger.slow import Culprit, Diagnosis, Verdict
from fourfold.debugger.slow.accounts import HOST
from fourfold.debugger.slow.known import mean, median
from fourfold.layout import Coordinates, join_ranks
from fourfold.report.text import percent
from fourfold.simulator.causes import duration

_NAMED = 4  # culprits in the paragraph; the page and JSON have all
_WORTH_SAYING = 0.02  # of the step
_NOTHING = 0.002  # of the step: a gain below this is none


def place(at: Coordinates) -> str:
    """dp 1, pp 0, cp 1, tp 0: outermost first, as the search goes."""
    return f"dp {at.dp}, pp {at.pp}, cp {at.cp}, tp {at.tp}"


def paragraph(found: Diagnosis) -> str:
    """The answer."""
    verdict = found.verdict
    say = {
        "slow rank": _one,
        "slow link": _one,
        "several": _several,
        "rotating": _rotating,
        "partition": _partition,
        "documents": _documents,
        "no single culprit": _nobody,
        "healthy": _healthy,
    }[verdict.answer]
    return say(found)


def _one(found: Diagnosis) -> str:
    culprit = found.verdict.culprits[0]
    return " ".join(part for part in (blame(found, culprit), _worth(found, culprit), advice(culprit)) if part)


def blame(found: Diagnosis, culprit: Culprit, *, among_others: bool = False) -> str:
    """Who, what and how much: one sentence."""
    grid, step = found.accounts.grid, found.verdict.step_seconds
    more = f"{duration(culprit.excess)} of every step of {duration(step)}"
    if culprit.kind == "link":
        longer = f"takes {culprit.factor:.2f} times as long as elsewhere, though all ranks are there"
        return f"{_link(culprit)} {longer}: {more}."
    rank = culprit.ranks[0]
    where = f"Rank {rank} ({place(grid.coordinates(rank))}){'' if among_others else ' holds up the others'}"
    if culprit.cause == "launches" and found.device == "cpu":
        return f"{where}: its process neither computes nor waits, as if it were stopped or had no processor: {more}."
    if culprit.kind == "cpu":
        return f"{where}: {_PAUSES[culprit.cause]}, {more}."
    return f"{where}: {_SLOW[culprit.cause]} {culprit.factor:.2f} times as long as on ranks that do the same, {more}."


_PAUSES = {
    "garbage collection": "it collects garbage",
    "data loader": "its data loader is late",
    "optimizer": "it is long at its optimizer",
    "launches": "its host launches late, and its GPU is idle",
}
_SLOW = {
    "all work": "all that it computes takes",
    "matrix products": "its matrix products take",
    "attention": "its attention takes",
    "memory-bound work": "its element-wise work and copies take",
}


def _link(culprit: Culprit) -> str:
    if culprit.cause == "network card":
        return f"What goes in and out of rank {culprit.ranks[0]}"
    if culprit.cause == "link":
        return f"What goes between ranks {culprit.ranks[0]} and {culprit.ranks[1]}"
    return f"What goes between ranks {join_ranks(culprit.ranks)}"


def _worth(found: Diagnosis, culprit: Culprit) -> str:
    if culprit.gain is None:
        return "What a step would take without it is not known: the traces do not say which computation is which."
    step = found.verdict.step_seconds
    if culprit.gain < _NOTHING * step:
        return "The step would be no shorter without it: others are as late for reasons of their own."
    return f"Were it as its peers, a step would take {_without(found, culprit.gain)}."


def advice(culprit: Culprit) -> str:
    """What to do."""
    return _ADVICE[culprit.cause]


_CLOCK = "Compare its clock, power and temperature with those of its neighbours, or take its node out of the job."
_CABLE = "Look at cables, network cards and switch ports there, and at what else uses them."
_ADVICE = {
    "all work": _CLOCK,
    "matrix products": _CLOCK,
    "attention": "Look at which attention kernel it runs, and at its clock.",
    "memory-bound work": "Look for remapped rows and memory errors of its GPU, or take its node out of the job.",
    "garbage collection": "Collect garbage by hand and on all ranks in the same step (train.gc_every).",
    "data loader": "Look at its storage, and at what its loader does.",
    "optimizer": "Look at what its host does between the gradients and the next step.",
    "launches": "Look at what else runs on its host, and at the clock and affinity of its cores.",
    "link": _CABLE,
    "network card": _CABLE,
    "group": _CABLE,
}


def _without(found: Diagnosis, gain: float) -> str:
    """What a step would take, and how much less that is."""
    step = found.verdict.step_seconds
    return f"{duration(step - gain)}, {percent(gain / step)} less"


def _several(found: Diagnosis) -> str:
    verdict = found.verdict
    parts = [f"{len(verdict.culprits)} culprits hold up the others, the worst first."]
    parts += [blame(found, culprit, among_others=True) for culprit in verdict.culprits[:_NAMED]]
    if len(verdict.culprits) > _NAMED:
        parts.append(f"And {len(verdict.culprits) - _NAMED} more.")
    if verdict.gain is not None:
        parts.append(f"With all of them mended a step would take {_without(found, verdict.gain)}.")
    parts.append(f"Begin with the first. {advice(verdict.culprits[0])}")
    return " ".join(parts)


def _rotating(found: Diagnosis) -> str:
    who = ", ".join(f"rank {rank} in step {step}" for step, rank in found.verdict.rotating[:6])
    return (
        f"A slow rank that changes between steps: {who}. No machine is to blame. Look for what comes and goes: garbage "
        "collection that each rank does by itself, checkpoints, other jobs on the network, or very long documents."
    )


def _partition(found: Diagnosis) -> str:
    verdict = found.verdict
    stage = verdict.stage
    assert stage is not None
    return (
        f"No rank is slow: pipeline rank {stage.pp_rank} simply has more to do. On all replicas it computes "
        f"{stage.ratio:.2f} times as long as the others for their share. With an even share a step would take "
        f"{_without(found, stage.gain)}. Move layers away from it (the head and the embedding count, too)."
    )


def _documents(found: Diagnosis) -> str:
    verdict = found.verdict
    return (
        f"No rank is slow: documents are uneven. The replica with the longest has {verdict.documents:.2f} times the "
        f"mean attention. If all had the same, a step would take {_without(found, verdict.documents_gain)}. Sort or "
        "balance documents over replicas."
    )


def _nobody(found: Diagnosis) -> str:
    return f"No single culprit: {found.verdict.reason}. {_seen(found)}"


def _healthy(found: Diagnosis) -> str:
    verdict, more = found.verdict, _loaders(found)
    if verdict.documents_gain > _WORTH_SAYING * verdict.step_seconds:
        more = f" Were documents even, a step would take {_without(found, verdict.documents_gain)}."
    if verdict.uneven is not None and verdict.uneven.gain > _WORTH_SAYING * verdict.step_seconds:
        one = verdict.uneven
        more += (
            f" Pipeline rank {one.pp_rank} computes {one.ratio:.2f} times as long as the others, as the run planned "
            f"it; with an even split a step would take {_without(found, one.gain)}."
        )
    return f"Healthy: no rank, host or link stands out. {_seen(found)}{more}"


def _loaders(found: Diagnosis) -> str:
    """What all ranks lose alike, so that none stands out."""
    for name, words in (("loader", "its data"), ("garbage", "its garbage collection")):
        column = found.accounts.host[:, :, HOST.index(name)]
        seconds = float(median(column))
        if seconds > _WORTH_SAYING * found.verdict.step_seconds:
            return f" But every rank waits {duration(seconds)} of a step for {words}."
    return ""


def _seen(found: Diagnosis) -> str:
    steps = found.steps
    over = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    suspects = found.suspects
    ranks = f"{len(found.ranks):,} of {found.accounts.grid.size:,} ranks"
    text = f"Seen: {ranks}, {over}, {duration(found.verdict.step_seconds)} per step."
    if suspects.compared and len(found.ranks) > 1:
        import numpy as np

        worst = int(np.nanargmax(np.where(np.isnan(suspects.per_rank), -np.inf, suspects.per_rank)))
        excess = max(float(suspects.per_rank[worst]), 0.0)
        usual = float(mean(suspects.usual[:, worst]))
        if usual > 0:
            text += f" The slowest, rank {worst}, takes {percent(excess / usual)} longer than its peers."
    return text


def answer_word(verdict: Verdict) -> str:
    """The answer as a headline."""
    return {"partition": "uneven partition", "documents": "uneven documents", "several": "several culprits"}.get(
        verdict.answer, verdict.answer
    )
