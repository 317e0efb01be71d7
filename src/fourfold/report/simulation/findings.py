"""What a simulated step shows, in plain sentences: what holds it up, memory, the bubble, exposed communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fourfold.planner.search.words import listed
from fourfold.report.simulation.bubble import bubble, longest_wait, spread
from fourfold.report.simulation.measures import exposed_shares, own_computing, slowest
from fourfold.report.simulation.words import PATH_WORDS, alike, sentence
from fourfold.report.text import percent
from fourfold.simulator.causes import Causes, duration
from fourfold.simulator.critical import CriticalPath
from fourfold.simulator.live import StepMemory, verdict
from fourfold.simulator.live import findings as memory_findings
from fourfold.simulator.played import Played
from fourfold.simulator.scenario import Scenario
from fourfold.simulator.whatif import Gain

_CAUSES = ("rank", "link", "cpu", "all", "documents", "jitter")  # of a step that is longer than it could be
_ALIKE = 1.005  # times the median rank's computing: below, ranks are alike
_MUCH_MORE = 1.02  # times the mean work: from here on it explains why a rank is slow
_HELPS = 0.001  # of the step: smaller gains are not worth a sentence
_HOLDS_UP = 0.01  # of the step: what is slow comes first if the step would be shorter by so much without it


class Findings(NamedTuple):
    """Sentences, the most important first."""

    first: tuple[str, ...]
    """At most four: what holds up the step, memory, the bubble, exposed communication."""
    more: tuple[str, ...]


def findings(
    scenario: Scenario,
    played: Played,
    *,
    gains: Sequence[Gain],
    path: CriticalPath,
    memory: StepMemory | None = None,
    found: Causes | None = None,
) -> Findings:
    """What there is to say.

    Args:
        scenario: what was simulated.
        played: what came of it.
        gains: what would help.
        path: its critical path.
        memory: live bytes through the step.
        found: causes of the replica that is shown, to name its waits.
    """
    slow = _slow(scenario, gains)
    holds_up = slow is not None and slow[0].share >= _HOLDS_UP
    helps = list(_helps(gains))
    first = [slow[1]] if slow is not None and holds_up else helps
    more = [slow[1]] if slow is not None and not holds_up else helps if holds_up and gains[0] is not slow[0] else []
    first += [f"Memory {verdict(memory)}."] if memory is not None else []
    first += [bubble(scenario, played, found), *_exposed(played)]
    more += _others(scenario, gains, slow)
    more += [_computes(played), *spread(played)]
    more += longest_wait(played, found) if found is not None else []
    more += [slowest_rank(scenario, played)] if scenario.grid.size > 1 else []
    more.append(on_path(path))
    more += map(sentence, memory_findings(memory)) if memory is not None else []
    return Findings(tuple(first), tuple(more))


def _slow(scenario: Scenario, gains: Sequence[Gain]) -> tuple[Gain, str] | None:
    """Of what is slow, or has more to do than others, what costs most: the gain without it, and a sentence."""
    costs = [gain for gain in gains if gain.what.split()[0] in _CAUSES]
    if not costs:
        return None
    gain = costs[0]
    alone = [other for other in costs if other.what not in ("all slow", "documents", "jitter")]
    text = f"{_name(scenario, gain)} {gain.sentence}"
    if gain.what == "all slow" and alone and alone[0].share >= _HELPS:
        text += f" The first of them alone: if {alone[0].condition}, {percent(alone[0].share)} shorter."
    return gain, text


def _others(scenario: Scenario, gains: Sequence[Gain], slow: tuple[Gain, str] | None) -> Iterator[str]:
    """What else is slow and holds up the step, one by one."""
    for gain in gains:
        kind = gain.what.split()[0]
        if slow is not None and gain is not slow[0] and kind in _CAUSES and kind != "all" and gain.share >= _HOLDS_UP:
            yield f"{_name(scenario, gain)} {gain.sentence}"


def _name(scenario: Scenario, gain: Gain) -> str:
    """What is slow, as a sentence."""
    faults = scenario.faults
    kind, _, which = gain.what.partition(" ")
    if kind == "rank":
        return (
            f"Straggler: rank {which} ({_place(scenario, int(which))}) computes {faults.ranks[int(which)]:g} times as "
            "long as normal."
        )
    if kind == "link":
        a, b = (int(rank) for rank in which.split("-"))
        return f"Slow link: what goes between ranks {a} and {b} takes {faults.links[a, b]:g} times as long as normal."
    if kind == "cpu":
        late = duration(faults.cpus[int(which)])
        return (
            f"Slow host: that of rank {which} ({_place(scenario, int(which))}) launches each computation {late} late."
        )
    if kind == "jitter":
        return f"Chance: computing times vary by {faults.jitter:.1%}."
    if kind == "documents":
        assert scenario.loads is not None
        work = scenario.loads.per_rank
        dp, cp = np.unravel_index(int(work.argmax()), work.shape)
        return f"Uneven documents: dp {dp} cp {cp} has {scenario.loads.slowest_over_mean:.2f} times the mean attention."
    counts = ((faults.ranks, "rank"), (faults.links, "link"), (faults.cpus, "host"))
    numbers = (f"{len(slow)} {name}{'' if len(slow) == 1 else 's'}" for slow, name in counts if slow)
    return f"Stragglers: {listed(numbers)} are slow."


def _place(scenario: Scenario, rank: int) -> str:
    at = scenario.grid.coordinates(rank)
    return f"dp {at.dp} pp {at.pp} cp {at.cp} tp {at.tp}"


def _helps(gains: Sequence[Gain]) -> Iterator[str]:
    worth = [gain for gain in gains if gain.share >= _HELPS]
    if worth:
        yield f"What would help most: {worth[0].sentence[0].lower()}{worth[0].sentence[1:]}"
    elif gains:
        yield "Nothing alone would help: no class made free, and nothing slow made normal, shortens the step by 0.1%."


def _exposed(played: Played) -> Iterator[str]:
    """TP's, CP's and FSDP's, transfers apart from waiting; what messages cost is the bubble."""
    transfers, waits = exposed_shares(played)
    if not transfers and not waits:
        return
    said = [f"transfers {', '.join(transfers)}"] if transfers else []
    said += [f"waiting for slower peers {', '.join(waits)}"] if waits else []
    yield f"Exposed communication, mean of all ranks, shares of the step: {'; '.join(said)}."


def _computes(played: Played) -> str:
    """How much of the step is computing, transfers not included."""
    computes = float(own_computing(played).mean())
    return (
        f"Computing, mean of all ranks: {duration(computes)} of the step's {duration(played.step_seconds)}, "
        f"{percent(computes / played.step_seconds)}."
    )


def slowest_rank(scenario: Scenario, played: Played) -> str:
    """Which rank computes longest, by how much, and why."""
    own = own_computing(played)
    median, most = float(np.median(own)), float(own.max())
    if most <= _ALIKE * median:
        return f"No rank computes longer than most do, {duration(most)}."
    dp, pp, cp, tp = slowest(played)
    times = f"{duration(most)}, {most / median:.2f} times the median rank" if median else duration(most)
    reason = _why_slow(scenario, played, (dp, pp, cp, tp))
    because = f" {reason}" if reason else ""
    if alike(played):
        return f"Pipeline rank {pp} computes longest: {times}.{because}"
    rank = scenario.grid.rank(dp=dp, pp=pp, cp=cp, tp=tp)
    return f"Rank {rank} ({_place(scenario, rank)}) computes longest: {times}.{because}"


def _why_slow(scenario: Scenario, played: Played, at: tuple[int, int, int, int]) -> str:
    dp, pp, cp, tp = at
    factor = scenario.faults.ranks.get(scenario.grid.rank(dp=dp, pp=pp, cp=cp, tp=tp), 1.0)
    reasons = [f"it computes {factor:g} times as long as normal"] if factor > 1 else []
    if scenario.loads is not None:
        work = scenario.loads.per_rank
        more = float(work[dp, cp] / work.mean())
        if more > _MUCH_MORE:
            reasons.append(f"its documents have {more:.2f} times the mean attention")
    stages = [scenario.stages[rank :: scenario.grid.pp] for rank in range(scenario.grid.pp)]
    layers = [sum(len(stage.layers) for stage in own) for own in stages]
    mean = float(np.mean(layers))
    if layers[pp] > _MUCH_MORE * mean:
        reasons.append(f"it has {layers[pp]} layers, the mean rank {mean:.3g}")
    if not reasons and scenario.grid.pp > 1 and any(stage.head for stage in stages[pp]):
        reasons.append("it has the head and the loss")
    return sentence("; ".join(reasons)) if reasons else ""


def on_path(path: CriticalPath) -> str:
    """What the critical path consists of, and where it runs."""
    parts = sorted(((seconds, name) for name, seconds in path.by_class.items()), reverse=True)
    shares = [
        f"{seconds / path.seconds:.0%} {PATH_WORDS[name]}"
        for seconds, name in parts[:4]
        if seconds >= 0.005 * path.seconds
    ]
    text = f"The critical path, which determines the step's time, is {', '.join(shares)}"
    rank, share = next(iter(path.by_rank.items()))
    if path.grid.size > 1:
        text += f". {share:.0%} of it is on rank {rank}" if share > 0.5 else f". It runs over {len(path.by_rank)} ranks"
        pp_rank = max(range(path.grid.pp), key=lambda pp: path.by_pipeline_rank[pp])
        if path.grid.pp > 1:
            text += f", {path.by_pipeline_rank[pp_rank]:.0%} on pipeline rank {pp_rank}"
    return f"{text}."
