"""What the ranks of a job held: in words, for the terminal, as JSON, and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fourfold.debugger.memory import BEFORE, DeviceMemory, Holder, Memory, Moment, Trouble, Uneven, unused
from fourfold.layout import join_ranks
from fourfold.report import drawing
from fourfold.report.diagnosis.text import aligned
from fourfold.report.text import format_bytes
from fourfold.simulator.causes import duration

_SHOWN = 8  # rows of a table
_RANKS = 6  # ranks of the table of peaks
_NAMED = 2  # holders in the paragraph
_WORTH_SAYING = 0.05  # of a peak
_EXPAND = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def memory_paragraph(found: Memory) -> str:
    """The answer."""
    say = {
        Trouble.OUT_OF_MEMORY: _short,
        Trouble.LEAK: _leak,
        Trouble.UNEVEN: _uneven,
        Trouble.FRAGMENTED: _fragmented,
        Trouble.NONE: _nothing,
    }[found.trouble]
    return say(found, found.devices[found.worst])


def memory_text(found: Memory) -> str:
    """What `fourfold diagnose` prints of memory alone."""
    tables = [line for table in _tables(found) for line in ("", table.title, *aligned([table.columns, *table.rows]))]
    notes = ["", *(f"note: {one}" for one in found.notes)] if found.notes else []
    return "\n".join([memory_paragraph(found), *tables, *notes])


def memory_json(found: Memory) -> dict[str, Any]:
    """docs/formats.md explains the keys."""
    grid = found.grid
    return {
        "trouble": found.trouble.value,
        "sentence": memory_paragraph(found),
        "rank": found.devices[found.worst].rank,
        "uneven": [
            {"rank": one.rank, "pp": one.pp, "peak_bytes": one.peak, "usual_bytes": one.usual, "what": one.what or None,
             "more_bytes": one.more} for one in found.uneven
        ],
        "layout": None if grid is None else {"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "dp": grid.dp},
        "devices": [_device(one) for one in found.devices],
        "notes": list(found.notes),
    }  # fmt: skip


def answer_of_memory_json(found: Memory) -> dict[str, Any]:
    """The same where nothing else was asked."""
    return {"format": 1, "verdict": f"memory: {found.trouble.value}", **memory_json(found)}


def memory_page(found: Memory) -> drawing.Page:
    """The answer, curves of every device, peaks in 4D order, and the tables."""
    worst = found.devices[found.worst]
    return drawing.Page(
        title=f"{found.path.name or found.path}: memory",
        summary=(
            ("answer", found.trouble.value if found.trouble is not Trouble.NONE else "nothing is wrong"),
            ("highest peak", format_bytes(max(one.peak.bytes for one in found.devices))),
            ("ranks", f"{len({one.rank for one in found.devices}):,}"),
        ),
        warnings=() if found.trouble is Trouble.NONE else ("answer",),
        findings=(memory_paragraph(found),),
        memory=_curves(found.devices, worst),
        heat_maps=tuple(memory_heat_maps(found)),
        tables=tuple(_tables(found)),
        notes=found.notes,
    )


def memory_heat_maps(found: Memory) -> Iterator[drawing.HeatMap]:
    """Peaks of all ranks, if their layout is known."""
    grid = found.grid
    if grid is None or grid.size < 2:
        return
    values = np.full((grid.dp, grid.pp, grid.cp, grid.tp), np.nan)
    for one in found.devices:
        at = grid.coordinates(one.rank)
        place = at.dp, at.pp, at.cp, at.tp
        values[place] = np.fmax(values[place], float(one.peak.bytes))
    places = (grid.coordinates(one.rank) for one in found.uneven)
    marked = tuple((at.dp, at.pp, at.cp, at.tp) for at in places)
    yield drawing.HeatMap("Peak of memory", "B", values, marked)


def memory_tables(found: Memory) -> tuple[drawing.Table, ...]:
    """The tables, for the page of a diagnosis of which memory is a part."""
    return tuple(_tables(found))


# Sentences -----------------------------------------------------------------------------------------------------------


def _short(found: Memory, device: DeviceMemory) -> str:
    assert device.shortage is not None
    request, held = device.shortage
    at = f" at {request.purpose.doing}" if request.purpose.doing else ""
    step = f" in step {request.step}" if request.step >= 0 else ""
    others = [one.rank for one in found.devices if one.shortage is not None and one is not device]
    too = f" So did {_ranks(others)}." if others else ""
    text = (
        f"Rank {device.rank} ran out of memory{step}{at}: {request.purpose.place} asked for "
        f"{format_bytes(request.requested)}, and {device.device} had {format_bytes(request.device_free)} left. The "
        f"allocator held {format_bytes(held.reserved)} of it, {format_bytes(held.bytes)} of that in use: "
        f"{_most(held)}.{too}"
    )
    free = unused(held)
    if free >= request.requested > request.largest >= 0:
        return (
            f"{text} Its free {format_bytes(free)} would have been enough, but the largest piece was "
            f"{format_bytes(request.largest)}: memory is fragmented. Set {_EXPAND}."
        )
    return (
        f"{text} Fewer bytes per rank: train.recompute, more pipeline or tensor ranks, a higher layout.zero, a smaller "
        "micro-batch; `fourfold plan` says what fits."
    )


def _leak(found: Memory, device: DeviceMemory) -> str:
    growth = device.growth
    others = [one.rank for one in found.devices if one.growth.leaks and one is not device]
    too = f" So does {_ranks(others)}." if others else ""
    where = f" What stays is that of {_named(growth.holders)}." if growth.holders else ""
    return (
        f"Rank {device.rank} leaks: at the end of every step from {growth.steps[0]} to {growth.steps[-1]} it holds "
        f"{format_bytes(growth.leaks)} more than at the end of the one before.{where}{too} Look for what keeps tensors "
        "from step to step: losses or outputs that are collected with their graph, caches, hooks."
    )


def _uneven(found: Memory, device: DeviceMemory) -> str:
    first = found.uneven[0]
    return (
        f"{_over(first)} The peak came {_when(device.peak)}. Ranks of a pipeline rank should hold the same, whatever "
        "their documents."
    )


def _over(one: Uneven) -> str:
    where = f", {format_bytes(one.more)} of it for {one.what}" if one.what else ""
    return (
        f"Rank {one.rank} holds more than the other ranks of pipeline rank {one.pp}: {format_bytes(one.peak)} at its "
        f"peak, {format_bytes(one.peak - one.usual)} more than they{where}."
    )


def _fragmented(found: Memory, device: DeviceMemory) -> str:
    peak = device.peak
    return (
        f"Rank {device.rank}: of the {format_bytes(peak.reserved)} that PyTorch's allocator had taken at the peak, "
        f"{format_bytes(unused(peak))} held nothing: memory is fragmented. Set {_EXPAND}. {_held(device)}"
    )


def _nothing(found: Memory, device: DeviceMemory) -> str:
    several = len({one.rank for one in found.devices}) > 1
    who = f"Most is held by rank {device.rank}" if several else f"Rank {device.rank}"
    return f"Nothing is wrong with memory. {who}: {_held(device)}"


def _held(device: DeviceMemory) -> str:
    peak = device.peak
    whole = "" if device.is_whole else " (made while it was recorded)"
    waiting = ""
    if peak.waiting > _WORTH_SAYING * peak.bytes:
        waiting = f" {format_bytes(peak.waiting)} of it the program had given back, but other streams still used."
    return f"{format_bytes(peak.bytes)}{whole} at its peak, {_when(peak)}: {_most(peak)}.{waiting}"


def _most(moment: Moment) -> str:
    """What most bytes are of."""
    if not moment.by_place:
        return "nothing"
    return f"most for {_named(moment.by_place)}"


def _named(holders: Sequence[Holder]) -> str:
    return " and ".join(f"{one.what} ({format_bytes(one.bytes)})" for one in holders[:_NAMED])


def _when(moment: Moment) -> str:
    at = f", in {moment.doing}" if moment.doing else ""
    if moment.step >= 0:
        return f"{duration(moment.seconds)} into step {moment.step}{at}"
    return f"{duration(moment.seconds)} after the recording began{at}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {join_ranks(ranks, 8)}"


# Tables --------------------------------------------------------------------------------------------------------------


def _tables(found: Memory) -> Iterator[drawing.Table]:
    yield _peaks(found)
    worst = found.devices[found.worst]
    held = worst.peak if worst.shortage is None else worst.shortage[1]
    when = "at its peak" if worst.shortage is None else "when its request was refused"
    yield _holders(f"What rank {worst.rank} held {when}, by the place that asked for it", held.by_place)
    if any(one.what != BEFORE for one in held.by_doing[1:]):
        yield _holders("The same by what the rank was at when it was made", held.by_doing)
    if worst.growth.leaks:
        yield _holders("What a step leaves behind", worst.growth.holders)
    if len(worst.growth.steps) > 1:
        yield _growth(worst)


def _peaks(found: Memory) -> drawing.Table:
    order = sorted(found.devices, key=lambda one: (-one.peak.bytes, one.rank))
    knows = any(one.most_reserved >= 0 for one in order)
    return drawing.Table(
        title="Peaks, the highest first",
        columns=("rank", "device", "peak", *(("reserved then", "reserved at most") if knows else ()), "when"),
        rows=tuple(
            (
                str(one.rank),
                one.device,
                format_bytes(one.peak.bytes),
                *((_bytes(one.peak.reserved), _bytes(one.most_reserved)) if knows else ()),
                _when(one.peak),
            )
            for one in order[:_RANKS]
        ),
    )


def _bytes(count: int) -> str:
    return format_bytes(count) if count >= 0 else "-"


def _holders(title: str, holders: Sequence[Holder]) -> drawing.Table:
    return drawing.Table(
        title=title,
        columns=("what", "bytes", "blocks", "micro-batches", "oldest of step"),
        rows=tuple(
            (
                one.what,
                format_bytes(one.bytes),
                f"{one.blocks:,}",
                str(one.micro_batches) if one.micro_batches else "-",
                str(one.since) if one.since >= 0 else "-",
            )
            for one in holders[:_SHOWN]
        ),
    )


def _growth(device: DeviceMemory) -> drawing.Table:
    held = device.growth.bytes
    return drawing.Table(
        title=f"Held by rank {device.rank} at the end of each step",
        columns=("step", "bytes", "more than before"),
        rows=tuple(
            (str(step), format_bytes(size), "-" if i == 0 else _signed(size - held[i - 1]))
            for i, (step, size) in enumerate(zip(device.growth.steps, held, strict=True))
        )[-_SHOWN:],
    )


def _signed(count: int) -> str:
    return f"{'-' if count < 0 else ''}{format_bytes(abs(count))}"


def _curves(devices: Sequence[DeviceMemory], worst: DeviceMemory) -> drawing.Memory:
    """The device that the answer is about first."""
    order = sorted(devices, key=lambda one: (one is not worst, one.rank))
    return drawing.Memory(
        unit="s",
        rows=tuple(f"rank {one.rank} {one.device}" for one in order),
        parts=("in blocks",),
        times=tuple(one.seconds for one in order),
        bytes=tuple(one.curve[None].astype(float) for one in order),
        peaks=tuple(_held(one) for one in order),
    )


# JSON ----------------------------------------------------------------------------------------------------------------


def _device(one: DeviceMemory) -> dict[str, Any]:
    shortage = None
    if one.shortage is not None:
        request, held = one.shortage
        shortage = {
            "requested_bytes": request.requested,
            "device_free_bytes": request.device_free,
            "largest_free_bytes": _known(request.largest),
            "what": request.purpose.place,
            "doing": request.purpose.doing or None,
            "step": _known(request.step),
            "held": _moment(held),
        }
    return {
        "rank": one.rank,
        "device": one.device,
        "source": one.source,
        "is_whole": one.is_whole,
        "peak": _moment(one.peak),
        "most_reserved_bytes": _known(one.most_reserved),
        "steps": list(one.growth.steps),
        "bytes_at_end": list(one.growth.bytes),
        "leaks_bytes_per_step": one.growth.leaks,
        "leaked": [_holder(holder) for holder in one.growth.holders],
        "shortage": shortage,
    }


def _moment(moment: Moment) -> dict[str, Any]:
    return {
        "bytes": moment.bytes,
        "waiting_bytes": moment.waiting,
        "reserved_bytes": _known(moment.reserved),
        "step": _known(moment.step),
        "seconds": moment.seconds,
        "doing": moment.doing or None,
        "by_place": [_holder(holder) for holder in moment.by_place],
        "by_doing": [_holder(holder) for holder in moment.by_doing],
    }


def _holder(holder: Holder) -> dict[str, Any]:
    return {
        "what": holder.what,
        "bytes": holder.bytes,
        "blocks": holder.blocks,
        "micro_batches": holder.micro_batches,
        "since_step": _known(holder.since),
    }


def _known(number: int) -> int | None:
    return number if number >= 0 else None
