"""A diagnosis as a page: the answer, timelines around the culprit, who waits for whom, and every rank in heat maps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fourfold.debugger.reading.trace import Work
from fourfold.debugger.slow import Culprit, Diagnosis
from fourfold.debugger.slow.accounts import AWAITED
from fourfold.debugger.slow.chain import Chains
from fourfold.layout import join_ranks
from fourfold.report import drawing
from fourfold.report.diagnosis.around import centre, culprit_ends, culprit_ranks, worst_step
from fourfold.report.diagnosis.memory import memory_heat_maps, memory_paragraph, memory_tables
from fourfold.report.diagnosis.replayed import replay_timeline
from fourfold.report.diagnosis.text import evidence, rank_rows
from fourfold.report.diagnosis.timeline import trace_timeline
from fourfold.report.diagnosis.waits import Waiting, chain_sentence, chain_table, ends_table, whole_sentence
from fourfold.report.diagnosis.words import answer_word, paragraph
from fourfold.report.text import percent
from fourfold.simulator.causes import duration

_ANSWER = "answer"
_NOTHING = 1e-6  # of the step: what is less is not there
_WORK = {Work.GEMM: "matrix products", Work.ATTENTION: "attention", Work.MEMORY: "element-wise work and copies"}
_KEYS = {Work.GEMM: "compute", Work.ATTENTION: "attention", Work.MEMORY: "fixed"}


def diagnosis_page(found: Diagnosis) -> drawing.Page:
    """All of a diagnosis. Of action logs there is no more than they tell: no chain of waiting, and a timeline only if a
    step can be played again."""
    step = worst_step(found)
    grid, culprits = found.accounts.grid, culprit_ranks(found)
    waiting, timeline = None, None
    if found.traces and found.meetings is not None and found.clocks is not None:
        chains = Chains(found.traces, found.meetings, found.clocks, step)
        if len(found.traces) > 1:
            waiting = Waiting(chains, step, found.device, culprits, culprit_ends(found))
        timeline = trace_timeline(found, chains, step)
    elif found.replays:
        nearest = min(found.replays, key=lambda replay: abs(replay.step - step))
        timeline = replay_timeline(found, nearest)
    tables = []
    if waiting is not None and waiting.whole > 0:
        tables += [chain_table(waiting, grid), ends_table(waiting, grid)]
    chain = (whole_sentence(waiting), chain_sentence(waiting)) if waiting is not None else ()
    memory = found.memory
    return drawing.Page(
        title=f"{found.path.name or found.path}: {_headline(found)}",
        summary=tuple(_summary(found)),
        warnings=() if found.verdict.answer == "healthy" else (_ANSWER,),
        findings=tuple(text for text in (paragraph(found), *chain, memory and memory_paragraph(memory)) if text),
        timeline=timeline,
        splits=tuple(_splits(found)),
        heat_maps=(
            *(_heat_maps(found) if grid.size > 1 else ()),
            *(() if memory is None else memory_heat_maps(memory)),
        ),
        tables=(
            *tables,
            *_search_tables(found),
            _ranks_table(found),
            *_what_if_table(found),
            *(() if memory is None else memory_tables(memory)),
        ),
        notes=tuple(evidence(found)),
    )


def _headline(found: Diagnosis) -> str:
    culprits = found.verdict.culprits
    if not culprits:
        return answer_word(found.verdict)
    named = " and ".join(_who(culprit) for culprit in culprits[:3])
    more = len(culprits) - 3
    return f"{named}{f' and {more} more' if more > 0 else ''} to blame"


def _who(culprit: Culprit) -> str:
    if culprit.kind != "link":
        return f"rank {culprit.ranks[0]}"
    return f"the link of rank{'s' if len(culprit.ranks) > 1 else ''} {join_ranks(culprit.ranks)}"


def _summary(found: Diagnosis) -> Iterator[tuple[str, str]]:
    verdict, steps = found.verdict, found.steps
    yield _ANSWER, answer_word(verdict)
    yield "step", duration(verdict.step_seconds)
    if verdict.culprits:
        first = verdict.culprits[0]
        yield _who(first), f"{first.factor:.2f} x its peers, {duration(first.excess)} more per step"
    if verdict.gain is not None and verdict.culprits:
        left = verdict.step_seconds - verdict.gain
        yield (
            "step without it" if len(verdict.culprits) == 1 else "step without them",
            (f"{duration(left)}, {percent(verdict.gain / verdict.step_seconds)} less"),
        )
    yield "ranks", f"{len(found.ranks):,} of {found.accounts.grid.size:,}"
    yield "steps", f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])


def _heat_maps(found: Diagnosis) -> Iterator[drawing.HeatMap]:
    """What tells ranks apart, in 4D order; those to blame are ringed."""
    accounts, grid = found.accounts, found.accounts.grid
    places = map(grid.coordinates, culprit_ranks(found))
    marked = tuple((at.dp, at.pp, at.cp, at.tp) for at in places)

    def of(title: str, seconds: np.ndarray) -> drawing.HeatMap:
        return drawing.HeatMap(f"{title}, seconds per step", "s", accounts.shaped(seconds), marked)

    if found.suspects.compared:
        yield of("Longer than its peers", found.suspects.per_rank)
    yield of("Computing", _mean(accounts.work.sum(axis=2)))
    yield of("Waiting for other ranks", _mean(accounts.wait.sum(axis=2)))
    pauses = "Pauses of the host" if found.device == "gpu" else "Neither computing nor waiting"
    kinds = {culprit.kind for culprit in found.verdict.culprits}
    if "cpu" in kinds:
        yield of(pauses, _mean(accounts.host.sum(axis=2)))
    if "link" in kinds:
        yield of("Transfers, once all are there", _mean(accounts.transfer.sum(axis=2)))
    if found.verdict.answer == "documents":
        yield of("Attention", _mean(accounts.work[:, :, Work.ATTENTION]))


def _mean(columns: np.ndarray) -> np.ndarray:
    """Mean of the steps [steps, ...] that are known; NaN where none is."""
    known = ~np.isnan(columns)
    return np.where(known, columns, 0.0).sum(axis=0) / np.where(known.any(axis=0), known.sum(axis=0), np.nan)


def _splits(found: Diagnosis) -> Iterator[drawing.Split]:
    """The step of the rank to blame, or of the slowest, and of a usual rank of its pipeline rank."""
    accounts, grid = found.accounts, found.accounts.grid
    for rank in centre(found)[:1]:
        pp = grid.coordinates(rank).pp
        apart = {rank, *culprit_ranks(found)}
        peers = [
            r for r in np.flatnonzero(accounts.present).tolist() if grid.coordinates(r).pp == pp and r not in apart
        ]
        yield _split(found, f"A step of rank {rank}", [rank])
        if peers:
            yield _split(found, f"A step of its peers (mean of {len(peers)} ranks of pp {pp})", peers)


def _split(found: Diagnosis, title: str, ranks: list[int]) -> drawing.Split:
    accounts = found.accounts

    def mean(columns: np.ndarray) -> float:
        return float(np.nanmean(columns[:, ranks]))

    parts = []
    for kind in Work:
        known = accounts.attention_known or kind is not Work.GEMM
        parts.append((_WORK[kind] if known else "computing", mean(accounts.work[:, :, kind]), _KEYS[kind]))
    pauses = "pauses of its host" if found.device == "gpu" else "neither computing nor waiting"
    parts.append((pauses, mean(accounts.host.sum(axis=2)), "host"))
    for i, name in enumerate(AWAITED):
        words = {"end": "end of the step", "other": "other groups"}.get(name, name)
        parts.append((f"transfers, {words}", mean(accounts.transfer[:, :, i]), name))
        parts.append((f"waits, {words}", mean(accounts.wait[:, :, i]), f"{name}_wait"))
    least = _NOTHING * found.verdict.step_seconds
    kept = [part for part in parts if part[1] > least]
    return drawing.Split(title, "s", tuple(part[:2] for part in kept), tuple(part[2] for part in kept))


def _search_tables(found: Diagnosis) -> Iterator[drawing.Table]:
    """The culprits, if there are several, and how the search came to each that is a rank."""
    culprits, grid = found.verdict.culprits, found.accounts.grid
    if len(culprits) > 1:
        yield drawing.Table(
            title="What holds up the others, the worst first",
            columns=("what", "kind", "cause", "over its peers", "excess per step", "the step would be shorter by"),
            rows=tuple(
                (
                    _who(one) if one.kind == "link" else drawing.rank_label(grid, one.ranks[0]),
                    one.kind,
                    one.cause,
                    f"{one.factor:.2f} x",
                    duration(one.excess),
                    "-" if one.gain is None else duration(one.gain),
                )
                for one in culprits
            ),
            note="Gains count one after the other: each with all before it mended.",
        )
    for culprit in [one for one in culprits if one.levels][:2]:
        yield drawing.Table(
            title=f"How the search came to rank {culprit.ranks[0]}, outermost first",
            columns=("dimension", "slowest", "excess per step", "of all excess", "ahead of the next by"),
            rows=tuple(
                (one.dimension, str(one.index), duration(one.excess), percent(one.share), duration(one.gap))
                for one in culprit.levels
                if getattr(grid, one.dimension) > 1
            ),
        )


def _ranks_table(found: Diagnosis) -> drawing.Table:
    head, *rows = rank_rows(found)
    return drawing.Table(
        title="What the slowest ranks did, per step",
        columns=head,
        rows=tuple(rows),
        note="Computing and host are a rank's own time; excess is how much longer that is than its peers take.",
    )


def _what_if_table(found: Diagnosis) -> Iterator[drawing.Table]:
    verdict = found.verdict
    rows = [(f"{_who(one)} was as its peers", one.gain) for one in verdict.culprits if one.gain is not None]
    rows += [(what.sentence, what.gain) for what in verdict.what_ifs]
    if rows:
        step = verdict.step_seconds
        yield drawing.Table(
            title="What would help",
            columns=("if", "the step would take", "shorter by", "share of the step"),
            rows=tuple((text, duration(step - gain), duration(gain), percent(gain / step)) for text, gain in rows),
            note="Steps played again with this one thing otherwise; gains do not add up.",
        )
