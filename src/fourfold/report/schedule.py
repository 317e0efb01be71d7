"""A pipeline schedule as text, as JSON, and as what pictures and pages show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fourfold.layout import Action, Kind, Schedule, Timeline, play
from fourfold.layout.actions import COMPUTE
from fourfold.report import drawing

PAIRS = "(micro-batch, chunk) pairs in flight"


def schedule_json(schedule: Schedule, *, played: Timeline | None = None) -> dict[str, Any]:
    """The object that ``fourfold schedule --json`` prints; docs/formats.md explains its keys. `played`: if it was."""
    timeline = played or play(schedule)
    return {
        "pp": schedule.pp,
        "v": schedule.v,
        "nmb": schedule.num_micro_batches,
        "kind": schedule.kind,
        "nc": schedule.nc,
        "rounds": list(schedule.rounds),
        "zero": schedule.zero,
        "bubble_over_compute": timeline.bubble_over_compute,
        "bubble_over_total": timeline.bubble_over_total,
        "in_flight_peak": list(schedule.in_flight_peak),
        "warmup": list(schedule.warmup),
        "reduce_scatters": list(schedule.reduce_scatters),
        "fallback": schedule.fallback,
        "actions": [[str(action) for action in actions] for actions in schedule.actions],
    }


def schedule_text(
    schedule: Schedule, *, asked_nc: int | None = None, width: int | None = None, played: Timeline | None = None
) -> str:
    """Head, a table per rank, and the computations of each rank drawn in the time of F = 1 and B = 2, or I = W = 1.

    Args:
        schedule: what to draw.
        asked_nc: the nc that was asked for; where rounds are of another size, a note says so.
        width: characters per line; the drawing is folded into blocks of time. None: one line per rank.
        played: the schedule in time, if it was played already.
    """
    timeline = played or play(schedule)
    rounds = "+".join(map(str, schedule.rounds))
    kinds, lengths = "F or B", "backward = 2 forwards"
    if schedule.splits_backward:
        kinds, lengths = "F, I or W (backward's halves)", "backward = 2 forwards in equal halves"
    lines = [
        f"{schedule.kind}: pp {schedule.pp}, v {schedule.v}, {schedule.num_micro_batches} micro-batches "
        f"in rounds of {rounds}, ZeRO-{schedule.zero}",
    ]
    if schedule.fallback:
        lines.append(f"note: {schedule.fallback}")
    elif asked_nc not in (None, schedule.nc):
        lines.append(f"note: nc = {asked_nc} would leave a short round; they are made near-equal, none below pp")
    lines += [
        f"bubble: idle/compute {timeline.bubble_over_compute:.2%}, idle/total {timeline.bubble_over_total:.2%} "
        f"({lengths}, messages free)",
        "",
        "rank  warm-up  in flight  reduce-scatters",
    ]
    per_rank = zip(schedule.warmup, schedule.in_flight_peak, schedule.reduce_scatters, strict=True)
    lines += [
        f"{rank:>4}  {warmup:>7}  {peak:>9}  {reduces:>15}" for rank, (warmup, peak, reduces) in enumerate(per_rank)
    ]
    lines += [
        "warm-up: forwards before the first backward; in flight: most (micro-batch, chunk) pairs held at once",
        "",
        f"computations in time, {kinds} with micro-batch.chunk; -- goes on, a dot is idle time",
        *_drawing([_cells(schedule, timeline, rank) for rank in range(schedule.pp)], width),
    ]
    return "\n".join(lines)


def _drawing(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """A line per rank, or several blocks of as many units of time as fit into ``width`` characters."""
    num_units, margin = len(rows[0]), 6
    per_block = num_units if width is None else max(1, (width - margin) // len(rows[0][0]))
    lines = []
    for first in range(0, num_units, per_block):
        lines += [""] if first else []
        lines += [f"{rank:>4}  {''.join(row[first : first + per_block])}".rstrip() for rank, row in enumerate(rows)]
    return lines


def _cells(schedule: Schedule, timeline: Timeline, pp_rank: int) -> list[str]:
    """A text for each unit of time: all times are whole numbers when a forward takes 1 and a backward 2."""
    width = len(f"F{schedule.num_micro_batches - 1}.{schedule.v - 1} ")
    cells: list[str] = [".".ljust(width)] * round(timeline.step_time)
    for action in schedule.actions[pp_rank]:
        if action.kind in COMPUTE:
            start, end = map(round, timeline.span(action))
            label = f"{action.kind}{action.micro_batch}.{action.stage // schedule.pp}"
            cells[start:end] = [label.ljust(width), *["--".ljust(width)] * (end - start - 1)]
    return cells


def schedule_timeline(schedule: Schedule) -> drawing.Timeline:
    """The computations in time, a row per pipeline rank: a forward takes 1, a backward 2, messages nothing."""
    return _drawn(schedule, play(schedule))


def schedule_page(schedule: Schedule, *, played: Timeline | None = None) -> drawing.Page:
    """The timeline, the activations held, and sentences that say where the bubble is and which rank holds most."""
    played = played or play(schedule)
    timeline, memory = _drawn(schedule, played), _held(schedule, played)
    idle = _idle_phases(schedule, played)
    findings = [
        *([f"This is not what was asked for: {schedule.fallback}."] if schedule.fallback else []),
        *_bubble_findings(schedule, played, idle),
        *_longest_idle(schedule, timeline),
        _most_held(schedule),
    ]
    return drawing.Page(
        title=_name(schedule),
        summary=(
            ("bubble, idle over computing", f"{played.bubble_over_compute:.2%}"),
            ("bubble, idle over all time", f"{played.bubble_over_total:.2%}"),
            ("step", f"{played.step_time:g} F"),
            ("pairs in flight at most", str(max(schedule.in_flight_peak))),
            ("forwards before the first backward", _range(schedule.warmup)),
        ),
        findings=tuple(findings),
        timeline=timeline,
        memory=memory,
        tables=(_per_rank(schedule, played, idle),),
        notes=(
            "A forward of one micro-batch through one chunk takes 1 F and its backward 2 F, in halves of 1 F where it "
            "is split. Messages, gathers and reductions take no time.",
            "A chunk is one of a rank's virtual stages. A (micro-batch, chunk) pair is in flight from the start of its "
            "forward to the end of its backward: so long its activations are held.",
        ),
    )


def _drawn(schedule: Schedule, played: Timeline) -> drawing.Timeline:
    program = played.program
    order = np.lexsort((played.start, program.pp_rank))
    shown = [i for i in order.tolist() if program.actions[i].kind in COMPUTE]
    ends = np.append(played.end, 0.0)  # of the action before a rank's first one
    wait = played.start[shown] - ends[[program.previous[i] for i in shown]]
    # What comes late is always a message: whatever else a computation needs, its own rank has done before.
    sentences = [
        _cause(schedule, program.actions[program.needs[i]]) if waited else ""
        for i, waited in zip(shown, (wait > 0).tolist(), strict=True)
    ]
    causes = tuple(dict.fromkeys(sentence for sentence in sentences if sentence))
    index = {"": -1} | {cause: number for number, cause in enumerate(causes)}
    kinds, stages, micro_batches = zip(*(program.actions[i] for i in shown), strict=True)
    return drawing.Timeline(
        title=f"{_name(schedule)}: idle for {played.bubble_over_compute:.2%} of computing time "
        f"({played.bubble_over_total:.2%} of all)",
        unit="F",
        rows=_rows(schedule),
        num_chunks=schedule.v,
        pp=schedule.pp,
        boxes=drawing.Boxes(
            row=program.pp_rank[shown],
            kind=np.array([drawing.KINDS.index(kind) for kind in kinds]),
            stage=np.array(stages),
            micro_batch=np.array(micro_batches),
            start=played.start[shown],
            end=played.end[shown],
            wait=wait,
            cause=np.array([index[sentence] for sentence in sentences]),
        ),
        causes=causes,
        span=played.step_time,
    )


def _held(schedule: Schedule, played: Timeline) -> drawing.Memory:
    """Pairs in flight, as counts. What ends and begins at one time is one change."""
    times, counts, peaks = [], [], []
    for pp_rank in range(schedule.pp):
        at, live = played.live_chunks(pp_rank)
        last = np.append(at[1:] != at[:-1], True)[: len(at)]
        times.append(at[last])
        counts.append(live[last][None].astype(np.float64))
        peaks.append(_peak(at, live))
    return drawing.Memory(
        unit="F",
        rows=_rows(schedule),
        parts=("activations in flight",),
        times=tuple(times),
        bytes=tuple(counts),
        peaks=tuple(peaks),
        quantity=PAIRS,
    )


def _peak(times: np.ndarray, live: np.ndarray) -> str:
    if not len(live):
        return "holds nothing, as its stages are not trained"
    first = int(live.argmax())
    most, changes = int(live[first]), first + 1
    return (
        f"at most {most} pairs, first at {times[first]:g} F, when {(changes + most) // 2} forwards have begun and "
        f"{(changes - most) // 2} backwards are done"
    )


def _cause(schedule: Schedule, needed: Action) -> str:
    what = "output" if needed.kind is Kind.FORWARD else "gradient"
    return (
        f"waits for the {what} of stage {needed.stage} for micro-batch {needed.micro_batch} "
        f"({needed} on pipeline rank {schedule.rank_of(needed.stage)})"
    )


def _idle_phases(schedule: Schedule, played: Timeline) -> np.ndarray:
    """float [pp, 3]: idle before a rank's first backward, from there to its last forward, and after both; in F."""
    program = played.program
    idle = np.zeros((schedule.pp, 3))
    for pp_rank in range(schedule.pp):
        own = [i for i in np.flatnonzero(program.pp_rank == pp_rank).tolist() if program.actions[i].kind in COMPUTE]
        is_forward = np.array([program.actions[i].kind is Kind.FORWARD for i in own])
        start, end = played.start[own], played.end[own]
        last_forward = end[is_forward].max()
        first_backward = start[~is_forward].min(initial=np.inf)
        full = min(first_backward, played.step_time) if np.isfinite(first_backward) else last_forward
        edges = [0.0, full, max(full, last_forward), played.step_time]
        for phase, (low, high) in enumerate(pairwise(edges)):
            inside = (start >= low) & (end <= high)
            idle[pp_rank, phase] = high - low - (end - start)[inside].sum()
    return idle


def _bubble_findings(schedule: Schedule, played: Timeline, idle: np.ndarray) -> list[str]:
    """How much, against the formula, and when."""
    if not idle.sum():
        return ["No rank ever waits: there is no bubble."]
    totals, compute = idle.sum(axis=1), played.compute
    head = (
        f"The step takes {played.step_time:g} F. A rank computes for {_range(compute)} F of them and idles for "
        f"{_range(totals)} F: {played.bubble_over_compute:.2%} of computing time, "
        f"{played.bubble_over_total:.2%} of all time."
    )
    formula = (schedule.pp - 1) / (schedule.num_micro_batches * schedule.v)
    rule = f"(pp - 1) / (micro-batches x chunks) = {formula:.2%}"
    if schedule.num_frozen_stages:
        head += f" The first {schedule.num_frozen_stages} of {schedule.num_stages} stages have no backward."
    elif schedule.splits_backward:
        head += f" With whole backwards it would be {rule} of computing time."
    elif abs(played.bubble_over_compute - formula) >= 1e-9:
        head += f" A full pipeline would have {rule}."
    elif schedule.fallback is None:
        head += f" That is {rule}, the bubble of a full pipeline."
    warm_up, steady, cool_down = idle.sum(axis=0) / idle.sum()
    where = (
        f"Of all idle time, {warm_up:.0%} is before a rank's first backward (warm-up), {steady:.0%} between that and "
        f"its last forward (steady state), and {cool_down:.0%} after both (cool-down)."
    )
    return [head, where]


def _longest_idle(schedule: Schedule, timeline: drawing.Timeline) -> list[str]:
    """The longest stretch in which a rank does nothing, and why."""
    boxes = timeline.boxes
    last = np.array([boxes.end[boxes.row == row].max() for row in range(schedule.pp)])
    longest, late = int(boxes.wait.argmax()), int(last.argmin())
    wait, rest = boxes.wait[longest], timeline.span - last[late]
    if not max(wait, rest):
        return []
    if rest > wait:
        return [
            f"The longest idle stretch is {rest:g} F at the end of pipeline rank {late}, which has nothing left to do."
        ]
    kind, stage = Kind(drawing.KINDS[boxes.kind[longest]]), int(boxes.stage[longest])
    action = Action(kind, stage, int(boxes.micro_batch[longest]))
    row, until, cause = boxes.row[longest], boxes.start[longest], timeline.causes[boxes.cause[longest]]
    return [f"The longest idle stretch is {wait:g} F on pipeline rank {row}, up to {until:g} F: {action} {cause}."]


def _most_held(schedule: Schedule) -> str:
    peaks = schedule.in_flight_peak
    most = max(peaks)
    if not most:
        return "No activations are held: nothing is trained."
    if min(peaks) == most and schedule.pp > 1:
        reason = " No backward begins before the last forward ends." if schedule.kind == "afab" else ""
        return f"All ranks hold as much: at most {most} (micro-batch, chunk) pairs.{reason}"
    fullest = [str(pp_rank) for pp_rank, peak in enumerate(peaks) if peak == most]
    found = (
        f"Pipeline rank{'s' if len(fullest) > 1 else ''} {_words(fullest)} hold{'s' if len(fullest) == 1 else ''} most "
        f"activations, {most} (micro-batch, chunk) pairs"
    )
    if schedule.pp == 1:
        return f"At most {most} (micro-batch, chunk) pairs are in flight."
    found += f"; the least that a rank holds is {min(peaks)}."
    if schedule.num_frozen_stages:
        return f"{found} Stages that are not trained hold none."
    return f"{found} A rank runs {_range(schedule.warmup)} forwards before its first backward, the earlier the more."


def _words(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _range(values: Sequence[float] | np.ndarray) -> str:
    """The numbers of all ranks in few words."""
    first, last = f"{values[0]:g}", f"{values[-1]:g}"
    alike = min(values) == max(values)
    return first if alike else f"{first} (rank 0) to {last} (rank {len(values) - 1})"


def _per_rank(schedule: Schedule, played: Timeline, idle: np.ndarray) -> drawing.Table:
    return drawing.Table(
        title="Pipeline ranks",
        columns=("rank", "computes", "idle: filling", "between", "draining", "warm-up", "in flight at most"),
        rows=tuple(
            (
                str(pp_rank),
                *(f"{value:g} F" for value in (played.compute[pp_rank], *idle[pp_rank])),
                str(schedule.warmup[pp_rank]),
                str(schedule.in_flight_peak[pp_rank]),
            )
            for pp_rank in range(schedule.pp)
        ),
        note="Filling: before the rank's first backward. Between: from there to its last forward. Draining: after "
        "both. Warm-up: forwards before the first backward. In flight: (micro-batch, chunk) pairs.",
    )


def _rows(schedule: Schedule) -> tuple[str, ...]:
    return tuple(f"pp {pp_rank}" for pp_rank in range(schedule.pp))


def _name(schedule: Schedule) -> str:
    """Kind, sizes, and rounds where they matter: not without interleaving, nor where there is but one."""
    rounds = schedule.rounds
    name = f"{schedule.kind}, pp {schedule.pp}, v {schedule.v}, {schedule.num_micro_batches} micro-batches"
    if schedule.v == 1 or schedule.kind == "afab":
        return name
    alike = len(set(rounds)) == 1
    return f"{name} in rounds of {rounds[0]}" if alike else f"{name} in rounds of {'+'.join(map(str, rounds))}"
