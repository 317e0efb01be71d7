"""A hang in words: the rank to look at, what it does instead of what others wait for, and a table of the waits."""

from __future__ import annotations

import math
from collections.abc import Collection

from fourfold.debugger.hangs import Hang, call_text
from fourfold.layout import join_ranks

CAUSE = "cause: "  # begins the lines of a diagnosis that name one
NO_CAUSE = "All ranks wait, and have started what they wait for: a link, or a device, stands still."
NO_HANG = "No hang here: no rank waits for another."
_FRAMES = 15  # of a stack that are printed
_MOST = 12  # causes and rows that are printed; the files have the rest


def hang_text(hang: Hang, *, head: str, stacks: bool = False) -> str:
    """The diagnosis for the terminal: ``head``, the causes, and a table of what is waited in; plain lines.

    Args:
        hang: the diagnosis.
        head: the first line.
        stacks: print the stack of the likeliest cause, if it has left one, and the notes.
    """
    lines = [head, ""]
    for cause in hang.causes[:_MOST]:
        at = "" if cause.place is None else " ".join(f"{name}{index}" for name, index in cause.place._asdict().items())
        place = f" ({at})" if at else ""
        for_it = f"; {cause.num_waiting} wait for it" if cause.num_waiting else ""
        lines.append(f"{CAUSE}rank {cause.rank}{place}: {cause.what}{for_it}")
    if len(hang.causes) > _MOST:
        lines.append(f"       and {len(hang.causes) - _MOST} more ranks")
    if not hang.causes:
        lines.append(NO_CAUSE if hang.stuck else NO_HANG)
    if stacks and hang.causes and hang.causes[0].stack[1]:
        name, frames = hang.causes[0].stack
        lines += ["", f"stack of rank {hang.causes[0].rank}, {name}, innermost last:"]
        if len(frames) > _FRAMES:
            lines.append(f"  ({len(frames) - _FRAMES} frames outside of these)")
        lines += [f"  {frame}" for frame in frames[-_FRAMES:]]
    if hang.stuck:
        lines += ["", *_table(hang)]
    if stacks and hang.notes:
        lines += ["", *(f"note: {note}" for note in hang.notes[:_MOST])]
        if len(hang.notes) > _MOST:
            lines.append(f"      and {len(hang.notes) - _MOST} more notes")
    return "\n".join(lines)


def _table(hang: Hang) -> list[str]:
    rows = [("group", "call", "stage", "micro-batch", "number", "started (since)", "missing")]
    whereabouts = {**hang.doing, **{cause.rank: cause.what for cause in hang.causes}}
    for stuck in hang.stuck[:_MOST]:
        wait = stuck.wait
        where = "; ".join(f"{rank}: {whereabouts.get(rank, hang.silent)}" for rank in stuck.missing[:_MOST])
        more = f"; and {len(stuck.missing) - _MOST} more" if len(stuck.missing) > _MOST else ""
        calls = [f"{text} by {join_ranks(ranks)}" for text, ranks in stuck.calls.items()]
        rows.append(
            (
                stuck.group,
                " but ".join(calls) or call_text(wait),
                _or_dash(wait.stage),
                _or_dash(wait.micro_batch),
                str(wait.number),
                join_ranks(stuck.started) + _since(stuck.started.values()),
                where + more or "none",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(hang.stuck) > _MOST:
        lines.append(f"and {len(hang.stuck) - _MOST} more")
    return lines


def _since(seconds: Collection[float]) -> str:
    longest = max(seconds, default=0.0)
    return "" if math.isnan(longest) else f" ({longest:.1f} s)"


def _or_dash(index: int) -> str:
    return str(index) if index >= 0 else "-"
