"""What a simulated step shows, in plain sentences: where the bubble is, who is slow and why, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fourfold.report.simulation.measures import exposed, own_computing, slowest
from fourfold.report.simulation.words import DIMENSION_NAMES, PATH_WORDS, percent, sentence
from fourfold.simulator.causes import Causes, duration, idle_by_phase
from fourfold.simulator.critical import CriticalPath
from fourfold.simulator.graph import NONE
from fourfold.simulator.played import Played
from fourfold.simulator.scenario import Scenario
from fourfold.simulator.whatif import Gain

_ALIKE = 1.005  # times the middle rank's computing: below, ranks are alike
_MUCH_MORE = 1.02  # times the mean work: from here on it explains why a rank is slow
_HELPS = 0.001  # of the step: smaller gains are not worth a sentence


def findings(
    scenario: Scenario, played: Played, *, gains: Sequence[Gain], path: CriticalPath, found: Causes | None = None
) -> tuple[str, ...]:
    """The most important first.

    Args:
        scenario: what was simulated.
        played: what came of it.
        gains: what would help.
        path: its critical path.
        found: causes of the replica that is shown, to name the longest wait.
    """
    return (
        *_bubble(scenario, played),
        *(_longest_wait(played, found) if found is not None else ()),
        *((slowest_rank(scenario, played),) if scenario.grid.size > 1 else ()),
        *_exposed(played),
        on_path(path),
        *_helps(gains),
    )


def _bubble(scenario: Scenario, played: Played) -> Iterator[str]:
    idle, step = float(played.idle.mean()), played.step_seconds
    computing = float(played.computing.mean())
    head = f"The step takes {duration(step)}. The mean rank computes for {duration(computing)} of it"
    if idle < 1e-9 * step:
        yield f"{head} and never waits for another pipeline rank: there is no bubble."
        return
    yield (
        f"{head} and waits for other pipeline ranks for {duration(idle)}: a bubble of "
        f"{percent(played.bubble_over_compute)} of computing time, {percent(played.bubble_over_total)} of both."
    )
    phases = idle_by_phase(played)
    by_rank = phases.sum(axis=0)
    fills, full, drains = phases.sum(axis=1) / phases.sum()
    yield (
        f"Of the bubble, {fills:.0%} is before a rank's first backward, while the pipeline fills; {full:.0%} is "
        f"between that and its last forward; {drains:.0%} comes after, while it drains. {_spread(by_rank)}"
    )


def _spread(by_rank: np.ndarray) -> str:
    """Which pipeline ranks have most and least of the bubble."""
    most, least = int(by_rank.argmax()), int(by_rank.argmin())
    if by_rank[most] <= 1.01 * by_rank[least]:
        return f"All pipeline ranks wait as long, {duration(float(by_rank[most]))}."
    return (
        f"Pipeline rank {most} waits longest, {duration(float(by_rank[most]))}, and pipeline rank {least} least, "
        f"{duration(float(by_rank[least]))}."
    )


def _longest_wait(played: Played, found: Causes) -> Iterator[str]:
    nodes = played.graph.nodes
    i = max(found.before, key=lambda i: found.before[i].wait, default=NONE)
    inside = found.before[i].wait if i != NONE else 0.0
    pp_rank = max(range(len(found.at_end)), key=lambda rank: found.at_end[rank].wait)
    at_end = found.at_end[pp_rank]
    if max(inside, at_end.wait) <= 1e-9 * played.step_seconds:
        return
    if inside >= at_end.wait:
        node, cause = nodes[i], found.before[i]
        where = f"on pipeline rank {node.pp_rank} before {node.action}"
    else:
        cause, where = at_end, f"at the end of pipeline rank {pp_rank}"
    yield f"The longest wait of the replica that is shown is {duration(cause.wait)} {where}: it {cause.sentence}."


def slowest_rank(scenario: Scenario, played: Played) -> str:
    """Which rank computes longest, by how much, and why."""
    own = own_computing(played)
    middle, most = float(np.median(own)), float(own.max())
    if most <= _ALIKE * middle:
        return f"No rank computes longer than most do, {duration(most)}."
    dp, pp, cp, tp = slowest(played)
    times = f"{duration(most)}, {most / middle:.2f} times the middle rank" if middle else duration(most)
    reason = _why_slow(scenario, played, (dp, pp, cp, tp))
    because = f" {reason}" if reason else ""
    if own.shape[0] * own.shape[2] * own.shape[3] == 1:
        return f"Pipeline rank {pp} computes longest: {times}.{because}"
    rank = scenario.grid.rank(dp=dp, pp=pp, cp=cp, tp=tp)
    return f"Rank {rank} (dp {dp} pp {pp} cp {cp} tp {tp}) computes longest: {times}.{because}"


def _why_slow(scenario: Scenario, played: Played, at: tuple[int, int, int, int]) -> str:
    dp, pp, cp, tp = at
    factor = scenario.faults.ranks.get(scenario.grid.rank(dp=dp, pp=pp, cp=cp, tp=tp), 1.0)
    reasons = [f"all that it computes takes {factor:g} times as long"] if factor > 1 else []
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
    if not reasons:
        return ""
    return sentence("; ".join(reasons))


def _exposed(played: Played) -> Iterator[str]:
    """TP's, CP's and FSDP's; what messages cost is the bubble."""
    found = exposed(played)
    parts = []
    for dimension, name in DIMENSION_NAMES.items():
        seconds, wait = found[dimension]
        if seconds > 0 and dimension != "pp":
            waits = f", {duration(wait)} of it waiting for slower ranks" if wait > 0.05 * seconds else ""
            parts.append(f"{name} {percent(seconds / played.step_seconds)}{waits}")
    if parts:
        yield f"Communication that nothing hides, of the mean rank's step: {'; '.join(parts)}."


def on_path(path: CriticalPath) -> str:
    """What the critical path consists of, and where it runs."""
    parts = sorted(((seconds, name) for name, seconds in path.by_class.items() if seconds > 0), reverse=True)
    shares = [f"{seconds / path.seconds:.0%} {PATH_WORDS[name]}" for seconds, name in parts[:4]]
    text = f"The critical path, which determines the step's time, is {', '.join(shares)}"
    rank, share = next(iter(path.by_rank.items()))
    if path.grid.size > 1:
        text += f". {share:.0%} of it is on rank {rank}" if share > 0.5 else f". It runs over {len(path.by_rank)} ranks"
        pp_rank = max(range(path.grid.pp), key=lambda pp: path.by_pipeline_rank[pp])
        if path.grid.pp > 1:
            text += f", {path.by_pipeline_rank[pp_rank]:.0%} on pipeline rank {pp_rank}"
    return f"{text}."


def _helps(gains: Sequence[Gain]) -> Iterator[str]:
    worth = [gain for gain in gains if gain.share >= _HELPS]
    if worth:
        yield f"What would help most: {worth[0].sentence[0].lower()}{worth[0].sentence[1:]}"
    elif gains:
        yield "Nothing alone would help: no class made free, and nothing slow made normal, shortens the step by 0.1%."
