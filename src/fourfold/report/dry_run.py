"""A dry run as people read it: per rank what it holds, sends and computes, each beside what the planner says of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fourfold.layout import join_ranks
from fourfold.recipe import RunPlan
from fourfold.report.plan import as_plain
from fourfold.report.text import format_bytes, format_count
from fourfold.trainer.dry_run.results import Beside, DryRank, GroupTraffic, Held

LEGEND = (
    "peak: the kinds at the rank's worst moment; at most: each at its own. activations: made in one action and still "
    "there in a later one, at most between two. transients: made and gone within one. planner: = is the same number. "
    "Not in it: what an allocator loses, and what CUDA, NCCL and libraries hold."
)
_LINKS = {"node": "in a node", "network": "over the network", "none": "alone"}
_INDENT = (0, 0, 1, 2)
_MOST_STAGES = 4


def dry_run_text(plan: RunPlan, dry: DryRank, known: Sequence[Beside]) -> str:
    """One rank."""
    planner = {(one.what, one.unit): one for one in known}
    parts: list[RenderableType] = [
        Text(_title(plan, dry)),
        Padding(_memory(dry, planner), _INDENT),
        Padding(_traffic(dry, planner), _INDENT),
        Padding(_flops(dry, planner), _INDENT),
    ]
    return as_plain(Group(*parts)) + "\n" + "\n".join(_differences(known))


def _title(plan: RunPlan, dry: DryRank) -> str:
    at = ", ".join(f"{name} {index}" for name, index in dry.at._asdict().items())
    return (
        f"Rank {dry.rank:,} of {plan.grid.size:,} ({at}): {_stages(plan, dry)}; {format_count(dry.parameters)} "
        f"parameters; a step run dry in {dry.seconds:.1f} s"
    )


def _stages(plan: RunPlan, dry: DryRank) -> str:
    mine = [plan.stages[index] for index in dry.stages]
    layers = sum(len(stage.layers) for stage in mine)
    holds = ["embedding"] if any(stage.embedding for stage in mine) else []
    holds += [f"{layers} layer{'' if layers == 1 else 's'}"] if layers else []
    holds += ["head"] if any(stage.head for stage in mine) else []
    numbers = ", ".join(map(str, dry.stages[:_MOST_STAGES])) + (" ..." if len(dry.stages) > _MOST_STAGES else "")
    return f"stage{'' if len(mine) == 1 else 's'} {numbers} with {' + '.join(holds) or 'nothing'}"


def _table(*columns: str, right: int) -> Table:
    """Columns from number ``right`` on are numbers, or in words what belongs to them."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for number, title in enumerate(columns):
        table.add_column(title, justify="right" if number >= right else "left", no_wrap=True)
    return table


def _memory(dry: DryRank, planner: dict[tuple[str, str], Beside]) -> Table:
    table = _table("memory", f"peak, in {dry.peak.action}", "at most", "planner", right=1)
    for kind in Held:
        table.add_row(
            kind.value, format_bytes(dry.peak.held[kind]), format_bytes(dry.most[kind]), _planned(planner, kind.value)
        )
    table.add_row("all", format_bytes(dry.peak.bytes), format_bytes(dry.peak.bytes), _planned(planner, "peak"))
    return table


def _traffic(dry: DryRank, planner: dict[tuple[str, str], Beside]) -> Table:
    table = _table("sent", "what", "in", "link", "calls", "each", "all", "planner", right=4)
    for sent in dry.traffic:
        name = " ".join(sent.alike)
        table.add_row(
            _group(sent),
            f"{sent.kind} {sent.dtype}",
            sent.during,
            _LINKS[sent.link],
            f"{sent.count:,}",
            format_bytes(sent.bytes / sent.count),
            format_bytes(sent.bytes),
            _both(planner, name),
        )
    return table


def _group(sent: GroupTraffic) -> str:
    ranks = f"{len(sent.ranks):,} ranks" if len(sent.ranks) > 1 else "1 rank"
    return f"{sent.group} ({join_ranks(sent.ranks) if sent.group == 'pp' else ranks})"


def _flops(dry: DryRank, planner: dict[tuple[str, str], Beside]) -> Table:
    table = _table("computed", "FLOPs", "planner", right=1)
    for name, count in (("matrix products", dry.flops.products), ("attention", dry.flops.attention)):
        table.add_row(name, format_count(count), _planned(planner, name, unit="FLOPs"))
    if dry.flops.again:
        table.add_row("of both, again", format_count(dry.flops.again), _planned(planner, "made again", unit="FLOPs"))
    return table


def _planned(planner: dict[tuple[str, str], Beside], what: str, *, unit: str = "bytes") -> str:
    """The planner's number, if it is another one."""
    one = planner.get((what, unit))
    if one is None:
        return ""
    if one.found == one.planned:
        return "="
    number = format_bytes(one.planned) if unit == "bytes" else format_count(one.planned)
    return f"{number} ({_percent(one)})"


def _percent(one: Beside) -> str:
    if not one.planned:
        return "none"
    return f"{(one.planned - one.found) / max(one.found, 1):+.1%}"


def _both(planner: dict[tuple[str, str], Beside], name: str) -> str:
    """Of collectives that are alike, their number and bytes."""
    calls, num_bytes = planner.get((name, "calls")), planner.get((name, "bytes"))
    if calls is None or num_bytes is None:
        return ""
    if calls.found == calls.planned and num_bytes.found == num_bytes.planned:
        return "="
    return f"{calls.planned:,}, {format_bytes(num_bytes.planned)}"


def _differences(known: Sequence[Beside]) -> Iterator[str]:
    """A line for each thing of which the planner is wrong, or one that it is right."""
    apart = [one for one in known if not one.agrees]
    for one in apart:
        yield f"differs: {one.what}: {one.found:,} {one.unit}, and {one.planned:,} by the planner"
    if any(one.tolerance for one in apart):
        yield "The planner counts a GPU's attention, and no whole numbers, which are much of a small model's tensors."
    if not apart:
        yield f"The planner agrees in all of {len(known)} numbers."


def dry_run_json(plan: RunPlan, ranks: Sequence[tuple[DryRank, Sequence[Beside]]]) -> dict[str, Any]:
    """As docs/formats.md has it."""
    return {
        "name": plan.recipe.output.name,
        "num_ranks": plan.grid.size,
        "ranks": [_rank_json(dry, known) for dry, known in ranks],
    }


def _rank_json(dry: DryRank, known: Sequence[Beside]) -> dict[str, Any]:
    return {
        "rank": dry.rank,
        "at": dry.at._asdict(),
        "stages": list(dry.stages),
        "parameters": dry.parameters,
        "peak": {"bytes": dry.peak.bytes, "action": dry.peak.action, "held": _by_name(dry.peak.held)},
        "most": _by_name(dry.most),
        "kept": {"bytes": dry.kept.held[Held.ACTIVATIONS], "action": dry.kept.action},
        "traffic": [_traffic_json(sent) for sent in dry.traffic],
        "flops": {"products": dry.flops.products, "attention": dry.flops.attention, "again": dry.flops.again},
        "planner": [
            {
                "what": one.what,
                "unit": one.unit,
                "found": one.found,
                "planned": one.planned,
                "tolerance": one.tolerance,
                "agrees": one.agrees,
            }
            for one in known
        ],
        "seconds": dry.seconds,
    }


def _by_name(held: Any) -> dict[str, int]:
    return {kind.value: num_bytes for kind, num_bytes in held.items()}


def _traffic_json(sent: GroupTraffic) -> dict[str, Any]:
    return {
        "group": sent.group,
        "kind": sent.kind,
        "dtype": sent.dtype,
        "during": sent.during,
        "count": sent.count,
        "bytes": sent.bytes,
        "size": len(sent.ranks),
        "first": sent.ranks[0],
        "last": sent.ranks[-1],
        "link": sent.link,
    }
