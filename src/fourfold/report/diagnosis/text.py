"""A diagnosis for the terminal: the answer, and below it the evidence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fourfold.debugger.slow import Diagnosis
from fourfold.debugger.slow.accounts import AWAITED
from fourfold.debugger.slow.known import mean
from fourfold.report.diagnosis.words import paragraph
from fourfold.report.text import percent
from fourfold.simulator.causes import duration

_SHOWN = 6  # ranks in the table
_LEGEND = "What ranks did, per step (excess: longer than their peers; host: pauses that nothing else explains)"
_EXACT, _ROUGH = 0.0005, 0.05  # of a step: by how much a replay may be off without, and with a warning


def diagnosis_text(found: Diagnosis) -> str:
    """What `fourfold diagnose` prints."""
    lines = [paragraph(found)]
    culprits = [culprit for culprit in found.verdict.culprits if culprit.levels]
    if culprits:
        rows = [
            (level.dimension, str(level.index), duration(level.excess), percent(level.share), duration(level.gap))
            for level in culprits[0].levels
            if getattr(found.accounts.grid, level.dimension) > 1
        ]
        head = ("dimension", "slowest", "excess per step", "of all excess", "ahead of the next by")
        lines += ["", f"How the search came to rank {culprits[0].ranks[0]}, outermost first", *aligned([head, *rows])]
    lines += [
        "",
        _LEGEND,
        *aligned(rank_rows(found)),
    ]
    if found.verdict.what_ifs:
        lines += ["", "A step would be shorter by, if"]
        lines += [f"  {duration(what.gain):>9}  {what.sentence}" for what in found.verdict.what_ifs]
    lines += ["", *(f"note: {note}" for note in evidence(found))]
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under a head, in columns; the first is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    out = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        out.append(f"  {'  '.join(cells)}".rstrip())
    return out


def rank_rows(found: Diagnosis) -> list[tuple[str, ...]]:
    """The ranks with most excess: what they did, in seconds per step."""
    accounts, per_rank = found.accounts, found.suspects.per_rank
    used = [i for i, name in enumerate(AWAITED) if np.nansum(accounts.wait[:, :, i]) > 0]
    head = ("rank", "dp", "pp", "cp", "tp", "excess", "computing", "host", "transfers")
    rows: list[tuple[str, ...]] = [(*head, *(f"waits {AWAITED[i]}" for i in used))]
    order = np.argsort(-np.nan_to_num(per_rank, nan=-np.inf), kind="stable")
    for rank in order[:_SHOWN].tolist():
        if np.isnan(per_rank[rank]):
            continue
        at = accounts.grid.coordinates(rank)
        did = [
            float(mean(column))
            for column in (
                accounts.work[:, rank].sum(axis=1),
                accounts.host[:, rank].sum(axis=1),
                accounts.transfer[:, rank].sum(axis=1),
                *(accounts.wait[:, rank, i] for i in used),
            )
        ]
        rows.append((str(rank), *map(str, (at.dp, at.pp, at.cp, at.tp)), _short(per_rank[rank]), *map(_short, did)))
    return rows


def _short(seconds: float) -> str:
    """What is below a nanosecond is rounding."""
    return duration(seconds) if abs(seconds) >= 1e-9 else "0 s"


def evidence(found: Diagnosis) -> list[str]:
    """What the answer rests on, a sentence each."""
    steps = found.steps
    numbers = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    grid = found.accounts.grid
    out = [
        f"{found.source}: {len(found.ranks):,} ranks, tp {grid.tp} cp {grid.cp} pp {grid.pp} dp {grid.dp}, {numbers}"
    ]
    if found.clocks is not None and len(found.ranks) > 1:
        if len({*found.clocks.island.tolist()}) == len(found.ranks):
            return [
                *out,
                "clocks cannot be compared: nothing is seen on two ranks that they did together",
                *found.notes,
            ]
        wrong = found.clocks.wrong
        out.append(
            f"clocks differ by up to {duration(float(wrong.max() - wrong.min()) / 1e9)}; aligned by the ends of common "
            f"collectives, {round(found.clocks.residual) / 1e3:g} us remain. Only pictures need them"
        )
    if found.verdict.replay_error is not None:
        played = ", ".join(str(replay.step) for replay in found.replays)
        error = found.verdict.replay_error
        out.append(f"gains are from step {played} played again: unchanged, it takes {_off(error)} measured")
    return [*out, *found.notes]


def _off(error: float) -> str:
    """How a replay that changes nothing compares with the step."""
    if abs(error) < _EXACT:
        return "what was"
    rough = ", so gains are rough," if abs(error) > _ROUGH else ""
    return f"{abs(error):.1%} {'more' if error > 0 else 'less'}{rough} than"
